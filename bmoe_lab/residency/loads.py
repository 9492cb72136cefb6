"""One load: what a layer asks of the cache in an evaluation, the cells that count it.

A residency policy decides which experts stay in memory. It sees one *load* at a time: all that
one layer asks of the cache within one graph evaluation. Experts are named by keys,
``key = layer * n_expert + expert``.

A load has four rules that no policy may change, because every figure rests on them:

1. Residency is judged before the load: repeats of a missing key within the load are misses too,
   but its bytes are charged once, to the first row.
2. Each distinct key is looked up once; what the policy remembers of a use (recency, frequency)
   follows the rows in token-major order.
3. Victims go before the missing keys are read, until ``resident + missing <= budget`` or only
   keys of this load remain. Keys of this load are never victims.
4. So the budget is exceeded only by a load that alone is larger than it. Budget 0 is the cache
   switched off: whatever this load does not ask for goes.

The rules are those of BigMoeOnEdge's engine and of its offline replay (0.20.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "EVICTIONS",
    "GENERATION",
    "HIT",
    "LOAD_EVICTIONS",
    "LOAD_RESIDENT_BYTES",
    "MISS",
    "NO_FUTURE",
    "N_HEADER",
    "N_LAYER",
    "N_LOAD_COLUMNS",
    "N_MISSING",
    "N_RESIDENT",
    "N_VICTIMS",
    "OWN",
    "RESIDENT_BYTES",
    "Load",
    "LoadLog",
    "token_cycle",
]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: What a policy that does not need the future is given for it.
NO_FUTURE: Final = np.empty(0, dtype=np.int64)

#: Values of `Load.residency`, equal to the flags of the trace.
MISS: Final = 0
HIT: Final = 1

# Cells of the header that every kernel keeps. Cells from OWN on belong to the policy.
RESIDENT_BYTES: Final = 0  # bytes resident after the load
N_RESIDENT: Final = 1  # keys resident after the load
EVICTIONS: Final = 2  # victims since the state was new or cleared
GENERATION: Final = 3  # number of loads; stamps the keys of the present load
N_MISSING: Final = 4  # entries of out_keys[0] that the last load wrote
N_VICTIMS: Final = 5  # entries of out_keys[1] that the last load wrote
N_LAYER: Final = (
    6  # runs of equal length that the keys are divided into; set before the kernel runs
)
OWN: Final = 8
N_HEADER: Final = 24

# Columns of what a kernel says of each load.
LOAD_EVICTIONS: Final = 0  # victims of the load
LOAD_RESIDENT_BYTES: Final = 1  # bytes resident after it
N_LOAD_COLUMNS: Final = 2


def token_cycle(expert_bytes: npt.ArrayLike, n_used: npt.ArrayLike) -> int:
    """Return the bytes that one decoded token asks for.

    Below this budget a global LRU hits exactly 0 %: each layer's experts are evicted by the
    layers that follow, before the next token comes back to it.

    Parameters
    ----------
    expert_bytes : array_like of int, shape (layer,)
        Bytes of one expert of each layer.
    n_used : array_like of int, shape (layer,) or ()
        Experts used per token.

    Returns
    -------
    int
        Bytes.

    Notes
    -----
    T = sum over layers of ``expert_bytes * n_used``. The first budget with any hit lies up to one
    layer's share below T. Source: BigMoeOnEdge, cache replay of 2026-07-20, recomputed.

    Examples
    --------
    >>> token_cycle([100, 200], 4)
    1200
    """
    sizes, widths = np.broadcast_arrays(
        np.asarray(expert_bytes, dtype=np.int64), np.asarray(n_used, dtype=np.int64)
    )
    return int((sizes * widths).sum())


class Load:
    """What one load found and what it does to the cache.

    The arrays are views of buffers that the next load overwrites: copy what must outlive it.

    Attributes
    ----------
    residency : numpy.ndarray of uint8, shape (row,)
        0 miss, 1 hit, judged before the load, so a repeated missing key is 0 each time.
    first : numpy.ndarray of bool, shape (row,)
        True on the first row of each distinct missing key: its bytes are charged there.
    missing : numpy.ndarray of int64
        Distinct missing keys in the order first asked for.
    victims : numpy.ndarray of int64
        Keys that must be released before `missing` is read, in the order of eviction.

    Examples
    --------
    >>> from bmoe_lab.residency import LRU
    >>> LRU().start(key_bytes=[10, 10], budget_bytes=10).load(np.array([1, 1]))
    <Load of 2 rows: 1 missing, 0 victims>
    """

    __slots__ = ("first", "missing", "residency", "victims")

    def __init__(
        self,
        residency: npt.NDArray[np.uint8],
        first: BoolArray,
        missing: IntArray,
        victims: IntArray,
    ) -> None:
        self.residency = residency
        self.first = first
        self.missing = missing
        self.victims = victims

    def __repr__(self) -> str:
        return (
            f"<Load of {self.residency.size} rows: {self.missing.size} missing, "
            f"{self.victims.size} victims>"
        )


@dataclass(frozen=True)
class LoadLog:
    """What many loads in a row found and did.

    Attributes
    ----------
    residency : numpy.ndarray of uint8, shape (row,)
        0 miss, 1 hit, judged before the row's load.
    first : numpy.ndarray of bool, shape (row,)
        True on the first row of each distinct missing key of a load.
    evictions : numpy.ndarray of int64, shape (load,)
        Victims of each load.
    resident_bytes : numpy.ndarray of int64, shape (load,)
        Bytes resident after each load.
    """

    residency: npt.NDArray[np.uint8]
    first: BoolArray
    evictions: IntArray
    resident_bytes: IntArray
