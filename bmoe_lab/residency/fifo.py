"""First in, first out: the victim is the key that was read longest ago."""

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
from bmoe_lab.residency.start_state import make_resident, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["FIFO"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# A doubly linked list inside the table; -1 ends it at both sides. As in the LRU the ends are local
# to the kernel and nothing is called, which is worth a sixth of the speed.
_OLDEST = OWN
_NEWEST = OWN + 1
_NEWER = 0  # column of the table: the next key towards the newest
_OLDER = 1  # column of the table: the next key towards the oldest
_STAMP = 2  # column of the table: 2 * generation of the last use, + 1 if it was a hit then


@compiled
def load_fifo(
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
    oldest = header[_OLDEST]
    newest = header[_NEWEST]
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
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                resident[key] = True
                resident_bytes += key_bytes[key]
                table[key, _NEWER] = -1
                table[key, _OLDER] = newest
                if newest >= 0:
                    table[newest, _NEWER] = key
                else:
                    oldest = key
                newest = key
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first

        # The missing keys count as resident already, which is the same as evicting before they
        # are admitted: they are the newest, and keys of this load are passed over.
        if resident_bytes > budget:
            key = oldest
            kept = -1  # the newest key that was passed over
            while resident_bytes > budget and key >= 0:
                following = table[key, _NEWER]
                if table[key, _STAMP] < stamp:
                    resident[key] = False
                    resident_bytes -= key_bytes[key]
                    out_keys[1, n_victims] = key
                    n_victims += 1
                else:
                    table[key, _OLDER] = kept
                    if kept >= 0:
                        table[kept, _NEWER] = key
                    else:
                        oldest = key
                    kept = key
                key = following
            if kept >= 0:
                table[kept, _NEWER] = key
            else:
                oldest = key
            if key >= 0:
                table[key, _OLDER] = kept
            else:
                newest = kept
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_OLDEST] = oldest
    header[_NEWEST] = newest
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_fifo(
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
            newer, older = table[key, _NEWER], table[key, _OLDER]
            if newer >= 0:
                table[newer, _OLDER] = older
            else:
                header[_NEWEST] = older
            if older >= 0:
                table[older, _NEWER] = newer
            else:
                header[_OLDEST] = newer
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


@compiled
def _order(header: IntArray, table: IntArray, out: IntArray) -> None:
    key = header[_OLDEST]
    for i in range(out.size):
        out[i] = key
        key = table[key, _NEWER]


class FIFO(ResidencyPolicy):
    """Evict the expert that was read longest ago, however often it was used since.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Sort key of the victims: place of the key's read in the stream of reads; smallest first. Uses
    change nothing, so neither do repeats within a load. Keys of the load being served are passed
    over and keep their place. O(1) per row. Source: Belady 1966, "A study of replacement
    algorithms for a virtual-storage computer".

    Examples
    --------
    >>> state = FIFO().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0, 1], [0], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([0]), 20)
    """

    name: ClassVar[str] = "fifo"
    kernel = staticmethod(load_fifo)
    forget_kernel = staticmethod(forget_fifo)
    n_table = 3

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def prepare(self, state: KernelState) -> None:
        """Empty the queue."""
        state.header[_OLDEST] = -1
        state.header[_NEWEST] = -1

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys``: the resident keys, int64, read first comes first."""
        keys = np.empty(state.n_resident, dtype=np.int64)
        _order(state.header, state.table, keys)
        return {"keys": keys}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident.

        Raises
        ------
        PolicyError
            If ``keys`` is absent, has a key out of range, or a key twice.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        if keys.size:
            state.header[_OLDEST], state.header[_NEWEST] = keys[0], keys[-1]
            state.table[keys, _NEWER] = np.append(keys[1:], -1)
            state.table[keys, _OLDER] = np.append(-1, keys[:-1])
        make_resident(state, keys)
