"""Segmented LRU: what was used once leaves before what was used again."""

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
from bmoe_lab.residency.shares import share_of
from bmoe_lab.residency.start_state import make_resident, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["SLRU"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_QUEUE = 1  # anchor of the queue that holds the key, less the number of keys

_PROBATION, _PROTECTED = 0, 1
_N_QUEUE = 2

# Cells of the header.
_PROTECTED_BYTES = OWN
_PROTECTED_SHARE = OWN + 1


@compiled
def load_slru(
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
    probation, protected = n_key, n_key + 1
    protected_bytes = header[_PROTECTED_BYTES]
    protected_share = header[_PROTECTED_SHARE]
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
                unlink(extra, key)
                push_newest(extra, protected, key)
                if table[key, _QUEUE] == _PROBATION:
                    table[key, _QUEUE] = _PROTECTED
                    protected_bytes += key_bytes[key]
                    while protected_bytes > protected_share:
                        demoted = oldest(extra, protected)
                        unlink(extra, demoted)
                        push_newest(extra, probation, demoted)
                        table[demoted, _QUEUE] = _PROBATION
                        protected_bytes -= key_bytes[demoted]
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
            for queue in (probation, protected):
                at = oldest(extra, queue)
                while resident_bytes + missing_bytes > budget and at != queue:
                    key = at
                    at = newer(extra, key)
                    if table[key, _STAMP] >= stamp:
                        continue
                    unlink(extra, key)
                    if queue == protected:
                        protected_bytes -= key_bytes[key]
                    resident[key] = False
                    resident_bytes -= key_bytes[key]
                    out_keys[1, n_victims] = key
                    n_victims += 1

        for i in range(n_missing):
            key = out_keys[0, i]
            resident[key] = True
            resident_bytes += key_bytes[key]
            table[key, _QUEUE] = _PROBATION
            push_newest(extra, probation, key)
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[_PROTECTED_BYTES] = protected_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_slru(
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
            if table[key, _QUEUE] == _PROTECTED:
                header[_PROTECTED_BYTES] -= key_bytes[key]
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class SLRU(ResidencyPolicy):
    """Evict the expert longest unused among those used once, before any that was used again.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    protected_frac : float, default 0.8
        Share of the budget for experts that were hit at least once. 0 makes it an LRU, but that
        hits of a load count before its missing keys.

    Notes
    -----
    Sort key of the victims: (probation before protected, time of the latest use), smallest first.
    A key that is read enters probation; a hit moves it to the newest end of protected, and while
    protected holds more bytes than its share its oldest key goes back to the newest end of
    probation. The share is ``protected_frac`` of the budget's bytes rounded down. One use per load
    and key, at its first row: a repeat within the load that reads a key does not protect it. Hits
    count in the order of first rows, then the missing keys enter in theirs. Keys of the load being
    served are passed over and keep their place. O(1) per row.
    Source: Karedla, Love and Wherry 1994, "Caching strategies to improve disk system performance".

    Examples
    --------
    >>> state = SLRU().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0], [0], [1], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "slru"
    kernel = staticmethod(load_slru)
    forget_kernel = staticmethod(forget_slru)
    n_table = 2

    def __init__(self, budget: int | str | None = None, protected_frac: float = 0.8) -> None:
        self.budget = budget
        self.protected_frac = protected_frac

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queues' links."""
        return n_links(n_key, _N_QUEUE)

    def prepare(self, state: KernelState) -> None:
        """Empty the queues.

        Raises
        ------
        PolicyError
            If `protected_frac` is no fraction.
        """
        close_queues(state.extra, state.key_bytes.size, _N_QUEUE)
        state.header[_PROTECTED_SHARE] = share_of(state.budget_bytes, self, "protected_frac")

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return the queues ``probation`` and ``protected``, int64, longest unused first."""
        n_key = state.key_bytes.size
        return {
            "probation": keys_of_queue(state.extra, n_key + _PROBATION),
            "protected": keys_of_queue(state.extra, n_key + _PROTECTED),
        }

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make the keys of both queues resident.

        Raises
        ------
        PolicyError
            If a queue is absent, or a key is out of range or named twice.
        """
        n_key = state.key_bytes.size
        probation, protected = read_queues(state, arrays, ["probation", "protected"])
        for queue, keys in ((_PROBATION, probation), (_PROTECTED, protected)):
            fill_queue(state.extra, n_key + queue, keys)
            state.table[keys, _QUEUE] = queue
            make_resident(state, keys)
        state.header[_PROTECTED_BYTES] = state.key_bytes[protected].sum()
