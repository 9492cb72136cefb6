"""How much neighbouring tokens want the same experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    PhaseName,
    Which,
    _check_at_least,
    _check_by,
    _coords,
    _experts,
    _isin_last,
    _labelled,
    _n_expert,
    _phase_rows,
    _ratio,
    _segments,
    _values,
)

__all__ = [
    "chance_overlap",
    "consecutive_jaccard",
    "consecutive_overlap",
    "working_set",
]


def consecutive_overlap(
    trace: xr.Dataset,
    *,
    lag: int | Sequence[int] = 1,
    which: Which = "chosen",
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how much of a token's choice was also the choice `lag` tokens before.

    The locality that a cache lives on; by chance it would be :func:`chance_overlap`.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or ``expert_applied`` of shape (token, layer, slot), ``action`` and
        the coordinates ``turn``, ``position``.
    lag : int or sequence of int, default 1
        Distance in positions. Pairs across turns or gaps are not counted. Several give a leading
        dim ``lag``.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    by : {"token", "layer"}, optional
        Dimension kept. With ``"token"`` the first `lag` tokens are NaN.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Both tokens of a pair are of this phase.

    Returns
    -------
    xarray.DataArray
        Shape ([lag], [by]), float64, unit "1"; named ``consecutive_overlap_<phase>``.

    Raises
    ------
    SettingsError
        If `lag` is less than 1.

    Notes
    -----
    ``|S_t and S_(t-lag)| / k``, averaged over pairs. Source: Mixtral (arXiv 2401.04088, section
    5), which reports repeated choices by layer; lags as in BigMoeOnEdge's predictor study.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=6, n_layer=2, seed=0)
    >>> 0.0 <= float(consecutive_overlap(trace, phase="all")) <= 1.0
    True
    >>> consecutive_overlap(trace, lag=[1, 2, 4], phase="all").sizes["lag"]
    3
    """
    return _over_lags(trace, lag, which, by, phase, jaccard=False)


def consecutive_jaccard(
    trace: xr.Dataset,
    *,
    lag: int | Sequence[int] = 1,
    which: Which = "chosen",
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the Jaccard similarity of a token's choice and the one `lag` tokens before.

    Parameters
    ----------
    trace, lag, which, by, phase
        As for :func:`consecutive_overlap`.

    Returns
    -------
    xarray.DataArray
        Shape ([lag], [by]), float64, unit "1", in [0, 1]; named ``consecutive_jaccard_<phase>``.

    Raises
    ------
    SettingsError
        If `lag` is less than 1.

    Notes
    -----
    ``J = |S_t and S_(t-lag)| / |S_t or S_(t-lag)|``, averaged over pairs; for one pair of equal
    size ``J = o / (2 - o)``, o the overlap. The mean of J is not that function of the mean of o.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=6, n_layer=2, seed=0)
    >>> bool(consecutive_jaccard(trace, phase="all") <= consecutive_overlap(trace, phase="all"))
    True
    """
    return _over_lags(trace, lag, which, by, phase, jaccard=True)


def _over_lags(
    trace: xr.Dataset,
    lag: int | Sequence[int],
    which: str,
    by: str | None,
    phase: str,
    *,
    jaccard: bool,
) -> xr.DataArray:
    _check_by(by, ["token", "layer"])
    several = isinstance(lag, (Sequence, np.ndarray))
    given: list[Any] = list(lag) if isinstance(lag, (Sequence, np.ndarray)) else [lag]
    lags = [_check_at_least("lag", one, 1, "Use 1 for the token before.") for one in given]
    rows, segment = _phase_rows(trace, phase), _segments(trace)
    expert = _experts(trace, which)
    parts = [_one_lag(trace, expert, rows, segment, one, by, phase, jaccard) for one in lags]
    if not several:
        return parts[0]
    joined = xr.concat(parts, dim=xr.Variable("lag", lags, {"units": "1", "long_name": "lag"}))
    joined.attrs["long_name"] = (
        parts[0].attrs["long_name"].replace(f"the token {lags[0]} before", "the token `lag` before")
    )
    return joined


def _one_lag(
    trace: xr.Dataset,
    expert: npt.NDArray[Any],
    rows: npt.NDArray[np.bool_],
    segment: npt.NDArray[np.int64],
    lag: int,
    by: str | None,
    phase: str,
    jaccard: bool,
) -> xr.DataArray:
    shared = np.zeros(expert.shape, dtype=bool)
    pair = np.zeros(expert.shape, dtype=bool)
    if expert.shape[0] > lag:
        both = (segment[lag:] == segment[:-lag]) & rows[lag:] & rows[:-lag]
        before = np.where(expert < 0, expert.dtype.type(-2), expert)[:-lag]
        shared[lag:] = _isin_last(expert[lag:], before)
        pair[lag:] = both[:, None, None] & (expert[lag:] >= 0)
        pair[lag:] &= np.asarray((before >= 0).any(axis=-1))[..., None]
    shared &= pair
    if not jaccard:
        return _ratio(
            trace,
            shared,
            pair,
            by,
            phase,
            "consecutive_overlap",
            f"choice shared with the token {lag} before",
        )
    common = shared.sum(axis=-1)
    size = (expert >= 0).sum(axis=-1)
    union = size.copy()
    union[lag:] += size[:-lag]
    union -= common
    cell = np.asarray(pair.any(axis=-1))
    similarity = np.where(cell, common / np.where(cell, union, 1), 0.0)
    return _ratio(
        trace,
        similarity[..., None],
        cell[..., None],
        by,
        phase,
        "consecutive_jaccard",
        f"choice in common with the token {lag} before, over the union",
    )


def chance_overlap(
    trace: xr.Dataset, *, by: Literal["layer"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the overlap of two choices that have nothing to do with each other.

    What :func:`consecutive_overlap` and a random guess of k experts reach by chance, if all experts
    are alike; with popular experts chance is higher.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``n_expert_used`` of shape (layer,) and the attribute ``n_expert``.
    by : {"layer"}, optional
        Dimension kept; otherwise the mean over the routings of the phase.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``chance_overlap_<phase>``.

    Raises
    ------
    SchemaError
        If the number of experts is absent.

    Notes
    -----
    ``k / E``, k the experts per token, E the experts of a layer.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(chance_overlap(make_trace(n_token=4, n_layer=2, n_used=4, n_expert=16, seed=0)))
    0.25
    """
    if by not in (None, "layer"):
        raise unknown_name("by", by, ["layer"])
    used = _values(trace, "n_expert_used").astype(np.float64)
    # Weighted like the overlap itself: by the slots of every routing.
    routed = _values(trace, "expert_chosen") >= 0
    chance = np.broadcast_to((used / _n_expert(trace))[None, :, None], routed.shape)
    return _ratio(
        trace,
        np.where(routed, chance, 0.0),
        routed,
        by,
        phase,
        "chance_overlap",
        "overlap of unrelated choices",
    )


