"""The hits of a global LRU at every budget, in one pass over the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.state import out_of_range

__all__ = ["NEVER", "REPEAT", "LRUCurve", "stack_curve", "stack_distances"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Distance of a row whose key was not asked for before: it misses at every budget.
NEVER: Final = 2**63 - 1

#: In place of a distance: the row repeats a key of its load, which is looked up once.
REPEAT: Final = -1


@compiled
def _add(tree: IntArray, slot: int, change: int) -> None:
    node = slot + 1
    while node < tree.size:
        tree[node] += change
        node += node & -node


@compiled
def _sum_to(tree: IntArray, slot: int) -> int:
    """Return the sum over the slots 0 to `slot`."""
    node = slot + 1
    total = 0
    while node > 0:
        total += tree[node]
        node -= node & -node
    return total


@compiled
def _close_gaps(
    tree: IntArray, keys_at: IntArray, slot_of: IntArray, key_bytes: IntArray, n_slot: int
) -> int:
    n = 0
    for slot in range(n_slot):
        key = keys_at[slot]
        if key >= 0 and slot_of[key] == slot:
            keys_at[n] = key
            slot_of[key] = n
            n += 1
    tree[:] = 0
    for node in range(1, tree.size):
        if node <= n:
            tree[node] += key_bytes[keys_at[node - 1]]
        above = node + (node & -node)
        if above < tree.size:
            tree[above] += tree[node]
    return n


@compiled
def _distances(
    keys: IntArray,
    offsets: IntArray,
    restarts: IntArray,
    key_bytes: IntArray,
    tree: IntArray,
    keys_at: IntArray,
    slot_of: IntArray,
    load_of: IntArray,
    out: IntArray,
) -> int:
    """Write the distances; return -1, or the first row with a key out of range.

    Each key that was asked for has a slot, in order of recency; the tree sums the bytes of slots.
    """
    n_key = key_bytes.size
    n_slot = 0
    held = 0  # bytes of all keys that have a slot
    restart = 0
    for load in range(offsets.size - 1):
        if restart < restarts.size and restarts[restart] == load:
            restart += 1
            tree[:] = 0
            slot_of[:] = -1
            n_slot = 0
            held = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            if key < 0 or key >= n_key:
                return row
            if load_of[key] == load:
                out[row] = REPEAT
                continue
            if slot_of[key] < 0:
                out[row] = NEVER
            elif load_of[key] == load - 1:
                out[row] = 0  # no eviction since: the load before may not evict its own keys
            else:
                out[row] = held - _sum_to(tree, slot_of[key] - 1)
            load_of[key] = load
        # Only now, since a load is judged before it changes anything. From the last row back, a
        # key's latest row comes first.
        n_distinct = 0
        for row in range(offsets[load], offsets[load + 1]):
            n_distinct += out[row] != REPEAT
        if n_slot + n_distinct >= keys_at.size:
            n_slot = _close_gaps(tree, keys_at, slot_of, key_bytes, n_slot)
        slot = n_slot + n_distinct
        for row in range(offsets[load + 1] - 1, offsets[load] - 1, -1):
            key = keys[row]
            if slot_of[key] >= n_slot:
                continue
            if slot_of[key] >= 0:
                _add(tree, slot_of[key], -key_bytes[key])
            else:
                held += key_bytes[key]
            slot -= 1
            slot_of[key] = slot
            keys_at[slot] = key
            _add(tree, slot, key_bytes[key])
        n_slot += n_distinct
    return -1


def stack_distances(
    keys: IntArray,
    offsets: IntArray,
    key_bytes: npt.ArrayLike,
    *,
    restarts: IntArray | None = None,
) -> IntArray:
    """Return the smallest budget at which each row's lookup hits in a global LRU.

    Parameters
    ----------
    keys : numpy.ndarray of int64, shape (row,)
        The loads' keys, one load after the other.
    offsets : numpy.ndarray of int64, shape (load + 1,)
        Load i is ``keys[offsets[i]:offsets[i + 1]]``.
    key_bytes : array_like of int64, shape (key,)
        Bytes of each key.
    restarts : numpy.ndarray of int64, optional
        Loads, ascending, before which the cache is emptied.

    Returns
    -------
    numpy.ndarray of int64, shape (row,)
        Bytes; :data:`NEVER` where the key was not asked for before, :data:`REPEAT` where the row
        repeats a key of its own load, which is looked up once.

    Raises
    ------
    PolicyError
        If a key is out of range.

    Notes
    -----
    Evictions go in order of recency and end as soon as the budget holds, so what is resident is
    always the most recent keys that fit, and at least the last load's. A key that was last asked
    for by the load before is resident at any budget: 0. Any other is resident exactly if it and
    all keys used more recently fit into the budget together, because that sum only grows until
    the key is used again: the distance is that sum, just before the load. Within a load the order
    is that of the rows, a key's last one counting. Byte-weighted form of the stack distance of
    Mattson, Gecsei, Slutz and Traiger 1970, under this package's rules of a load. O(log n) per
    row.

    Examples
    --------
    >>> stack_distances(np.array([0, 1, 1, 0]), np.arange(5), [10, 30]) == [NEVER, NEVER, 0, 40]
    array([ True,  True,  True,  True])
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    sizes = np.ascontiguousarray(key_bytes, dtype=np.int64)
    none = np.empty(0, dtype=np.int64)
    out = np.empty(keys.size, dtype=np.int64)
    # Twice the keys, so that gaps are closed no more often than once per so many uses.
    n_slot = 2 * sizes.size + 2
    bad_row = _distances(
        keys,
        offsets,
        none if restarts is None else np.ascontiguousarray(restarts, dtype=np.int64),
        sizes,
        np.zeros(n_slot + 1, dtype=np.int64),
        np.full(n_slot, -1, dtype=np.int64),
        np.full(sizes.size, -1, dtype=np.int64),
        np.full(sizes.size, -2, dtype=np.int64),
        out,
    )
    if bad_row >= 0:
        raise out_of_range(keys, bad_row, sizes.size)
    return out


