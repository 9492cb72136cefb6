"""Slow, obviously correct caches, and the streams on which a kernel must equal them.

`Reference` knows the rules of a load (top of ``bmoe_lab/residency/loads.py``) and nothing of any
kernel. A policy says in plain lists and dicts what it remembers and whom it gives up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from fractions import Fraction
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
        #: How often what is worth testing happened, by a name of the policy's choice.
        self.seen = Counter()
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


class ReferenceClock(Reference):
    def begin(self):
        self.queue = []  # the hand points at the first
        self.used = set()

    def hit(self, key):
        self.used.add(key)

    def victim(self, protected):
        while True:
            key = next(key for key in self.queue if key not in protected)
            self.queue.remove(key)
            if key not in self.used:
                return key
            self.seen["another round"] += 1
            self.used.remove(key)
            self.queue.append(key)

    def admit(self, key):
        self.queue.append(key)

    def drop(self, key):
        self.queue.remove(key)
        self.used.discard(key)


class ReferenceSIEVE(Reference):
    def begin(self):
        self.queue = []  # oldest first
        self.used = set()
        self.hand = None  # a key; None means the oldest

    def hit(self, key):
        self.used.add(key)

    def after(self, key):
        place = self.queue.index(key) + 1
        return self.queue[place] if place < len(self.queue) else None

    def victim(self, protected):
        while True:
            key = self.queue[0] if self.hand is None else self.hand
            self.hand = self.after(key)
            if key in protected:
                self.seen["passed over"] += 1
                continue
            if key not in self.used:
                self.queue.remove(key)
                return key
            self.seen["mark wiped"] += 1
            self.used.remove(key)

    def admit(self, key):
        self.queue.append(key)

    def drop(self, key):
        if self.hand == key:
            self.hand = self.after(key)
        self.queue.remove(key)
        self.used.discard(key)


class ReferenceSLRU(Reference):
    protected_frac = Fraction("0.8")

    def begin(self):
        self.probation = []  # longest unused first
        self.protected = []

    def hit(self, key):
        if key in self.probation:
            self.probation.remove(key)
        else:
            self.protected.remove(key)
        self.protected.append(key)
        while self.bytes_of(self.protected) > self.budget * self.protected_frac:
            self.seen["sent back"] += 1
            self.probation.append(self.protected.pop(0))

    def victim(self, protected):
        key = next(key for key in self.probation + self.protected if key not in protected)
        self.seen["protected gone"] += key in self.protected
        self.drop(key)
        return key

    def admit(self, key):
        self.probation.append(key)

    def drop(self, key):
        (self.probation if key in self.probation else self.protected).remove(key)


class ReferenceS3FIFO(Reference):
    small_frac = Fraction("0.1")

    def begin(self):
        self.small, self.main, self.ghosts = [], [], []  # oldest first
        self.uses = {}

    def load(self, keys):
        self.to_main = set()
        return super().load(keys)

    @property
    def small_share(self):
        return int(self.budget * self.small_frac)

    def hit(self, key):
        self.uses[key] = min(3, self.uses[key] + 1)

    def miss(self, key):
        if key in self.ghosts:
            self.seen["ghost asked for"] += 1
            self.ghosts.remove(key)
            self.to_main.add(key)

    def victim(self, protected):
        while True:
            small = [key for key in self.small if key not in protected]
            main = [key for key in self.main if key not in protected]
            if small and (self.bytes_of(self.small) >= self.small_share or not main):
                for key in small:
                    self.small.remove(key)
                    if self.uses[key] < 2:
                        self.remember(key)
                        return key
                    self.seen["small to main"] += 1
                    self.uses[key] = 0
                    self.main.append(key)
            else:
                while True:
                    key = next(key for key in self.main if key not in protected)
                    self.main.remove(key)
                    if self.uses[key] == 0:
                        return key
                    self.seen["main again"] += 1
                    self.uses[key] -= 1
                    self.main.append(key)

    def remember(self, key):
        self.ghosts.append(key)
        while self.bytes_of(self.ghosts) > int(self.budget * (1 - self.small_frac)):
            self.seen["ghost forgotten"] += 1
            self.ghosts.pop(0)

    def admit(self, key):
        self.uses[key] = 0
        room = self.evictions > 0 or self.bytes_of(self.small) < self.small_share
        if key not in self.to_main and room:
            self.small.append(key)
        else:
            self.main.append(key)

    def drop(self, key):
        (self.small if key in self.small else self.main).remove(key)


class ReferenceARC(Reference):
    """The paper's names: T1, T2 hold what is resident, B1, B2 are ghosts; oldest first."""

    def begin(self):
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.p = 0.0

    def load(self, keys):
        self.b2_was_asked = False
        self.to_t2 = set()
        return super().load(keys)

    def hit(self, key):
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def miss(self, key):
        size, b1, b2 = self.key_bytes[key], self.bytes_of(self.b1), self.bytes_of(self.b2)
        if key in self.b1:
            if size:
                self.p = min(self.p + size * max(1.0, b2 / b1), float(self.budget))
            self.seen["B1 asked for"] += 1
            self.b1.remove(key)
            self.to_t2.add(key)
        elif key in self.b2:
            if size:
                self.p = max(self.p - size * max(1.0, b1 / b2), 0.0)
            self.seen["B2 asked for"] += 1
            self.b2.remove(key)
            self.to_t2.add(key)
            self.b2_was_asked = True

    def victim(self, protected):
        t1 = [key for key in self.t1 if key not in protected]
        t2 = [key for key in self.t2 if key not in protected]
        held = self.bytes_of(self.t1)
        if t1 and (held > self.p or (held == self.p and self.b2_was_asked) or not t2):
            self.seen["equal, B2 decides"] += held == self.p and bool(t2)
            self.t1.remove(t1[0])
            self.b1.append(t1[0])
            return t1[0]
        self.seen["frequent gone"] += bool(t1)
        self.t2.remove(t2[0])
        self.b2.append(t2[0])
        return t2[0]

    def admit(self, key):
        (self.t2 if key in self.to_t2 else self.t1).append(key)

    def served(self, keys):
        t1, t2 = self.bytes_of(self.t1), self.bytes_of(self.t2)
        while self.bytes_of(self.b1) and t1 + self.bytes_of(self.b1) > self.budget:
            self.seen["B1 forgotten"] += 1
            self.b1.pop(0)
        while (
            self.bytes_of(self.b2)
            and t1 + t2 + self.bytes_of(self.b1) + self.bytes_of(self.b2) > 2 * self.budget
        ):
            self.seen["B2 forgotten"] += 1
            self.b2.pop(0)

    def drop(self, key):
        (self.t1 if key in self.t1 else self.t2).remove(key)


