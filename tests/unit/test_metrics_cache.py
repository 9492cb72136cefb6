"""Bytes hit, demand, rereads, warm-up; places against demand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError
from bmoe_lab.schema import Action
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import decoded, hand_made, lookups, ragged, ragged_traces


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trace=ragged_traces(), by=st.sampled_from([None, "token", "layer", "slot"]))
def test_byte_hit_rate_and_demand_equal_the_definition_row_by_row(trace, by):
    axis = ("token", "layer", "slot").index(by) if by else None
    size = 1 if by is None else trace.sizes[by]
    hit, asked = np.zeros(size), np.zeros(size)
    for token, layer, slot in lookups(trace).values():
        group = 0 if axis is None else (token, layer, slot)[axis]
        n_bytes = int(trace["expert_bytes"][layer])
        asked[group] += n_bytes
        hit[group] += n_bytes * (trace["residency"].values[token, layer, slot] in (1, 2))
    with np.errstate(invalid="ignore"):
        expected = hit / asked
    actual = metrics.byte_hit_rate(trace, by=by, phase="all")
    np.testing.assert_allclose(np.atleast_1d(actual), expected)
    n_token = 1 if by == "token" else trace.sizes["token"]
    demand = metrics.demand_bytes_per_token(trace, by=by, phase="all")
    np.testing.assert_allclose(np.atleast_1d(demand), asked / n_token)


def test_byte_hit_rate_weighs_layers_by_their_experts():
    trace = make_trace(n_token=1, n_layer=2, n_used=1, n_prefill=0, expert_bytes=400)
    trace["residency"].values[0, :, 0] = [1, 0]
    assert float(metrics.hit_rate(trace)) == 0.5
    np.testing.assert_allclose(metrics.byte_hit_rate(trace), 400 / 900)


def test_demand_of_a_wide_evaluation_is_shared_by_its_tokens():
    # Two tokens, the same two experts: four rows, two experts needed.
    trace = hand_made()
    size = int(trace["expert_bytes"][0])
    assert float(metrics.demand_bytes_per_token(trace, phase="prefill")) == size
    assert float(metrics.demand_bytes_per_token(trace)) == 2 * size


def test_demand_of_a_dropped_slot_is_nothing():
    trace = hand_made()
    trace["action"].values[3, 0, 1] = Action.dropped
    size = int(trace["expert_bytes"][0])
    np.testing.assert_array_equal(
        metrics.demand_bytes_per_token(trace, by="token"), [2 * size, size]
    )


def test_hit_rate_after_a_warm_up_says_so_in_its_name():
    trace = decoded([[0], [1], [0], [1], [0]])
    trace["residency"].values[:, 0, 0] = [0, 0, 1, 1, 1]
    warm = metrics.hit_rate(trace, warmup=2)
    assert (warm.name, float(warm)) == ("hit_rate_decode_after_2", 1.0)
    assert float(metrics.hit_rate(trace)) == pytest.approx(0.6)
    in_bytes = metrics.byte_hit_rate(trace, warmup=1)
    assert (in_bytes.name, float(in_bytes)) == ("byte_hit_rate_decode_after_1", 0.75)
    assert metrics.hit_rate(trace, warmup=1, by="token").sizes["token"] == 4
    assert np.isnan(float(metrics.hit_rate(trace, warmup=5)))
    with pytest.raises(SettingsError, match="warmup must be at least 0; got -1"):
        metrics.hit_rate(trace, warmup=-1)


def test_hit_rate_warm_up_of_cold_turns_begins_in_each():
    trace = decoded([[0], [0], [0], [0], [0], [0]])
    trace["turn"].values[:] = [0, 0, 0, 1, 1, 1]
    trace["residency"].values[:, 0, 0] = [0, 1, 1, 0, 1, 1]
    assert float(metrics.hit_rate(trace, warmup=1)) == 0.8
    assert float(metrics.hit_rate(trace.assign_attrs(cold_turns=1), warmup=1)) == 1.0


def test_speculative_hit_rate_is_part_of_the_hit_rate():
    trace = hand_made()
    # Decode: a hit, a speculative hit, two misses.
    assert float(metrics.speculative_hit_rate(trace)) == 0.25
    assert float(metrics.hit_rate(trace)) == 0.5


def test_rereads_count_what_was_read_before_in_any_phase():
    trace = decoded([[0], [1], [0], [0], [1]])
    trace["residency"].values[:, 0, 0] = [0, 0, 0, 1, 0]
    np.testing.assert_array_equal(metrics.rereads_per_token(trace, by="token"), [0, 0, 1, 0, 1])
    assert float(metrics.rereads_per_token(trace)) == 0.4
    trace["phase"].values[:2] = 0
    np.testing.assert_allclose(metrics.rereads_per_token(trace), 2 / 3)


def test_rereads_of_another_layer_are_other_experts():
    trace = decoded([[[0], [0]], [[0], [1]]])
    trace["residency"].values[:] = 0
    np.testing.assert_array_equal(metrics.rereads_per_token(trace, by="layer"), [0.5, 0.0])


def test_rereads_are_bounded_by_the_evictions():
    trace = make_trace(n_token=80, n_layer=3, budget_frac=0.3)
    rereads = float(metrics.rereads_per_token(trace, phase="all"))
    evictions = float(metrics.evictions_per_token(trace, phase="all"))
    assert 0 < rereads <= evictions


def test_load_count_counts_layers_that_routed():
    trace = ragged(turns=((5, 3), (2, 2)), n_ubatch=4)
    # The last layer of a prompt routes its last token only: one of the two evaluations of five.
    np.testing.assert_array_equal(metrics.load_count(trace, by="layer", phase="prefill"), [3, 3, 2])
    np.testing.assert_array_equal(metrics.load_count(trace, by="layer"), [5, 5, 5])
    assert float(metrics.load_count(trace, phase="all")) == 23


def test_expert_bank_and_used_bytes():
    trace = decoded([[[0, 1], [0, 1]], [[0, 2], [0, 1]]], n_expert=4)
    size = trace["expert_bytes"].values
    assert int(metrics.expert_bank_bytes(trace)) == 4 * size.sum()
    np.testing.assert_array_equal(metrics.used_bytes(trace), [3 * size[0], 2 * size[1]])


def test_slots_per_demand_splits_the_budget_evenly():
    trace = decoded([[[0, 1], [0, 1]], [[0, 2], [0, 1]]], n_expert=4)
    trace["expert_bytes"].values[:] = [1024, 2048]
    actual = metrics.slots_per_demand(trace, "12 KiB")
    np.testing.assert_allclose(actual, [6 / 3, 3 / 2])
    np.testing.assert_allclose(
        metrics.slots_per_demand(trace.assign_attrs(cache_budget_bytes=6144)), [1.0, 0.75]
    )


def test_slots_per_demand_without_a_budget_asks_for_one():
    trace = hand_made()
    del trace.attrs["cache_budget_bytes"]
    with pytest.raises(SettingsError, match="budget must be given for a trace without"):
        metrics.slots_per_demand(trace)
    with pytest.raises(SettingsError, match="budget must be a size such as"):
        metrics.slots_per_demand(trace, "12 XB")
