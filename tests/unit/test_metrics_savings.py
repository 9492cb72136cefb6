"""Static tables of what dropping saves; coalescing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import cells, decoded, hand_made, ragged_traces, uniform


def shares(table, phase="decode"):
    names = ("reads_avoided_frac", "weight_discarded_frac", "slots_dropped_frac")
    return [float(table[f"{name}_{phase}"]) for name in names]


def with_reads(trace, seed):
    """Charge bytes to the misses, as a wide evaluation does: not to all of them."""
    rng = np.random.default_rng(seed)
    charged = (trace["residency"].values == 0) & (trace["action"].values != 1)
    charged &= rng.random(charged.shape) < 0.7
    trace["read_bytes"].values[:] = np.where(charged, trace["expert_bytes"].values[:, None], 0)
    return trace


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    trace=ragged_traces(),
    frac=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    n_keep=st.integers(1, 4),
    seed=st.integers(0, 9),
    phase=st.sampled_from(["decode", "prefill", "all"]),
)
def test_savings_equal_the_definition_row_by_row(trace, frac, n_keep, seed, phase):
    trace = with_reads(trace, seed)
    n_keep = min(n_keep, trace.sizes["slot"])
    sums = {"drop": np.zeros(3), "keep": np.zeros(3)}
    total = np.zeros(3)
    for token, layer, _ in cells(trace, "chosen", phase):
        rows = []
        for slot in range(trace.sizes["slot"]):
            where = (token, layer, slot)
            if trace["action"].values[where] in (1, 255):
                continue
            rows.append(
                (
                    slot,
                    float(trace["weight_chosen"].values[where]),
                    int(trace["residency"].values[where]) == 0,
                    int(trace["read_bytes"].values[where]),
                )
            )
        mass = sum(weight for _, weight, _, _ in rows)
        best = max(rows, key=lambda row: row[1])[0]
        for slot, weight, missed, n_bytes in rows:
            amount = np.array([n_bytes if missed else 0, weight, 1])
            total += amount
            limit = frac * mass / int(trace["n_expert_used"][layer])
            if missed and slot != best and weight < limit:
                sums["drop"] += amount
            if slot >= n_keep:
                sums["keep"] += amount
    with np.errstate(invalid="ignore"):
        expected = {name: value / total for name, value in sums.items()}
    drop = metrics.drop_savings(trace, frac, phase=phase)
    np.testing.assert_allclose(shares(drop, phase), expected["drop"])
    keep = metrics.keep_savings(trace, n_keep, phase=phase)
    np.testing.assert_allclose(shares(keep, phase), expected["keep"])


def test_drop_savings_of_a_known_trace():
    trace = hand_made()  # decode: weights [.9 hit, .1 miss], [.5 hit, .5 miss]; 10 bytes each miss
    # Half of the reads for 0.1 of 2.0; the second 0.5 is not below a fair share.
    assert shares(metrics.drop_savings(trace, 1.0)) == pytest.approx([0.5, 0.05, 0.25])
    assert shares(metrics.drop_savings(trace, 0.2)) == [0.0, 0.0, 0.0]  # 0.1 is not below 0.1


def test_drop_savings_the_first_of_equal_weights_stays():
    trace = hand_made()
    trace["residency"].values[:] = 0
    trace["weight_chosen"].values[3, 0] = [0.4, 0.4]
    trace["weight_chosen"].values[2, 0] = [0.4, 0.4]
    trace["n_expert_used"].values[:] = 1  # a fair share of 0.8: both are below it
    assert shares(metrics.drop_savings(trace, 1.0))[2] == 0.5


def test_drop_savings_scaled_weights_are_dropped_alike():
    """A model that multiplies its weights must not look as if nothing could be dropped."""
    trace = with_reads(make_trace(n_token=60, n_layer=2), 0)
    before = metrics.drop_savings(trace, [0.5, 1.0])
    trace["weight_chosen"].values[:] *= np.float32(2)
    after = metrics.drop_savings(trace, [0.5, 1.0])
    np.testing.assert_array_equal(after.reads_avoided_frac_decode, before.reads_avoided_frac_decode)
    np.testing.assert_allclose(
        after.weight_discarded_frac_decode, before.weight_discarded_frac_decode
    )


def test_drop_savings_rows_of_unknown_weight_are_left_out():
    trace = hand_made()
    trace["weight_chosen"].values[3, 0] = np.nan
    assert shares(metrics.drop_savings(trace, 1.0)) == pytest.approx([1.0, 0.1, 0.5])
    assert shares(metrics.keep_savings(trace, 1)) == pytest.approx([1.0, 0.1, 0.5])


def test_drop_savings_what_was_dropped_when_recorded_is_not_dropped_again():
    trace = hand_made()
    trace["action"].values[2, 0, 1] = 1
    assert shares(metrics.drop_savings(trace, 1.0)) == [0.0, 0.0, 0.0]


def test_keep_savings_at_the_full_width_saves_nothing():
    trace = hand_made()
    table = metrics.keep_savings(trace, [2, 1], by="layer")
    assert table["reads_avoided_frac_decode"].dims == ("n_keep", "layer")
    np.testing.assert_allclose(table["reads_avoided_frac_decode"], [[0.0], [1.0]])
    np.testing.assert_allclose(table["weight_discarded_frac_decode"], [[0.0], [0.3]], rtol=1e-6)


def test_savings_at_width_two_and_full_strength_agree_on_reads():
    """The second of two is always below one half: both tables save the same reads."""
    trace = make_trace(n_token=80, n_layer=3, n_used=2)
    drop = metrics.drop_savings(trace, 1.0, by="layer").reads_avoided_frac_decode
    np.testing.assert_array_equal(
        drop, metrics.keep_savings(trace, 1, by="layer")["reads_avoided_frac_decode"]
    )


def test_savings_without_a_miss_are_unknown_for_reads_only():
    trace = hand_made()
    trace["residency"].values[2:] = 1
    actual = shares(metrics.drop_savings(trace, 1.0))
    assert np.isnan(actual[0])
    assert actual[1:] == [0.0, 0.0]


@pytest.mark.parametrize("frac", [-0.1, 1.5, [0.5, 2.0], float("nan"), True])
def test_drop_savings_of_an_impossible_threshold_is_refused(frac):
    with pytest.raises(SettingsError, match="frac must be from 0 to 1; got"):
        metrics.drop_savings(hand_made(), frac)


@pytest.mark.parametrize("n_keep", [0, 3, 1.5, True])
def test_keep_savings_of_an_impossible_width_is_refused(n_keep):
    with pytest.raises(SettingsError, match="n_keep must be a whole number from 1 to the width, 2"):
        metrics.keep_savings(hand_made(), n_keep)


# ---------------------------------------------------------------- coalescing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trace=ragged_traces())
def test_coalescing_equals_runs_found_one_by_one(trace):
    pairs, experts, runs = 0, 0, []
    for _, _, ids in cells(trace, "chosen", "decode"):
        ordered = sorted(ids)
        close = sum(b == a + 1 for a, b in itertools.pairwise(ordered))
        pairs, experts = pairs + close, experts + len(ids)
        runs.append(len(ids) - close)
    rate = metrics.consecutive_id_rate(trace)
    np.testing.assert_allclose(rate, pairs / experts if experts else np.nan)
    np.testing.assert_allclose(metrics.merged_reads(trace), np.mean(runs) if runs else np.nan)


def test_coalescing_of_reads_looks_at_misses_only():
    trace = decoded([[3, 4, 0], [1, 2, 3]])
    trace["residency"].values[:, 0] = [[0, 1, 0], [0, 0, 1]]
    # Read: 3 and 0, no neighbours; 1 and 2, neighbours.
    assert float(metrics.consecutive_id_rate(trace, of="read")) == 0.25
    assert float(metrics.merged_reads(trace, of="read")) == 1.5
    assert metrics.merged_reads(trace, by="token").values.tolist() == [2.0, 1.0]
    with pytest.raises(UnknownNameError, match=r"of must be one of \['read', 'routed'\]"):
        metrics.merged_reads(trace, of="misses")


def test_coalescing_of_an_independent_uniform_router_is_chance_within_three_standard_errors():
    n_token, n_expert, n_used = 4000, 32, 4
    rate = float(metrics.consecutive_id_rate(uniform(n_token, 2, n_expert, n_used, seed=10)))
    # E - 1 pairs of neighbours, each chosen with k (k - 1) / (E (E - 1)); over k experts.
    chance = (n_used - 1) / n_expert
    error = np.sqrt(chance * n_used / (n_token * 2)) / n_used
    assert abs(rate - chance) < 3 * error
