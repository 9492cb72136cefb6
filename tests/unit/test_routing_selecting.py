"""Policies that choose other experts: the public suite, and their rules written down once more."""

import itertools
import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import PolicyError
from bmoe_lab.routing import (
    Buddy,
    CachePrior,
    CumSum,
    Engine,
    MaxRank,
    ModelFacts,
    ResidentOnly,
)
from bmoe_lab.routing.ranking import rank_first
from bmoe_lab.testing import make_trace
from bmoe_lab.testing.suites import RoutingPolicySuite
from tests.unit.routing_cases import FACTS, rough_scores, seen, select

# --- plain twins ----------------------------------------------------------------------------------


def ranking(seen, row):
    """Return the experts with a score, best first; empty if the token cannot be ranked."""
    ids = seen.ids[row].tolist()
    score = {e: s for e, s in enumerate(seen.scores[row].tolist()) if math.isfinite(s)}
    if len(score) < len(ids) or not set(ids) <= set(score):
        return [], score
    place = {e: ids.index(e) if e in ids else len(ids) for e in score}
    return sorted(score, key=lambda e: (-score[e], place[e], e)), score


def filled(ids, ranked, preferred, keep, window):
    """Return the row that runs: `keep` best, preferred ones of the window, then the best."""
    taken = ranked[:keep]
    taken += [e for e in ranked[keep:window] if e in preferred]
    taken += [e for e in ranked if e not in taken]
    taken = taken[: len(ids)]
    newcomers = iter([e for e in taken if e not in ids])
    return [e if e in taken else next(newcomers) for e in ids]


def plain_max_rank(policy, seen):
    out = seen.ids.copy()
    residents = np.flatnonzero(seen.resident).tolist()
    for row, ids in enumerate(seen.ids.tolist()):
        ranked, _ = ranking(seen, row)
        if ranked and policy.keep < len(ids) < policy.rank:
            out[row] = filled(ids, ranked, residents, policy.keep, policy.rank)
    return out


def probabilities(seen, score):
    if seen.score_kind == "softmax":
        return score
    top = max(score.values())
    return {e: math.exp(s - top) for e, s in score.items()}


def plain_cum_sum(policy, seen):
    out = seen.ids.copy()
    residents = np.flatnonzero(seen.resident).tolist()
    for row, ids in enumerate(seen.ids.tolist()):
        ranked, score = ranking(seen, row)
        if not ranked or policy.keep >= len(ids):
            continue
        p = probabilities(seen, score)
        total = sum(p.values())
        sums = list(itertools.accumulate((p[e] for e in ranked), initial=0.0))
        window = next((n for n, held in enumerate(sums) if held >= policy.p * total), len(ranked))
        if policy.p == 1:
            window = len(ranked)
        if window > len(ids):
            out[row] = filled(ids, ranked, residents, policy.keep, window)
    return out


def shares_of(seen, ids, score):
    p = probabilities(seen, {e: score[e] for e in ids})
    total = sum(p.values())
    return [p[e] / total if total > 0 else math.nan for e in ids]


def plain_buddy(policy, seen):
    out = seen.ids.copy()
    table = np.asarray(policy.table)[seen.layer]
    for row, ids in enumerate(seen.ids.tolist()):
        missing = [e for e in ids if not seen.resident[e]]
        if not missing or len(missing) / len(ids) > policy.missing:
            continue
        if policy.entropy > 0:
            ranked, score = ranking(seen, row)
            if not ranked or len(ids) == 1:
                continue
            shares = shares_of(seen, ids, score)
            h = -sum(a * math.log(a) for a in shares if a != 0)
            if not h / math.log(len(ids)) >= policy.entropy:
                continue
        new = list(ids)
        for slot in range(policy.keep, len(ids)):
            if seen.resident[ids[slot]]:
                continue
            likes = table[ids[slot]]
            buddies = [int(e) for e in np.argsort(-likes, kind="stable") if e != ids[slot]]
            for buddy in [e for e in buddies if likes[e] > 0][: policy.tries]:
                if seen.resident[buddy] and buddy not in new:
                    new[slot] = buddy
                    break
        out[row] = new
    return out


