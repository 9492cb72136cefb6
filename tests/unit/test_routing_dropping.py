"""Policies that drop slots by weight: the public suite, and their rules written down once more."""

import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import PolicyError
from bmoe_lab.routing import (
    DropBelow,
    DropCold,
    Engine,
    ModelFacts,
    RatioSkip,
    SensitivitySkip,
    TopP,
)
from bmoe_lab.testing import make_trace
from bmoe_lab.testing.suites import RoutingPolicySuite
from tests.unit.routing_cases import FACTS, dropped, seen

H = np.array([4.0, 1.0, 0.25])

# --- plain twins ----------------------------------------------------------------------------------


def each_row(seen):
    """Yield a mask to fill, the weights, their sum and the best slot of every known row."""
    drop = np.zeros(seen.ids.shape, dtype=bool)
    rows = []
    for mask, weights in zip(drop, seen.weights.astype(np.float64).tolist(), strict=True):
        if not any(math.isnan(w) for w in weights):
            rows.append((mask, weights, sum(weights), weights.index(max(weights))))
    return drop, rows


def plain_drop_below(policy, seen):
    drop, rows = each_row(seen)
    for mask, weights, total, best in rows:
        mask[:] = [w < policy.threshold * total and i != best for i, w in enumerate(weights)]
    return drop


def plain_ratio_skip(policy, seen):
    drop, rows = each_row(seen)
    ratio = policy.ratio if np.ndim(policy.ratio) == 0 else policy.ratio[seen.layer]
    for mask, weights, _, best in rows:
        mask[:] = [w < ratio * weights[best] and i != best for i, w in enumerate(weights)]
    return drop


def plain_sensitivity_skip(policy, seen):
    drop, rows = each_row(seen)
    for mask, weights, total, best in rows:
        if total > 0:
            felt = [(w / total) ** 2 * policy.sensitivity[seen.layer] for w in weights]
            mask[:] = [f < policy.threshold and i != best for i, f in enumerate(felt)]
    return drop


def plain_top_p(policy, seen):
    drop, rows = each_row(seen)
    for mask, weights, total, _ in rows:
        if not total > 0:
            continue
        order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
        width = len(order) if policy.k_max is None else min(policy.k_max, len(order))
        n = width
        if policy.p < 1:
            held = np.cumsum([weights[i] for i in order])
            reached = [k + 1 for k in range(len(order)) if held[k] >= policy.p * total]
            n = min([*reached, width])
        mask[order[n:]] = True
    return drop


# --- the suite ------------------------------------------------------------------------------------


class TestDropBelow(RoutingPolicySuite):
    def make_policy(self):
        return DropBelow(0.15)

    def make_full_strength(self):
        return DropBelow(1.0)

    def reference(self, policy, routing):
        return plain_drop_below(policy, routing)


class TestDropBelowInPrefill(TestDropBelow):
    def make_full_strength(self):
        return DropBelow(1.0, renormalise=False, prefill=True)


class TestRatioSkip(RoutingPolicySuite):
    def make_policy(self):
        return RatioSkip(0.4)

    def make_full_strength(self):
        return RatioSkip(1.0, prefill=True)

    def reference(self, policy, routing):
        return plain_ratio_skip(policy, routing)


class TestRatioSkipByLayer(TestRatioSkip):
    def make_policy(self):
        return RatioSkip(np.array([0.2, 0.4, 0.9]))

    def make_full_strength(self):
        return RatioSkip([1.0, 0.0, 0.5], renormalise=False)


class TestSensitivitySkip(RoutingPolicySuite):
    def make_policy(self):
        return SensitivitySkip(0.02, sensitivity=H)

    def make_full_strength(self):
        return SensitivitySkip(1e6, sensitivity=H)

    def reference(self, policy, routing):
        return plain_sensitivity_skip(policy, routing)


class TestTopP(RoutingPolicySuite):
    def make_policy(self):
        return TopP(0.8)

    def make_full_strength(self):
        return TopP(0.0, prefill=True)

    def reference(self, policy, routing):
        return plain_top_p(policy, routing)


class TestTopPOfAtMostTwo(TestTopP):
    def make_full_strength(self):
        return TopP(1.0, k_max=2, renormalise=False)


