from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.schema import Action, Phase, Residency
from bmoe_lab.testing.traces import make_trace


def test_make_trace_same_arguments_same_trace():
    one, other = (make_trace(30, scores=True, policy="drop", seed=3) for _ in range(2))
    xr.testing.assert_identical(one, other)
    assert not one.equals(make_trace(30, scores=True, policy="drop", seed=4))


def test_make_trace_weights_sum_to_one_and_fall_with_slot():
    weights = make_trace().weight_chosen.values
    routed = ~np.isnan(weights[..., 0])
    np.testing.assert_allclose(weights[routed].sum(axis=-1), 1, rtol=1e-6)
    assert (np.diff(weights[routed], axis=-1) <= 0).all()


def test_make_trace_chosen_experts_have_the_best_scores():
    trace = make_trace(scores=True)
    best = np.argsort(-trace.router_score.values, axis=-1, kind="stable")[..., :4]
    routed = trace.expert_chosen.values[..., 0] >= 0
    np.testing.assert_array_equal(trace.expert_chosen.values[routed], best[routed])


def test_make_trace_last_layer_routes_the_last_prompt_token_only():
    trace = make_trace(40, n_prefill=20, n_ubatch=8)
    routed = (trace.expert_chosen.values[..., 0] >= 0)[trace.phase.values == Phase.prefill]
    assert routed[:, :-1].all()
    assert routed[:, -1].tolist() == [False] * 19 + [True]


def test_make_trace_is_local():
    chosen = make_trace(200, n_expert=32, n_prefill=0).expert_chosen.values
    again = np.mean(
        [
            np.isin(now, before)
            for one in chosen.swapaxes(0, 1)
            for before, now in itertools.pairwise(one)
        ]
    )
    assert again > 2 * 4 / 32  # twice what a uniform draw gives


@pytest.mark.parametrize("policy", [None, "drop", "substitute"])
def test_make_trace_bytes_are_charged_once_per_missing_expert_and_load(policy):
    trace = make_trace(50, n_ubatch=8, policy=policy, budget_frac=0.3)
    batch = trace.batch.values
    for index in np.unique(batch):
        part = trace.isel(token=batch == index)
        for layer in range(trace.sizes["layer"]):
            cells = part.isel(layer=layer)
            ran = (cells.action.values != Action.dropped) & (cells.expert_applied.values >= 0)
            miss = ran & (cells.residency.values == Residency.miss)
            distinct = np.unique(cells.expert_applied.values[miss]).size
            expected = distinct * int(trace.expert_bytes[layer])
            assert int(cells.read_bytes.sum()) == expected


def test_make_trace_budget_holds_after_each_decode_evaluation():
    trace = make_trace(60, budget_frac=0.4)
    resident = trace.cache_resident_bytes.values
    decode = (trace.phase.values == Phase.decode) & ~np.isnan(resident)
    assert (resident[decode] <= trace.attrs["cache_budget_bytes"]).all()
    assert trace.evictions.sum() > 0


def test_make_trace_tiny_budget_never_hits():
    trace = make_trace(30, n_used=4, n_expert=16, budget_frac=0.0)
    assert not (trace.residency == Residency.hit).any()


@pytest.mark.parametrize(
    ("policy", "action"), [("drop", Action.dropped), ("substitute", Action.substituted)]
)
def test_make_trace_policy_acts_in_decode_only(policy, action):
    trace = make_trace(policy=policy, budget_frac=0.3)
    acted = (trace.action == action).any(["layer", "slot"]).values
    assert acted.any()
    assert not acted[trace.phase.values == Phase.prefill].any()
    assert trace.attrs["lossless"] == 0


def test_make_trace_without_text_has_none():
    assert not {"piece", "token_id"} & set(make_trace(text=False).variables)


def test_make_trace_impossible_shape_is_refused():
    with pytest.raises(SettingsError, match="1 <= n_used <= n_expert"):
        make_trace(n_used=9, n_expert=8)
    with pytest.raises(SettingsError, match="n_prefill must be from 0 to n_token = 4"):
        make_trace(4, n_prefill=5)
