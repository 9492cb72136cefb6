"""What a routing policy did: drops, substitutions, weight lost, agreement."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    By,
    PhaseName,
    _acted,
    _any_slot,
    _check_same_tokens,
    _isin_last,
    _ratio,
    _routed,
    _values,
)
from bmoe_lab.schema import Action

__all__ = [
    "drop_rate",
    "routing_agreement",
    "substitution_rate",
    "weight_discarded_frac",
]


def drop_rate(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the fraction of routed slots that a policy dropped.

    The denominator is every routed slot, the best one of each routing included.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``action``, uint8 flags of shape (token, layer, slot).
    by : {"token", "layer", "slot"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``drop_rate_<phase>``.

    Raises
    ------
    SchemaError
        If ``action`` is absent.

    Notes
    -----
    ``slots with action dropped / routed slots``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(drop_rate(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    return _ratio(
        trace,
        _acted(trace, Action.dropped),
        _routed(trace),
        by,
        phase,
        "drop_rate",
        "routed slots that a policy dropped",
    )


def substitution_rate(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the fraction of routed slots that a policy gave to another expert.

    The denominator is every routed slot, the best one of each routing included.

    Parameters
    ----------
    trace, by, phase
        As for :func:`drop_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``substitution_rate_<phase>``.

    Raises
    ------
    SchemaError
        If ``action`` is absent.

    Notes
    -----
    ``slots with action substituted / routed slots``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(substitution_rate(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    return _ratio(
        trace,
        _acted(trace, Action.substituted),
        _routed(trace),
        by,
        phase,
        "substitution_rate",
        "routed slots that a policy gave to another expert",
    )


def weight_discarded_frac(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the share of the router's weight whose expert did not run.

    Counts dropped and substituted slots. Where a policy replaced the choice before the graph
    computed weights, the weight of what the router wanted is unknown, and so is the share.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``weight_chosen`` and ``action`` of shape (token, layer, slot).
    by : {"token", "layer", "slot"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``weight_discarded_frac_<phase>``. NaN for a
        group that holds an unknown weight.

    Raises
    ------
    SchemaError
        If ``weight_chosen`` or ``action`` is absent.

    Notes
    -----
    ``sum of w over slots that did not run / sum of w over all slots``; the discarded mass of
    BigMoeOnEdge (pull request 94) and colibri.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(weight_discarded_frac(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    weight = _values(trace, "weight_chosen").astype(np.float64)
    routed = _routed(trace)
    lost = _acted(trace, Action.dropped) | _acted(trace, Action.substituted)
    return _ratio(
        trace,
        np.where(lost, weight, 0.0),
        np.where(routed, weight, 0.0),
        by,
        phase,
        "weight_discarded_frac",
        "router weight whose expert did not run",
    )


def routing_agreement(
    trace: xr.Dataset,
    reference: xr.Dataset,
    *,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how much of what the reference's router chose also ran here.

    Compares sets: order does not count, a dropped slot runs nothing. A policy changes the hidden
    states, so later layers differ even in slots that it did not touch.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_applied`` and ``action``.
    reference : xarray.Dataset
        The lossless run over the same tokens; reads ``expert_chosen``.
    by : {"token", "layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``routing_agreement_<phase>``.

    Raises
    ------
    SettingsError
        If the two traces do not hold the same tokens and layers.

    Notes
    -----
    ``|S and S'| / k``, S what the reference chose, S' what ran, k the size of S, averaged over
    routings (colibri's routing agreement).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, seed=0)
    >>> float(routing_agreement(trace, trace))
    1.0
    """
    if by not in (None, "token", "layer"):
        raise unknown_name("by", by, ["token", "layer"])
    _check_same_tokens(trace, reference)
    wanted = np.where(_routed(reference), _values(reference, "expert_chosen"), -1)
    ran = _routed(trace) & ~_acted(trace, Action.dropped)
    actual = np.where(ran, _values(trace, "expert_applied"), -2)
    shared = _isin_last(wanted, actual)
    both = _routed(reference) & _any_slot(trace)[..., None]
    return _ratio(
        trace,
        shared & both,
        both,
        by,
        phase,
        "routing_agreement",
        "experts of the reference's choice that ran here",
    )
