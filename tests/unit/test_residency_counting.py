"""Policies that count, draw, split by layer or pin equal their references, row for row."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import PolicyError, SettingsError, UnknownNameError
from bmoe_lab.residency import (
    GDSF,
    LFU,
    LRU,
    LeastStale,
    PerLayer,
    Pin,
    Random,
)
from bmoe_lab.residency import lfu as lfu_module
from bmoe_lab.residency.mersenne import draw_below, seeded
from bmoe_lab.testing import make_trace
from bmoe_lab.testing.suites import ResidencyPolicySuite
from tests.unit import residency_reference_b as reference
from tests.unit.residency_reference import ReferenceLRU, assert_equals_reference, streams

MAPS = {
    "lfu": (LFU(), reference.ReferenceLFU),
    "in-cache lfu": (LFU(keep_counts=False), reference.ReferenceInCacheLFU),
    "ageing lfu": (LFU(ageing=True), reference.ReferenceAgeingLFU),
    "in-cache ageing lfu": (
        LFU(keep_counts=False, ageing=True),
        reference.ReferenceInCacheAgeingLFU,
    ),
    "gdsf": (GDSF(), reference.ReferenceGDSF),
    "random": (Random(), reference.ReferenceRandom),
    "per layer": (PerLayer(), reference.ReferencePerLayer),
    "per layer lfu": (PerLayer(LFU()), reference.ReferencePerLayerLFU),
    "per layer in-cache lfu": (
        PerLayer(LFU(keep_counts=False)),
        reference.ReferencePerLayerInCacheLFU,
    ),
    "visited": (PerLayer(trim="visited"), reference.ReferenceVisited),
    "visited lfu": (PerLayer("lfu", trim="visited"), reference.ReferenceVisitedLFU),
    "least stale": (LeastStale(), reference.ReferenceLeastStale),
}


class TestLFU(ResidencyPolicySuite):
    def make_policy(self):
        return LFU()


class TestInCacheLFU(ResidencyPolicySuite):
    def make_policy(self):
        return LFU(keep_counts=False)


class TestAgeingLFU(ResidencyPolicySuite):
    def make_policy(self):
        return LFU(ageing=True)


class TestGDSF(ResidencyPolicySuite):
    def make_policy(self):
        return GDSF()


class TestRandom(ResidencyPolicySuite):
    def make_policy(self):
        return Random(seed=3)


class TestPerLayer(ResidencyPolicySuite):
    def make_policy(self):
        return PerLayer()


class TestPerLayerLFU(ResidencyPolicySuite):
    def make_policy(self):
        return PerLayer(LFU())


class TestPerLayerVisited(ResidencyPolicySuite):
    def make_policy(self):
        return PerLayer("lfu", trim="visited")


class TestLeastStale(ResidencyPolicySuite):
    def make_policy(self):
        return LeastStale()


class TestPin(ResidencyPolicySuite):
    def make_policy(self):
        rng = np.random.default_rng(5)
        return Pin(profile=rng.integers(0, 9, size=(self.n_layer, self.n_expert)))


@pytest.mark.parametrize("name", MAPS)
@settings(derandomize=True, deadline=None, max_examples=120)
@given(streams(n_layers=(1, 2, 3), max_keys=12))
def test_kernel_equals_reference_request_by_request(name, stream):
    policy, reference_of = MAPS[name]
    assert_equals_reference(policy, reference_of, stream)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(streams(max_keys=12), st.data())
def test_pin_equals_reference_request_by_request(stream, data):
    n_key = len(stream.key_bytes)
    profile = data.draw(st.lists(st.integers(0, 4), min_size=n_key, max_size=n_key).filter(any))
    room = data.draw(st.one_of(st.none(), st.integers(0, max(0, stream.budget - 1))))
    assert_equals_reference(
        Pin(profile=profile, room=room),
        lambda *cache: reference.ReferencePin(*cache, profile=profile, room=room),
        stream,
    )


# --- known answers -------------------------------------------------------------------------------


def test_lfu_counts_a_load_once_whatever_its_repeats():
    state = LFU().start([1, 1, 1], 2)
    for keys in ([0, 0, 0], [1], [1]):
        state.load(np.array(keys))
    assert state.load(np.array([2])).victims.tolist() == [0]


def test_lfu_breaks_ties_by_the_last_row_of_a_key():
    state = LFU().start([1, 1, 1], 2)
    state.load(np.array([0, 1, 0]))
    assert state.load(np.array([2])).victims.tolist() == [1]


def test_lfu_counts_survive_eviction_only_if_kept():
    stream = [[0], [0], [0], [1], [2], [0], [3]]
    victims = {}
    for keep in (True, False):
        state = LFU(keep_counts=keep).start([2, 1, 1, 1], 2)
        victims[keep] = [state.load(np.array(keys)).victims.tolist() for keys in stream]
    assert victims[True] == [[], [], [], [0], [], [1, 2], [0]]
    state = LFU(keep_counts=True).start([1, 1, 1], 1)
    for keys in ([0], [0], [1]):
        state.load(np.array(keys))
    assert state.to_arrays()["uses"].tolist() == [2, 1, 0]
    state = LFU(keep_counts=False).start([1, 1, 1], 1)
    for keys in ([0], [0], [1], [0]):
        state.load(np.array(keys))
    assert state.to_arrays()["uses"].tolist() == [1, 0, 0]


def test_lfu_counts_end_at_their_limit_without_harm():
    most = lfu_module.MOST_USES
    arrays = {"keys": np.array([0, 1]), "uses": np.array([most, 1, 0])}
    state = LFU().from_arrays(arrays, [1, 1, 1], 2)
    state.load(np.array([0]))
    assert state.to_arrays()["uses"].tolist() == [most, 1, 0]
    assert state.load(np.array([2])).victims.tolist() == [1]


def test_ageing_lets_go_of_what_was_popular_long_ago():
    loads = [[0]] * 5 + [[key] for key in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3)]
    held = {}
    for ageing in (False, True):
        state = LFU(keep_counts=False, ageing=ageing).start([1] * 4, 2)
        for keys in loads:
            state.load(np.array(keys))
        held[ageing] = bool(state.contains()[0])
    assert held == {False: True, True: False}


def test_gdsf_with_equal_sizes_is_lfu_with_ageing():
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 30, 3000)
    offsets = np.arange(0, 3001, 3)
    logs = [
        policy.start(np.full(30, 7), 70).load_many(keys, offsets)
        for policy in (GDSF(), LFU(keep_counts=False, ageing=True))
    ]
    np.testing.assert_array_equal(logs[0].residency, logs[1].residency)
    assert logs[0].evictions.sum() > 500


def test_gdsf_prefers_to_keep_small_experts():
    state = GDSF().start([10, 30, 10], 40)
    for keys in ([1], [0], [2]):
        load = state.load(np.array(keys))
    assert load.victims.tolist() == [1]


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**70])
def test_draws_are_those_of_the_standard_library(seed):
    words, theirs = seeded(seed), random.Random(seed)
    for n in [1, 2, 3, 4, 1000, 2**16, 2**31 + 5, *range(1, 700)]:
        assert draw_below(words, n) == theirs.choice(range(n))
    assert tuple(words.tolist()) == theirs.getstate()[1]


def test_random_draws_in_the_order_of_admission_over_many_gaps():
    """Slots run out many times, so that the gaps are closed; protected keys are not drawn."""
    rng = np.random.default_rng(8)
    n_key = 300
    state = Random(seed=9).start(np.ones(n_key), 150)
    slow = reference.ReferenceRandom([1] * n_key, 150)
    slow.random = random.Random(9)
    for _ in range(1500):
        keys = rng.integers(0, n_key, 4)
        load = state.load(keys)
        served = slow.load(keys)
        assert load.victims.tolist() == served.victims
    assert state.evictions > 2000


def test_per_layer_all_keeps_the_budget_where_a_load_needs_more_than_its_share():
    state = PerLayer().start([10] * 8, 40, n_layer=2)
    state.load(np.array([4, 5]))
    load = state.load(np.array([0, 1, 2]))
    assert load.victims.tolist() == [4]
    assert state.resident_bytes == 40


def test_per_layer_visited_holds_more_than_the_budget():
    state = PerLayer(trim="visited").start([10] * 8, 40, n_layer=2)
    state.load(np.array([4, 5]))
    load = state.load(np.array([0, 1, 2]))
    assert load.victims.tolist() == []
    assert state.resident_bytes == 50
    assert not PerLayer(trim="visited").keeps_budget
    assert PerLayer().keeps_budget


def test_per_layer_with_one_layer_is_the_rule_itself():
    rng = np.random.default_rng(4)
    keys, offsets = rng.integers(0, 20, 2000), np.arange(0, 2001, 4)
    for one, rule in ((PerLayer(LRU()), LRU()), (PerLayer(LFU()), LFU())):
        logs = [
            policy.start(np.arange(20) + 5, 100).load_many(keys, offsets) for policy in (one, rule)
        ]
        np.testing.assert_array_equal(logs[0].residency, logs[1].residency)
        np.testing.assert_array_equal(logs[0].evictions, logs[1].evictions)


def test_per_layer_refuses_what_it_cannot_hold():
    for policy, error, message in (
        (PerLayer(Random()), PolicyError, "policy must be LRU"),
        (PerLayer(LFU(ageing=True)), PolicyError, "without ageing"),
        (PerLayer(LRU("1 KiB")), SettingsError, "no budget of its own"),
        (PerLayer("fifo"), UnknownNameError, "must be one of"),
        (PerLayer(trim="some"), UnknownNameError, "trim must be one of"),
    ):
        with pytest.raises(error, match=message):
            policy.start([1, 1], 1)


def test_least_stale_hits_where_lru_cannot():
    """Below one pass LRU evicts just what the next layers ask for."""
    n_layer = 6
    loads = [[2 * layer] for _ in range(20) for layer in range(n_layer)]
    hits = {}
    for policy in (LRU(), LeastStale()):
        state = policy.start([1] * (2 * n_layer), n_layer - 1, n_layer=n_layer)
        hits[policy.name] = sum(int(state.load(np.array(keys)).residency[0]) for keys in loads)
    assert hits["lru"] == 0
    assert hits["least_stale"] >= 19 * (n_layer - 2)


def test_least_stale_begins_a_pass_where_the_layer_does_not_increase():
    state = LeastStale().start([1] * 6, 3, n_layer=3)
    for keys in ([0], [2], [3]):
        state.load(np.array(keys))
    assert state.load(np.array([4, 5])).victims.tolist() == [2, 0]


def test_pin_keeps_what_it_names_and_reads_nothing_ahead():
    state = Pin(profile=[0, 9, 0, 0], room=2).start([1] * 4, 3)
    assert not state.contains().any()
    for keys in ([1], [0], [2], [3], [0], [2]):
        state.load(np.array(keys))
    assert state.contains().tolist() == [True, True, True, False]


def test_pin_gives_up_pinned_experts_when_nothing_else_is_left():
    state = Pin(profile=[1, 1, 0, 0], room=0).start([1] * 4, 2)
    state.load(np.array([0, 1]))
    assert state.load(np.array([2])).victims.tolist() == [0]


def test_pin_from_trace_counts_loads():
    trace = make_trace(n_token=30, n_layer=2, n_expert=8, n_used=2, n_prefill=10, seed=0)
    profile = Pin.from_trace(trace).profile
    expected = np.zeros((2, 8), dtype=int)
    expert = trace["expert_applied"].values
    for batch in np.unique(trace["batch"].values):
        rows = expert[trace["batch"].values == batch]
        for layer in range(2):
            for one in set(rows[:, layer].ravel().tolist()) - {-1}:
                expected[layer, one] += 1
    np.testing.assert_array_equal(profile, expected)


def test_pin_refuses_what_would_pin_nothing_or_is_no_profile():
    for policy, error, message in (
        (Pin(), PolicyError, "profile must be given"),
        (Pin(profile=[0, 0]), PolicyError, "only zeros"),
        (Pin(profile=[1, 0, 0]), PolicyError, "one entry for each of the 2 experts"),
        (Pin(profile=[1, -1]), PolicyError, "at least 0; got -1"),
        (Pin(profile=[1, float("nan")]), PolicyError, "finite"),
        (Pin(profile=["a", "b"]), PolicyError, "must be an array"),
        (Pin(profile=[1, 1], room=50), PolicyError, "less than the budget"),
        (Pin(profile=[1, 1], room="x"), SettingsError, "room must be a size"),
    ):
        with pytest.raises(error, match=message):
            policy.start([1, 1], 5)


def test_parameters_of_another_kind_are_refused():
    with pytest.raises(SettingsError, match="seed must be an integer"):
        Random(seed=1.5).start([1], 1)
    with pytest.raises(SettingsError, match="keep_counts must be True or False"):
        LFU(keep_counts=1).start([1], 1)
    with pytest.raises(SettingsError, match="ageing must be True or False"):
        LFU(ageing="no").start([1], 1)


# --- start states from files ---------------------------------------------------------------------


HOSTILE = [
    (LFU(), {"uses": np.ones(3, int)}),
    (LFU(), {"keys": np.array([0])}),
    (LFU(), {"keys": np.array([0]), "uses": np.array([0, 1, 1])}),
    (LFU(), {"keys": np.array([0]), "uses": np.array([1, 1])}),
    (LFU(), {"keys": np.array([0]), "uses": np.array([2**24, 1, 1])}),
    (LFU(), {"keys": np.array([0]), "uses": np.array([1.0, 1, 1])}),
    (LFU(), {"keys": np.array([0, 0]), "uses": np.array([1, 1, 1])}),
    (LFU(), {"keys": np.array([3]), "uses": np.array([1, 1, 1])}),
    (LFU(), {"keys": np.array([[0]]), "uses": np.array([1, 1, 1])}),
    (LFU(), {"keys": np.array(["0"]), "uses": np.array([1, 1, 1])}),
    (GDSF(), {"keys": np.array([0]), "uses": np.ones(3, int), "age": np.zeros(1, int)}),
    (
        GDSF(),
        {
            "keys": np.array([0]),
            "uses": np.ones(3, int),
            "age": np.array([-1]),
            "priorities": np.array([4]),
        },
    ),
    (
        GDSF(),
        {
            "keys": np.array([0]),
            "uses": np.ones(3, int),
            "age": np.zeros(1, int),
            "priorities": np.array([2**62]),
        },
    ),
    (Random(), {"keys": np.array([0])}),
    (Random(), {"keys": np.array([0]), "generator": np.zeros(624, int)}),
    (Random(), {"keys": np.array([0]), "generator": np.full(625, 2**32)}),
    (Random(), {"keys": np.array([0]), "generator": np.full(625, 625)}),
    (Random(), {"keys": np.array([-1]), "generator": np.full(625, 5)}),
    (PerLayer(), {"keys": np.array([5])}),
    (PerLayer("lfu"), {"keys": np.array([0])}),
    (PerLayer("lfu"), {"keys": np.array([0]), "uses": np.array([0, 1, 1])}),
    (LeastStale(), {"keys": np.array([0]), "passes": np.array([0])}),
    (LeastStale(), {"keys": np.array([0]), "passes": np.array([-1]), "layer": np.array([0])}),
    (LeastStale(), {"keys": np.array([0]), "passes": np.array([0]), "layer": np.array([3])}),
    (LeastStale(), {"keys": np.array([0]), "passes": np.array([0, 1]), "layer": np.array([0])}),
    (Pin(profile=[1, 0, 0]), {"keys": np.array([1])}),
    (Pin(profile=[1, 0, 0]), {"keys": np.array([1]), "pinned": np.array([1])}),
    (Pin(profile=[1, 0, 0]), {"keys": np.array([1]), "pinned": np.array([9])}),
]


@pytest.mark.parametrize(("policy", "arrays"), HOSTILE, ids=str)
def test_a_start_state_that_cannot_be_is_refused(policy, arrays):
    with pytest.raises(PolicyError, match="start state"):
        policy.from_arrays(arrays, [1, 1, 1], 2, n_layer=3)


@pytest.mark.parametrize("name", MAPS)
def test_a_start_state_does_not_depend_on_how_it_came_about(name):
    """The arrays name keys, counts and ages only: a restored state gives the same ones."""
    policy = MAPS[name][0]
    rng = np.random.default_rng(1)
    state = policy.start(rng.integers(1, 9, 24), 40, n_layer=3)
    for _ in range(200):
        layer = rng.integers(0, 3)
        state.load(rng.integers(8 * layer, 8 * layer + 8, 3))
    arrays = state.to_arrays()
    again = policy.from_arrays(arrays, state.key_bytes, 40, n_layer=3).to_arrays()
    assert list(again) == list(arrays)
    for key, array in arrays.items():
        np.testing.assert_array_equal(again[key], array)
        assert array.dtype == np.int64
        assert array.ndim == 1


def test_reference_lru_is_what_it_says():
    """The references are tested against each other where they must agree."""
    rng = np.random.default_rng(2)
    one, other = ReferenceLRU([1] * 9, 4), reference.ReferencePerLayer([1] * 9, 4)
    for _ in range(100):
        keys = rng.integers(0, 9, 2).tolist()
        assert one.load(keys) == other.load(keys)


def test_age_does_not_go_back_after_a_load_that_protected_the_oldest():
    """The victim of such a load has a larger priority than the key that was protected."""
    state = LFU(keep_counts=False, ageing=True).start([1] * 5, 2)
    victims = [
        state.load(np.array(keys)).victims.tolist()
        for keys in ([1], [1], [1], [1], [0], [0, 2], [3])
    ]
    assert victims[-2:] == [[1], [0]]  # of priorities 4 and 2
    assert state.to_arrays()["age"].tolist() == [4]
