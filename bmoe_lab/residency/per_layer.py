"""A budget split evenly over the layers, each with its own LRU or LFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError, SettingsError, unknown_name
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.heap import KEY, N_ENTRY, VALUE, pop, push, replace_top
from bmoe_lab.residency.lfu import LFU, MOST_USES, USES_AT
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
from bmoe_lab.residency.lru import LRU
from bmoe_lab.residency.priority import read_uses
from bmoe_lab.residency.start_state import make_resident, read_queues
from bmoe_lab.residency.state import KernelState

__all__ = ["PerLayer"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of the table, as in LFU.
_STAMP = 0  # 2 * generation of the last use, + 1 if it was a hit then
_SORT = 1  # uses << USES_AT | number of the row of the last use: the sort key as one number
_N_TABLE = 2

# Cells of the header.
_COUNTING = OWN  # 1 for LFU; with LRU all keys have 0 uses, so that the recency alone decides
_KEEP_COUNTS = OWN + 1  # 1 if a count survives eviction
_TRIM_ALL = OWN + 2
_ROWS = OWN + 3  # rows served, the clock of the recency
_OVER = OWN + 4  # 1 if a layer holds more than its share

# Extra: one heap per layer in a piece of its own; then per layer the entries of its heap, its
# bytes, and the last load that named it; then what a load puts aside, after how much that is.
# A use only writes the key's row of the table: its entry then lies too far up, never too far
# down, and is put right when it reaches the top.
_SIZE = 0
_BYTES = 1
_SEEN = 2
_N_LAYER_COLUMNS = 3


@compiled
def _ripe(
    heap: IntArray,
    layers: IntArray,
    layer: int,
    n_expert: int,
    table: IntArray,
    stamp: int,
    aside: IntArray,
) -> int:
    """Return the sort key of a layer's next victim, which is on top then; -1 if there is none."""
    begin = layer * n_expert
    while layers[layer, _SIZE] > 0:
        top = heap[begin, KEY]
        if heap[begin, VALUE] != table[top, _SORT]:
            replace_top(heap, begin, layers[layer, _SIZE], table[top, _SORT], top)
        elif table[top, _STAMP] >= stamp:
            pop(heap, begin, layers[layer, _SIZE])
            layers[layer, _SIZE] -= 1
            aside[0] += 1
            aside[aside[0]] = top
        else:
            return heap[begin, VALUE]  # type: ignore[no-any-return]
    return -1


@compiled
def _evict_top(
    heap: IntArray,
    layers: IntArray,
    layer: int,
    n_expert: int,
    key_bytes: IntArray,
    resident: BoolArray,
) -> int:
    begin = layer * n_expert
    victim = heap[begin, KEY]
    pop(heap, begin, layers[layer, _SIZE])
    layers[layer, _SIZE] -= 1
    layers[layer, _BYTES] -= key_bytes[victim]
    resident[victim] = False
    return victim  # type: ignore[no-any-return]


