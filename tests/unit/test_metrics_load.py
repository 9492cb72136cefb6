"""Load, balance, concentration."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError
from bmoe_lab.schema import Action
from tests.unit.metric_traces import cells, decoded, hand_made, ragged, uniform

# One layer: expert 0 five times, 1 twice, 2 once, of eight experts.
SKEWED = [[0, 1], [0, 1], [0, 2], [0, 3], [0, 4]]


def test_routing_counts_of_ragged_layers_are_those_counted_row_by_row():
    trace = ragged(seed=3)
    for which in ("chosen", "applied"):
        expected = np.zeros((3, 6))
        for _, layer, experts in cells(trace, which, "decode"):
            expected[layer, experts] += 1
        np.testing.assert_array_equal(metrics.routing_counts(trace, which=which), expected)


def test_load_cv_of_a_known_load():
    load = np.array([5, 2, 1, 1, 1, 0, 0, 0]) / 10
    cv = metrics.load_cv(decoded(SKEWED))
    np.testing.assert_allclose(cv, [load.std() / load.mean()])


def test_load_max_violation_of_a_known_load():
    np.testing.assert_allclose(metrics.load_max_violation(decoded(SKEWED)), [0.5 * 8 - 1])


def test_load_of_equal_experts_is_balanced():
    trace = decoded([[0, 1], [2, 3], [4, 5], [6, 7]])
    np.testing.assert_allclose(metrics.load_cv(trace), [0.0], atol=1e-12)
    np.testing.assert_allclose(metrics.load_max_violation(trace), [0.0], atol=1e-12)


def test_load_balance_of_known_scores():
    trace = decoded([[0], [0], [1]], n_expert=4)
    scores = np.array([[0.7, 0.1, 0.1, 0.1], [0.4, 0.2, 0.2, 0.2], [0.1, 0.6, 0.2, 0.1]])
    trace = trace.assign(
        router_score=(("token", "layer", "expert"), scores[:, None].astype(np.float32))
    )
    mean = scores.mean(axis=0)
    expected = 4 * (2 / 3 * mean[0] + 1 / 3 * mean[1])
    np.testing.assert_allclose(metrics.load_balance(trace), [expected], rtol=1e-6)


def test_load_balance_of_a_uniform_router_is_one():
    # The mean over tokens of a score that has nothing to do with the load is 1 / E each.
    balance = metrics.load_balance(uniform(4000, 2, 8, 2, seed=0))
    # f and P both lean to the experts that happened to score high: second order in 1 / sqrt(n).
    np.testing.assert_allclose(balance, 1.0, atol=0.01)


def test_load_balance_counts_routed_tokens_only():
    trace = ragged(seed=1)
    everything = metrics.load_balance(trace, phase="all")
    assert np.isfinite(everything).all()
    rows = trace["expert_chosen"].values[:, -1, 0] >= 0
    assert not rows.all()
    np.testing.assert_allclose(
        everything[-1], metrics.load_balance(trace.isel(token=rows), phase="all")[-1]
    )


def test_load_balance_with_an_unknown_score_is_unknown():
    trace = uniform(10, 2, 8, 2, seed=0)
    trace["router_score"].values[3, 1, 2] = np.nan
    assert np.isnan(metrics.load_balance(trace).values).tolist() == [False, True]


def test_experts_to_cover_counts_the_fewest():
    trace = decoded(SKEWED)
    for share, n in ((0.5, 1), (0.51, 2), (0.7, 2), (0.9, 4), (1.0, 5)):
        assert metrics.experts_to_cover(trace, share).values.tolist() == [n]
    with pytest.raises(SettingsError, match="share must be above 0 and at most 1; got 90"):
        metrics.experts_to_cover(trace, 90)


def test_top_share_takes_the_most_used():
    trace = decoded(SKEWED)
    assert metrics.top_share(trace, 1).values.tolist() == [0.5]
    np.testing.assert_allclose(metrics.top_share(trace, 2), [0.7])
    np.testing.assert_allclose(metrics.top_share(trace, 99), [1.0])
    with pytest.raises(SettingsError, match="n must be at least 1; got 0"):
        metrics.top_share(trace, 0)


def test_experts_used_and_used_once():
    trace = decoded(SKEWED)
    assert metrics.experts_used(trace).values.tolist() == [5]
    assert metrics.experts_used_once(trace).values.tolist() == [3]


def test_expert_load_stand_in_of_a_drop_is_no_use():
    trace = hand_made()
    trace["action"].values[3, 0, 1] = Action.dropped
    trace["expert_applied"].values[3, 0, 1] = 3
    assert metrics.routing_counts(trace, which="applied").values[0, 3] == 2
    assert metrics.experts_used(trace, which="applied").values.tolist() == [2]


def test_load_of_an_independent_uniform_router_is_within_three_standard_errors():
    n_token, n_expert, n_used = 3000, 16, 4
    load = metrics.expert_load(uniform(n_token, 3, n_expert, n_used, seed=1))
    chance = n_used / n_expert
    error = np.sqrt(chance * (1 - chance) / n_token) / n_used
    # 48 loads: the largest of them lies beyond three errors now and then, not beyond four.
    assert float(abs(load - 1 / n_expert).max()) < 4 * error
    expected = np.sqrt(n_expert * (1 - chance) * chance / n_token / n_used**2 * n_expert)
    assert float(metrics.load_cv(trace := uniform(n_token, 3, n_expert, n_used, seed=1)).mean()) < (
        1.5 * expected
    )
    assert metrics.experts_used(trace).values.tolist() == [16, 16, 16]
