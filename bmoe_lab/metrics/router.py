"""What the router does: load, overlap of neighbours, entropy."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import SettingsError, unknown_name
from bmoe_lab.metrics._shared import (
    PhaseName,
    _acted,
    _any_slot,
    _coords,
    _isin_last,
    _n_expert,
    _phase_rows,
    _ratio,
    _routed,
    _values,
)
from bmoe_lab.schema import Action

__all__ = [
    "consecutive_overlap",
    "expert_load",
    "router_entropy",
]


def expert_load(
    trace: xr.Dataset,
    *,
    which: Literal["chosen", "applied"] = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how the routings of each layer spread over its experts.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or ``expert_applied`` of shape (token, layer, slot), ``action``, and
        the attribute ``n_expert``.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (layer, expert), float64, unit "1"; each layer sums to one, or is NaN if it routed
        nothing. Named ``expert_load_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``f_e = n_e / (T k)``: the load of the Switch Transformer (arXiv 2101.03961, equation 5).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> load = expert_load(make_trace(n_token=4, n_layer=2, n_expert=8, seed=0))
    >>> dict(load.sizes), bool((load.sum("expert").round(12) == 1).all())
    ({'layer': 2, 'expert': 8}, True)
    """
    if which not in ("chosen", "applied"):
        raise unknown_name("which", which, ["applied", "chosen"])
    rows = _phase_rows(trace, phase)
    counted = _routed(trace)
    if which == "applied":
        counted = counted & ~_acted(trace, Action.dropped)
    expert = _values(trace, f"expert_{which}")
    n_expert = _n_expert(trace)
    n_layer = expert.shape[1]
    counted = counted[rows]
    key = expert[rows].astype(np.int64) + np.arange(n_layer)[None, :, None] * n_expert
    count = np.bincount(key[counted], minlength=n_layer * n_expert).reshape(n_layer, n_expert)
    total = count.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        load = np.where(total > 0, count / np.where(total > 0, total, 1), np.nan)
    return xr.DataArray(
        load,
        dims=("layer", "expert"),
        coords=_coords(trace, ("layer",)),
        name=f"expert_load_{phase}",
        attrs={"units": "1", "long_name": f"share of the layer's routings ({which}, {phase})"},
    )


def consecutive_overlap(
    trace: xr.Dataset,
    *,
    lag: int = 1,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how much of a token's choice was also the choice `lag` tokens before.

    The locality that a cache lives on; by chance it would be k/E.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` of shape (token, layer, slot) and the coordinates ``turn``,
        ``position``.
    lag : int, default 1
        Distance in positions. Pairs across turns or gaps are not counted.
    by : {"token", "layer"}, optional
        Dimension kept. With ``"token"`` the first `lag` tokens are NaN.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Both tokens of a pair are of this phase.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``consecutive_overlap_<phase>``.

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
    """
    if by not in (None, "token", "layer"):
        raise unknown_name("by", by, ["token", "layer"])
    if lag < 1:
        raise SettingsError(f"lag must be at least 1; got {lag!r}. Use 1 for the token before.")
    rows = _phase_rows(trace, phase)
    routed = _routed(trace)
    expert = np.where(routed, _values(trace, "expert_chosen"), -1)
    shared = np.zeros(expert.shape, dtype=bool)
    pair = np.zeros(expert.shape, dtype=bool)
    if expert.shape[0] > lag:
        turn, position = _values(trace, "turn"), _values(trace, "position").astype(np.int64)
        follows = (turn[lag:] == turn[:-lag]) & (position[lag:] == position[:-lag] + lag)
        follows &= rows[lag:] & rows[:-lag]
        before = np.where(routed, expert, -2)[:-lag]
        shared[lag:] = _isin_last(expert[lag:], before)
        pair[lag:] = follows[:, None, None] & routed[lag:] & _any_slot(trace)[:-lag, :, None]
    return _ratio(
        trace,
        shared & pair,
        pair,
        by,
        phase,
        "consecutive_overlap",
        f"choice shared with the token {lag} before",
    )


def router_entropy(
    trace: xr.Dataset, *, by: Literal["token", "layer"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the entropy of the weights that the router gave to its choice.

    Near ln k the slots matter alike; near 0 the first one decides and the others are cheap to
    lose.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``weight_chosen``, float32 of shape (token, layer, slot). The weights are normalised
        over the slots first, since some models scale them.
    by : {"token", "layer"}, optional
        Dimension kept; routings are averaged.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "nat"; named ``router_entropy_<phase>``.

    Notes
    -----
    ``H = -sum of w ln w`` over the chosen slots (not over all experts: that needs the scores).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_used=2, seed=0)
    >>> 0.0 <= float(router_entropy(trace)) <= 0.6932
    True
    """
    if by not in (None, "token", "layer"):
        raise unknown_name("by", by, ["token", "layer"])
    routed = _routed(trace)
    weight = np.where(routed, _values(trace, "weight_chosen").astype(np.float64), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    share = weight / np.where(total > 0, total, 1.0)
    plogp = share * np.log(np.where(share > 0, share, 1.0))
    entropy = np.where(np.isnan(total[..., 0]), np.nan, -plogp.sum(axis=-1))
    cell = _any_slot(trace)
    result = _ratio(
        trace,
        np.where(cell, entropy, 0.0)[..., None],
        cell[..., None],
        by,
        phase,
        "router_entropy",
        "entropy of the weights over the chosen slots",
    )
    result.attrs["units"] = "nat"
    return result
