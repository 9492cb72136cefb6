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
    "MISS",
    "N_HEADER",
    "N_MISSING",
    "N_RESIDENT",
    "N_VICTIMS",
    "OWN",
    "RESIDENT_BYTES",
    "KernelState",
    "Load",
    "ResidencyPolicy",
    "ResidencyState",
    "token_cycle",
]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

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
OWN: Final = 8
N_HEADER: Final = 16


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


class ResidencyState(Protocol):
    """A cache in use: the interface of what :meth:`ResidencyPolicy.start` returns."""

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


class KernelState:
    """A cache whose rules are a compiled kernel over flat arrays.

    A live session and a replay drive the same kernel through this class, so what they say about
    a stream of loads is equal to the last row.

    Parameters
    ----------
    policy : ResidencyPolicy
        Brings `kernel`, `forget_kernel` and `n_table`.
    key_bytes : array_like of int64, shape (key,)
        Bytes that each key occupies.
    budget_bytes : int
        Bytes allowed.
    n_layer : int, default 1
        The keys are `n_layer` runs of equal length; read by policies that treat layers apart.
    """

    __slots__ = (
        "_capacity",
        "_first",
        "_forget",
        "_header",
        "_kernel",
        "_missing",
        "_out_keys",
        "_residency",
        "_resident",
        "_table",
        "_victims",
        "budget_bytes",
        "key_bytes",
        "n_layer",
        "policy",
    )

    def __init__(
        self,
        policy: ResidencyPolicy,
        key_bytes: npt.ArrayLike,
        budget_bytes: int,
        n_layer: int = 1,
    ) -> None:
        self.policy = policy
        self.key_bytes: IntArray = np.array(key_bytes, dtype=np.int64, ndmin=1)
        if self.key_bytes.ndim != 1 or self.key_bytes.size == 0 or (self.key_bytes < 0).any():
            raise SettingsError(
                f"key_bytes must be a list of sizes of at least 0 bytes; got {key_bytes!r}."
            )
        if budget_bytes < 0:
            raise SettingsError(f"budget_bytes must be at least 0; got {budget_bytes!r}.")
        self.budget_bytes = int(budget_bytes)
        self.n_layer = n_layer
        n_key = self.key_bytes.size
        self._kernel, self._forget = policy.kernel, policy.forget_kernel
        self._resident: BoolArray = np.zeros(n_key, dtype=np.bool_)
        self._header: IntArray = np.zeros(N_HEADER, dtype=np.int64)
        self._table: IntArray = np.zeros((policy.n_table, n_key), dtype=np.int64)
        # A load misses at most every key and evicts at most every key.
        self._out_keys: IntArray = np.empty((2, n_key), dtype=np.int64)
        self._missing, self._victims = self._out_keys
        self._reserve(64)
        self.clear()

    def _reserve(self, n_row: int) -> None:
        self._capacity = n_row
        self._residency: npt.NDArray[np.uint8] = np.empty(n_row, dtype=np.uint8)
        self._first: BoolArray = np.empty(n_row, dtype=np.bool_)

    @property
    def resident_bytes(self) -> int:
        """Bytes resident now."""
        return int(self._header[RESIDENT_BYTES])

    @property
    def n_resident(self) -> int:
        """Keys resident now."""
        return int(self._header[N_RESIDENT])

    @property
    def evictions(self) -> int:
        """Victims since the state was new or cleared."""
        return int(self._header[EVICTIONS])

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
        if n_row > self._capacity:
            self._reserve(max(n_row, 2 * self._capacity))
        header = self._header
        bad_row = self._kernel(
            keys,
            0,
            n_row,
            self.key_bytes,
            self.budget_bytes,
            header,
            self._table,
            self._resident,
            self._residency,
            self._first,
            self._out_keys,
        )
        if bad_row >= 0:
            raise self._out_of_range(keys, bad_row)
        return Load(
            self._residency[:n_row],
            self._first[:n_row],
            self._missing[: header[N_MISSING]],
            self._victims[: header[N_VICTIMS]],
        )

    def forget(self, keys: npt.ArrayLike) -> None:
        """Take `keys` out because their reads failed; keys that are not resident are left alone.

        Not counted as evictions. Victims of the failed load stay released.

        Raises
        ------
        PolicyError
            If a key is out of range; the state is as before.
        """
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        for row in np.flatnonzero((keys < 0) | (keys >= self.key_bytes.size))[:1]:
            raise self._out_of_range(keys, int(row))
        self._forget(keys, self.key_bytes, self._header, self._table, self._resident)

    def _out_of_range(self, keys: IntArray, row: int) -> PolicyError:
        return PolicyError(
            f"keys must lie in [0, {self.key_bytes.size}); got {int(keys[row])} in row {row}."
        )

    def contains(self) -> BoolArray:
        """Return which keys are resident, bool of shape (key,): a live view, not to be written."""
        return self._resident

    def clear(self) -> None:
        """Make the state equal to a new one: nothing resident, counters 0."""
        self._resident[:] = False
        self._header[:] = 0
        self._table[:] = 0
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
        ``kernel(keys, begin, end, key_bytes, budget, header, table, resident, out_residency,
        out_first, out_keys) -> int``, compiled with ``numba.njit(cache=True, nogil=True)``:

        - ``keys`` int64[row], of which rows ``begin`` to ``end`` are the load, so that a replay
          walks a whole trace without cutting it up; ``key_bytes`` int64[key], ``budget`` int;
        - ``header`` int64[N_HEADER], ``table`` int64[n_table, key], ``resident`` bool[key]: the
          state, updated in place; the header's first cells are common to all policies;
        - ``out_residency`` uint8[>= row], ``out_first`` bool[>= row]: filled from ``begin`` to
          ``end``; ``out_keys`` int64[2, key] (missing keys, victims): filled from 0, counts in
          the header;
        - returns -1, or the first row with a key out of range, having changed nothing.
    forget_kernel : callable
        ``forget_kernel(keys, key_bytes, header, table, resident) -> None``.
    n_table : int
        Rows of ``table``.
    name : str
        Name in the registry.
    online : bool
        False for policies that need the future; a live session refuses them.
    """

    name: ClassVar[str]
    online: ClassVar[bool] = True
    kernel: ClassVar[Callable[..., int]]
    forget_kernel: ClassVar[Callable[..., None]]
    n_table: ClassVar[int] = 0

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
        return KernelState(self, key_bytes, budget_bytes, n_layer)

    def from_arrays(
        self,
        arrays: Mapping[str, Array],
        key_bytes: npt.ArrayLike,
        budget_bytes: int,
        *,
        n_layer: int = 1,
    ) -> ResidencyState:
        """Return a cache that goes on exactly where ``to_arrays`` was taken; counters are 0."""
        state = KernelState(self, key_bytes, budget_bytes, n_layer)
        self.restore(state, arrays)
        return state

    def prepare(self, state: KernelState) -> None:
        """Set the start values of header and table, which are 0."""

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return the state in a form that does not depend on how the kernel stores it."""
        raise NotImplementedError(f"{type(self).__name__} must implement dump().")

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Bring an empty `state` to what :meth:`dump` described."""
        raise NotImplementedError(f"{type(self).__name__} must implement restore().")
