"""Every residency policy at every budget under every routing policy: one labelled Dataset.

The module is not called ``sweep``: importing it would put a module where the package has the
function.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab._version import __version__
from bmoe_lab.errors import BmoeLabWarning, PolicyError, SettingsError, SweepError
from bmoe_lab.residency import ResidencyPolicy
from bmoe_lab.routing import RoutingPolicy
from bmoe_lab.simulation.budget_grid import Budgets
from bmoe_lab.simulation.evaluation import CellFailed, Report, Settings, evaluate_trace, refusal
from bmoe_lab.simulation.plan import Cell, Plan, TraceFacts, Traces, make_plan, opened, trace_facts
from bmoe_lab.simulation.tally import check_phases

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["sweep"]

_DIMS = ("trace", "residency", "budget", "routing")

# Units and meaning of what is swept, without the phase.
_MEANING = {
    "hit_rate": ("1", "lookups that found their expert resident"),
    "byte_hit_rate": ("1", "bytes looked up that were resident"),
    "lookups": ("1", "lookups: distinct experts per layer and evaluation"),
    "read_bytes": ("byte", "bytes read"),
    "read_bytes_per_token": ("byte", "bytes read per token"),
    "evictions": ("1", "experts evicted"),
    "resident_bytes_max": ("byte", "largest resident bytes after an evaluation"),
    "resident_bytes_mean": ("byte", "resident bytes after an evaluation, mean"),
    "drop_rate": ("1", "routed slots that the routing policy dropped"),
    "substitution_rate": ("1", "routed slots that the routing policy gave to another expert"),
    "weight_discarded_frac": ("1", "router weight whose expert did not run"),
}
_OF_ROUTING = ("drop_rate", "substitution_rate", "weight_discarded_frac")


def sweep(
    traces: Traces,
    *,
    residency: str | ResidencyPolicy | Sequence[str | ResidencyPolicy],
    budgets: Budgets | Mapping[str, Budgets],
    routing: RoutingPolicy | Sequence[RoutingPolicy | None] | None = (None,),
    phase: str | Sequence[str] = ("decode", "all"),
    seed: int = 0,
    client: Client | None = None,
    progress: bool = True,
    n_jobs: int | None = None,
) -> xr.Dataset:
    """Return what caches of many policies and sizes would have done with recorded routings.

    Every cell equals :func:`bmoe_lab.replay` of that combination from an empty cache, through the
    metrics of the same names. A combination that cannot be is NaN, and why is in the attribute
    ``notes``.

    Parameters
    ----------
    traces : xarray.Dataset, path, or dict of these
        Routing traces by name. A trace larger than memory is given as a path or as a lazily opened
        Dataset: it is read chunk by chunk, and only the experts that ran.
    residency : list of ResidencyPolicy or str
        Policies without a budget, or their names.
    budgets : list of int or str, or dict of these
        Sizes such as ``"2 GiB"``, or bytes; for each trace its own if a dict by trace.
        :func:`bmoe_lab.budgets` chooses sensible ones.
    routing : list of RoutingPolicy or None, default (None,)
        None: what ran stands. A policy acts on the router's own choice, *open loop*: it cannot
        change what later layers choose, so its cells are ``counterfactual``.
    phase : {"decode", "prefill", "draft", "all"} or list of these, default ("decode", "all")
        Phases counted; each figure has the phase in its name.
    seed : int, default 0
        Of routing policies with random parts.
    client : dask.distributed.Client, optional
        A cluster that does the work; results are the same bit for bit. Traces given as paths must
        be on a disk that the workers see.
    progress : bool, default True
        Show a bar.
    n_jobs : int, optional
        Threads; by default one per physical core. Not with `client`: its workers have their own.

    Returns
    -------
    xarray.Dataset
        Dims (trace, residency, budget, routing), all float64: ``hit_rate``, ``byte_hit_rate``,
        ``lookups``, ``read_bytes``, ``read_bytes_per_token``, ``evictions``,
        ``resident_bytes_max``, ``resident_bytes_mean``, each with ``_<phase>``; with a routing
        policy also ``drop_rate``, ``substitution_rate``, ``weight_discarded_frac``, NaN where none
        acts. Coordinates: ``budget`` in bytes, ascending; the labels of the policies;
        ``token_cycle_bytes`` (trace), int64; ``online`` and ``keeps_budget`` (residency) and
        ``counterfactual`` (routing), uint8. Attributes:
        ``complete``, ``source = "sweep"``, ``cache_start = "cold"``, ``seed``,
        ``bmoe_lab_version``, ``notes`` (JSON: what could not be, and why).

        Interrupted, it returns what is finished, the rest NaN, with ``complete = 0`` and a warning;
        an interrupt before anything is finished is raised.

    Raises
    ------
    SettingsError
        If a list is empty or names something twice, a budget is not a size, or `n_jobs` is given
        with `client`.
    UnknownNameError
        If a residency policy or phase is not known.
    PolicyError
        If no combination can be.
    SchemaError
        If a trace lacks ``expert_bytes``.
    SweepError
        If a policy raises: the exception is the cause, the message names the combination, and what
        was finished is in ``partial``.

    Warns
    -----
    BmoeLabWarning
        If combinations cannot be, a routing policy never changed anything, or the sweep was
        interrupted.

    See Also
    --------
    replay : One combination, as a trace.
    lru_curve : LRU at all budgets in one pass.

    Notes
    -----
    One lookup per distinct (layer, expert) and evaluation, as in :func:`bmoe_lab.metrics.hit_rate`.
    Without a routing policy nothing but ``expert_applied`` is read, in chunks of whole evaluations,
    and every (policy, budget) is one call of its compiled kernel per chunk, on threads. Routing
    policies need the trace in memory. Policies that know the future take a pass from the end
    and, where the trace is longer than a chunk, 4 bytes per row of a temporary file.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> trace = bl.testing.make_trace(n_token=64, n_layer=4, seed=0)
    >>> grid = sweep(trace, residency=["lru"], budgets=["100 KiB", "200 KiB"], progress=False)
    >>> dict(grid.sizes)
    {'trace': 1, 'residency': 1, 'budget': 2, 'routing': 1}
    >>> bool((grid.hit_rate_decode.diff("budget") >= 0).all())
    True
    """
    if client is not None and n_jobs is not None:
        raise SettingsError(
            f"n_jobs must be left out with a client; got {n_jobs!r}. Its workers have their own "
            "threads: distributed.Client(n_workers=..., threads_per_worker=...)."
        )
    plan = make_plan(traces, residency, budgets, routing)
    settings = Settings(phases=check_phases(phase), seed=_seed(seed), n_jobs=_jobs(n_jobs))
    result = _Result(plan, settings)
    with contextlib.ExitStack() as stack:
        traces_of = [_kept_open(stack, source) for source in plan.sources.values()]
        facts = [trace_facts(trace) for trace in traces_of]
        todo = [result.possible(index, facts[index]) for index in range(len(facts))]
        result.facts = facts
        if not any(todo):
            raise PolicyError(
                f"at least one combination must be possible; got none: {result.notes[0]['reason']}"
            )
        total = sum(len(cells) * fact.n_token for cells, fact in zip(todo, facts, strict=True))
        report = stack.enter_context(_reporting(progress, total, result))
        # Said once, by the sweep.
        stack.enter_context(_silent_policies())
        try:
            if client is None:
                for index, trace in enumerate(traces_of):
                    evaluate_trace(plan, trace, facts[index], todo[index], settings, report)
            else:
                from bmoe_lab.simulation.cluster import evaluate_on

                evaluate_on(client, plan, traces_of, facts, todo, settings, report)
        except KeyboardInterrupt:
            if not result.n_done:
                raise
            result.stopped = f"interrupted: {result.n_done} of {result.n_todo} cells are finished"
        except CellFailed as failure:
            what = f"{type(failure.cause).__name__}: {failure.cause}"
            result.stopped = f"failed at {plan.label(failure.cell)}: {what}"
            raise SweepError(
                f"sweep must get through every combination; got {what} at "
                f"{plan.label(failure.cell)}. The {result.n_done} finished cells are in .partial "
                "of this exception.",
                result.dataset(),
            ) from failure.cause
    result.warn()
    return result.dataset()


class _Result:
    """The result as it fills."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan, self.settings = plan, settings
        self.facts: list[TraceFacts] = []
        # Unknown until finished, so that a sweep cut short has all its variables too.
        acts = any(policy is not None for policy in plan.routing.values())
        self.values: dict[str, npt.NDArray[np.float64]] = {
            f"{name}_{phase}": np.full(plan.shape, np.nan)
            for phase in settings.phases
            for name in _MEANING
            if acts or name not in _OF_ROUTING
        }
        self.notes: list[dict[str, Any]] = []
        self.never_fired: set[int] = set(range(len(plan.routing)))
        self.n_todo = 0
        self._done: set[Cell] = set()
        self.stopped = ""

    def possible(self, trace: int, facts: TraceFacts) -> list[Cell]:
        """Return the cells of a trace that can be evaluated, and note why others cannot."""
        cells = []
        said: dict[str, dict[str, Any]] = {}
        for cell in self.plan.cells(trace):
            reason = refusal(self.plan, cell, facts)
            if reason is None:
                cells.append(cell)
            elif reason in said:
                said[reason]["budgets"].append(int(self.plan.budgets[cell.budget]))
            else:
                said[reason] = {
                    "trace": list(self.plan.sources)[trace],
                    "residency": list(self.plan.residency)[cell.residency],
                    "routing": list(self.plan.routing)[cell.routing],
                    "budgets": [int(self.plan.budgets[cell.budget])],
                    "reason": reason,
                }
        self.notes += said.values()
        self.n_todo += len(cells)
        return cells

    def add(self, cell: Cell, values: Mapping[str, float], fired: bool) -> None:
        """Take the figures of a finished cell."""
        for name, value in values.items():
            self.values[name][cell.index] = value
        if fired:
            self.never_fired.discard(cell.routing)
        self._done.add(cell)

    @property
    def n_done(self) -> int:
        """Number of finished cells."""
        return len(self._done)

    def warn(self) -> None:
        """Say what a reader of the figures must know."""
        if self.stopped:
            warnings.warn(
                f"sweep {self.stopped}; the others are NaN.", BmoeLabWarning, stacklevel=3
            )
        if self.notes:
            first = self.notes[0]
            warnings.warn(
                f"{len(self.notes)} combinations cannot be and are NaN, the first is residency "
                f"{first['residency']!r} with routing {first['routing']!r}: {first['reason']} "
                "All are in the attribute 'notes'.",
                BmoeLabWarning,
                stacklevel=3,
            )
        for index in sorted(self.never_fired) if not self.stopped else ():
            policy = list(self.plan.routing.values())[index]
            if policy is not None and not policy.lossless and self._has_cells(index):
                warnings.warn(
                    f"{policy!r} changed nothing in this sweep. Its figures are those of the "
                    "router's own choice.",
                    BmoeLabWarning,
                    stacklevel=3,
                )

    def _has_cells(self, routing: int) -> bool:
        return any(not np.isnan(v[..., routing]).all() for v in self.values.values())

    def dataset(self) -> xr.Dataset:
        """Return the figures so far, labelled."""
        plan = self.plan
        order = [f"{name}_{phase}" for phase in self.settings.phases for name in _MEANING]
        data = {}
        for full in order:
            if full in self.values:
                name, _, phase = full.rpartition("_")
                units, meaning = _MEANING[name]
                attrs = {"units": units, "long_name": f"{meaning} ({phase})"}
                data[full] = (_DIMS, self.values[full], attrs)
        lossy = [policy is not None and not policy.lossless for policy in plan.routing.values()]
        coords: dict[str, Any] = {
            "trace": ("trace", np.array(list(plan.sources)), {"long_name": "trace"}),
            "residency": (
                "residency", np.array(list(plan.residency)), {"long_name": "residency policy"}
            ),
            "budget": (
                "budget",
                plan.budgets,
                {"units": "byte", "long_name": "bytes allowed to resident experts"},
            ),
            "routing": ("routing", np.array(list(plan.routing)), {"long_name": "routing policy"}),
            "token_cycle_bytes": (
                "trace",
                np.array([facts.token_cycle_bytes for facts in self.facts], np.int64),
                {"units": "byte", "long_name": "expert bytes that a token needs"},
            ),
            "online": (
                "residency",
                np.array([policy.online for policy in plan.residency.values()], np.uint8),
                {"long_name": "0 if the residency policy knows the future"},
            ),
            "keeps_budget": (
                "residency",
                np.array([policy.keeps_budget for policy in plan.residency.values()], np.uint8),
                {"long_name": "0 if the residency policy may hold more than the budget"},
            ),
            "counterfactual": (
                "routing",
                np.array(lossy, np.uint8),
                {"long_name": "1 if a replayed policy could not act on the model"},
            ),
        }  # fmt: skip
        told: dict[str, Any] = {
            "source": "sweep",
            "complete": int(not self.stopped),
            "cache_start": "cold",
            "seed": self.settings.seed,
            "bmoe_lab_version": __version__,
            "notes": json.dumps(self.notes),
        }
        if self.stopped:
            told["stopped"] = self.stopped
        return xr.Dataset(data, coords, told)


def _kept_open(stack: contextlib.ExitStack, source: xr.Dataset | Path) -> xr.Dataset:
    trace = opened(source)
    if isinstance(source, Path):
        stack.callback(trace.close)
    return trace


@contextlib.contextmanager
def _silent_policies() -> Iterator[None]:
    from bmoe_lab.errors import PolicyNeverFiredWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyNeverFiredWarning)
        yield


@contextlib.contextmanager
def _reporting(progress: bool, total: int, result: _Result) -> Iterator[Report]:
    """Yield what takes finished cells and counts tokens served."""
    if not progress:
        yield Report(done=result.add, advance=lambda n_token: None)
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="token", unit_scale=True, leave=False, delay=0.5) as bar:

        def advance(n_token: int) -> None:
            bar.update(n_token)

        yield Report(done=result.add, advance=advance)


def _seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise SettingsError(f"seed must be a whole number; got {seed!r}.")
    return int(seed)


def _jobs(n_jobs: object) -> int:
    if n_jobs is None:
        from bmoe_lab.cores import physical_cores

        return physical_cores()
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or n_jobs < 1:
        raise SettingsError(f"n_jobs must be a whole number of at least 1; got {n_jobs!r}.")
    return n_jobs
