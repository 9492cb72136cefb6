import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.recording import open_trace, save_trace
from bmoe_lab.schema import Phase, Residency
from bmoe_lab.testing import make_trace
from bmoe_lab.widgets import RouteExplorer
from tests.unit.edge_traces import EDGE_TRACES


@pytest.fixture(scope="module")
def trace():
    return make_trace(n_token=80, n_layer=6, n_expert=16, n_used=4, scores=True, seed=11)


@pytest.fixture
def explorer(trace):
    return RouteExplorer(trace)


def _array(view, name, at=0):
    sent = view.figure["data"][at][name]
    shape = [int(n) for n in str(sent["shape"]).split(",")]
    return np.frombuffer(sent["bdata"], sent["dtype"]).reshape(shape)


def _title(view):
    return view.figure["layout"]["title"]["text"]


def _said(view):
    return " ".join(note["text"] for note in view.figure["layout"].get("annotations", []))


def _click(view, **point):
    view.clicked = {"curve": 0, "event": view.clicked.get("event", 0) + 1, **point}


def _zoom(view, **axes):
    view.view = {**axes, "event": 1}


# -- the map and what is linked with it ------------------------------------------------------------


def test_map_shows_the_misses_of_every_cell(explorer, trace):
    residency = trace["residency"].values
    expected = (residency == Residency.miss).sum(axis=-1).astype(float)
    expected[(trace["expert_chosen"].values < 0).all(axis=-1)] = np.nan
    np.testing.assert_array_equal(_array(explorer.map_panel.map.view, "z"), expected.T)


def test_value_shows_something_else_and_the_dropdown_follows(explorer, trace):
    explorer.value = "expert"
    shown = _array(explorer.map_panel.map.view, "z").T
    chosen = trace["expert_chosen"].values[..., 0].astype(float)
    np.testing.assert_array_equal(shown, np.where(chosen < 0, np.nan, chosen))
    dropdown = explorer.children[1].children[0]
    assert dropdown.value == "expert"
    dropdown.value = "entropy"
    assert explorer.value == "entropy"
    assert "ntropy" in _title(explorer.map_panel.map.view)


def test_zoom_in_the_map_cuts_to_its_cells_and_moves_the_sliders(explorer):
    tokens, layers = explorer.children[2].children
    view = explorer.map_panel.map.view
    _zoom(view, xaxis=[19.6, 39.4], yaxis=[0.5, 3.5])
    assert (explorer.tokens, explorer.layers) == ((20, 40), (1, 4))
    assert (tokens.value, layers.value) == ((20, 39), (1, 3))
    assert _array(view, "z").shape == (3, 20)
    assert view.figure["layout"]["xaxis"]["range"] == [19.5, 39.5]


def test_zoom_redraws_the_map_once(explorer):
    view = explorer.map_panel.map.view
    before = view.version
    _zoom(view, xaxis=[19.6, 39.4], yaxis=[0.5, 3.5])
    assert view.version == before + 1


def test_zoom_within_the_same_cells_still_puts_the_page_right(explorer):
    """The page then shows half cells, and the figure must come back to whole ones."""
    view = explorer.map_panel.map.view
    before = view.version
    _zoom(view, xaxis=[-0.8, 79.9])
    assert explorer.tokens == (0, 80)
    assert view.version == before + 1


def test_zoom_repeats_no_axis_that_was_zoomed_before(explorer):
    """A page sends the axes of earlier zooms along: after the slider moved they are stale."""
    view = explorer.map_panel.map.view
    _zoom(view, xaxis=[9.5, 19.5])
    assert view.view == {}
    explorer.tokens = (40, 60)
    _zoom(view, yaxis=[1.5, 3.5])
    assert (explorer.tokens, explorer.layers) == ((40, 60), (2, 4))


