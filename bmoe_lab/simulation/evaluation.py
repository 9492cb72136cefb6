"""The cells of a sweep over one trace, evaluated on threads.

Cells without a routing policy share the trace's loads: chunk after chunk is read once and served by
every cache. Cells with one are replays.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import BmoeLabError
from bmoe_lab.schema import Phase
from bmoe_lab.simulation.chunked import CacheRun, Chunk, chunk_tokens, chunks, segment_counts
from bmoe_lab.simulation.plan import Cell, Plan, TraceFacts
from bmoe_lab.simulation.replaying import replay
from bmoe_lab.simulation.serving import counts_stream
from bmoe_lab.simulation.tally import N_PHASE

__all__ = ["CellFailed", "Report", "Settings", "evaluate_trace", "refusal"]


@dataclass(frozen=True)
class Settings:
    """How cells are evaluated.

    Attributes
    ----------
    phases : tuple of str
        Phases counted.
    seed : int
        Of routing policies.
    n_jobs : int
        Threads.
    """

    phases: tuple[str, ...]
    seed: int
    n_jobs: int


@dataclass(frozen=True)
class Report:
    """Where results go as they come; called on the thread that evaluates.

    Attributes
    ----------
    done : callable
        ``done(cell, values, fired)``: a cell is finished; ``fired``: its routing policy changed
        something.
    advance : callable
        ``advance(n_token)``: so many tokens were served in one cell.
    """

    done: Callable[[Cell, dict[str, float], bool], None]
    advance: Callable[[int], None]


class CellFailed(Exception):
    """A policy raised in one cell; the others that had begun are finished."""

    def __init__(self, cell: Cell, cause: BaseException) -> None:
        super().__init__(cell, cause)
        self.cell, self.cause = cell, cause


def refusal(plan: Plan, cell: Cell, facts: TraceFacts) -> str | None:
    """Return why a combination cannot be; None if it can."""
    policy, routing = plan.policies(cell)
    try:
        assert policy.budget_bytes is not None
        policy.start(facts.key_bytes, policy.budget_bytes, n_layer=facts.n_layer)
    except BmoeLabError as error:
        return str(error)
    if routing is None:
        return None
    if not policy.online and not routing.lossless:
        return (
            f"{list(plan.residency)[cell.residency]} needs to know the future, and {routing!r} "
            "changes what is asked for."
        )
    try:
        routing.check(replace(facts.routing, cache_budget=policy.budget_bytes))
    except BmoeLabError as error:
        return str(error)
    if "scores" in routing.needs and not facts.score_kind_known:
        return (
            f"{routing!r} must know whether scores are the output of a softmax, and the trace has "
            "no 'score_is_softmax'."
        )
    return None


def evaluate_trace(
    plan: Plan,
    trace: xr.Dataset,
    facts: TraceFacts,
    cells: Sequence[Cell],
    settings: Settings,
    report: Report,
) -> None:
    """Evaluate cells of one trace.

    Raises
    ------
    CellFailed
        If a policy raises.
    KeyboardInterrupt
        After the calls that had begun are over; their results are reported.
    """
    plain = [cell for cell in cells if plan.policies(cell)[1] is None]
    routed = [cell for cell in cells if plan.policies(cell)[1] is not None]
    with _pool(settings.n_jobs) as pool:
        for group in _groups(plan, trace, plain):
            _serve_group(plan, trace, facts, group, settings, report, pool)
        if routed:
            _replay_cells(plan, trace.compute(), facts, routed, settings, report, pool)


def _groups(plan: Plan, trace: xr.Dataset, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield cells that pass through the trace together."""
    whole = _is_whole(trace)
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        policy, _ = plan.policies(cell)
        # One pass over a long trace per policy: an interrupt then costs that policy only.
        key = policy.needs_future if whole else cell.residency
        groups.setdefault(key, []).append(cell)
    yield from groups.values()


def _is_whole(trace: xr.Dataset) -> bool:
    return trace.sizes["token"] <= chunk_tokens(trace)


