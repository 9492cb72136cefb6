"""A user's own residency policy in plain Python, under the same rules of a load as a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.loads import NO_FUTURE, Load, LoadLog
from bmoe_lab.residency.start_state import read_queues
from bmoe_lab.residency.state import check_cache, check_range, serve_many

__all__ = ["PlainPolicy", "PlainState"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Before the names of a policy's own arrays in a start state.
_OWN = "own_"


class PlainState:
    """A cache whose victims a policy in plain Python chooses.

    The rules of a load are kept here: the policy is told what happens and asked whom to give up,
    and every answer is checked.

    Parameters
    ----------
    policy : PlainPolicy
        Is reset; no other cache may use it.
    key_bytes : array_like of int64, shape (key,)
        Bytes that each key occupies.
    budget_bytes : int
        Bytes allowed.
    n_layer : int, default 1
        The keys are `n_layer` runs of equal length.
    """

    def __init__(
        self,
        policy: PlainPolicy,
        key_bytes: npt.ArrayLike,
        budget_bytes: int,
        n_layer: int = 1,
    ) -> None:
        self.policy = policy
        self.key_bytes: IntArray = check_cache(key_bytes, budget_bytes, n_layer)
        self.key_bytes.flags.writeable = False
        self.budget_bytes = int(budget_bytes)
        self.n_layer = n_layer
        self._resident: BoolArray = np.zeros(self.key_bytes.size, dtype=np.bool_)
        self.clear()

    @property
    def resident_bytes(self) -> int:
        """Bytes resident now."""
        return self._resident_bytes

    @property
    def evictions(self) -> int:
        """Victims since the state was new or cleared."""
        return self._evictions

    def contains(self) -> BoolArray:
        """Return which keys are resident, bool of shape (key,): a live view, not to be written."""
        return self._resident

    def load(self, keys: IntArray) -> Load:
        """Ask for `keys` and make them resident.

        Parameters
        ----------
        keys : numpy.ndarray of int64, shape (row,)
            As the graph asks for them: token-major, repeats included.

        Raises
        ------
        PolicyError
            If a key is out of range, and the state is as before, or if the policy names a victim
            that cannot be one.
        """
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        check_range(keys, self.key_bytes.size)
        policy = self.policy
        residency = self._resident[keys].astype(np.uint8)
        first = np.zeros(keys.size, dtype=np.bool_)
        missing: list[int] = []
        asked: set[int] = set()
        for row, key in enumerate(keys.tolist()):
            if key not in asked:
                asked.add(key)
                hit = bool(residency[row])
                if not hit:
                    first[row] = True
                    missing.append(key)
                policy.looked_up(key, hit)
            policy.touched(key)

        wanted = int(self.key_bytes[missing].sum()) if missing else 0
        victims = []
        if self.resident_bytes + wanted > self.budget_bytes:
            evictable = np.array([key for key in self._order if key not in asked], dtype=np.int64)
            while self.resident_bytes + wanted > self.budget_bytes and evictable.size:
                evictable.flags.writeable = False
                victim = self._checked(policy.victim(evictable), evictable, asked)
                evictable = evictable[evictable != victim]
                self._take_out(victim)
                self._evictions += 1
                victims.append(victim)
                policy.evicted(victim)
        for key in missing:
            self._put_in(key)
            policy.admitted(key)
        return Load(
            residency,
            first,
            np.array(missing, dtype=np.int64),
            np.array(victims, dtype=np.int64),
        )

    def load_many(self, keys: IntArray, offsets: IntArray, future: IntArray = NO_FUTURE) -> LoadLog:
        """Serve many loads in a row, one by one."""
        return serve_many(self, np.ascontiguousarray(keys, dtype=np.int64), np.asarray(offsets))

    def forget(self, keys: npt.ArrayLike) -> None:
        """Take `keys` out because their reads failed; not counted as evictions."""
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        check_range(keys, self.key_bytes.size)
        for key in keys.tolist():
            if self._resident[key]:
                self._take_out(key)
                self.policy.forgotten(key)

    def clear(self) -> None:
        """Make the state equal to a new one: nothing resident, counters 0."""
        self._resident[:] = False
        self._resident_bytes = 0
        self._evictions = 0
        # The resident keys in the order in which they were read.
        self._order: dict[int, None] = {}
        self.policy.reset(self.key_bytes, self.budget_bytes, self.n_layer)

    def to_arrays(self) -> dict[str, Array]:
        """Return what :meth:`PlainPolicy.from_arrays` needs to go on exactly from here.

        Raises
        ------
        PolicyError
            If the policy does not implement :meth:`PlainPolicy.save`.
        """
        saved = {f"{_OWN}{name}": np.array(array) for name, array in self.policy.save().items()}
        return {"keys": np.array(list(self._order), dtype=np.int64)} | saved

    def refill(self, arrays: Mapping[str, Array]) -> None:
        """Bring an empty state to what :meth:`to_arrays` returned.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(self, arrays, ["keys"])  # type: ignore[arg-type]  # reads sizes only
        own = {name: array for name, array in arrays.items() if name.startswith(_OWN)}
        self.policy.load_saved({name.removeprefix(_OWN): array for name, array in own.items()})
        for key in keys.tolist():
            self._put_in(key)

    def _put_in(self, key: int) -> None:
        self._order[key] = None
        self._resident[key] = True
        self._resident_bytes += int(self.key_bytes[key])

    def _take_out(self, key: int) -> None:
        del self._order[key]
        self._resident[key] = False
        self._resident_bytes -= int(self.key_bytes[key])

    def _checked(self, answer: Any, evictable: IntArray, asked: set[int]) -> int:
        rule = f"{type(self.policy).__name__}.victim() must return one of the evictable keys"
        if (
            isinstance(answer, bool | np.bool_)
            or not isinstance(answer, int | np.integer | np.ndarray)
            or (isinstance(answer, np.ndarray) and (answer.ndim or answer.dtype.kind not in "iu"))
        ):
            raise PolicyError(f"{rule}; got {answer!r}. Return an integer.")
        key = int(answer)
        if key in self._order and key not in asked:
            return key
        if key in asked:
            why = "this load asks for it"
        elif 0 <= key < self.key_bytes.size:
            why = "it is not resident"
        else:
            why = f"keys lie in [0, {self.key_bytes.size})"
        raise PolicyError(
            f"{rule}; got {key}, but {why}. Choose from the {evictable.size} keys that "
            "victim(evictable) is given."
        )


