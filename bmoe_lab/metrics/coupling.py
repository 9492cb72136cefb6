"""Which experts go together: within a layer, from one layer to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.metrics._shared import (
    PhaseName,
    Which,
    _check_at_least,
    _coords,
    _experts,
    _labelled,
    _n_expert,
    _phase_rows,
)

__all__ = ["coactivation", "coactivation_lift", "layer_mutual_information", "layer_transition"]

# Tokens counted at a time, so that the keys of their pairs stay small.
_WINDOW = 65_536

Counts = npt.NDArray[np.int64]


def coactivation(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how often an expert's routings also chose each other expert of its layer.

    Popular experts are everybody's partners; :func:`coactivation_lift` takes that out.

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
        Shape (layer, expert, partner), float64, unit "1", in [0, 1]; NaN for an expert that was
        never routed and on the diagonal. Named ``coactivation_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``N_ij / N_i``, i the expert, j the partner, N_ij the routings with both: P(j | i), not
    symmetric. Definition: OLMoE (arXiv 2409.02060).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=20, n_layer=2, n_expert=8, n_used=3, seed=0)
    >>> sums = coactivation(trace).sum("partner").values  # k - 1 partners each
    >>> sorted(set(sums.ravel().round(9).tolist()) - {0.0})
    [2.0]
    """
    counts, _ = _pairs_within(trace, which, phase)
    own = np.diagonal(counts, axis1=1, axis2=2)[:, :, None]
    return _matrix(
        trace,
        counts / np.where(own > 0, own, np.nan),
        phase,
        "coactivation",
        f"share of the expert's routings that also chose the partner ({which})",
    )


