"""What the cache saw: hits, reads, the token cycle."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    _DIMS,
    By,
    PhaseName,
    _asked,
    _coords,
    _evaluation_starts,
    _phase_rows,
    _ratio,
    _result,
    _sum,
    _values,
)
from bmoe_lab.schema import Residency

__all__ = [
    "first_of_load",
    "hit_rate",
    "read_bytes_per_token",
    "token_cycle_bytes",
]


def hit_rate(
    trace: xr.Dataset,
    *,
    by: By | None = None,
    per: Literal["lookup", "routing"] = "lookup",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the fraction of lookups that found their expert resident.

    One lookup per distinct (layer, expert) per graph evaluation, as a cache sees it. Dropped slots
    ask for nothing: a policy that drops misses raises this ratio, so read
    :func:`read_bytes_per_token` beside it.

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

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``hit_rate_<phase>``. NaN where
        nothing was looked up.

    Raises
    ------
    SchemaError
        If ``residency`` is absent.
    UnknownNameError
        If `by`, `per` or `phase` is not one of the names above.

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
    residency = _values(trace, "residency")
    hit = counted & (
        (residency == Residency.hit.value) | (residency == Residency.hit_speculative.value)
    )
    return _ratio(
        trace, hit, counted, by, phase, "hit_rate", "lookups that found their expert resident"
    )


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


def read_bytes_per_token(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the expert bytes read from disk per token.

    Sums what was charged, not the misses: a wide evaluation reads an expert once, whichever of its
    rows wanted it.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``read_bytes``, uint32 of shape (token, layer, slot).
    by : {"token", "layer", "slot"}, optional
        Dimension kept; ``"token"`` gives the bytes of each token instead of their mean.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "byte"; named ``read_bytes_per_token_<phase>``. NaN if
        the phase has no token.

    Raises
    ------
    SchemaError
        If ``read_bytes`` is absent.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> read_bytes_per_token(make_trace(n_token=4, n_layer=2, seed=0)).attrs["units"]
    'byte'
    """
    rows = _phase_rows(trace, phase)
    selected = _values(trace, "read_bytes")[rows].astype(np.float64)
    total = _sum(selected, by)
    if by != "token":
        total = total / rows.sum() if rows.any() else np.full(np.shape(total), np.nan)
    return _result(
        trace, total, rows, by, phase, "read_bytes_per_token", "expert bytes read per token", "byte"
    )


def token_cycle_bytes(trace: xr.Dataset) -> xr.DataArray:
    """Return the expert bytes that one token needs if nothing is resident.

    Below this budget a global LRU hits exactly nothing in decode: each layer's experts are evicted
    before the next token comes back to them.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_bytes`` and ``n_expert_used`` of shape (layer,).

    Returns
    -------
    xarray.DataArray
        Scalar, int64, unit "byte".

    Notes
    -----
    ``T = sum over layers of expert_bytes(layer) * n_expert_used(layer)``. Source: BigMoeOnEdge's
    cache replay (docs/bench-data, 2026-07-20).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_used=2, seed=0)
    >>> bool(token_cycle_bytes(trace) == 2 * int(trace.expert_bytes.sum()))
    True
    """
    size = _values(trace, "expert_bytes").astype(np.int64)
    used = _values(trace, "n_expert_used").astype(np.int64)
    return xr.DataArray(
        np.int64((size * used).sum()),
        name="token_cycle_bytes",
        attrs={
            "units": "byte",
            "long_name": "expert bytes that a token needs with nothing resident",
        },
    )
