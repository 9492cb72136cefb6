"""What the cache answered: hits, misses, reads of what it had before."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    _DIMS,
    Bools,
    By,
    PhaseName,
    _any_slot,
    _asked,
    _check_at_least,
    _coords,
    _evaluation_starts,
    _per_token,
    _phase_rows,
    _ratio,
    _result,
    _sum,
    _values,
)
from bmoe_lab.schema import Residency

__all__ = [
    "byte_hit_rate",
    "first_of_load",
    "hit_rate",
    "load_count",
    "rereads_per_token",
    "speculative_hit_rate",
]


def hit_rate(
    trace: xr.Dataset,
    *,
    by: By | None = None,
    per: Literal["lookup", "routing"] = "lookup",
    phase: PhaseName = "decode",
    warmup: int = 0,
) -> xr.DataArray:
    """Return the fraction of lookups that found their expert resident.

    One lookup per distinct (layer, expert) per graph evaluation, as a cache sees it. Dropped slots
    ask for nothing: a policy that drops misses raises this ratio, so read
    :func:`read_bytes_per_token` beside it. A better ratio is not more speed either: see
    :func:`time_split` and :func:`major_faults_per_token`.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``residency``, ``expert_applied``, ``action`` of shape (token, layer, slot) and the
        coordinates ``turn``, ``batch``, ``phase``.
    by : {"token", "layer", "slot"}, optional
        Dimension kept. A lookup belongs to the first row that asks, in token-major order.
    per : {"lookup", "routing"}, default "lookup"
        ``"routing"`` counts every row, repeats within a prefill included.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.
    warmup : int, default 0
        Tokens of the phase left out at its start, while the cache fills; in every turn, if the
        trace says ``cold_turns``.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``hit_rate_<phase>``, with
        ``_after_<warmup>`` if tokens were left out. NaN where nothing was looked up.

    Raises
    ------
    SchemaError
        If ``residency`` is absent.
    UnknownNameError
        If `by`, `per` or `phase` is not one of the names above.
    SettingsError
        If `warmup` is negative.

    Notes
    -----
    A speculative hit is a hit. Residency is judged before the evaluation loads anything, so every
    row of a cold prefill is a miss. Definition: BigMoeOnEdge's cache replay (docs/bench-data,
    2026-07-20), which this reproduces on its recorded traces.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, seed=0)
    >>> dict(hit_rate(trace, by="layer").sizes)
    {'layer': 2}
    """
    if per not in ("lookup", "routing"):
        raise unknown_name("per", per, ["lookup", "routing"])
    counted = _asked(trace) if per == "routing" else first_of_load(trace).values
    rows = _warm_rows(trace, phase, warmup)
    return _ratio(
        trace,
        counted & _hit(trace),
        counted,
        by,
        f"{phase}_after_{warmup}" if warmup else phase,
        "hit_rate",
        "lookups that found their expert resident",
        rows=rows,
    )


def byte_hit_rate(
    trace: xr.Dataset,
    *,
    by: By | None = None,
    phase: PhaseName = "decode",
    warmup: int = 0,
) -> xr.DataArray:
    """Return the fraction of the bytes looked up that were resident.

    Differs from :func:`hit_rate` where layers have experts of different sizes. One minus it is the
    share of the demand that was read. Dropped slots ask for nothing, as there.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`hit_rate`, and ``expert_bytes`` of shape (layer,).
    by, phase, warmup
        As for :func:`hit_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``byte_hit_rate_<phase>``, with
        ``_after_<warmup>`` if tokens were left out. NaN where nothing was looked up.

    Raises
    ------
    SchemaError
        If ``residency`` or ``expert_bytes`` is absent.

    Notes
    -----
    ``sum of bytes over hits / sum of bytes over lookups``, lookups as in :func:`hit_rate`.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=40, n_layer=2, seed=0)
    >>> bool(byte_hit_rate(trace) != hit_rate(trace))
    True
    """
    size = _values(trace, "expert_bytes").astype(np.float64)[None, :, None]
    counted = first_of_load(trace).values
    return _ratio(
        trace,
        (counted & _hit(trace)) * size,
        counted * size,
        by,
        f"{phase}_after_{warmup}" if warmup else phase,
        "byte_hit_rate",
        "bytes looked up that were resident",
        rows=_warm_rows(trace, phase, warmup),
    )


def speculative_hit_rate(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the fraction of lookups that a prefetch had answered in advance.

    Part of :func:`hit_rate`. It says nothing about the guesses that were wrong: their bytes are in
    no slot of a trace.

    Parameters
    ----------
    trace, by, phase
        As for :func:`hit_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``speculative_hit_rate_<phase>``.
        NaN where nothing was looked up.

    Raises
    ------
    SchemaError
        If ``residency`` is absent.

    Notes
    -----
    Lookups with ``residency == hit_speculative`` over all lookups. Source: the cache view of
    BigMoeOnEdge's trace analysis.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(speculative_hit_rate(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    counted = first_of_load(trace).values
    guessed = counted & (_values(trace, "residency") == Residency.hit_speculative.value)
    return _ratio(
        trace,
        guessed,
        counted,
        by,
        phase,
        "speculative_hit_rate",
        "lookups that a prefetch had answered",
    )