# --- kernel and twin ------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0, 1), st.booleans())
def test_kernels_equal_plain_versions_on_rough_weights(seed, width, strength, unknown):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(8)[:width] for _ in range(5)])
    # Few distinct values, zeros among them: many ties, and thresholds hit exactly.
    weights = rng.integers(0, 5, size=ids.shape) / np.float32(8)
    if unknown:
        weights[rng.random(ids.shape) < 0.2] = np.nan
    layer = int(rng.integers(3))
    looked_at = seen(ids, weights=weights, layer=layer)
    k_max = None if rng.random() < 0.5 else int(rng.integers(1, width + 1))
    for policy, plain in (
        (DropBelow(strength), plain_drop_below),
        (RatioSkip(strength), plain_ratio_skip),
        (RatioSkip(rng.random(3)), plain_ratio_skip),
        (SensitivitySkip(strength / 4, H), plain_sensitivity_skip),
        (TopP(strength, k_max), plain_top_p),
    ):
        actual = policy.run_kernel(looked_at)
        expected = plain(policy, looked_at)
        np.testing.assert_array_equal(np.zeros(ids.shape) if actual is None else actual, expected)


# --- by hand --------------------------------------------------------------------------------------

WEIGHTS = [0.5, 0.25, 0.15, 0.1]


def test_drop_below_is_strict_and_does_not_look_at_the_cache():
    assert dropped(DropBelow(0.25), seen([0, 1, 2, 3], weights=[0.5, 0.25, 0.125, 0.125])) == [2, 3]
    for resident in ((), (0, 1, 2, 3), (3,)):
        looked_at = seen([0, 1, 2, 3], weights=WEIGHTS, resident=resident)
        assert dropped(DropBelow(0.2), looked_at) == [2, 3]


def test_drop_below_compares_shares_of_the_routing():
    scaled = seen([0, 1, 2, 3], weights=np.array(WEIGHTS) * 2.5)
    assert dropped(DropBelow(0.2), scaled) == [2, 3]


@pytest.mark.parametrize("frac", [0.3, 0.75, 1.0])
def test_drop_below_a_share_of_the_average_is_drop_cold_where_nothing_is_resident(frac):
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(4), size=50)
    looked_at = seen(np.tile([0, 1, 2, 3], (50, 1)), weights=weights)
    cold, below = (
        Engine(DropCold(frac)).weigh(looked_at),
        Engine(DropBelow(frac / 4)).weigh(looked_at),
    )
    np.testing.assert_array_equal(cold.action, below.action)


def test_drop_below_warns_where_it_drops_most():
    (caution,) = DropBelow(0.25).cautions(FACTS)
    assert "top-4 model" in caution
    assert DropBelow(0.24).cautions(FACTS) == []
    assert DropBelow(0.0).effective(FACTS) == "drops nothing"


def test_ratio_skip_at_top_two_is_the_papers_rule():
    """Skip the second if it is below beta times the first."""
    policy = RatioSkip(0.5)
    assert dropped(policy, seen([0, 1], weights=[0.7, 0.3])) == [1]
    assert dropped(policy, seen([0, 1], weights=[0.66, 0.34])) == []
    assert dropped(policy, seen([0, 1], weights=[1.0, 0.5])) == []  # strict


def test_ratio_skip_takes_each_layers_own_ratio():
    policy = RatioSkip(np.array([0.2, 0.4]))
    assert dropped(policy, seen([0, 1, 2, 3], weights=WEIGHTS, layer=0)) == []
    assert dropped(policy, seen([0, 1, 2, 3], weights=WEIGHTS, layer=1)) == [2, 3]
    assert policy.layer_parameters(2).tolist() == [[0.2], [0.4]]
    with pytest.raises(PolicyError, match="ratio must have a number for each layer"):
        policy.parameters_at(2)


def test_ratio_skip_measures_the_sort_of_weights_not_of_slots():
    assert dropped(RatioSkip(0.5), seen([0, 1, 2], weights=[0.1, 0.6, 0.3])) == [0]


def ratios_trace(weights):
    return xr.Dataset({"weight_chosen": (("token", "layer", "slot"), np.float32(weights))})


