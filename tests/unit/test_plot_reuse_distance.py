"""How long ago experts were last used."""

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, UnknownNameError
from bmoe_lab.plots import plot_reuse_distance
from bmoe_lab.testing import make_trace
from tests.unit.edge_traces import EDGE_TRACES
from tests.unit.metric_traces import decoded, ragged


def share_at(figure, size):
    """Return the height of the step line at `size` in the figure's own unit."""
    x, y = np.asarray(figure.data[0].x), np.asarray(figure.data[0].y)
    return float(y[np.searchsorted(x, size, side="right") - 1])


def test_curve_in_tokens_of_a_known_text():
    """Experts 0, 1, 0, 0, 1: reused after 2, 1 and 3 tokens; two of five uses are first ones."""
    figure = plot_reuse_distance(decoded([[0], [1], [0], [0], [1]]), unit="token")
    assert list(figure.data[0].x)[1:-1] == [1, 2, 3]
    assert list(figure.data[0].y) == pytest.approx([0, 20, 40, 60, 60])
    assert "first uses: 40.0 % of routings" in figure.layout.title.subtitle.text
    assert figure.data[1].y[0] == pytest.approx(60)
    assert figure.layout.xaxis.type == "log"


@pytest.mark.parametrize("unit", ["byte", "expert", "token"])
def test_curve_draws_the_distances_of_the_metric(unit):
    trace = make_trace(n_token=60, n_layer=3, seed=2)
    rows = (trace.phase == 1).values
    distance = metrics.reuse_distance(trace, unit=unit, phase="all").values[rows]
    routed = int((trace.expert_chosen.values[rows] >= 0).sum())
    figure = plot_reuse_distance(trace, unit=unit)
    factor = 2**10 if unit == "byte" else 1
    sizes, counts = np.unique(distance[~np.isnan(distance)], return_counts=True)
    np.testing.assert_allclose(np.asarray(figure.data[0].x)[1:-1] * factor, sizes)
    # One token per evaluation: every routing is a lookup.
    np.testing.assert_allclose(figure.data[0].y[1:-1], 100 * np.cumsum(counts) / routed)


@pytest.mark.parametrize("phase", ["decode", "prefill", "all"])
def test_curve_in_bytes_is_the_hit_rate_of_an_lru(phase):
    trace = make_trace(n_token=80, n_layer=3, n_prefill=9, policy="drop", seed=1)
    curve = bl.lru_curve(trace, phase=phase)
    figure = plot_reuse_distance(trace, which="applied", phase=phase)
    factor = 2**10
    assert "KiB" in figure.layout.xaxis.title.text
    for size, rate in zip(curve.budget.values, curve[f"hit_rate_{phase}"].values, strict=True):
        if figure.data[0].x[0] * factor <= size <= figure.data[0].x[-1] * factor:
            assert share_at(figure, size / factor) == pytest.approx(100 * rate)


def test_curve_counts_a_prompt_as_use():
    """With decode alone, every expert of the prompt was a first use, and the curve too low."""
    trace = make_trace(n_token=40, n_layer=2, n_prefill=20, seed=3)
    alone = int(np.isnan(metrics.reuse_distance(trace, unit="token").values).sum())
    figure = plot_reuse_distance(trace, unit="token")
    first = 1 - figure.data[1].y[0] / 100
    assert first * (trace.phase == 1).sum() * 2 * 4 < alone


def test_curve_across_turns_finds_more():
    trace = ragged()
    within = plot_reuse_distance(trace)
    across = plot_reuse_distance(trace, across_turns=True)
    assert across.data[1].y[0] > within.data[1].y[0]
    assert "turns share" in across.layout.title.subtitle.text


def test_curve_of_many_distances_is_reduced_and_keeps_its_heights():
    trace = make_trace(n_token=400, n_layer=12, n_expert=64, seed=0)
    trace["expert_bytes"].values[:] = 4096 + 64 * np.arange(12)
    distance = metrics.reuse_distance(trace, unit="byte", phase="all").values[trace.phase == 1]
    lookups = int((trace.expert_chosen.values[trace.phase == 1] >= 0).sum())
    figure = plot_reuse_distance(trace)
    x = np.asarray(figure.data[0].x)[1:-1]
    assert np.unique(distance[~np.isnan(distance)]).size > 1000
    assert x.size <= 1000
    factor = 2**20 if "MiB" in figure.layout.xaxis.title.text else 2**10
    expected = [100 * (distance <= size * factor * (1 + 1e-9)).sum() / lookups for size in x]
    np.testing.assert_allclose(figure.data[0].y[1:-1], expected)


def test_figure_marks_the_token_cycle_and_the_cache():
    trace = make_trace(n_token=40, n_layer=2, seed=0)
    figure = plot_reuse_distance(trace)
    names = [line.name for line in figure.data]
    assert any(name.startswith("one token") for name in names)
    (cache,) = (line for line in figure.data if line.name.startswith("cache of this run"))
    assert cache.x[0] * 2**10 == trace.attrs["cache_budget_bytes"]
    del trace.attrs["cache_budget_bytes"]
    assert len(plot_reuse_distance(trace).data) == len(names) - 1


def test_figure_without_sizes_says_so_and_counts_experts():
    trace = make_trace(n_token=20, n_layer=2, seed=0).drop_vars("expert_bytes")
    with pytest.raises(SchemaError, match="must hold the variable 'expert_bytes'"):
        plot_reuse_distance(trace)
    assert plot_reuse_distance(trace, unit="expert").data


def test_figure_of_an_unknown_unit_is_refused():
    with pytest.raises(UnknownNameError, match="unit must be one of"):
        plot_reuse_distance(make_trace(n_token=8), unit="bytes")


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name):
    sentence = None
    try:
        figure = plot_reuse_distance(EDGE_TRACES[name]())
    except SchemaError as error:
        sentence = str(error)
    assert (sentence is not None) == (name in ("empty", "prefill only", "no residency"))
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
    said = plot_reuse_distance(trace).layout.title.subtitle.text
    assert "lossy: DropCold(0.75)" in said
    assert "counterfactual" in said


def test_figure_of_an_unknown_phase_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plot_reuse_distance(make_trace(n_token=8), phase="decoding")


def test_figure_is_found_by_the_accessor():
    assert make_trace(n_token=12).moe.plot.reuse_distance().data
