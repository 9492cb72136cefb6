"""Hits, reads, policies, router and text against loops that spell the definitions out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.schema import Action, Phase, Residency
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import hand_made, lookups

# ---------------------------------------------------------------- hit rate


def test_hit_rate_counts_one_lookup_per_distinct_expert_of_a_prefill():
    trace = hand_made()
    trace["residency"].values[:2, 0] = [[1, 0], [0, 1]]
    # Expert 1 resident, expert 2 not: two lookups, four rows.
    assert float(metrics.hit_rate(trace, phase="prefill")) == 0.5
    trace["expert_applied"].values[:2, 0] = [[1, 2], [2, 5]]
    trace["residency"].values[:2, 0] = [[1, 0], [0, 0]]
    assert float(metrics.hit_rate(trace, phase="prefill")) == pytest.approx(1 / 3)
    assert float(metrics.hit_rate(trace, phase="prefill", per="routing")) == 0.25


def test_hit_rate_counts_speculative_hits_as_hits():
    assert float(metrics.hit_rate(hand_made(), phase="decode")) == 0.5


def test_hit_rate_dropped_slot_is_no_lookup():
    trace = hand_made()
    trace["action"].values[3, 0, 1] = Action.dropped
    assert float(metrics.hit_rate(trace)) == pytest.approx(2 / 3)


def test_hit_rate_not_streamed_cells_are_left_out():
    trace = hand_made()
    trace["residency"].values[:] = Residency.not_streamed
    assert np.isnan(float(metrics.hit_rate(trace)))
    assert np.isnan(metrics.hit_rate(trace, by="token").values).all()


@pytest.mark.parametrize("policy", [None, "drop", "substitute"])
@pytest.mark.parametrize("by", [None, "token", "layer", "slot"])
def test_hit_rate_equals_the_definition_row_by_row(policy, by):
    trace = make_trace(n_token=40, n_layer=3, n_expert=8, n_used=3, n_ubatch=5, policy=policy)
    hits: dict[int, list[bool]] = {}
    for where in lookups(trace).values():
        group = 0 if by is None else where[("token", "layer", "slot").index(by)]
        hits.setdefault(group, []).append(int(trace.residency[where]) in (1, 2))
    size = 1 if by is None else trace.sizes[by]
    expected = [np.mean(hits[g]) if g in hits else np.nan for g in range(size)]
    actual = metrics.hit_rate(trace, by=by, phase="all")
    np.testing.assert_allclose(np.atleast_1d(actual.values), expected)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    n_token=st.integers(1, 30),
    n_ubatch=st.integers(1, 9),
    n_used=st.integers(1, 4),
    policy=st.sampled_from([None, "drop", "substitute"]),
    seed=st.integers(0, 99),
)
def test_first_of_load_equals_the_definition_row_by_row(n_token, n_ubatch, n_used, policy, seed):
    trace = make_trace(
        n_token,
        n_layer=2,
        n_expert=6,
        n_used=n_used,
        n_prefill=n_token // 2,
        n_ubatch=n_ubatch,
        policy=policy,
        seed=seed,
    )
    expected = np.zeros(trace.residency.shape, dtype=bool)
    for where in lookups(trace).values():
        expected[where] = True
    np.testing.assert_array_equal(metrics.first_of_load(trace).values, expected)


def test_hit_rate_of_part_of_a_trace_counts_that_part():
    trace = make_trace(n_token=30, n_layer=2)
    decode = trace.isel(token=trace.phase.values == Phase.decode)
    assert float(metrics.hit_rate(decode, phase="all")) == float(metrics.hit_rate(trace))


def test_hit_rate_name_carries_the_phase_and_keeps_block_coordinates():
    rate = metrics.hit_rate(make_trace(n_token=8), by="layer")
    assert rate.name == "hit_rate_decode"
    assert rate.attrs["units"] == "1"
    assert list(rate.coords) == ["block", "group"]


def test_hit_rate_without_residency_names_what_is_there():
    trace = make_trace(n_token=8).drop_vars("residency")
    with pytest.raises(SchemaError, match=r"must hold the variable 'residency'; got \['action'"):
        metrics.hit_rate(trace)


@pytest.mark.parametrize(
    "kwargs", [{"by": "expert"}, {"per": "row"}, {"phase": "decoding"}], ids=["by", "per", "phase"]
)
def test_hit_rate_unknown_name_lists_the_known_ones(kwargs):
    with pytest.raises(UnknownNameError, match=rf"{next(iter(kwargs))} must be one of \["):
        metrics.hit_rate(make_trace(n_token=8), **kwargs)


# ---------------------------------------------------------------- bytes


def test_read_bytes_per_token_sums_charges_not_misses():
    trace = hand_made()
    assert float(metrics.read_bytes_per_token(trace, phase="prefill")) == 10.0
    assert float(metrics.read_bytes_per_token(trace)) == 10.0
    np.testing.assert_array_equal(
        metrics.read_bytes_per_token(trace, by="token", phase="all"), [20, 0, 10, 10]
    )
    np.testing.assert_array_equal(metrics.read_bytes_per_token(trace, by="slot"), [0, 10])


def test_read_bytes_per_token_beyond_four_gibibytes_does_not_wrap():
    trace = hand_made()
    trace["read_bytes"].values[:] = np.uint32(3 << 30)
    assert float(metrics.read_bytes_per_token(trace)) == 2 * (3 << 30)


def test_read_bytes_per_token_empty_phase_is_unknown():
    assert np.isnan(float(metrics.read_bytes_per_token(hand_made(), phase="draft")))


def test_token_cycle_bytes_counts_every_layer_with_its_own_size():
    trace = make_trace(n_token=4, n_layer=3, n_used=2, expert_bytes=4000)
    assert int(metrics.token_cycle_bytes(trace)) == 2 * (4000 + 5000 + 4000)


# ---------------------------------------------------------------- policy


@pytest.mark.parametrize(
    ("policy", "metric", "action"),
    [
        ("drop", metrics.drop_rate, Action.dropped),
        ("substitute", metrics.substitution_rate, Action.substituted),
    ],
)
def test_rates_count_routed_slots_only(policy, metric, action):
    trace = make_trace(n_token=60, policy=policy)
    decode = trace.phase.values == Phase.decode
    actions = trace.action.values[decode]
    expected = (actions == action).sum() / (actions != 255).sum()
    assert 0 < float(metric(trace)) == pytest.approx(expected)
    # The masked cells of the last layer are not slots that could have been dropped.
    by_layer = metric(trace, by="layer", phase="all").values
    assert by_layer[-1] == pytest.approx(
        (trace.action.values[:, -1] == action).sum() / (trace.action.values[:, -1] != 255).sum()
    )


def test_weight_discarded_sums_what_did_not_run():
    trace = hand_made()
    trace["action"].values[2, 0, 1] = Action.dropped  # 0.1
    trace["action"].values[3, 0, 0] = Action.substituted  # 0.5
    assert float(metrics.weight_discarded_frac(trace)) == pytest.approx(0.6 / 2.0)
    np.testing.assert_allclose(
        metrics.weight_discarded_frac(trace, by="token"), [0.1, 0.5], rtol=1e-6
    )


def test_weight_discarded_unknown_weight_is_unknown_not_zero():
    trace = hand_made()
    trace["action"].values[3, 0, 0] = Action.substituted
    trace["weight_chosen"].values[3, 0, 0] = np.nan
    assert np.isnan(float(metrics.weight_discarded_frac(trace)))
    by_token = metrics.weight_discarded_frac(trace, by="token").values
    assert by_token[0] == 0.0
    assert np.isnan(by_token[1])


def test_weight_discarded_masked_cells_do_not_make_it_unknown():
    trace = make_trace(n_token=40, policy="drop")
    assert np.isnan(trace.weight_chosen.values).any()
    assert 0 < float(metrics.weight_discarded_frac(trace, phase="all")) < 1


def test_routing_agreement_ignores_order_and_counts_drops():
    reference = hand_made()
    trace = hand_made()
    trace["expert_applied"].values[2, 0] = [3, 1]  # the same set
    trace["action"].values[3, 0, 1] = Action.dropped
    trace["expert_applied"].values[3, 0] = [3, 3]  # the stand-in of the dropped slot
    agreement = metrics.routing_agreement(trace, reference, by="token")
    np.testing.assert_array_equal(agreement, [1.0, 0.5])
    assert float(metrics.routing_agreement(trace, reference)) == 0.75


def test_routing_agreement_stand_in_of_a_drop_does_not_count_as_agreement():
    reference = hand_made()
    trace = hand_made()
    trace["action"].values[3, 0, 0] = Action.dropped
    trace["expert_applied"].values[3, 0] = [3, 7]
    np.testing.assert_array_equal(
        metrics.routing_agreement(trace, reference, by="token"), [1.0, 0.0]
    )


def test_routing_agreement_masked_cells_are_left_out():
    trace = make_trace(n_token=20)
    agreement = metrics.routing_agreement(trace, trace, by="layer", phase="all")
    np.testing.assert_array_equal(agreement, 1.0)


def test_routing_agreement_of_different_text_is_refused():
    trace = make_trace(n_token=20)
    other = trace.assign_coords(token_id=("token", np.arange(20, dtype=np.int32)))
    with pytest.raises(SettingsError, match="got another token_id at token"):
        metrics.routing_agreement(trace, other)
    with pytest.raises(SettingsError, match="must hold the same tokens, 20; got 10"):
        metrics.routing_agreement(trace, make_trace(n_token=10))


# ---------------------------------------------------------------- router


def test_expert_load_counts_choices_per_layer():
    load = metrics.expert_load(hand_made(), phase="all")
    np.testing.assert_allclose(load[0], np.array([0, 3, 2, 2, 1, 0, 0, 0]) / 8)


def test_expert_load_applied_leaves_dropped_slots_out():
    trace = hand_made()
    trace["action"].values[3, 0, 1] = Action.dropped
    trace["expert_applied"].values[3, 0, 1] = 3
    load = metrics.expert_load(trace, which="applied")
    np.testing.assert_allclose(load[0, [1, 3]], [1 / 3, 2 / 3])


def test_expert_load_layer_that_never_routed_is_unknown():
    trace = hand_made()
    trace["expert_chosen"].values[:] = -1
    assert np.isnan(metrics.expert_load(trace).values).all()


def test_expert_load_without_the_number_of_experts_is_refused():
    trace = hand_made()
    del trace.attrs["n_expert"]
    with pytest.raises(SchemaError, match="attribute 'n_expert'"):
        metrics.expert_load(trace)


def test_consecutive_overlap_compares_neighbours_of_one_turn():
    trace = hand_made()
    # [1,2] [2,1] [1,3] [3,4]
    np.testing.assert_allclose(
        metrics.consecutive_overlap(trace, by="token", phase="all"), [np.nan, 1, 0.5, 0.5]
    )
    trace["turn"].values[2:] = 1
    np.testing.assert_allclose(
        metrics.consecutive_overlap(trace, by="token", phase="all"), [np.nan, 1, np.nan, 0.5]
    )


def test_consecutive_overlap_across_a_gap_is_not_a_pair():
    trace = hand_made()
    trace["position"].values[3] = 9
    assert np.isnan(float(metrics.consecutive_overlap(trace.isel(token=[2, 3]))))


def test_consecutive_overlap_lag_longer_than_the_trace_is_unknown():
    assert np.isnan(float(metrics.consecutive_overlap(hand_made(), lag=50, phase="all")))
    with pytest.raises(SettingsError, match="lag must be at least 1; got 0"):
        metrics.consecutive_overlap(hand_made(), lag=0)


def test_router_entropy_of_known_weights():
    entropy = metrics.router_entropy(hand_made(), by="token")
    expected = [-(0.9 * np.log(0.9) + 0.1 * np.log(0.1)), np.log(2)]
    np.testing.assert_allclose(entropy, expected, rtol=1e-6)
    assert entropy.attrs["units"] == "nat"


def test_router_entropy_unknown_weight_is_unknown():
    trace = hand_made()
    trace["weight_chosen"].values[2, 0, 1] = np.nan
    assert np.isnan(metrics.router_entropy(trace, by="token").values).tolist() == [True, False]


# ---------------------------------------------------------------- text, time


def test_perplexity_ignores_tokens_without_a_probability():
    trace = hand_made()
    trace["logprob"].values[:] = [np.nan, np.nan, -1.0, -3.0]
    assert float(metrics.perplexity(trace)) == pytest.approx(np.exp(2))
    assert np.isnan(float(metrics.perplexity(trace, phase="prefill")))


def test_decode_speed_leaves_prefill_out():
    trace = hand_made()
    trace["wall_s"].values[:] = [100.0, np.nan, 0.25, 0.25]
    assert float(metrics.decode_speed(trace)) == 4.0
