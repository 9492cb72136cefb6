"""The scores of one cell: every expert once, in the group of what became of it."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab import plots
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.schema import Action
from bmoe_lab.testing.traces import make_trace


def groups(figure):
    return {bars.name: list(bars.customdata) for bars in figure.data}


def heights(figure):
    return {e: y for bars in figure.data for e, y in zip(bars.customdata, bars.y, strict=True)}


def cell_with(trace, action):
    token, layer = np.argwhere((trace.action.values == action).any(-1))[0].tolist()
    return token, layer


def test_cell_scores_draw_every_expert_with_its_score():
    trace = make_trace(n_token=20, n_expert=32, scores=True)
    figure = plots.plot_cell_scores(trace, token=12, layer=2)
    score = trace.router_score.values[12, 2]
    assert heights(figure) == {expert: float(s) for expert, s in enumerate(score)}
    assert sorted(groups(figure)["chosen"]) == sorted(trace.expert_chosen.values[12, 2].tolist())
    for bars in figure.data:
        assert list(bars.x) == list(bars.customdata)
    assert "token 12" in figure.layout.title.text
    assert "layer 2" in figure.layout.title.text


def test_cell_scores_number_the_chosen_by_their_slot():
    trace = make_trace(n_token=20, scores=True)
    figure = plots.plot_cell_scores(trace, token=12, layer=2)
    chosen = next(bars for bars in figure.data if bars.name == "chosen")
    ranks = dict(zip(chosen.customdata, chosen.text, strict=True))
    expected = {int(e): str(s) for s, e in enumerate(trace.expert_chosen.values[12, 2])}
    assert ranks == expected


@pytest.mark.parametrize(
    ("policy", "action", "name"),
    [
        ("drop", Action.dropped, "chosen, dropped"),
        ("substitute", Action.substituted, "chosen, substituted"),
    ],
)
def test_cell_scores_mark_what_a_policy_changed(policy, action, name):
    trace = make_trace(n_token=60, scores=True, policy=policy)
    token, layer = cell_with(trace, action)
    figure = plots.plot_cell_scores(trace, token=token, layer=layer)
    changed = trace.action.values[token, layer] == action
    assert sorted(groups(figure)[name]) == sorted(
        trace.expert_chosen.values[token, layer][changed].tolist()
    )
    brought = sorted(trace.expert_applied.values[token, layer][changed].tolist())
    if action == Action.substituted:
        assert sorted(groups(figure)["substitute"]) == brought
        bars = next(bars for bars in figure.data if bars.name == name)
        assert f"expert {brought[0]} ran instead (hit)" in " ".join(bars.hovertext)
    else:
        assert "substitute" not in groups(figure)
    assert f"lossy: {trace.attrs['policy']}" in figure.layout.title.subtitle.text


def test_cell_scores_from_best_to_worst():
    trace = make_trace(n_token=20, scores=True)
    figure = plots.plot_cell_scores(trace, token=12, layer=2, order="score")
    place = {e: x for bars in figure.data for e, x in zip(bars.customdata, bars.x, strict=True)}
    order = np.argsort(-trace.router_score.values[12, 2], kind="stable").tolist()
    assert sorted(place, key=place.__getitem__) == order


def test_cell_scores_without_scores_are_the_weights_of_the_chosen():
    trace = make_trace(n_token=20)
    figure = plots.plot_cell_scores(trace, token=12, layer=2)
    weight = trace.weight_chosen.values[12, 2].tolist()
    assert heights(figure) == dict(
        zip(trace.expert_chosen.values[12, 2].tolist(), weight, strict=True)
    )
    assert figure.layout.yaxis.title.text == "router weight"
    assert "no scores recorded" in figure.layout.title.subtitle.text
    assert tuple(figure.layout.xaxis.range) == (-0.6, 15.6)


def test_cell_scores_ruled_out_by_the_graph_are_left_out_and_counted():
    trace = make_trace(n_token=20, scores=True)
    out = [e for e in range(16) if e not in trace.expert_chosen.values[12, 2]][:3]
    trace["router_score"].values[12, 2, out] = -np.inf
    figure = plots.plot_cell_scores(trace, token=12, layer=2)
    assert not set(out) & set(heights(figure))
    assert "13 experts scored" in figure.layout.title.subtitle.text
    assert "3 ruled out by the graph" in figure.layout.title.subtitle.text


def test_cell_scores_escape_the_piece():
    trace = make_trace(n_token=20, scores=True)
    trace.coords["piece"] = ("token", np.array(["<i>x</i>"] * 20))
    figure = plots.plot_cell_scores(trace, token=12, layer=2)
    assert "&lt;i&gt;x&lt;/i&gt;" in figure.layout.title.text


def test_cell_scores_impossible_requests_are_refused():
    trace = make_trace(n_token=20, scores=True)
    with pytest.raises(SchemaError, match="layer 3 must have routed token 0; it did not"):
        plots.plot_cell_scores(trace, token=0, layer=3)
    bare = trace.drop_vars(["router_score", "weight_chosen", "weight_applied"])
    with pytest.raises(SchemaError, match="'router_score' or 'weight_chosen' for this cell"):
        plots.plot_cell_scores(bare, token=12, layer=0)
    with pytest.raises(SettingsError, match="token must be a whole number from 0 to 19"):
        plots.plot_cell_scores(trace, token=20, layer=0)
    with pytest.raises(UnknownNameError, match="order must be one of"):
        plots.plot_cell_scores(trace, token=12, layer=0, order="rank")