def plain_resident_only(policy, seen):
    """One row at a time; what a layer remembers is kept in `policy.memory_`, a dict of dicts."""
    if not hasattr(policy, "memory_"):
        policy.memory_ = {}
    memory = policy.memory_.setdefault(seen.layer, {"seen": 0, "set": None, "sum": {}})
    n_expert = seen.resident.size
    out = seen.ids.copy()
    for row, ids in enumerate(seen.ids.tolist()):
        size = max(math.floor(policy.frac * n_expert + 0.5), len(ids))
        ranked, score = ranking(seen, row)
        if not ranked or size >= n_expert or policy.keep >= len(ids):
            continue
        if memory["set"] is not None:
            out[row] = filled(ids, ranked, memory["set"], policy.keep, n_expert)
        for expert, share in zip(ids, shares_of(seen, ids, score), strict=True):
            if not math.isnan(share):
                memory["sum"][expert] = memory["sum"].get(expert, 0.0) + share
        memory["seen"] += 1
        wanted = [e for e, weight in memory["sum"].items() if weight > 0]
        if memory["seen"] % policy.every == 0 and len(wanted) >= size:
            memory["set"] = sorted(wanted, key=lambda e: (-memory["sum"][e], e))[:size]
    return out


# --- the suite ------------------------------------------------------------------------------------

TABLE = np.random.default_rng(5).integers(0, 9, size=(3, 16, 16))


class TestMaxRank(RoutingPolicySuite):
    def make_policy(self):
        return MaxRank(keep=2, rank=6)

    def make_full_strength(self):
        return MaxRank(keep=0, rank=16, prefill=True)

    def reference(self, policy, routing):
        return plain_max_rank(policy, routing)


class TestCumSum(RoutingPolicySuite):
    def make_policy(self):
        return CumSum(keep=1, p=0.8)

    def make_full_strength(self):
        return CumSum(keep=0, p=1.0)

    def reference(self, policy, routing):
        return plain_cum_sum(policy, routing)


class TestBuddy(RoutingPolicySuite):
    def make_policy(self):
        return Buddy(TABLE, tries=3)

    def make_full_strength(self):
        return Buddy(TABLE + 1, tries=15, keep=0, prefill=True)

    def reference(self, policy, routing):
        return plain_buddy(policy, routing)


class TestBuddyWithGates(TestBuddy):
    def make_policy(self):
        return Buddy(TABLE, tries=4, entropy=0.9, missing=0.5)


class TestResidentOnly(RoutingPolicySuite):
    def make_policy(self):
        return ResidentOnly(every=8, frac=0.5)

    def make_full_strength(self):
        return ResidentOnly(every=2, frac=0.25, prefill=True)

    def reference(self, policy, routing):
        return plain_resident_only(policy, routing)


class TestResidentOnlyKeepsTheBest(TestResidentOnly):
    def make_full_strength(self):
        return ResidentOnly(every=5, frac=0.5, keep=1)


# --- kernel and twin ------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["other", "softmax"]),
    st.integers(0, 5),
    st.integers(0, 8),
    st.floats(0, 1),
)
def test_kernels_equal_plain_versions_on_rough_scores(seed, kind, keep, rank, strength):
    rng = np.random.default_rng(seed)
    ids, scores = rough_scores(rng, kind)
    residents = np.flatnonzero(rng.random(8) < 0.5)
    looked_at = seen(ids, scores=scores, resident=residents, kind=kind, layer=1)
    table = rng.integers(0, 4, size=(2, 8, 8))
    for policy, plain in (
        (MaxRank(keep, rank), plain_max_rank),
        (CumSum(keep, strength), plain_cum_sum),
        (Buddy(table, rank, strength, 1 - strength / 2, min(keep, 4)), plain_buddy),
        (Buddy(table, rank, missing=strength, keep=min(keep, 4)), plain_buddy),
        (ResidentOnly(1 + rank // 3, max(strength, 0.1), keep), plain_resident_only),
    ):
        twin = policy.clone()
        actual = policy.run_kernel(looked_at)
        expected = plain(twin, looked_at)
        np.testing.assert_array_equal(
            looked_at.ids if actual is None else actual, expected, err_msg=repr(policy)
        )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["other", "softmax"]))