def coactivation_lift(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how much more often two experts of a layer meet than if they did not care.

    One is chance, 0 never. Rare experts make large numbers out of one meeting: look at
    :func:`routing_counts` too.

    Parameters
    ----------
    trace, which, phase
        As for :func:`coactivation`.

    Returns
    -------
    xarray.DataArray
        Shape (layer, expert, partner), float64, unit "1", symmetric; NaN where one of the two was
        never routed and on the diagonal. Named ``coactivation_lift_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``N_ij T / (N_i N_j)``, T the routings of the layer. Since a routing never takes an expert
    twice, a uniform router has ``(k - 1) E / (k (E - 1))``, a little less than 1.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> coactivation_lift(make_trace(n_token=8, n_layer=2, n_expert=8, seed=0)).dims
    ('layer', 'expert', 'partner')
    """
    counts, n_routing = _pairs_within(trace, which, phase)
    own = np.diagonal(counts, axis1=1, axis2=2).astype(np.float64)
    expected = own[:, :, None] * own[:, None, :]
    lift = counts * n_routing[:, None, None] / np.where(expected > 0, expected, np.nan)
    return _matrix(
        trace,
        lift,
        phase,
        "coactivation_lift",
        f"meetings of two experts over those expected of independent ones ({which})",
    )


def layer_transition(
    trace: xr.Dataset,
    *,
    ahead: int = 1,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return which experts a later layer chooses, given an expert of this layer.

    Each row sums to the k of the later layer. A Markov prefetcher guesses from this table.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`coactivation`.
    ahead : int, default 1
        Layers between the two.
    which, phase
        As for :func:`coactivation`.

    Returns
    -------
    xarray.DataArray
        Shape (layer, expert, next_expert), float64, unit "1", without the last `ahead` layers; NaN
        for an expert that was never routed. Named ``layer_transition_<phase>``.

    Raises
    ------
    SettingsError
        If `ahead` is less than 1.

    Notes
    -----
    ``P(e' at l + ahead | e at l)``, counted over tokens that both layers routed. Source: OLMoE's
    cross-layer notebook.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> table = layer_transition(make_trace(n_token=20, n_layer=3, n_expert=8, n_used=2, seed=0))
    >>> dict(table.sizes)
    {'layer': 2, 'expert': 8, 'next_expert': 8}
    """
    n_expert = _n_expert(trace)
    parts = []
    for pairs, own in _pairs_between(trace, ahead, which, phase):
        parts.append(pairs / np.where(own > 0, own, np.nan)[:, None])
    values = np.stack(parts) if parts else np.empty((0, n_expert, n_expert))
    return _labelled(
        values,
        ("layer", "expert", "next_expert"),
        _coords(trace.isel(layer=slice(0, len(parts))), ("layer",)),
        phase,
        "layer_transition",
        f"probability of an expert {ahead} layer(s) on, given one here ({which})",
    )


def layer_mutual_information(
    trace: xr.Dataset,
    *,
    ahead: int = 1,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return what a layer's choice tells about the choice of a later layer.

    Counting overestimates it: even unrelated layers give about ``(E - 1)^2 / (2 n)`` nats, n the
    tokens (up to that, not exactly, since k slots of a token are not independent). Below a few E^2
    tokens compare traces of one length, not the value itself.

    Parameters
    ----------
    trace, ahead, which, phase
        As for :func:`layer_transition`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "nat", without the last `ahead` layers; NaN if no token was
        routed by both. Named ``layer_mutual_information_<phase>``.

    Raises
    ------
    SettingsError
        If `ahead` is less than 1.

    Notes
    -----
    ``I = sum over e, e' of p(e, e') ln(p(e, e') / (p(e) p(e')))``, where p(e, e') draws one of a
    token's experts here and one of the later layer's, both uniformly. Plug-in estimate.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=20, n_layer=3, n_expert=8, n_used=2, seed=0)
    >>> bool((layer_mutual_information(trace) >= 0).all())
    True
    """
    values = []
    for pairs, _ in _pairs_between(trace, ahead, which, phase):
        total = pairs.sum()
        if total == 0:
            values.append(np.nan)
            continue
        joint = pairs / total
        product = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
        seen = joint > 0
        values.append(float((joint[seen] * np.log(joint[seen] / product[seen])).sum()))
    return _labelled(
        np.array(values, dtype=np.float64),
        ("layer",),
        _coords(trace.isel(layer=slice(0, len(values))), ("layer",)),
        phase,
        "layer_mutual_information",
        f"mutual information of the choices here and {ahead} layer(s) on ({which})",
        "nat",
    )


def _pair_counts(here: npt.NDArray[Any], there: npt.NDArray[Any], n_expert: int) -> Counts:
    """Return how often each expert of one routing stands beside each of the other."""
    counts = np.zeros(n_expert * n_expert, dtype=np.int64)
    for begin in range(0, here.shape[0], _WINDOW):
        first = here[begin : begin + _WINDOW].astype(np.int64)
        second = there[begin : begin + _WINDOW].astype(np.int64)
        for slot in range(first.shape[1]):
            key = first[:, slot, None] * n_expert + second
            known = (first[:, slot, None] >= 0) & (second >= 0)
            counts += np.bincount(key[known], minlength=counts.size)
    return counts.reshape(n_expert, n_expert)


def _pairs_within(
    trace: xr.Dataset, which: str, phase: str
) -> tuple[Counts, npt.NDArray[np.int64]]:
    """Return the meetings (layer, expert, partner) with the routings of each layer."""
    expert = _experts(trace, which)[_phase_rows(trace, phase)]
    n_expert, n_layer = _n_expert(trace), expert.shape[1]
    counts = np.zeros((n_layer, n_expert, n_expert), dtype=np.int64)
    for layer in range(n_layer):
        counts[layer] = _pair_counts(expert[:, layer], expert[:, layer], n_expert)
    return counts, (expert >= 0).any(axis=-1).sum(axis=0)


def _pairs_between(
    trace: xr.Dataset, ahead: int, which: str, phase: str
) -> Iterator[tuple[Counts, Counts]]:
    """Yield, layer by layer, pairs (expert, next_expert) beside the routings of the expert."""
    ahead = _check_at_least("ahead", ahead, 1, "Use 1 for the next layer.")
    expert = _experts(trace, which)[_phase_rows(trace, phase)]
    n_expert = _n_expert(trace)
    for layer in range(expert.shape[1] - ahead):
        here, there = expert[:, layer], expert[:, layer + ahead]
        both = (here >= 0).any(axis=-1) & (there >= 0).any(axis=-1)
        here, there = here[both], there[both]
        yield (
            _pair_counts(here, there, n_expert),
            np.bincount(here[here >= 0].astype(np.int64), minlength=n_expert),
        )


def _matrix(
    trace: xr.Dataset,
    values: npt.NDArray[np.float64],
    phase: str,
    name: str,
    long_name: str,
) -> xr.DataArray:
    diagonal = np.arange(values.shape[-1])
    values[:, diagonal, diagonal] = np.nan
    return _labelled(
        values,
        ("layer", "expert", "partner"),
        _coords(trace, ("layer",)),
        phase,
        name,
        long_name,
    )
