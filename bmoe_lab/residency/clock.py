"""CLOCK: in order of admission, but what was used since gets another round."""

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

__all__ = ["Clock"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_USED = 1  # 1 if the key was hit since it was admitted or last met by the hand


@compiled
def load_clock(
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
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                table[key, _USED] = 1
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first

        if resident_bytes + missing_bytes > budget:
            at = oldest(extra, queue)
            while resident_bytes + missing_bytes > budget and at != queue:
                key = at
                at = newer(extra, key)
                if table[key, _STAMP] >= stamp:
                    continue
                unlink(extra, key)
                if table[key, _USED] == 1:
                    table[key, _USED] = 0
                    push_newest(extra, queue, key)
                    if at == queue:
                        at = key
                else:
                    resident[key] = False
                    resident_bytes -= key_bytes[key]
                    out_keys[1, n_victims] = key
                    n_victims += 1

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
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_clock(
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
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class Clock(ResidencyPolicy):
    """Evict the expert that was read longest ago among those not used since the hand last came by.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Victim rule: keys stand in a queue in the order of their reads. The hand takes the oldest: if
    it was used since it was read or last met, its mark is wiped and it goes to the newest end,
    else it is the victim. Reading a key is no use: it sets no mark. One mark however often a load
    names the key. Keys of the load being served are passed over: they keep their place and their
    mark, as though they were not in the queue. O(1) per row, as each round trip pays for one hit.
    Source: Corbato 1968, "A paging experiment with the Multics system", in the form of a queue
    with reinsertion (the same victims as a ring and a moving hand).

    Examples
    --------
    >>> state = Clock().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0, 1], [0], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "clock"
    kernel = staticmethod(load_clock)
    forget_kernel = staticmethod(forget_clock)
    n_table = 2

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queue's links."""
        return n_links(n_key, 1)

    def prepare(self, state: KernelState) -> None:
        """Empty the queue."""
        close_queues(state.extra, state.key_bytes.size, 1)

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys``, the queue from the hand on, and ``used``, the mark of each; int64."""
        keys = keys_of_queue(state.extra, state.key_bytes.size)
        return {"keys": keys, "used": state.table[keys, _USED]}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident with their marks ``used``, 0 or 1.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        used = read_integers(state, arrays, "used", size=keys.size, least=0, most=1)
        fill_queue(state.extra, state.key_bytes.size, keys)
        state.table[keys, _USED] = used
        make_resident(state, keys)
