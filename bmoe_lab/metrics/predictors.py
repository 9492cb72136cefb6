"""How well simple guesses foretell the experts of a decoded token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError, unknown_name
from bmoe_lab.metrics._shared import (
    Bools,
    _check_at_least,
    _check_by,
    _experts,
    _isin_last,
    _n_expert,
    _phase_rows,
    _ratio,
    _segments,
    _values,
)

__all__ = ["predictor_precision", "predictor_recall"]

Predictor = Literal["random", "previous", "decode", "prompt"]
_PREDICTORS = ("random", "previous", "decode", "prompt")
Floats = npt.NDArray[np.float64]


def predictor_recall(
    trace: xr.Dataset,
    predictor: Predictor = "previous",
    *,
    n_guess: int | None = None,
    lag: int = 1,
    by: Literal["token", "layer"] | None = None,
) -> xr.DataArray:
    """Return the share of a decoded token's experts that a predictor guessed.

    What a prefetch could have found in time, not what it would save: the guess may be resident
    already, and a wrong one costs a read.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` of shape (token, layer, slot), ``n_expert_used``, the coordinates
        ``turn``, ``phase``, ``position`` and the attribute ``n_expert``.
    predictor : {"previous", "random", "decode", "prompt"}, default "previous"
        ``"previous"``: the choice of the layer `lag` tokens before. ``"random"``: any `n_guess`
        experts. ``"decode"``: the most used experts of the layer over the whole decode, the token
        itself and its future included: a bound for fixed sets, not a predictor. ``"prompt"``: the
        most used ones of the prefill of the same turn.
    n_guess : int, optional
        Experts guessed per layer; by default as many as the layer uses. Fewer are guessed if fewer
        were ever used. Not for ``"previous"``, which guesses what that token chose.
    lag : int, default 1
        Only for ``"previous"``.
    by : {"token", "layer"}, optional
        Dimension kept.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``predictor_recall_decode``. NaN where
        nothing could be scored.

    Raises
    ------
    SettingsError
        If `n_guess` or `lag` does not fit the predictor.

    Notes
    -----
    ``|guess and S| / |S|``, averaged over routings. Definitions of BigMoeOnEdge's predictor study,
    ties included: equal counts go to the expert seen first (token by token, slot by slot).
    ``"previous"`` and ``"decode"`` are scored on tokens that follow another of the decode, so that
    they are comparable; ``"prompt"`` and ``"random"`` on all. By chance ``n_guess / E``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=40, n_layer=2, n_expert=16, n_used=4, seed=0)
    >>> float(predictor_recall(trace, "random"))
    0.25
    >>> bool(predictor_recall(trace) == trace.moe.consecutive_overlap())
    True
    """
    _check_by(by, ["token", "layer"])
    guessed, _, scored = _guesses(trace, predictor, n_guess, lag)
    return _ratio(
        trace,
        guessed,
        scored,
        by,
        "decode",
        "predictor_recall",
        f"experts that the predictor {predictor!r} guessed",
    )


def predictor_precision(
    trace: xr.Dataset,
    predictor: Predictor = "previous",
    *,
    n_guess: int | None = None,
    lag: int = 1,
    by: Literal["token", "layer"] | None = None,
) -> xr.DataArray:
    """Return the share of a predictor's guesses that a decoded token then chose.

    One minus it is the share of prefetched bytes that is wasted, if every guess is read.

    Parameters
    ----------
    trace, predictor, n_guess, lag, by
        As for :func:`predictor_recall`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``predictor_precision_decode``. NaN where
        nothing was guessed.

    Raises
    ------
    SettingsError
        If `n_guess` or `lag` does not fit the predictor.

    Notes
    -----
    ``sum of |guess and S| / sum of |guess|`` over the routings of :func:`predictor_recall`. Equal
    to the recall where as many experts are guessed as chosen.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=40, n_layer=2, n_expert=16, n_used=4, seed=0)
    >>> many = predictor_precision(trace, "prompt", n_guess=8)
    >>> bool(many < predictor_precision(trace, "prompt", n_guess=4))
    True
    """
    _check_by(by, ["token", "layer"])
    guessed, size, _ = _guesses(trace, predictor, n_guess, lag)
    return _ratio(
        trace,
        guessed.sum(axis=-1)[..., None],
        size[..., None],
        by,
        "decode",
        "predictor_precision",
        f"guesses of the predictor {predictor!r} that came true",
    )


def _guesses(
    trace: xr.Dataset, predictor: str, n_guess: int | None, lag: int
) -> tuple[Floats, Floats, Bools]:
    """Return which slots were guessed, how many guesses a cell had, which slots are scored."""
    if predictor not in _PREDICTORS:
        raise unknown_name("predictor", predictor, list(_PREDICTORS))
    lag = _check_at_least("lag", lag, 1, "Use 1 for the token before.")
    if predictor != "previous" and lag != 1:
        raise SettingsError(
            f"lag must be left out for the predictor {predictor!r}; got {lag!r}. "
            "Only 'previous' looks back."
        )
    if predictor == "previous" and n_guess is not None:
        raise SettingsError(
            f"n_guess must be left out for the predictor 'previous'; got {n_guess!r}. "
            "It guesses what that token chose."
        )
    expert = _experts(trace, "chosen")
    decode = _phase_rows(trace, "decode")
    routed: Bools = np.asarray((expert >= 0) & decode[:, None, None])
    n_expert, width = _n_expert(trace), _values(trace, "n_expert_used").astype(np.int64)
    if n_guess is not None:
        n_guess = _check_at_least("n_guess", n_guess, 1, "Leave it out for as many as are used.")
        if n_guess > n_expert:
            raise SettingsError(
                f"n_guess must be at most the experts of a layer, {n_expert}; got {n_guess!r}."
            )
        width = np.full(width.shape, n_guess)
    if predictor == "random":
        guessed = routed * (width / n_expert)[None, :, None]
        size = np.where(routed.any(axis=-1), width.astype(np.float64), 0.0)
        return guessed, size, routed
    if predictor == "previous":
        return _previous(expert, routed, _segments(trace), lag)

    if predictor == "decode":
        follows = _pairs(routed, _segments(trace), 1)
        turns: Any = np.zeros(decode.size, dtype=np.int64)
        counted = decode
        scored = routed & follows[..., None]
    else:
        turns = _values(trace, "turn")
        counted = _phase_rows(trace, "prefill")
        scored = routed.copy()
    hit = np.zeros(expert.shape)
    guesses = np.zeros(expert.shape[:2])
    for tokens, layer, guess in _most_used(expert, turns, counted, width, n_expert):
        here = np.flatnonzero(tokens)
        slots = expert[here, layer]
        hit[here, layer] = guess[np.maximum(slots, 0)] & (slots >= 0)
        guesses[here, layer] = guess.sum()
    # Where nothing was counted there is no guess to score.
    scored &= (guesses > 0)[..., None]
    return hit * scored, guesses * scored.any(axis=-1), scored


def _pairs(routed: Bools, segment: npt.NDArray[np.int64], lag: int) -> Bools:
    """Return the cells whose layer routed `lag` tokens before too, in the decode without a gap."""
    cell: Bools = np.asarray(routed.any(axis=-1))
    pair = np.zeros(cell.shape, dtype=bool)
    if cell.shape[0] > lag:
        pair[lag:] = cell[lag:] & cell[:-lag] & (segment[lag:] == segment[:-lag])[:, None]
    return pair


def _previous(
    expert: npt.NDArray[Any], routed: Bools, segment: npt.NDArray[np.int64], lag: int
) -> tuple[Floats, Floats, Bools]:
    pair = _pairs(routed, segment, lag)
    scored: Bools = np.asarray(routed & pair[..., None])
    guessed = np.zeros(expert.shape)
    size = np.zeros(expert.shape[:2])
    if expert.shape[0] > lag:
        before = np.where(expert >= 0, expert, -2)[:-lag]
        guessed[lag:] = _isin_last(expert[lag:], before)
        size[lag:] = (before >= 0).sum(axis=-1)
    return guessed * scored, size * pair, scored


def _most_used(
    expert: npt.NDArray[Any],
    turns: npt.NDArray[Any],
    counted: Bools,
    width: npt.NDArray[np.int64],
    n_expert: int,
) -> Iterator[tuple[Bools, int, Bools]]:
    """Yield, by turn and layer, the turn's tokens beside the most used experts (expert,)."""
    for turn in np.unique(turns):
        tokens = turns == turn
        here = expert[tokens & counted]
        for layer in range(expert.shape[1]):
            seen = here[:, layer].ravel()
            seen = seen[seen >= 0].astype(np.int64)
            count = np.bincount(seen, minlength=n_expert)
            first = np.full(n_expert, seen.size)
            np.minimum.at(first, seen, np.arange(seen.size))
            ranked = np.lexsort((first, -count))[: width[layer]]
            guess = np.zeros(n_expert, dtype=bool)
            guess[ranked] = count[ranked] > 0
            yield tokens, layer, guess
