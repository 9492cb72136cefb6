"""Lossy policies at full strength: they fire, and whatever they do no missing expert is touched."""

import json
import mmap

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.routing import (
    CachePrior,
    DropCold,
    FewerExperts,
    RandomDrop,
    RandomSubstitute,
    RoutingPolicy,
)
from bmoe_lab.schema import Action, Phase, Residency
from bmoe_lab.seam import tensors
from tests.gates.harness import N_PREFILL, assert_same_bits, open_session, streamed

pytestmark = [
    pytest.mark.gate,
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning"),
]

FULL_STRENGTH = [
    DropCold(1.0),
    DropCold(1.0, prefill=True),
    DropCold(1.0, renormalise=False),
    CachePrior(1.0),
    CachePrior(1.0, range="running"),
    RandomDrop(1.0),
    RandomSubstitute(1.0),
    RandomSubstitute(1.0, prefill=True),
    FewerExperts(1),
]
DROPPING = (DropCold, RandomDrop, FewerExperts)
LAYOUTS = ["demo", "fused", "shared", "biased"]


class PreferResident(RoutingPolicy):
    """A user's own selection: the last slot goes to the lowest resident expert not chosen."""

    def select(self, routing):
        ids = routing.ids.copy()
        for row in ids:
            others = np.setdiff1d(np.flatnonzero(routing.resident), row)
            if len(others):
                row[-1] = others[0]
        return ids


class HalveTheLast(RoutingPolicy):
    """A user's own weights: half of the last slot's goes to the first."""

    def weigh(self, routing):
        weights = routing.weights.copy()
        moved = weights[:, -1] / 2
        weights[:, -1] -= moved
        weights[:, 0] += moved
        return weights


class LastNotResident(RoutingPolicy):
    """A user's own mask: without the last slot if it would have to be read."""

    def weigh(self, routing):
        drop = np.zeros(routing.ids.shape, bool)
        drop[:, -1] = ~routing.resident[routing.ids[:, -1]]
        return drop


@pytest.fixture(params=LAYOUTS)
def case(request, demo_case, tiny_case):
    return demo_case if request.param == "demo" else tiny_case(request.param)


@pytest.fixture(scope="module")
def lossless_trace(demo_case):
    with open_session(demo_case, cache="1 GiB") as session:
        return streamed(session, demo_case, record="ids")[1].trace


def evicting_cache(case) -> int:
    """Return a budget of one and a half token cycles: it hits, and evicts in every evaluation."""
    with open_session(case, cache=0) as session:
        return session.token_cycle_bytes * 3 // 2