def test_reset_of_the_zoom_shows_the_whole_trace(explorer):
    explorer.tokens, explorer.layers = (10, 20), (2, 4)
    _zoom(explorer.map_panel.map.view, xaxis=None, yaxis=None)
    assert (explorer.tokens, explorer.layers) == ((0, 80), (0, 6))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([-30.0, -20.0], (0, 1)),
        ([200.0, 300.0], (79, 80)),
        ([10.2, 10.3], (10, 11)),
        ([40.0, 20.0], (20, 40)),
    ],
)
def test_zoom_beyond_or_below_a_cell_keeps_one(explorer, ends, expected):
    _zoom(explorer.map_panel.map.view, xaxis=ends)
    first, stop = explorer.tokens
    assert 0 <= first < stop <= 80
    if expected[1] - expected[0] == 1:
        assert stop - first == 1


def test_panning_keeps_the_number_of_tokens(explorer):
    explorer.tokens = (20, 30)
    view = explorer.map_panel.map.view
    for shift in (0.3, 0.5, 1.7, 0.49):
        first, stop = explorer.tokens
        _zoom(view, xaxis=[first - 0.5 + shift, stop - 0.5 + shift])
        assert explorer.tokens[1] - explorer.tokens[0] == 10


def test_slider_redraws_map_and_text_once(explorer):
    views = explorer.map_panel.map.view, explorer.map_panel.text.view
    before = [view.version for view in views]
    explorer.children[2].children[0].value = (5, 24)
    assert explorer.tokens == (5, 25)
    assert [view.version for view in views] == [n + 1 for n in before]
    explorer.children[2].children[0].value = (5, 24)
    explorer.tokens = (5, 25)
    assert [view.version for view in views] == [n + 1 for n in before]


def test_layers_leave_the_text_as_it_is(explorer):
    before = explorer.map_panel.text.view.version
    explorer.layers = (1, 3)
    assert explorer.map_panel.text.view.version == before


def test_text_under_the_axis_and_below_the_map(explorer, trace):
    explorer.tokens = (10, 22)
    axis = explorer.map_panel.map.view.figure["layout"]["xaxis"]
    assert len(axis["ticktext"]) == 12
    text = explorer.map_panel.text.view.figure["data"][0]
    assert len(text["text"]) == 12


def test_rows_of_the_text_reach_the_page_as_numbers(explorer):
    """As base64 text, the page could not draw the figure."""
    rows = explorer.map_panel.text.view.figure["layout"]["yaxis"]["tickvals"]
    assert rows == list(range(len(rows)))


def test_trace_without_text_says_so_in_a_line():
    panel = RouteExplorer(EDGE_TRACES["no text"]()).map_panel
    assert "No text was recorded" in panel.children[1].value
    assert panel.text.view.version == 0


def test_buttons_move_by_half_and_show_the_whole(explorer):
    explorer.tokens = (20, 40)
    earlier, later, whole = explorer.children[1].children[2:]
    later.click()
    assert explorer.tokens == (30, 50)
    earlier.click()
    earlier.click()
    earlier.click()
    earlier.click()
    assert explorer.tokens == (0, 20)
    whole.click()
    assert explorer.tokens == (0, 80)


def test_phase_greys_the_others_and_its_dropdown_follows(explorer, trace):
    explorer.phase = "decode"
    shown = _array(explorer.map_panel.map.view, "z")
    prefill = trace["phase"].values == Phase.prefill
    assert np.isnan(shown[:, prefill]).all()
    assert not np.isnan(shown[:, ~prefill]).any()
    assert explorer.children[1].children[1].value == "decode"


def test_phase_that_the_window_lacks_is_said_in_the_maps_place(explorer):
    explorer.phase = "draft"
    assert "draft" in _said(explorer.map_panel.map.view)
    # The sentence has no cells to zoom into.
    _zoom(explorer.map_panel.map.view, xaxis=[0.2, 0.3])
    assert explorer.tokens == (0, 80)
    explorer.phase = "all"
    assert explorer.map_panel.map.figure is not None


# -- cells -----------------------------------------------------------------------------------------


