"""Greedy dual size frequency: the victim has the fewest uses per byte, older uses counting less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.priority import (
    N_PRIORITY_COLUMNS,
    dump_priorities,
    forget_priority,
    load_priority,
    n_priority_cells,
    prepare_priorities,
    restore_priorities,
)
from bmoe_lab.residency.state import KernelState

__all__ = ["GDSF"]

Array = npt.NDArray[Any]

#: What one use of the smallest expert adds to its priority.
_UNIT = 2**30


class GDSF(ResidencyPolicy):
    """Evict the expert with the fewest uses per byte since it was read, on top of an age.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Sort key of the victims: (priority, position of the latest use in the stream of rows),
    smallest first. A use sets ``priority = age + uses * cost / bytes`` with the same cost for
    every read; the age, 0 at the start, is the largest priority of a victim so far (the last one's,
    except after a load that protected a smaller one); the count begins with 1 at each read and
    goes up by one per load. Victims go before the missing keys are admitted.
    Priorities are whole numbers, so that every machine gives the same result: ``cost / bytes`` is
    ``2**30 * smallest // bytes``, at least 1; an expert of 0 bytes counts as 1 byte. O(1) per
    hit, O(log n) per read or victim. With a cost in proportion to the bytes the rule would be
    LFU with ageing (``LFU(keep_counts=False, ageing=True)``), and with experts of equal size it
    is.

    Source: Cherkasova 1998, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency
    caching policy" (HP Labs HPL-98-69R1).

    Examples
    --------
    >>> state = GDSF().start(key_bytes=[10, 30, 10], budget_bytes=40)
    >>> for keys in ([0], [1], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "gdsf"
    kernel = staticmethod(load_priority)
    forget_kernel = staticmethod(forget_priority)
    n_table = N_PRIORITY_COLUMNS

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the heap."""
        return n_priority_cells(n_key)

    def prepare(self, state: KernelState) -> None:
        """Set what one use of each key is worth."""
        sizes = [max(1, int(size)) for size in state.key_bytes]
        smallest = min(sizes)
        weights = np.array([max(1, _UNIT * smallest // size) for size in sizes], dtype=np.int64)
        prepare_priorities(state, weights, keep_counts=False)

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` in the order of eviction, ``priorities``, ``uses`` by key, ``age``."""
        return dump_priorities(state)

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident with their priorities.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        restore_priorities(state, arrays)
