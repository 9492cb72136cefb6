"""SIEVE: a hand sifts the queue in place, and what was not used since falls out."""

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
    newer,
    oldest,
    push_newest,
    unlink,
)
from bmoe_lab.residency.start_state import make_resident, read_integers, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["SIEVE"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_USED = 1  # 1 if the key was hit since it was admitted or last met by the hand

_HAND = OWN  # cell of the header: where the next search begins; the anchor means the oldest key


@compiled
def load_sieve(
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
    queue = n_key
    hand = header[_HAND]
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
        n_passed = 0  # resident keys of this load
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                table[key, _USED] = 1
                n_passed += 1
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first

        n_left = header[N_RESIDENT] - n_passed
        while resident_bytes + missing_bytes > budget and n_left > 0:
            key = hand if hand != queue else oldest(extra, queue)
            hand = newer(extra, key)
            if table[key, _STAMP] >= stamp:
                continue
            if table[key, _USED] == 1:
                table[key, _USED] = 0
                continue
            unlink(extra, key)
            resident[key] = False
            resident_bytes -= key_bytes[key]
            out_keys[1, n_victims] = key
            n_victims += 1
            n_left -= 1

        for i in range(n_missing):
            key = out_keys[0, i]
            resident[key] = True
            resident_bytes += key_bytes[key]
            table[key, _USED] = 0
            push_newest(extra, queue, key)
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[_HAND] = hand
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_sieve(
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
            if header[_HAND] == key:
                header[_HAND] = newer(extra, key)
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class SIEVE(ResidencyPolicy):
    """Evict the first expert under a moving hand that was not used since the hand last passed it.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Victim rule: keys stand in a queue in the order of their reads and never move. The hand goes
    from the oldest towards the newest, and from the newest back to the oldest: it wipes the mark
    of a key that was used since it was read or last passed, and stops at the first without a mark,
    the victim; the next search begins behind it. Reading a key sets no mark. One mark however
    often a load names the key. The hand passes over keys of the load being served without wiping
    their mark. O(1) per row, as each mark wiped pays for one hit; a key of the load is passed over
    at most twice. If a read fails the hand moves on as if the key had been evicted.
    Source: Zhang et al., NSDI 2024, "SIEVE is simpler than LRU".

    Examples
    --------
    >>> state = SIEVE().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0, 1], [0], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "sieve"
    kernel = staticmethod(load_sieve)
    forget_kernel = staticmethod(forget_sieve)
    n_table = 2

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queue's links."""
        return n_links(n_key, 1)

    def prepare(self, state: KernelState) -> None:
        """Empty the queue; the hand will begin at the oldest."""
        close_queues(state.extra, state.key_bytes.size, 1)
        state.header[_HAND] = state.key_bytes.size

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys``, read first comes first, their marks ``used``, and ``hand``; int64.

        ``hand``, one number, is the entry of ``keys`` at which the next search begins; -1 if the
        hand has left the newest and will begin at the oldest.
        """
        keys = keys_of_queue(state.extra, state.key_bytes.size)
        at = np.flatnonzero(keys == state.header[_HAND])
        hand = at[:1] if at.size else np.full(1, -1)
        return {
            "keys": keys,
            "used": state.table[keys, _USED],
            "hand": hand.astype(np.int64),
        }

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident with their marks ``used``, 0 or 1, and place the hand.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        used = read_integers(state, arrays, "used", size=keys.size, least=0, most=1)
        (hand,) = read_integers(state, arrays, "hand", size=1, least=-1, most=keys.size - 1)
        fill_queue(state.extra, state.key_bytes.size, keys)
        state.table[keys, _USED] = used
        make_resident(state, keys)
        if hand >= 0:
            state.header[_HAND] = keys[hand]
