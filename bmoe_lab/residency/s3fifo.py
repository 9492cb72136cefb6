"""S3-FIFO: a small queue takes what is new, and most of it leaves from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

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

__all__ = ["S3FIFO"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_QUEUE = 1  # where the key is: anchor of its queue less the number of keys, + 1; 0 is nowhere
_USES = 2  # hits since it entered its queue, at most 3

_NOWHERE, _SMALL, _MAIN, _GHOST = 0, 1, 2, 3
_QUEUES = ("small", "main", "ghosts")
_N_QUEUE = len(_QUEUES)

# Cells of the header.
_SMALL_BYTES = OWN
_GHOST_BYTES = OWN + 1
_SMALL_SHARE = OWN + 2
_GHOST_SHARE = OWN + 3
_EVICTED = OWN + 4  # 1 once anything was evicted

_MOST_USES = 3


@compiled
def load_s3fifo(
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
    small, main, ghost = n_key, n_key + 1, n_key + 2
    generation = header[GENERATION]
    resident_bytes = header[RESIDENT_BYTES]
    small_bytes = header[_SMALL_BYTES]
    ghost_bytes = header[_GHOST_BYTES]
    small_share = header[_SMALL_SHARE]
    ghost_share = header[_GHOST_SHARE]
    evicted = header[_EVICTED]
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
            first = False
            if table[key, _STAMP] >= stamp:
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                table[key, _USES] = min(table[key, _USES] + 1, _MOST_USES)
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                missing_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
                if table[key, _QUEUE] == _GHOST:
                    unlink(extra, key)
                    ghost_bytes -= key_bytes[key]
                    table[key, _QUEUE] = _MAIN
                else:
                    table[key, _QUEUE] = _SMALL
            out_residency[row] = found
            out_first[row] = first

        if resident_bytes + missing_bytes > budget:
            at_small = oldest(extra, small)
            at_main = oldest(extra, main)
            while resident_bytes + missing_bytes > budget:
                if at_small != small and (small_bytes >= small_share or at_main == main):
                    while at_small != small:
                        key = at_small
                        at_small = newer(extra, key)
                        if table[key, _STAMP] >= stamp:
                            continue
                        unlink(extra, key)
                        small_bytes -= key_bytes[key]
                        if table[key, _USES] > 1:
                            push_newest(extra, main, key)
                            table[key, _QUEUE] = _MAIN
                            table[key, _USES] = 0
                            if at_main == main:
                                at_main = key
                        else:
                            push_newest(extra, ghost, key)
                            table[key, _QUEUE] = _GHOST
                            ghost_bytes += key_bytes[key]
                            while ghost_bytes > ghost_share:
                                lost = oldest(extra, ghost)
                                unlink(extra, lost)
                                table[lost, _QUEUE] = _NOWHERE
                                ghost_bytes -= key_bytes[lost]
                            resident[key] = False
                            resident_bytes -= key_bytes[key]
                            out_keys[1, n_victims] = key
                            n_victims += 1
                            break
                elif at_main != main:
                    while at_main != main:
                        key = at_main
                        at_main = newer(extra, key)
                        if table[key, _STAMP] >= stamp:
                            continue
                        unlink(extra, key)
                        if table[key, _USES] > 0:
                            push_newest(extra, main, key)
                            table[key, _USES] -= 1
                            if at_main == main:
                                at_main = key
                        else:
                            table[key, _QUEUE] = _NOWHERE
                            resident[key] = False
                            resident_bytes -= key_bytes[key]
                            out_keys[1, n_victims] = key
                            n_victims += 1
                            break
                else:
                    break
            if n_victims > 0:
                evicted = 1

        for i in range(n_missing):
            key = out_keys[0, i]
            resident[key] = True
            resident_bytes += key_bytes[key]
            table[key, _USES] = 0
            if table[key, _QUEUE] == _SMALL and (evicted == 1 or small_bytes < small_share):
                push_newest(extra, small, key)
                small_bytes += key_bytes[key]
            else:
                table[key, _QUEUE] = _MAIN
                push_newest(extra, main, key)
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[_SMALL_BYTES] = small_bytes
    header[_GHOST_BYTES] = ghost_bytes
    header[_EVICTED] = evicted
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_s3fifo(
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
            if table[key, _QUEUE] == _SMALL:
                header[_SMALL_BYTES] -= key_bytes[key]
            table[key, _QUEUE] = _NOWHERE
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


class S3FIFO(ResidencyPolicy):
    """Evict from a small queue of new experts, so that what is used once leaves quickly.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.
    small_frac : float, default 0.1
        Share of the budget for the small queue; the main queue has the rest.

    Notes
    -----
    Three queues in the order of entry: *small* and *main* hold what is resident, *ghosts* remembers
    what left small; ghosts cost no memory of experts and need no reads. The small share is
    ``small_frac`` of the budget's bytes rounded down; the ghosts' sizes add up to at most
    ``1 - small_frac`` of it, rounded down (the oldest go first).

    Victim rule: from small if it holds at least its share, else from main; the other one if that
    queue has none. The oldest of small goes to main, its count wiped, if it was used at least
    twice since it was read; else it is the victim and becomes the newest ghost. The oldest of main
    goes back to main's newest end with one use less if it was used; else it is the victim and
    leaves no ghost. Uses are counted up to 3. The queue is chosen anew for each victim, and when
    the whole of small went to main.

    A missing key that is a ghost when asked for enters main, any other small; but until the first
    eviction main takes what comes while small holds its share, so that a cold cache does not fill
    up with small alone (as the authors' implementation in libCacheSim does; the paper's listing
    has no such rule).

    One use per load and key, however often the load names it; reading a key is no use. Keys of
    the load being served are passed over: they keep their place and their uses, as though they
    were not in the queue. O(1) per row, as each round trip pays for one hit. With keys of one size
    and one key per load this is the algorithm of the paper.
    Source: Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction".

    Examples
    --------
    >>> state = S3FIFO().start(key_bytes=[10, 10, 10], budget_bytes=20)
    >>> for keys in ([0, 1], [0], [0], [2]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([2]), array([1]), 20)
    """

    name: ClassVar[str] = "s3fifo"
    kernel = staticmethod(load_s3fifo)
    forget_kernel = staticmethod(forget_s3fifo)
    n_table = 3

    def __init__(self, budget: int | str | None = None, small_frac: float = 0.1) -> None:
        self.budget = budget
        self.small_frac = small_frac

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queues' links."""
        return n_links(n_key, _N_QUEUE)

    def prepare(self, state: KernelState) -> None:
        """Empty the queues.

        Raises
        ------
        PolicyError
            If `small_frac` is no fraction.
        """
        close_queues(state.extra, state.key_bytes.size, _N_QUEUE)
        budget = state.budget_bytes
        state.header[_SMALL_SHARE] = share_of(budget, self, "small_frac")
        state.header[_GHOST_SHARE] = share_of(budget, self, "small_frac", rest=True)

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return the queues, the uses of resident keys, and whether anything was ever evicted.

        ``small``, ``main`` and ``ghosts`` are keys, oldest first, ``small_uses`` and ``main_uses``
        from 0 to 3, ``evicted`` one number, 0 or 1; all int64.
        """
        n_key = state.key_bytes.size
        small, main, ghosts = (
            keys_of_queue(state.extra, n_key + anchor) for anchor in range(_N_QUEUE)
        )
        return {
            "small": small,
            "small_uses": state.table[small, _USES],
            "main": main,
            "main_uses": state.table[main, _USES],
            "ghosts": ghosts,
            "evicted": state.header[_EVICTED : _EVICTED + 1].copy(),
        }

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Fill the queues.

        Raises
        ------
        PolicyError
            If an array is absent or impossible, or a key is out of range or named twice.
        """
        n_key, header = state.key_bytes.size, state.header
        queues = read_queues(state, arrays, _QUEUES)
        small, main, ghosts = queues
        for name, keys in (("small", small), ("main", main)):
            state.table[keys, _USES] = read_integers(
                state, arrays, f"{name}_uses", size=keys.size, least=0, most=_MOST_USES
            )
            make_resident(state, keys)
        (evicted,) = read_integers(state, arrays, "evicted", size=1, least=0, most=1)
        for anchor, keys in enumerate(queues):
            fill_queue(state.extra, n_key + anchor, keys)
            state.table[keys, _QUEUE] = anchor + 1
        header[_SMALL_BYTES] = state.key_bytes[small].sum()
        header[_GHOST_BYTES] = state.key_bytes[ghosts].sum()
        header[_EVICTED] = evicted
