"""What a policy's answer comes to, row by row: compiled, the same live and in replay."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled

__all__ = [
    "DROPPED",
    "KEPT",
    "REWEIGHTED",
    "SUBSTITUTED",
    "align_selection",
    "count_missing",
    "drop_slots",
    "first_bad_id",
    "known_sum",
]

Ids = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Actions = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

# Values of `Action` in the trace; this package does not depend on the trace's schema.
KEPT: Final = 0
DROPPED: Final = 1
SUBSTITUTED: Final = 2
REWEIGHTED: Final = 3


@compiled
def first_bad_id(ids: npt.NDArray[np.int64], n_expert: int) -> tuple[int, int, int]:
    """Return (kind, row, slot) of the first id out of range (1) or repeated (2), else (0, 0, 0)."""
    n_row, width = ids.shape
    for row in range(n_row):
        for slot in range(width):
            if ids[row, slot] < 0 or ids[row, slot] >= n_expert:
                return 1, row, slot
            for earlier in range(slot):
                if ids[row, earlier] == ids[row, slot]:
                    return 2, row, slot
    return 0, 0, 0


@compiled
def align_selection(
    router_ids: Ids, new_ids: npt.NDArray[np.int64], out: Ids, action: Actions
) -> int:
    """Put each row's newcomers into the slots of those who left; return how many there are."""
    n_row, width = router_ids.shape
    n_changed = 0
    for row in range(n_row):
        source = 0
        for slot in range(width):
            stays = False
            for other in range(width):
                if new_ids[row, other] == router_ids[row, slot]:
                    stays = True
            if stays:
                continue
            newcomer = False
            while not newcomer:  # as many newcomers as leavers: rows have no repeats
                newcomer = True
                for other in range(width):
                    if router_ids[row, other] == new_ids[row, source]:
                        newcomer = False
                source += 1
            out[row, slot] = new_ids[row, source - 1]
            action[row, slot] = SUBSTITUTED
            n_changed += 1
    return n_changed


@compiled
def drop_slots(
    drop: Mask,
    renormalise: bool,
    ids: Ids,
    weights: Weights,
    out_ids: Ids,
    out_weights: Weights,
    action: Actions,
) -> tuple[int, float]:
    """Apply a drop mask row by row; rows without a drop are not touched."""
    n_row, width = ids.shape
    n_dropped = 0
    discarded = 0.0
    for row in range(n_row):
        n_kept = 0
        best = -1  # the best of those kept, the first on a tie; NaN loses to any number
        for slot in range(width):
            if not drop[row, slot]:
                n_kept += 1
                if (
                    best < 0
                    or weights[row, slot] > weights[row, best]
                    or (np.isnan(weights[row, best]) and not np.isnan(weights[row, slot]))
                ):
                    best = slot
        if n_kept == width:
            continue
        if n_kept == 0:
            # A routing is never emptied: its largest weight stays.
            best = 0
            for slot in range(1, width):
                if weights[row, slot] > weights[row, best] or (
                    np.isnan(weights[row, best]) and not np.isnan(weights[row, slot])
                ):
                    best = slot
        total = 0.0
        kept = 0.0
        for slot in range(width):
            total += weights[row, slot]
            if slot == best or not drop[row, slot]:
                kept += weights[row, slot]
            elif not np.isnan(weights[row, slot]):
                discarded += weights[row, slot]
        scale = 1.0
        if renormalise and kept != 0 and np.isfinite(total / kept):
            scale = total / kept
        for slot in range(width):
            if slot == best or not drop[row, slot]:
                out_weights[row, slot] = weights[row, slot] * scale
            else:
                out_ids[row, slot] = ids[row, best]
                out_weights[row, slot] = 0.0
                action[row, slot] = DROPPED
                n_dropped += 1
    return n_dropped, discarded


@compiled
def count_missing(ids: Ids, resident: Mask) -> int:
    """Return how many experts a load of `ids` would read."""
    seen = resident.copy()
    n_missing = 0
    for row in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            if not seen[ids[row, slot]]:
                seen[ids[row, slot]] = True
                n_missing += 1
    return n_missing


@compiled
def known_sum(weights: Weights) -> float:
    """Return the sum of the weights that are known."""
    total = 0.0
    for row in range(weights.shape[0]):
        for slot in range(weights.shape[1]):
            if not np.isnan(weights[row, slot]):
                total += weights[row, slot]
    return total