def test_click_in_the_map_shows_the_slots_of_the_cell(explorer, trace):
    _click(explorer.map_panel.map.view, index=[2, 50], x=50, y=2)
    assert explorer.cell == (50, 2)
    slots = explorer.slots
    np.testing.assert_array_equal(slots["expert_chosen"], trace["expert_chosen"].values[50, 2])
    np.testing.assert_array_equal(slots["weight_chosen"], trace["weight_chosen"].values[50, 2])
    np.testing.assert_array_equal(slots["read_bytes"], trace["read_bytes"].values[50, 2])
    assert slots["residency"].tolist() == [
        Residency(value).name for value in trace["residency"].values[50, 2]
    ]
    history = metrics.cell_history(trace, token=50, layer=2)
    np.testing.assert_array_equal(slots["tokens_ago"], history["tokens_ago"])
    assert "layer 2" in _title(explorer.cell_panel.scores.view)


def test_click_on_a_token_of_the_text_keeps_the_layer(explorer):
    explorer.tokens = (30, 60)
    _click(explorer.map_panel.text.view, index=[4], x=3, y=0)
    assert explorer.cell == (34, 0)
    explorer.cell = (34, 5)
    _click(explorer.map_panel.text.view, index=[5], x=3, y=0)
    assert explorer.cell == (35, 5)


def test_number_boxes_choose_the_cell_and_follow_it(explorer):
    token, layer = explorer.cell_panel.control.boxes
    token.value = 41
    assert explorer.cell == (41, 0)
    layer.value = 3
    assert explorer.cell == (41, 3)
    explorer.cell = (7, 2)
    assert (token.value, layer.value) == (7, 2)


def test_cell_is_framed_and_drawn_once(explorer):
    map_view, scores = explorer.map_panel.map.view, explorer.cell_panel.scores.view
    before = map_view.version, scores.version
    explorer.cell = (50, 2)
    assert (map_view.version, scores.version) == (before[0] + 1, before[1] + 1)
    frame = map_view.figure["layout"]["shapes"][-1]
    assert (frame["x0"], frame["x1"], frame["y0"], frame["y1"]) == (49.5, 50.5, 1.5, 2.5)
    explorer.cell = None
    assert all(shape["type"] != "rect" for shape in map_view.figure["layout"].get("shapes", []))
    assert explorer.slots is None


def test_cell_that_routed_nothing_is_said_and_the_next_one_shown(explorer, trace):
    explorer.cell = (50, 2)
    last = trace.sizes["layer"] - 1
    assert (trace["expert_chosen"].values[0, last] < 0).all()
    explorer.cell = (0, last)
    assert explorer.slots is None
    assert "must have routed" in explorer.cell_panel.children[1].value
    assert explorer.cell_panel.children[2].children == ()
    explorer.cell = (50, 2)
    assert explorer.cell_panel.children[2].children == (explorer.cell_panel.scores.view,)
    assert len(explorer.slots) == 4


def test_text_of_a_trace_is_no_markup():
    trace = make_trace(n_token=6, n_layer=2, scores=True, seed=0)
    trace = trace.assign_coords(piece=("token", np.array(["<img src=x>"] * 6)))
    trace.attrs["model_name"] = "<b>model"
    explorer = RouteExplorer(trace)
    explorer.expert = (0, int(trace["expert_chosen"].values[5, 0, 0]))
    explorer.tab = 1
    html = "".join(
        str(child.value)
        for box in (explorer.summary, explorer.expert_panel)
        for child in box.children
        if hasattr(child, "value")
    )
    assert "<img" not in html
    assert "<b>model" not in html
    assert "&lt;img" in html


# -- experts and layers ----------------------------------------------------------------------------


def test_click_on_a_bar_chooses_the_expert_of_the_cells_layer(explorer):
    explorer.cell = (50, 2)
    _click(explorer.cell_panel.scores.view, index=[0], x=7, y=0.1)
    assert explorer.expert == (2, 7)
    assert explorer.tab == 0
    assert "7" in explorer.children[3].get_title(1)


def test_expert_tab_shows_uses_and_pieces_of_the_window(explorer, trace):
    expert = int(trace["expert_chosen"].values[60, 3, 0])
    explorer.tokens = (40, 80)
    explorer.phase = "decode"
    explorer.expert = (3, expert)
    assert explorer.expert_panel.use.view.version == 0
    explorer.tab = 1
    used = (trace["expert_chosen"].values[40:, 3] == expert).any(axis=-1)
    marks = np.concatenate([data.x for data in explorer.expert_panel.use.figure.data])
    np.testing.assert_array_equal(np.sort(marks), 40 + np.flatnonzero(used))
    count = explorer.expert_panel.pieces["expert_piece_count_decode"]
    assert int(count.sum()) == int(used.sum())


