"""What the scores of all experts tell, chosen or not."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import SettingsError, unknown_name
from bmoe_lab.metrics._scores import Gate, _probabilities, _score_windows
from bmoe_lab.metrics._shared import (
    Bools,
    PhaseName,
    _any_slot,
    _check_by,
    _phase_rows,
    _ratio,
    _values,
)

__all__ = ["near_ties", "router_margin", "score_entropy"]

_SCALES = {
    "nat": ("nat", "entropy of the router over all experts"),
    "relative": ("1", "entropy of the router over that of a uniform one"),
    "experts": ("1", "experts that the router weighs in effect"),
}


def score_entropy(
    trace: xr.Dataset,
    *,
    scale: Literal["nat", "relative", "experts"] = "nat",
    gate: Gate = "recorded",
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the entropy of the router over all experts.

    How undecided the router is before it cuts to k; :func:`router_entropy` looks at the weights
    that are left.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``router_score``, shape (token, layer, expert), and ``expert_chosen``.
    scale : {"nat", "relative", "experts"}, default "nat"
        H itself, ``H / ln E`` in [0, 1], or ``e^H``, the number of equally likely experts with the
        same entropy; each averaged over routings.
    gate : {"recorded", "softmax", "normalised"}, default "recorded"
        How scores become probabilities: they are probabilities already; they are logits of a
        softmax; they are a sigmoid's outputs, to be divided by their sum.
    by : {"token", "layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "nat" or "1"; named ``score_entropy_<phase>``. NaN for
        a group that holds an unknown score.

    Raises
    ------
    SchemaError
        If ``router_score`` is absent.
    SettingsError
        If the scores do not fit `gate`. A selection bias makes scores that are no probabilities
        under any gate.

    Notes
    -----
    ``H = -sum over e of s_e ln s_e``; ``H / ln E`` as in FreeToken's routing statistics.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, scores=True, seed=0)
    >>> 0 < float(score_entropy(trace, scale="relative")) < 1
    True
    """
    _check_by(by, ["token", "layer"])
    if scale not in _SCALES:
        raise unknown_name("scale", scale, list(_SCALES))
    rows = _phase_rows(trace, phase)
    cell = _any_slot(trace)
    entropy = np.zeros(cell.shape)
    n_expert = 0
    for where, score in _score_windows(trace, rows):
        n_expert = score.shape[-1]
        share = _probabilities(score, cell[where], gate)
        plogp = share * np.log(np.where(share > 0, share, 1.0))
        entropy[where] = -plogp.sum(axis=-1)
    if scale == "relative":
        # One expert leaves no doubt, and ln 1 = 0.
        entropy = entropy / np.log(n_expert) if n_expert > 1 else np.full(cell.shape, np.nan)
    elif scale == "experts":
        entropy = np.exp(entropy)
    units, long_name = _SCALES[scale]
    return _ratio(
        trace,
        np.where(cell, entropy, 0.0)[..., None],
        cell[..., None],
        by,
        phase,
        "score_entropy",
        long_name,
        units=units,
    )


def router_margin(
    trace: xr.Dataset, *, by: Literal["token", "layer"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return by how much the last chosen expert beats the best one that was not chosen.

    In the unit of the sorted score, so it compares layers of one model, not models.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``router_score``, shape (token, layer, expert), ``n_expert_used``, ``expert_chosen``.
    by : {"token", "layer"}, optional
        Dimension kept; routings are averaged.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``router_margin_<phase>``. NaN for a group
        that holds an unknown score; infinite where the graph ruled the next expert out.

    Raises
    ------
    SchemaError
        If ``router_score`` is absent.

    Notes
    -----
    ``r_(k) - r_(k+1)``, r the scores that the graph sorted (bias and group mask included), k the
    width of the layer. A layer that uses all its experts has no margin and is left out.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(router_margin(make_trace(n_token=8, n_layer=2, scores=True, seed=0))) > 0
    True
    """
    _check_by(by, ["token", "layer"])
    margin, counted = _margins(trace, phase)
    return _ratio(
        trace,
        np.where(counted, margin, 0.0)[..., None],
        counted[..., None],
        by,
        phase,
        "router_margin",
        "score of the last chosen expert over the best one left out",
    )


def near_ties(
    trace: xr.Dataset,
    eps: float,
    *,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the share of routings decided by less than `eps`.

    There a small push, such as a preference for resident experts, changes the choice; so do other
    low bits of the same model.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`router_margin`.
    eps : float
        Margin below which a routing counts, above 0, in the unit of the score.
    by, phase
        As for :func:`router_margin`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``near_ties_<phase>``. NaN for a group that
        holds an unknown score.

    Raises
    ------
    SchemaError
        If ``router_score`` is absent.
    SettingsError
        If `eps` is not above 0.

    Notes
    -----
    Share of routings with ``r_(k) - r_(k+1) < eps``; see :func:`router_margin`. With scores rounded
    to float16 an `eps` below their spacing counts ties that rounding made.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(near_ties(make_trace(n_token=8, n_layer=2, scores=True, seed=0), 1.0))
    1.0
    """
    _check_by(by, ["token", "layer"])
    if not eps > 0:
        raise SettingsError(f"eps must be above 0; got {eps!r}. Use the unit of the score.")
    margin, counted = _margins(trace, phase)
    near = np.where(np.isnan(margin), np.nan, margin < eps)
    return _ratio(
        trace,
        np.where(counted, near, 0.0)[..., None],
        counted[..., None],
        by,
        phase,
        "near_ties",
        f"routings decided by less than {eps:g}",
    )


def _margins(trace: xr.Dataset, phase: str) -> tuple[np.ndarray, Bools]:
    """Return the margin of every routing of the phase, and which cells have one."""
    rows = _phase_rows(trace, phase)
    used = _values(trace, "n_expert_used").astype(np.int64)
    counted = _any_slot(trace)
    margin = np.zeros(counted.shape)
    for where, score in _score_windows(trace, rows):
        n_expert = score.shape[-1]
        counted[:, used >= n_expert] = False
        for k in np.unique(used[used < n_expert]).tolist():
            layers = np.flatnonzero(used == k)
            ranked = np.partition(-score[:, layers], (k - 1, k), axis=-1)
            with np.errstate(invalid="ignore"):
                gap = ranked[..., k] - ranked[..., k - 1]
            # A NaN sorts last and would hide among the scores that nobody looks at.
            gap[np.isnan(ranked).any(axis=-1)] = np.nan
            margin[np.ix_(where, layers)] = gap
    return margin, counted
