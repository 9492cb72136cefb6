"""How long ago an expert was last used."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    _DIMS,
    PhaseName,
    Which,
    _coords,
    _evaluation_starts,
    _experts,
    _labelled,
    _n_expert,
    _phase_rows,
    _values,
)

__all__ = ["reuse_distance"]

_MEANINGS = {
    "token": "tokens since the expert's last use",
    "expert": "distinct experts used since the expert's last use, itself included",
    "byte": "bytes of distinct experts used since the expert's last use, itself included",
}


def reuse_distance(
    trace: xr.Dataset,
    *,
    unit: Literal["token", "expert", "byte"] = "token",
    which: Which = "chosen",
    across_turns: bool = False,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how long ago each routed expert was last used.

    In tokens it tells what a router does; in experts or bytes, what a cache must hold: an LRU of
    at least that many bytes still has the expert, a smaller one does not.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or ``expert_applied`` of shape (token, layer, slot), ``action``, the
        coordinates ``turn``, ``batch``; for experts and bytes ``n_expert``, for bytes
        ``expert_bytes``.
    unit : {"token", "expert", "byte"}, default "token"
        What passes between two uses: tokens of the phase; distinct experts of all layers; their
        bytes.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    across_turns : bool, default False
        Let a use in an earlier turn count, as for a cache that stays warm.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens looked at; uses in other phases are not seen.

    Returns
    -------
    xarray.DataArray
        Shape (token, layer, slot), tokens of the phase, float64; NaN for a first use and for cells
        that did not route. Named ``reuse_distance_<phase>``. ``.quantile(q)`` skips the NaN.

    Raises
    ------
    UnknownNameError
        If `unit`, `which` or `phase` is not one of the names above.

    Notes
    -----
    In experts or bytes one load (a layer within a graph evaluation) is judged before it touches
    anything, as this package's caches do, and only its first row of an expert is a lookup; a
    dropped slot's stand-in is no lookup, but it is touched again. With
    ``phase="all", which="applied"`` the share of lookups with a distance of at most B bytes is then
    exactly the hit rate of an LRU with budget B that starts empty (at each turn, unless
    `across_turns`): the whole curve from one pass. Source: Mattson and others 1970 (stack
    distances), here weighted by bytes.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=30, n_layer=2, seed=0)
    >>> float(reuse_distance(trace).min())
    1.0
    >>> distance = reuse_distance(trace, unit="byte", phase="all")
    >>> lookups = int(trace.moe.first_of_load().sum())
    >>> hits = int((distance <= trace.attrs["cache_budget_bytes"]).sum())
    >>> hits / lookups == float(trace.moe.hit_rate(phase="all"))
    True
    """
    if unit not in _MEANINGS:
        raise unknown_name("unit", unit, list(_MEANINGS))
    rows = _phase_rows(trace, phase)
    expert = _experts(trace, which)[rows]
    turn = _values(trace, "turn")[rows].astype(np.int64)
    if across_turns:
        turn = np.zeros_like(turn)
    if unit == "token":
        values = _in_tokens(expert, turn)
    else:
        from bmoe_lab.metrics._stack import stack_distances

        start = _evaluation_starts(trace)
        evaluation = np.zeros(rows.size, dtype=np.int64)
        evaluation[start] = 1
        evaluation = np.cumsum(evaluation)[rows]
        changes = np.ones(evaluation.size, dtype=bool)
        changes[1:] = evaluation[1:] != evaluation[:-1]
        begins = np.flatnonzero(changes).astype(np.int64)
        resets = np.zeros(begins.size, dtype=bool)
        resets[1:] = turn[begins[1:]] != turn[begins[:-1]]
        weight = np.ones(expert.shape[1], dtype=np.int64)
        if unit == "byte":
            weight = _values(trace, "expert_bytes").astype(np.int64)
        values = np.empty(expert.shape, dtype=np.float64)
        touched = np.ascontiguousarray(_values(trace, f"expert_{which}")[rows])
        asks = np.ascontiguousarray(expert >= 0)
        stack_distances(touched, asks, begins, resets, weight, _n_expert(trace), values)
    return _labelled(
        values,
        _DIMS,
        _coords(trace.isel(token=np.flatnonzero(rows)), _DIMS),
        phase,
        "reuse_distance",
        f"{_MEANINGS[unit]}, {which}",
        "byte" if unit == "byte" else "1",
    )


def _in_tokens(
    expert: npt.NDArray[np.int16], turn: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return tokens since the last use in the same turn, layer by layer."""
    values = np.full(expert.shape, np.nan)
    for layer in range(expert.shape[1]):
        token, slot = np.nonzero(expert[:, layer] >= 0)
        # Stable: within one expert the rows stay in token order.
        order = np.argsort(expert[token, layer, slot], kind="stable")
        token, slot = token[order], slot[order]
        key = expert[token, layer, slot]
        again = (key[1:] == key[:-1]) & (turn[token[1:]] == turn[token[:-1]])
        later = np.flatnonzero(again) + 1
        values[token[later], layer, slot[later]] = token[later] - token[later - 1]
    return values