def test_policies_with_nothing_or_all_resident_leave_the_routers_choice(seed, kind):
    """Whatever the ties: the ranking begins with what the router chose."""
    rng = np.random.default_rng(seed)
    ids, scores = rough_scores(rng, kind)
    for residents in ((), range(8)):
        looked_at = seen(ids, scores=scores, resident=residents, kind=kind)
        for policy in (MaxRank(0, 8), CumSum(0, 1.0), Buddy(np.ones((1, 8, 8)), 8, keep=0)):
            assert policy.run_kernel(looked_at) is None, policy


def test_ranking_of_equals_begins_with_the_routers_slots_however_few_are_asked_for():
    score = np.zeros(8)
    slot_of = np.array([4, 4, 4, 4, 3, 2, 1, 0])
    for n in range(1, 9):
        order = np.full(8, -1)
        assert rank_first(score, slot_of, n, order) == n
        assert order.tolist() == [7, 6, 5, 4, 0, 1, 2, 3][:n] + [-1] * (8 - n)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 2**32))
def test_policies_on_wide_layers_equal_plain_versions(seed):
    """Where not all experts are ranked at once."""
    rng = np.random.default_rng(seed)
    ids, scores = rough_scores(rng, "other", n_expert=40, n_used=3)
    if seed % 2:
        scores = np.where(np.isfinite(scores), rng.normal(size=scores.shape), scores)
        scores = scores.astype(np.float32)
        ids = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1)[:, :3]
    residents = np.flatnonzero(rng.random(40) < 0.1)
    looked_at = seen(ids, scores=scores, resident=residents, n_expert=40)
    rank, p = int(rng.integers(41)), float(rng.random())
    for policy, plain in (
        (MaxRank(1, rank), plain_max_rank),
        (CumSum(0, p), plain_cum_sum),
        (ResidentOnly(1, 0.1), plain_resident_only),
    ):
        actual = policy.run_kernel(looked_at)
        expected = plain(policy.clone(), looked_at)
        np.testing.assert_array_equal(
            looked_at.ids if actual is None else actual, expected, err_msg=repr(policy)
        )


# --- MaxRank, CumSum ------------------------------------------------------------------------------

SCORES = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_max_rank_keeps_the_best_takes_residents_of_rank_then_the_best_again():
    looked_at = seen([0, 1, 2, 3], scores=SCORES, resident=[5, 7])
    assert select(MaxRank(keep=2, rank=6), looked_at) == [0, 1, 2, 5]
    assert select(MaxRank(keep=2, rank=8), looked_at) == [0, 1, 5, 7]
    assert select(MaxRank(keep=2, rank=5), looked_at) is None
    assert select(MaxRank(keep=3, rank=8), looked_at) == [0, 1, 2, 5]
    assert select(MaxRank(keep=4, rank=8), looked_at) is None
    assert select(MaxRank(keep=0, rank=8), looked_at) == [0, 1, 5, 7]


def test_max_rank_takes_residents_in_order_of_score_not_of_id():
    scores = [8.0, 7.0, 6.0, 5.0, 1.0, 2.0, 3.0, 4.0]
    looked_at = seen([0, 1, 2, 3], scores=scores, resident=[4, 5, 6, 7])
    assert select(MaxRank(keep=3, rank=8), looked_at) == [0, 1, 2, 7]
    assert select(MaxRank(keep=2, rank=8), looked_at) == [0, 1, 7, 6]


def test_max_rank_does_not_care_how_far_a_resident_is_behind():
    """That is what tells it from CachePrior, which weighs the difference in score."""
    scores = [8.0, 7.9, 7.8, 7.7, -50.0, -90.0, -90.0, -90.0]
    looked_at = seen([0, 1, 2, 3], scores=scores, resident=[4])
    assert select(MaxRank(keep=2, rank=5), looked_at) == [0, 1, 2, 4]
    assert select(CachePrior(0.3), looked_at) is None