def test_click_on_a_use_chooses_its_cell(explorer, trace):
    expert = int(trace["expert_chosen"].values[60, 3, 0])
    explorer.expert = (3, expert)
    explorer.tab = 1
    figure = explorer.expert_panel.use.figure
    token = int(figure.data[0].customdata[1])
    _click(explorer.expert_panel.use.view, index=[1], x=token, y=0)
    assert explorer.cell == (token, 3)


def test_layers_tab_shows_hit_rates_of_the_window(explorer, trace):
    explorer.tokens = (40, 80)
    explorer.tab = 2
    expected = 100 * metrics.hit_rate(trace.isel(token=slice(40, 80)), by="layer", phase="all")
    np.testing.assert_allclose(explorer.layers_panel.hits.figure.data[0].y, expected)
    assert (
        "tokens 40 to 79 of 80"
        in (explorer.layers_panel.hits.view.figure["layout"]["title"]["subtitle"]["text"])
    )


def test_tab_is_drawn_when_it_is_opened_and_not_before(explorer):
    views = (explorer.layers_panel.hits.view, explorer.layers_panel.load.view)
    assert [view.version for view in views] == [0, 0]
    explorer.tokens = (4, 30)
    assert [view.version for view in views] == [0, 0]
    explorer.tab = 2
    assert [view.version for view in views] == [1, 1]
    before = explorer.map_panel.map.view.version
    explorer.tokens = (4, 20)
    assert explorer.map_panel.map.view.version == before
    explorer.tab = 0
    assert explorer.map_panel.map.view.version == before + 1
    explorer.tab = 2
    assert [view.version for view in views] == [2, 2]


# -- what is taken to code -------------------------------------------------------------------------


def test_window_is_the_part_that_is_looked_at(explorer, trace):
    explorer.tokens, explorer.layers, explorer.phase = (2, 40), (1, 4), "decode"
    rows = 2 + np.flatnonzero(trace["phase"].values[2:40] == Phase.decode)
    assert explorer.window.identical(trace.isel(token=rows, layer=slice(1, 4)))


def test_code_makes_the_figures_of_the_open_tab(explorer, trace):
    explorer.value, explorer.tokens, explorer.layers = "weight", (3, 40), (1, 4)
    explorer.cell, explorer.expert = (50, 2), (2, 7)
    views = {
        0: (explorer.map_panel.map, explorer.cell_panel.scores),
        1: (explorer.expert_panel.use,),
        2: (explorer.layers_panel.hits, explorer.layers_panel.load),
    }
    for tab, drawings in views.items():
        explorer.tab = tab
        calls = explorer.code.splitlines()
        assert len(calls) == len(drawings)
        for call, drawing in zip(calls, drawings, strict=True):
            figure = eval(call, {"ds": trace})
            assert figure.layout.title.text == drawing.figure.layout.title.text
            for made, shown in zip(figure.data, drawing.figure.data, strict=True):
                expected = made.z if made.type == "heatmap" else made.y
                actual = shown.z if made.type == "heatmap" else shown.y
                np.testing.assert_array_equal(expected, actual)


# -- the line on top -------------------------------------------------------------------------------


def test_summary_says_lossless_or_lossy():
    lossless = RouteExplorer(make_trace(n_token=8, n_layer=2))
    lossy = RouteExplorer(make_trace(n_token=8, n_layer=2, policy="drop"))
    assert "lossless" in lossless.summary.children[0].value
    assert "LOSSY" in lossy.summary.children[0].value
    assert "8 tokens" in lossy.summary.children[0].value


def test_summary_says_counterfactual_incomplete_and_unknown():
    trace = make_trace(n_token=8, n_layer=2)
    trace.attrs |= {"counterfactual": 1, "complete": 0, "source": "import"}
    del trace.attrs["lossless"], trace.attrs["policy"]
    line = RouteExplorer(trace).summary.children[0].value
    assert "policy unknown" in line
    assert "counterfactual" in line
    assert "incomplete" in line