class PlainPolicy(ResidencyPolicy):
    """Base of residency policies in plain Python: a few hooks, and the rules of a load for free.

    Only :meth:`victim` must be written; the other hooks do nothing. What a policy learns it keeps
    in attributes that :meth:`reset` makes anew; the constructor stores its parameters under their
    own names, `budget` among them. Such a policy serves a live session and a replay alike, some
    hundred times slower than a kernel. :class:`bmoe_lab.testing.ResidencyPolicySuite` checks it.

    Notes
    -----
    In one load the hooks are called in this order: for each row, token-major, :meth:`looked_up`
    if it is the first of its key and :meth:`touched`; then, while the missing keys do not fit,
    :meth:`victim` and :meth:`evicted`; then :meth:`admitted` for each missing key. A key is
    ``layer * n_expert + expert``. An exception in a hook ends the load; the policy and the cache
    then may not agree, so start anew.

    Examples
    --------
    Least recently used:

    >>> class MyLRU(PlainPolicy):
    ...     def __init__(self, budget=None):
    ...         self.budget = budget
    ...
    ...     def reset(self, key_bytes, budget_bytes, n_layer):
    ...         self.clock, self.last_use = 0, np.zeros(len(key_bytes))
    ...
    ...     def touched(self, key):
    ...         self.clock += 1
    ...         self.last_use[key] = self.clock
    ...
    ...     def victim(self, evictable):
    ...         return evictable[self.last_use[evictable].argmin()]
    >>> state = MyLRU().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0, 1], [0], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)

    First in, first out needs no memory: ``return evictable[0]``.
    """

    # --- what a policy may write ---------------------------------------------------------------

    def reset(self, key_bytes: IntArray, budget_bytes: int, n_layer: int) -> None:
        """Forget everything: an empty cache begins.

        Parameters
        ----------
        key_bytes : numpy.ndarray of int64, shape (key,)
            Bytes of each key.
        budget_bytes : int
            Bytes allowed.
        n_layer : int
            The keys are this many runs of equal length.
        """

    def looked_up(self, key: int, hit: bool) -> None:
        """Learn that a load asks for `key`, once per load, and whether it was resident before."""

    def touched(self, key: int) -> None:
        """Learn that a row names `key`, resident or not, repeats included."""

    def victim(self, evictable: IntArray) -> int:
        """Return which key is to go.

        Parameters
        ----------
        evictable : numpy.ndarray of int64, not to be written
            Resident keys that this load does not ask for, in the order in which they were read.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement victim(evictable).")

    def evicted(self, key: int) -> None:
        """Learn that `key` is gone, as the policy chose."""

    def admitted(self, key: int) -> None:
        """Learn that `key`, which was missing, is resident."""

    def forgotten(self, key: int) -> None:
        """Learn that the read of `key` failed: it is gone; as if evicted, unless overridden."""
        self.evicted(key)

    def save(self) -> dict[str, Array]:
        """Return what :meth:`load_saved` needs to go on from here, for a warm start.

        Raises
        ------
        PolicyError
            Unless overridden.
        """
        raise PolicyError(
            f"{type(self).__name__} must implement save() and load_saved(arrays) for a warm "
            "start; got neither. Start cold, or write both."
        )

    def load_saved(self, arrays: Mapping[str, Array]) -> None:
        """Bring a policy that was just reset to what :meth:`save` described.

        Raises
        ------
        PolicyError
            Unless overridden.
        """
        self.save()

    # --- how it fits in ------------------------------------------------------------------------

    def start(self, key_bytes: npt.ArrayLike, budget_bytes: int, *, n_layer: int = 1) -> PlainState:
        """Return an empty cache under a clone of this policy, so that two never share memory."""
        return PlainState(self.clone(), key_bytes, budget_bytes, n_layer)

    def from_arrays(
        self,
        arrays: Mapping[str, Array],
        key_bytes: npt.ArrayLike,
        budget_bytes: int,
        *,
        n_layer: int = 1,
    ) -> PlainState:
        """Return a cache that goes on exactly where ``to_arrays`` was taken; counters are 0."""
        state = self.start(key_bytes, budget_bytes, n_layer=n_layer)
        state.refill(arrays)
        return state