def test_ratio_skip_from_trace_takes_each_layers_median():
    weights = [
        [[0.75, 0.25], [0.5, 0.5]],
        [[0.2, 0.8], [np.nan, np.nan]],
        [[0.6, 0.3], [0.8, 0.2]],
        [[np.inf, 0.4], [0.8, 0.4]],
        [[0.9, np.nan], [0.0, 0.0]],
    ]
    policy = RatioSkip.from_trace(ratios_trace(weights), prefill=True)
    # Layer 0: 1/3, 1/4, 1/2; layer 1: 1, 1/4, 1/2. Cells that are not known are left out.
    np.testing.assert_allclose(policy.ratio, [1 / 3, 1 / 2], rtol=1e-6)
    assert policy.prefill
    policy.check(ModelFacts(2, 8, 2, 2**20))


def test_ratio_skip_from_trace_skips_half_of_the_seconds_of_that_text():
    trace = make_trace(n_token=200, n_used=2, mask_last_layer=False)
    policy = RatioSkip.from_trace(trace)
    for layer in range(trace.sizes["layer"]):
        weights = trace.weight_chosen.values[:, layer]
        looked_at = seen(np.tile([0, 1], (200, 1)), weights=weights, layer=layer)
        engine = Engine(policy)
        engine.weigh(looked_at)
        assert engine.counters.dropped == 100


def test_ratio_skip_from_trace_without_what_it_takes_is_refused():
    with pytest.raises(PolicyError, match="trace must hold weight_chosen"):
        RatioSkip.from_trace(make_trace(n_token=8).drop_vars("weight_chosen"))
    with pytest.raises(PolicyError, match=r"two known weights .* layer 1"):
        RatioSkip.from_trace(ratios_trace([[[0.7, 0.3], [0.5, np.nan]]]))
    with pytest.raises(PolicyError, match=r"two known weights .* layer 0"):
        RatioSkip.from_trace(ratios_trace([[[1.0]]]))


def test_sensitivity_skip_at_top_two_is_the_papers_rule():
    """Skip the second if it is below sqrt(T / H): AdapMoE sets that threshold in each layer."""
    policy = SensitivitySkip(0.04, sensitivity=np.array([1.0, 0.25, 4.0]))
    for layer, limit in enumerate((0.2, 0.4, 0.1)):
        below, above = limit - 1e-3, limit + 1e-3
        assert dropped(policy, seen([0, 1], weights=[1 - below, below], layer=layer)) == [1]
        assert dropped(policy, seen([0, 1], weights=[1 - above, above], layer=layer)) == []
    facts = ModelFacts(3, 8, 2, 2**20)
    assert policy.effective(facts) == (
        "drops an expert whose weight is below 0.1 to 0.4 (by layer) of its routing"
    )


def test_sensitivity_skip_normalises_the_weights():
    policy = SensitivitySkip(0.04, sensitivity=[1.0])
    assert dropped(policy, seen([0, 1, 2], weights=[2.0, 0.62, 0.38])) == [2]


def test_sensitivity_skip_drops_all_it_may_in_a_layer_that_does_not_matter():
    policy = SensitivitySkip(1e-9, sensitivity=np.array([0.0, 1.0]))
    assert dropped(policy, seen([0, 1, 2, 3], weights=WEIGHTS)) == [1, 2, 3]
    assert "below 3.162e-05 to 1 (by layer)" in policy.effective(FACTS)


@pytest.mark.parametrize(
    ("p", "k_max", "expected"),
    [
        (0.0, None, [1, 2, 3]),
        (0.5, None, [1, 2, 3]),  # 0.5 holds exactly half
        (0.51, None, [2, 3]),
        (0.75, None, [2, 3]),
        (0.8, None, [3]),
        (0.95, None, []),
        (1.0, None, []),
        (0.95, 2, [2, 3]),
        (1.0, 3, [3]),
    ],
)
def test_top_p_keeps_the_fewest_that_hold_the_share(p, k_max, expected):
    weights = [0.5, 0.25, 0.125, 0.125]
    assert dropped(TopP(p, k_max), seen([0, 1, 2, 3], weights=weights)) == expected
    scaled = np.array(weights) * 0.125  # as in a model that does not normalise
    assert dropped(TopP(p, k_max), seen([0, 1, 2, 3], weights=scaled)) == expected


def test_top_p_keeps_the_largest_wherever_they_stand():
    assert dropped(TopP(0.6), seen([0, 1, 2, 3], weights=[0.1, 0.25, 0.15, 0.5])) == [0, 2]