def test_verdict_is_that_of_diagnose(explorer, trace):
    expected = trace.moe.diagnose()
    assert explorer.summary.wait(60).startswith(expected.verdict)
    assert explorer.summary.diagnosis.numbers == pytest.approx(expected.numbers, nan_ok=True)


def test_verdict_takes_a_budget_and_refuses_with_its_own_words(explorer, trace):
    explorer.summary.wait(60)
    budget = trace.moe.diagnose().numbers["token_cycle_bytes"] / 2
    explorer.summary.start(f"{int(budget)} B")
    assert explorer.summary.wait(60).startswith("below the cliff")
    explorer.summary.start("much")
    verdict = explorer.summary.wait(60)
    assert "No verdict: budget must be" in verdict
    assert "much" in verdict


def test_verdict_of_a_long_trace_waits_for_the_button(trace, monkeypatch):
    monkeypatch.setattr("bmoe_lab.widgets.trace_summary._AT_ONCE", 10)
    explorer = RouteExplorer(trace)
    assert explorer.summary.wait(60) == ""
    explorer.summary.children[1].children[0].click()
    assert explorer.summary.wait(60).startswith(trace.moe.diagnose().verdict)


# -- the door --------------------------------------------------------------------------------------


def test_what_the_trace_does_not_have_is_refused(explorer):
    with pytest.raises(UnknownNameError, match="value must be one of"):
        explorer.value = "heat"
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        explorer.phase = "night"
    with pytest.raises(SettingsError, match="token"):
        explorer.cell = (80, 0)
    with pytest.raises(SettingsError, match=r"cell must be \(token, layer\)"):
        explorer.cell = 3
    with pytest.raises(SettingsError, match="expert must be a whole number"):
        explorer.expert = (0, 16)
    with pytest.raises(SettingsError, match="tokens must be"):
        explorer.tokens = (90, 100)
    explorer.tokens = (70, 100)
    assert explorer.tokens == (70, 80)


def test_what_is_no_trace_is_refused(trace):
    with pytest.raises(SchemaError):
        RouteExplorer(trace.drop_vars("expert_chosen"))


def test_repr_is_short(explorer):
    assert repr(explorer) == "<RouteExplorer: 80 tokens x 6 layers>"


# -- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_edge_traces_give_a_picture_or_a_sentence(name):
    trace = EDGE_TRACES[name]()
    explorer = RouteExplorer(trace)
    n_token, n_layer = trace.sizes["token"], trace.sizes["layer"]
    for value in explorer._values:
        explorer.value = value
    for phase in ("prefill", "decode", "draft", "all"):
        for tab in (2, 1, 0):
            explorer.phase, explorer.tab = phase, tab
    for box in explorer.children[1].children[2:]:
        box.click()
    if n_token:
        for layer in range(n_layer):
            explorer.cell = (n_token - 1, layer)
            explorer.expert = (layer, 1)
            explorer.tab = 1
            explorer.tab = 0
        _zoom(explorer.map_panel.map.view, xaxis=[-0.4, 0.4], yaxis=None)
        assert explorer.tokens == (0, 1)
        explorer.tab = 2
    for drawing in (explorer.map_panel.map, explorer.layers_panel.hits, explorer.layers_panel.load):
        assert drawing.figure is not None or _said(drawing.view)
    assert explorer.window.sizes["layer"] == n_layer
    assert explorer.summary.wait(60) or not n_token


def test_trace_on_disk_stays_there(tmp_path, trace):
    save_trace(trace, tmp_path / "trace.nc")
    with open_trace(tmp_path / "trace.nc", memory_limit=0) as opened:
        explorer = RouteExplorer(opened)
        explorer.cell = (50, 2)
        explorer.tokens = (40, 60)
        assert not opened["router_score"].variable._in_memory
        np.testing.assert_array_equal(
            explorer.slots["expert_chosen"], trace["expert_chosen"].values[50, 2]
        )
        explorer.summary.wait(60)
