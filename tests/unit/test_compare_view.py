import numpy as np
import pytest
import traitlets
import xarray as xr

from bmoe_lab.comparison.token_detail import token_detail
from bmoe_lab.comparison.tree import build_tree
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.schema import Action
from bmoe_lab.widgets import CompareView
from tests.unit.comparison_data import make_arm, make_tree

POLICY = "DropCold(frac=0.75)"


@pytest.fixture
def tree():
    return make_tree()


@pytest.fixture
def view(tree):
    return CompareView(tree)


def _node(tree, name=POLICY):
    return tree[name].to_dataset()


def test_view_starts_with_the_first_policy_and_the_whole_text(view):
    assert (view.arm, view.value, view.tokens, view.token) == (POLICY, "kl", (0, 80), None)


def test_line_shows_the_values_of_the_tree(tree, view):
    view.window = 1
    line = view.line.figure.data[0]
    kl = _node(tree)["kl"].values
    known = np.flatnonzero(~np.isnan(kl))
    np.testing.assert_array_equal(np.asarray(line.x, float), known)
    np.testing.assert_allclose(np.asarray(line.y, float), kl[known])


def test_another_run_redraws_line_and_text_once(view):
    before = view.line.view.version, view.text.view.version, view.quality.view.version
    view.arm = "RandomDrop(rate=0.2)"
    after = view.line.view.version, view.text.view.version, view.quality.view.version
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (1, 1, 0)


def test_smoothing_redraws_the_line_only(view):
    before = view.text.view.version
    view.window = 4
    assert view.text.view.version == before


def test_zoom_of_the_line_is_the_window_of_the_text(view):
    view.line.view.view = {"xaxis": [19.6, 40.4], "event": 1}
    assert view.tokens == (20, 41)
    assert view.text.figure.data[0].customdata.tolist() == list(range(20, 41))
    assert view.line.figure.layout.xaxis.range == (19.5, 40.5)
    view.line.view.view = {"xaxis": None, "event": 2}
    assert view.tokens == (0, 80)


def test_a_click_on_the_line_or_the_text_selects_the_token(view):
    view.line.view.clicked = {"curve": 0, "index": [3], "x": 33, "y": 0.1, "event": 1}
    assert view.token == 33
    view.text.view.clicked = {"curve": 0, "index": [5], "x": 9, "y": 1, "data": 45, "event": 1}
    assert view.token == 45


def test_panel_holds_the_numbers_of_the_token(tree, view):
    view.token = 30
    detail, node, base = view.detail, _node(tree), _node(tree, "lossless")
    assert detail.kl == float(node["kl"][30])
    assert detail.delta_nll == float(node["nll"][30] - base["nll"][30])
    assert detail.read_bytes == int(node["read_bytes"][30].sum())
    assert f"{detail.kl:.4f} nat" in view._panel.value
    assert f"{detail.read_bytes:,}" in view._panel.value


def test_detail_lists_every_slot_that_the_policy_changed(tree):
    node = _node(tree)
    changed = np.isin(node["action"].values, (Action.dropped, Action.substituted))
    counts = [len(token_detail(tree, POLICY, token).changes) for token in range(80)]
    assert counts == changed.sum(axis=(1, 2)).tolist()
    assert sum(counts) > 0


def test_detail_names_the_experts_that_only_one_of_both_ran(tree):
    node, base = _node(tree), _node(tree, "lossless")
    token = int(np.flatnonzero((node["action"].values == Action.dropped).any(axis=(1, 2)))[0])
    for row in token_detail(tree, POLICY, token).routing.to_dict("records"):
        layer = row["layer"]
        kept = node["action"].values[token, layer] != Action.dropped
        here = set(node["expert_applied"].values[token, layer][kept].tolist())
        there = set(base["expert_chosen"].values[token, layer].tolist())
        assert (set(row["lost"]), set(row["gained"])) == (there - here, here - there)


def test_detail_refuses_what_is_not_there(tree):
    with pytest.raises(UnknownNameError, match="arm must be one of"):
        token_detail(tree, "DropHot()", 3)
    with pytest.raises(SettingsError, match="0 to 79; got 80"):
        token_detail(tree, POLICY, 80)


def test_what_there_is_not_is_refused(view):
    with pytest.raises(UnknownNameError, match="arm must be one of"):
        view.arm = "lossless"
    with pytest.raises(UnknownNameError, match="value must be one of"):
        view.value = "speed"
    with pytest.raises(traitlets.TraitError, match="from 0 to 79; got 80"):
        view.token = 80


def test_a_tree_without_losses_is_refused():
    with pytest.raises(SchemaError, match="run the settings live"):
        CompareView(xr.DataTree.from_dict({"/a": xr.Dataset()}))


def test_a_lossless_run_alone_is_shown_as_such():
    tree = build_tree(
        [make_arm("lossless", 0, 40)],
        {"comparison": 1, "complete": 0, "n_window": 1, "n_context": 8},
        seed=0,
    )
    view = CompareView(tree)
    assert view.arm is None
    assert "No policy was compared" in view.children[0].value
    view.token = 20
    assert view.detail is None


def test_a_tree_without_text_says_so_in_the_place_of_the_text(tree):
    for name in list(tree.children):
        tree[name] = xr.DataTree(_node(tree, name).drop_vars(["piece", "token_id"]))
    view = CompareView(tree)
    assert view.text.figure is None
    assert "piece" in view.text.view.figure["layout"]["annotations"][0]["text"]
    view.token = 30
    assert view.detail.piece is None


@pytest.mark.parametrize("value", ["kl", "delta_nll", "top1_agree", "routing_agreement"])
def test_every_difference_is_drawn(view, value):
    view.value = value
    assert view.line.figure is not None
    assert view.text.figure is not None


def test_names_of_runs_are_escaped(tree):
    tree.attrs["warnings"] = '["a <b>bold</b> warning"]'
    assert "<b>bold" not in CompareView(tree).children[0].value


def test_table_is_that_of_the_tree(tree, view):
    assert view.table.loc[POLICY, "kl_mean"] == float(
        tree.to_dataset()["kl_mean"].values[list(tree.children).index(POLICY)]
    )


def test_repr_is_short(view):
    assert repr(view) == "<CompareView: 5 runs x 80 tokens>"
