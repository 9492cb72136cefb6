"""How routings spread over the experts of a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.metrics._scores import Gate, _probabilities, _score_windows
from bmoe_lab.metrics._shared import (
    PhaseName,
    Which,
    _any_slot,
    _check_at_least,
    _coords,
    _experts,
    _labelled,
    _n_expert,
    _phase_rows,
)

__all__ = [
    "expert_load",
    "experts_to_cover",
    "experts_used",
    "experts_used_once",
    "load_balance",
    "load_cv",
    "load_max_violation",
    "routing_counts",
    "top_share",
]


def routing_counts(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how often each expert of each layer was routed.

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
        Shape (layer, expert), float64, unit "1"; NaN for a layer that routed nothing. Named
        ``routing_counts_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``n_e``, the tokens for which expert e is among the chosen.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> counts = routing_counts(make_trace(n_token=4, n_layer=2, n_used=2, seed=0), phase="all")
    >>> float(counts[0].sum())
    8.0
    """
    count = _counts(trace, which, phase)
    return _labelled(
        np.where(count.sum(axis=1, keepdims=True) > 0, count, np.nan),
        ("layer", "expert"),
        _coords(trace, ("layer",)),
        phase,
        "routing_counts",
        f"routings of the expert ({which})",
    )


def _counts(trace: xr.Dataset, which: str, phase: str) -> npt.NDArray[np.int64]:
    rows = _phase_rows(trace, phase)
    expert = _experts(trace, which)[rows]
    n_expert, n_layer = _n_expert(trace), expert.shape[1]
    key = expert.astype(np.int64) + np.arange(n_layer)[None, :, None] * n_expert
    count = np.bincount(key[expert >= 0], minlength=n_layer * n_expert)
    return count.reshape(n_layer, n_expert).astype(np.int64)


