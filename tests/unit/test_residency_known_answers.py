"""Streams whose answer is known without simulating."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import residency
from bmoe_lab.residency import LRU
from tests.unit.residency_reference import Reference

POLICIES = [name for name in residency.names() if residency.get(name).online]


def make(name, n_key):
    """Return the policy as it comes; a profile, where one is needed, names every key."""
    if name == "pin":
        return residency.Pin(profile=np.arange(1, n_key + 1))
    return residency.get(name)()


@pytest.mark.parametrize("name", POLICIES)
def test_uniform_stream_hits_what_fits(name):
    """Past and future are independent, so whatever is kept hits with probability c/N."""
    n_key, n_held, n = 100, 37, 60_000
    keys = np.random.default_rng(5).integers(0, n_key, n)
    state = make(name, n_key).start(np.full(n_key, 10), n_held * 10)
    log = state.load_many(keys, np.arange(n + 1))
    warm = slice(2000, None)
    assert (log.resident_bytes[warm] == n_held * 10).all()
    expected = n_held / n_key
    hits = log.residency[warm]
    error = np.sqrt(expected * (1 - expected) / hits.size)
    assert abs(hits.mean() - expected) < 3 * error


@pytest.mark.parametrize("n_rows", [1, 4])
def test_cyclic_stream_gives_lru_nothing_below_the_cycle_and_all_at_it(n_rows):
    n_key, rounds = 48, 10
    keys = np.tile(np.arange(n_key), rounds)
    offsets = np.arange(0, keys.size + 1, n_rows)

    def hit_rate(n_held):
        log = LRU().start(np.full(n_key, 7), n_held * 7).load_many(keys, offsets)
        return log.residency[n_key:].mean()

    assert hit_rate(n_key - n_rows) == 0.0
    assert hit_rate(n_key) == 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_cyclic_stream_hits_always_once_the_cycle_fits(name):
    n_key = 30
    keys = np.tile(np.arange(n_key), 6)
    log = make(name, n_key).start(np.full(n_key, 3), 90).load_many(keys, np.arange(181))
    assert log.residency[:n_key].sum() == 0
    assert log.residency[n_key:].all()


class Furthest(Reference):
    """Belady's rule, which no policy beats where all keys are of one size."""

    loads = ()

    def begin(self):
        pass

    def victim(self, protected):
        def next_use(key):
            later = range(self.index + 1, len(self.loads))
            return next((load for load in later if key in self.loads[load]), len(self.loads))

        return max(sorted(self.resident - protected), key=next_use)

    def drop(self, key):
        pass


@pytest.mark.parametrize("name", POLICIES)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    loads=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=40),
    n_held=st.integers(0, 10),
)
def test_no_online_policy_beats_belady_where_sizes_are_equal(name, loads, n_held):
    key_bytes = [6] * 10
    best = Furthest(key_bytes, 6 * n_held)
    best.loads = loads
    fewest = sum(len(best.load(keys).missing) for keys in loads)
    state = make(name, len(key_bytes)).start(key_bytes, 6 * n_held)
    missing = sum(state.load(np.array(keys)).missing.size for keys in loads)
    assert missing >= fewest


@pytest.mark.parametrize("name", POLICIES)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    key_bytes=st.lists(st.integers(0, 50), min_size=8, max_size=8),
    budget=st.integers(0, 200),
    loads=st.lists(st.lists(st.integers(0, 7), max_size=6), max_size=30),
)
def test_budget_holds_after_every_load_unless_the_load_alone_is_larger(
    name, key_bytes, budget, loads
):
    state = make(name, len(key_bytes)).start(key_bytes, budget)
    for keys in loads:
        load = state.load(np.array(keys, dtype=np.int64))
        alone = sum(key_bytes[key] for key in set(keys))
        assert state.resident_bytes <= max(budget, alone)
        # Nothing goes that could have stayed: the last victim was needed.
        if load.victims.size:
            last = key_bytes[int(load.victims[-1])]
            assert state.resident_bytes + last > budget
