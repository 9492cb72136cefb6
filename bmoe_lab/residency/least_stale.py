"""Least-Stale: what an earlier pass used goes first, and of that what is needed last."""

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
    N_LAYER,
    N_MISSING,
    N_RESIDENT,
    N_VICTIMS,
    OWN,
    RESIDENT_BYTES,
)
from bmoe_lab.residency.queues import (
    close_queues,
    keys_of_queue,
    n_links,
    oldest,
    push_newest,
    unlink,
)
from bmoe_lab.residency.start_state import make_resident, read_integers, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["LeastStale"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_PASS = 1  # pass of the last use
_N_TABLE = 2

# Cells of the header.
_CURRENT = OWN  # the present pass, from 1
_LAYER = OWN + 1  # layer of the last load

_MOST_PASSES = 2**62


@compiled
def load_least_stale(
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
    """Serve loads; signature as in `ResidencyPolicy.kernel`.

    Each layer has a queue of its keys by recency, so that only the oldest of each are compared.
    """
    n_key = key_bytes.size
    n_layer = header[N_LAYER]
    n_expert = n_key // n_layer
    current = header[_CURRENT]
    last_layer = header[_LAYER]
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
        if offsets[load + 1] > offsets[load]:
            layer = keys[offsets[load]] // n_expert
            if layer <= last_layer:
                current += 1
            last_layer = layer
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
            table[key, _PASS] = current
            push_newest(extra, n_key + key // n_expert, key)
            out_residency[row] = found
            out_first[row] = first

        # Counting the missing keys as resident first and evicting then is the same as evicting
        # before they are admitted: keys of this load are the newest and are passed over.
        while resident_bytes > budget:
            victim = -1
            # From the layer whose turn is furthest ahead, this one, to the one whose turn is next.
            for i in range(n_layer):
                layer = last_layer - i if i <= last_layer else last_layer - i + n_layer
                key = oldest(extra, n_key + layer)
                if (
                    key < n_key
                    and table[key, _STAMP] < stamp
                    and (victim < 0 or table[key, _PASS] < table[victim, _PASS])
                ):
                    victim = key
            if victim < 0:
                break
            unlink(extra, victim)
            resident[victim] = False
            resident_bytes -= key_bytes[victim]
            out_keys[1, n_victims] = victim
            n_victims += 1
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_CURRENT] = current
    header[_LAYER] = last_layer
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_least_stale(
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
            unlink(extra, key)
            resident[key] = False
            header[RESIDENT_BYTES] -= key_bytes[key]
            header[N_RESIDENT] -= 1


@compiled
def _refill(keys: IntArray, n_expert: int, table: IntArray, extra: IntArray) -> None:
    for i in range(keys.size):
        push_newest(extra, table.shape[0] + keys[i] // n_expert, keys[i])


class LeastStale(ResidencyPolicy):
    """Evict what no pass has used for longest, and of one pass what will be needed last.

    A pass is one run through the layers, as one token or one wide evaluation makes. Under LRU a
    cache below one pass evicts just what the next layers are about to ask for; this rule evicts
    what has the longest way to its next turn.

    Parameters
    ----------
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    Sort key of the victims: (pass of the key's last use, turn, position of its latest use in the
    stream of rows), smallest first, so that entries of the present pass go only when no other is
    left. Turn is the place of the key's layer in the order of layers whose turn is furthest
    ahead: the present layer, the one before it, ... 0, then the last layer, down to the one after
    the present. A pass begins with a load whose layer is not greater than that of the load
    before; the layer of a load is that of its first row. O(1) per row, O(layers) per victim.

    Source: the rule that entries of the present pass are protected while those of earlier passes
    go first is that of SpecMD (Hoang, Jaiswal, Samragh and Cho 2026, arXiv 2602.03921), of which
    only the abstract and an excerpt were read and no code was found. The order within a pass is
    this package's own, argued above; figures of the paper need not come out.

    Examples
    --------
    >>> state = LeastStale().start(key_bytes=[10] * 6, budget_bytes=30, n_layer=3)
    >>> for keys in ([0], [2], [4], [1]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([1]), array([0]), 30)
    """

    name: ClassVar[str] = "least_stale"
    kernel = staticmethod(load_least_stale)
    forget_kernel = staticmethod(forget_least_stale)
    n_table = _N_TABLE

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of the queues' links."""
        return n_links(n_key, n_layer)

    def prepare(self, state: KernelState) -> None:
        """Empty the queues."""
        close_queues(state.extra, state.key_bytes.size, state.n_layer)
        state.header[_LAYER] = state.n_layer - 1  # the first load begins a pass

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` by layer and recency, ``passes`` ago of each, ``layer`` of the last load.

        The present pass is 0 ago.
        """
        n_key = state.key_bytes.size
        keys = np.concatenate(
            [keys_of_queue(state.extra, n_key + layer) for layer in range(state.n_layer)]
        )
        return {
            "keys": keys,
            "passes": state.header[_CURRENT] - state.table[keys, _PASS],
            "layer": state.header[_LAYER : _LAYER + 1].copy(),
        }

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        ago = read_integers(state, arrays, "passes", size=keys.size, least=0, most=_MOST_PASSES)
        layer = read_integers(state, arrays, "layer", size=1, least=0, most=state.n_layer - 1)
        state.table[keys, _PASS] = -ago
        state.header[_LAYER] = layer[0]
        _refill(keys, state.key_bytes.size // state.n_layer, state.table, state.extra)
        make_resident(state, keys)