def _serve_group(
    plan: Plan,
    trace: xr.Dataset,
    facts: TraceFacts,
    cells: list[Cell],
    settings: Settings,
    report: Report,
    pool: ThreadPoolExecutor,
) -> None:
    n_load = facts.n_token * facts.n_layer
    policies = {cell: plan.policies(cell)[0] for cell in cells}
    future = policies[cells[0]].needs_future
    counts = None
    # In one piece it counts the stream itself.
    if not _is_whole(trace) and any(map(counts_stream, policies.values())):
        counts = segment_counts(trace)
    runs = {
        cell: CacheRun(
            policy,
            facts.key_bytes,
            facts.n_layer,
            n_load,
            counts if counts_stream(policy) else None,
        )
        for cell, policy in policies.items()
    }
    n_token = np.zeros(N_PHASE, np.int64)
    for chunk in chunks(trace, future=future):
        n_token += chunk.n_token
        last = chunk.end == facts.n_token

        def finish(
            cell: Cell, _: object, last: bool = last, chunk: Chunk = chunk, n: Any = n_token
        ) -> None:
            report.advance(chunk.end - chunk.begin)
            if last:
                report.done(cell, runs[cell].tally.values(settings.phases, n), False)

        _run(pool, {cell: (run.feed, chunk) for cell, run in runs.items()}, finish)


def _replay_cells(
    plan: Plan,
    trace: xr.Dataset,
    facts: TraceFacts,
    cells: list[Cell],
    settings: Settings,
    report: Report,
    pool: ThreadPoolExecutor,
) -> None:
    def one(cell: Cell) -> tuple[dict[str, float], bool]:
        policy, routing = plan.policies(cell)
        result = replay(trace, residency=policy, routing=routing, start="cold", seed=settings.seed)
        return _figures(result, settings.phases), bool(result.attrs.get("policy_fired"))

    def finish(cell: Cell, found: tuple[dict[str, float], bool]) -> None:
        report.advance(facts.n_token)
        report.done(cell, *found)

    _run(pool, {cell: (one, cell) for cell in cells}, finish)


def _run(
    pool: ThreadPoolExecutor,
    calls: dict[Cell, tuple[Callable[..., Any], Any]],
    finish: Callable[[Cell, Any], None],
) -> None:
    """Make one call per cell; on an interrupt or error finish those that have begun."""
    cell_of: dict[Future[Any], Cell] = {
        pool.submit(function, argument): cell for cell, (function, argument) in calls.items()
    }
    left = set(cell_of)
    try:
        for future in as_completed(cell_of):
            failed = future.exception()
            if isinstance(failed, Exception):
                raise CellFailed(cell_of[future], failed)
            finish(cell_of[future], future.result())
            # Only now: an interrupt may come at any line, and then it is finished once more.
            left.discard(future)
    except BaseException:
        for future in left:
            future.cancel()
        for future in left:
            if not future.cancelled() and future.exception() is None:
                finish(cell_of[future], future.result())
        raise


@contextlib.contextmanager
def _pool(n_jobs: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(n_jobs, thread_name_prefix="bmoe-sweep")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _figures(result: xr.Dataset, phases: Sequence[str]) -> dict[str, float]:
    """Return the figures of a replay under their names in a sweep."""
    totals = json.loads(result.attrs["replay_totals"])
    held = result["cache_resident_bytes"].values
    number = result["phase"].values
    found: dict[str, float] = {}
    for name in phases:
        parts = [part for phase, part in totals.items() if name in (phase, "all")]
        here = held[(number == Phase[name]) if name != "all" else slice(None)]
        here = here[~np.isnan(here)]
        known: list[Callable[..., xr.DataArray]] = [
            metrics.hit_rate,
            metrics.byte_hit_rate,
            metrics.read_bytes_per_token,
            metrics.drop_rate,
            metrics.substitution_rate,
        ]
        if "weight_chosen" in result.variables:
            known.append(metrics.weight_discarded_frac)
        for metric in known:
            found[f"{metric.__name__}_{name}"] = float(metric(result, phase=name))
        for total in ("lookups", "read_bytes", "evictions"):
            counted = float(sum(part[total] for part in parts))
            found[f"{total}_{name}"] = counted if parts else np.nan
        found[f"resident_bytes_max_{name}"] = float(here.max()) if here.size else np.nan
        found[f"resident_bytes_mean_{name}"] = (
            sum(map(int, here.tolist())) / here.size if here.size else np.nan
        )
    return found