def watch_loads(session, case):
    """After each load compare memory with the file for each expert that the graph will use."""
    live = session._model
    inner = live.streamer.load
    seen = {"experts": 0}
    with open(case.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def load(layer, ids):
        result = inner(layer, ids)
        used = int(live.n_used[layer])
        in_graph = np.zeros((512, used), np.int32)
        n = tensors.gather_ids(live._filter.address(2 * layer), used, in_graph)
        np.testing.assert_array_equal(in_graph[:n], ids)
        experts = np.unique(in_graph[:n])
        assert live.streamer.resident(layer)[experts].all()
        for stack in live.streamer._stacks[layer]:
            for expert in experts.tolist():
                start = stack.offset + expert * stack.slice_bytes
                stop = start + stack.slice_bytes
                origin = stack.arena.origin
                assert stack.arena.view[start - origin : stop - origin] == content[start:stop]
        seen["experts"] += len(experts)
        return result

    live.streamer.load = load
    return seen


@pytest.mark.parametrize("policy", FULL_STRENGTH, ids=repr)
@pytest.mark.parametrize("cache", ["large", "evicting"])
def test_policy_at_full_strength_fires_and_uses_residents_only(case, policy, cache):
    budget = "1 GiB" if cache == "large" else evicting_cache(case)
    with open_session(case, cache=budget) as session:
        seen = watch_loads(session, case)
        logits, run = streamed(session, case, policy=policy)
    counters = run.summary.counters
    assert np.isfinite(logits).all()
    assert seen["experts"] > 0
    assert run.summary.fired
    assert counters.changed > 0
    assert counters.changed == counters.dropped + counters.substituted
    assert (counters.dropped > 0) == isinstance(policy, DROPPING)
    assert (logits.view(np.uint32) != case.expected.view(np.uint32)).any()
    if cache == "evicting":
        assert run.summary.decode.evictions > 0


@pytest.mark.parametrize("policy", [RandomDrop(1.0), FewerExperts(1)], ids=repr)
def test_policy_that_changes_all_it_may_has_a_rate_of_one(case, policy):
    with open_session(case, cache="1 GiB") as session:
        _, run = streamed(session, case, policy=policy)
    counters = run.summary.counters
    assert counters.rate == 1.0
    assert counters.routings == len(session_layers(case)) * 48


def session_layers(case):
    with open_session(case, cache=0) as session:
        return session.info()["blocks"]


@pytest.mark.parametrize("policy", [CachePrior(1.0), RandomSubstitute(1.0)], ids=repr)
def test_policy_with_nothing_resident_warns_that_it_never_fired(demo_case, policy):
    """Below one token cycle a global LRU has lost a layer's experts when the layer comes again."""
    with (
        open_session(demo_case, cache=evicting_cache(demo_case) // 3) as session,
        pytest.warns(bl.errors.PolicyNeverFiredWarning, match="never fired"),
    ):
        logits, run = streamed(session, demo_case, policy=policy)
    assert_same_bits(logits, demo_case.expected)
    assert not run.summary.fired
    assert any("token cycle" in caution for caution in run.summary.cautions)


@pytest.mark.parametrize("policy", [RandomDrop(0.5), RandomSubstitute(0.5)], ids=repr)
def test_policy_with_same_seed_gives_same_bits_and_another_seed_others(demo_case, policy):
    with open_session(demo_case, cache=evicting_cache(demo_case)) as session:
        first, _ = streamed(session, demo_case, policy=policy, seed=7)
        other, _ = streamed(session, demo_case, policy=policy, seed=8)
        again, _ = streamed(session, demo_case, policy=policy, seed=7)
    assert_same_bits(again, first)
    assert (other.view(np.uint32) != first.view(np.uint32)).any()


@pytest.mark.parametrize("policy", FULL_STRENGTH, ids=repr)
def test_policy_run_is_the_same_whatever_is_recorded(demo_case, policy):
    with open_session(demo_case, cache=evicting_cache(demo_case)) as session:
        bare, first = streamed(session, demo_case, policy=policy)
        recorded, second = streamed(session, demo_case, policy=policy, record="scores")
    assert_same_bits(recorded, bare)
    assert first.summary.counters == second.summary.counters


def cells(trace, name, phase=Phase.decode):
    return trace[name].values[trace.phase.values == phase]


@pytest.mark.parametrize("policy", FULL_STRENGTH, ids=repr)
@pytest.mark.parametrize("layout", ["demo", "biased"])
def test_trace_of_policy_agrees_with_its_counters(layout, demo_case, tiny_case, policy):
    case = demo_case if layout == "demo" else tiny_case(layout)
    with open_session(case, cache=evicting_cache(case)) as session:
        _, run = streamed(session, case, policy=policy, record="scores")
    trace, counters = run.trace, run.summary.counters
    action = trace.action.values
    dropped, substituted = action == Action.dropped, action == Action.substituted
    chosen, applied = trace.expert_chosen.values, trace.expert_applied.values
    weight, given = trace.weight_applied.values, trace.weight_chosen.values

    assert dropped.sum() == counters.dropped
    assert substituted.sum() == counters.substituted
    routed = action != Action.not_routed
    changes_prefill = Phase.prefill in policy.phases
    acted = routed & (changes_prefill | (trace.phase.values == Phase.decode)[:, None, None])
    assert acted.sum() == counters.examined
    # Nothing is said to be kept that changed.
    assert (applied[action == Action.kept] == chosen[action == Action.kept]).all()
    assert (applied[dropped] != chosen[dropped]).all()
    assert (applied[substituted] != chosen[substituted]).all()
    assert (weight[dropped] == 0).all()
    assert (weight[routed & ~dropped] != 0).all()
    np.testing.assert_allclose(given[dropped].sum(dtype=float), counters.weight_discarded, 1e-5)

    rows = dropped.any(axis=2)
    if rows.any():
        kept_sum = np.where(dropped, 0, given)[rows].sum(axis=1, dtype=float)
        expected = given[rows].sum(axis=1, dtype=float) if policy.renormalise else kept_sum
        np.testing.assert_allclose(weight[rows].sum(axis=1, dtype=float), expected, rtol=1e-5)
        # A stand-in is the best expert that its row keeps, and never read for its own sake.
        best = np.where(dropped, -np.inf, given).argmax(axis=2)[..., None]
        stand_in = np.take_along_axis(applied, best, axis=2)
        assert (np.broadcast_to(stand_in, applied.shape)[dropped] == applied[dropped]).all()
    untouched = routed & ~(dropped | substituted).any(axis=2)[..., None]
    np.testing.assert_array_equal(
        weight[untouched].view(np.uint32), given[untouched].view(np.uint32)
    )

    assert trace.attrs["lossless"] == 0
    assert trace.attrs["policy_fired"] == 1
    assert trace.attrs["policy"] == repr(policy)
    assert json.loads(trace.attrs["policy_counters"]) == counters.to_dict()


def test_trace_of_drop_cold_drops_exactly_the_cold_and_light(demo_case):
    """The rule, written down once more over the recorded weights and residency."""
    with open_session(demo_case, cache=evicting_cache(demo_case)) as session:
        _, run = streamed(session, demo_case, policy=DropCold(0.8), record="ids")
    weight, residency = cells(run.trace, "weight_chosen"), cells(run.trace, "residency")
    threshold = 0.8 * weight.sum(axis=2, keepdims=True, dtype=float) / weight.shape[2]
    expected = (residency == Residency.miss) & (weight < threshold)
    expected &= weight != weight.max(axis=2, keepdims=True)
    np.testing.assert_array_equal(cells(run.trace, "action") == Action.dropped, expected)
    assert expected.any()


@pytest.mark.parametrize("layout", ["demo", "biased"])
def test_trace_of_cache_prior_keeps_the_best_and_takes_residents(layout, demo_case, tiny_case):
    case = demo_case if layout == "demo" else tiny_case(layout)
    with open_session(case, cache=evicting_cache(case)) as session:
        _, run = streamed(session, case, policy=CachePrior(1.0), record="scores")
    chosen, applied = cells(run.trace, "expert_chosen"), cells(run.trace, "expert_applied")
    scores = cells(run.trace, "router_score")
    best = scores.argmax(axis=2)
    assert (applied == best[..., None]).any(axis=2).all()
    substituted = cells(run.trace, "action") == Action.substituted
    # At full strength any resident beats any missing expert, so a newcomer is resident.
    assert (cells(run.trace, "residency")[substituted] == Residency.hit).all()
    assert (cells(run.trace, "read_bytes")[substituted] == 0).all()
    assert substituted.any()
    same_set = (np.sort(chosen) == np.sort(applied)).all(axis=2)
    np.testing.assert_array_equal(same_set, ~substituted.any(axis=2))


@pytest.mark.parametrize("policy", [DropCold(1.0), CachePrior(1.0), RandomDrop(1.0)], ids=repr)
def test_policy_that_acts_in_decode_leaves_prefill_alone(demo_case, policy, lossless_trace):
    with open_session(demo_case, cache="1 GiB") as session:
        _, run = streamed(session, demo_case, policy=policy, record="ids")
    for name in ("expert_applied", "weight_applied", "expert_chosen", "residency"):
        np.testing.assert_array_equal(
            run.trace[name].values[:N_PREFILL], lossless_trace[name].values[:N_PREFILL]
        )
    assert np.isin(cells(run.trace, "action", Phase.prefill), (Action.kept, 255)).all()


def test_users_select_runs_the_experts_that_it_names(case):
    with open_session(case, cache=evicting_cache(case)) as session:
        seen = watch_loads(session, case)
        logits, run = streamed(session, case, policy=PreferResident(), record="ids")
    action = cells(run.trace, "action")
    assert np.isfinite(logits).all()
    assert seen["experts"] > 0
    assert run.summary.counters.substituted == (action == Action.substituted).sum() > 0
    assert (action[..., :-1] == Action.kept).all()
    newcomers = action == Action.substituted
    assert (cells(run.trace, "residency")[newcomers] == Residency.hit).all()


def test_users_weights_are_applied_and_their_experts_read(case):
    with open_session(case, cache=evicting_cache(case)) as session:
        logits, run = streamed(session, case, policy=HalveTheLast(), record="ids")
    action = cells(run.trace, "action")
    assert np.isfinite(logits).all()
    assert run.summary.counters.reweighted == (action == Action.reweighted).sum() > 0
    assert run.summary.fired
    given, weight = cells(run.trace, "weight_chosen"), cells(run.trace, "weight_applied")
    np.testing.assert_array_equal(weight[..., -1], given[..., -1] / 2)
    np.testing.assert_array_equal(
        cells(run.trace, "expert_applied"), cells(run.trace, "expert_chosen")
    )
    assert (logits.view(np.uint32) != case.expected.view(np.uint32)).any()


def test_users_mask_drops_what_it_marks(case):
    with open_session(case, cache=evicting_cache(case)) as session:
        logits, run = streamed(session, case, policy=LastNotResident(), record="ids")
    action, residency = cells(run.trace, "action"), cells(run.trace, "residency")
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(
        action[..., -1] == Action.dropped, residency[..., -1] == Residency.miss
    )
    assert run.summary.counters.dropped > 0


def test_poison_shows_an_expert_that_was_dropped_but_not_repointed(demo_case, monkeypatch):
    """Test the test: a slot of weight 0 that still names a missing expert makes NaN."""
    monkeypatch.setattr(tensors, "scatter_ids", lambda tensor, ids: None)
    with open_session(demo_case, cache=evicting_cache(demo_case)) as session:
        logits, _ = streamed(session, demo_case, policy=DropCold(1.0))
    assert np.isnan(logits).any()