def test_max_rank_never_takes_a_masked_expert():
    scores = [*SCORES[:4], -math.inf, math.nan, 1.0, math.inf]
    looked_at = seen([0, 1, 2, 3], scores=scores, resident=[4, 5, 6, 7])
    assert select(MaxRank(0, 8), looked_at) == [0, 1, 2, 6]


@pytest.mark.parametrize(
    "scores",
    [
        [8.0, 7.0, 6.0, *[-math.inf] * 5],
        [8.0, 7.0, 6.0, math.nan, 5.0, 4.0, 3.0, 2.0],
        [math.nan] * 8,
    ],
)
@pytest.mark.parametrize(
    "policy", [MaxRank(0, 8), CumSum(0, 1.0), Buddy(np.ones((1, 8, 8)), entropy=0.1)], ids=repr
)
def test_token_with_broken_scores_is_left_alone(policy, scores):
    assert select(policy, seen([0, 1, 2, 3], scores=scores, resident=[0, 1, 5, 6])) is None


def test_cum_sum_looks_as_far_as_the_probability_reaches():
    scores = [0.4, 0.2, 0.15, 0.1, 0.06, 0.04, 0.03, 0.02]
    looked_at = seen([0, 1, 2, 3], scores=scores, resident=[5, 6], kind="softmax")
    assert select(CumSum(keep=1, p=0.84), looked_at) is None  # the four chosen hold 0.85
    assert select(CumSum(keep=1, p=0.9), looked_at) is None  # five hold 0.91
    assert select(CumSum(keep=1, p=0.92), looked_at) == [0, 1, 2, 5]  # six hold 0.95
    assert select(CumSum(keep=1, p=0.96), looked_at) == [0, 1, 5, 6]  # seven hold 0.98
    assert select(CumSum(keep=3, p=0.96), looked_at) == [0, 1, 2, 5]
    assert select(CumSum(keep=1, p=0.0), looked_at) is None


def test_cum_sum_reaches_a_share_that_is_held_exactly():
    halves = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125, 0.0, 0.0]
    looked_at = seen([0, 1, 2, 3], scores=halves, resident=[4], kind="softmax")
    assert select(CumSum(keep=1, p=0.9375), looked_at) is None
    assert select(CumSum(keep=1, p=0.9376), looked_at) == [0, 1, 2, 4]


def test_cum_sum_of_all_but_rounding_comes_to_an_end():
    """Summed best first the probabilities may fall short of their sum in another order."""
    scores = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    rows = [[math.exp(x - max(row)) for x in row] for row in scores.tolist()]
    p = float(np.nextafter(1.0, 0.0))
    assert any(sum(sorted(row, reverse=True)) < p * sum(row) for row in rows)
    ids = np.argsort(-scores, axis=1)[:, :4]
    looked_at = seen(ids, scores=scores, resident=range(8), n_expert=64)
    changed = CumSum(0, p).run_kernel(looked_at)
    assert changed is not None
    np.testing.assert_array_equal(changed, CumSum(0, 1.0).run_kernel(looked_at))


def test_cum_sum_takes_other_scores_for_logits():
    logits = np.log(np.float32([0.4, 0.2, 0.15, 0.1, 0.06, 0.04, 0.03, 0.02])) + 7
    looked_at = seen([0, 1, 2, 3], scores=logits, resident=[5, 6])
    assert select(CumSum(keep=1, p=0.9), looked_at) is None
    assert select(CumSum(keep=1, p=0.92), looked_at) == [0, 1, 2, 5]


def test_cum_sum_is_over_what_a_group_mask_left():
    scores = [0.2, 0.1, 0.08, 0.05, 0.03, 0.02, -math.inf, -math.inf]  # sum 0.48
    looked_at = seen([0, 1, 2, 3], scores=scores, resident=[5], kind="softmax")
    assert select(CumSum(keep=1, p=0.95), looked_at) is None  # five hold 0.958
    assert select(CumSum(keep=1, p=0.97), looked_at) == [0, 1, 2, 5]


