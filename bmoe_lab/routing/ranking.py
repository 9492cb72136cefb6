"""Who comes first within one token: the largest weight of a routing, the experts by score."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled

__all__ = ["choice_shares", "largest", "next_best", "prefer", "read_scores"]


@compiled
def largest(weights: npt.NDArray[np.float32], row: int) -> tuple[int, float]:
    """Return the slot of the largest weight of a row, the first on a tie, with the row's sum.

    The sum is NaN if a weight is: whoever compares with it then changes nothing on a guess.

    Examples
    --------
    >>> largest(np.float32([[0.25, 0.5, 0.25]]), 0)
    (1, 1.0)
    """
    best = 0
    total = 0.0
    for slot in range(weights.shape[1]):
        total += weights[row, slot]
        if weights[row, slot] > weights[row, best]:
            best = slot
    return best, total


@compiled
def read_scores(
    values: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32],
    row: int,
    score: npt.NDArray[np.float64],
) -> bool:
    """Copy a row's scores to `score`, NaN where not finite; return whether it can be ranked.

    It cannot if fewer experts than slots have a finite score, or one of the router's own has not.
    """
    n_finite = 0
    for expert in range(score.size):
        x = float(values[row, expert])
        if math.isfinite(x):
            n_finite += 1
            score[expert] = x
        else:
            score[expert] = math.nan
    sound: bool = n_finite >= ids.shape[1]
    for slot in range(ids.shape[1]):
        if math.isnan(score[ids[row, slot]]):
            sound = False
    return sound


@compiled
def next_best(
    score: npt.NDArray[np.float64], slot_of: npt.NDArray[np.int64], used: npt.NDArray[np.bool_]
) -> int:
    """Return the best expert that is not in `used`, -1 if none has a score.

    At a tie the router's own choice stands before the others, in the order of its slots, then the
    lower id: so the plain ranking begins with what the router chose.
    """
    best = -1
    for expert in range(score.size):
        if used[expert] or math.isnan(score[expert]):
            continue
        if (
            best < 0
            or score[expert] > score[best]
            or (score[expert] == score[best] and slot_of[expert] < slot_of[best])
        ):
            best = expert
    return best


@compiled
def choice_shares(
    score: npt.NDArray[np.float64],
    ids: npt.NDArray[np.int32],
    row: int,
    probabilities: bool,
    shares: npt.NDArray[np.float64],
) -> None:
    """Write what share of its weight the router gives to each expert that it chose.

    The scores' own shares where they are `probabilities` (the output of a softmax), else the
    softmax over the chosen: what a graph computes that normalises the weights after the top-k.

    Examples
    --------
    >>> shares = np.empty(2)
    >>> choice_shares(np.array([0.3, 0.1, 0.6]), np.int32([[2, 0]]), 0, True, shares)
    >>> shares.round(3).tolist()
    [0.667, 0.333]
    """
    top = -math.inf
    for slot in range(ids.shape[1]):
        top = max(top, score[ids[row, slot]])
    total = 0.0
    for slot in range(ids.shape[1]):
        x = score[ids[row, slot]]
        shares[slot] = x if probabilities else math.exp(x - top)
        total += shares[slot]
    for slot in range(ids.shape[1]):
        # A softmax that underflowed to zeros has no shares to tell.
        shares[slot] = shares[slot] / total if total > 0 else math.nan


@compiled
def prefer(
    score: npt.NDArray[np.float64],
    ids: npt.NDArray[np.int32],
    row: int,
    preferred: npt.NDArray[np.bool_],
    keep: int,
    window: int,
    out: npt.NDArray[np.int32],
) -> int:
    """Fill a routing with preferred experts among the best ranked; return the slots changed.

    The `keep` best stay; the other slots go to the preferred ones among the `window` best, in
    order of rank, then to whoever is best. Who stays keeps its slot.

    Parameters
    ----------
    score : numpy.ndarray of float64, shape (expert,)
        From :func:`read_scores`.
    ids, out : numpy.ndarray of int32, shape (token, slot)
        The router's choice; a copy of it to write into.
    row : int
        The token.
    preferred : numpy.ndarray of bool, shape (expert,)
        Resident ones, say.
    keep, window : int
        Ranks.
    """
    width = ids.shape[1]
    slot_of = np.full(score.size, width, np.int64)
    for slot in range(width):
        slot_of[ids[row, slot]] = slot
    used = np.zeros(score.size, np.bool_)
    order = np.empty(width, np.int64)
    passed = np.empty(score.size, np.int64)
    n_taken = n_passed = rank = 0
    while rank < window and n_taken < width:
        best = next_best(score, slot_of, used)
        if best < 0:
            break
        used[best] = True
        rank += 1
        if rank <= keep or preferred[best]:
            order[n_taken] = best
            n_taken += 1
        else:
            passed[n_passed] = best
            n_passed += 1
    # Those passed over rank before those not seen yet.
    seen = 0
    while n_taken < width:
        if seen < n_passed:
            best = passed[seen]
            seen += 1
        else:
            best = next_best(score, slot_of, used)
            used[best] = True
        order[n_taken] = best
        n_taken += 1
    stays = np.zeros(width, np.bool_)
    for i in range(width):
        if slot_of[order[i]] < width:
            stays[slot_of[order[i]]] = True
    n_changed = 0
    source = 0
    for slot in range(width):
        if stays[slot]:
            continue
        while slot_of[order[source]] < width:
            source += 1
        out[row, slot] = order[source]
        source += 1
        n_changed += 1
    return n_changed
