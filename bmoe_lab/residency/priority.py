"""Policies whose victim has the smallest (priority, recency), where both only grow with a use.

A use sets ``priority = age + uses * weight``. The age of the cache is the largest priority of a
victim so far, so that what is used again overtakes what was used often long ago. LFU with ageing
has weight 1 for all keys, GDSF a larger one for smaller experts.

The resident keys are a heap (:mod:`bmoe_lab.residency.pair_heap`). A use only writes the key's row
of the table: its entry then lies too far up, never too far down, and is put right when it reaches
the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
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
from bmoe_lab.residency.pair_heap import FIRST, KEY, N_ENTRY, SECOND, pop, push, replace_top
from bmoe_lab.residency.start_state import make_resident, read_integers, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = [
    "N_PRIORITY_COLUMNS",
    "dump_priorities",
    "forget_priority",
    "load_priority",
    "n_priority_cells",
    "prepare_priorities",
    "read_uses",
    "restore_priorities",
]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_USES = 1  # loads that asked for the key
_PRIORITY = 2
_RECENCY = 3  # number of the row of the last use; no two keys share one
_WEIGHT = 4
N_PRIORITY_COLUMNS: Final = 5

# Cells of the header.
_AGE = OWN
_KEEP_COUNTS = OWN + 1  # 1 if a count survives eviction
_ROWS = OWN + 2  # rows served, the clock of the recency

#: Priorities and counts of a start state are below these, so that nothing overflows afterwards.
_MOST_PRIORITY = 2**62 - 1
_MOST_USES = 2**31


def n_priority_cells(n_key: int) -> int:
    """Return the length of ``extra``: the heap, and room for what a load puts aside."""
    return N_ENTRY * n_key + n_key


@compiled
def load_priority(
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
    keep_counts = header[_KEEP_COUNTS]
    age = header[_AGE]
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
            first = False
            if table[key, _STAMP] >= stamp:
                # A repeat: it is what it was at its first row, only its recency moves.
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                table[key, _USES] += 1
                table[key, _PRIORITY] = age + table[key, _USES] * table[key, _WEIGHT]
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            rows += 1
            table[key, _RECENCY] = rows
            out_residency[row] = found
            out_first[row] = first

        n_aside = 0
        while resident_bytes + missing_bytes > budget and n_heap > 0:
            top = heap[0, KEY]
            if heap[0, SECOND] != table[top, _RECENCY]:
                replace_top(heap, 0, n_heap, table[top, _PRIORITY], table[top, _RECENCY], top)
                continue
            pop(heap, 0, n_heap)
            n_heap -= 1
            if table[top, _STAMP] >= stamp:
                aside[n_aside] = top
                n_aside += 1
                continue
            age = max(age, table[top, _PRIORITY])
            resident[top] = False
            resident_bytes -= key_bytes[top]
            out_keys[1, n_victims] = top
            n_victims += 1
        for i in range(n_aside):
            key = aside[i]
            push(heap, 0, n_heap, table[key, _PRIORITY], table[key, _RECENCY], key)
            n_heap += 1

        for i in range(n_missing):
            key = out_keys[0, i]
            uses = table[key, _USES] * keep_counts + 1
            table[key, _USES] = uses
            table[key, _PRIORITY] = age + uses * table[key, _WEIGHT]
            resident[key] = True
            push(heap, 0, n_heap, table[key, _PRIORITY], table[key, _RECENCY], key)
            n_heap += 1
        resident_bytes += missing_bytes
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_AGE] = age
    header[_ROWS] = rows
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_RESIDENT] = n_heap
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_priority(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`. Age and counts stay."""
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
        key = heap[place, KEY]
        if resident[key]:
            # Kept entries only move up the array, so none is overwritten unread.
            push(heap, 0, n_kept, heap[place, FIRST], heap[place, SECOND], key)
            n_kept += 1


@compiled
def _refill(keys: IntArray, table: IntArray, extra: IntArray) -> None:
    n_key = table.shape[0]
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    for i in range(keys.size):
        key = keys[i]
        table[key, _RECENCY] = i + 1
        push(heap, 0, i, table[key, _PRIORITY], table[key, _RECENCY], key)


def prepare_priorities(state: KernelState, weights: IntArray, *, keep_counts: bool) -> None:
    """Set what one use of each key adds to its priority, at least 1."""
    state.table[:, _WEIGHT] = weights
    state.header[_KEEP_COUNTS] = keep_counts


def dump_priorities(state: KernelState) -> dict[str, Array]:
    """Return ``keys`` in the order of eviction, their ``priorities``, ``uses`` by key, ``age``."""
    keys = np.flatnonzero(state.resident).astype(np.int64)
    keys = keys[np.lexsort((state.table[keys, _RECENCY], state.table[keys, _PRIORITY]))]
    uses = state.table[:, _USES].copy()
    if not state.header[_KEEP_COUNTS]:
        uses[~state.resident] = 0
    return {
        "keys": keys,
        "priorities": state.table[keys, _PRIORITY],
        "uses": uses,
        "age": state.header[_AGE : _AGE + 1].copy(),
    }


def read_uses(
    state: KernelState, arrays: Mapping[str, Array], keys: IntArray, *, most: int
) -> IntArray:
    """Return ``uses`` of a start state, int64 of shape (key,): at least 1 for each of `keys`.

    Raises
    ------
    PolicyError
        If it is absent, of another length or out of range.
    """
    n_key = state.key_bytes.size
    uses = read_integers(state, arrays, "uses", size=n_key, least=0, most=most)
    held = {"uses of the resident keys": uses[keys]}
    read_integers(state, held, *held, size=keys.size, least=1, most=most)
    return uses


def restore_priorities(state: KernelState, arrays: Mapping[str, Array]) -> None:
    """Bring an empty state to what :func:`dump_priorities` described.

    Raises
    ------
    PolicyError
        If an array is absent or impossible.
    """
    (keys,) = read_queues(state, arrays, ["keys"])
    state.table[:, _USES] = read_uses(state, arrays, keys, most=_MOST_USES)
    most = _MOST_PRIORITY
    state.table[keys, _PRIORITY] = read_integers(
        state, arrays, "priorities", size=keys.size, least=1, most=most
    )
    state.header[_AGE] = read_integers(state, arrays, "age", size=1, least=0, most=most)[0]
    _refill(keys, state.table, state.extra)
    state.header[_ROWS] = keys.size
    make_resident(state, keys)
