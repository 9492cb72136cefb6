"""Random eviction: any key that may go is as likely a victim as any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError
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
from bmoe_lab.residency.mersenne import N_WORDS, draw_below, seeded
from bmoe_lab.residency.start_state import make_resident, read_integers, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["Random"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_SLOT = 1  # place of a resident key in the order of admission

_N_SLOT = OWN  # slots used, gaps included
_OPEN = OWN + 1  # slots whose key may be a victim

# Extra: the generator's words, the key of each slot (-1 in a gap), and counts of open slots: of
# single slots (0 or 1), of runs of 16 and of runs of 256, so that the k-th is found in a few looks.
_RUN = 16


@compiled
def _n_capacity(n_key: int) -> int:
    """Return the number of slots: at least twice the keys, whole runs of 256."""
    return (2 * n_key + _RUN * _RUN - 1) // (_RUN * _RUN) * (_RUN * _RUN)


@compiled
def _add(counts: IntArray, n_capacity: int, slot: int, change: int) -> None:
    n_run = n_capacity // _RUN
    counts[slot] += change
    counts[n_capacity + slot // _RUN] += change
    counts[n_capacity + n_run + slot // (_RUN * _RUN)] += change


@compiled
def _find(counts: IntArray, n_capacity: int, k: int) -> int:
    """Return the slot of the k-th open one, from 0; there must be that many."""
    n_run = n_capacity // _RUN
    place = 0
    while counts[n_capacity + n_run + place] <= k:
        k -= counts[n_capacity + n_run + place]
        place += 1
    place *= _RUN
    while counts[n_capacity + place] <= k:
        k -= counts[n_capacity + place]
        place += 1
    place *= _RUN
    while counts[place] <= k:
        k -= counts[place]
        place += 1
    return place


@compiled
def _close_gaps(slots: IntArray, counts: IntArray, table: IntArray, n_slot: int) -> int:
    """Move the keys together, in their order; all are open. Return how many there are."""
    counts[:] = 0
    n = 0
    for slot in range(n_slot):
        key = slots[slot]
        if key >= 0:
            slots[n] = key
            table[key, _SLOT] = n
            _add(counts, slots.size, n, 1)
            n += 1
    return n


@compiled
def load_random(
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
    n_capacity = _n_capacity(n_key)
    words = extra[:N_WORDS]
    slots = extra[N_WORDS : N_WORDS + n_capacity]
    counts = extra[N_WORDS + n_capacity :]
    n_slot = header[_N_SLOT]
    n_open = header[_OPEN]
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
        n_kept = 0
        missing_bytes = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                out_keys[1, n_kept] = key  # until the victims are written there
                n_kept += 1
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first

        if resident_bytes + missing_bytes > budget and n_open > n_kept:
            for i in range(n_kept):
                _add(counts, n_capacity, table[out_keys[1, i], _SLOT], -1)
            n_open -= n_kept
            while resident_bytes + missing_bytes > budget and n_open > 0:
                slot = _find(counts, n_capacity, draw_below(words, n_open))
                victim = slots[slot]
                slots[slot] = -1
                _add(counts, n_capacity, slot, -1)
                n_open -= 1
                resident[victim] = False
                resident_bytes -= key_bytes[victim]
                out_keys[1, n_victims] = victim
                n_victims += 1
            for row in range(offsets[load], offsets[load + 1]):
                key = keys[row]
                # What was resident and is asked for is open again, once.
                if table[key, _STAMP] == stamp + 1:
                    table[key, _STAMP] = stamp
                    _add(counts, n_capacity, table[key, _SLOT], 1)
                    n_open += 1

        if n_slot + n_missing > n_capacity:
            n_slot = _close_gaps(slots, counts, table, n_slot)
        for i in range(n_missing):
            key = out_keys[0, i]
            slots[n_slot] = key
            table[key, _SLOT] = n_slot
            _add(counts, n_capacity, n_slot, 1)
            n_slot += 1
            n_open += 1
            resident[key] = True
        resident_bytes += missing_bytes
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_N_SLOT] = n_slot
    header[_OPEN] = n_open
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_random(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`. Draws nothing."""
    n_capacity = _n_capacity(key_bytes.size)
    for row in range(keys.size):
        key = keys[row]
        if resident[key]:
            slot = table[key, _SLOT]
            extra[N_WORDS + slot] = -1
            _add(extra[N_WORDS + n_capacity :], n_capacity, slot, -1)
            header[_OPEN] -= 1
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


@compiled
def _refill(keys: IntArray, table: IntArray, extra: IntArray) -> None:
    n_capacity = _n_capacity(table.shape[0])
    slots = extra[N_WORDS : N_WORDS + n_capacity]
    for slot in range(keys.size):
        slots[slot] = keys[slot]
    _close_gaps(slots, extra[N_WORDS + n_capacity :], table, keys.size)


class Random(ResidencyPolicy):
    """Evict an expert drawn at random: what any rule must beat.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    seed : int, default 1234
        The same seed gives the same victims.

    Notes
    -----
    Each victim is a uniform draw among the resident keys that this load does not ask for, listed
    in the order in which they were read. The draws are those of CPython's
    ``random.Random(seed).choice``, word for word, and seed 1234 gives the ``random`` of
    BigMoeOnEdge's offline replay (0.20.0) to the last digit. A draw looks at a few dozen counts;
    a read, and a hit where something is evicted, changes three.

    Examples
    --------
    >>> state = Random(seed=7).start(key_bytes=[10, 10, 10, 10], budget_bytes=30)
    >>> for keys in ([0, 1, 2], [3]):
    ...     load = state.load(np.array(keys))
    >>> import random
    >>> load.victims, random.Random(7).choice([0, 1, 2])
    (array([1]), 1)
    """

    name: ClassVar[str] = "random"
    kernel = staticmethod(load_random)
    forget_kernel = staticmethod(forget_random)
    n_table = 2

    def __init__(self, budget: int | str | None = None, seed: int = 1234) -> None:
        self.budget = budget
        self.seed = seed

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of generator, slots and counts."""
        n = int(_n_capacity(n_key))
        return N_WORDS + 2 * n + n // _RUN + n // (_RUN * _RUN)

    def prepare(self, state: KernelState) -> None:
        """Seed the generator.

        Raises
        ------
        SettingsError
            If `seed` is not an integer.
        """
        if isinstance(self.seed, bool) or not isinstance(self.seed, int | np.integer):
            raise SettingsError(f"seed must be an integer; got {self.seed!r}.")
        state.extra[:N_WORDS] = seeded(int(self.seed))
        state.extra[N_WORDS : N_WORDS + _n_capacity(state.key_bytes.size)] = -1

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` in the order of admission, the ``generator`` as in `random.getstate`."""
        slots = state.extra[N_WORDS : N_WORDS + int(state.header[_N_SLOT])]
        return {"keys": slots[slots >= 0], "generator": state.extra[:N_WORDS].copy()}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident, go on with the draws.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        words = read_integers(state, arrays, "generator", size=N_WORDS, least=0, most=0xFFFFFFFF)
        read_integers(state, {"generator": words[-1:]}, "generator", size=1, least=0, most=624)
        state.extra[:N_WORDS] = words
        _refill(keys, state.table, state.extra)
        state.header[_N_SLOT] = state.header[_OPEN] = keys.size
        make_resident(state, keys)