@compiled
def load_per_layer(
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
    n_layer = header[N_LAYER]
    n_expert = n_key // n_layer
    share = budget // n_layer
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    after_heap = N_ENTRY * n_key
    after_layers = after_heap + _N_LAYER_COLUMNS * n_layer
    layers = extra[after_heap:after_layers].reshape((n_layer, _N_LAYER_COLUMNS))
    aside = extra[after_layers:]
    counting = header[_COUNTING]
    kept = -1 if header[_KEEP_COUNTS] else 0
    trim_all = header[_TRIM_ALL]
    over = header[_OVER]
    rows = header[_ROWS]
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
        layer = 0
        least_layer = n_layer
        most_layer = -1
        low = 0
        high = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            if key < low or key >= high:
                layer = key // n_expert
                low = layer * n_expert
                high = low + n_expert
                layers[layer, _SEEN] = generation
                least_layer = min(least_layer, layer)
                most_layer = max(most_layer, layer)
            rows += 1
            first = False
            uses = table[key, _SORT] >> USES_AT
            if table[key, _STAMP] >= stamp:
                # A repeat: it is what it was at its first row, only its recency moves.
                found = table[key, _STAMP] & 1
            elif resident[key]:
                found = HIT
                table[key, _STAMP] = stamp + 1
                uses = min(uses + counting, MOST_USES)
            else:
                found = MISS
                first = True
                table[key, _STAMP] = stamp
                uses = min((uses & kept) + counting, MOST_USES)
                layers[layer, _BYTES] += key_bytes[key]
                resident_bytes += key_bytes[key]
                out_keys[0, n_missing] = key
                n_missing += 1
            table[key, _SORT] = (uses << USES_AT) | rows
            out_residency[row] = found
            out_first[row] = first

        # The missing keys count as resident already, but are not yet in the heaps.
        aside[0] = 0
        if trim_all and over:
            least_layer = 0
            most_layer = n_layer - 1
        over = 0
        for layer in range(least_layer, most_layer + 1):
            if not trim_all and layers[layer, _SEEN] != generation:
                continue
            while (
                layers[layer, _BYTES] > share
                and _ripe(heap, layers, layer, n_expert, table, stamp, aside) >= 0
            ):
                victim = _evict_top(heap, layers, layer, n_expert, key_bytes, resident)
                resident_bytes -= key_bytes[victim]
                out_keys[1, n_victims] = victim
                n_victims += 1
            if layers[layer, _BYTES] > share:
                over = 1
        while trim_all and resident_bytes > budget:
            best = -1
            best_layer = -1
            for layer in range(n_layer):
                ripe = _ripe(heap, layers, layer, n_expert, table, stamp, aside)
                if ripe >= 0 and (best < 0 or ripe < best):
                    best = ripe
                    best_layer = layer
            if best < 0:
                break
            victim = _evict_top(heap, layers, best_layer, n_expert, key_bytes, resident)
            resident_bytes -= key_bytes[victim]
            out_keys[1, n_victims] = victim
            n_victims += 1

        for i in range(aside[0] + n_missing):
            key = aside[1 + i] if i < aside[0] else out_keys[0, i - aside[0]]
            layer = key // n_expert
            resident[key] = True
            push(heap, layer * n_expert, layers[layer, _SIZE], table[key, _SORT], key)
            layers[layer, _SIZE] += 1
        header[N_RESIDENT] += n_missing - n_victims
        header[EVICTIONS] += n_victims
        out_loads[load, LOAD_EVICTIONS] = n_victims
        out_loads[load, LOAD_RESIDENT_BYTES] = resident_bytes
    header[_OVER] = over
    header[_ROWS] = rows
    header[GENERATION] = generation
    header[RESIDENT_BYTES] = resident_bytes
    header[N_MISSING] = n_missing
    header[N_VICTIMS] = n_victims
    return bad_row


@compiled
def forget_per_layer(
    keys: IntArray,
    key_bytes: IntArray,
    header: IntArray,
    table: IntArray,
    extra: IntArray,
    resident: BoolArray,
) -> None:
    """Take keys out; signature as in `ResidencyPolicy.forget_kernel`. Counts stay."""
    n_key = key_bytes.size
    n_layer = header[N_LAYER]
    n_expert = n_key // n_layer
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    layers = extra[N_ENTRY * n_key : N_ENTRY * n_key + _N_LAYER_COLUMNS * n_layer].reshape(
        (n_layer, _N_LAYER_COLUMNS)
    )
    for row in range(keys.size):
        key = keys[row]
        if not resident[key]:
            continue
        resident[key] = False
        header[RESIDENT_BYTES] -= key_bytes[key]
        header[N_RESIDENT] -= 1
        layer = key // n_expert
        layers[layer, _BYTES] -= key_bytes[key]
        n_kept = 0
        begin = layer * n_expert
        for place in range(begin, begin + layers[layer, _SIZE]):
            value, kept = heap[place, VALUE], heap[place, KEY]
            if kept != key:
                push(heap, begin, n_kept, value, kept)
                n_kept += 1
        layers[layer, _SIZE] = n_kept


@compiled
def _refill(
    keys: IntArray, key_bytes: IntArray, n_layer: int, table: IntArray, extra: IntArray
) -> None:
    n_key = key_bytes.size
    n_expert = n_key // n_layer
    heap = extra[: N_ENTRY * n_key].reshape((n_key, N_ENTRY))
    layers = extra[N_ENTRY * n_key : N_ENTRY * n_key + _N_LAYER_COLUMNS * n_layer].reshape(
        (n_layer, _N_LAYER_COLUMNS)
    )
    for i in range(keys.size):
        key = keys[i]
        layer = key // n_expert
        push(heap, layer * n_expert, layers[layer, _SIZE], table[key, _SORT], key)
        layers[layer, _SIZE] += 1
        layers[layer, _BYTES] += key_bytes[key]


class PerLayer(ResidencyPolicy):
    """Give each layer the same share of the budget, with LRU or LFU inside.

    Parameters
    ----------
    policy : {"lru", "lfu"} or LRU or LFU, default "lru"
        The rule within a layer, without a budget of its own and without ageing.
    trim : {"all", "visited"}, default "all"
        Which layers are brought down to their share after a load. ``"all"`` keeps the budget.
        ``"visited"`` looks only at the layer of the load, as BigMoeOnEdge's offline replay does,
        and holds more than the budget where a load is larger than a share: report resident bytes
        beside its hit rates.
    budget : int or str, optional
        Bytes allowed, as a number or a size such as ``"2 GiB"``. Left out, the session or the
        sweep decides.

    Notes
    -----
    A share is ``budget // n_layer`` bytes. After a load, while a layer holds more than its share,
    its key with the smallest sort key of `policy` goes (layers in ascending order, keys of the
    load never). With ``trim="all"``, if the load's own layer needs more than its share and the
    total exceeds the budget for it, further victims go from all layers by the same sort key, so
    that only a load that is larger than the budget exceeds it.

    ``PerLayer("lru", trim="visited")`` and ``PerLayer("lfu", trim="visited")`` are the ``layer``
    and ``layerlfu`` of the offline replay (0.20.0). They hold at least the last experts of every
    layer whatever the budget, 808 MiB on a recorded trace for a budget of 250.

    Examples
    --------
    >>> state = PerLayer().start(key_bytes=[10] * 4, budget_bytes=20, n_layer=2)
    >>> for keys in ([0], [2], [1]):
    ...     load = state.load(np.array(keys))
    >>> load.missing, load.victims, state.resident_bytes
    (array([1]), array([0]), 20)
    """

    name: ClassVar[str] = "per_layer"
    kernel = staticmethod(load_per_layer)
    forget_kernel = staticmethod(forget_per_layer)
    n_table = _N_TABLE

    def __init__(
        self,
        policy: ResidencyPolicy | str = "lru",
        trim: Literal["all", "visited"] = "all",
        budget: int | str | None = None,
    ) -> None:
        self.policy = policy
        self.trim = trim
        self.budget = budget

    @property
    def keeps_budget(self) -> bool:  # type: ignore[override]
        """False with ``trim="visited"``."""
        return self.trim != "visited"

    def n_extra(self, n_key: int, n_layer: int) -> int:
        """Return the length of heaps, layers and what is put aside."""
        return N_ENTRY * n_key + _N_LAYER_COLUMNS * n_layer + 1 + n_key

    @property
    def _rule(self) -> LRU | LFU:
        if isinstance(self.policy, str):
            rules: dict[str, type[LRU] | type[LFU]] = {"lru": LRU, "lfu": LFU}
            if self.policy not in rules:
                raise unknown_name("policy within a layer", self.policy, rules)
            return rules[self.policy]()
        if type(self.policy) not in (LRU, LFU) or getattr(self.policy, "ageing", False):
            raise PolicyError(
                f"policy must be LRU() or LFU() without ageing; got {self.policy!r} in PerLayer."
            )
        if self.policy.budget is not None:
            raise SettingsError(
                f"policy must have no budget of its own; got {self.policy!r}. Write "
                f"PerLayer({type(self.policy).__name__}(), budget={self.policy.budget!r})."
            )
        rule: LRU | LFU = self.policy  # type: ignore[assignment]
        return rule

    def prepare(self, state: KernelState) -> None:
        """Set the variant.

        Raises
        ------
        PolicyError, SettingsError, UnknownNameError
            If `policy` or `trim` cannot be.
        """
        if self.trim not in ("all", "visited"):
            raise unknown_name("trim", self.trim, ["all", "visited"])
        rule = self._rule
        state.header[_COUNTING] = isinstance(rule, LFU)
        state.header[_KEEP_COUNTS] = isinstance(rule, LFU) and bool(rule.keep_counts)
        state.header[_TRIM_ALL] = self.trim == "all"

    def dump(self, state: KernelState) -> dict[str, Array]:
        """Return ``keys`` by the sort key within a layer, and with LFU ``uses`` of each key."""
        sort = state.table[:, _SORT]
        keys = np.flatnonzero(state.resident).astype(np.int64)
        arrays = {"keys": keys[np.argsort(sort[keys])]}
        if state.header[_COUNTING]:
            uses = sort >> USES_AT
            if not state.header[_KEEP_COUNTS]:
                uses[~state.resident] = 0
            arrays["uses"] = uses
        return arrays

    def restore(self, state: KernelState, arrays: Mapping[str, Array]) -> None:
        """Make ``keys`` resident, with LFU with their counts.

        Raises
        ------
        PolicyError
            If an array is absent or impossible.
        """
        (keys,) = read_queues(state, arrays, ["keys"])
        if state.header[_COUNTING]:
            state.table[:, _SORT] = read_uses(state, arrays, keys, most=MOST_USES) << USES_AT
        state.table[keys, _SORT] += np.arange(keys.size)
        state.header[_ROWS] = keys.size
        # Whether a layer is over its share, the first load finds out.
        state.header[_OVER] = 1
        _refill(keys, state.key_bytes, state.n_layer, state.table, state.extra)
        make_resident(state, keys)
