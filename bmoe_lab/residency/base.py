"""The base of every residency policy: its parameters, and the kernel that carries them out.

The rules of a load, which no policy may change, are in :mod:`bmoe_lab.residency.loads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.parameters import Parametrised
from bmoe_lab.residency.state import KernelState, ResidencyState
from bmoe_lab.sizes import parse_size

__all__ = [
    "ResidencyPolicy",
]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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