def rereads_per_token(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the reads per token of experts that had been read before.

    What evictions cost: a larger cache would have saved these reads, no cache saves the others.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`hit_rate`.
    by : {"token", "layer", "slot"}, optional
        Dimension kept; ``"token"`` gives the number of each token instead of the mean.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted; a read in any phase before counts as read before.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``rereads_per_token_<phase>``. NaN if the
        phase has no token.

    Raises
    ------
    SchemaError
        If ``residency`` is absent.

    Notes
    -----
    A miss whose (layer, expert) missed before in this trace. What was resident when the trace began
    was never read in it, so its first read does not count. Source: BigMoeOnEdge's run summary
    (``rereads``), per token.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(rereads_per_token(make_trace(n_token=40, n_layer=2, budget_frac=1.0, seed=0)))
    0.0
    """
    read = first_of_load(trace).values & (_values(trace, "residency") == Residency.miss.value)
    expert = _values(trace, "expert_applied")[read].astype(np.int64)
    layer = np.nonzero(read)[1]
    n_expert = int(expert.max(initial=0)) + 1
    # Token-major, so `unique` keeps the first read of each.
    _, first = np.unique(layer * n_expert + expert, return_index=True)
    again = np.ones(expert.size, dtype=bool)
    again[first] = False
    rereads = np.zeros(read.shape, dtype=bool)
    rereads[read] = again
    return _per_token(
        trace,
        rereads,
        by,
        phase,
        "rereads_per_token",
        "reads of experts read before, per token",
        "1",
    )


def load_count(
    trace: xr.Dataset, *, by: Literal["layer"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how many loads there were: layers that routed, over graph evaluations.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` of shape (token, layer, slot) and the coordinates ``turn``,
        ``batch``, ``phase``.
    by : {"layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Evaluations counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``load_count_<phase>``.

    Notes
    -----
    One load is what a layer asks of the cache within one evaluation, however many tokens it holds;
    BigMoeOnEdge's cache replay calls it a batch.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=10, n_prefill=6, n_layer=3, seed=0)
    >>> float(load_count(trace, phase="prefill")), float(load_count(trace))
    (3.0, 12.0)
    """
    if by not in (None, "layer"):
        raise unknown_name("by", by, ["layer"])
    rows = _phase_rows(trace, phase)
    start = _evaluation_starts(trace)
    cell = _any_slot(trace)
    loads = np.zeros(cell.shape, dtype=bool)
    if start.size:
        loads[start] = np.logical_or.reduceat(cell, start, axis=0)
    total = _sum(loads[rows].astype(np.float64)[..., None], by)
    return _result(trace, total, rows, by, phase, "load_count", "loads of a layer", "1")


def _hit(trace: xr.Dataset) -> Bools:
    residency = _values(trace, "residency")
    return np.asarray(
        (residency == Residency.hit.value) | (residency == Residency.hit_speculative.value)
    )


def _warm_rows(trace: xr.Dataset, phase: str, warmup: int) -> Bools:
    """Return the rows of a phase without its first `warmup` tokens."""
    warmup = _check_at_least("warmup", warmup, 0, "It counts tokens to leave out.")
    rows = _phase_rows(trace, phase)
    if warmup == 0 or not rows.any():
        return rows
    turn = _values(trace, "turn") if trace.attrs.get("cold_turns") == 1 else np.zeros(rows.size)
    warm = rows.copy()
    for one in np.unique(turn[rows]):
        warm[np.flatnonzero(rows & (turn == one))[:warmup]] = False
    return warm


def first_of_load(trace: xr.Dataset) -> xr.DataArray:
    """Return which rows are lookups: the first that names its expert in an evaluation's layer.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`hit_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (token, layer, slot), bool. Rows that were dropped, not routed or not streamed are
        never lookups.

    Raises
    ------
    SchemaError
        If ``residency`` is absent.

    Notes
    -----
    Rows of a layer are in token-major order. Source: the rule of BigMoeOnEdge's cache replay, one
    lookup per distinct expert of a batch.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> int(first_of_load(make_trace(n_token=4, n_layer=2, n_used=2, seed=0))[-1].sum())
    4
    """
    asked = _asked(trace)
    n_token, n_layer, n_slot = asked.shape
    first = asked.copy()
    start = _evaluation_starts(trace)
    size = np.diff(np.append(start, n_token))
    # An evaluation of one token names no expert twice; only the wide ones need a search.
    wide = np.repeat(size > 1, size)
    if wide.any():
        rows = np.flatnonzero(wide)
        evaluation = np.repeat(np.arange(start.size), size)[rows]
        expert = _values(trace, "expert_applied")[rows].astype(np.int64)
        n_expert = int(expert.max(initial=0)) + 1
        layer = np.arange(n_layer)[None, :, None]
        key = (evaluation[:, None, None] * n_layer + layer) * n_expert + expert
        candidate = asked[rows].ravel()
        # C order is token-major within each (evaluation, layer), and `unique` keeps the first.
        _, where = np.unique(key.ravel()[candidate], return_index=True)
        found = np.zeros(candidate.size, dtype=bool)
        found[np.flatnonzero(candidate)[where]] = True
        first[rows] = found.reshape(rows.size, n_layer, n_slot)
    return xr.DataArray(
        first,
        dims=_DIMS,
        coords=_coords(trace, _DIMS),
        name="first_of_load",
        attrs={"long_name": "row is a lookup: the first of its expert in the layer's load"},
    )
