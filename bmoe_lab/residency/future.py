"""When each row's key is asked for next: what offline policies know of the future."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.residency.state import out_of_range

__all__ = ["next_use"]

IntArray = npt.NDArray[np.int64]


@compiled
def _next_use(keys: IntArray, offsets: IntArray, upcoming: IntArray, out: IntArray) -> int:
    n_key = upcoming.size
    for load in range(offsets.size - 2, -1, -1):
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            if key < 0 or key >= n_key:
                return row
            out[row] = upcoming[key]
        # Only now, so that a repeat within the load sees what lies beyond it.
        for row in range(offsets[load], offsets[load + 1]):
            upcoming[keys[row]] = load
    return -1


def next_use(keys: IntArray, offsets: IntArray, n_key: int) -> IntArray:
    """Return for each row the next load, after its own, that names its key.

    Parameters
    ----------
    keys : numpy.ndarray of int64, shape (row,)
        The loads' keys, one load after the other.
    offsets : numpy.ndarray of int64, shape (load + 1,)
        Load i is ``keys[offsets[i]:offsets[i + 1]]``.
    n_key : int
        Number of keys there are.

    Returns
    -------
    numpy.ndarray of int64, shape (row,)
        The number of loads where there is none.

    Raises
    ------
    PolicyError
        If a key is out of range.

    Examples
    --------
    >>> next_use(np.array([0, 1, 0, 1]), np.array([0, 2, 3, 4]), 2)
    array([1, 2, 3, 3])
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    out = np.empty(keys.size, dtype=np.int64)
    upcoming = np.full(n_key, offsets.size - 1, dtype=np.int64)
    bad_row = _next_use(keys, offsets, upcoming, out)
    if bad_row >= 0:
        raise out_of_range(keys, bad_row, n_key)
    return out
