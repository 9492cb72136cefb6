"""How often each key is asked for, and which keys a budget holds best."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.state import out_of_range

__all__ = ["best_set", "count_lookups", "read_profile"]

IntArray = npt.NDArray[np.int64]


@compiled
def _count(keys: IntArray, offsets: IntArray, last: IntArray, out: IntArray) -> int:
    for load in range(offsets.size - 1):
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            if key < 0 or key >= out.size:
                return row
            if last[key] != load:
                last[key] = load
                out[key] += 1
    return -1


def count_lookups(keys: IntArray, offsets: IntArray, n_key: int) -> IntArray:
    """Return how many loads ask for each key, int64 of shape (key,).

    Parameters
    ----------
    keys : numpy.ndarray of int64, shape (row,)
        The loads' keys, one load after the other.
    offsets : numpy.ndarray of int64, shape (load + 1,)
        Load i is ``keys[offsets[i]:offsets[i + 1]]``.
    n_key : int
        Number of keys there are.

    Raises
    ------
    PolicyError
        If a key is out of range.

    Examples
    --------
    >>> count_lookups(np.array([0, 0, 2, 0]), np.array([0, 3, 4]), 3)
    array([2, 0, 1])
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    counts = np.zeros(n_key, dtype=np.int64)
    last = np.full(n_key, -1, dtype=np.int64)
    bad_row = _count(keys, np.ascontiguousarray(offsets, dtype=np.int64), last, counts)
    if bad_row >= 0:
        raise out_of_range(keys, bad_row, n_key)
    return counts


def read_profile(profile: Any, n_key: int, owner: str) -> npt.NDArray[np.float64]:
    """Return a profile as one number per key, shape (key,); 0 for what is not worth anything.

    Parameters
    ----------
    profile : array_like of shape (layer, expert) or (key,)
        Counts, shares or a mask.

    Raises
    ------
    PolicyError
        If it is no such array, negative or not finite.
    """
    try:
        values = np.asarray(profile, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise PolicyError(
            f"profile must be an array of shape (layer, expert); got {profile!r} in {owner}."
        ) from error
    if values.size != n_key:
        raise PolicyError(
            f"profile must have one entry for each of the {n_key} experts of all layers; got "
            f"{values.size} in {owner}."
        )
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        key = int(np.argmax(bad))
        raise PolicyError(
            f"profile must be finite and at least 0; got {values[key]} for key {key} in {owner}."
        )
    return values


def best_set(
    worth: npt.NDArray[np.float64], sort: npt.NDArray[np.float64], key_bytes: IntArray, room: int
) -> IntArray:
    """Return the keys that fill `room` bytes, largest `sort` first, ties to the lower key.

    A key that no longer fits is passed over; keys without worth are left out.
    """
    chosen = []
    for key in np.argsort(-sort, kind="stable").tolist():
        if worth[key] > 0 and key_bytes[key] <= room:
            chosen.append(key)
            room -= int(key_bytes[key])
    return np.array(chosen, dtype=np.int64)
