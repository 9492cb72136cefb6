"""How many experts a stretch of text needs."""

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import plot_working_set
from bmoe_lab.testing import make_trace
from tests.unit.edge_traces import EDGE_TRACES
from tests.unit.metric_traces import decoded, uniform


def line(figure, start):
    (found,) = (drawn for drawn in figure.data if (drawn.name or "").startswith(start))
    return found


def test_curve_of_a_known_text():
    """Two layers: the first alternates between two experts, the second always takes one."""
    trace = decoded([[[0], [5]], [[1], [5]], [[0], [5]], [[1], [5]]])
    drawn = line(plot_working_set(trace), "this run")
    assert list(drawn.x) == [1, 2, 4]
    assert list(drawn.y) == [2.0, 3.0, 3.0]


@pytest.mark.parametrize("unit", ["expert", "byte"])
def test_curve_draws_the_means_and_quantiles_of_the_metric(unit):
    trace = make_trace(n_token=60, n_layer=3, seed=1)
    trace["expert_bytes"].values[:] = [1024, 2048, 4096]
    figure = plot_working_set(trace, unit=unit)
    factor = 1 if unit == "expert" else 2**10
    drawn = line(figure, "this run")
    for place, window in enumerate(drawn.x):
        found = metrics.working_set(trace, int(window), unit=unit)
        found = found.sum("layer", skipna=False).dropna("token")
        assert drawn.y[place] * factor == pytest.approx(float(found.mean()))
        assert figure.data[0].y[place] * factor == pytest.approx(float(found.quantile(0.1)))
        assert figure.data[1].y[place] * factor == pytest.approx(float(found.quantile(0.9)))
    assert drawn.x[-1] <= 52 < 2 * drawn.x[-1]
    if unit == "byte":
        assert "(KiB)" in figure.layout.yaxis.title.text


def test_curve_of_a_uniform_router_is_chance():
    trace = uniform(800, 2, 32, 4, seed=0)
    figure = plot_working_set(trace)
    run, chance = line(figure, "this run"), line(figure, "chance")
    assert chance.y[0] == pytest.approx(8.0)
    np.testing.assert_allclose(run.y, chance.y, rtol=0.03)
    assert line(figure, "all experts: 64").y[0] == 64


def test_hover_says_experts_and_bytes():
    trace = make_trace(n_token=20, n_layer=2, n_used=3, n_prefill=0, seed=0)
    trace["expert_bytes"].values[:] = 1024
    assert line(plot_working_set(trace), "this run").text[0] == "6 experts, 6.0 KiB"
    bare = trace.drop_vars("expert_bytes")
    assert line(plot_working_set(bare), "this run").text[0] == "6 experts"


def test_figure_marks_the_cache_in_bytes_only():
    trace = make_trace(n_token=20, n_layer=2, seed=0)
    assert not [d for d in plot_working_set(trace).data if (d.name or "").startswith("cache")]
    cache = line(plot_working_set(trace, unit="byte"), "cache of this run")
    assert cache.y[0] * 2**10 == trace.attrs["cache_budget_bytes"]


def test_figure_along_the_text_draws_the_metric():
    trace = make_trace(n_token=60, n_layer=3, n_prefill=10, seed=1)
    figure = plot_working_set(trace, window=8)
    drawn = line(figure, "this run")
    expected = metrics.working_set(trace, 8).sum("layer", skipna=False)
    np.testing.assert_array_equal(drawn.y, expected)
    assert list(drawn.x) == list(range(10, 60))
    assert np.isnan(drawn.y[:7]).all()
    assert "8 tokens along the text" in figure.layout.title.text


def test_figure_along_a_long_text_shows_means_and_says_so():
    trace = uniform(2500, 1, 16, 2, seed=0)
    figure = plot_working_set(trace, window=4)
    assert len(line(figure, "this run").x) <= 1000
    assert "means over 3 tokens per point" in figure.layout.title.subtitle.text


def test_figure_of_one_token_shows_chance_and_all_experts_too():
    """A line of one point is not drawn."""
    figure = plot_working_set(EDGE_TRACES["one token"]())
    assert "markers" in line(figure, "chance").mode
    assert len(set(line(figure, "all experts").x)) == 2


def test_layer_that_did_not_route_every_token_is_left_out_and_said():
    trace = EDGE_TRACES["masked layer"]()
    figure = plot_working_set(trace)
    expected = metrics.working_set(trace.isel(layer=[0, 2]), 2).sum("layer", skipna=False).mean()
    assert line(figure, "this run").y[1] == pytest.approx(float(expected))
    assert "did not route every token: 1" in figure.layout.title.subtitle.text


def test_figure_in_bytes_without_sizes_is_refused():
    trace = make_trace(n_token=20, n_layer=2, seed=0).drop_vars("expert_bytes")
    with pytest.raises(SchemaError, match="must hold the variable 'expert_bytes'"):
        plot_working_set(trace, unit="byte")


def test_figure_of_a_window_that_does_not_fit_is_refused():
    trace = make_trace(n_token=20, n_layer=2, seed=0)
    with pytest.raises(SchemaError, match="window must fit into the tokens of phase 'decode'"):
        plot_working_set(trace, window=50)
    with pytest.raises(SettingsError, match="window must be at least 1"):
        plot_working_set(trace, window=0)
    with pytest.raises(UnknownNameError, match="unit must be one of"):
        plot_working_set(trace, unit="MiB")


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name):
    sentence = None
    try:
        figure = plot_working_set(EDGE_TRACES[name]())
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
    said = plot_working_set(trace).layout.title.subtitle.text
    assert "lossy: DropCold(0.75)" in said
    assert "counterfactual" in said


def test_figure_of_an_unknown_phase_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plot_working_set(make_trace(n_token=8), phase="decoding")


def test_figure_is_found_by_the_accessor():
    assert make_trace(n_token=12).moe.plot.working_set().data