def test_cum_sum_of_a_sure_router_leaves_alone_what_max_rank_would_change():
    sure = [0.97, 0.01, 0.008, 0.006, 0.002, 0.002, 0.001, 0.001]
    looked_at = seen([0, 1, 2, 3], scores=sure, resident=[4, 5], kind="softmax")
    assert select(CumSum(keep=1, p=0.9), looked_at) is None
    assert select(MaxRank(keep=1, rank=6), looked_at) == [0, 1, 4, 5]


# --- Buddy ----------------------------------------------------------------------------------------


def table_of(**likes):
    """Return a table of one layer and eight experts: ``e3={5: 9}`` likes 5 in place of 3."""
    table = np.zeros((1, 8, 8))
    for expert, buddies in likes.items():
        for buddy, weight in buddies.items():
            table[0, int(expert[1:]), buddy] = weight
    return table


def test_buddy_takes_the_first_resident_of_its_list():
    table = table_of(e3={7: 9, 5: 6, 6: 6, 4: 1})
    looked_at = seen([0, 1, 2, 3], resident=[0, 1, 2, 4, 6, 5])
    assert select(Buddy(table), looked_at) == [0, 1, 2, 5]
    assert select(Buddy(table, tries=2), looked_at) == [0, 1, 2, 5]
    assert select(Buddy(table, tries=1), looked_at) is None  # 7 is not resident
    assert select(Buddy(table, tries=0), looked_at) is None


def test_buddy_never_doubles_an_expert_of_the_routing():
    table = table_of(e2={0: 9, 5: 5, 6: 1}, e3={5: 9, 2: 8, 6: 1})
    looked_at = seen([0, 1, 2, 3], resident=[0, 1, 5, 6])
    assert select(Buddy(table), looked_at) == [0, 1, 5, 6]
    assert select(Buddy(table, tries=2), looked_at) == [0, 1, 5, 3]


def test_buddy_leaves_residents_and_the_first_choices_alone():
    table = np.ones((1, 8, 8))
    looked_at = seen([0, 1, 2, 3], resident=[1, 5, 6, 7])
    assert select(Buddy(table), looked_at) == [0, 1, 5, 6]
    assert select(Buddy(table, keep=0), looked_at) == [5, 1, 6, 7]
    assert select(Buddy(table, keep=3), looked_at) == [0, 1, 2, 5]


def test_buddy_without_co_activation_is_nobodys_buddy():
    assert select(Buddy(table_of(e3={5: 0, 4: 0})), seen([0, 1, 2, 3], resident=[4, 5])) is None
    assert "no expert has a buddy" in Buddy(np.zeros((2, 8, 8))).cautions(FACTS)[0]


def test_buddy_leaves_a_token_alone_of_which_too_much_is_missing():
    table = np.ones((1, 8, 8))
    half = seen([0, 1, 2, 3], resident=[0, 1, 5, 6])
    assert select(Buddy(table, missing=0.5), half) == [0, 1, 5, 6]
    assert select(Buddy(table, missing=0.49), half) is None


def test_buddy_touches_only_tokens_whose_choice_is_even():
    table = np.ones((1, 8, 8))
    sure = np.log([0.85, 0.05, 0.05, 0.05, 1e-3, 1e-3, 1e-3, 1e-3])
    entropy = -(0.85 * math.log(0.85) + 3 * 0.05 * math.log(0.05)) / math.log(4)  # 0.424
    for kind, scores in (("other", sure), ("softmax", np.exp(sure))):
        looked_at = seen([0, 1, 2, 3], scores=scores, resident=[0, 1, 2, 5], kind=kind)
        assert select(Buddy(table, entropy=entropy - 1e-3), looked_at) == [0, 1, 2, 5]
        assert select(Buddy(table, entropy=entropy + 1e-3), looked_at) is None
    even = seen([0, 1], scores=[1.0] * 2 + [0.0] * 6, resident=[0, 5])
    assert select(Buddy(table, entropy=1.0), even) == [0, 5]


