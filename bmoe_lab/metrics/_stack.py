"""The stack distance of every lookup, by a tree of partial sums."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled

__all__ = ["stack_distances"]

IntArray = npt.NDArray[np.int64]


@compiled
def _add(tree: IntArray, at: int, amount: int) -> None:
    position = at + 1
    while position < tree.size:
        tree[position] += amount
        position += position & -position


@compiled
def _sum_before(tree: IntArray, at: int) -> int:
    total = 0
    position = at
    while position > 0:
        total += tree[position]
        position -= position & -position
    return total


@compiled
def stack_distances(
    expert: npt.NDArray[np.int16],
    asks: npt.NDArray[np.bool_],
    begins: IntArray,
    resets: npt.NDArray[np.bool_],
    weight: IntArray,
    n_expert: int,
    out: npt.NDArray[np.float64],
) -> None:
    """Fill `out` (token, layer, slot) with stack distances; NaN where a row is no lookup or new.

    `expert` is -1 where a slot touches nothing; where `asks` is false the slot only touches its
    expert, as the stand-in of a dropped slot does; `begins` are the first tokens of evaluations;
    `resets` says which evaluations forget everything; `weight` (layer,) is what an expert counts.
    The tree holds the weight of every key at the place of its last use, so the sum from there on
    is what was used since, the key itself included.
    """
    n_token, n_layer, n_slot = expert.shape
    tree = np.zeros(n_token * n_layer * n_slot + 1, dtype=np.int64)
    last = np.full(n_layer * n_expert, -1, dtype=np.int64)
    stamp = np.zeros(n_layer * n_expert, dtype=np.int64)
    total = 0
    now = 0
    load = 0
    for index in range(begins.size):
        begin = begins[index]
        end = begins[index + 1] if index + 1 < begins.size else n_token
        if resets[index]:
            for key in range(last.size):
                if last[key] >= 0:
                    _add(tree, last[key], -weight[key // n_expert])
                    last[key] = -1
            total = 0
        for layer in range(n_layer):
            load += 1
            # A load is judged before it touches anything, so all its sums come first.
            for token in range(begin, end):
                for slot in range(n_slot):
                    out[token, layer, slot] = np.nan
                    if not asks[token, layer, slot]:
                        continue
                    key = layer * n_expert + expert[token, layer, slot]
                    if stamp[key] != load and last[key] >= 0:
                        out[token, layer, slot] = total - _sum_before(tree, last[key])
                    stamp[key] = load
            for token in range(begin, end):
                for slot in range(n_slot):
                    if expert[token, layer, slot] < 0:
                        continue
                    key = layer * n_expert + expert[token, layer, slot]
                    if last[key] >= 0:
                        _add(tree, last[key], -weight[layer])
                    else:
                        total += weight[layer]
                    _add(tree, now, weight[layer])
                    last[key] = now
                    now += 1
