"""Belady's rule: the victim is the key that is asked for again last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.heap import KEY, N_ENTRY, VALUE, arrange, pop, push
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
    NO_FUTURE,
    OWN,
    RESIDENT_BYTES,
    Load,
    LoadLog,
)
from bmoe_lab.residency.start_state import make_resident, read_integers, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["Belady"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_SORT = 1  # (_MOST - next load) << 32 | number of the read: the sort key as one number
_N_TABLE = 2

# Cells of the header.
_ADMITTED = OWN  # reads so far
_N_HEAP = OWN + 1  # entries of the heap, untrue ones included

# Both halves of a sort key end here: loads from there on are as good as never, and reads from
# there on tie. 2**31 loads are 45 million tokens of a model of 48 layers.
_MOST = 2**31 - 1
_HALF = 32

# The heap in `extra` has the next victim on top. Each use pushes an entry and leaves the one
# before it, which names the soonest load of all by then and lies at the bottom. When the heap is
# full, the untrue entries are swept out.
_ROOM = 4  # entries for each key


@compiled
def _is_true(heap: IntArray, place: int, table: IntArray, resident: BoolArray) -> bool:
    key = heap[place, KEY]
    return resident[key] and table[key, _SORT] == heap[place, VALUE]  # type: ignore[no-any-return]


@compiled
def _sweep(heap: IntArray, n_heap: int, table: IntArray, resident: BoolArray) -> int:
    """Keep the true entries; return how many there are."""
    n = 0
    for place in range(n_heap):
        if _is_true(heap, place, table, resident):
            heap[n] = heap[place]
            n += 1
    arrange(heap, 0, n)
    return n


@compiled
def load_belady(
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

    Next uses are kept as numbers of loads since the state was new, so that a stream may come in
    several calls.
    """
    n_key = key_bytes.size
    heap = extra.reshape((_ROOM * n_key, N_ENTRY))
    n_heap = header[_N_HEAP]
    admitted = header[_ADMITTED]
    generation = header[GENERATION]
    resident_bytes = header[RESIDENT_BYTES]
    n_missing = 0
    n_victims = 0
    bad_row = -1
    for load in range(begin, end):
        for row in range(offsets[load], offsets[load + 1]):
            # Without its future a row cannot be served.
            if keys[row] < 0 or keys[row] >= n_key or row >= future.size:
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
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first

        while resident_bytes + missing_bytes > budget and n_heap > 0:
            key = heap[0, KEY]
            # Keys of this load get a new entry below.
            is_victim = _is_true(heap, 0, table, resident) and table[key, _STAMP] < stamp
            pop(heap, 0, n_heap)
            n_heap -= 1
            if is_victim:
                resident[key] = False
                resident_bytes -= key_bytes[key]
                out_keys[1, n_victims] = key
                n_victims += 1

        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            if out_first[row]:
                order = min(admitted, _MOST)
                admitted += 1
                resident[key] = True
            elif table[key, _STAMP] & 1:
                table[key, _STAMP] -= 1  # a hit: once
                order = table[key, _SORT] & _MOST
            else:
                continue  # a repeat has its entry already
            coming = min(max(future[row], load + 1), _MOST) - load + generation
            sort = ((_MOST - min(coming, _MOST)) << _HALF) | order
            table[key, _SORT] = sort
            if n_heap == heap.shape[0]:
                n_heap = _sweep(heap, n_heap, table, resident)
            push(heap, 0, n_heap, sort, key)
            n_heap += 1
        resident_bytes += missing_bytes
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_ADMITTED] = admitted
    header[_N_HEAP] = n_heap
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_belady(
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
            resident[key] = False  # which makes its entry untrue
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


@compiled
def _refill(keys: IntArray, table: IntArray, extra: IntArray) -> None:
    heap = extra.reshape((_ROOM * table.shape[0], N_ENTRY))
    for i in range(keys.size):
        push(heap, 0, i, table[keys[i], _SORT], keys[i])


class _BeladyState(KernelState):
    """A cache that is told the future with each call."""

    __slots__ = ()

    def load(self, keys: IntArray) -> Load:
        """Refuse: one load does not tell what comes after it."""
        raise PolicyError(
            "Belady must be given the stream with its future; got one load. Use load_many(keys, "
            "offsets, next_use(keys, offsets, n_key)), or bmoe_lab.replay."
        )

    def load_many(self, keys: IntArray, offsets: IntArray, future: IntArray = NO_FUTURE) -> LoadLog:
        """Serve many loads in a row, in one call of the kernel."""
        if np.size(future) != np.size(keys):
            raise PolicyError(
                f"future must have one entry for each of the {np.size(keys)} rows; got "
                f"{np.size(future)}. Make it with bmoe_lab.residency.future.next_use."
            )
        return super().load_many(keys, offsets, future)


class Belady(ResidencyPolicy):
    """Evict the expert that is asked for again last: the bound for online policies.

    Exact only for experts of equal size. With unequal sizes the rule is a good one, not the best
    possible, and no bound in the strict sense.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Sort key of the victims: number of the next load that asks for the key, largest first, never
    again before all; ties go to the key that was read earliest. The bound holds among policies
    that make resident what a load asks for, as all of this package but ``StationaryOracle`` do.
    Needs the future (:func:`bmoe_lab.residency.future.next_use`), so it cannot run live. The
    stream may come in several calls: a load number beyond the end of one call counts on into the
    next. O(log n) per row at worst, O(1) for most. Source: Belady 1966; ties as in BigMoeOnEdge's
    offline replay (0.20.0).

    Examples
    --------
    >>> from bmoe_lab.residency.future import next_use
    >>> keys, offsets = np.array([0, 1, 2, 0]), np.arange(5)
    >>> state = Belady().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> state.load_many(keys, offsets, next_use(keys, offsets, 3)).residency
    array([0, 0, 0, 1], dtype=uint8)
    """

    name: ClassVar[str] = "belady"
    online: ClassVar[bool] = False
    needs_future: ClassVar[bool] = True
    state_class: ClassVar[type[KernelState]] = _BeladyState
    kernel = staticmethod(load_belady)
    forget_kernel = staticmethod(forget_belady)
    n_table = _N_TABLE

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the heap."""
        return _ROOM * N_ENTRY * n_key

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` in the order of their reads, ``ahead``: loads until each is used next."""
        keys = np.flatnonzero(state.resident).astype(np.int64)
        sort = state.table[keys, _SORT]
        order = np.argsort(sort & _MOST, kind="stable")
        ahead = _MOST - (sort >> _HALF) - state.header[GENERATION]
        return {"keys": keys[order], "ahead": ahead[order]}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        ahead = read_integers(state, arrays, "ahead", size=keys.size, least=-_MOST, most=_MOST)
        # A use that should have come already and did not is as good as one in the next load.
        state.table[keys, _SORT] = (_MOST - np.maximum(ahead, 1) << _HALF) | np.arange(keys.size)
        _refill(keys, state.table, state.extra)
        state.header[_ADMITTED] = state.header[_N_HEAP] = keys.size
        make_resident(state, keys)
