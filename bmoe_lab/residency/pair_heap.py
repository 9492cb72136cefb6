"""A heap of (first, second, key) entries, for sort keys too wide for one number.

Each entry has four below it, which lie side by side in memory. Entries do not know where they
are: a policy leaves an entry that is no longer true in the heap and finds out when it comes to
the top, which costs nothing for the many that never get there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import inlined

__all__ = ["FIRST", "KEY", "N_ENTRY", "SECOND", "arrange", "pop", "push", "replace_top"]

IntArray = npt.NDArray[np.int64]

# Columns of an entry.
FIRST: Final = 0
SECOND: Final = 1
KEY: Final = 2
N_ENTRY: Final = 3


@inlined
def _sink(heap: IntArray, begin: int, size: int, place: int, a: int, b: int, key: int) -> None:
    """Put an entry at `place`, or below it where it belongs."""
    while True:
        child = 4 * place + 1
        if child >= size:
            break
        least = child
        least_a = heap[begin + child, FIRST]
        least_b = heap[begin + child, SECOND]
        for other in range(child + 1, min(child + 4, size)):
            other_a = heap[begin + other, FIRST]
            other_b = heap[begin + other, SECOND]
            if other_a < least_a or (other_a == least_a and other_b < least_b):
                least = other
                least_a = other_a
                least_b = other_b
        if a < least_a or (a == least_a and b <= least_b):
            break
        heap[begin + place, FIRST] = least_a
        heap[begin + place, SECOND] = least_b
        heap[begin + place, KEY] = heap[begin + least, KEY]
        place = least
    heap[begin + place, FIRST] = a
    heap[begin + place, SECOND] = b
    heap[begin + place, KEY] = key


@inlined
def replace_top(heap: IntArray, begin: int, size: int, a: int, b: int, key: int) -> None:
    """Put an entry in the place of the top of the heap ``heap[begin:begin + size]``."""
    _sink(heap, begin, size, 0, a, b, key)


@inlined
def pop(heap: IntArray, begin: int, size: int) -> None:
    """Take the top off; the heap has one entry less."""
    last = begin + size - 1
    if size > 1:
        _sink(heap, begin, size - 1, 0, heap[last, FIRST], heap[last, SECOND], heap[last, KEY])


@inlined
def push(heap: IntArray, begin: int, size: int, a: int, b: int, key: int) -> None:
    """Add an entry; the heap has one more."""
    place = size
    while place > 0:
        parent = (place - 1) // 4
        parent_a = heap[begin + parent, FIRST]
        parent_b = heap[begin + parent, SECOND]
        if parent_a < a or (parent_a == a and parent_b <= b):
            break
        heap[begin + place, FIRST] = parent_a
        heap[begin + place, SECOND] = parent_b
        heap[begin + place, KEY] = heap[begin + parent, KEY]
        place = parent
    heap[begin + place, FIRST] = a
    heap[begin + place, SECOND] = b
    heap[begin + place, KEY] = key


@inlined
def arrange(heap: IntArray, begin: int, size: int) -> None:
    """Make a heap of entries in any order."""
    for place in range((size - 2) // 4, -1, -1):
        at = begin + place
        _sink(heap, begin, size, place, heap[at, FIRST], heap[at, SECOND], heap[at, KEY])
