"""How decided each layer's router is."""

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import plot_entropy
from bmoe_lab.testing import make_trace
from tests.unit.edge_traces import EDGE_TRACES
from tests.unit.metric_traces import hand_made, ragged


def scored(seed=0):
    return make_trace(n_token=50, n_layer=3, n_expert=16, n_used=4, scores=True, seed=seed)


def largest(figure):
    (found,) = (drawn for drawn in figure.data if drawn.name.startswith("largest"))
    return found


@pytest.mark.parametrize("unit", ["nat", "bit"])
@pytest.mark.parametrize("of", ["scores", "weights"])
def test_boxes_are_the_quantiles_of_the_metric(of, unit):
    trace = scored()
    figure = plot_entropy(trace, of=of, unit=unit)
    metric = metrics.score_entropy if of == "scores" else metrics.router_entropy
    box = figure.data[0]
    for layer in range(3):
        values = metric(trace.isel(layer=[layer]), by="token").values
        values = values / (np.log(2) if unit == "bit" else 1)
        for name, q in (
            ("lowerfence", 0.1), ("q1", 0.25), ("median", 0.5), ("q3", 0.75), ("upperfence", 0.9),
        ):  # fmt: skip
            assert box[name][layer] == pytest.approx(np.quantile(values, q)), name
    assert figure.layout.yaxis.title.text == f"entropy ({unit})"
    assert ("all experts" if of == "scores" else "the chosen") in figure.layout.title.subtitle.text


def test_largest_is_the_log_of_what_there_is_to_choose_from():
    trace = scored()
    assert largest(plot_entropy(trace)).y[0] == pytest.approx(np.log(16))
    assert largest(plot_entropy(trace)).name == "largest (ln 16)"
    in_bits = largest(plot_entropy(trace, of="weights", unit="bit"))
    assert in_bits.y[0] == pytest.approx(2.0)
    assert in_bits.name == "largest (log2 4)"


def test_largest_of_layers_of_different_width_is_a_stair():
    found = largest(plot_entropy(ragged(widths=(3, 1, 2)), of="weights"))
    np.testing.assert_allclose(found.y[::2], np.log([3, 1, 2]))
    assert found.name == "largest (ln k of the layer)"


def test_entropy_of_known_weights():
    """Decoded weights 0.9 and 0.1, then two halves."""
    trace = hand_made()
    figure = plot_entropy(trace, of="weights")
    first = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert figure.data[0].median[0] == pytest.approx((first + np.log(2)) / 2, rel=1e-6)


def test_scores_that_are_no_probabilities_give_way_to_weights():
    trace = scored()
    trace["score_is_softmax"].values[:] = 0
    assert "the chosen (weights)" in plot_entropy(trace).layout.title.subtitle.text
    assert "all experts" in plot_entropy(trace, gate="normalised").layout.title.subtitle.text


def test_scores_that_do_not_fit_the_gate_are_refused():
    trace = scored()
    trace["router_score"] = trace["router_score"] * 3
    with pytest.raises(SettingsError, match="must be probabilities that sum to one"):
        plot_entropy(trace, of="scores")


def test_figure_without_scores_or_weights_is_refused():
    trace = make_trace(n_token=20, n_layer=2, seed=0)
    with pytest.raises(SchemaError, match="must hold the variable 'router_score'"):
        plot_entropy(trace, of="scores")
    with pytest.raises(SchemaError, match="must hold the variable 'weight_chosen'"):
        plot_entropy(trace.drop_vars("weight_chosen"))
    trace["weight_chosen"].values[:] = np.nan
    with pytest.raises(SchemaError, match="must know weights of phase 'decode'; got none"):
        plot_entropy(trace)


def test_layer_that_routed_nothing_has_no_box_and_keeps_its_place():
    figure = plot_entropy(EDGE_TRACES["masked layer"]())
    assert list(figure.data[0].x) == [0, 2]
    assert "without a known value: 1" in figure.layout.title.subtitle.text


def test_figure_refuses_names_that_it_does_not_know():
    with pytest.raises(UnknownNameError, match="unit must be one of"):
        plot_entropy(scored(), unit="bits")
    with pytest.raises(UnknownNameError, match="of must be one of"):
        plot_entropy(scored(), of="logits")


def test_axis_leaves_out_an_empty_lower_half_and_shows_all_that_is_drawn():
    trace = scored()
    weight = trace["weight_chosen"].values
    weight[:] = [0.27, 0.25, 0.25, 0.23]
    low, high = plot_entropy(trace, of="weights").layout.yaxis.range
    assert 1.3 < low < np.log(4) < high
    weight[:] = [0.97, 0.01, 0.01, 0.01]
    assert plot_entropy(trace, of="weights").layout.yaxis.range[0] == 0


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name):
    sentence = None
    try:
        figure = plot_entropy(EDGE_TRACES[name]())
    except SchemaError as error:
        sentence = str(error)
    assert (sentence is not None) == (name in ("empty", "prefill only"))
    if sentence is not None:
        assert sentence.endswith(".")
        return
    assert figure.data
    assert figure.layout.title.text
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text


def test_figure_says_lossy_and_counterfactual():
    trace = make_trace(n_token=24, n_layer=3, policy="drop", seed=7)
    trace.attrs["counterfactual"] = 1
    said = plot_entropy(trace).layout.title.subtitle.text
    assert "lossy: DropCold(0.75)" in said
    assert "counterfactual" in said


def test_figure_of_an_unknown_phase_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plot_entropy(make_trace(n_token=8), phase="decoding")


def test_figure_is_found_by_the_accessor():
    assert make_trace(n_token=12).moe.plot.entropy().data