class ReferenceWTinyLFU(Reference):
    window_frac = Fraction("0.01")
    protected_frac = Fraction("0.8")
    sample_factor = 10

    def begin(self):
        self.window, self.probation, self.protected = [], [], []  # longest unused first
        self.uses = dict.fromkeys(range(len(self.key_bytes)), 0)
        self.sample = 0
        total, n_key = sum(self.key_bytes), len(self.key_bytes)
        n_held = (
            n_key if self.budget >= total else max(1, int(Fraction(self.budget, total) * n_key))
        )
        self.sample_size = self.sample_factor * n_held
        self.main_share = int(self.budget * (1 - self.window_frac))
        self.window_share = self.budget - self.main_share
        self.protected_share = int(self.main_share * self.protected_frac)

    def count(self, key):
        self.uses[key] += 1
        self.sample += 1
        if self.sample >= self.sample_size:
            self.seen["halved"] += 1
            self.sample //= 2
            self.uses = {key: uses // 2 for key, uses in self.uses.items()}

    def hit(self, key):
        self.count(key)
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
            return
        (self.probation if key in self.probation else self.protected).remove(key)
        self.protected.append(key)
        while self.bytes_of(self.protected) > self.protected_share:
            self.probation.append(self.protected.pop(0))

    def miss(self, key):
        self.count(key)

    def victim(self, protected):
        candidates = [key for key in self.window if key not in protected]
        victims = [key for key in self.probation + self.protected if key not in protected]
        if not victims:
            return self.drop(candidates[0])
        if not candidates or self.bytes_of(self.window) + self.incoming <= self.window_share:
            return self.drop(victims[0])
        candidate, victim = candidates[0], victims[0]
        if self.uses[candidate] <= self.uses[victim]:
            self.seen["candidate lost"] += 1
            return self.drop(candidate)
        self.seen["candidate won"] += 1
        self.window.remove(candidate)
        self.probation.append(candidate)
        return self.drop(victim)

    def admit(self, key):
        self.window.append(key)

    def served(self, keys):
        while self.bytes_of(self.window) > self.window_share:
            main = self.bytes_of(self.probation + self.protected)
            if main + self.key_bytes[self.window[0]] > self.main_share:
                break
            self.probation.append(self.window.pop(0))

    def drop(self, key):
        for queue in (self.window, self.probation, self.protected):
            if key in queue:
                queue.remove(key)
        return key


#: By the policy's name in the registry.
REFERENCES = {
    "lru": ReferenceLRU,
    "fifo": ReferenceFIFO,
    "clock": ReferenceClock,
    "sieve": ReferenceSIEVE,
    "slru": ReferenceSLRU,
    "s3fifo": ReferenceS3FIFO,
    "arc": ReferenceARC,
    "w_tinylfu": ReferenceWTinyLFU,
}


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
    total = sum(key_bytes)
    budget = draw(st.one_of(st.integers(0, total), st.integers(0, total // 4), st.just(0)))

    loads = st.integers(0, n_layer - 1).flatmap(
        lambda layer: st.lists(
            st.integers(layer * n_expert, (layer + 1) * n_expert - 1), max_size=min(10, 2 * n_key)
        )
    )
    # A restart rebuilds what a kernel keeps, and so hides what went wrong before: let it be rare.
    kinds = [loads.map(lambda keys: ("load", keys))] * 8 + [
        st.lists(st.integers(0, n_key - 1), max_size=3).map(lambda keys: ("forget", keys)),
        st.just(("restart",)),
    ]
    if many:
        kinds += [st.lists(loads, min_size=2, max_size=6).map(lambda many: ("many", many))] * 2
    steps = draw(st.lists(st.one_of(kinds), min_size=max_steps // 3, max_size=max_steps))
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
