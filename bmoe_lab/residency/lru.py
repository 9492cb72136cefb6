"""Least recently used: the victim is the key whose last use is longest ago."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
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
from bmoe_lab.residency.state import KernelState

__all__ = ["LRU"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# A doubly linked list inside the table; -1 ends it at both sides.
_NEWEST = OWN
_OLDEST = OWN + 1
_NEWER = 0  # column of the table: the next key towards the newest
_OLDER = 1  # column of the table: the next key towards the oldest
_STAMP = 2  # column of the table: 2 * generation of the last use, + 1 if it was a hit then


@compiled
def _unlink(key: int, header: IntArray, table: IntArray) -> None:
    newer, older = table[key, _NEWER], table[key, _OLDER]
    if newer >= 0:
        table[newer, _OLDER] = older
    else:
        header[_NEWEST] = older
    if older >= 0:
        table[older, _NEWER] = newer
    else:
        header[_OLDEST] = newer


@compiled
def _push_newest(key: int, header: IntArray, table: IntArray) -> None:
    newest = header[_NEWEST]
    table[key, _NEWER] = -1
    table[key, _OLDER] = newest
    if newest >= 0:
        table[newest, _NEWER] = key
    else:
        header[_OLDEST] = key
    header[_NEWEST] = key


@compiled
def load_lru(
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
    """Serve loads; signature as in `ResidencyPolicy.kernel`.

    The list's ends are local and its operations written out: calling helpers on the header costs
    three times as much.
    """
    n_key = key_bytes.size
    generation = header[GENERATION]
    newest = header[_NEWEST]
    oldest = header[_OLDEST]
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
                # A repeat: it is what it was at its first row, only its recency moves.
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
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first
            if key == newest:
                continue
            if not first:
                newer, older = table[key, _NEWER], table[key, _OLDER]
                table[newer, _OLDER] = older  # there is a newer one: this key is not the newest
                if older >= 0:
                    table[older, _NEWER] = newer
                else:
                    oldest = newer
            table[key, _NEWER] = -1
            table[key, _OLDER] = newest
            if newest >= 0:
                table[newest, _NEWER] = key
            else:
                oldest = key
            newest = key
        # Counting the missing keys as resident first and evicting then is the same as evicting
        # before they are admitted: keys of this load are the newest and are never reached.
        while resident_bytes > budget and oldest >= 0 and table[oldest, _STAMP] < stamp:
            victim = oldest
            oldest = table[victim, _NEWER]
            if oldest >= 0:
                table[oldest, _OLDER] = -1
            else:
                newest = -1
            resident[victim] = False
            resident_bytes -= key_bytes[victim]
            out_keys[1, n_victims] = victim
            n_victims += 1
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_NEWEST] = newest
    header[_OLDEST] = oldest
    header[RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_lru(
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
            _unlink(key, header, table)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


@compiled
def _order(header: IntArray, table: IntArray, out: IntArray) -> None:
    key = header[_OLDEST]
    for i in range(out.size):
        out[i] = key
        key = table[key, _NEWER]


@compiled
def _refill(
    keys: IntArray, key_bytes: IntArray, header: IntArray, table: IntArray, resident: BoolArray
) -> int:
    for row in range(keys.size):
        key = keys[row]
        if key < 0 or key >= key_bytes.size or resident[key]:
            return row
        resident[key] = True
        header[RESIDENT_BYTES] += key_bytes[key]
        header[N_RESIDENT] += 1
        _push_newest(key, header, table)
    return -1


class LRU(ResidencyPolicy):
    """Evict the expert whose last use is longest ago, over all layers together.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Sort key of the victims: position of the key's latest use in the stream of loads, token-major,
    repeats included; smallest first. O(1) per row. Source: Mattson et al. 1970; the load rules
    are those of BigMoeOnEdge's cache (see :mod:`bmoe_lab.residency.loads`).

    Examples
    --------
    >>> state = LRU().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0, 1], [0], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "lru"
    kernel = staticmethod(load_lru)
    forget_kernel = staticmethod(forget_lru)
    n_table = 3

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def prepare(self, state: KernelState) -> None:
        """Empty the list."""
        state.header[_NEWEST] = -1
        state.header[_OLDEST] = -1

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys``: the resident keys, int64, longest unused first."""
        keys = np.empty(state.n_resident, dtype=np.int64)
        _order(state.header, state.table, keys)
        return {"keys": keys}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident, longest unused first.

        Raises
        ------
        PolicyError
            If ``keys`` is absent, has a key out of range, or a key twice.
        """
        if "keys" not in arrays:
            raise PolicyError(f"a start state of LRU must hold 'keys'; got {sorted(arrays)}.")
        keys = np.ascontiguousarray(arrays["keys"], dtype=np.int64)
        bad_row = _refill(keys, state.key_bytes, state.header, state.table, state.resident)
        if bad_row >= 0:
            raise PolicyError(
                f"keys of a start state must be distinct and lie in [0, {state.key_bytes.size}); "
                f"got {int(keys[bad_row])} at entry {bad_row}."
            )
