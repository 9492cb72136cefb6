"""Static pin: the experts that a profile names stay, the rest of the budget is an LRU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.frequency import best_set, read_profile
from bmoe_lab.residency.loads import (
    EVICTIONS,
    GENERATION,
    HIT,
    LOAD_EVICTIONS,
    LOAD_RESIDENT_BYTES,
    MISS,
    N_MISSING,
    N_RESIDENT,
    N_VICTIMS,
    RESIDENT_BYTES,
)
from bmoe_lab.residency.queues import (
    close_queues,
    fill_queue,
    keys_of_queue,
    n_links,
    newer,
    oldest,
    push_newest,
    unlink,
)
from bmoe_lab.residency.start_state import make_resident, read_queues
from bmoe_lab.residency.state import KernelState
from bmoe_lab.sizes import parse_size

__all__ = ["Pin"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_PINNED = 1  # 1 if the key is pinned; also the number of its queue
_N_TABLE = 2
_N_QUEUE = 2


@compiled
def load_pin(
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
    resident_bytes = header[RESIDENT_BYTES]
    n_missing = 0
    n_victims = 0
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
        n_victims = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first = False
            if table[key, _STAMP] >= stamp:
                # A repeat: it is what it was at its first row, only its recency moves.
                found = table[key, _STAMP] & 1
                unlink(extra, key)
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                unlink(extra, key)
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                resident[key] = True
                resident_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            push_newest(extra, n_key + table[key, _PINNED], key)
            out_residency[row] = found
            out_first[row] = first

        # Counting the missing keys as resident first and evicting then is the same as evicting
        # before they are admitted: keys of this load are the newest and are never reached.
        for queue in range(n_key, n_key + _N_QUEUE):
            victim = oldest(extra, queue)
            while resident_bytes > budget and victim != queue and table[victim, _STAMP] < stamp:
                after = newer(extra, victim)
                unlink(extra, victim)
                resident[victim] = False
                resident_bytes -= key_bytes[victim]
                out_keys[1, n_victims] = victim
                n_victims += 1
                victim = after
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_pin(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`. What is pinned stays so."""
    for row in range(keys.size):
        key = keys[row]
        if resident[key]:
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class Pin(ResidencyPolicy):
    """Keep the experts that a profile names once they were read; the rest takes turns.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    profile : array_like of shape (layer, expert), optional
        How often each expert was asked for elsewhere (:meth:`from_trace`), or any other worth of
        at least 0, or a mask. Largest first, ties to the lower layer and expert, 0 never. It must
        be given before the policy runs: a pin that learns as it goes is ``LFU``.
    room : int or str, optional
        Bytes of the budget that are not pinned. A load whose unpinned experts need more than that
        sends pinned ones away. Left out, a tenth of the budget.

    Notes
    -----
    Pinned are the keys that fill ``budget - room`` bytes in the order of the profile; one that no
    longer fits is passed over. Nothing is read ahead: a pinned expert is read when it is first
    asked for. Sort key of the victims: (pinned, position of the latest use in the stream of
    rows), smallest first, so that pinned ones go only when no other is left. O(1) per row. A
    budget too small for any pinned expert leaves an LRU.

    Examples
    --------
    >>> policy = Pin(profile=[[9, 0, 0, 0]], room=20)
    >>> state = policy.start(key_bytes=[10] * 4, budget_bytes=30)
    >>> for keys in ([0], [1], [2], [3]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([3]), array([1]), 30)
    """

    name: ClassVar[str] = "pin"
    kernel = staticmethod(load_pin)
    forget_kernel = staticmethod(forget_pin)
    n_table = _N_TABLE
    array_parameters: ClassVar[tuple[str, ...]] = ("profile",)

    def __init__(
        self,
        budget: int | str | None = None,
        profile: npt.ArrayLike | None = None,
        room: int | str | None = None,
    ) -> None:
        self.budget = budget
        self.profile = profile
        self.room = room

    @classmethod
    def from_trace(
        cls,
        trace: Any,
        *,
        budget: int | str | None = None,
        room: int | str | None = None,
    ) -> Self:
        """Return a pin by how many loads of a trace asked for each expert, prefill included.

        Judge it on another trace than this one: here it knows the future.

        Parameters
        ----------
        trace : xarray.Dataset
            Reads ``expert_applied``, integers of shape (token, layer, slot), -1 where a layer did
            not route, ``turn`` and ``batch``, and the attribute ``n_expert``.
        budget, room : int or str, optional
            As above.

        Raises
        ------
        PolicyError
            If the trace lacks one of them, or an id is not below ``n_expert``.

        Examples
        --------
        >>> from bmoe_lab.testing import make_trace
        >>> Pin.from_trace(make_trace(n_token=8, n_layer=3, n_expert=16, seed=0)).profile.shape
        (3, 16)
        """
        needed = ("expert_applied", "turn", "batch")
        if any(name not in trace for name in needed) or "n_expert" not in trace.attrs:
            raise PolicyError(
                f"trace must hold {', '.join(needed)} and the attribute n_expert to count which "
                "experts it asks for; got one without."
            )
        expert = np.asarray(trace["expert_applied"].values, dtype=np.int64)
        n_expert, n_layer = int(trace.attrs["n_expert"]), expert.shape[1]
        if expert.size and expert.max() >= n_expert:
            raise PolicyError(
                f"expert_applied must be below n_expert = {n_expert}; got {int(expert.max())}."
            )
        batch, turn = np.asarray(trace["batch"].values), np.asarray(trace["turn"].values)
        change = (batch[1:] != batch[:-1]) | (turn[1:] != turn[:-1])
        evaluation = np.append(0, np.cumsum(change))[: len(batch)]
        load = evaluation[:, None, None] * n_layer + np.arange(n_layer)[:, None]
        lookups = np.unique((load * n_expert + expert)[expert >= 0])
        counts = np.bincount(lookups % (n_layer * n_expert), minlength=n_layer * n_expert)
        return cls(budget, counts.reshape(n_layer, n_expert), room)

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queues' links."""
        return n_links(n_key, _N_QUEUE)

    def prepare(self, state: KernelState) -> None:
        """Choose what is pinned, empty the queues.

        Raises
        ------
        PolicyError
            If there is no profile, it does not fit the model or names nothing, or `room` leaves
            nothing to pin.
        SettingsError
            If `room` is not a size.
        """
        if self.profile is None:
            raise PolicyError(
                "profile must be given; got None in Pin. Count a trace with Pin.from_trace(trace), "
                "or pass an array of shape (layer, expert)."
            )
        worth = read_profile(self.profile, state.key_bytes.size, "Pin")
        if not worth.any():
            raise PolicyError("profile must name an expert to pin; got only zeros in Pin.")
        budget = state.budget_bytes
        room = budget // 10 if self.room is None else parse_size(self.room, name="room")
        if 0 < budget <= room:
            raise PolicyError(
                f"room must be less than the budget of {budget} bytes; got {self.room!r} in Pin. "
                "Nothing would be pinned: use LRU."
            )
        pinned = best_set(worth, worth, state.key_bytes, budget - min(room, budget))
        state.table[pinned, _PINNED] = 1
        close_queues(state.extra, state.key_bytes.size, _N_QUEUE)

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` and ``pinned``: the resident keys of both kinds, longest unused first."""
        n_key = state.key_bytes.size
        return {
            "keys": keys_of_queue(state.extra, n_key),
            "pinned": keys_of_queue(state.extra, n_key + 1),
        }

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` and ``pinned`` resident.

        What is pinned follows from profile and budget as they are now: under another budget a
        key may change its kind.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        n_key = state.key_bytes.size
        queues = read_queues(state, arrays, ["keys", "pinned"])
        both = np.concatenate(queues)
        kind = state.table[both, _PINNED]
        for queue in range(_N_QUEUE):
            fill_queue(state.extra, n_key + queue, both[kind == queue])
        make_resident(state, both)
