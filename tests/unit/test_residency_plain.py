"""A residency policy in ten lines of plain Python equals the kernel that follows the same rule."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

import bmoe_lab as bl
from bmoe_lab.errors import PolicyError
from bmoe_lab.residency import FIFO, LFU, LRU, PlainPolicy
from bmoe_lab.testing import ResidencyPolicySuite, make_trace
from tests.unit.residency_reference import (
    ReferenceLRU,
    assert_equals_reference,
    streams,
)


class PlainLRU(PlainPolicy):
    def __init__(self, budget=None):
        self.budget = budget

    def reset(self, key_bytes, budget_bytes, n_layer):
        self.clock, self.last_use = 0, np.zeros(len(key_bytes), dtype=np.int64)

    def touched(self, key):
        self.clock += 1
        self.last_use[key] = self.clock

    def victim(self, evictable):
        return evictable[self.last_use[evictable].argmin()]

    def save(self):
        return {"last_use": self.last_use, "clock": np.array([self.clock])}

    def load_saved(self, arrays):
        self.last_use = arrays["last_use"].copy()
        self.clock = int(arrays["clock"][0])


class PlainFIFO(PlainPolicy):
    def __init__(self, budget=None):
        self.budget = budget

    def victim(self, evictable):
        return int(evictable[0])


class PlainLFU(PlainLRU):
    def reset(self, key_bytes, budget_bytes, n_layer):
        super().reset(key_bytes, budget_bytes, n_layer)
        self.uses = Counter()

    def looked_up(self, key, hit):
        self.uses[key] += 1

    def victim(self, evictable):
        return min(evictable.tolist(), key=lambda key: (self.uses[key], self.last_use[key]))

    def save(self):
        counts = np.array([self.uses[key] for key in range(len(self.last_use))])
        return super().save() | {"uses": counts}

    def load_saved(self, arrays):
        super().load_saved(arrays)
        self.uses = Counter(dict(enumerate(arrays["uses"].tolist())))


class TestPlainLRU(ResidencyPolicySuite):
    def make_policy(self):
        return PlainLRU("1 KiB")


class TestPlainFIFO(ResidencyPolicySuite):
    warm_start = False

    def make_policy(self):
        return PlainFIFO()


class TestPlainLFU(ResidencyPolicySuite):
    def make_policy(self):
        return PlainLFU()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(streams(n_layers=(1, 2)))
def test_plain_lru_equals_the_reference_request_by_request(stream):
    assert_equals_reference(PlainLRU(), ReferenceLRU, stream)


@pytest.mark.parametrize(
    ("plain", "kernel"),
    [(PlainLRU(), LRU()), (PlainFIFO(), FIFO()), (PlainLFU(), LFU())],
    ids=["lru", "fifo", "lfu"],
)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(stream=streams(many=False))
def test_plain_policy_equals_the_kernel_request_by_request(plain, kernel, stream):
    states = [policy.start(stream.key_bytes, stream.budget) for policy in (plain, kernel)]
    for what, *keys in stream.steps:
        if what == "restart":
            continue
        if what == "forget":
            for state in states:
                state.forget(keys[0])
            continue
        one, other = (state.load(np.array(keys[0], dtype=np.int64)) for state in states)
        for name in ("residency", "first", "missing", "victims"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
        assert states[0].resident_bytes == states[1].resident_bytes
        assert states[0].evictions == states[1].evictions
        np.testing.assert_array_equal(states[0].contains(), states[1].contains())


def test_replay_of_a_plain_policy_equals_that_of_the_kernel():
    trace = make_trace(n_token=40, n_layer=3, n_expert=16, n_used=2, n_prefill=8, seed=1)
    budget = int(trace["expert_bytes"].values.sum()) * 4
    plain = bl.replay(trace, residency=PlainLRU(budget))
    kernel = bl.replay(trace, residency=LRU(budget))
    for name in ("residency", "read_bytes", "evictions", "cache_resident_bytes"):
        np.testing.assert_array_equal(plain[name].values, kernel[name].values)
    both = [
        bl.replay(trace, residency=policy, routing=bl.routing.DropCold(0.9))
        for policy in (PlainLRU(budget), LRU(budget))
    ]
    for name in ("expert_applied", "residency", "action"):
        np.testing.assert_array_equal(both[0][name].values, both[1][name].values)


def test_hooks_are_called_in_the_order_that_is_written_down():
    calls = []

    class Told(PlainPolicy):
        def __init__(self, budget=None):
            self.budget = budget

        def reset(self, key_bytes, budget_bytes, n_layer):
            calls.append(("reset", key_bytes.tolist(), budget_bytes, n_layer))

        def looked_up(self, key, hit):
            calls.append(("looked_up", key, hit))

        def touched(self, key):
            calls.append(("touched", key))

        def victim(self, evictable):
            calls.append(("victim", evictable.tolist()))
            return int(evictable[-1])

        def evicted(self, key):
            calls.append(("evicted", key))

        def admitted(self, key):
            calls.append(("admitted", key))

        def forgotten(self, key):
            calls.append(("forgotten", key))

    state = Told().start([1, 1, 1, 1], 3, n_layer=2)
    state.load(np.array([2, 0, 1]))
    assert calls[0] == ("reset", [1, 1, 1, 1], 3, 2)
    calls.clear()
    state.load(np.array([0, 3, 0]))
    state.forget([3, 3])
    assert calls == [
        ("looked_up", 0, True),
        ("touched", 0),
        ("looked_up", 3, False),
        ("touched", 3),
        ("touched", 0),
        ("victim", [2, 1]),
        ("evicted", 1),
        ("admitted", 3),
        ("forgotten", 3),
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (0, r"Wrong\.victim\(\) must return one of the evictable keys; got 0, but this load asks"),
        (4, "got 4, but it is not resident"),
        (9, r"got 9, but keys lie in \[0, 5\)"),
        (-1, r"got -1, but keys lie in \[0, 5\)"),
        (None, "got None. Return an integer."),
        (1.0, "got 1.0. Return an integer."),
        (True, "got True. Return an integer."),
        ("1", "got '1'. Return an integer."),
    ],
)
def test_a_wrong_victim_is_refused_with_what_was_wrong(answer, message):
    class Wrong(PlainPolicy):
        def __init__(self, budget=None):
            self.budget = budget

        def victim(self, evictable):
            return answer

    state = Wrong().start([1] * 5, 3)
    state.load(np.array([0, 1, 2]))
    with pytest.raises(PolicyError, match=message):
        state.load(np.array([0, 3]))


def test_the_list_of_evictable_keys_cannot_be_written():
    class Writes(PlainPolicy):
        def __init__(self, budget=None):
            self.budget = budget

        def victim(self, evictable):
            evictable[:] = 0
            return 0

    state = Writes().start([1, 1], 1)
    state.load(np.array([0]))
    with pytest.raises(ValueError, match="read-only"):
        state.load(np.array([1]))


def test_a_policy_without_a_victim_says_what_to_write():
    state = PlainPolicy().start([1, 1], 1)
    state.load(np.array([0]))
    with pytest.raises(NotImplementedError, match=r"must implement victim\(evictable\)"):
        state.load(np.array([1]))


def test_a_warm_start_without_save_is_refused_with_words():
    state = PlainFIFO().start([1, 1], 1)
    state.load(np.array([0]))
    with pytest.raises(PolicyError, match=r"must implement save\(\) and load_saved\(arrays\)"):
        state.to_arrays()
    with pytest.raises(PolicyError, match="for a warm start"):
        PlainFIFO().from_arrays({"keys": np.array([0])}, [1, 1], 1)
    with pytest.raises(PolicyError, match="must be distinct and lie in"):
        PlainLRU().from_arrays({"keys": np.array([5])}, [1, 1], 1)
    with pytest.raises(PolicyError, match="must hold 'keys'"):
        PlainLRU().from_arrays({}, [1, 1], 1)


def test_two_caches_of_one_policy_do_not_share_its_memory():
    policy = PlainLRU()
    one, other = policy.start([1, 1, 1], 2), policy.start([1, 1, 1], 2)
    one.load(np.array([0, 1]))
    other.load(np.array([1, 0]))
    assert one.load(np.array([2])).victims.tolist() == [0]
    assert other.load(np.array([2])).victims.tolist() == [1]
    assert not hasattr(policy, "clock")