def test_buddy_needs_scores_only_if_it_looks_at_entropy():
    without = ModelFacts(1, 8, 4, 2**20, scores_available=False)
    plain, gated = Buddy(np.ones((1, 8, 8))), Buddy(np.ones((1, 8, 8)), entropy=0.5)
    plain.check(without)
    assert select(plain, seen([0, 1, 2, 3], resident=[5])) == [0, 5, 2, 3]
    with pytest.raises(PolicyError, match=r"must see the router's scores.*record='scores'"):
        gated.check(without)


def test_buddy_from_trace_counts_pairs_of_a_routing():
    ids = np.array([[[0, 1, 2], [3, 2, 1]], [[1, 2, 3], [-1, -1, -1]]])
    trace = xr.Dataset({"expert_chosen": (("token", "layer", "slot"), ids)}, attrs={"n_expert": 4})
    table = Buddy.from_trace(trace, tries=2).table
    assert table.shape == (2, 4, 4)
    assert table[0].tolist() == [[0, 1, 1, 0], [1, 0, 2, 1], [1, 2, 0, 1], [0, 1, 1, 0]]
    assert table[1].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
    assert Buddy.from_trace(trace, 3, missing=0.5) == Buddy(table, 3, missing=0.5)


def test_buddy_from_trace_agrees_with_numpy():
    trace = make_trace(n_token=60, n_layer=3, n_expert=16, seed=3)
    ids = trace.expert_chosen.values
    hot = (ids[..., None] == np.arange(16)).any(axis=2).astype(int)
    expected = np.einsum("tli,tlj->lij", hot, hot)
    expected[:, np.arange(16), np.arange(16)] = 0
    np.testing.assert_array_equal(Buddy.from_trace(trace).table, expected)


def test_buddy_from_trace_without_what_it_takes_is_refused():
    trace = make_trace(n_token=8, n_expert=16)
    with pytest.raises(PolicyError, match="trace must hold expert_chosen and the attribute"):
        Buddy.from_trace(trace.drop_vars("expert_chosen"))
    trace.attrs["n_expert"] = 3
    with pytest.raises(PolicyError, match="expert_chosen must be below n_expert = 3; got"):
        Buddy.from_trace(trace)
    del trace.attrs["n_expert"]
    with pytest.raises(PolicyError, match="trace must hold"):
        Buddy.from_trace(trace)


# --- ResidentOnly ---------------------------------------------------------------------------------


def test_resident_only_learns_the_set_from_the_tokens_before():
    engine = Engine(ResidentOnly(every=2, frac=0.5))
    tokens = [
        # Scores of experts 0...7; the router takes the two best. Shares by softmax.
        ([5, 5, 0, 0, 0, 0, 0, 0], [0, 1], None),
        ([0, 0, 5, 5, 0, 0, 0, 0], [2, 3], None),  # now V = 0, 1, 2, 3
        ([0, 0, 0, 1, 5, 4, 0, 2], [4, 5], [3, 0]),  # 3 is the best of V, then a tie: the lowest
        ([0, 0, 3, 0, 6, 1, 0, 0], [4, 2], [0, 2]),  # 4 is out, 2 is in and keeps its slot
    ]
    for scores, ids, expected in tokens:
        looked_at = seen(ids, scores=scores)
        selection = engine.select(looked_at)
        assert (None if selection is None else selection.ids[0].tolist()) == expected
    # Wanted so far: 0, 1, 2, 3 about 0.5 each; 4 by 0.73 and 0.95, 5 by 0.27, 2 by 0.05 more.
    assert engine.policy.extra_counts() == {"choices": 2}
    state = engine.policy.layer_state(1, 8)[0]
    assert state[0] == 4
    share = 1 / (1 + math.exp(-1))
    last = 1 / (1 + math.exp(-3))
    np.testing.assert_allclose(
        state[2:10], [0.5, 0.5, 0.5 + 1 - last, 0.5, share + last, 1 - share, 0, 0]
    )
    assert np.flatnonzero(state[10:18]).tolist() == [0, 1, 2, 4]