def expert_load(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how the routings of each layer spread over its experts.

    Parameters
    ----------
    trace, which, phase
        As for :func:`routing_counts`.

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
    return _labelled(
        _load(trace, which, phase),
        ("layer", "expert"),
        _coords(trace, ("layer",)),
        phase,
        "expert_load",
        f"share of the layer's routings ({which})",
    )


def _load(trace: xr.Dataset, which: str, phase: str) -> npt.NDArray[np.float64]:
    count = _counts(trace, which, phase)
    total = count.sum(axis=1, keepdims=True)
    load: npt.NDArray[np.float64] = np.where(
        total > 0, count / np.where(total > 0, total, 1), np.nan
    )
    return load


def _by_layer(
    trace: xr.Dataset, values: npt.NDArray[Any], phase: str, name: str, long_name: str
) -> xr.DataArray:
    return _labelled(values, ("layer",), _coords(trace, ("layer",)), phase, name, long_name)


def load_cv(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how uneven the load of each layer is: standard deviation over mean.

    Zero means that all experts work alike. A short trace is uneven by chance: with n routings over
    E experts even a uniform router gives about ``sqrt((E - 1) / n)``.

    Parameters
    ----------
    trace, which, phase
        As for :func:`routing_counts`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing. Named
        ``load_cv_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``CV = sigma / mu`` of the load over the E experts, sigma with divisor E. Coefficient of
    variation, as in the balance measures of the sparsely gated layer (arXiv 1701.06538).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> load_cv(make_trace(n_token=8, n_layer=2, seed=0)).dims
    ('layer',)
    """
    load = _load(trace, which, phase)
    return _by_layer(
        trace,
        load.std(axis=1) * load.shape[1],  # the mean of a load is 1 / E
        phase,
        "load_cv",
        f"standard deviation of the expert load over its mean ({which})",
    )


def load_max_violation(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return by how much the busiest expert of each layer exceeds a fair load (MaxVio).

    Parameters
    ----------
    trace, which, phase
        As for :func:`routing_counts`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1", 0 if all work alike, at most E/k - 1; NaN for a layer
        that routed nothing. Named ``load_max_violation_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``MaxVio = max f / mean f - 1``. Definition: auxiliary-loss-free balancing (arXiv 2408.15664).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> bool((load_max_violation(make_trace(n_token=8, n_layer=2, seed=0)) >= 0).all())
    True
    """
    load = _load(trace, which, phase)
    return _by_layer(
        trace,
        load.max(axis=1) * load.shape[1] - 1,
        phase,
        "load_max_violation",
        f"load of the busiest expert over the mean, less one ({which})",
    )


def load_balance(
    trace: xr.Dataset, *, gate: Gate = "recorded", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the Switch Transformer's balance of each layer, without its factor alpha.

    One if load and probability are uniform, larger if the router both prefers some experts and
    sends them more tokens.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``router_score`` of shape (token, layer, expert) and ``expert_chosen``.
    gate : {"recorded", "softmax", "normalised"}, default "recorded"
        How scores become probabilities; see :func:`score_entropy`.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing or whose scores are
        partly unknown. Named ``load_balance_<phase>``.

    Raises
    ------
    SchemaError
        If ``router_score`` is absent.
    SettingsError
        If the recorded scores are no probabilities.

    Notes
    -----
    ``E * sum over e of f_e P_e``, f_e the load of what the router chose, P_e the mean probability
    of e over the tokens. Source: arXiv 2101.03961, equations 4 to 6.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, scores=True, seed=0)
    >>> bool((load_balance(trace) > 1).all())
    True
    """
    rows = _phase_rows(trace, phase)
    cell = _any_slot(trace)
    n_layer, n_expert = cell.shape[1], _n_expert(trace)
    total = np.zeros((n_layer, n_expert))
    for where, score in _score_windows(trace, rows):
        known = cell[where]
        total += np.where(known[..., None], _probabilities(score, known, gate), 0.0).sum(axis=0)
    count = cell[rows].sum(axis=0)[:, None]
    mean = np.where(count > 0, total / np.where(count > 0, count, 1), np.nan)
    return _by_layer(
        trace,
        n_expert * (_load(trace, "chosen", phase) * mean).sum(axis=1),
        phase,
        "load_balance",
        "load times mean probability, summed over experts, times their number",
    )


def experts_to_cover(
    trace: xr.Dataset,
    share: float = 0.9,
    *,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how many experts of each layer cover a share of its routings.

    Few: a hot set that could be pinned. The experts are picked with hindsight, so a cache cannot do
    better with the same number of fixed places.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`routing_counts`.
    share : float, default 0.9
        Share to cover, above 0 and at most 1.
    which, phase
        As for :func:`routing_counts`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing. Named
        ``experts_to_cover_<phase>``.

    Raises
    ------
    SettingsError
        If `share` is not above 0 and at most 1.

    Notes
    -----
    The smallest n for which the n most used experts take ``share`` of the routings. Source:
    FreeToken's routing statistics (90 %).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> bool((experts_to_cover(make_trace(n_token=8, n_layer=2, seed=0)) >= 4).all())
    True
    """
    if not 0 < share <= 1:
        raise SettingsError(
            f"share must be above 0 and at most 1; got {share!r}. Use 0.9 for 90 %."
        )
    count = _counts(trace, which, phase)
    total = count.sum(axis=1, keepdims=True)
    covered = np.cumsum(-np.sort(-count, axis=1), axis=1)
    # A share such as 0.9 is no binary fraction: a hair less must not cost one more expert.
    reached = covered >= share * total * (1 - 1e-12)
    needed = np.where(total[:, 0] > 0, reached.argmax(axis=1) + 1.0, np.nan)
    return _by_layer(
        trace,
        needed,
        phase,
        "experts_to_cover",
        f"experts that cover {100 * share:g} % of the routings ({which})",
    )


def top_share(
    trace: xr.Dataset, n: int = 8, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the share of each layer's routings that its `n` most used experts take.

    By chance it is a little more than ``n / E``.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`routing_counts`.
    n : int, default 8
        Experts counted, the most used ones.
    which, phase
        As for :func:`routing_counts`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing. Named
        ``top_share_<phase>``.

    Raises
    ------
    SettingsError
        If `n` is less than 1.

    Notes
    -----
    Source: BigMoeOnEdge's trace analysis and FreeToken's routing statistics (top 8). Their mean
    over layers is unweighted.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, n_expert=16, seed=0)
    >>> top_share(trace, 16).values
    array([1., 1.])
    """
    n = _check_at_least("n", n, 1, "Use 8 for the usual figure.")
    load = -np.sort(-_load(trace, which, phase), axis=1)
    return _by_layer(
        trace,
        load[:, :n].sum(axis=1),
        phase,
        "top_share",
        f"routings of the {n} most used experts ({which})",
    )


def experts_used(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how many distinct experts of each layer were routed.

    Parameters
    ----------
    trace, which, phase
        As for :func:`routing_counts`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing. Named
        ``experts_used_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    It grows with the length of the trace: compare traces of one length, or
    :func:`working_set` at one window.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> experts_used(make_trace(n_token=1, n_prefill=0, n_layer=2, n_used=3, seed=0)).values
    array([3., 3.])
    """
    count = _counts(trace, which, phase)
    used = (count > 0).sum(axis=1)
    return _by_layer(
        trace,
        np.where(used > 0, used, np.nan),
        phase,
        "experts_used",
        f"distinct experts routed ({which})",
    )


def experts_used_once(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return how many experts of each layer were routed exactly once.

    No cache can have served them within this trace: the read was due, and keeping it was vain.

    Parameters
    ----------
    trace, which, phase
        As for :func:`routing_counts`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing. Named
        ``experts_used_once_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    Source: the "used once" line of BigMoeOnEdge's reuse analysis.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> experts_used_once(make_trace(n_token=1, n_prefill=0, n_layer=2, n_used=3, seed=0)).values
    array([3., 3.])
    """
    count = _counts(trace, which, phase)
    once = (count == 1).sum(axis=1)
    return _by_layer(
        trace,
        np.where(count.sum(axis=1) > 0, once, np.nan),
        phase,
        "experts_used_once",
        f"experts routed exactly once ({which})",
    )
