"""ARC: recency against frequency, shared out by which of the two was given up too early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.loads import (
    EVICTIONS,
    GENERATION,
    HIT,
    LOAD_EVICTIONS,
    LOAD_RESIDENT_BYTES,
    MISS,
    N_MISSING,
    N_RESIDENT,
    N_VICTIMS,
    OWN,
    RESIDENT_BYTES,
)
from bmoe_lab.residency.queues import (
    close_queues,
    fill_queue,
    keys_of_queue,
    n_links,
    oldest,
    push_newest,
    unlink,
)
from bmoe_lab.residency.start_state import make_resident, read_queues, read_real
from bmoe_lab.residency.state import KernelState

__all__ = ["ARC"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_QUEUE = 1  # where the key is: anchor of its queue less the number of keys, + 1; 0 is nowhere

# The paper's T1, T2, B1, B2.
_NOWHERE, _RECENT, _FREQUENT, _RECENT_GHOST, _FREQUENT_GHOST = 0, 1, 2, 3, 4
_QUEUES = ("recent", "frequent", "recent_ghosts", "frequent_ghosts")
_N_QUEUE = len(_QUEUES)

# Cells of the header.
_RECENT_BYTES = OWN
_RECENT_GHOST_BYTES = OWN + 1
_FREQUENT_GHOST_BYTES = OWN + 2
_TARGET = OWN + 3  # the paper's p: bytes that the recent queue should have, the bits of a float64


@compiled
def load_arc(
    keys: IntArray,
    offsets: IntArray,
    begin: int,
    end: int,
    future: IntArray,
    key_bytes: IntArray,
    budget: int,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
    out_residency: npt.NDArray[np.uint8],
    out_first: BoolArray,
    out_keys: IntArray,
    out_loads: IntArray,
) -> int:
    """Serve loads; signature as in `ResidencyPolicy.kernel`."""
    n_key = key_bytes.size
    recent, frequent, recent_ghost, frequent_ghost = n_key, n_key + 1, n_key + 2, n_key + 3
    recent_bytes = header[_RECENT_BYTES]
    recent_ghost_bytes = header[_RECENT_GHOST_BYTES]
    frequent_ghost_bytes = header[_FREQUENT_GHOST_BYTES]
    target_cell = header[_TARGET : _TARGET + 1].view(np.float64)
    target = target_cell[0]
    generation = header[GENERATION]
    resident_bytes = header[RESIDENT_BYTES]
    n_missing = 0
    n_victims = 0
    bad_row = -1
    for load in range(begin, end):
        for row in range(offsets[load], offsets[load + 1]):
            if keys[row] < 0 or keys[row] >= n_key:
                bad_row = row
        if bad_row >= 0:
            break
        generation += 1
        stamp = 2 * generation
        n_missing = 0
        n_victims = 0
        missing_bytes = 0
        from_frequent_ghost = False
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                unlink(extra, key)
                push_newest(extra, frequent, key)
                if table[key, _QUEUE] == _RECENT:
                    table[key, _QUEUE] = _FREQUENT
                    recent_bytes -= key_bytes[key]
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
                size = key_bytes[key]
                if table[key, _QUEUE] == _RECENT_GHOST:
                    if size > 0:
                        ratio = frequent_ghost_bytes / recent_ghost_bytes
                        target = min(target + size * max(1.0, ratio), float(budget))
                    unlink(extra, key)
                    recent_ghost_bytes -= size
                    table[key, _QUEUE] = _FREQUENT
                elif table[key, _QUEUE] == _FREQUENT_GHOST:
                    if size > 0:
                        ratio = recent_ghost_bytes / frequent_ghost_bytes
                        target = max(target - size * max(1.0, ratio), 0.0)
                    unlink(extra, key)
                    frequent_ghost_bytes -= size
                    table[key, _QUEUE] = _FREQUENT
                    from_frequent_ghost = True
                else:
                    table[key, _QUEUE] = _RECENT
            out_residency[row] = found
            out_first[row] = first

        while resident_bytes + missing_bytes > budget:
            # Hits of this load went to the newest end of the frequent queue, so that the first of
            # them from the oldest end says that none of the others may go.
            at_recent = oldest(extra, recent)
            at_frequent = oldest(extra, frequent)
            if at_frequent != frequent and table[at_frequent, _STAMP] >= stamp:
                at_frequent = frequent
            if at_recent != recent and (
                at_frequent == frequent
                or recent_bytes > target
                or (from_frequent_ghost and recent_bytes == target)
            ):
                key = at_recent
                unlink(extra, key)
                push_newest(extra, recent_ghost, key)
                table[key, _QUEUE] = _RECENT_GHOST
                recent_bytes -= key_bytes[key]
                recent_ghost_bytes += key_bytes[key]
            elif at_frequent != frequent:
                key = at_frequent
                unlink(extra, key)
                push_newest(extra, frequent_ghost, key)
                table[key, _QUEUE] = _FREQUENT_GHOST
                frequent_ghost_bytes += key_bytes[key]
            else:
                break
            resident[key] = False
            resident_bytes -= key_bytes[key]
            out_keys[1, n_victims] = key
            n_victims += 1

        for i in range(n_missing):
            key = out_keys[0, i]
            resident[key] = True
            resident_bytes += key_bytes[key]
            if table[key, _QUEUE] == _RECENT:
                push_newest(extra, recent, key)
                recent_bytes += key_bytes[key]
            else:
                push_newest(extra, frequent, key)
        # The directory: recent and its ghosts remember at most the budget, all four twice of it.
        while recent_ghost_bytes > 0 and recent_bytes + recent_ghost_bytes > budget:
            lost = oldest(extra, recent_ghost)
            unlink(extra, lost)
            table[lost, _QUEUE] = _NOWHERE
            recent_ghost_bytes -= key_bytes[lost]
        while (
            frequent_ghost_bytes > 0
            and resident_bytes + recent_ghost_bytes + frequent_ghost_bytes > 2 * budget
        ):
            lost = oldest(extra, frequent_ghost)
            unlink(extra, lost)
            table[lost, _QUEUE] = _NOWHERE
            frequent_ghost_bytes -= key_bytes[lost]
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[_RECENT_BYTES] = recent_bytes
    header[_RECENT_GHOST_BYTES] = recent_ghost_bytes
    header[_FREQUENT_GHOST_BYTES] = frequent_ghost_bytes
    target_cell[0] = target
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_arc(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`."""
    for row in range(keys.size):
        key = keys[row]
        if resident[key]:
            if table[key, _QUEUE] == _RECENT:
                header[_RECENT_BYTES] -= key_bytes[key]
            table[key, _QUEUE] = _NOWHERE
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class ARC(ResidencyPolicy):
    """Evict from the experts used once or from those used again, as past mistakes suggest.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Two queues by latest use hold what is resident: *recent* (T1, used once since read) and
    *frequent* (T2). Two queues of ghosts (B1, B2) remember keys that either gave up; ghosts cost
    no memory of experts and need no reads. *target* (p) is the bytes that recent should have.

    Victim rule: the oldest of recent if recent holds more bytes than the target, or as many and
    a missing key of this load was a ghost of frequent; else the oldest of frequent; the other one
    if that queue has none. A victim becomes the newest ghost of its queue. A hit moves a key to
    the newest end of frequent. A missing key that was a ghost of recent raises the target by
    ``size * max(1, B2 / B1)``, at most to the budget; one that was a ghost of frequent lowers it by
    ``size * max(1, B1 / B2)``, at least to 0; both then enter frequent, other keys enter recent.
    At the end of a load the oldest ghosts go until T1 + B1 <= budget and T1 + T2 + B1 + B2 <= 2
    budgets. All sums are bytes; the target is a float64 and is not rounded. With keys of one size
    and one key per load this is the algorithm of the paper (its case IV A with |T1| = c, a victim
    that leaves no ghost, comes out the same: the ghost goes at the end of the load).

    One use per load and key, at its first row: hits and targets in the order of first rows, then
    victims, then the missing keys enter in the order of first rows. Keys of the load being served
    are never in reach: hits of the load are the newest of frequent. O(1) per row.
    Source: Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache".

    Examples
    --------
    >>> state = ARC().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0], [0], [1], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "arc"
    kernel = staticmethod(load_arc)
    forget_kernel = staticmethod(forget_arc)
    n_table = 2

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queues' links."""
        return n_links(n_key, _N_QUEUE)

    def prepare(self, state: KernelState) -> None:
        """Empty the queues; the target is 0."""
        close_queues(state.extra, state.key_bytes.size, _N_QUEUE)

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return the four queues and the target.

        ``recent``, ``frequent``, ``recent_ghosts`` and ``frequent_ghosts`` are int64, oldest
        first; ``target`` is one float64, in bytes.
        """
        n_key = state.key_bytes.size
        queues: dict[str, Array] = {
            name: keys_of_queue(state.extra, n_key + anchor) for anchor, name in enumerate(_QUEUES)
        }
        target = state.header[_TARGET : _TARGET + 1].view(np.float64).copy()
        return queues | {"target": target}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Fill the queues; a target above the budget is cut to it.

        Raises
        ------
        PolicyError
            If an array is absent or impossible, or a key is out of range or named twice.
        """
        n_key, header = state.key_bytes.size, state.header
        queues = read_queues(state, arrays, _QUEUES)
        target = read_real(state, arrays, "target")
        for anchor, keys in enumerate(queues):
            fill_queue(state.extra, n_key + anchor, keys)
            state.table[keys, _QUEUE] = anchor + 1
        recent, frequent, recent_ghosts, frequent_ghosts = queues
        make_resident(state, recent)
        make_resident(state, frequent)
        header[_RECENT_BYTES] = state.key_bytes[recent].sum()
        header[_RECENT_GHOST_BYTES] = state.key_bytes[recent_ghosts].sum()
        header[_FREQUENT_GHOST_BYTES] = state.key_bytes[frequent_ghosts].sum()
        header[_TARGET : _TARGET + 1].view(np.float64)[0] = min(target, float(state.budget_bytes))
