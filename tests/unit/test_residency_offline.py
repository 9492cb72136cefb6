"""Policies that know the stream, and the one pass that knows every budget."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import PolicyError, SettingsError
from bmoe_lab.residency import (
    GDSF,
    LFU,
    LRU,
    Belady,
    LeastStale,
    PerLayer,
    Random,
    StationaryOracle,
)
from bmoe_lab.residency.frequency import count_lookups
from bmoe_lab.residency.future import next_use
from bmoe_lab.residency.stack_distance import NEVER, REPEAT, stack_curve, stack_distances
from bmoe_lab.testing.suites import ResidencyPolicySuite
from tests.unit.residency_reference_b import ReferenceBelady


class TestBelady(ResidencyPolicySuite):
    def make_policy(self):
        return Belady()


class TestStationaryOracle(ResidencyPolicySuite):
    def make_policy(self):
        rng = np.random.default_rng(5)
        return StationaryOracle(profile=rng.integers(0, 9, size=(self.n_layer, self.n_expert)))


@st.composite
def streams(draw, *, sizes=None):
    n_key = draw(st.integers(1, 12))
    one_size = st.integers(0, 9) if sizes is None else sizes
    key_bytes = draw(st.lists(one_size, min_size=n_key, max_size=n_key))
    budget = draw(st.integers(0, max(1, sum(key_bytes))))
    key = st.integers(0, n_key - 1)
    loads = draw(st.lists(st.lists(key, max_size=8), min_size=1, max_size=25))
    return np.array(key_bytes), budget, loads


def flat(loads):
    offsets = np.cumsum([0] + [len(keys) for keys in loads])
    return np.array(list(chain(*loads)), dtype=np.int64), offsets


# --- Belady --------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(streams())
def test_belady_equals_reference_request_by_request(stream):
    key_bytes, budget, loads = stream
    keys, offsets = flat(loads)
    future = next_use(keys, offsets, key_bytes.size)
    slow = ReferenceBelady(key_bytes, budget, loads=loads)
    state = Belady().start(key_bytes, budget)
    for number, load in enumerate(loads):
        before = state.contains().copy()
        rows = slice(offsets[number], offsets[number + 1])
        log = state.load_many(keys[rows], np.array([0, len(load)]), future[rows] - number)
        served = slow.load(load)
        assert log.residency.tolist() == served.residency
        assert log.first.tolist() == served.first
        assert np.flatnonzero(before & ~state.contains()).tolist() == sorted(served.victims)
        assert state.out_keys[1, : len(served.victims)].tolist() == served.victims
        assert state.resident_bytes == served.resident_bytes


@settings(derandomize=True, deadline=None, max_examples=150)
@given(streams(sizes=st.just(5)))
def test_belady_is_beaten_by_no_online_policy_with_experts_of_equal_size(stream):
    key_bytes, budget, loads = stream
    keys, offsets = flat(loads)

    def misses(policy, future=None):
        state = policy.start(key_bytes, budget)
        log = state.load_many(keys, offsets, *([] if future is None else [future]))
        return int(log.first.sum())

    bound = misses(Belady(), next_use(keys, offsets, key_bytes.size))
    online = (LRU(), LFU(), LFU(ageing=True), GDSF(), Random(), PerLayer(), LeastStale())
    assert all(misses(policy) >= bound for policy in online)


def test_belady_sweeps_its_heap_without_losing_an_entry():
    """Many more uses than the heap has room for."""
    rng = np.random.default_rng(6)
    share = rng.dirichlet(np.full(60, 0.5))
    loads = [rng.choice(60, 4, p=share).tolist() for _ in range(1500)]
    keys, offsets = flat(loads)
    log = Belady().start(np.ones(60), 30).load_many(keys, offsets, next_use(keys, offsets, 60))
    slow = ReferenceBelady([1] * 60, 30, loads=loads)
    served = [slow.load(load) for load in loads]
    assert log.residency.tolist() == list(chain(*(one.residency for one in served)))
    assert log.evictions.tolist() == [len(one.victims) for one in served]
    assert log.evictions.sum() > 100


def test_belady_survives_a_future_that_is_not_true():
    rng = np.random.default_rng(7)
    keys = rng.integers(0, 40, 4000)
    offsets = np.arange(0, 4001, 4)
    for future in (
        np.zeros(4000, np.int64),
        np.full(4000, 2**63 - 1),
        np.full(4000, -(2**63)),
        rng.integers(-5, 2000, 4000),
    ):
        state = Belady().start(np.ones(40), 11)
        log = state.load_many(keys, offsets, future)
        assert log.resident_bytes.max() == 11
        assert state.contains().sum() == 11


def test_belady_refuses_to_serve_without_its_future():
    state = Belady().start([1, 1], 1)
    with pytest.raises(PolicyError, match="must be given the stream with its future"):
        state.load(np.array([0]))
    with pytest.raises(PolicyError, match="future must have one entry for each of the 2 rows"):
        state.load_many(np.array([0, 1]), np.array([0, 2]))


def test_belady_refuses_a_start_state_that_cannot_be():
    for arrays in (
        {"keys": np.array([0])},
        {"keys": np.array([0]), "ahead": np.array([1, 2])},
        {"keys": np.array([0]), "ahead": np.array([2**31])},
        {"keys": np.array([0, 0]), "ahead": np.array([1, 2])},
        {"keys": np.array([2]), "ahead": np.array([1])},
    ):
        with pytest.raises(PolicyError, match="start state"):
            Belady().from_arrays(arrays, [1, 1], 1)


def test_next_use_looks_beyond_the_load_of_a_repeat():
    keys, offsets = flat([[0, 0, 1], [], [1], [0]])
    assert next_use(keys, offsets, 2).tolist() == [3, 3, 2, 4, 4]
    with pytest.raises(PolicyError, match=r"keys must lie in \[0, 2\); got 5 in row 1"):
        next_use(np.array([0, 5]), np.array([0, 2]), 2)


# --- stationary oracle ---------------------------------------------------------------------------


def test_stationary_oracle_hits_exactly_the_uses_of_the_most_frequent():
    rng = np.random.default_rng(8)
    loads = [rng.choice(20, 3, replace=False, p=np.arange(20) / 190).tolist() for _ in range(300)]
    keys, offsets = flat(loads)
    counts = count_lookups(keys, offsets, 20)
    for n_held in (0, 1, 7, 20):
        log = StationaryOracle().start(np.full(20, 10), 10 * n_held + 9).load_many(keys, offsets)
        assert log.residency.sum() == np.sort(counts)[::-1][:n_held].sum()
        assert not log.evictions.any()
        assert (log.resident_bytes <= 10 * n_held + 9).all()


@settings(derandomize=True, deadline=None, max_examples=150)
@given(streams())
def test_stationary_oracle_equals_reference_request_by_request(stream):
    key_bytes, budget, loads = stream
    uses = [sum(key in load for load in loads) for key in range(key_bytes.size)]
    held, room = set(), budget
    for key in sorted(
        range(key_bytes.size), key=lambda key: (-uses[key] / max(key_bytes[key], 1), key)
    ):
        if uses[key] and key_bytes[key] <= room:
            held.add(key)
            room -= key_bytes[key]
    state = StationaryOracle().start(key_bytes, budget)
    log = state.load_many(*flat(loads))
    assert log.residency.tolist() == [key in held for load in loads for key in load]
    assert log.first.tolist() == [
        key not in held and key not in load[:row] for load in loads for row, key in enumerate(load)
    ]
    assert not log.evictions.any()
    assert log.resident_bytes.tolist() == [budget - room] * len(loads)
    assert set(np.flatnonzero(state.contains()).tolist()) == held


def test_stationary_oracle_counts_uses_per_byte():
    keys, offsets = flat([[0], [0], [0], [1], [1], [2]])
    state = StationaryOracle().start([30, 10, 10], 30)
    state.load_many(keys, offsets)
    assert state.contains().tolist() == [False, True, True]


def test_stationary_oracle_with_a_profile_serves_the_stream_in_parts():
    keys, offsets = flat([[0], [1], [1], [2], [1]])
    whole = StationaryOracle().start([1, 1, 1], 1).load_many(keys, offsets)
    state = StationaryOracle(profile=count_lookups(keys, offsets, 3)).start([1, 1, 1], 1)
    parts = [state.load_many(keys[:2], offsets[:3]), state.load_many(keys[2:], offsets[2:] - 2)]
    np.testing.assert_array_equal(
        whole.residency, np.concatenate([part.residency for part in parts])
    )


def test_stationary_oracle_refuses_a_stream_in_parts_or_load_by_load():
    state = StationaryOracle().start([1, 1], 1)
    with pytest.raises(PolicyError, match="must be given the whole stream, or a profile"):
        state.load(np.array([0]))
    state.load_many(np.array([0, 1]), np.array([0, 1, 2]))
    with pytest.raises(PolicyError, match="got a second part"):
        state.load_many(np.array([0, 1]), np.array([0, 1, 2]))
    state.clear()
    state.load_many(np.array([1, 1]), np.array([0, 1, 2]))
    assert state.contains().tolist() == [False, True]


def test_offline_policies_say_so():
    assert not Belady.online
    assert not StationaryOracle.online
    assert Belady.needs_future


# --- all budgets in one pass ---------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=100)
@given(streams(), st.data())
def test_lru_curve_equals_lru_at_every_budget(stream, data):
    key_bytes, _, loads = stream
    keys, offsets = flat(loads)
    counted = np.array(
        data.draw(st.lists(st.booleans(), min_size=keys.size, max_size=keys.size)), dtype=bool
    )
    curve = stack_curve(keys, offsets, key_bytes, counted=counted)
    distances = stack_distances(keys, offsets, key_bytes)
    for budget in range(int(key_bytes.sum()) + 2):
        log = LRU().start(key_bytes, budget).load_many(keys, offsets)
        lookup = distances != REPEAT
        np.testing.assert_array_equal(lookup & (distances > budget), log.first)
        np.testing.assert_array_equal((distances <= budget)[lookup], log.residency[lookup] == 1)
        hit = lookup & counted & (log.residency == 1)
        assert curve.n_hit(budget) == hit.sum()
        assert curve.read_bytes(budget) == key_bytes[keys[log.first & counted]].sum()
        assert curve.n_lookup == (lookup & counted).sum()


@settings(derandomize=True, deadline=None, max_examples=50)
@given(streams(), st.data())
def test_lru_curve_begins_again_with_an_empty_cache(stream, data):
    key_bytes, budget, loads = stream
    keys, offsets = flat(loads)
    restart = data.draw(st.integers(0, len(loads) - 1))
    curve = stack_curve(keys, offsets, key_bytes, restarts=np.array([0, restart]))
    state = LRU().start(key_bytes, budget)
    cut = offsets[restart]
    reads = 0
    for part, begins in (
        (keys[:cut], offsets[: restart + 1]),
        (keys[cut:], offsets[restart:] - cut),
    ):
        reads += key_bytes[part[state.load_many(part, begins).first]].sum()
        state.clear()
    assert curve.read_bytes(budget) == reads


def test_stack_distances_survive_many_gaps():
    rng = np.random.default_rng(9)
    keys, offsets = rng.integers(0, 50, 5000), np.arange(0, 5001, 5)
    sizes = rng.integers(0, 9, 50)
    distances = stack_distances(keys, offsets, sizes)
    for budget in (0, 17, 60, 150, 220):
        log = LRU().start(sizes, budget).load_many(keys, offsets)
        assert ((distances > budget) == log.first).all()


def test_stack_distances_after_a_restart_are_those_of_the_rest_alone():
    rng = np.random.default_rng(11)
    keys, offsets = rng.integers(0, 50, 1000), np.arange(0, 1001, 5)
    sizes = rng.integers(1, 9, 50)
    whole = stack_distances(keys, offsets, sizes, restarts=np.array([0, 90]))
    rest = stack_distances(keys[450:], offsets[90:] - 450, sizes)
    np.testing.assert_array_equal(whole[450:], rest)


def test_lru_curve_of_nothing_is_unknown():
    curve = stack_curve(np.empty(0, np.int64), np.zeros(1, np.int64), [1, 1])
    assert np.isnan(curve.hit_rate([0, 5])).all()
    assert curve.read_bytes([0, 5]).tolist() == [0, 0]


def test_lru_curve_refuses_what_it_cannot_answer():
    with pytest.raises(PolicyError, match=r"keys must lie in \[0, 2\); got 2 in row 1"):
        stack_curve(np.array([0, 2]), np.array([0, 2]), [1, 1])
    with pytest.raises(SettingsError, match="counted must have one entry for each of the 2 rows"):
        stack_curve(np.array([0, 1]), np.array([0, 2]), [1, 1], counted=np.array([True]))
    curve = stack_curve(np.array([0, 1]), np.array([0, 2]), [1, 1])
    for budgets in (-1, [1, -5], 1.5):
        with pytest.raises(SettingsError, match="budgets must be bytes"):
            curve.n_hit(budgets)


def test_never_is_beyond_every_budget():
    assert np.iinfo(np.int64).max == NEVER


# --- a stream whose answer is known --------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [LFU(), LFU(keep_counts=False), LFU(ageing=True), GDSF(), Random(), PerLayer(), LeastStale()],
    ids=repr,
)
def test_independent_uniform_stream_hits_the_resident_share(policy):
    """Whatever is kept, a request for one of n equal keys finds one of the c kept with c/n."""
    rng = np.random.default_rng(10)
    n_key, n_kept, n = 64, 16, 40_000
    keys = rng.integers(0, n_key, n)
    state = policy.start(np.full(n_key, 10), 10 * n_kept, n_layer=4)
    hits = state.load_many(keys, np.arange(n + 1)).residency[2000:]
    share = n_kept / n_key
    error = np.sqrt(share * (1 - share) / hits.size)
    assert abs(hits.mean() - share) < 3 * error
