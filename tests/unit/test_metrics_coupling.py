"""Co-activation, transitions, mutual information; specialisation and saturation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError
from bmoe_lab.metrics import coupling, domains
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import cells, decoded, hand_made, ragged, ragged_traces, uniform

WHICH = st.sampled_from(["chosen", "applied"])
PHASE = st.sampled_from(["all", "decode", "prefill"])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(trace=ragged_traces(), which=WHICH, phase=PHASE)
def test_coactivation_and_lift_equal_counts_pair_by_pair(trace, which, phase):
    n_layer, n_expert = trace.sizes["layer"], trace.attrs["n_expert"]
    met = np.zeros((n_layer, n_expert, n_expert))
    own = np.zeros((n_layer, n_expert))
    routings = np.zeros(n_layer)
    for _, layer, experts in cells(trace, which, phase):
        routings[layer] += 1
        for one in experts:
            own[layer, one] += 1
            for other in experts:
                met[layer, one, other] += one != other
    with np.errstate(invalid="ignore", divide="ignore"):
        share = met / own[:, :, None]
        lift = met * routings[:, None, None] / (own[:, :, None] * own[:, None, :])
    share[:, np.arange(n_expert), np.arange(n_expert)] = np.nan
    lift[:, np.arange(n_expert), np.arange(n_expert)] = np.nan
    np.testing.assert_allclose(metrics.coactivation(trace, which=which, phase=phase), share)
    np.testing.assert_allclose(metrics.coactivation_lift(trace, which=which, phase=phase), lift)


def test_coactivation_is_conditional_on_the_first_expert():
    # 0 with 1 twice, 0 with 2 once.
    share = metrics.coactivation(decoded([[0, 1], [1, 0], [0, 2]], n_expert=4)).values[0]
    np.testing.assert_allclose(share[0, 1], 2 / 3)
    np.testing.assert_allclose(share[1, 0], 1.0)
    assert np.isnan(share[3]).all()
    assert share[2, 1] == 0


def test_coactivation_of_a_long_trace_is_counted_in_parts(monkeypatch):
    trace = ragged(turns=((5, 40),))
    expected = metrics.coactivation(trace, phase="all")
    monkeypatch.setattr(coupling, "_WINDOW", 7)
    np.testing.assert_array_equal(metrics.coactivation(trace, phase="all"), expected)


def test_lift_of_an_independent_uniform_router_is_its_chance_within_three_standard_errors():
    n_token, n_expert, n_used = 4000, 8, 3
    lift = metrics.coactivation_lift(uniform(n_token, 2, n_expert, n_used, seed=3))
    expected = (n_used - 1) * n_expert / (n_used * (n_expert - 1))
    pair = n_used * (n_used - 1) / (n_expert * (n_expert - 1))
    error = expected * np.sqrt((1 - pair) / (pair * n_token))
    assert abs(float(lift.mean()) - expected) < 3 * error
    assert float(abs(lift - expected).max()) < 4 * error
    np.testing.assert_allclose(lift, lift.transpose("layer", "partner", "expert"))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(trace=ragged_traces(), ahead=st.integers(1, 2), which=WHICH, phase=PHASE)
def test_transition_and_information_equal_counts_token_by_token(trace, ahead, which, phase):
    n_expert = trace.attrs["n_expert"]
    n_pair = max(0, trace.sizes["layer"] - ahead)
    found = {(t, layer): experts for t, layer, experts in cells(trace, which, phase)}
    table = np.zeros((n_pair, n_expert, n_expert))
    own = np.zeros((n_pair, n_expert))
    for (token, layer), experts in found.items():
        later = found.get((token, layer + ahead))
        if later is None:
            continue
        for one in experts:
            own[layer, one] += 1
            table[layer, one, later] += 1
    with np.errstate(invalid="ignore", divide="ignore"):
        share = table / own[:, :, None]
    actual = metrics.layer_transition(trace, ahead=ahead, which=which, phase=phase)
    np.testing.assert_allclose(actual, share)
    information = metrics.layer_mutual_information(trace, ahead=ahead, which=which, phase=phase)
    assert information.sizes["layer"] == n_pair
    for layer in range(n_pair):
        total = table[layer].sum()
        expected = np.nan
        if total:
            joint = table[layer] / total
            expected = sum(
                p * np.log(p / (joint[i].sum() * joint[:, j].sum()))
                for (i, j), p in np.ndenumerate(joint)
                if p > 0
            )
        np.testing.assert_allclose(information[layer], expected, atol=1e-12)


def test_transition_rows_sum_to_the_width_of_the_next_layer():
    table = metrics.layer_transition(make_trace(n_token=40, n_layer=3, n_used=4))
    sums = table.sum("next_expert").values
    np.testing.assert_allclose(sums[~np.isnan(table).all("next_expert").values], 4.0)
    assert table["block"].values.tolist() == [0, 1]


def test_mutual_information_of_equal_layers_is_the_entropy_of_one():
    trace = decoded([[[e], [e]] for e in [0, 1, 2, 3] * 5], n_expert=4)
    np.testing.assert_allclose(metrics.layer_mutual_information(trace), [np.log(4)])


def test_mutual_information_of_independent_layers_is_only_its_bias():
    n_token, n_expert = 6000, 8
    information = metrics.layer_mutual_information(uniform(n_token, 4, n_expert, 1, seed=4))
    # 2 n I is chi-squared with (E - 1)^2 degrees of freedom.
    freedom = (n_expert - 1) ** 2
    error = np.sqrt(2 * freedom) / (2 * n_token)
    assert float(abs(information - freedom / (2 * n_token)).max()) < 3 * error


def test_transition_further_than_the_last_layer_is_empty():
    table = metrics.layer_transition(make_trace(n_token=8, n_layer=2), ahead=2)
    assert table.sizes["layer"] == 0
    with pytest.raises(SettingsError, match="ahead must be at least 1; got 0"):
        metrics.layer_transition(make_trace(n_token=8), ahead=0)


# ---------------------------------------------------------------- specialisation


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trace=ragged_traces(), which=WHICH, phase=PHASE, seed=st.integers(0, 9))
def test_specialisation_equals_counts_token_by_token(trace, which, phase, seed):
    domain = np.random.default_rng(seed).choice(["code", "prose"], trace.sizes["token"])
    trace = trace.assign_coords(domain=("token", domain))
    found = cells(trace, which, phase)
    actual = metrics.specialisation(trace, "domain", which=which, phase=phase)
    for name in actual["domain"].values:
        for layer in range(trace.sizes["layer"]):
            routed = [e for t, one, e in found if one == layer and domain[t] == name]
            for expert in range(trace.attrs["n_expert"]):
                expected = (
                    sum(expert in experts for experts in routed) / len(routed) if routed else np.nan
                )
                cell = actual.sel(domain=name).values[layer, expert]
                np.testing.assert_allclose(cell, expected)


def test_specialisation_by_token_id_is_that_of_the_vocabulary():
    trace = hand_made().assign_coords(token_id=("token", np.array([7, 9, 7, 9], np.int32)))
    table = metrics.specialisation(trace, "token_id", phase="all")
    assert table["token_id"].values.tolist() == [7, 9]
    # 7 chose [1, 2] and [1, 3]; 9 chose [2, 1] and [3, 4].
    np.testing.assert_array_equal(table.sel(token_id=7)[0, :5], [0, 1, 0.5, 0.5, 0])
    np.testing.assert_array_equal(table.sel(token_id=9)[0, :5], [0, 0.5, 0.5, 0.5, 0.5])


def test_specialisation_by_what_is_not_there_lists_what_is():
    with pytest.raises(SchemaError, match=r"shape \(token,\); got 'topic'. Known: \['accepted', "):
        metrics.specialisation(hand_made(), "topic")
    with pytest.raises(SchemaError, match="got 'expert_chosen'"):
        metrics.specialisation(hand_made(), "expert_chosen")


def test_specialisation_larger_than_memory_is_refused(monkeypatch):
    monkeypatch.setattr(domains, "_LARGEST", 10)
    with pytest.raises(SettingsError, match="at most 1 GiB; got 3 values of 'batch'"):
        metrics.specialisation(hand_made(), "batch", phase="all")


# ---------------------------------------------------------------- saturation


def test_router_saturation_compares_choices_not_what_ran():
    reference, trace = hand_made(), hand_made()
    trace["action"].values[3, 0, 1] = 1
    trace["expert_applied"].values[3, 0] = [3, 3]
    assert float(metrics.router_saturation(trace, reference)) == 1.0
    trace["expert_chosen"].values[2, 0] = [3, 6]
    np.testing.assert_array_equal(
        metrics.router_saturation(trace, reference, by="token"), [0.5, 1.0]
    )


def test_router_saturation_of_another_text_is_refused():
    with pytest.raises(SettingsError, match="must hold the same tokens, 4; got 10"):
        metrics.router_saturation(hand_made(), make_trace(n_token=10, n_layer=1))


def test_router_saturation_of_unrelated_routers_is_chance_within_three_standard_errors():
    n_token, n_expert, n_used = 3000, 8, 2
    a, b = (uniform(n_token, 2, n_expert, n_used, seed=s) for s in (6, 7))
    chance = n_used / n_expert
    variance = chance * (1 - chance) * (n_expert - n_used) / (n_expert - 1) / n_used
    error = np.sqrt(variance / (n_token * 2))
    assert abs(float(metrics.router_saturation(a, b)) - chance) < 3 * error