def test_resident_only_does_not_restrict_while_its_set_has_room():
    engine = Engine(ResidentOnly(every=1, frac=0.5))
    for _ in range(5):
        assert engine.select(seen([0, 1], scores=[5, 4, 3, 2, 1, 0, 0, 0])) is None
    assert engine.select(seen([6, 7], scores=[0, 0, 0, 0, 0, 0, 5, 4])) is None  # four were seen
    assert engine.select(seen([2, 0], scores=[4, 0, 5, 0, 0, 0, 0, 0])).ids.tolist() == [[1, 0]]


def test_resident_only_counts_what_the_router_wanted_not_what_ran():
    engine = Engine(ResidentOnly(every=1, frac=0.25))
    engine.select(seen([0, 1], scores=[5, 5, 0, 0, 0, 0, 0, 0]))
    wanted = seen([6, 7], scores=[1, 1, 0, 0, 0, 0, 5, 5])
    assert engine.select(wanted).ids.tolist() == [[0, 1]]
    engine.select(wanted)
    assert engine.select(wanted) is None  # 6 and 7 are in by now


def test_resident_only_keeps_layers_apart_and_forgets_on_reset():
    engine = Engine(ResidentOnly(every=1, frac=0.25))
    first = seen([0, 1], scores=[5, 5, 0, 0, 0, 0, 0, 0])
    other = seen([6, 7], scores=[0, 0, 0, 0, 0, 0, 5, 5])
    engine.select(first)
    assert engine.select(seen([6, 7], scores=[0, 0, 0, 0, 0, 0, 5, 5], layer=1)) is None
    assert engine.select(other) is not None
    engine.policy.reset(0)
    assert engine.policy.extra_counts() == {"choices": 0}
    assert engine.select(other) is None


def test_resident_only_by_the_source_may_lose_the_best_unless_told_to_keep_it():
    for keep, expected in ((0, [0, 1]), (1, [6, 0])):
        engine = Engine(ResidentOnly(every=1, frac=0.25, keep=keep))
        engine.select(seen([0, 1], scores=[5, 5, 0, 0, 0, 0, 0, 0]))
        selection = engine.select(seen([6, 7], scores=[3, 2, 0, 0, 0, 0, 5, 4]))
        assert selection.ids.tolist() == [expected]


def test_resident_only_fills_up_where_its_set_is_masked():
    engine = Engine(ResidentOnly(every=1, frac=0.25))
    engine.select(seen([0, 1], scores=[5, 5, 0, 0, 0, 0, 0, 0]))
    masked = seen([6, 7], scores=[1, -math.inf, 0, 0, 0, 0, 5, 4])
    assert engine.select(masked).ids.tolist() == [[6, 0]]


def test_resident_only_takes_nothing_from_a_softmax_that_has_underflowed():
    engine = Engine(ResidentOnly(every=1, frac=0.25))
    zeros = seen([0, 1], scores=[0.0] * 8, kind="softmax")
    assert engine.select(zeros) is None
    assert engine.policy.layer_state(1, 8)[0].tolist() == [1, 0] + [0] * 16


def test_resident_only_warns_if_its_set_does_not_fit_into_the_cache():
    facts = ModelFacts(2, 8, 2, cache_budget=2**20, token_cycle_bytes=2**19)
    assert ResidentOnly(8, 0.5).cautions(facts) == []
    (caution,) = ResidentOnly(8, 0.75).cautions(facts)
    assert "1.5 MiB of experts, more than the cache of 1.0 MiB" in caution


def test_resident_only_says_what_its_importance_is():
    assert "sum of weights" in ResidentOnly.__doc__


# --- refusals -------------------------------------------------------------------------------------

