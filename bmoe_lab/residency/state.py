"""A cache in use: its interface, and the one whose rules are a compiled kernel over flat arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError, SettingsError
from bmoe_lab.residency.loads import (
    EVICTIONS,
    LOAD_EVICTIONS,
    LOAD_RESIDENT_BYTES,
    N_HEADER,
    N_LAYER,
    N_LOAD_COLUMNS,
    N_MISSING,
    N_RESIDENT,
    N_VICTIMS,
    NO_FUTURE,
    RESIDENT_BYTES,
    Load,
    LoadLog,
)

if TYPE_CHECKING:
    from bmoe_lab.residency.base import ResidencyPolicy

__all__ = [
    "KernelState",
    "ResidencyState",
    "check_cache",
    "check_range",
    "out_of_range",
    "serve_many",
]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class ResidencyState(Protocol):
    """A cache in use: the interface of what :meth:`ResidencyPolicy.start` returns.

    Notes
    -----
    Every implementation keeps the rules of a load that :mod:`bmoe_lab.residency.loads` states;
    :class:`bmoe_lab.testing.ResidencyPolicySuite` checks them.

    Examples
    --------
    >>> from bmoe_lab.residency import LRU
    >>> cache = LRU().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> [int(cache.load(np.array([key])).residency[0]) for key in (0, 1, 0)]
    [0, 0, 1]
    """

    @property
    def resident_bytes(self) -> int:
        """Bytes resident now."""
        ...

    @property
    def evictions(self) -> int:
        """Victims since the state was new or cleared."""
        ...

    def load(self, keys: IntArray) -> Load:
        """Ask for `keys` (raw, token-major, repeats included) and make them resident."""
        ...

    def load_many(self, keys: IntArray, offsets: IntArray, future: IntArray = NO_FUTURE) -> LoadLog:
        """Serve many loads in a row; :func:`serve_many` does it for any state."""
        ...

    def forget(self, keys: IntArray) -> None:
        """Take `keys` out because their reads failed; not counted as evictions."""
        ...

    def contains(self) -> BoolArray:
        """Return which keys are resident, bool of shape (key,), a live view."""
        ...

    def clear(self) -> None:
        """Make the state equal to a new one."""
        ...

    def to_arrays(self) -> dict[str, Array]:
        """Return what a warm start needs, as plain arrays."""
        ...


def serve_many(state: ResidencyState, keys: IntArray, offsets: IntArray) -> LoadLog:
    """Serve many loads one by one: what `load_many` means.

    Parameters
    ----------
    state : ResidencyState
        The cache; it is used.
    keys : numpy.ndarray of int64, shape (row,)
        The loads' keys, one load after the other.
    offsets : numpy.ndarray of int64, shape (load + 1,)
        Load i is ``keys[offsets[i]:offsets[i + 1]]``.
    """
    residency, first, loads = _log_buffers(keys.size, offsets.size - 1)
    bounds = offsets.tolist()
    for i, (low, high) in enumerate(pairwise(bounds)):
        load = state.load(keys[low:high])
        residency[low:high] = load.residency
        first[low:high] = load.first
        loads[i, LOAD_EVICTIONS] = load.victims.size
        loads[i, LOAD_RESIDENT_BYTES] = state.resident_bytes
    return LoadLog(residency, first, loads[:, LOAD_EVICTIONS], loads[:, LOAD_RESIDENT_BYTES])


_Buffers = tuple[npt.NDArray[np.uint8], BoolArray, IntArray]


def _log_buffers(n_row: int, n_load: int) -> _Buffers:
    return (
        np.empty(n_row, dtype=np.uint8),
        np.empty(n_row, dtype=np.bool_),
        np.empty((n_load, N_LOAD_COLUMNS), dtype=np.int64),
    )


def check_cache(key_bytes: npt.ArrayLike, budget_bytes: int, n_layer: int) -> IntArray:
    """Return the sizes of the keys, a copy; refuse a cache that cannot be.

    Raises
    ------
    SettingsError
        If a size or the budget is negative, or the keys cannot be divided into layers.
    """
    sizes: IntArray = np.array(key_bytes, dtype=np.int64, ndmin=1)
    if sizes.ndim != 1 or sizes.size == 0 or (sizes < 0).any():
        raise SettingsError(
            f"key_bytes must be a list of sizes of at least 0 bytes; got {key_bytes!r}."
        )
    if budget_bytes < 0:
        raise SettingsError(f"budget_bytes must be at least 0; got {budget_bytes!r}.")
    if n_layer < 1 or sizes.size % n_layer:
        raise SettingsError(
            f"n_layer must divide the {sizes.size} keys into runs of equal length; got {n_layer!r}."
        )
    return sizes


def out_of_range(keys: IntArray, row: int, n_key: int) -> PolicyError:
    """Return the error for the key in `row`."""
    return PolicyError(f"keys must lie in [0, {n_key}); got {int(keys[row])} in row {row}.")


def check_range(keys: IntArray, n_key: int) -> None:
    """Refuse keys that there are not.

    Raises
    ------
    PolicyError
    """
    for row in np.flatnonzero((keys < 0) | (keys >= n_key))[:1]:
        raise out_of_range(keys, int(row), n_key)


class KernelState:
    """A cache whose rules are a compiled kernel over flat arrays.

    A live session and a replay drive the same kernel through this class, so what they say about
    a stream of loads is equal to the last row.

    Parameters
    ----------
    policy : ResidencyPolicy
        Brings `kernel`, `forget_kernel`, `n_table` and `n_extra`.
    key_bytes : array_like of int64, shape (key,)
        Bytes that each key occupies.
    budget_bytes : int
        Bytes allowed.
    n_layer : int, default 1
        The keys are `n_layer` runs of equal length; read by policies that treat layers apart.

    Notes
    -----
    Made by :meth:`ResidencyPolicy.start`. The state is the arrays ``header``, ``table``, ``extra``
    and ``resident``, in the form that :class:`ResidencyPolicy` describes.

    Examples
    --------
    >>> from bmoe_lab.residency import LRU
    >>> state = KernelState(LRU(), [10, 10, 10], budget_bytes=20)
    >>> state.load(np.array([0, 1])).missing.tolist(), state.resident_bytes
    ([0, 1], 20)
    """

    __slots__ = (
        "_buffers",
        "_forget",
        "_kernel",
        "_offsets",
        "budget_bytes",
        "extra",
        "header",
        "key_bytes",
        "n_layer",
        "out_keys",
        "policy",
        "resident",
        "table",
    )

    def __init__(
        self,
        policy: ResidencyPolicy,
        key_bytes: npt.ArrayLike,
        budget_bytes: int,
        n_layer: int = 1,
    ) -> None:
        self.policy = policy
        self.key_bytes: IntArray = check_cache(key_bytes, budget_bytes, n_layer)
        n_key = self.key_bytes.size
        self.budget_bytes = int(budget_bytes)
        self.n_layer = n_layer
        self._kernel, self._forget = policy.kernel, policy.forget_kernel
        self.resident: BoolArray = np.zeros(n_key, dtype=np.bool_)
        self.header: IntArray = np.zeros(N_HEADER, dtype=np.int64)
        # Key by key, so that what a request touches lies in one cache line.
        self.table: IntArray = np.zeros((n_key, policy.n_table), dtype=np.int64)
        self.extra: IntArray = np.zeros(policy.n_extra(n_key, n_layer), dtype=np.int64)
        # A load misses at most every key and evicts at most every key.
        self.out_keys: IntArray = np.empty((2, n_key), dtype=np.int64)
        self._offsets: IntArray = np.zeros(2, dtype=np.int64)
        self._buffers = _log_buffers(64, 1)
        self.clear()

    @property
    def resident_bytes(self) -> int:
        """Bytes resident now."""
        return int(self.header[RESIDENT_BYTES])

    @property
    def n_resident(self) -> int:
        """Keys resident now."""
        return int(self.header[N_RESIDENT])

    @property
    def evictions(self) -> int:
        """Victims since the state was new or cleared."""
        return int(self.header[EVICTIONS])

    def load(self, keys: IntArray) -> Load:
        """Ask for `keys` and make them resident.

        Parameters
        ----------
        keys : numpy.ndarray of int64, shape (row,)
            As the graph asks for them: token-major, repeats included.

        Returns
        -------
        Load
            Views that the next load overwrites.

        Raises
        ------
        PolicyError
            If a key is out of range; the state is as before.
        """
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        n_row = keys.size
        if n_row > self._buffers[0].size:
            self._buffers = _log_buffers(2 * n_row, 1)
        self._offsets[1] = n_row
        residency, first, _ = self._buffers
        self._run(keys, self._offsets, NO_FUTURE, self._buffers)
        missing, victims = self.out_keys
        return Load(
            residency[:n_row],
            first[:n_row],
            missing[: self.header[N_MISSING]],
            victims[: self.header[N_VICTIMS]],
        )

    def load_many(self, keys: IntArray, offsets: IntArray, future: IntArray = NO_FUTURE) -> LoadLog:
        """Serve many loads in a row, in one call of the kernel.

        Parameters
        ----------
        keys : numpy.ndarray of int64, shape (row,)
            The loads' keys, one load after the other.
        offsets : numpy.ndarray of int64, shape (load + 1,)
            Load i is ``keys[offsets[i]:offsets[i + 1]]``.
        future : numpy.ndarray of int64, shape (row,), optional
            For policies that need it: the next load that names the row's key.

        Returns
        -------
        LoadLog
            New arrays.

        Raises
        ------
        PolicyError
            If a key is out of range; loads before it have been served.
        """
        buffers = _log_buffers(keys.size, offsets.size - 1)
        self._run(
            np.ascontiguousarray(keys, dtype=np.int64),
            np.ascontiguousarray(offsets, dtype=np.int64),
            np.ascontiguousarray(future, dtype=np.int64),
            buffers,
        )
        residency, first, loads = buffers
        return LoadLog(residency, first, loads[:, LOAD_EVICTIONS], loads[:, LOAD_RESIDENT_BYTES])

    def _run(self, keys: IntArray, offsets: IntArray, future: IntArray, buffers: _Buffers) -> None:
        residency, first, loads = buffers
        bad_row = self._kernel(
            keys,
            offsets,
            0,
            offsets.size - 1,
            future,
            self.key_bytes,
            self.budget_bytes,
            self.header,
            self.table,
            self.extra,
            self.resident,
            residency,
            first,
            self.out_keys,
            loads,
        )
        if bad_row >= 0:
            raise out_of_range(keys, bad_row, self.key_bytes.size)

    def forget(self, keys: npt.ArrayLike) -> None:
        """Take `keys` out because their reads failed; keys that are not resident are left alone.

        Not counted as evictions. Victims of the failed load stay released.

        Raises
        ------
        PolicyError
            If a key is out of range; the state is as before.
        """
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        check_range(keys, self.key_bytes.size)
        self._forget(keys, self.key_bytes, self.header, self.table, self.extra, self.resident)

    def contains(self) -> BoolArray:
        """Return which keys are resident, bool of shape (key,): a live view, not to be written."""
        return self.resident

    def clear(self) -> None:
        """Make the state equal to a new one: nothing resident, counters 0."""
        self.resident[:] = False
        self.header[:] = 0
        self.header[N_LAYER] = self.n_layer
        self.table[:] = 0
        self.extra[:] = 0
        self.policy.prepare(self)

    def to_arrays(self) -> dict[str, Array]:
        """Return what :meth:`ResidencyPolicy.from_arrays` needs to go on exactly from here."""
        return self.policy.dump(self)
