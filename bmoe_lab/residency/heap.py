"""Heaps of (value, key) entries in a flat array, the smallest value on top.

Each entry has four below it, which lie side by side in one cache line. Entries do not know where
they are: a policy leaves an entry that is no longer true in the heap and finds out when it comes
to the top, which costs nothing for the many that never get there.

A heap takes the rows ``begin`` to ``begin + size`` of int64 of shape (entry, 2).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import inlined

__all__ = ["KEY", "N_ENTRY", "VALUE", "arrange", "pop", "push", "replace_top"]

IntArray = npt.NDArray[np.int64]

# Columns of an entry.
VALUE: Final = 0
KEY: Final = 1
N_ENTRY: Final = 2


@inlined
def _sink(heap: IntArray, begin: int, size: int, place: int, value: int, key: int) -> None:
    """Put an entry at `place`, or below it where it belongs."""
    while True:
        child = 4 * place + 1
        if child + 3 < size:
            at = begin + child
            one, two = heap[at, VALUE], heap[at + 1, VALUE]
            three, four = heap[at + 2, VALUE], heap[at + 3, VALUE]
            # Which of the four is the least cannot be foretold, so this must not branch.
            left = child + 1 if two < one else child
            left_value = two if two < one else one
            right = child + 3 if four < three else child + 2
            right_value = four if four < three else three
            least = right if right_value < left_value else left
            least_value = right_value if right_value < left_value else left_value
        elif child < size:
            least = child
            least_value = heap[begin + child, VALUE]
            for other in range(child + 1, size):
                if heap[begin + other, VALUE] < least_value:
                    least = other
                    least_value = heap[begin + other, VALUE]
        else:
            break
        if least_value >= value:
            break
        heap[begin + place, VALUE] = least_value
        heap[begin + place, KEY] = heap[begin + least, KEY]
        place = least
    heap[begin + place, VALUE] = value
    heap[begin + place, KEY] = key


@inlined
def replace_top(heap: IntArray, begin: int, size: int, value: int, key: int) -> None:
    """Put an entry in the place of the top."""
    _sink(heap, begin, size, 0, value, key)


@inlined
def pop(heap: IntArray, begin: int, size: int) -> None:
    """Take the top off; the heap has one entry less."""
    last = begin + size - 1
    if size > 1:
        _sink(heap, begin, size - 1, 0, heap[last, VALUE], heap[last, KEY])


@inlined
def push(heap: IntArray, begin: int, size: int, value: int, key: int) -> None:
    """Add an entry; the heap has one more."""
    place = size
    while place > 0:
        parent = (place - 1) >> 2
        if heap[begin + parent, VALUE] <= value:
            break
        heap[begin + place, VALUE] = heap[begin + parent, VALUE]
        heap[begin + place, KEY] = heap[begin + parent, KEY]
        place = parent
    heap[begin + place, VALUE] = value
    heap[begin + place, KEY] = key


@inlined
def arrange(heap: IntArray, begin: int, size: int) -> None:
    """Make a heap of entries in any order."""
    for place in range((size - 2) // 4, -1, -1):
        _sink(heap, begin, size, place, heap[begin + place, VALUE], heap[begin + place, KEY])