@dataclass(frozen=True)
class LRUCurve:
    """What a global LRU finds and reads at any budget.

    Attributes
    ----------
    distances : numpy.ndarray of int64, shape (step,)
        Budgets in bytes at which something changes, ascending.
    hits : numpy.ndarray of int64, shape (step + 1,)
        Lookups that hit below the first of them, then from each of them on.
    hit_bytes : numpy.ndarray of int64, shape (step + 1,)
        Bytes that those lookups did not have to read.
    n_lookup, n_bytes : int
        All lookups, and the bytes that they would read without a cache.
    """

    distances: IntArray
    hits: IntArray
    hit_bytes: IntArray
    n_lookup: int
    n_bytes: int

    @classmethod
    def from_distances(cls, distances: IntArray, size: IntArray) -> LRUCurve:
        """Return the curve of lookups with these stack distances and sizes, both in bytes.

        Parameters
        ----------
        distances : numpy.ndarray of int64, shape (lookup,)
            From :func:`stack_distances`, repeats left out.
        size : numpy.ndarray of int64, shape (lookup,)
            What each lookup reads if it misses.
        """
        found = distances != NEVER
        reached = distances[found]
        order = np.argsort(reached, kind="stable")
        steps, first = np.unique(reached[order], return_index=True)
        ends = np.append(first, reached.size)
        summed = np.append(0, np.cumsum(size[found][order]))
        return cls(
            distances=steps,
            hits=ends.astype(np.int64),
            hit_bytes=summed[ends],
            n_lookup=int(distances.size),
            n_bytes=int(size.sum()),
        )

    def n_hit(self, budgets: npt.ArrayLike) -> IntArray:
        """Return the number of lookups that hit at each budget in bytes, int64."""
        found: IntArray = self.hits[self._steps(budgets)]
        return found

    def hit_rate(self, budgets: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the share of lookups that hit at each budget in bytes, float64; NaN of none."""
        hits = self.n_hit(budgets).astype(np.float64)
        if not self.n_lookup:
            return np.full_like(hits, np.nan)
        rate: npt.NDArray[np.float64] = hits / self.n_lookup
        return rate

    def read_bytes(self, budgets: npt.ArrayLike) -> IntArray:
        """Return the bytes read at each budget in bytes, int64."""
        read: IntArray = self.n_bytes - self.hit_bytes[self._steps(budgets)]
        return read

    def _steps(self, budgets: npt.ArrayLike) -> Any:
        given = np.asarray(budgets)
        if given.dtype.kind not in "iu" or (given < 0).any():
            raise SettingsError(f"budgets must be bytes, whole and at least 0; got {budgets!r}.")
        return np.searchsorted(self.distances, given, side="right")


def stack_curve(
    keys: IntArray,
    offsets: IntArray,
    key_bytes: npt.ArrayLike,
    *,
    counted: BoolArray | None = None,
    restarts: IntArray | None = None,
) -> LRUCurve:
    """Return the hits and reads of a global LRU at every budget.

    Parameters
    ----------
    keys, offsets, key_bytes, restarts
        As in :func:`stack_distances`.
    counted : numpy.ndarray of bool, shape (row,), optional
        Rows whose lookups are counted, such as those of the decode; all are served. A lookup is
        counted with the first row of its key in the load.

    Returns
    -------
    LRUCurve
        Equal, at each budget, to what ``LRU(budget)`` does with the same loads.

    Examples
    --------
    >>> curve = stack_curve(np.array([0, 1, 0, 1]), np.arange(5), [10, 30])
    >>> curve.n_hit([30, 39, 40]), curve.read_bytes([30, 39, 40])
    (array([0, 0, 2]), array([80, 80, 40]))
    """
    distances = stack_distances(keys, offsets, key_bytes, restarts=restarts)
    chosen = distances != REPEAT
    if counted is not None:
        if np.shape(counted) != distances.shape:
            raise SettingsError(
                f"counted must have one entry for each of the {distances.size} rows; got shape "
                f"{np.shape(counted)}."
            )
        chosen &= np.asarray(counted, dtype=np.bool_)
    size = np.asarray(key_bytes, dtype=np.int64)[np.asarray(keys)[chosen]]
    return LRUCurve.from_distances(distances[chosen], size)
