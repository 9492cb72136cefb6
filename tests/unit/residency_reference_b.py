"""Slow references of the policies that count, draw, split by layer or know the future.

Each is the rule of its docstring written down, on `residency_reference.Reference`.
"""

from __future__ import annotations

import random

from tests.unit.residency_reference import Reference


class Recent(Reference):
    """What most of them need: when each key was used last, in rows."""

    def begin(self):
        self.clock = 0
        self.last = {}

    def rows(self, keys):
        for key in keys:
            self.clock += 1
            self.last[key] = self.clock

    def load(self, keys):
        # The recency of a row does not depend on what the load evicts.
        self.rows([int(key) for key in keys])
        return super().load(keys)

    def candidates(self, protected):
        return self.resident - protected

    def victim(self, protected):
        return min(self.candidates(protected), key=self.sort_key)

    def drop(self, key):
        pass


class ReferenceLFU(Recent):
    keep_counts = True

    def begin(self):
        super().begin()
        self.count = {}

    def hit(self, key):
        self.count[key] += 1

    def admit(self, key):
        self.count[key] = (self.count.get(key, 0) if self.keep_counts else 0) + 1

    def sort_key(self, key):
        return self.count[key], self.last[key]


class ReferenceInCacheLFU(ReferenceLFU):
    keep_counts = False


class ReferenceAgeingLFU(ReferenceLFU):
    def begin(self):
        super().begin()
        self.age = 0
        self.priority = {}

    def worth(self, key):
        return self.count[key]

    def hit(self, key):
        super().hit(key)
        self.priority[key] = self.age + self.worth(key)

    def victim(self, protected):
        key = super().victim(protected)
        self.age = max(self.age, self.priority[key])
        return key

    def admit(self, key):
        super().admit(key)
        self.priority[key] = self.age + self.worth(key)

    def sort_key(self, key):
        return self.priority[key], self.last[key]


class ReferenceInCacheAgeingLFU(ReferenceAgeingLFU):
    keep_counts = False


class ReferenceGDSF(ReferenceAgeingLFU):
    keep_counts = False

    def worth(self, key):
        sizes = [max(1, size) for size in self.key_bytes]
        return self.count[key] * max(1, 2**30 * min(sizes) // sizes[key])


class ReferenceRandom(Reference):
    seed = 1234

    def begin(self):
        self.random = random.Random(self.seed)
        self.order = []

    def victim(self, protected):
        key = self.random.choice([key for key in self.order if key not in protected])
        self.order.remove(key)
        return key

    def admit(self, key):
        self.order.append(key)

    def drop(self, key):
        self.order.remove(key)


class ReferencePerLayer(ReferenceLFU):
    """Trims after the load: the same victims as before it, since its keys are protected."""

    trim = "all"
    counts = False

    def sort_key(self, key):
        return (self.count[key] if self.counts else 0), self.last[key]

    def layer_of(self, key):
        return key // (len(self.key_bytes) // self.n_layer)

    def load(self, keys):
        keys = [int(key) for key in keys]
        budget, self.budget = self.budget, sum(self.key_bytes) + 1
        served = super().load(keys)  # evicts nothing
        self.budget = budget
        share = budget // self.n_layer
        layers = set(map(self.layer_of, keys))
        if self.trim == "all":
            layers = range(self.n_layer)
        victims = []
        for layer in sorted(layers):
            victims += self.shrink(share, lambda key, one=layer: self.layer_of(key) == one, keys)
        if self.trim == "all":
            victims += self.shrink(budget, lambda key: True, keys)
        self.evictions += len(victims)
        return served._replace(victims=victims, resident_bytes=self.resident_bytes)

    def shrink(self, room, belongs, protected):
        victims = []
        while self.bytes_of(filter(belongs, self.resident)) > room:
            able = [key for key in self.resident if belongs(key) and key not in protected]
            if not able:
                break
            victims.append(min(able, key=self.sort_key))
            self.resident.remove(victims[-1])
        return victims


class ReferencePerLayerLFU(ReferencePerLayer):
    counts = True


class ReferencePerLayerInCacheLFU(ReferencePerLayer):
    counts = True
    keep_counts = False


class ReferenceVisited(ReferencePerLayer):
    trim = "visited"


class ReferenceVisitedLFU(ReferencePerLayerLFU):
    trim = "visited"


class ReferenceLeastStale(Recent):
    def begin(self):
        super().begin()
        self.present = 0
        self.layer = self.n_layer - 1
        self.used_in = {}

    def layer_of(self, key):
        return key // (len(self.key_bytes) // self.n_layer)

    def load(self, keys):
        keys = [int(key) for key in keys]
        if keys:
            layer = self.layer_of(keys[0])
            if layer <= self.layer:
                self.present += 1
            self.layer = layer
        for key in keys:
            self.used_in[key] = self.present
        return super().load(keys)

    def sort_key(self, key):
        layers_until_turn = (self.layer_of(key) - self.layer - 1) % self.n_layer
        return self.used_in[key], -layers_until_turn, self.last[key]


class ReferencePin(Recent):
    def __init__(self, key_bytes, budget, n_layer=1, profile=None, room=None):
        room = budget // 10 if room is None else min(room, budget)
        space = budget - room
        self.pinned = set()
        for key in sorted(range(len(key_bytes)), key=lambda key: -profile[key]):
            if profile[key] > 0 and key_bytes[key] <= space:
                self.pinned.add(key)
                space -= key_bytes[key]
        super().__init__(key_bytes, budget, n_layer)

    def sort_key(self, key):
        return key in self.pinned, self.last[key]


class ReferenceBelady(Reference):
    """Knows the loads to come."""

    def __init__(self, key_bytes, budget, n_layer=1, loads=()):
        self.loads = [[int(key) for key in keys] for keys in loads]
        super().__init__(key_bytes, budget, n_layer)

    def begin(self):
        self.order = []

    def next_load(self, key):
        later = range(self.index + 1, len(self.loads))
        return next((load for load in later if key in self.loads[load]), float("inf"))

    def victim(self, protected):
        # max() keeps the first of equals: the one that was read earliest.
        key = max((key for key in self.order if key not in protected), key=self.next_load)
        self.order.remove(key)
        return key

    def admit(self, key):
        self.order.append(key)

    def drop(self, key):
        self.order.remove(key)