TWO = np.ones((2, 8, 8))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (MaxRank(-1, 8), "keep must be a whole number of at least 0"),
        (MaxRank(5, 8), "keep must be at most the 4 experts"),
        (MaxRank(2, 9), "rank must be at most the 8 experts of a layer; got 9"),
        (MaxRank(2, 2.5), "rank must be a whole number"),
        (CumSum(1, 1.5), r"p must be a number in \[0, 1\]"),
        (CumSum(1, math.nan), r"p must be a number in \[0, 1\]"),
        (CumSum(5, 0.5), "keep must be at most the 4 experts"),
        (Buddy(TWO[0]), r"table must be an array of numbers of shape \(layer, expert, expert\)"),
        (Buddy(None), "table must be an array of numbers"),
        (Buddy([[[1], [1, 2]]]), "table must be an array of numbers"),
        (Buddy(-TWO), "table must hold finite numbers of at least 0"),
        (Buddy(TWO * np.nan), "table must hold finite numbers of at least 0"),
        (Buddy(TWO[:1]), r"must have shape .* = \(2, 8, 8\); got \(1, 8, 8\) .* another model"),
        (Buddy(TWO, tries=-1), "tries must be a whole number of at least 0"),
        (Buddy(TWO, entropy=1.1), r"entropy must be a number in \[0, 1\]"),
        (Buddy(TWO, missing=-0.1), r"missing must be a number in \[0, 1\]"),
        (Buddy(TWO, keep=5), "keep must be at most the 4 experts"),
        (ResidentOnly(0, 0.5), "every must be a whole number of at least 1"),
        (ResidentOnly(8, 1.5), r"frac must be a number in \[0, 1\]"),
        (ResidentOnly(8, 0.25), "frac must leave room for the 4 experts .* got 0.25 of 8, 2, in"),
        (ResidentOnly(8, 0.5, keep=5), "keep must be at most the 4 experts"),
    ],
)
def test_meaningless_set_up_is_refused(policy, message):
    with pytest.raises(PolicyError, match=message):
        policy.check(FACTS)


@pytest.mark.parametrize(
    "policy", [MaxRank(), CumSum(1, 0.5), ResidentOnly(8, 0.5), Buddy(TWO, entropy=0.5)], ids=repr
)
def test_policy_without_scores_is_refused_and_says_how_to_record_them(policy):
    with pytest.raises(PolicyError, match=r"must see the router's scores.*record='scores'"):
        policy.check(ModelFacts(2, 8, 4, 2**20, scores_available=False))
    with pytest.raises(PolicyError, match=r"must see the router's scores.*record='scores'"):
        policy.run_kernel(seen([0, 1, 2, 3], resident=[5]))


@pytest.mark.parametrize(
    "policy",
    [
        MaxRank(4, 8),
        MaxRank(2, 4),
        CumSum(4, 0.5),
        Buddy(TWO, keep=4),
        ResidentOnly(8, 0.5, keep=4),
    ],
    ids=repr,
)
def test_policy_that_can_never_change_anything_says_so(policy):
    policy.check(FACTS)
    assert any("can never change" in caution for caution in policy.cautions(FACTS))
    assert policy.effective(FACTS) == "substitutes nothing"


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            MaxRank(2, 8),
            "keeps the 2 best and lets 2 of 4 slots go to residents among the 8 best of 8 experts",
        ),
        (
            CumSum(1, 0.6),
            "lets 3 of 4 slots go to residents among the experts that hold 0.6 of the probability",
        ),
        (Buddy(TWO), "puts one of 8 resident buddies in the place of a missing expert, in 3 of 4"),
        (Buddy(TWO, missing=0.5), ", where at most 2 of 4 are missing"),
        (Buddy(TWO, entropy=0.5), ", where the routing entropy is at least 0.5"),
        (ResidentOnly(9, 0.5), "routes among 4 of 8 experts per layer, chosen anew every 9 tokens"),
    ],
    ids=str,
)
def test_policy_says_what_it_comes_to(policy, text):
    policy.check(FACTS)
    assert text in policy.effective(FACTS)
    assert policy.cautions(FACTS) == []
