"""FIFO, CLOCK, SLRU, ARC, S3-FIFO, SIEVE, W-TinyLFU: equal to plain versions, and what they say."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

from bmoe_lab.errors import PolicyError
from bmoe_lab.residency import ARC, FIFO, LRU, S3FIFO, SIEVE, SLRU, Clock, WTinyLFU
from bmoe_lab.residency.shares import share_of
from bmoe_lab.testing.suites import ResidencyPolicySuite
from tests.unit.residency_reference import (
    REFERENCES,
    ReferenceS3FIFO,
    ReferenceSLRU,
    ReferenceWTinyLFU,
    Stream,
    assert_equals_reference,
    streams,
)

POLICIES = [LRU, FIFO, Clock, SLRU, ARC, S3FIFO, SIEVE, WTinyLFU]


class TestFIFO(ResidencyPolicySuite):
    def make_policy(self):
        return FIFO("1 KiB")


class TestClock(ResidencyPolicySuite):
    def make_policy(self):
        return Clock("1 KiB")


class TestSLRU(ResidencyPolicySuite):
    def make_policy(self):
        return SLRU("1 KiB", protected_frac=0.6)


class TestARC(ResidencyPolicySuite):
    def make_policy(self):
        return ARC("1 KiB")


class TestS3FIFO(ResidencyPolicySuite):
    def make_policy(self):
        return S3FIFO("1 KiB", small_frac=0.25)


class TestSIEVE(ResidencyPolicySuite):
    def make_policy(self):
        return SIEVE("1 KiB")


class TestWTinyLFU(ResidencyPolicySuite):
    def make_policy(self):
        return WTinyLFU("1 KiB", window_frac=0.2, sample_factor=3)


# --- equal to the plain version, request by request -----------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(stream=streams(n_layers=(1, 2, 3), max_steps=40))
def test_kernel_equals_plain_version_request_by_request(policy, stream):
    assert_equals_reference(policy(), REFERENCES[policy.name], stream)


def popular_stream(seed, *, equal):
    """Return a long stream in which counts, ghosts and halvings matter."""
    rng = np.random.default_rng(seed)
    n_layer, n_expert = 3, 14
    sizes = np.full(n_layer * n_expert, 4) if equal else rng.integers(1, 9, n_layer * n_expert)
    steps = []
    order = np.array([rng.permutation(n_expert) for _ in range(n_layer)])
    weight = 1 / np.arange(1, n_expert + 1) ** 1.2
    for step in range(700):
        if step % 150 == 149:  # a new phase: other experts are popular
            order = np.array([rng.permutation(n_expert) for _ in range(n_layer)])
        ids = rng.choice(n_expert, 1 + step % 4, p=weight / weight.sum())
        layer = step % n_layer
        steps.append(("load", (layer * n_expert + order[layer][ids]).tolist()))
        if step % 90 == 60:
            steps.append(("forget", steps[-1][1][:1]))
        if step % 100 == 50:
            steps.append(("restart",))
    budget = int(sizes.sum() * rng.choice([0.15, 0.3, 0.6]))
    return Stream(sizes.tolist(), budget, n_layer, steps)


#: What a long stream must make happen, or it would prove little.
EVENTS = {
    LRU: set(),
    FIFO: set(),
    Clock: {"another round"},
    SIEVE: {"mark wiped", "passed over"},
    SLRU: {"sent back", "protected gone"},
    S3FIFO: {"small to main", "main again", "ghost asked for", "ghost forgotten"},
    ARC: {
        "B1 asked for",
        "B2 asked for",
        "B1 forgotten",
        "B2 forgotten",
        "frequent gone",
        "equal, B2 decides",
    },
    WTinyLFU: {"candidate won", "candidate lost", "halved"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_kernel_equals_plain_version_on_long_streams(policy):
    seen = set()
    for seed in range(4):
        for equal in (True, False):
            stream = popular_stream(seed, equal=equal)
            _, reference = assert_equals_reference(policy(), REFERENCES[policy.name], stream)
            assert reference.evictions > 50
            seen |= {event for event, n in reference.seen.items() if n}
    assert seen >= EVENTS[policy]


def with_fracs(reference, **fracs):
    return type("WithFracs", (reference,), fracs)


@pytest.mark.parametrize("frac", [0.0, 0.35, 1.0])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(stream=streams(n_layers=(2,), max_steps=40))
def test_kernel_equals_plain_version_at_other_shares(frac, stream):
    exact = Fraction(str(frac))
    assert_equals_reference(
        SLRU(protected_frac=frac), with_fracs(ReferenceSLRU, protected_frac=exact), stream
    )
    assert_equals_reference(
        S3FIFO(small_frac=frac), with_fracs(ReferenceS3FIFO, small_frac=exact), stream
    )
    assert_equals_reference(
        WTinyLFU(window_frac=frac, protected_frac=frac, sample_factor=2),
        with_fracs(ReferenceWTinyLFU, window_frac=exact, protected_frac=exact, sample_factor=2),
        stream,
    )


# --- what the docstrings say ----------------------------------------------------------------------


def serve(policy, key_bytes, budget, loads):
    """Return the state after `loads` and the victims of each."""
    state = policy.start(np.array(key_bytes, dtype=np.int64), budget)
    return state, [state.load(np.array(keys)).victims.tolist() for keys in loads]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_sizes_decide_as_entries_do(policy):
    rng = np.random.default_rng(11)
    n_key, n_held = 100, 20
    keys = rng.choice(n_key, 5000, p=rng.dirichlet(np.full(n_key, 0.4)))
    offsets = np.arange(0, keys.size + 1)
    logs = [
        policy().start(np.full(n_key, size), n_held * size).load_many(keys, offsets)
        for size in (1, 64)
    ]
    np.testing.assert_array_equal(logs[0].residency, logs[1].residency)
    np.testing.assert_array_equal(logs[0].evictions, logs[1].evictions)


def test_slru_without_a_protected_share_is_an_lru_where_loads_name_one_key():
    keys = np.random.default_rng(3).integers(0, 20, 2000)
    offsets = np.arange(keys.size + 1)
    sizes = np.arange(1, 21)
    logs = [one.start(sizes, 70).load_many(keys, offsets) for one in (LRU(), SLRU(None, 0.0))]
    np.testing.assert_array_equal(logs[0].residency, logs[1].residency)


def test_slru_gives_up_what_was_used_once_before_what_was_used_again():
    _, victims = serve(SLRU(), [1] * 12, 10, [[0], [0], *([key] for key in range(1, 12))])
    assert victims[-2:] == [[1], [2]]


def test_slru_sends_the_overflow_of_the_protected_share_back_to_the_newest_of_probation():
    state, _ = serve(SLRU(None, 0.5), [1] * 6, 4, [[0, 1, 2], [0], [1], [2], [3]])
    arrays = {name: keys.tolist() for name, keys in state.to_arrays().items()}
    assert arrays == {"probation": [0, 3], "protected": [1, 2]}


def test_fifo_passes_over_keys_of_the_load_and_leaves_them_their_place():
    state, victims = serve(FIFO(), [1] * 5, 3, [[0], [1], [2], [0, 3], [4]])
    assert victims[-2:] == [[1], [0]]
    assert state.to_arrays()["keys"].tolist() == [2, 3, 4]


def test_clock_passes_over_keys_of_the_load_with_place_and_mark():
    state, victims = serve(Clock(), [1] * 5, 3, [[0], [1], [2], [0, 3]])
    assert victims[-1] == [1]
    arrays = {name: array.tolist() for name, array in state.to_arrays().items()}
    assert arrays == {"keys": [0, 2, 3], "used": [1, 0, 0]}


def test_clock_gives_a_used_key_another_round():
    _, victims = serve(Clock(), [1] * 6, 3, [[0], [1], [2], [0], [3], [4], [5]])
    assert victims[-3:] == [[1], [2], [0]]


def test_sieve_leaves_a_used_key_where_it_is_and_goes_on_behind_its_victim():
    state, victims = serve(SIEVE(), [1] * 6, 3, [[0], [1], [2], [0], [3], [4]])
    assert victims[-2:] == [[1], [2]]
    arrays = {name: array.tolist() for name, array in state.to_arrays().items()}
    assert arrays == {"keys": [0, 3, 4], "used": [0, 0, 0], "hand": [1]}


def test_sieve_hand_moves_on_when_its_key_is_forgotten():
    state, _ = serve(SIEVE(), [1] * 6, 3, [[0], [1], [2], [3]])
    assert state.to_arrays()["hand"].tolist() == [0]  # key 1
    state.forget(np.array([1]))
    assert state.load(np.array([4])).victims.size == 0
    assert state.load(np.array([5])).victims.tolist() == [2]


@pytest.mark.parametrize("policy", [Clock, SIEVE])
def test_repeats_of_a_missing_key_within_a_load_leave_no_mark(policy):
    state, _ = serve(policy(), [1] * 3, 3, [[0, 0, 0]])
    assert state.to_arrays()["used"].tolist() == [0]


def test_s3fifo_counts_one_use_per_load_and_three_at_most():
    state, _ = serve(S3FIFO(), [1] * 30, 20, [[0], [0, 0, 0], [1]])
    assert state.to_arrays()["small_uses"].tolist() == [1, 0]
    for _ in range(5):
        state.load(np.array([0]))
    assert state.to_arrays()["small_uses"].tolist() == [3, 0]


def test_s3fifo_lets_main_take_what_small_has_no_room_for_until_the_first_eviction():
    state, victims = serve(S3FIFO(), [1] * 30, 20, [[key] for key in range(22)])
    arrays = {name: array.tolist() for name, array in state.to_arrays().items()}
    assert arrays["main"] == list(range(2, 20))
    assert victims[-2:] == [[0], [1]]
    assert (arrays["small"], arrays["ghosts"], arrays["evicted"]) == ([20, 21], [0, 1], [1])


def test_s3fifo_ghost_comes_back_to_main():
    state, _ = serve(S3FIFO(), [1] * 30, 20, [*([key] for key in range(21)), [0]])
    arrays = {name: array.tolist() for name, array in state.to_arrays().items()}
    assert arrays["main"][-1] == 0
    assert 0 not in arrays["ghosts"]


def test_s3fifo_ghosts_hold_no_more_than_the_rest_of_the_budget():
    state, _ = serve(S3FIFO(), [3] * 200, 61, [[key] for key in range(200)])
    ghosts = state.to_arrays()["ghosts"]
    assert ghosts.size == 54 // 3  # 0.9 * 61 = 54.9, rounded down


def test_arc_target_follows_the_ghosts_that_are_asked_for():
    loads = [[0], [0], [1], [2], [3], [1]]  # 1 was given up by recent
    state, _ = serve(ARC(), [10] * 5, 30, loads)
    arrays = {name: array.tolist() for name, array in state.to_arrays().items()}
    assert arrays["target"] == [10.0]
    assert arrays["frequent"] == [0, 1]
    assert arrays["recent_ghosts"] == [2]


def test_arc_keeps_the_directory_within_twice_the_budget():
    stream = popular_stream(7, equal=False)
    state, _ = assert_equals_reference(ARC(), REFERENCES["arc"], stream)
    arrays, sizes = state.to_arrays(), np.array(stream.key_bytes)
    recent, frequent, recent_ghosts, frequent_ghosts = (
        sizes[arrays[name]].sum()
        for name in ("recent", "frequent", "recent_ghosts", "frequent_ghosts")
    )
    assert recent + recent_ghosts <= stream.budget
    assert recent + frequent + recent_ghosts + frequent_ghosts <= 2 * stream.budget


def test_w_tinylfu_keeps_a_used_set_through_a_scan():
    hot = [[key] for _ in range(20) for key in range(90)]
    scan = [[key] for key in range(100, 900)]
    state, _ = serve(WTinyLFU(), [1] * 1000, 100, hot + scan)
    assert state.contains()[:90].all()
    lru, _ = serve(LRU(), [1] * 1000, 100, hot + scan)
    assert not lru.contains()[:90].any()


def test_w_tinylfu_counts_one_use_per_load_and_key_resident_or_not():
    state, _ = serve(WTinyLFU(), [1] * 5, 1, [[0, 0, 1], [1, 1], [2]])
    assert state.to_arrays()["uses"].tolist() == [1, 2, 1, 0, 0]


def test_w_tinylfu_halves_counts_after_each_sample():
    # Half of the four keys fit: 2 * 2 uses make a sample.
    state, _ = serve(WTinyLFU(None, sample_factor=2), [1] * 4, 2, [[0], [0], [0], [1]])
    arrays = state.to_arrays()
    assert (arrays["uses"].tolist(), arrays["sample"].tolist()) == ([1, 0, 0, 0], [2])


# --- shares ---------------------------------------------------------------------------------------


def test_share_is_that_of_the_fraction_as_written():
    assert int(0.57 * 100) == 56
    assert share_of(100, SLRU(None, 0.57), "protected_frac") == 57
    assert share_of(100, SLRU(None, 0.57), "protected_frac", rest=True) == 43
    assert share_of(99, SLRU(None, np.float64(0.1)), "protected_frac") == 9
    assert share_of(2**70, SLRU(None, 1), "protected_frac") == 2**70


@pytest.mark.parametrize("frac", [-0.1, 1.5, float("nan"), "half", True, None])
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (SLRU, "protected_frac"),
        (S3FIFO, "small_frac"),
        (WTinyLFU, "window_frac"),
        (WTinyLFU, "protected_frac"),
    ],
)
def test_start_refuses_what_is_no_share(policy, name, frac):
    with pytest.raises(PolicyError, match=rf"{name} must be a number in \[0, 1\]; got .* in "):
        policy(**{name: frac}).start([1, 1], 2)


@pytest.mark.parametrize("factor", [0, -1, 2.5, True, None])
def test_start_refuses_a_sample_that_is_none(factor):
    with pytest.raises(PolicyError, match="sample_factor must be an integer of at least 1; got"):
        WTinyLFU(sample_factor=factor).start([1, 1], 2)
