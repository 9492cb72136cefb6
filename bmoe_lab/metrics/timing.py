"""Where the time of a run went, as far as it was measured."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    PhaseName,
    _check_by,
    _evaluation_costs,
    _evaluation_starts,
    _labelled,
    _phase_rows,
    _result,
    _values,
)

__all__ = [
    "evictions_per_token",
    "major_faults_per_token",
    "read_bandwidth",
    "resident_bytes",
    "time_split",
]

# Part to the cost that holds it, or the engine's own column with its unit in seconds.
_PARTS = {
    "read": (("io_s", 1.0), ("engine_io_ms", 1e-3)),
    "wait": (("stall_s", 1.0), ("engine_stall_ms", 1e-3)),
    "manage": (("manage_s", 1.0),),
    "callback": (("callback_s", 1.0),),
    "compute": (("compute_s", 1.0), ("engine_compute_ms", 1e-3)),
}
_BETWEEN = (("between_s", 1.0), ("engine_loop_overhead_ms", 1e-3))

# Times that were rounded to a microsecond each may add up to a little more than the whole.
_TOLERANCE = 1e-3


def time_split(trace: xr.Dataset, *, phase: PhaseName = "decode") -> xr.DataArray:
    """Return how the wall time of graph evaluations splits into its measured parts.

    A part that was not recorded is NaN, never 0. What the recorded parts leave is ``rest``; in most
    traces that is the computing, and with it everything nobody measured: a major fault looks like
    computing.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``wall_s`` and, where present, ``io_s``, ``stall_s``, ``manage_s``, ``callback_s``,
        ``compute_s``, ``between_s``, float64 of shape (token,): per evaluation, on its first token.
        Imported traces hold some of them as columns of their engine (``engine_stall_ms``).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Evaluations counted: those whose wall time and recorded parts are known.

    Returns
    -------
    xarray.DataArray
        Shape (part,), float64, unit "1", in shares of the wall time; named ``time_split_<phase>``.
        ``read``: the calling side waited for reads. ``wait``: compute threads waited for experts.
        ``manage``: lookup, eviction, bookkeeping. ``callback``, ``compute``: as recorded. ``rest``:
        one less all of these. ``between``: time between evaluations, which is no part of the wall
        time and of that one. All NaN if no evaluation is known.

    Raises
    ------
    SchemaError
        If ``wall_s`` is absent.

    Notes
    -----
    Where compute threads waited, reads overlapped computing: the time of reads is then the busy
    time of the lanes, may exceed the wall time and is no part of it, so ``read`` is NaN; so it is
    where the parts would add up to more than the whole. :func:`read_bandwidth` uses it. A recorded
    ``compute`` may itself be a residual (BigMoeOnEdge's is). ``wait`` does not compare between
    engine versions: BigMoeOnEdge took the mean over threads before 0.22 and takes the union since.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> split = time_split(make_trace(n_token=40, n_layer=2, seed=0))
    >>> split.part.values[split.isnull().values].tolist(), round(float(split.sum()), 9)
    (['wait', 'compute', 'between'], 1.0)
    """
    rows = _phase_rows(trace, phase)
    wall, _ = _evaluation_costs(trace, "wall_s", rows)
    known = ~np.isnan(wall)
    costs: dict[str, npt.NDArray[np.float64]] = {}
    for part, names in _PARTS.items():
        seconds = _seconds(trace, names, rows)
        if seconds is not None:
            costs[part] = seconds
            known &= ~np.isnan(seconds)
    total = float(wall[known].sum())
    shares = dict.fromkeys([*_PARTS, "rest", "between"], np.nan)
    if total > 0:
        found = {part: float(values[known].sum()) / total for part, values in costs.items()}
        if found.get("wait", 0.0) > 0 or sum(found.values()) > 1 + _TOLERANCE:
            found.pop("read", None)
        shares.update(found, rest=1.0 - sum(found.values()))
    between = _seconds(trace, _BETWEEN, rows)
    if between is not None:
        both = ~np.isnan(between) & ~np.isnan(wall)
        below = float(wall[both].sum())
        shares["between"] = float(between[both].sum()) / below if below > 0 else np.nan
    return _labelled(
        np.array(list(shares.values())),
        ("part",),
        {"part": list(shares)},
        phase,
        "time_split",
        "share of the wall time of evaluations",
    )


def _seconds(
    trace: xr.Dataset, names: tuple[tuple[str, float], ...], rows: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64] | None:
    """Return the first of `names` that was measured in `rows`, per evaluation."""
    for name, unit in names:
        # An engine's column that no number format gives back is kept as text.
        if name in trace.variables and trace[name].dtype.kind == "f":
            values, _ = _evaluation_costs(trace, name, rows)
            if not np.isnan(values).all():
                return values * unit
    return None


def read_bandwidth(trace: xr.Dataset, *, phase: PhaseName = "decode") -> xr.DataArray:
    """Return the expert bytes read per second of reading.

    Compare it with a probe of the same drive at the same request size, not with its data sheet.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``read_bytes``, uint32 of shape (token, layer, slot), and ``io_s``, float64 of shape
        (token,): per evaluation, on its first token. Imported traces have ``engine_read_bytes`` and
        ``engine_io_ms`` instead, (token,).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Evaluations counted: those whose reading time is known.

    Returns
    -------
    xarray.DataArray
        Scalar, float64, unit "byte s-1"; named ``read_bandwidth_<phase>``. NaN if no time is known.

    Raises
    ------
    SchemaError
        If there are no bytes or no time of reading.

    Notes
    -----
    ``sum of read_bytes / sum of io_s``. Under overlap the time adds up the busy time of all lanes:
    the result is then the bandwidth of one lane, and the drive gives up to lanes times as much.
    Bytes are those of experts; only the engine's own count holds the blocks that O_DIRECT rounds
    out.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> round(float(read_bandwidth(make_trace(n_token=40, n_layer=2, seed=0))))  # as it was made
    1000000000
    """
    rows = _phase_rows(trace, phase)
    if "io_s" not in trace.variables and "engine_io_ms" in trace.variables:
        seconds = _evaluation_costs(trace, "engine_io_ms", rows)[0] / 1000
        read, _ = _evaluation_costs(trace, "engine_read_bytes", rows)
    else:
        seconds, _ = _evaluation_costs(trace, "io_s", rows)
        start = _evaluation_starts(trace)
        read = _values(trace, "read_bytes").sum(axis=(1, 2), dtype=np.float64)
        read = np.add.reduceat(read, start)[rows[start]] if start.size else read
    known = ~np.isnan(seconds) & ~np.isnan(read)
    total = float(seconds[known].sum())
    value = float(read[known].sum()) / total if total > 0 else np.nan
    return _result(
        trace,
        np.float64(value),
        rows,
        None,
        phase,
        "read_bandwidth",
        "expert bytes read per second of reading",
        "byte s-1",
    )


def major_faults_per_token(
    trace: xr.Dataset, *, by: Literal["token"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the major page faults of the process per token.

    Each one is a read that no cache metric knows. A residency policy may raise its hit rate and
    lose time here, by churning pages.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``major_faults``, float64 of shape (token,): per evaluation, on its first token.
    by : {"token"}, optional
        Dimension kept: the faults of each evaluation on its first token, NaN on the others.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Evaluations counted: those whose faults are known.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``major_faults_per_token_<phase>``. NaN if
        nothing is known.

    Raises
    ------
    SchemaError
        If ``major_faults`` is absent.

    Notes
    -----
    ``sum of major_faults / tokens`` over the evaluations that know theirs.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(major_faults_per_token(make_trace(n_token=40, n_layer=2, seed=0))) >= 0
    True
    """
    return _cost_per_token(
        trace, "major_faults", by, phase, "major_faults_per_token", "major page faults per token"
    )


def evictions_per_token(
    trace: xr.Dataset, *, by: Literal["token"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the experts evicted per token.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``evictions``, float64 of shape (token,): per evaluation, on its first token.
    by, phase
        As for :func:`major_faults_per_token`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``evictions_per_token_<phase>``. NaN if
        nothing is known.

    Raises
    ------
    SchemaError
        If ``evictions`` is absent.

    Notes
    -----
    In the steady state of a full cache as many are evicted as are read; :func:`rereads_per_token`
    says how many of them were wanted again.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(evictions_per_token(make_trace(n_token=40, n_layer=2, budget_frac=1.0, seed=0)))
    0.0
    """
    return _cost_per_token(
        trace, "evictions", by, phase, "evictions_per_token", "experts evicted per token"
    )


def _cost_per_token(
    trace: xr.Dataset, variable: str, by: str | None, phase: str, name: str, long_name: str
) -> xr.DataArray:
    _check_by(by, ["token"])
    rows = _phase_rows(trace, phase)
    values, size = _evaluation_costs(trace, variable, rows)
    if by == "token":
        result: npt.NDArray[np.float64] | np.float64 = _on_first_tokens(trace, rows, values)
    else:
        known = ~np.isnan(values)
        n_token = int(size[known].sum())
        result = np.float64(values[known].sum() / n_token if n_token else np.nan)
    return _result(trace, result, rows, by, phase, name, long_name, "1")


def _on_first_tokens(
    trace: xr.Dataset, rows: npt.NDArray[np.bool_], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    start = _evaluation_starts(trace)
    spread = np.full(rows.size, np.nan)
    spread[start[rows[start]]] = values
    return spread[rows]


def resident_bytes(
    trace: xr.Dataset,
    *,
    of: Literal["mean", "max", "last"] = "mean",
    by: Literal["token"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the bytes of experts that the cache held after evaluations.

    Read it beside every hit rate: a policy may hold more than its budget. Within an evaluation the
    cache may have held more.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``cache_resident_bytes``, float64 of shape (token,): per evaluation, on its first
        token.
    of : {"mean", "max", "last"}, default "mean"
        Which of the evaluations' values; of no effect with ``by="token"``.
    by : {"token"}, optional
        Dimension kept: the value of each evaluation on its first token, NaN on the others.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Evaluations counted: those whose value is known.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "byte"; named ``resident_bytes_<phase>``. NaN if
        nothing is known.

    Raises
    ------
    SchemaError
        If ``cache_resident_bytes`` is absent.

    Notes
    -----
    One value per evaluation, whatever its number of tokens: the mean is over evaluations.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=40, n_layer=2, seed=0)
    >>> float(resident_bytes(trace, of="max")) <= trace.attrs["cache_budget_bytes"]
    True
    """
    _check_by(by, ["token"])
    if of not in ("mean", "max", "last"):
        raise unknown_name("of", of, ["last", "max", "mean"])
    rows = _phase_rows(trace, phase)
    values, _ = _evaluation_costs(trace, "cache_resident_bytes", rows)
    known = values[~np.isnan(values)]
    if by == "token":
        result: npt.NDArray[np.float64] | np.float64 = _on_first_tokens(trace, rows, values)
    elif known.size == 0:
        result = np.float64(np.nan)
    else:
        result = np.float64({"mean": known.mean(), "max": known.max(), "last": known[-1]}[of])
    return _result(
        trace, result, rows, by, phase, "resident_bytes", f"bytes of resident experts, {of}", "byte"
    )
