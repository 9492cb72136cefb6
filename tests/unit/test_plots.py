"""Figures as data: what is drawn, what is said, what is left out."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bmoe_lab import metrics, plots
from bmoe_lab.comparison.tree import build_tree
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_means, step_for
from bmoe_lab.testing.traces import make_trace
from tests.unit.comparison_data import make_arm, make_tree

TRACE_PLOTS = [plots.plot_heatmap, plots.plot_hit_rate, plots.plot_expert_load]
TREE_PLOTS = [plots.plot_hit_rate, plots.plot_nll_along_text, plots.plot_quality_vs_bytes]


def text_of(figure: go.Figure) -> str:
    return figure.layout.title.text + " " + (figure.layout.title.subtitle.text or "")


def hover_of(figure: go.Figure) -> str:
    return "\n".join(text for row in figure.data[0].text for text in row)


@pytest.mark.parametrize("plot", TRACE_PLOTS, ids=lambda plot: plot.__name__)
def test_plot_of_a_trace_has_axis_titles_and_says_lossy(plot):
    figure = plot(make_trace(n_token=30, policy="drop"))
    assert isinstance(figure, go.Figure)
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text
    assert "lossy: DropCold(0.75)" in text_of(figure)


@pytest.mark.parametrize("plot", TRACE_PLOTS, ids=lambda plot: plot.__name__)
def test_plot_of_a_replayed_policy_says_counterfactual(plot):
    trace = make_trace(n_token=30, policy="drop")
    trace.attrs["counterfactual"] = 1
    assert "counterfactual" in text_of(plot(trace))


@pytest.mark.parametrize("plot", TREE_PLOTS, ids=lambda plot: plot.__name__)
def test_plot_of_a_comparison_marks_lossy_runs_in_the_legend(plot):
    figure = plot(make_tree())
    names = [trace.name for trace in figure.data]
    assert any(n.startswith("DropCold(frac=0.75) (lossy)") for n in names)
    assert any(n.startswith("RandomDrop(rate=0.2) (control)") for n in names)
    assert any("Idle() (lossy), never fired" in n for n in names)
    assert not any("lossless again" in n for n in names)
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text


@pytest.mark.parametrize("plot", [*TRACE_PLOTS, plots.plot_nll_along_text])
def test_plot_text_of_the_trace_is_not_markup(plot):
    """Plotly reads labels as HTML: a piece or a policy could hide text or add links."""
    nasty = "<a href='https://example.org'>x</a>"
    data = make_tree() if plot is plots.plot_nll_along_text else make_trace(n_token=20)
    if plot is plots.plot_nll_along_text:
        for node in data.children.values():
            node.coords["piece"] = ("token", np.array([nasty] * node.sizes["token"]))
    else:
        data = data.assign_coords(piece=("token", np.array([nasty] * 20)))
        data.attrs.update(policy=nasty, lossless=0)
    assert "<a href" not in plot(data).to_json().replace("\\u003c", "<")


# ---------------------------------------------------------------- heat map


def test_plot_heatmap_shows_layer_by_token_with_gaps_where_nothing_routed():
    trace = make_trace(n_token=30, n_layer=3, n_used=2)
    heat = plots.plot_heatmap(trace).data[0]
    assert heat.type == "heatmap"
    expected = (trace.residency.values == 0).sum(axis=-1).astype(float).T
    routed = (trace.expert_chosen.values >= 0).any(axis=-1).T
    np.testing.assert_array_equal(heat.z[routed], expected[routed])
    assert np.isnan(heat.z[~routed]).all()
    assert (~routed).any()


def test_plot_heatmap_not_routed_cells_are_grey_and_named():
    figure = plots.plot_heatmap(make_trace(n_token=30))
    assert figure.layout.plot_bgcolor == theme.GREY
    assert "grey: not routed" in text_of(figure)
    full = plots.plot_heatmap(make_trace(n_token=30, mask_last_layer=False))
    assert "grey" not in text_of(full)


def test_plot_heatmap_long_trace_is_reduced_and_says_so():
    trace = make_trace(n_token=2501, n_layer=2, n_expert=4, n_used=1)
    figure = plots.plot_heatmap(trace)
    assert figure.data[0].z.shape == (2, 834)
    assert figure.data[0].dx == 3
    assert "means over 3 tokens per cell" in text_of(figure)
    assert figure.data[0].text is None


def test_plot_heatmap_marks_where_a_text_window_begins():
    trace = make_trace(n_token=30)
    trace["turn"].values[12:] = 1
    figure = plots.plot_heatmap(trace)
    assert 11.5 in [shape.x0 for shape in figure.layout.shapes]
    assert "lines: a new turn or text window" in text_of(figure)
    assert "lines:" not in text_of(plots.plot_heatmap(make_trace(n_token=30)))


def test_plot_heatmap_expert_ids_are_never_averaged():
    trace = make_trace(n_token=50, n_layer=2, mask_last_layer=False)
    figure = plots.plot_heatmap(trace, value="expert", max_tokens=10)
    np.testing.assert_array_equal(figure.data[0].z, trace.expert_chosen.values[::5, :, 0].T)
    assert "first of 5 tokens" in text_of(figure)


def test_plot_heatmap_hover_tells_experts_weights_actions():
    trace = make_trace(n_token=60, n_layer=2, policy="drop")
    text = hover_of(plots.plot_heatmap(trace))
    assert "dropped" in text
    assert "experts " in text
    substituted = make_trace(n_token=60, n_layer=2, policy="substitute")
    assert "→" in hover_of(plots.plot_heatmap(substituted))


@pytest.mark.parametrize("value", ["misses", "expert", "weight", "read", "changed"])
@pytest.mark.parametrize(
    "shape",
    [
        {"n_token": 1, "n_layer": 1},
        {"n_token": 1, "n_prefill": 0},
        {"n_token": 40, "n_expert": 512, "n_layer": 1},
        {"n_token": 20, "text": False},
        {"n_token": 12, "n_prefill": 12, "n_layer": 60},
    ],
    ids=str,
)
def test_plot_heatmap_unusual_traces_draw(value, shape):
    plots.plot_heatmap(make_trace(**shape), value=value).to_json()


def test_plot_heatmap_layer_that_never_routed_draws():
    trace = make_trace(n_token=10, n_layer=2)
    flags = {"action": 255, "residency": 255}
    for name, fill in {"expert_chosen": -1, "expert_applied": -1, **flags}.items():
        trace[name].values[:, 1] = fill
    figure = plots.plot_heatmap(trace)
    assert np.isnan(figure.data[0].z[1]).all()


def test_plot_heatmap_impossible_requests_are_refused():
    trace = make_trace(n_token=10)
    with pytest.raises(UnknownNameError, match=r"value must be one of \['action', 'changed'"):
        plots.plot_heatmap(trace, value="bytes")
    with pytest.raises(SchemaError, match="'weight_chosen' to show 'weight'"):
        plots.plot_heatmap(trace.drop_vars("weight_chosen"), value="weight")
    with pytest.raises(SchemaError, match="must hold tokens; got none"):
        plots.plot_heatmap(trace.isel(token=slice(0, 0)))
    with pytest.raises(SettingsError, match="max_tokens must be at least 1"):
        plots.plot_heatmap(trace, max_tokens=0)


# ---------------------------------------------------------------- the others


def test_plot_hit_rate_draws_what_the_metric_says():
    trace = make_trace(n_token=60)
    line = plots.plot_hit_rate(trace).data[0]
    np.testing.assert_allclose(line.y, 100 * metrics.hit_rate(trace, by="layer"))


def test_plot_hit_rate_without_residency_is_refused():
    with pytest.raises(SchemaError, match="run with the variable 'residency'"):
        plots.plot_hit_rate(make_trace(n_token=10).drop_vars("residency"))


def test_plot_expert_load_orders_experts_by_use():
    trace = make_trace(n_token=100, n_layer=2, n_expert=8)
    by_load = plots.plot_expert_load(trace).data[0]
    by_id = plots.plot_expert_load(trace, order="id").data[0]
    assert (np.diff(by_load.z, axis=1) <= 0).all()
    np.testing.assert_allclose(np.sort(by_load.z), np.sort(by_id.z))
    np.testing.assert_allclose(np.take_along_axis(by_id.z, by_load.customdata, 1), by_load.z)


def test_plot_expert_load_of_an_empty_phase_is_refused():
    with pytest.raises(SchemaError, match="must route something in phase 'draft'"):
        plots.plot_expert_load(make_trace(n_token=10), phase="draft")


def test_plot_quality_vs_bytes_draws_paired_intervals():
    tree = make_tree()
    table = tree.to_dataset()
    point = next(t for t in plots.plot_quality_vs_bytes(tree).data if t.name.startswith("DropCold"))
    assert point.y[0] == pytest.approx(float(table.perplexity[2]))
    assert point.error_y.array[0] == pytest.approx(
        float(table.perplexity_high[2] - table.perplexity[2])
    )
    assert point.error_y.arrayminus[0] > 0
    assert point.error_x.array[0] > 0


def test_plot_quality_vs_bytes_without_bounds_draws_no_bars():
    tree = make_tree(n_token=20)
    assert np.isnan(tree["delta_nll_low"].values).all()
    for point in plots.plot_quality_vs_bytes(tree).data:
        assert point.error_y.array is None


def test_plot_quality_vs_bytes_of_a_bare_lossless_run_draws():
    tree = build_tree([make_arm("lossless", 0, 80)], {"n_context": 8, "n_window": 1}, seed=0)
    assert len(plots.plot_quality_vs_bytes(tree).data) == 1
    assert len(plots.plot_nll_along_text(tree).data) == 0


def test_plot_nll_along_text_unsmoothed_is_the_paired_difference():
    tree = make_tree()
    line = plots.plot_nll_along_text(tree, window=1).data[0]
    expected = tree["DropCold(frac=0.75)"]["nll"].values - tree["lossless"]["nll"].values
    np.testing.assert_allclose(line.y, expected[~np.isnan(expected)])


def test_plot_nll_along_text_average_does_not_cross_text_windows():
    tree = make_tree()
    for node in tree.children.values():
        node["turn"].values[40:] = 1
        if node.name.startswith("DropCold"):
            nll = node["nll"].values
            nll[:] = tree["lossless"]["nll"].values + np.where(np.arange(80) < 40, 1.0, 3.0)
    line = plots.plot_nll_along_text(tree).data[0]
    gap = int(np.flatnonzero(np.isnan(line.y))[0])
    np.testing.assert_allclose(line.y[:gap], 1.0)
    np.testing.assert_allclose(line.y[gap + 1 :], 3.0)


def test_plot_nll_along_text_window_of_nothing_is_refused():
    with pytest.raises(SettingsError, match="window must be at least 1"):
        plots.plot_nll_along_text(make_tree(), window=0)


@pytest.mark.parametrize("plot", [plots.plot_nll_along_text, plots.plot_quality_vs_bytes])
def test_plot_of_something_else_than_a_comparison_is_refused(plot):
    import xarray as xr

    with pytest.raises(SchemaError, match="tree must be a comparison"):
        plot(xr.DataTree())


# ---------------------------------------------------------------- reduction, theme


@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(-5, 5) | st.just(np.nan), max_size=30), st.integers(1, 8))
def test_block_means_equal_nanmean_of_slices(values, step):
    array = np.array(values, dtype=float)
    blocks = [array[i : i + step] for i in range(0, len(array), step)]
    expected = [b[~np.isnan(b)].mean() if (~np.isnan(b)).any() else np.nan for b in blocks]
    np.testing.assert_allclose(block_means(array, step), expected, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 999, 1000, 1001, 123_456])
def test_step_for_never_gives_more_than_the_limit(n):
    assert -(-n // step_for(n)) <= 1000


def contrast(first: str, second: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_theme_text_reads_on_light_and_dark_pages(page):
    assert contrast(theme.TEXT, page) > 3.6


def test_theme_series_differ_in_color_and_symbol():
    styles = [theme.series_style(i) for i in range(6)]
    assert len({color for color, _ in styles}) == 6
    assert len({symbol for _, symbol in styles}) == 6
