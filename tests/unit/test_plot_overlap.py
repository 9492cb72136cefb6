"""Choices that neighbouring tokens share, against chance."""

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import plot_overlap
from bmoe_lab.testing import make_trace
from tests.unit.edge_traces import EDGE_TRACES
from tests.unit.metric_traces import decoded, ragged, uniform


def line(figure, start):
    (found,) = (drawn for drawn in figure.data if drawn.name.startswith(start))
    return found


@pytest.mark.parametrize("lag", [1, 3])
def test_figure_draws_the_metrics_per_layer(lag):
    trace = make_trace(n_token=60, n_layer=4, seed=0)
    figure = plot_overlap(trace, lag=lag)
    overlap = metrics.consecutive_overlap(trace, lag=lag, by="layer")
    jaccard = metrics.consecutive_jaccard(trace, lag=lag, by="layer")
    np.testing.assert_allclose(line(figure, "overlap:").y, 100 * overlap)
    np.testing.assert_allclose(line(figure, "Jaccard").y, 100 * jaccard)
    chance = metrics.chance_overlap(trace, by="layer")
    np.testing.assert_allclose(line(figure, "overlap if experts were alike").y, 100 * chance)
    mean = 100 * float(metrics.consecutive_overlap(trace, lag=lag))
    assert line(figure, "overlap:").name == f"overlap: {mean:.1f} %"
    assert ("the token before" if lag == 1 else "3 tokens before") in figure.layout.title.text


def test_overlap_with_any_other_token_is_the_mean_over_all_pairs():
    trace = ragged(3, turns=((0, 9),))
    expert = trace.expert_chosen.values
    figure = plot_overlap(trace)
    shared, slots = [], []
    for layer in range(3):
        sets = [set(row[row >= 0].tolist()) for row in expert[:, layer]]
        found = [len(a & b) for i, a in enumerate(sets) for j, b in enumerate(sets) if i != j]
        size = [len(a) for i, a in enumerate(sets) for j, b in enumerate(sets) if i != j]
        shared.append(100 * sum(found) / sum(size))
        slots.append(sum(map(len, sets)))
    drawn = line(figure, "overlap with any other token")
    np.testing.assert_allclose(drawn.y, shared)
    assert drawn.name.endswith(f": {np.average(shared, weights=slots):.1f} %")


def test_uniform_router_shares_what_chance_says():
    figure = plot_overlap(uniform(1500, 2, 16, 4, seed=0))
    np.testing.assert_allclose(line(figure, "overlap:").y, 25, atol=1.5)
    np.testing.assert_allclose(line(figure, "overlap with any other").y, 25, atol=0.5)


def test_popular_experts_raise_the_second_chance_only():
    trace = decoded([[0, 1], [0, 2], [0, 3], [0, 4]])
    figure = plot_overlap(trace)
    assert line(figure, "overlap with any other").y[0] == 50
    assert line(figure, "overlap if experts were alike").y[0] == 25


def test_figure_of_applied_experts_leaves_out_the_dropped():
    trace = ragged(1, turns=((0, 6),), n_expert=9, widths=(6, 5, 6))
    chosen, applied = (plot_overlap(trace, which=which) for which in ("chosen", "applied"))
    assert not np.array_equal(chosen.data[0].y, applied.data[0].y)
    np.testing.assert_allclose(
        applied.data[0].y,
        100 * metrics.consecutive_overlap(trace, which="applied", by="layer"),
    )


def test_figure_says_which_layers_are_gaps():
    figure = plot_overlap(EDGE_TRACES["masked layer"]())
    assert np.isnan(line(figure, "overlap:").y[1])
    assert np.isnan(line(figure, "overlap with any other").y[1])
    assert "gaps: layer routed no pair" in figure.layout.title.subtitle.text


def test_figure_of_a_lag_that_is_too_long_is_refused():
    with pytest.raises(SchemaError, match="at distance 30, both routed; got none"):
        plot_overlap(make_trace(n_token=20), lag=30)
    with pytest.raises(SettingsError, match="lag must be at least 1"):
        plot_overlap(make_trace(n_token=20), lag=0)


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name):
    sentence = None
    try:
        figure = plot_overlap(EDGE_TRACES[name]())
    except SchemaError as error:
        sentence = str(error)
    assert (sentence is not None) == (name in ("empty", "prefill only", "one token"))
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
    said = plot_overlap(trace).layout.title.subtitle.text
    assert "lossy: DropCold(0.75)" in said
    assert "counterfactual" in said


def test_figure_of_an_unknown_phase_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plot_overlap(make_trace(n_token=8), phase="decoding")


def test_figure_is_found_by_the_accessor():
    assert make_trace(n_token=12).moe.plot.overlap().data
