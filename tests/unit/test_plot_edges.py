"""Figures of traces at the edges: a picture with something in it, or a sentence."""

from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects as go
import pytest

import bmoe_lab as bl
from bmoe_lab import plots
from bmoe_lab.comparison.tree import Arm, build_tree
from bmoe_lab.errors import SchemaError
from bmoe_lab.plots.heatmap_values import VALUES as CELL_VALUES
from bmoe_lab.plots.heatmap_values import heatmap_values
from bmoe_lab.plots.token_values import VALUES as TOKEN_VALUES
from bmoe_lab.plots.token_values import token_values
from tests.unit.edge_traces import EDGE_TRACES

FIGURES = {
    **{
        f"heatmap {value}": lambda trace, value=value: plots.plot_heatmap(trace, value=value)
        for value in CELL_VALUES
    },
    **{
        f"token_text {value}": lambda trace, value=value: plots.plot_token_text(trace, value=value)
        for value in TOKEN_VALUES
    },
    "heatmap layer": lambda trace: plots.plot_heatmap(trace, value="expert", layers=(1, 2)),
    "heatmap decode": lambda trace: plots.plot_heatmap(trace, value="expert", phase="decode"),
    "hit_rate": plots.plot_hit_rate,
    "expert_load": plots.plot_expert_load,
    "expert_load all": lambda trace: plots.plot_expert_load(trace, which="applied", phase="all"),
    "expert_use": lambda trace: plots.plot_expert_use(trace, layer=-1, expert=3),
    "expert_use masked": lambda trace: plots.plot_expert_use(trace, layer=-2, expert=3),
    "cell_scores": lambda trace: plots.plot_cell_scores(trace, token=-1, layer=-1),
    "cell_scores masked": lambda trace: plots.plot_cell_scores(trace, token=-1, layer=-2),
}
SECOND_LAYER = {"heatmap layer", "expert_use masked", "cell_scores masked"}
TREE_FIGURES = [plots.plot_hit_rate, plots.plot_nll_along_text, plots.plot_quality_vs_bytes]


def is_empty(figure: go.Figure) -> bool:
    if figure.layout.annotations or "grey" in (figure.layout.title.subtitle.text or ""):
        return False
    shown = [
        np.asarray(values, float)
        for trace in figure.data
        for values in ([trace.z] if trace.type == "heatmap" else [trace.y])
        if values is not None and len(values)
    ]
    return not any(np.isfinite(values).any() for values in shown)


def check(draw, data):
    try:
        figure = draw(data)
    except SchemaError as error:
        text = str(error)
        assert text.endswith(".")
        assert len(text) < 300
    else:
        json.dumps(figure.to_dict())  # what a widget sends
        assert not is_empty(figure)


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        (name, edge)
        for name in FIGURES
        for edge in EDGE_TRACES
        if not (edge == "one layer" and name in SECOND_LAYER)
    ],
)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name, edge):
    check(FIGURES[name], EDGE_TRACES[edge]())


@pytest.mark.parametrize("edge", [name for name in EDGE_TRACES if name != "empty"])
def test_figure_of_an_edge_shows_all_that_is_offered(edge):
    trace = EDGE_TRACES[edge]()
    for value in heatmap_values(trace):
        assert not is_empty(plots.plot_heatmap(trace, value=value))
    if "piece" in trace.coords:
        for value in token_values(trace):
            assert len(plots.plot_token_text(trace, value=value).data[0].x)


@pytest.mark.parametrize("edge", EDGE_TRACES)
@pytest.mark.parametrize("plot", TREE_FIGURES, ids=lambda plot: plot.__name__)
def test_figure_of_a_comparison_of_edges_is_a_picture_or_a_sentence(plot, edge):
    arms = []
    for index, name in enumerate(("lossless", "Drop()")):
        trace = EDGE_TRACES[edge]()
        known = np.arange(trace.sizes["token"]) > 2
        for column in ("nll", "kl", "top1_agree", "routing_agreement")[: 4 if index else 1]:
            trace[column] = ("token", np.where(known, 1.0 + index, np.nan))
        kind = "policy" if index else "lossless"
        fired = True if index else None
        arms.append(Arm(name, kind, trace, fired=fired, changed_rate=0.2, control_of=-1))
    check(plot, build_tree(arms, {"n_context": 2, "n_window": 1}, seed=0))


@pytest.mark.parametrize("edge", [name for name in EDGE_TRACES if name != "no residency"])
@pytest.mark.parametrize("phase", ["decode", "all"])
def test_figure_of_a_sweep_of_an_edge_is_a_picture_or_a_sentence(phase, edge):
    trace = EDGE_TRACES[edge]()
    budgets = bl.budgets(trace, n=4)
    grid = bl.sweep(trace, residency=["lru", "lfu"], budgets=budgets, progress=False)
    check(lambda sweep: plots.plot_budget_curve(sweep, phase=phase), grid)


def test_figure_with_nothing_to_show_says_so():
    assert plots.plot_hit_rate(EDGE_TRACES["prefill only"]()).layout.annotations[0].text == (
        "no expert was looked up in decode"
    )
