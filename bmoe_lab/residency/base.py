"""What every residency policy shares: the load, its state in flat arrays, the kernel protocol.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError, SettingsError
from bmoe_lab.parameters import Parametrised
from bmoe_lab.sizes import parse_size

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
    "KernelState",
    "Load",
    "LoadLog",
    "ResidencyPolicy",
    "ResidencyState",
    "check_cache",
    "check_range",
    "out_of_range",
    "serve_many",
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


class ResidencyState(Protocol):
    """A cache in use: the interface of what :meth:`ResidencyPolicy.start` returns.

    Notes
    -----
    Every implementation keeps the rules of a load that :mod:`bmoe_lab.residency.base` states;
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


class ResidencyPolicy(Parametrised):
    """Base of residency policies: parameters, and the kernel that carries them out.

    A compiled policy sets `kernel`, `forget_kernel` and `n_table`, and implements
    :meth:`prepare`, :meth:`dump` and :meth:`restore`. A policy in plain Python overrides
    :meth:`start` and :meth:`from_arrays` and returns its own :class:`ResidencyState`.

    Attributes
    ----------
    kernel : callable
        ``kernel(keys, offsets, begin, end, future, key_bytes, budget, header, table, extra,
        resident, out_residency, out_first, out_keys, out_loads) -> int``, compiled with
        ``numba.njit(cache=True, nogil=True)``. It serves the loads ``begin`` to ``end``, so that
        a replay walks a whole trace in one call:

        - ``keys`` int64[row]; load i is the rows ``offsets[i]`` to ``offsets[i + 1]``, offsets
          int64[> end]; ``future`` int64[row], the next load that names the row's key (a load
          beyond the last one if there is none), empty unless `needs_future`;
        - ``key_bytes`` int64[key], ``budget`` int;
        - ``header`` int64[N_HEADER], ``table`` int64[key, n_table], ``extra`` int64[n_extra],
          ``resident`` bool[key]: the state, updated in place; the header's first cells are common
          to all policies;
        - ``out_residency`` uint8[row], ``out_first`` bool[row]: one entry per row;
          ``out_loads`` int64[load, N_LOAD_COLUMNS]: one row per load; ``out_keys`` int64[2, key]:
          missing keys and victims of the last load, counts in the header;
        - returns -1, or the first row with a key out of range; rows are checked load by load, and
          the load in question and those after it have changed nothing. It must not raise.
    forget_kernel : callable
        ``forget_kernel(keys, key_bytes, header, table, extra, resident) -> None``; keys that are
        not resident are left alone.
    n_table : int
        Columns of ``table``.
    name : str
        Name in the registry.
    online : bool
        False for policies that need the future; a live session refuses them.
    needs_future : bool
        Whether `kernel` reads ``future``.
    keeps_budget : bool
        False for policies that may hold more than the budget after a load that fits into it.
    bypasses : bool
        True for policies under which what a load asked for need not be resident after it.
    state_class : type
        What :meth:`start` returns, for policies whose calls differ from :class:`KernelState`'s.
    """

    name: ClassVar[str]
    online: ClassVar[bool] = True
    needs_future: ClassVar[bool] = False
    keeps_budget: bool = True
    bypasses: ClassVar[bool] = False
    state_class: ClassVar[type[KernelState]] = KernelState
    kernel: Callable[..., int]
    forget_kernel: Callable[..., None]
    n_table: int = 0

    budget: int | str | None = None

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None if it is left to the session or the sweep.

        Raises
        ------
        SettingsError
            If `budget` is not a size.
        """
        return None if self.budget is None else parse_size(self.budget, name="budget")

    def start(
        self, key_bytes: npt.ArrayLike, budget_bytes: int, *, n_layer: int = 1
    ) -> ResidencyState:
        """Return an empty cache under this policy.

        Parameters
        ----------
        key_bytes : array_like of int64, shape (key,)
            Bytes of each key, ``key = layer * n_expert + expert``.
        budget_bytes : int
            Bytes allowed.
        n_layer : int, default 1
            Number of layers that the keys are divided into.
        """
        return self.state_class(self, key_bytes, budget_bytes, n_layer)

    def from_arrays(
        self,
        arrays: Mapping[str, Array],
        key_bytes: npt.ArrayLike,
        budget_bytes: int,
        *,
        n_layer: int = 1,
    ) -> ResidencyState:
        """Return a cache that goes on exactly where ``to_arrays`` was taken; counters are 0."""
        state = self.state_class(self, key_bytes, budget_bytes, n_layer)
        self.restore(state, arrays)
        return state

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return how many numbers the kernel keeps beside header and table."""
        return 0

    def prepare(self, state: KernelState) -> None:
        """Set the start values of header, table and extra, which are 0."""

    def begin_stream(self, state: ResidencyState, n_load: int) -> None:
        """Make room for a stream whose number of loads is known; called before it is served."""

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return the state in a form that does not depend on how the kernel stores it."""
        raise NotImplementedError(f"{type(self).__name__} must implement dump().")

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Bring an empty `state` to what :meth:`dump` described."""
        raise NotImplementedError(f"{type(self).__name__} must implement restore().")
