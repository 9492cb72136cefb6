"""How the router weighs what it chose, and whether another router would choose alike."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.metrics._shared import (
    PhaseName,
    _any_slot,
    _check_by,
    _check_same_tokens,
    _isin_last,
    _ratio,
    _routed,
    _values,
)

__all__ = [
    "router_entropy",
    "router_saturation",
    "top_weight_share",
]


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
    ``H = -sum of w ln w`` over the chosen slots, not over all experts: that is
    :func:`score_entropy`, which needs the scores. Divide by ln 2 for bits.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_used=2, seed=0)
    >>> 0.0 <= float(router_entropy(trace)) <= 0.6932
    True
    """
    _check_by(by, ["token", "layer"])
    routed = _routed(trace)
    weight = np.where(routed, _values(trace, "weight_chosen").astype(np.float64), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    share = weight / np.where(total > 0, total, 1.0)
    plogp = share * np.log(np.where(share > 0, share, 1.0))
    entropy = np.where(np.isnan(total[..., 0]), np.nan, -plogp.sum(axis=-1))
    cell = _any_slot(trace)
    return _ratio(
        trace,
        np.where(cell, entropy, 0.0)[..., None],
        cell[..., None],
        by,
        phase,
        "router_entropy",
        "entropy of the weights over the chosen slots",
        units="nat",
    )


def top_weight_share(
    trace: xr.Dataset, *, by: Literal["token", "layer"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the share of a routing's weight that its largest slot takes.

    What a policy that keeps only the best expert keeps of the weight.

    Parameters
    ----------
    trace, by, phase
        As for :func:`router_entropy`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [1/k, 1]; named ``top_weight_share_<phase>``.
        NaN for a group that holds an unknown weight.

    Notes
    -----
    ``max w / sum of w`` over the chosen slots, averaged over routings. Source: the entropy view of
    BigMoeOnEdge's trace analysis.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> 0.25 <= float(top_weight_share(make_trace(n_token=4, n_layer=2, n_used=4, seed=0))) <= 1
    True
    """
    _check_by(by, ["token", "layer"])
    routed = _routed(trace)
    weight = np.where(routed, _values(trace, "weight_chosen").astype(np.float64), 0.0)
    total = weight.sum(axis=-1)
    largest = weight.max(axis=-1) / np.where(total == 0, np.nan, total)
    cell = _any_slot(trace)
    return _ratio(
        trace,
        np.where(cell, largest, 0.0)[..., None],
        cell[..., None],
        by,
        phase,
        "top_weight_share",
        "share of the largest weight of a routing",
    )


def router_saturation(
    trace: xr.Dataset,
    reference: xr.Dataset,
    *,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how much of the reference router's choice this router makes too.

    For two checkpoints, or two quantisations, of one model over the same text. Both sides are what
    a router chose; :func:`routing_agreement` asks what ran under a policy.

    Parameters
    ----------
    trace, reference : xarray.Dataset
        Read ``expert_chosen`` of shape (token, layer, slot).
    by : {"token", "layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted, by the phase of `trace`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``router_saturation_<phase>``.

    Raises
    ------
    SettingsError
        If the two traces do not hold the same tokens and layers.

    Notes
    -----
    ``|S^a and S^b| / k``, averaged over tokens that both routed; k the reference's. Definition:
    router saturation of OLMoE (arXiv 2409.02060), whose reference is the last checkpoint.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, seed=0)
    >>> float(router_saturation(trace, trace))
    1.0
    """
    _check_by(by, ["token", "layer"])
    _check_same_tokens(trace, reference)
    wanted = np.where(_routed(reference), _values(reference, "expert_chosen"), -1)
    here = np.where(_routed(trace), _values(trace, "expert_chosen"), -2)
    both = _routed(reference) & _any_slot(trace)[..., None]
    shared = _isin_last(wanted, here) & both
    return _ratio(
        trace,
        shared,
        both,
        by,
        phase,
        "router_saturation",
        "experts of the reference router's choice that this router chose",
    )
