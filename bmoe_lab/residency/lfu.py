"""Least frequently used: the victim is the key that the fewest loads asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.heap import KEY, N_ENTRY, VALUE, pop, push, replace_top
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
from bmoe_lab.residency.priority import (
    N_PRIORITY_COLUMNS,
    dump_priorities,
    forget_priority,
    load_priority,
    n_priority_cells,
    prepare_priorities,
    read_uses,
    restore_priorities,
)
from bmoe_lab.residency.start_state import make_resident, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["LFU", "MOST_USES", "USES_AT"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_SORT = 1  # uses << USES_AT | number of the row of the last use: the sort key as one number
_N_TABLE = 2

# Cells of the header.
_KEEP_COUNTS = OWN  # 1 if a count survives eviction
_ROWS = OWN + 1  # rows served, the clock of the recency

# The resident keys are a heap in `extra`. A use only writes the key's row of the table: its entry
# then lies too far up, never too far down, and is put right when it reaches the top.
# 2**39 rows are years of decoding; 2**24 loads that name one expert are as many tokens, and from
# there on counts are equal.
USES_AT = 39
MOST_USES = 2**24 - 1


@compiled
def load_lfu(
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
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    aside = extra[N_ENTRY * n_key :]
    # What of a sort key is there before a read: with kept counts all of it.
    kept = -1 if header[_KEEP_COUNTS] else 0
    rows = header[_ROWS]
    generation = header[GENERATION]
    resident_bytes = header[RESIDENT_BYTES]
    n_heap = header[N_RESIDENT]
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
            rows += 1
            first = False
            uses = table[key, _SORT] >> USES_AT
            if table[key, _STAMP] >= stamp:
                # A repeat: it is what it was at its first row, only its recency moves.
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                uses = min(uses + 1, MOST_USES)
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                uses = min((uses & kept) + 1, MOST_USES)
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            table[key, _SORT] = (uses << USES_AT) | rows
            out_residency[row] = found
            out_first[row] = first

        n_aside = 0
        while resident_bytes + missing_bytes > budget and n_heap > 0:
            top = heap[0, KEY]
            if heap[0, VALUE] != table[top, _SORT]:
                replace_top(heap, 0, n_heap, table[top, _SORT], top)
                continue
            pop(heap, 0, n_heap)
            n_heap -= 1
            if table[top, _STAMP] >= stamp:
                aside[n_aside] = top
                n_aside += 1
                continue
            resident[top] = False
            resident_bytes -= key_bytes[top]
            out_keys[1, n_victims] = top
            n_victims += 1
        for i in range(n_aside):
            push(heap, 0, n_heap, table[aside[i], _SORT], aside[i])
            n_heap += 1

        for i in range(n_missing):
            key = out_keys[0, i]
            resident[key] = True
            push(heap, 0, n_heap, table[key, _SORT], key)
            n_heap += 1
        resident_bytes += missing_bytes
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_ROWS] = rows
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_RESIDENT] = n_heap
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_lfu(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`. Counts stay."""
    n_key = key_bytes.size
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    n_heap = header[N_RESIDENT]
    for row in range(keys.size):
        key = keys[row]
        if resident[key]:
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1
    if header[N_RESIDENT] == n_heap:
        return
    n_kept = 0
    for place in range(n_heap):
        value, key = heap[place, VALUE], heap[place, KEY]
        if resident[key]:
            push(heap, 0, n_kept, value, key)
            n_kept += 1


@compiled
def _refill(keys: IntArray, table: IntArray, extra: IntArray) -> None:
    n_key = table.shape[0]
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    for i in range(keys.size):
        push(heap, 0, i, table[keys[i], _SORT], keys[i])


class LFU(ResidencyPolicy):
    """Evict the expert that the fewest loads asked for.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    keep_counts : bool, default True
        Whether an expert's count survives its eviction. If not, it begins with 1 at each read.
    ageing : bool, default False
        Whether the age of the cache is added to the counts, so that what was popular long ago
        can leave.

    Notes
    -----
    Sort key of the victims: (number of loads that asked for the key, position of its latest use
    in the stream of rows), smallest first. Repeats within a load count once, but move the
    recency. O(1) per hit, O(log n) per read or victim. With ``keep_counts=True`` this is the
    ``lfu`` of BigMoeOnEdge's offline replay (0.20.0); with ``keep_counts=False`` the in-cache LFU
    of most libraries.

    With ``ageing=True`` the sort key is (priority, position of the latest use). A use sets
    priority = count + age; the age, 0 at the start, is the largest priority of a victim so far
    (the last one's, except after a load that protected a smaller one). Victims
    go before the missing keys are admitted, so those already see the new age. Source: LFU with
    dynamic ageing, Arlitt, Cherkasova, Dilley, Friedrich and Jin 1999; there the count ends with
    an eviction (``keep_counts=False``).

    Examples
    --------
    >>> state = LFU().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0], [0], [1], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "lfu"

    def __init__(
        self,
        budget: int | str | None = None,
        keep_counts: bool = True,
        ageing: bool = False,
    ) -> None:
        self.budget = budget
        self.keep_counts = keep_counts
        self.ageing = ageing

    @property
    def kernel(self) -> Callable[..., int]:  # type: ignore[override]
        """The compiled loads: with ageing, priorities are too wide for one number."""
        return load_priority if self.ageing else load_lfu

    @property
    def forget_kernel(self) -> Callable[..., None]:  # type: ignore[override]
        """Its counterpart for failed reads."""
        return forget_priority if self.ageing else forget_lfu

    @property
    def n_table(self) -> int:  # type: ignore[override]
        """Columns of the table."""
        return N_PRIORITY_COLUMNS if self.ageing else _N_TABLE

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the heap, with room for what a load puts aside."""
        return n_priority_cells(n_key) if self.ageing else (N_ENTRY + 1) * n_key

    def prepare(self, state: KernelState) -> None:
        """Set the variant.

        Raises
        ------
        SettingsError
            If a parameter is not a bool.
        """
        for name in ("keep_counts", "ageing"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise SettingsError(f"{name} must be True or False; got {value!r}.")
        if self.ageing:
            weights = np.ones(state.key_bytes.size, dtype=np.int64)
            prepare_priorities(state, weights, keep_counts=bool(self.keep_counts))
        else:
            state.header[_KEEP_COUNTS] = self.keep_counts

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` in the order in which they would be evicted, ``uses`` of each key.

        ``uses`` is int64 of shape (key,); without `keep_counts` it is 0 for what is not resident.
        With `ageing` also ``priorities``, as ``keys``, and ``age``, one number.
        """
        if self.ageing:
            return dump_priorities(state)
        sort = state.table[:, _SORT]
        keys = np.flatnonzero(state.resident).astype(np.int64)
        uses = sort >> USES_AT
        if not self.keep_counts:
            uses[~state.resident] = 0
        return {"keys": keys[np.argsort(sort[keys])], "uses": uses}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident with their counts.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        if self.ageing:
            restore_priorities(state, arrays)
            return
        (keys,) = read_queues(state, arrays, ["keys"])
        state.table[:, _SORT] = read_uses(state, arrays, keys, most=MOST_USES) << USES_AT
        state.table[keys, _SORT] += np.arange(keys.size)
        state.header[_ROWS] = keys.size
        _refill(keys, state.table, state.extra)
        make_resident(state, keys)
