"""A sweep's cells on a dask cluster: the same evaluation, in the workers' processes.

Small traces travel once, scattered to all workers. What is on disk or in dask arrays travels as a
reference and is read by the workers, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.simulation.evaluation import CellFailed, Report, Settings, evaluate_trace
from bmoe_lab.simulation.plan import Cell, Plan, TraceFacts, opened, trace_facts

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["evaluate_on"]

#: Values of a finished cell, and whether its routing policy changed anything.
Found = tuple[Cell, dict[str, float], bool]

# What of a trace a sweep may read.
_READ = (
    "expert_chosen", "weight_chosen", "expert_applied", "weight_applied", "action", "residency",
    "read_bytes", "router_score", "score_is_softmax", "expert_bytes", "n_expert_used",
    "turn", "phase", "batch", "position", "block", "group",
)  # fmt: skip


def evaluate_on(
    client: Client,
    plan: Plan,
    traces: Sequence[xr.Dataset],
    facts: Sequence[TraceFacts],
    cells: Sequence[Sequence[Cell]],
    settings: Settings,
    report: Report,
) -> None:
    """Evaluate the cells of all traces on a cluster.

    Parameters
    ----------
    client : dask.distributed.Client
        Connected.
    plan, settings, report
        As for :func:`bmoe_lab.simulation.evaluation.evaluate_trace`.
    traces, facts, cells : sequence
        One entry per trace.

    Raises
    ------
    SettingsError
        If dask is not installed, or `client` is none of its clients or has no workers.
    CellFailed
        If a policy raises.
    KeyboardInterrupt
        With what was finished reported; what is not is cancelled.
    """
    try:
        from distributed import Client as DaskClient
        from distributed import as_completed
    except ImportError as error:
        raise SettingsError(
            "client must be a dask.distributed.Client, and dask is not installed. "
            "pip install 'bmoe-lab[dask]'."
        ) from error
    if not isinstance(client, DaskClient):
        raise SettingsError(
            f"client must be a dask.distributed.Client; got {client!r}. "
            "For example distributed.Client(n_workers=2, threads_per_worker=1)."
        )
    cluster: Any = client  # dask publishes no types for these
    completed: Any = as_completed
    n_thread = sum(cluster.nthreads().values())
    if not n_thread:
        raise SettingsError(f"client must have workers; got {client!r}, which has none.")
    # One thread per task: dask runs as many tasks at once as its workers have threads.
    one = Settings(settings.phases, settings.seed, 1)
    payloads = [
        _payload(cluster, source, trace)
        for source, trace in zip(plan.sources.values(), traces, strict=True)
    ]
    n_token: dict[Any, int] = {}
    for payload, fact, asked in zip(payloads, facts, cells, strict=True):
        for task in _tasks(asked, n_thread):
            # Not pure: dask must not take two tasks of equal policies for one.
            future = cluster.submit(_evaluate, payload, plan_without(plan), task, one, pure=False)
            n_token[future] = fact.n_token
    left = set(n_token)
    try:
        for future in completed(list(n_token)):
            left.discard(future)
            _take(future.result(), n_token[future], report)
    except BaseException:
        cluster.cancel(list(left))
        for future in left:
            if future.status == "finished":
                found, _ = future.result()
                _take((found, None), n_token[future], report)
        raise


def plan_without(plan: Plan) -> Plan:
    """Return a plan without its traces, which travel apart."""
    return Plan(
        dict.fromkeys(plan.sources, Path()),
        plan.residency,
        plan.routing,
        plan.budgets,
        plan.wanted,
    )


def _take(
    result: tuple[list[Found], tuple[Cell, BaseException] | None], n_token: int, report: Report
) -> None:
    found, failure = result
    for cell, values, fired in found:
        report.advance(n_token)
        report.done(cell, values, fired)
    if failure is not None:
        raise CellFailed(*failure)


def _payload(client: Any, source: xr.Dataset | Path, trace: xr.Dataset) -> Any:
    """Return what a worker makes the trace of: a path, or the packed Dataset."""
    if isinstance(source, Path):
        return source.absolute()
    import cloudpickle  # type: ignore[import-untyped]  # it publishes no types

    needed = trace[[name for name in _READ if name in trace.variables]].drop_encoding()
    # Packed by hand: dask would look into dask arrays and compute them on the cluster.
    packed = cloudpickle.dumps(needed)
    return client.scatter(packed, broadcast=True, hash=False)


def _tasks(cells: Sequence[Cell], n_thread: int) -> list[list[Cell]]:
    """Split cells by policies, and further until every thread has a task."""
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.routing, cell.residency), []).append(cell)
    parts = -(-n_thread // max(1, len(groups)))
    return [part for group in groups.values() for k in range(parts) if (part := group[k::parts])]


def _evaluate(
    payload: Any, plan: Plan, cells: list[Cell], settings: Settings
) -> tuple[list[Found], tuple[Cell, BaseException] | None]:
    """Evaluate one task on a worker; a policy's exception comes back beside what was finished."""
    import warnings

    import dask

    from bmoe_lab.errors import PolicyNeverFiredWarning

    found: list[Found] = []
    report = Report(
        done=lambda cell, values, fired: found.append((cell, values, fired)),
        advance=lambda n_token: None,
    )
    # Lazy arrays are read here, not sent back to the scheduler that this task came from.
    with dask.config.set(scheduler="synchronous"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyNeverFiredWarning)
        if isinstance(payload, Path):
            trace = opened(payload)
        else:
            import cloudpickle

            trace = cloudpickle.loads(payload)
        try:
            evaluate_trace(plan, trace, trace_facts(trace), cells, settings, report)
        except CellFailed as failure:
            return found, (failure.cell, failure.cause)
        finally:
            trace.close()
    return found, None