def test_top_p_of_one_keeps_a_weight_that_rounding_hides():
    looked_at = seen([0, 1, 2], weights=[1.0, 1e-30, 1e-31])
    assert dropped(TopP(1.0), looked_at) == []
    assert dropped(TopP(1.0, k_max=2), looked_at) == [2]


@pytest.mark.parametrize(
    "policy", [DropBelow(1.0), RatioSkip(1.0), SensitivitySkip(1e9, [1.0]), TopP(0.0, 1)], ids=repr
)
def test_unknown_weight_of_a_token_drops_nothing_on_a_guess(policy):
    weights = [[0.6, math.nan, 0.3, 0.1], [math.nan, 0.5, 0.3, 0.2], [0.6, 0.2, 0.1, 0.1]]
    looked_at = seen([[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]], weights=weights)
    action = Engine(policy).weigh(looked_at).action
    assert action.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    "policy", [DropBelow(1.0), RatioSkip(1.0), SensitivitySkip(1e9, [1.0]), TopP(0.0, 1)], ids=repr
)
def test_one_expert_used_is_looked_at_and_kept(policy):
    engine = Engine(policy)
    assert engine.weigh(seen([5], weights=[0.3])) is None
    assert (engine.counters.examined, engine.counters.eligible) == (1, 0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (DropBelow(math.nan), r"threshold must be a number in \[0, 1\]; got nan"),
        (DropBelow(1.5), r"threshold must be a number in \[0, 1\]"),
        (DropBelow(0.1, renormalise=1), "renormalise must be True or False"),
        (RatioSkip(1.5), r"ratio must be in \[0, 1\] in every layer; got 1.5"),
        (RatioSkip(math.nan), "ratio must be in"),
        (RatioSkip("0.5"), "ratio must be a number or an array"),
        (RatioSkip(True), "ratio must be a number or an array"),
        (RatioSkip([[0.5, 0.5]]), "ratio must be a number or an array"),
        (RatioSkip([0.5, [0.5]]), "ratio must be a number or an array"),
        (RatioSkip([0.5, 0.5, 0.5]), "ratio must have one entry for each of the 2 layers .* got 3"),
        (RatioSkip(np.array([0.5, -0.1])), r"ratio must be in .* got array\(shape=\(2,\), sha256="),
        (SensitivitySkip(-1.0, [1.0, 1.0]), "threshold must be a finite number of at least 0"),
        (SensitivitySkip(math.inf, [1.0, 1.0]), "threshold must be a finite number"),
        (
            SensitivitySkip(0.1, 1.0),
            "sensitivity must be an array of one number per layer; got 1.0",
        ),
        (SensitivitySkip(0.1, [1.0, -1.0]), "sensitivity must be at least 0 and finite"),
        (SensitivitySkip(0.1, [1.0, math.inf]), "sensitivity must be at least 0 and finite"),
        (SensitivitySkip(0.1, [1.0]), "sensitivity must have one entry for each of the 2 layers"),
        (TopP(-0.1), r"p must be a number in \[0, 1\]"),
        (TopP(0.5, k_max=0), "k_max must be a whole number of at least 1"),
        (TopP(0.5, k_max=5), "k_max must be at most the 4 experts .* larger n_expert_used"),
    ],
)
def test_meaningless_set_up_is_refused(policy, message):
    with pytest.raises(PolicyError, match=message):
        policy.check(FACTS)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (RatioSkip(0.0), "drops nothing"),
        (RatioSkip(0.4), "drops an expert whose weight is below 0.4 of its routing's largest"),
        (RatioSkip([0.1, 0.4]), "drops an expert whose weight is below 0.1 to 0.4 (by layer) of "),
        (SensitivitySkip(0.0, [1.0, 1.0]), "drops nothing"),
        (SensitivitySkip(0.01, [1.0, 1.0]), "drops an expert whose weight is below 0.1 of its ro"),
        (TopP(1.0), "keeps the 4 best of 4 experts per token"),
        (TopP(0.9, 3), "keeps the experts that hold 0.9 of a routing's weight, 1 to 3 of 4"),
    ],
    ids=str,
)
def test_policy_says_what_it_comes_to(policy, text):
    policy.check(FACTS)
    assert policy.effective(FACTS).startswith(text)
