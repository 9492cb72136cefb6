"""Slow, obviously correct caches, and the streams on which a kernel must equal them.

`Reference` knows the rules of a load (top of ``bmoe_lab/residency/base.py``) and nothing of any
kernel. A policy says in plain lists and dicts what it remembers and whom it gives up.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st


class Served(NamedTuple):
    residency: list[int]
    first: list[bool]
    missing: list[int]
    victims: list[int]
    resident_bytes: int


class Reference:
    """One load: look up every distinct key, choose victims, admit what was missing."""

    def __init__(self, key_bytes, budget, n_layer=1):
        self.key_bytes = [int(size) for size in key_bytes]
        self.budget = int(budget)
        self.n_layer = n_layer
        self.resident = set()
        self.evictions = 0
        #: Number of the load being served, from 0.
        self.index = -1
        self.begin()

    # --- what a policy fills in ----------------------------------------------------------------

    def begin(self):
        """Make the policy's own lists, empty."""

    def hit(self, key):
        """A resident key is asked for: once per load, in the order of first rows."""

    def miss(self, key):
        """An absent key is asked for: once per load, in the order of first rows, hits between."""

    def victim(self, protected):
        """Take the next victim out of the policy's own lists and return it.

        Never one of `protected`, the keys of this load; there is always another.
        """
        raise NotImplementedError

    def admit(self, key):
        """An absent key becomes resident: once per load, in the order of first rows."""

    def served(self, keys):
        """The load is done; `keys` are its rows, repeats included."""

    def drop(self, key):
        """A resident key is gone because its read failed."""
        raise NotImplementedError

    # --- the rules -----------------------------------------------------------------------------

    def bytes_of(self, keys):
        return sum(self.key_bytes[key] for key in keys)

    @property
    def resident_bytes(self):
        return self.bytes_of(self.resident)

    def load(self, keys):
        keys = [int(key) for key in keys]
        self.index += 1
        before = set(self.resident)
        missing = []
        for key in dict.fromkeys(keys):
            if key in before:
                self.hit(key)
            else:
                self.miss(key)
                missing.append(key)
        self.incoming = self.bytes_of(missing)

        victims = []
        protected = set(keys)
        while self.resident_bytes + self.incoming > self.budget and self.resident - protected:
            victim = self.victim(protected)
            assert victim in self.resident
            assert victim not in protected
            self.resident.remove(victim)
            victims.append(victim)
        self.evictions += len(victims)

        for key in missing:
            self.admit(key)
            self.resident.add(key)
        self.served(keys)
        return Served(
            residency=[int(key in before) for key in keys],
            first=[key not in before and key not in keys[:row] for row, key in enumerate(keys)],
            missing=missing,
            victims=victims,
            resident_bytes=self.resident_bytes,
        )

    def forget(self, keys):
        for key in keys:
            if key in self.resident:
                self.drop(key)
                self.resident.remove(key)


class ReferenceLRU(Reference):
    """Each row, repeats included, makes its key the newest."""

    def begin(self):
        self.order = OrderedDict()  # oldest first

    def victim(self, protected):
        key = next(key for key in self.order if key not in protected)
        del self.order[key]
        return key

    def served(self, keys):
        for key in keys:
            self.order[key] = None
            self.order.move_to_end(key)

    def drop(self, key):
        del self.order[key]


class ReferenceFIFO(Reference):
    def begin(self):
        self.queue = []  # admitted first comes first

    def victim(self, protected):
        key = next(key for key in self.queue if key not in protected)
        self.queue.remove(key)
        return key

    def admit(self, key):
        self.queue.append(key)

    def drop(self, key):
        self.queue.remove(key)


# --- streams -------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """What happens to a cache: ("load", keys), ("many", loads), ("forget", keys), ("restart",)."""

    key_bytes: list[int]
    budget: int
    n_layer: int
    steps: list[tuple]


@st.composite
def streams(draw, *, n_layers=(1,), max_keys=12, max_steps=25, sizes=None, many=True):
    """Return streams with unequal sizes, repeats within a load and budgets below one load.

    The keys of a load belong to one layer. `sizes` is a strategy of one key's bytes.
    """
    n_layer = draw(st.sampled_from(n_layers))
    n_expert = draw(st.integers(1, max(1, max_keys // n_layer)))
    n_key = n_layer * n_expert
    one_size = st.integers(0, 9) if sizes is None else sizes
    key_bytes = draw(st.lists(one_size, min_size=n_key, max_size=n_key))
    budget = draw(st.integers(0, max(1, sum(key_bytes))))

    loads = st.integers(0, n_layer - 1).flatmap(
        lambda layer: st.lists(
            st.integers(layer * n_expert, (layer + 1) * n_expert - 1), max_size=min(10, 2 * n_key)
        )
    )
    kinds = [loads.map(lambda keys: ("load", keys))] * 4 + [
        st.lists(st.integers(0, n_key - 1), max_size=3).map(lambda keys: ("forget", keys)),
        st.just(("restart",)),
    ]
    if many:
        kinds.append(st.lists(loads, min_size=2, max_size=6).map(lambda many: ("many", many)))
    steps = draw(st.lists(st.one_of(kinds), max_size=max_steps))
    return Stream(key_bytes, budget, n_layer, steps)


def assert_equals_reference(policy, reference_of, stream):
    """Serve `stream` by the policy and by its reference; compare everything a user can see.

    `reference_of(key_bytes, budget, n_layer)` makes the reference. A restart stores the state as
    arrays and goes on from them, which the reference does not even notice.
    """
    sizes = np.array(stream.key_bytes, dtype=np.int64)
    state = policy.start(sizes, stream.budget, n_layer=stream.n_layer)
    reference = reference_of(stream.key_bytes, stream.budget, stream.n_layer)
    evictions_before = 0
    for step in stream.steps:
        if step[0] == "load":
            load = state.load(np.array(step[1], dtype=np.int64))
            actual = Served(
                load.residency.tolist(),
                load.first.tolist(),
                load.missing.tolist(),
                load.victims.tolist(),
                state.resident_bytes,
            )
            assert actual == reference.load(step[1])
        elif step[0] == "many":
            loads = step[1]
            offsets = np.cumsum([0] + [len(keys) for keys in loads])
            log = state.load_many(np.array(list(chain(*loads)), dtype=np.int64), offsets)
            served = [reference.load(keys) for keys in loads]
            assert log.residency.tolist() == list(chain(*(one.residency for one in served)))
            assert log.first.tolist() == list(chain(*(one.first for one in served)))
            assert log.evictions.tolist() == [len(one.victims) for one in served]
            assert log.resident_bytes.tolist() == [one.resident_bytes for one in served]
        elif step[0] == "forget":
            state.forget(np.array(step[1], dtype=np.int64))
            reference.forget(step[1])
        else:
            arrays = {name: array.copy() for name, array in state.to_arrays().items()}
            state = policy.from_arrays(arrays, sizes, stream.budget, n_layer=stream.n_layer)
            evictions_before = reference.evictions
        assert np.flatnonzero(state.contains()).tolist() == sorted(reference.resident)
        assert state.resident_bytes == reference.resident_bytes
        assert state.evictions == reference.evictions - evictions_before
    return state, reference
