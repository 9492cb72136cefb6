"""What all scores tell: entropy, margin, near-ties; and the weights of the choice."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.metrics import _scores
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import decoded, hand_made, ragged, uniform

KNOWN = np.array([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])


def scored(scores: np.ndarray, n_used: int = 2) -> xr.Dataset:
    """Return a decode of one layer with these scores (token, expert)."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :n_used]
    trace = decoded(order.tolist(), scores.shape[-1])
    return trace.assign(
        router_score=(("token", "layer", "expert"), scores[:, None].astype(np.float32))
    )


def test_score_entropy_of_known_probabilities():
    trace = scored(KNOWN)
    first = 0.5 * np.log(2) + 0.25 * np.log(4) + 2 * 0.125 * np.log(8)
    entropy = metrics.score_entropy(trace, by="token")
    np.testing.assert_allclose(entropy, [first, np.log(4)], rtol=1e-6)
    assert entropy.attrs["units"] == "nat"
    relative = metrics.score_entropy(trace, scale="relative", by="token")
    np.testing.assert_allclose(relative, [first / np.log(4), 1.0], rtol=1e-6)
    # Each routing's own e^H, then their mean.
    np.testing.assert_allclose(
        metrics.score_entropy(trace, scale="experts"), (np.exp(first) + 4) / 2, rtol=1e-6
    )


def test_score_entropy_of_logits_needs_the_softmax():
    logits = scored(np.log(KNOWN) + 3)
    with pytest.raises(
        SettingsError, match=r"sum to one for gate='recorded'; got a smallest.*softm"
    ):
        metrics.score_entropy(logits)
    np.testing.assert_allclose(
        metrics.score_entropy(logits, gate="softmax", by="token"),
        metrics.score_entropy(scored(KNOWN), by="token"),
        rtol=1e-6,
    )


def test_score_entropy_of_sigmoids_divides_by_their_sum():
    sigmoids = scored(KNOWN * 1.6)
    with pytest.raises(SettingsError, match=r"a sum of 1\.6"):
        metrics.score_entropy(sigmoids)
    np.testing.assert_allclose(
        metrics.score_entropy(sigmoids, gate="normalised", by="token"),
        metrics.score_entropy(scored(KNOWN), by="token"),
        rtol=1e-6,
    )
    with pytest.raises(SettingsError, match=r"must not be negative.*got -0\.1"):
        metrics.score_entropy(scored(KNOWN - 0.225), gate="normalised")


def test_score_entropy_of_a_ruled_out_expert_is_that_of_the_others():
    logits = np.log(np.array([[0.5, 0.5, 0.1, 0.1]]))
    logits[0, 2:] = -np.inf
    np.testing.assert_allclose(
        metrics.score_entropy(scored(logits, 1), gate="softmax"), np.log(2), rtol=1e-6
    )


def test_score_entropy_of_halves_is_accepted():
    trace = make_trace(n_token=30, n_layer=2, n_expert=64, scores="float16")
    assert 0 < float(metrics.score_entropy(trace)) < np.log(64)


def test_score_entropy_unknown_words_list_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"gate must be one of \['normalised', 'recorded'"):
        metrics.score_entropy(scored(KNOWN), gate="sigmoid")
    with pytest.raises(UnknownNameError, match=r"scale must be one of \['experts', 'nat'"):
        metrics.score_entropy(scored(KNOWN), scale="bits")


def test_score_entropy_with_an_unknown_score_is_unknown():
    trace = scored(KNOWN)
    trace["router_score"].values[0, 0, 3] = np.nan
    assert np.isnan(metrics.score_entropy(trace, by="token").values).tolist() == [True, False]


def test_score_entropy_window_by_window_is_the_same(monkeypatch):
    trace = ragged(turns=((5, 9), (4, 3)))
    expected = metrics.score_entropy(trace, by="token", phase="all")
    margin = metrics.router_margin(trace, by="token")
    monkeypatch.setattr(_scores, "_WINDOW_CELLS", 40)
    np.testing.assert_array_equal(metrics.score_entropy(trace, by="token", phase="all"), expected)
    np.testing.assert_array_equal(metrics.router_margin(trace, by="token"), margin)


def test_score_entropy_of_an_independent_router_is_known_within_three_standard_errors():
    """Uniform scores divided by their sum: the mean of -x ln x is 1/4, of x 1/2."""
    n_expert = 256
    entropy = metrics.score_entropy(uniform(400, 2, n_expert, 4, seed=8), by="token")
    # ln of the sum less (sum of x ln x) / sum, with sums near their means for many experts.
    expected = np.log(n_expert / 2) + 0.5
    spread = float(entropy.std()) / np.sqrt(800)
    assert abs(float(entropy.mean()) - expected) < 3 * spread + 1.0 / n_expert


def test_router_margin_of_known_scores():
    trace = scored(KNOWN)
    np.testing.assert_allclose(metrics.router_margin(trace, by="token"), [0.125, 0.0])
    assert metrics.near_ties(trace, 0.125, by="token").values.tolist() == [0.0, 1.0]
    assert float(metrics.near_ties(trace, 0.2)) == 1.0
    with pytest.raises(SettingsError, match="eps must be above 0; got 0"):
        metrics.near_ties(trace, 0)


def test_router_margin_uses_the_width_of_each_layer():
    trace = ragged(widths=(3, 1, 2))
    scores = trace["router_score"].values
    decode = trace["phase"].values == 1
    expected = []
    for layer, width in enumerate((3, 1, 2)):
        ranked = -np.sort(-scores[decode, layer].astype(np.float64), axis=-1)
        expected.append((ranked[:, width - 1] - ranked[:, width]).mean())
    np.testing.assert_allclose(metrics.router_margin(trace, by="layer"), expected)


def test_router_margin_of_a_layer_that_uses_all_experts_is_left_out():
    trace = scored(KNOWN, n_used=4)
    assert np.isnan(float(metrics.router_margin(trace)))
    assert np.isnan(float(metrics.near_ties(trace, 0.1)))


def test_router_margin_with_an_unknown_score_is_unknown_wherever_it_stands():
    trace = scored(KNOWN)
    trace["router_score"].values[0, 0, 3] = np.nan
    for value in (
        metrics.router_margin(trace, by="token"),
        metrics.near_ties(trace, 1, by="token"),
    ):
        assert np.isnan(value.values).tolist() == [True, False]


def test_top_weight_share_of_known_weights():
    trace = hand_made()
    np.testing.assert_allclose(metrics.top_weight_share(trace, by="token"), [0.9, 0.5], rtol=1e-6)
    trace["weight_chosen"].values[2, 0] = [2.7, 0.3]  # a model that scales its weights
    np.testing.assert_allclose(metrics.top_weight_share(trace, by="token"), [0.9, 0.5], rtol=1e-6)
    trace["weight_chosen"].values[3, 0, 1] = np.nan
    assert np.isnan(metrics.top_weight_share(trace, by="token").values).tolist() == [False, True]


def test_router_entropy_of_a_narrow_layer_ignores_its_missing_slots():
    trace = ragged(widths=(3, 1, 2))
    assert float(metrics.router_entropy(trace, by="layer")[1]) == 0.0
    assert float(metrics.top_weight_share(trace, by="layer")[1]) == 1.0