def working_set(
    trace: xr.Dataset,
    window: int,
    *,
    unit: Literal["expert", "byte"] = "expert",
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how many distinct experts the last `window` tokens wanted, layer by layer.

    Take ``.mean("token")`` for a layer's mean, ``.sum("layer", skipna=False)`` for what a cache
    must hold to serve a window without reading an expert twice.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`consecutive_overlap`; with ``unit="byte"`` also ``expert_bytes``.
    window : int
        Tokens looked back over, the present one included.
    unit : {"expert", "byte"}, default "expert"
        Count experts, or sum their bytes.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        All tokens of a window are of this phase.

    Returns
    -------
    xarray.DataArray
        Shape (token, layer), tokens of the phase, float64; NaN until the window is full: it never
        reaches across a turn, a gap or a cell that did not route. Named ``working_set_<phase>``.

    Raises
    ------
    SettingsError
        If `window` is less than 1.

    Notes
    -----
    ``W(t, tau) = |union of S_i for t - tau < i <= t|``. Source: Denning 1968.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=9, n_prefill=0, n_layer=2, n_used=3, seed=0)
    >>> float(working_set(trace, 1).max()), working_set(trace, 4).isnull().sum("token").values
    (3.0, array([3, 3]))
    """
    window = _check_at_least("window", window, 1, "It counts tokens, the present one included.")
    if unit not in ("expert", "byte"):
        raise unknown_name("unit", unit, ["byte", "expert"])
    rows = _phase_rows(trace, phase)
    kept = np.flatnonzero(rows)
    expert = _experts(trace, which)[rows]
    n_token, n_layer, _ = expert.shape
    # Tokens that are no neighbours in the trace start a new stretch too.
    segment = _segments(trace)[rows]
    breaks = np.ones(n_token, dtype=bool)
    breaks[1:] = (segment[1:] != segment[:-1]) | (np.diff(kept) != 1)
    first = np.maximum.accumulate(np.where(breaks, np.arange(n_token), 0))
    ends = np.append(np.flatnonzero(breaks)[1:], n_token)
    last = (ends[np.cumsum(breaks) - 1] - 1) if n_token else np.zeros(0, dtype=np.int64)

    distinct = np.zeros((n_token + 1, n_layer), dtype=np.int64)
    full = np.zeros((n_token, n_layer), dtype=bool)
    for layer in range(n_layer):
        here = expert[:, layer]
        token, slot = np.nonzero(here >= 0)
        before = _previous_use(token, here[token, slot].astype(np.int64), first)
        # The row is the first of its expert in the windows that end from `begin` to `stop`.
        begin = np.maximum(token, before + window)
        stop = np.minimum(token + window - 1, last[token])
        counts = begin <= stop
        size = n_token + 1
        change = np.bincount(begin[counts], minlength=size) - np.bincount(
            stop[counts] + 1, minlength=size
        )
        distinct[:, layer] = np.cumsum(change)
        routed = np.concatenate(([0], np.cumsum((here >= 0).any(axis=-1))))
        whole = np.arange(n_token) - window + 1
        full[:, layer] = (whole >= first) & (routed[1:] - routed[np.maximum(whole, 0)] == window)
    values = np.where(full, distinct[:n_token], np.nan)
    if unit == "byte":
        values = values * _values(trace, "expert_bytes").astype(np.float64)
    return _labelled(
        values,
        ("token", "layer"),
        _coords(trace.isel(token=kept), ("token", "layer")),
        phase,
        "working_set",
        f"distinct experts of the last {window} tokens ({which})",
        "byte" if unit == "byte" else "1",
    )


def _previous_use(
    token: npt.NDArray[np.int64], key: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the token of the same key's use before, in the same stretch; far back if none.

    `token` rises; `first` is the first token of every token's stretch.
    """
    order = np.argsort(key, kind="stable")
    before = np.full(token.size, np.iinfo(np.int64).min // 2)
    same = key[order][1:] == key[order][:-1]
    before[order[1:][same]] = token[order[:-1][same]]
    return np.where(before >= first[token], before, np.iinfo(np.int64).min // 2)
