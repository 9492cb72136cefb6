"""W-TinyLFU: what leaves a small window must be used more than the next victim to stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
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
    OWN,
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
from bmoe_lab.residency.shares import share_of
from bmoe_lab.residency.start_state import make_resident, read_integers, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["WTinyLFU"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_QUEUE = 1  # anchor of the queue that holds the key, less the number of keys
_USES = 2  # uses of the key, resident or not, as of its _AGE
_AGE = 3  # number of halvings that _USES has seen

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_QUEUES = ("window", "probation", "protected")
_N_QUEUE = len(_QUEUES)

# Cells of the header.
_WINDOW_BYTES = OWN
_PROTECTED_BYTES = OWN + 1
_MAIN_SHARE = OWN + 2
_PROTECTED_SHARE = OWN + 3
_SAMPLE = OWN + 4  # uses counted since the last halving, and half of those before
_SAMPLE_SIZE = OWN + 5
_HALVINGS = OWN + 6

_LONGEST = 62  # a shift by more is not defined; counts are shorter
_MOST = 2**60  # a count cannot come near it


@compiled
def _uses_now(table: IntArray, key: int, halvings: int) -> int:
    return table[key, _USES] >> min(halvings - table[key, _AGE], _LONGEST)  # type: ignore[no-any-return]


@compiled
def load_w_tinylfu(
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
    window, probation, protected = n_key, n_key + 1, n_key + 2
    window_bytes = header[_WINDOW_BYTES]
    protected_bytes = header[_PROTECTED_BYTES]
    main_share = header[_MAIN_SHARE]
    window_share = budget - main_share
    protected_share = header[_PROTECTED_SHARE]
    sample = header[_SAMPLE]
    sample_size = header[_SAMPLE_SIZE]
    halvings = header[_HALVINGS]
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
        missing_bytes = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            if table[key, _STAMP] >= stamp:
                out_residency[row] = table[key, _STAMP] & 1
                out_first[row] = False
                continue
            table[key, _USES] = _uses_now(table, key, halvings) + 1
            table[key, _AGE] = halvings
            sample += 1
            if sample >= sample_size:
                sample //= 2
                halvings += 1
            if resident[key]:
                out_residency[row] = HIT
                out_first[row] = False
                table[key, _STAMP] = stamp + 1
                unlink(extra, key)
                if table[key, _QUEUE] == _WINDOW:
                    push_newest(extra, window, key)
                else:
                    push_newest(extra, protected, key)
                    if table[key, _QUEUE] == _PROBATION:
                        table[key, _QUEUE] = _PROTECTED
                        protected_bytes += key_bytes[key]
                        while protected_bytes > protected_share:
                            demoted = oldest(extra, protected)
                            unlink(extra, demoted)
                            push_newest(extra, probation, demoted)
                            table[demoted, _QUEUE] = _PROBATION
                            protected_bytes -= key_bytes[demoted]
            else:
                out_residency[row] = MISS
                out_first[row] = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1

        if resident_bytes + missing_bytes > budget:
            at_window = oldest(extra, window)
            at_probation = oldest(extra, probation)
            at_protected = oldest(extra, protected)
            while resident_bytes + missing_bytes > budget:
                while at_window != window and table[at_window, _STAMP] >= stamp:
                    at_window = newer(extra, at_window)
                while at_probation != probation and table[at_probation, _STAMP] >= stamp:
                    at_probation = newer(extra, at_probation)
                while at_protected != protected and table[at_protected, _STAMP] >= stamp:
                    at_protected = newer(extra, at_protected)
                has_candidate = at_window != window
                has_victim = at_probation != probation or at_protected != protected
                victim = at_probation if at_probation != probation else at_protected
                if not has_candidate and not has_victim:
                    break
                promoted = -1
                if not has_victim:
                    key = at_window
                elif not has_candidate or window_bytes + missing_bytes <= window_share:
                    key = victim
                elif _uses_now(table, at_window, halvings) > _uses_now(table, victim, halvings):
                    key = victim
                    promoted = at_window
                else:
                    key = at_window

                if key == at_window:
                    at_window = newer(extra, key)
                    window_bytes -= key_bytes[key]
                elif key == at_probation:
                    at_probation = newer(extra, key)
                else:
                    at_protected = newer(extra, key)
                    protected_bytes -= key_bytes[key]
                unlink(extra, key)
                resident[key] = False
                resident_bytes -= key_bytes[key]
                out_keys[1, n_victims] = key
                n_victims += 1
                if promoted >= 0:
                    at_window = newer(extra, promoted)
                    window_bytes -= key_bytes[promoted]
                    unlink(extra, promoted)
                    push_newest(extra, probation, promoted)
                    table[promoted, _QUEUE] = _PROBATION
                    if at_probation == probation:
                        at_probation = promoted

        for i in range(n_missing):
            key = out_keys[0, i]
            resident[key] = True
            resident_bytes += key_bytes[key]
            table[key, _QUEUE] = _WINDOW
            push_newest(extra, window, key)
            window_bytes += key_bytes[key]
        # What the window has no room for moves on, as far as the main part has room without
        # giving anything up.
        while window_bytes > window_share:
            key = oldest(extra, window)
            if resident_bytes - window_bytes + key_bytes[key] > main_share:
                break
            window_bytes -= key_bytes[key]
            unlink(extra, key)
            push_newest(extra, probation, key)
            table[key, _QUEUE] = _PROBATION
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[_WINDOW_BYTES] = window_bytes
    header[_PROTECTED_BYTES] = protected_bytes
    header[_SAMPLE] = sample
    header[_HALVINGS] = halvings
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_w_tinylfu(
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
            if table[key, _QUEUE] == _WINDOW:
                header[_WINDOW_BYTES] -= key_bytes[key]
            elif table[key, _QUEUE] == _PROTECTED:
                header[_PROTECTED_BYTES] -= key_bytes[key]
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class WTinyLFU(ResidencyPolicy):
    """Keep an expert that leaves a small window only if it was used more than what it displaces.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    window_frac : float, default 0.01
        Share of the budget for the window that new experts enter.
    protected_frac : float, default 0.8
        Share of the rest for experts that were hit at least once.
    sample_factor : int, default 10
        Counts are halved after this many uses per expert that the budget holds.

    Notes
    -----
    An LRU window, then an SLRU (probation and protected) as main part. Its share is
    ``1 - window_frac`` of the budget's bytes rounded down, the window has the other bytes;
    protected has ``protected_frac`` of the main share, rounded down.

    Uses are counted for every key, resident or not: one per load and key, at its first row.
    Counts are exact, not a sketch, because the keys are known and few: no seed, no collisions, no
    ceiling. After ``sample_factor * n`` uses all counts and the number of uses are halved,
    rounded down; n is how many keys of average size the budget holds, at least 1, at most all.

    Victim rule: while the window with the missing keys is larger than its share, its longest
    unused key is the candidate, and it meets the victim of the main part: the longest unused key
    of probation, of protected if there is none. The one with fewer uses leaves, the candidate at a
    tie; a candidate that wins goes to the newest end of probation. If the window is within its
    share the main part's victim leaves, if the main part has none the window's.
    A hit moves a key to the newest end of the window if it is there, else of protected, whose
    overflow goes back to the newest end of probation. Missing keys enter the window in the order
    of first rows; what it has no room for moves on to probation only as far as the main part has
    room, and else stays until the next load, so a window smaller than a load holds that load.
    Keys of the load being served are passed over and keep their place. O(1) per row.
    Source: Einziger, Friedman and Manes, ACM Transactions on Storage 2017, "TinyLFU: a highly
    efficient cache admission policy".

    Examples
    --------
    >>> state = WTinyLFU().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0], [0], [1], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "w_tinylfu"
    kernel = staticmethod(load_w_tinylfu)
    forget_kernel = staticmethod(forget_w_tinylfu)
    n_table = 4

    def __init__(
        self,
        budget: int | str | None = None,
        window_frac: float = 0.01,
        protected_frac: float = 0.8,
        sample_factor: int = 10,
    ) -> None:
        self.budget = budget
        self.window_frac = window_frac
        self.protected_frac = protected_frac
        self.sample_factor = sample_factor

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queues' links."""
        return n_links(n_key, _N_QUEUE)

    def prepare(self, state: KernelState) -> None:
        """Empty the queues; nothing is counted yet.

        Raises
        ------
        PolicyError
            If a fraction is none, or `sample_factor` no number from 1 on.
        """
        n_key, budget = state.key_bytes.size, state.budget_bytes
        close_queues(state.extra, n_key, _N_QUEUE)
        main = share_of(budget, self, "window_frac", rest=True)
        state.header[_MAIN_SHARE] = main
        state.header[_PROTECTED_SHARE] = share_of(main, self, "protected_frac")
        factor = self.sample_factor
        if isinstance(factor, bool) or not isinstance(factor, int | np.integer) or factor < 1:
            raise PolicyError(
                f"sample_factor must be an integer of at least 1; got {factor!r} in WTinyLFU. "
                "The paper takes about 10."
            )
        total = int(state.key_bytes.sum())
        n_held = n_key if budget >= total else max(1, budget * n_key // total)
        state.header[_SAMPLE_SIZE] = min(int(factor) * n_held, _MOST)

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return the queues and the counts, int64.

        ``window``, ``probation`` and ``protected`` come longest unused first; ``uses`` has one
        count per key of the model; ``sample``, one number, is how far the next halving has come.
        """
        n_key = state.key_bytes.size
        queues: dict[str, Array] = {
            name: keys_of_queue(state.extra, n_key + anchor) for anchor, name in enumerate(_QUEUES)
        }
        age = np.minimum(state.header[_HALVINGS] - state.table[:, _AGE], _LONGEST)
        return queues | {
            "uses": state.table[:, _USES] >> age,
            "sample": state.header[_SAMPLE : _SAMPLE + 1].copy(),
        }

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Fill the queues and the counts.

        Raises
        ------
        PolicyError
            If an array is absent or impossible, or a key is out of range or named twice.
        """
        n_key, header = state.key_bytes.size, state.header
        queues = read_queues(state, arrays, _QUEUES)
        uses = read_integers(state, arrays, "uses", size=n_key, least=0, most=_MOST)
        (sample,) = read_integers(state, arrays, "sample", size=1, least=0, most=_MOST)
        for anchor, keys in enumerate(queues):
            fill_queue(state.extra, n_key + anchor, keys)
            state.table[keys, _QUEUE] = anchor
            make_resident(state, keys)
        window, _, protected = queues
        header[_WINDOW_BYTES] = state.key_bytes[window].sum()
        header[_PROTECTED_BYTES] = state.key_bytes[protected].sum()
        state.table[:, _USES] = uses
        header[_SAMPLE] = sample
