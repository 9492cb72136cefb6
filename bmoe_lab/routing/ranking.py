"""Who comes first within one token: the largest weight of a routing, the experts by score."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled

__all__ = ["FEW", "choice_shares", "largest", "prefer", "rank_first", "read_scores", "slots_of"]

# Ranks looked at first, in routings; doubled until they suffice. Ranking all experts is dear.
FEW = 2


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
def slots_of(ids: npt.NDArray[np.int32], row: int, n_expert: int) -> npt.NDArray[np.int64]:
    """Return each expert's slot in a row, the width for those that the router did not choose."""
    slot_of = np.full(n_expert, ids.shape[1], np.int64)
    for slot in range(ids.shape[1]):
        slot_of[ids[row, slot]] = slot
    return slot_of


@compiled
def rank_first(
    score: npt.NDArray[np.float64],
    slot_of: npt.NDArray[np.int64],
    n: int,
    order: npt.NDArray[np.int64],
) -> int:
    """Write the `n` best experts to `order`, best first; return how many have a score at all.

    At a tie the router's own choice stands before the others, in the order of its slots, then the
    lower id: so the ranking begins with what the router chose.
    """
    n_ranked = 0
    for expert in range(score.size):
        x = score[expert]
        if math.isnan(x):
            continue
        if n_ranked == n:
            last = order[n - 1]
            if not (x > score[last] or (x == score[last] and slot_of[expert] < slot_of[last])):
                continue
            place = n - 1
        else:
            place = n_ranked
            n_ranked += 1
        while place > 0:
            before = order[place - 1]
            if not (
                x > score[before] or (x == score[before] and slot_of[expert] < slot_of[before])
            ):
                break
            order[place] = before
            place -= 1
        order[place] = expert
    return n_ranked


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
    n_expert = score.size
    slot_of = slots_of(ids, row, n_expert)
    order = np.empty(n_expert, np.int64)
    chosen = np.empty(width, np.int64)
    taken = np.zeros(n_expert, np.bool_)
    window = min(window, n_expert)
    n_asked = max(width, min(window, FEW * width))
    n_taken = 0
    while True:
        n_ranked = rank_first(score, slot_of, n_asked, order)
        for rank in range(min(window, n_ranked)):
            best = order[rank]
            if n_taken < width and not taken[best] and (rank < keep or preferred[best]):
                taken[best] = True
                chosen[n_taken] = best
                n_taken += 1
        if n_taken == width or n_asked >= window:
            break
        n_asked = min(window, 2 * n_asked)
    for rank in range(n_ranked):
        best = order[rank]
        if n_taken < width and not taken[best]:
            taken[best] = True
            chosen[n_taken] = best
            n_taken += 1
    n_changed = 0
    source = 0
    for slot in range(width):
        if taken[ids[row, slot]]:
            continue
        while slot_of[chosen[source]] < width:
            source += 1
        out[row, slot] = chosen[source]
        source += 1
        n_changed += 1
    return n_changed
