"""The shipped routing policies: the public suite, and their rules against plain Python twins."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import routing, schema
from bmoe_lab.errors import PolicyError, UnknownNameError
from bmoe_lab.residency import LRU
from bmoe_lab.routing import (
    CachePrior,
    DropCold,
    Engine,
    FewerExperts,
    Lossless,
    ModelFacts,
    RandomDrop,
    RandomSubstitute,
    Routing,
)
from bmoe_lab.routing import base as routing_base
from bmoe_lab.routing.randomness import mix, uniform
from bmoe_lab.testing.suites import RoutingPolicySuite

# --- plain twins ----------------------------------------------------------------------------------

MASK = 2**64 - 1


def plain_mix(z):
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_uniform(*places):
    h = 0
    for place in places:
        h = plain_mix(h ^ place)
    return (h >> 11) / 2**53


def plain_fewer(policy, seen):
    drop = np.zeros(seen.ids.shape, dtype=bool)
    drop[:, policy.n_used :] = True
    return drop


def plain_drop_cold(policy, seen):
    drop = np.zeros(seen.ids.shape, dtype=bool)
    for row, weights in enumerate(seen.weights.astype(np.float64)):
        threshold = policy.frac * sum(weights) / len(weights)
        for slot, weight in enumerate(weights):
            miss = not seen.resident[seen.ids[row, slot]]
            drop[row, slot] = miss and weight < threshold and slot != np.argmax(weights)
    return drop


def plain_random_drop(policy, seen):
    drop = np.zeros(seen.ids.shape, dtype=bool)
    for row, slot in np.ndindex(*drop.shape):
        u = plain_uniform(seen.seed, seen.layer, int(seen.positions[row]), slot, 0)
        drop[row, slot] = slot != np.argmax(seen.weights[row]) and u < policy.rate
    return drop


def plain_random_substitute(policy, seen):
    out = seen.ids.copy()
    for row, ids in enumerate(seen.ids.tolist()):
        free = [e for e in np.flatnonzero(seen.resident).tolist() if e not in ids]
        for slot in range(1, len(ids)):
            place = (seen.seed, seen.layer, int(seen.positions[row]), slot)
            if plain_uniform(*place, 0) < policy.rate and free:
                out[row, slot] = free.pop(int(plain_uniform(*place, 1) * len(free)))
    return out


def plain_cache_prior(policy, seen):
    """One row at a time; the running range is kept in `policy.ranges_`, a dict of lists."""
    if not hasattr(policy, "ranges_"):
        policy.ranges_ = {}
    out = seen.ids.copy()
    for row, ids in enumerate(seen.ids.tolist()):
        score = {}
        for expert, value in enumerate(seen.scores[row].tolist()):
            if seen.score_kind == "softmax":
                value = math.log(value) if value > 0 else math.nan
            if math.isfinite(value):
                score[expert] = value
        if not score:
            continue
        spread = max(score.values()) - min(score.values())
        if policy.range == "running":
            ranges = policy.ranges_.setdefault(seen.layer, [])
            ranges.append(spread)
            spread = sum(ranges) / len(ranges)
        if policy.strength == 0 or len(score) < len(ids) or not set(ids) <= set(score):
            continue
        best = sorted(ids, key=lambda e: (-score[e], ids.index(e)))[: policy.keep]
        lifted = {
            e: s + policy.strength * spread * bool(seen.resident[e]) for e, s in score.items()
        }
        others = sorted((e for e in lifted if e not in best), key=lambda e: (-lifted[e], e))
        new = best + others[: len(ids) - len(best)]
        newcomers = iter([e for e in new if e not in ids])
        out[row] = [e if e in new else next(newcomers) for e in ids]
    return out


# --- the suite ------------------------------------------------------------------------------------


class TestLossless(RoutingPolicySuite):
    def make_policy(self):
        return Lossless()


class TestFewerExperts(RoutingPolicySuite):
    def make_policy(self):
        return FewerExperts(3)

    def make_full_strength(self):
        return FewerExperts(1)

    def reference(self, policy, routing):
        return plain_fewer(policy, routing)


class TestDropCold(RoutingPolicySuite):
    def make_policy(self):
        return DropCold(0.75)

    def make_full_strength(self):
        return DropCold(1.0)

    def reference(self, policy, routing):
        return plain_drop_cold(policy, routing)


class TestDropColdInPrefill(TestDropCold):
    def make_full_strength(self):
        return DropCold(1.0, renormalise=False, prefill=True)


class TestRandomDrop(RoutingPolicySuite):
    def make_policy(self):
        return RandomDrop(0.3)

    def make_full_strength(self):
        return RandomDrop(1.0)

    def reference(self, policy, routing):
        return plain_random_drop(policy, routing)


class TestRandomSubstitute(RoutingPolicySuite):
    def make_policy(self):
        return RandomSubstitute(0.3)

    def make_full_strength(self):
        return RandomSubstitute(1.0)

    def reference(self, policy, routing):
        return plain_random_substitute(policy, routing)


class TestCachePrior(RoutingPolicySuite):
    def make_policy(self):
        return CachePrior(0.15)

    def make_full_strength(self):
        return CachePrior(1.0, keep=0)

    def reference(self, policy, routing):
        return plain_cache_prior(policy, routing)


class TestCachePriorRunning(TestCachePrior):
    def make_policy(self):
        return CachePrior(0.15, keep=2, range="running")

    def make_full_strength(self):
        return CachePrior(0.5, keep=0, range="running")


# --- made-up routings -----------------------------------------------------------------------------

FACTS = ModelFacts(
    n_layer=2, n_expert=8, n_expert_used=4, cache_budget=2**20, token_cycle_bytes=2**19
)


def seen(ids, *, weights=None, scores=None, resident=(), n_expert=8, kind="other", layer=0):
    ids = np.atleast_2d(np.array(ids, dtype=np.int32))
    mask = np.zeros(n_expert, dtype=bool)
    mask[list(resident)] = True
    as_rows = lambda values: None if values is None else np.atleast_2d(np.float32(values))  # noqa: E731
    return Routing(
        layer=layer,
        block=layer,
        phase=routing_base.DECODE,
        positions=np.arange(len(ids), dtype=np.int32),
        ids=ids,
        scores=as_rows(scores),
        score_kind=kind,
        weights=as_rows(weights),
        resident=mask,
        expert_bytes=100,
        seed=3,
    )


def select(policy, routing):
    selection = Engine(policy, seed=3).select(routing)
    return None if selection is None else selection.ids[0].tolist()


# --- DropCold -------------------------------------------------------------------------------------


def test_drop_cold_drops_only_light_misses():
    looked_at = seen([0, 1, 2, 3], weights=[0.6, 0.2, 0.1, 0.1], resident=[2])
    weighing = Engine(DropCold(0.75)).weigh(looked_at)
    assert weighing.action.tolist() == [[0, 0, 0, 1]]
    assert weighing.ids.tolist() == [[0, 1, 2, 0]]
    np.testing.assert_allclose(weighing.weights, [[0.6 / 0.9, 0.2 / 0.9, 0.1 / 0.9, 0]], rtol=1e-6)


def test_drop_cold_at_exactly_the_threshold_keeps():
    assert Engine(DropCold(1.0)).weigh(seen([0, 1], weights=[0.5, 0.5])) is None
    assert Engine(DropCold(1.0)).weigh(seen([0, 1, 2, 3], weights=[0.25] * 4)) is None


def test_drop_cold_threshold_scales_with_the_weights_of_the_routing():
    scaled = Engine(DropCold(0.5)).weigh(seen([0, 1, 2, 3], weights=[5.6, 2.0, 1.1, 1.3]))
    assert scaled.action.tolist() == [[0, 0, 1, 0]]


def test_drop_cold_never_drops_the_largest_wherever_it_stands():
    weighing = Engine(DropCold(1.0)).weigh(seen([0, 1, 2, 3], weights=[0.1, 0.1, 0.7, 0.1]))
    assert weighing.action.tolist() == [[1, 1, 0, 1]]
    assert weighing.ids.tolist() == [[2, 2, 2, 2]]
    np.testing.assert_allclose(weighing.weights, [[0, 0, 1.0, 0]], rtol=1e-6)


def test_drop_cold_with_one_expert_used_looks_and_changes_nothing():
    engine = Engine(DropCold(1.0))
    assert engine.weigh(seen([5], weights=[0.3])) is None
    assert (engine.counters.examined, engine.counters.eligible) == (1, 0)
    assert math.isnan(engine.counters.rate)


def test_drop_cold_with_a_nan_weight_drops_nothing_on_a_guess():
    looked_at = seen([0, 1, 2, 3], weights=[0.6, math.nan, 0.1, 0.1])
    assert Engine(DropCold(1.0)).weigh(looked_at) is None


def test_drop_cold_without_renormalising_leaves_the_survivors_bits():
    looked_at = seen([0, 1, 2, 3], weights=[0.6, 0.2, 0.1, 0.1], resident=[2])
    weighing = Engine(DropCold(0.75, renormalise=False)).weigh(looked_at)
    assert weighing.weights[0, :3].tobytes() == looked_at.weights[0, :3].tobytes()


def test_drop_cold_says_its_threshold_for_the_model_and_warns_when_narrow():
    policy = DropCold(0.75)
    assert policy.effective(FACTS) == (
        "drops a missing expert whose weight is below 0.1875 of its routing (0.75/4)"
    )
    (caution,) = policy.cautions(FACTS)
    assert "top-4 model" in caution
    assert policy.cautions(ModelFacts(2, 8, 8, 2**20)) == []
    assert DropCold(0.0).effective(FACTS) == "drops nothing"


@pytest.mark.parametrize("frac", [math.nan, -0.1, 1.1, math.inf, "0.5", None, True])
def test_drop_cold_refuses_a_meaningless_fraction(frac):
    with pytest.raises(PolicyError, match=r"frac must be a number in \[0, 1\]; got "):
        DropCold(frac).check(FACTS)


# --- CachePrior -----------------------------------------------------------------------------------

SCORES = [8.0, 7.0, 6.0, 5.0, 4.9, 4.0, 1.0, 0.0]


def test_cache_prior_takes_a_resident_expert_that_scored_a_little_less():
    looked_at = seen([0, 1, 2, 3], scores=SCORES, resident=[4])
    assert select(CachePrior(0.02), looked_at) == [0, 1, 2, 4]
    assert select(CachePrior(0.01), looked_at) is None


def test_cache_prior_keeps_the_best_unless_told_not_to():
    looked_at = seen([0, 1, 2, 3], scores=SCORES, resident=[4, 5, 6, 7])
    assert select(CachePrior(1.0), looked_at) == [0, 4, 5, 6]
    assert select(CachePrior(1.0, keep=3), looked_at) == [0, 1, 2, 4]
    # Lifted by the whole range, 4...7 score 12.9, 12, 9 and 8; expert 0 has 8 and the lower id.
    assert select(CachePrior(1.0, keep=0), looked_at) == [0, 4, 5, 6]
    assert select(CachePrior(1.0, keep=4), looked_at) is None


def test_cache_prior_at_a_tie_takes_the_lower_id():
    scores = [8.0, 7.0, 6.0, 5.0, 0.0, 5.0, 5.0, 5.0]
    assert select(CachePrior(0.5), seen([0, 1, 2, 7], scores=scores)) == [0, 1, 2, 3]
    assert select(CachePrior(0.5), seen([0, 1, 2, 3], scores=scores, resident=[6, 5])) == [
        0,
        1,
        5,
        6,
    ]
    assert select(CachePrior(0.0), seen([0, 1, 2, 7], scores=scores)) is None


def test_cache_prior_leaves_the_order_alone_if_the_set_is_the_same():
    looked_at = seen([0, 1, 2, 3], scores=SCORES, resident=[3])
    assert select(CachePrior(0.5), looked_at) is None


def test_cache_prior_writes_newcomers_into_the_slots_of_those_who_leave():
    looked_at = seen([0, 1, 2, 3], scores=SCORES, resident=[1, 3, 5])
    assert select(CachePrior(0.4), looked_at) == [0, 1, 5, 3]


def test_cache_prior_never_takes_a_masked_expert():
    scores = [*SCORES[:4], -math.inf, math.nan, 1.0, math.inf]
    looked_at = seen([0, 1, 2, 3], scores=scores, resident=[4, 5, 6, 7])
    assert select(CachePrior(1.0), looked_at) == [0, 1, 2, 6]


@pytest.mark.parametrize(
    "scores",
    [
        [8.0, 7.0, 6.0, *[-math.inf] * 5],  # fewer finite scores than slots
        [8.0, 7.0, 6.0, math.nan, 5.0, 4.0, 3.0, 2.0],  # a chosen score is no number
        [-math.inf] * 8,
        [math.nan] * 8,
    ],
)
def test_cache_prior_leaves_a_token_with_broken_scores_alone(scores):
    assert select(CachePrior(1.0), seen([0, 1, 2, 3], scores=scores, resident=[5, 6])) is None


def test_cache_prior_compares_logarithms_of_a_softmax():
    probabilities = np.float32([0.4, 0.3, 0.2, 0.05, 0.03, 0.01, 0.005, 0.005])
    looked_at = seen([0, 1, 2, 3], scores=probabilities, resident=[5], kind="softmax")
    assert select(CachePrior(0.37), looked_at) == [0, 1, 2, 5]
    assert select(CachePrior(0.36), looked_at) is None  # ln(5) / ln(80) = 0.367
    as_given = seen([0, 1, 2, 3], scores=probabilities, resident=[5], kind="other")
    assert select(CachePrior(0.11), as_given) == [0, 1, 2, 5]  # 0.04 / 0.395 = 0.101


def test_cache_prior_of_a_softmax_takes_a_zero_for_masked():
    probabilities = [0.5, 0.3, 0.15, 0.05, 0.0, 0.0, 0.0, 0.0]
    looked_at = seen([0, 1, 2, 3], scores=probabilities, resident=[4, 5], kind="softmax")
    assert select(CachePrior(1.0), looked_at) is None


def test_cache_prior_running_range_is_the_layers_mean_so_far():
    engine = Engine(CachePrior(0.02, range="running"))
    narrow = [5.4, 5.3, 5.2, 5.0, 4.9, 4.8, 4.7, 4.6]  # range 0.8: a bonus of 0.016 is too little
    assert engine.select(seen([0, 1, 2, 3], scores=narrow, resident=[4])) is None
    wide = [*SCORES[:4], 4.91, 4.0, 1.0, 0.0]  # mean range now 4.4: 0.088 is not enough for 0.09
    assert engine.select(seen([0, 1, 2, 3], scores=wide, resident=[4])) is None
    assert engine.select(seen([0, 1, 2, 3], scores=wide, resident=[4])) is not None  # 5.6: 0.112
    assert engine.select(seen([0, 1, 2, 3], scores=narrow, resident=[4], layer=1)) is None
    engine.policy.reset(0)
    assert engine.select(seen([0, 1, 2, 3], scores=narrow, resident=[4])) is None


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["other", "softmax"]),
    st.sampled_from(["token", "running"]),
    st.integers(0, 5),
    st.floats(0, 1),
)
def test_cache_prior_equals_plain_version_on_rough_scores(seed, kind, mean, keep, strength):
    rng = np.random.default_rng(seed)
    # Few distinct values: many ties. Some experts are masked.
    scores = rng.integers(0 if kind == "softmax" else -3, 4, size=(5, 8)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = rng.choice([-np.inf, np.nan])
    ids = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")[:, :4]
    looked_at = seen(ids, scores=scores, resident=np.flatnonzero(rng.random(8) < 0.5), kind=kind)
    policy = CachePrior(strength, keep=keep, range=mean)
    actual = policy.run_kernel(looked_at)
    expected = plain_cache_prior(CachePrior(strength, keep=keep, range=mean), looked_at)
    np.testing.assert_array_equal(looked_at.ids if actual is None else actual, expected)


def test_cache_prior_refuses_a_meaningless_set_up():
    for policy, message in (
        (CachePrior(math.nan), "strength must be a number in"),
        (CachePrior(2.0), "strength must be a number in"),
        (CachePrior(0.1, keep=-1), "keep must be a whole number of at least 0"),
        (CachePrior(0.1, keep=1.5), "keep must be a whole number"),
        (CachePrior(0.1, keep=5), "keep must be at most the 4 experts"),
        (CachePrior(0.1, range="tokens"), r"range must be one of .* Did you mean 'token'\?"),
    ):
        with pytest.raises(PolicyError, match=message):
            policy.check(FACTS)


def test_cache_prior_says_what_it_comes_to():
    assert CachePrior(0.15).effective(FACTS) == (
        "lifts a resident expert by 0.15 of the token's score range; 3 of 4 slots may change"
    )
    assert CachePrior(0.15, keep=4).effective(FACTS) == "substitutes nothing"
    assert "never change" in CachePrior(0.15, keep=4).cautions(FACTS)[0]


# --- controls, FewerExperts -----------------------------------------------------------------------


def test_uniform_is_splitmix64_of_its_place():
    assert int(mix(np.uint64(0))) == 0xE220A8397B1DCDAF
    for place in ((0, 0, 0, 0, 0), (7, 47, 2047, 7, 1), (2**62, 1, 2, 3, 0)):
        assert uniform(*place) == plain_uniform(*place)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("control", [RandomDrop, RandomSubstitute])
def test_control_changes_as_many_slots_as_its_rate_says(control, rate):
    rng = np.random.default_rng(0)
    n_row = 4000
    ids = np.argsort(rng.random((n_row, 32)), axis=1)[:, :4]
    looked_at = seen(ids, weights=rng.random((n_row, 4)), resident=range(32), n_expert=32)
    engine = Engine(control(rate), seed=3)
    engine.select(looked_at)
    engine.weigh(looked_at)
    standard_error = math.sqrt(rate * (1 - rate) / (3 * n_row))
    assert abs(engine.counters.rate - rate) < 4 * standard_error
    assert engine.counters.rate == engine.counters.control_rate


def test_random_substitute_draws_every_resident_expert_alike():
    n_row = 8000
    looked_at = seen(np.tile([0, 1], (n_row, 1)), resident=[0, 1, 3, 4, 6, 7])
    ids = Engine(RandomSubstitute(1.0), seed=3).select(looked_at).ids
    assert set(ids[:, 0].tolist()) == {0}
    counts = np.bincount(ids[:, 1], minlength=8)
    assert np.flatnonzero(counts).tolist() == [3, 4, 6, 7]
    assert np.abs(counts[[3, 4, 6, 7]] - n_row / 4).max() < 4 * math.sqrt(n_row * 3 / 16)


def test_random_substitute_without_a_candidate_leaves_the_slot_and_counts_it():
    engine = Engine(RandomSubstitute(1.0), seed=3)
    selection = engine.select(seen([0, 1, 2, 3], resident=[0, 1, 6]))
    assert selection.ids.tolist() == [[0, 6, 2, 3]]
    assert engine.policy.extra_counts() == {"without_candidate": 2}
    engine.policy.reset(3)
    assert engine.policy.extra_counts() == {"without_candidate": 0}


def test_controls_choose_differently_for_another_seed():
    looked_at = seen(np.tile([0, 1, 2, 3], (50, 1)), weights=np.tile([0.4, 0.3, 0.2, 0.1], (50, 1)))
    first = RandomDrop(0.5).run_kernel(looked_at)
    looked_at.seed = 4
    assert (first != RandomDrop(0.5).run_kernel(looked_at)).any()


def test_fewer_experts_keeps_the_routers_best_even_if_another_weighs_more():
    weighing = Engine(FewerExperts(2)).weigh(seen([0, 1, 2, 3], weights=[0.3, 0.2, 0.4, 0.1]))
    assert weighing.action.tolist() == [[0, 0, 1, 1]]
    assert weighing.ids.tolist() == [[0, 1, 0, 0]]
    np.testing.assert_allclose(weighing.weights, [[0.6, 0.4, 0, 0]], rtol=1e-6)


def test_fewer_experts_refuses_more_than_the_model_uses():
    with pytest.raises(PolicyError, match="n_used must be at most the 4 experts"):
        FewerExperts(5).check(FACTS)
    with pytest.raises(PolicyError, match="n_used must be a whole number of at least 1; got 0"):
        FewerExperts(0).check(FACTS)
    FewerExperts(None).check(FACTS)


# --- what all have in common ----------------------------------------------------------------------

ALL = [Lossless(), FewerExperts(2), DropCold(0.5), CachePrior(0.1), RandomDrop(0.1)]
ALL += [RandomSubstitute(0.1)]


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_registry_knows_every_policy_by_its_name(policy):
    assert routing.get(policy.name) is type(policy)


def test_registry_answers_a_wrong_name_with_the_closest():
    with pytest.raises(UnknownNameError, match="Did you mean 'drop_cold'"):
        routing.get("drop_clod")


@pytest.mark.parametrize("policy", [p for p in ALL if not p.lossless], ids=repr)
def test_every_lossy_policy_cites_its_source(policy):
    assert policy.citation


def test_repr_shows_required_and_changed_parameters_only():
    assert repr(DropCold(0.75)) == "DropCold(frac=0.75)"
    assert repr(DropCold(0.75, True, True)) == "DropCold(frac=0.75, prefill=True)"
    assert repr(CachePrior(0.15, 2, "running")) == (
        "CachePrior(strength=0.15, keep=2, range='running')"
    )


def test_equality_is_by_class_and_parameters():
    assert DropCold(0.5) == DropCold(0.5)
    assert DropCold(1) == DropCold(1.0)
    assert len({DropCold(1), DropCold(1.0)}) == 1
    assert DropCold(0.5) != DropCold(0.4)
    assert RandomDrop(0.5) != RandomSubstitute(0.5)


def test_policy_that_looks_at_the_cache_warns_below_one_token_cycle():
    facts = ModelFacts(2, 8, 8, cache_budget=2**18, token_cycle_bytes=2**19)
    (caution,) = CachePrior(0.1).cautions(facts)
    assert "256.0 KiB" in caution
    assert "512.0 KiB" in caution
    assert RandomDrop(0.1).cautions(facts) == []


def test_phases_and_actions_have_the_values_of_the_trace():
    from bmoe_lab.residency import loads as residency_loads
    from bmoe_lab.routing import engine

    assert schema.Phase.prefill == routing_base.PREFILL
    assert schema.Phase.decode == routing_base.DECODE
    for name in ("KEPT", "DROPPED", "SUBSTITUTED", "REWEIGHTED"):
        assert getattr(engine, name) == schema.Action[name.lower()]
    assert schema.Residency.miss == residency_loads.MISS
    assert schema.Residency.hit == residency_loads.HIT


@pytest.mark.parametrize(
    "policy",
    [
        FewerExperts(1),
        DropCold(1.0),
        CachePrior(1.0, keep=0),
        CachePrior(1.0, range="running"),
        RandomDrop(1.0),
        RandomSubstitute(1.0),
    ],
    ids=repr,
)
def test_policy_over_a_cache_that_evicts_constantly_fires_and_names_only_what_is_loaded(policy):
    n_layer, n_expert, n_used = 3, 16, 4
    state = LRU().start(np.full(n_layer * n_expert, 10), 18 * 10, n_layer=n_layer)
    engine = Engine(policy, seed=1)
    rng = np.random.default_rng(1)
    for position in range(150):
        for layer in range(n_layer):
            scores = rng.normal(size=(1, n_expert)).astype(np.float32)
            looked_at = Routing(
                layer=layer,
                block=layer,
                phase=routing_base.DECODE,
                positions=np.array([position], dtype=np.int32),
                ids=np.argsort(-scores, axis=1)[:, :n_used].astype(np.int32),
                scores=scores,
                score_kind="other",
                weights=None,
                resident=state.contains().reshape(n_layer, n_expert)[layer],
                expert_bytes=10,
                seed=1,
            )
            selection = engine.select(looked_at)
            if selection is not None:
                looked_at.ids = selection.ids
            looked_at.weights = RoutingPolicySuite.weights_of(looked_at, looked_at.ids)
            weighing = engine.weigh(looked_at)
            applied = looked_at.ids if weighing is None else weighing.ids
            keys = applied.ravel() + layer * n_expert
            state.load(keys)
            assert state.contains()[keys].all()
    assert engine.counters.fired
    if not isinstance(policy, CachePrior | RandomSubstitute):  # these live on what they have
        assert state.evictions > 100


# --- recorded runs of 26B-120B models -------------------------------------------------------------

# Reads avoided %, weight discarded %, routings dropped % in decode: static (the recorded residency
# stands) as published or recomputed with the data, dynamic (LRU simulated again) as recomputed.
STATIC = {
    "qwen": {0.25: (0.07, 0.00, 0.01), 0.5: (5.84, 0.49, 1.13), 1.0: (66.13, 9.46, 13.07)},
    "gemma": {0.25: (1.92, 0.06, 0.32), 0.5: (13.30, 0.87, 2.36), 1.0: (67.35, 8.18, 12.21)},
    "gptoss": {0.25: (0.08, 0.01, 0.04), 0.5: (1.69, 0.36, 0.93), 1.0: (54.45, 25.19, 30.03)},
}
DYNAMIC = {
    "qwen": {0.5: (6.79, 0.53, 1.23), 0.75: (45.01, 4.91, 8.11), 1.0: (72.87, 12.15, 17.02)},
    "gemma": {0.5: (16.51, 1.00, 2.74), 0.75: (45.22, 4.84, 9.08), 1.0: (73.07, 10.89, 16.75)},
    "gptoss": {0.5: (1.61, 0.41, 1.06), 0.75: (10.46, 4.34, 6.97), 1.0: (54.76, 27.73, 33.18)},
}
BUDGET_MIB = {"qwen": 4000, "gemma": 4000, "gptoss": 3000}
N_EXPERT = 128


def recorded(tag):
    """Return (expert bytes per layer, prefill keys per layer, decode cells) of a recorded run."""
    folder = os.environ.get("BMOE_LAB_REFERENCE_DATA")
    if not folder:
        pytest.skip("BMOE_LAB_REFERENCE_DATA is not set")
    path = Path(folder) / "bigmoeonedge" / "2026-07-15-route-trace" / f"{tag}.route.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the reference data")
    with path.open() as lines:
        preamble = [line for line in lines if line.startswith("# layer=")]
    sizes = [int(line.split("expert_bytes=")[1].split()[0]) for line in preamble]
    rows = pd.read_csv(path, comment="#")
    prefill = rows[rows["phase"] == 0].sort_values(["layer", "step", "slot"])
    prompts = [
        group["expert"].to_numpy() + layer * N_EXPERT for layer, group in prefill.groupby("layer")
    ]
    decode = rows[rows["phase"] == 1].sort_values(["step", "layer", "slot"])
    shape = (-1, int(decode["slot"].max()) + 1)
    columns = ["step", "layer", "expert", "weight", "residency"]
    cells = list(zip(*(decode[name].to_numpy().reshape(shape) for name in columns), strict=True))
    return sizes, prompts, cells


def at_cell(step, layer, ids, weights, resident, expert_bytes):
    return Routing(
        layer=int(layer),
        block=int(layer),
        phase=routing_base.DECODE,
        positions=np.array([step], dtype=np.int32),
        ids=ids[None].astype(np.int32),
        scores=None,
        score_kind="other",
        weights=weights[None].astype(np.float32),
        resident=resident,
        expert_bytes=expert_bytes,
    )


def figures(counters, saved_bytes, miss_bytes):
    return (
        round(100 * saved_bytes / miss_bytes, 2),
        round(100 * counters.weight_discarded_frac, 2),
        round(100 * counters.dropped / counters.examined, 2),
    )


@pytest.mark.reference_data
@pytest.mark.parametrize("tag", STATIC)
def test_drop_cold_reproduces_the_static_figures_of_recorded_runs(tag):
    sizes, _, cells = recorded(tag)
    for frac, expected in STATIC[tag].items():
        engine = Engine(DropCold(frac))
        miss_bytes = 0
        for step, layers, ids, weights, residency in cells:
            layer = layers[0]
            resident = np.zeros(N_EXPERT, dtype=bool)
            resident[ids[residency != 0]] = True
            miss_bytes += sizes[layer] * int((residency == 0).sum())
            engine.weigh(at_cell(step[0], layer, ids, weights, resident, sizes[layer]))
        assert figures(engine.counters, engine.counters.bytes_saved, miss_bytes) == expected, frac


@pytest.mark.reference_data
@pytest.mark.parametrize("tag", DYNAMIC)
def test_drop_cold_over_lru_reproduces_the_dynamic_figures_of_recorded_runs(tag):
    sizes, prompts, cells = recorded(tag)
    lossless_bytes = sum(
        sizes[layers[0]] * int((residency == 0).sum()) for _, layers, _, _, residency in cells
    )
    for frac, expected in DYNAMIC[tag].items():
        engine = Engine(DropCold(frac))
        state = LRU().start(np.repeat(sizes, N_EXPERT), BUDGET_MIB[tag] * 2**20, n_layer=len(sizes))
        for keys in prompts:
            state.load(keys)
        read_bytes = 0
        for step, layers, ids, weights, _ in cells:
            layer = int(layers[0])
            resident = state.contains().reshape(len(sizes), N_EXPERT)[layer]
            looked_at = at_cell(step[0], layer, ids, weights, resident, sizes[layer])
            weighing = engine.weigh(looked_at)
            applied = looked_at.ids if weighing is None else weighing.ids
            load = state.load(applied[0] + layer * N_EXPERT)
            read_bytes += load.missing.size * sizes[layer]
        # Against what the recorded, lossless run read: dropped experts stay missing, so the sum of
        # what is saved at each cell would count some of them several times.
        saved = lossless_bytes - read_bytes
        assert figures(engine.counters, saved, lossless_bytes) == expected, frac
