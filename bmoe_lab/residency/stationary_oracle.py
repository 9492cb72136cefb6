"""Stationary oracle: the best set of experts for the whole stream, held from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.frequency import best_set, count_lookups, read_profile
from bmoe_lab.residency.loads import (
    GENERATION,
    HIT,
    LOAD_EVICTIONS,
    LOAD_RESIDENT_BYTES,
    MISS,
    N_MISSING,
    N_RESIDENT,
    N_VICTIMS,
    NO_FUTURE,
    OWN,
    RESIDENT_BYTES,
    Load,
    LoadLog,
)
from bmoe_lab.residency.start_state import make_resident, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["StationaryOracle"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_STAMP = 0  # column of the table: 2 * generation of the last use, + 1 if it was a hit then

_CHOSEN = OWN  # cell of the header: whether the set is known, and from where
_FROM_STREAM = 1
_GIVEN = 2


@compiled
def load_stationary(
    keys: IntArray,
    offsets: IntArray,
    begin: int,
    end: int,
    future: IntArray,
    key_bytes: IntArray,
    budget: int,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
    out_residency: npt.NDArray[np.uint8],
    out_first: BoolArray,
    out_keys: IntArray,
    out_loads: IntArray,
) -> int:
    """Serve loads; signature as in `ResidencyPolicy.kernel`."""
    n_key = key_bytes.size
    generation = header[GENERATION]
    n_missing = 0
    bad_row = -1
    for load in range(begin, end):
        for row in range(offsets[load], offsets[load + 1]):
            if keys[row] < 0 or keys[row] >= n_key:
                bad_row = row
        if bad_row >= 0:
            break
        generation += 1
        stamp = 2 * generation
        n_missing = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                out_keys[0, n_missing] = key
                n_missing += 1
            out_residency[row] = found
            out_first[row] = first
        out_loads[load, LOAD_EVICTIONS] = 0
        out_loads[load, LOAD_RESIDENT_BYTES] = header[RESIDENT_BYTES]
    header[GENERATION] = generation
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = 0
    return bad_row


@compiled
def forget_stationary(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`."""
    for row in range(keys.size):
        key = keys[row]
        if resident[key]:
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class _OracleState(KernelState):
    """A set that the first call's stream decides, if no profile did."""

    __slots__ = ()

    def load(self, keys: IntArray) -> Load:
        """Ask for `keys`; refused while the set is not known."""
        if not self.header[_CHOSEN]:
            raise PolicyError(
                "StationaryOracle must be given the whole stream, or a profile; got one load. Use "
                "load_many(keys, offsets), or bmoe_lab.replay."
            )
        return super().load(keys)

    def load_many(self, keys: IntArray, offsets: IntArray, future: IntArray = NO_FUTURE) -> LoadLog:
        """Serve many loads in a row; without a profile they are the whole stream."""
        if self.header[_CHOSEN] == _FROM_STREAM:
            raise PolicyError(
                "StationaryOracle must be given the whole stream at once; got a second part. Pass "
                "it in one call, count it first and pass profile=, or clear() for another stream."
            )
        if not self.header[_CHOSEN]:
            counts = count_lookups(keys, offsets, self.key_bytes.size)
            _hold(self, counts.astype(np.float64))
            self.header[_CHOSEN] = _FROM_STREAM
        return super().load_many(keys, offsets, future)


def _hold(state: KernelState, worth: npt.NDArray[np.float64]) -> None:
    density = worth / np.maximum(state.key_bytes, 1)
    make_resident(state, best_set(worth, density, state.key_bytes, state.budget_bytes))


class StationaryOracle(ResidencyPolicy):
    """Hold the experts with the most uses per byte of the whole stream: the bound for fixed sets.

    It breaks two rules of a load on purpose. The set is resident before the first load, its reads
    are charged to nobody; what is missing is read, used and gone, so that nothing is evicted. It
    therefore may be better than ``Belady``, which has to read everything once, and keeps what it
    was just asked for.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    profile : array_like of shape (layer, expert), optional
        How many loads of the whole stream ask for each expert
        (:func:`bmoe_lab.residency.frequency.count_lookups`), for a stream that comes in parts.
        Left out, the first call brings the whole stream.

    Notes
    -----
    Hit rate = lookups of the set / all lookups. The set is filled with the largest (lookups of
    the key / its bytes) first, ties to the lower key, what no longer fits is passed over: exact
    where all experts have the same size, else a good set but no strict bound. Source: the
    stationary oracle, sum of the top-C frequencies over the total, of the FreeToken project's
    counters, with bytes in place of entries.

    Examples
    --------
    >>> state = StationaryOracle().start(key_bytes=[10, 10, 10], budget_bytes=10)
    >>> state.load_many(np.array([0, 1, 1, 1]), np.arange(5)).residency
    array([0, 1, 1, 1], dtype=uint8)
    """

    name: ClassVar[str] = "stationary_oracle"
    online: ClassVar[bool] = False
    bypasses: ClassVar[bool] = True
    state_class: ClassVar[type[KernelState]] = _OracleState
    kernel = staticmethod(load_stationary)
    forget_kernel = staticmethod(forget_stationary)
    n_table = 1
    array_parameters: ClassVar[tuple[str, ...]] = ("profile",)

    def __init__(
        self, budget: int | str | None = None, profile: npt.ArrayLike | None = None
    ) -> None:
        self.budget = budget
        self.profile = profile

    def prepare(self, state: KernelState) -> None:
        """Hold the set if the profile tells it.

        Raises
        ------
        PolicyError
            If the profile does not fit the model.
        """
        if self.profile is not None:
            _hold(state, read_profile(self.profile, state.key_bytes.size, "StationaryOracle"))
            state.header[_CHOSEN] = _GIVEN

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys``: the set, int64, ascending."""
        return {"keys": np.flatnonzero(state.resident).astype(np.int64)}

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Hold ``keys``.

        Raises
        ------
        PolicyError
            If ``keys`` is absent, has a key out of range, or a key twice.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        state.resident[:] = False
        state.header[RESIDENT_BYTES] = state.header[N_RESIDENT] = 0
        make_resident(state, keys)
        state.header[_CHOSEN] = _GIVEN
