"""Overlap, working set and reuse distance, against loops that spell the definitions out."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import cells, decoded, hand_made, ragged_traces, uniform

WHICH = st.sampled_from(["chosen", "applied"])
PHASE = st.sampled_from(["all", "decode", "prefill"])


def follow(trace: xr.Dataset, before: int, after: int) -> bool:
    """Return whether two tokens belong to one turn, with every position between them."""
    turn, position = trace["turn"].values, trace["position"].values
    steps = range(before + 1, after + 1)
    return all(turn[t] == turn[t - 1] and position[t] == position[t - 1] + 1 for t in steps)


# ---------------------------------------------------------------- overlap, Jaccard


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trace=ragged_traces(), lag=st.integers(1, 4), which=WHICH, phase=PHASE)
def test_overlap_and_jaccard_equal_the_definition_pair_by_pair(trace, lag, which, phase):
    found = {(t, layer): set(e) for t, layer, e in cells(trace, which, phase)}
    shared, slots, similar = 0, 0, []
    for (token, layer), experts in found.items():
        before = found.get((token - lag, layer))
        if before is None or not follow(trace, token - lag, token):
            continue
        shared += len(experts & before)
        slots += len(experts)
        similar.append(len(experts & before) / len(experts | before))
    overlap = metrics.consecutive_overlap(trace, lag=lag, which=which, phase=phase)
    jaccard = metrics.consecutive_jaccard(trace, lag=lag, which=which, phase=phase)
    np.testing.assert_allclose(overlap, shared / slots if slots else np.nan)
    np.testing.assert_allclose(jaccard, np.mean(similar) if similar else np.nan)


def test_jaccard_of_a_pair_is_a_function_of_its_overlap():
    trace = hand_made()
    overlap = metrics.consecutive_overlap(trace, by="token", phase="all")
    jaccard = metrics.consecutive_jaccard(trace, by="token", phase="all")
    np.testing.assert_allclose(jaccard, [np.nan, 1, 1 / 3, 1 / 3])
    np.testing.assert_allclose(jaccard, overlap / (2 - overlap))


def test_overlap_of_several_lags_is_a_curve():
    trace = make_trace(n_token=40, n_layer=2)
    curve = metrics.consecutive_overlap(trace, lag=[1, 5], by="layer")
    assert curve.dims == ("lag", "layer")
    assert curve["lag"].values.tolist() == [1, 5]
    assert set(curve.coords) == {"lag", "block", "group"}
    np.testing.assert_array_equal(
        curve.sel(lag=5), metrics.consecutive_overlap(trace, lag=5, by="layer")
    )


def test_overlap_without_positions_goes_by_the_order():
    trace = hand_made().drop_vars("position")
    np.testing.assert_allclose(
        metrics.consecutive_overlap(trace, by="token", phase="all"), [np.nan, 1, 0.5, 0.5]
    )


@pytest.mark.parametrize("lag", [0, 1.5, True, [1, -1]])
def test_overlap_of_an_impossible_lag_is_refused(lag):
    with pytest.raises(SettingsError, match="lag must be "):
        metrics.consecutive_jaccard(hand_made(), lag=lag)


def test_overlap_of_an_independent_uniform_router_is_chance_within_three_standard_errors():
    n_token, n_layer, n_expert, n_used = 2000, 3, 16, 4
    trace = uniform(n_token, n_layer, n_expert, n_used, seed=2)
    chance = n_used / n_expert
    assert float(metrics.chance_overlap(trace)) == chance
    # The shared experts of two draws without replacement are hypergeometric.
    variance = n_used * chance * (1 - chance) * (n_expert - n_used) / (n_expert - 1) / n_used**2
    for lag in (1, 8):
        pairs = (n_token - lag) * n_layer
        overlap = float(metrics.consecutive_overlap(trace, lag=lag))
        assert abs(overlap - chance) < 3 * np.sqrt(variance / pairs)


def test_chance_overlap_of_layers_of_different_width():
    trace = make_trace(n_token=6, n_layer=2, n_expert=16, n_used=4, n_prefill=0).copy(deep=True)
    trace["n_expert_used"].values[1] = 2
    for name in ("expert_chosen", "expert_applied"):
        trace[name].values[:, 1, 2:] = -1
    np.testing.assert_array_equal(metrics.chance_overlap(trace, by="layer"), [4 / 16, 2 / 16])
    # By slot, as the overlap itself: two thirds of the slots are the first layer's.
    np.testing.assert_allclose(metrics.chance_overlap(trace), (2 * 4 + 1 * 2) / 3 / 16)


# ---------------------------------------------------------------- working set


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trace=ragged_traces(), window=st.integers(1, 5), which=WHICH, phase=PHASE)
def test_working_set_equals_the_union_window_by_window(trace, window, which, phase):
    found = {(t, layer): set(e) for t, layer, e in cells(trace, which, phase)}
    number = {"prefill": 0, "decode": 1}
    tokens = [
        t
        for t in range(trace.sizes["token"])
        if phase == "all" or trace["phase"].values[t] == number[phase]
    ]
    expected = np.full((len(tokens), trace.sizes["layer"]), np.nan)
    for row, token in enumerate(tokens):
        for layer in range(trace.sizes["layer"]):
            looked_at = range(token - window + 1, token + 1)
            if looked_at[0] < 0 or not follow(trace, looked_at[0], token):
                continue
            sets = [found.get((t, layer)) for t in looked_at]
            if all(sets):
                expected[row, layer] = len(set.union(*sets))
    actual = metrics.working_set(trace, window, which=which, phase=phase)
    np.testing.assert_array_equal(actual, expected)
    in_bytes = metrics.working_set(trace, window, unit="byte", which=which, phase=phase)
    np.testing.assert_array_equal(in_bytes, expected * trace["expert_bytes"].values)
    assert in_bytes.attrs["units"] == "byte"


def test_working_set_keeps_the_coordinates_of_the_phase():
    trace = make_trace(n_token=12, n_layer=2)
    sizes = metrics.working_set(trace, 3)
    assert sizes.dims == ("token", "layer")
    np.testing.assert_array_equal(sizes["position"], trace["position"][trace["phase"] == 1])


def test_working_set_refuses_what_it_does_not_know():
    with pytest.raises(SettingsError, match="window must be at least 1; got 0"):
        metrics.working_set(hand_made(), 0)
    with pytest.raises(UnknownNameError, match=r"unit must be one of \['byte', 'expert'\]"):
        metrics.working_set(hand_made(), 1, unit="bytes")


# ---------------------------------------------------------------- reuse distance


Rows = list[tuple[int, int, int, int, bool]]


def loads(trace: xr.Dataset, which: str, phase: str) -> list[Rows]:
    """Return the loads, each a list of (token, layer, slot, expert, asks) in token-major order."""
    number = {"prefill": 0, "decode": 1}
    found: dict[tuple[int, int, int], Rows] = {}
    n_token, n_layer, n_slot = trace["action"].shape
    for token in range(n_token):
        if phase != "all" and trace["phase"].values[token] != number[phase]:
            continue
        for layer in range(n_layer):
            for slot in range(n_slot):
                where = (token, layer, slot)
                gone = which == "applied" and trace["action"].values[where] == 1
                expert = int(trace[f"expert_{which}"].values[where])
                if expert >= 0:
                    key = (int(trace["turn"][token]), int(trace["batch"][token]), layer)
                    found.setdefault(key, []).append((*where, expert, not gone))
    return [found[key] for key in sorted(found)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trace=ragged_traces(), which=WHICH, phase=PHASE, across=st.booleans())
def test_reuse_distance_equals_a_stack_of_keys(trace, which, phase, across):
    """A list, the newest key last: what lies from a key to the end was used since."""
    in_experts = np.full(trace["action"].shape, np.nan)
    in_bytes = in_experts.copy()
    size = trace["expert_bytes"].values
    stack: list[tuple[int, int]] = []
    turn = None
    for load in loads(trace, which, phase):
        if not across and turn != int(trace["turn"][load[0][0]]):
            turn, stack = int(trace["turn"][load[0][0]]), []
        seen = set()
        for token, layer, slot, expert, asks in load:
            key = (layer, expert)
            if not asks:
                continue
            if key in stack and key not in seen:
                since = stack[stack.index(key) :]
                in_experts[token, layer, slot] = len(since)
                in_bytes[token, layer, slot] = sum(int(size[one]) for one, _ in since)
            seen.add(key)
        for _, layer, _, expert, _ in load:
            if (layer, expert) in stack:
                stack.remove((layer, expert))
            stack.append((layer, expert))
    rows = np.ones(trace.sizes["token"], dtype=bool)
    if phase != "all":
        rows = trace["phase"].values == {"prefill": 0, "decode": 1}[phase]
    for unit, expected in (("expert", in_experts), ("byte", in_bytes)):
        actual = metrics.reuse_distance(
            trace, unit=unit, which=which, phase=phase, across_turns=across
        )
        np.testing.assert_array_equal(actual, expected[rows])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trace=ragged_traces(), which=WHICH, phase=PHASE, across=st.booleans())
def test_reuse_distance_in_tokens_equals_a_search_back(trace, which, phase, across):
    found = cells(trace, which, phase)
    tokens = sorted({t for t, _, _ in found})
    number = {"prefill": 0, "decode": 1}
    kept = [
        t
        for t in range(trace.sizes["token"])
        if phase == "all" or trace["phase"].values[t] == number[phase]
    ]
    place = {t: i for i, t in enumerate(kept)}
    used = {(t, layer): experts for t, layer, experts in found}
    expected: list[float] = []
    for token, layer, experts in found:
        for expert in experts:
            back = [
                t
                for t in tokens
                if t < token
                and expert in used.get((t, layer), [])
                and (across or trace["turn"].values[t] == trace["turn"].values[token])
            ]
            if back:
                expected.append(place[token] - place[max(back)])
    actual = metrics.reuse_distance(trace, which=which, phase=phase, across_turns=across)
    assert actual.shape[0] == len(kept)
    values = actual.values[~np.isnan(actual.values)]
    np.testing.assert_array_equal(values, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n_prefill=st.integers(0, 12),
    n_ubatch=st.integers(1, 8),
    seed=st.integers(0, 99),
    frac=st.floats(0.0, 1.0),
    policy=st.sampled_from([None, "drop", "substitute"]),
)
def test_reuse_distance_gives_the_hits_of_an_lru_of_any_budget(
    n_prefill, n_ubatch, seed, frac, policy
):
    """Against the LRU that made the trace, row by row."""
    trace = make_trace(
        24,
        n_layer=3,
        n_expert=8,
        n_used=3,
        n_prefill=n_prefill,
        n_ubatch=n_ubatch,
        seed=seed,
        budget_frac=frac,
        policy=policy,
    )
    distance = metrics.reuse_distance(trace, unit="byte", which="applied", phase="all").values
    first = metrics.first_of_load(trace).values
    hit = trace["residency"].values == 1
    np.testing.assert_array_equal(
        (distance <= trace.attrs["cache_budget_bytes"])[first], hit[first]
    )
    assert np.isnan(distance[~first]).all()


def test_reuse_distance_of_a_cycle_is_its_length():
    trace = decoded([[0, 1], [2, 3], [4, 5]] * 4, n_expert=8)
    assert set(metrics.reuse_distance(trace).values[3:].ravel()) == {3.0}
    # From the start of the load: both experts of the present token are not used yet.
    in_experts = metrics.reuse_distance(trace, unit="expert").values[3:]
    assert in_experts[:, 0].tolist() == [[6.0, 5.0]] * 9


def test_reuse_distance_quantiles_skip_first_uses():
    trace = decoded([[0], [1], [0], [0]], n_expert=4)
    assert metrics.reuse_distance(trace).values.ravel().tolist()[2:] == [2.0, 1.0]
    assert float(metrics.reuse_distance(trace).quantile(0.5)) == 1.5


def test_reuse_distance_beyond_four_gibibytes_does_not_wrap():
    trace = decoded([[0, 1], [2, 3], [0, 1]], n_expert=4)
    trace["expert_bytes"].values[:] = 3 << 30
    values = metrics.reuse_distance(trace, unit="byte").values[2, 0]
    assert values.tolist() == [4 * (3 << 30), 3 * (3 << 30)]


def test_reuse_distance_unknown_unit_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"unit must be one of \['byte', 'expert', 'token'"):
        metrics.reuse_distance(hand_made(), unit="step")


def test_reuse_distance_of_an_independent_uniform_router_is_geometric():
    """The chance that a token takes an expert is k/E whatever came before: mean E/k tokens."""
    n_token, n_expert, n_used = 4000, 8, 2
    distance = metrics.reuse_distance(uniform(n_token, 2, n_expert, n_used, seed=5))
    chance = n_used / n_expert
    known = distance.values[~np.isnan(distance.values)]
    error = np.sqrt((1 - chance) / chance**2 / known.size)
    assert abs(known.mean() - 1 / chance) < 3 * error
