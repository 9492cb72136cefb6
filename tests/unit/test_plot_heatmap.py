"""The map in parts: windows, phases, every value against its plain meaning, only what is needed."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from bmoe_lab import metrics, plots
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import heatmap_values as values_module
from bmoe_lab.plots.heatmap_values import ACTIONS, VALUES, heatmap_cells, heatmap_values
from bmoe_lab.schema import Action, Residency
from bmoe_lab.testing.traces import make_trace


def subtitle(figure) -> str:
    return figure.layout.title.subtitle.text


def cells(trace, value, step=1, rows=None):
    whole = (0, trace.sizes["token"]), (0, trace.sizes["layer"])
    return heatmap_cells(trace, value, *whole, step, rows)


def one_by_one(trace, value):
    """Return what a cell shows, computed slot by slot."""
    shown = np.full((trace.sizes["token"], trace.sizes["layer"]), np.nan)
    for token, layer in np.ndindex(shown.shape):
        cell = trace.isel(token=token, layer=layer)
        routed = cell.expert_chosen.values >= 0
        if not routed.any():
            continue
        residency = cell.residency.values[routed].tolist()
        action = cell.action.values[routed].tolist()
        weight = cell.weight_chosen.values[routed].astype(np.float64)
        one = trace.isel(token=[token], layer=[layer])
        asked = [r for r in residency if r in (0, 1, 2)]
        shown[token, layer] = {
            "misses": lambda r=residency: r.count(0),
            "hits": lambda r=residency, a=asked: 100 * (r.count(1) + r.count(2)) / len(a),
            "speculative": lambda r=residency: r.count(2),
            "expert": lambda c=cell: int(c.expert_chosen.values[0]),
            "weight": lambda w=weight: 100 * w.max() / w.sum(),
            "entropy": lambda o=one: float(metrics.router_entropy(o, phase="all")),
            "read": lambda c=cell: float(c.read_bytes.values.sum()),
            "changed": lambda a=action: a.count(1) + a.count(2),
            "action": lambda a=action: max(ACTIONS.index(Action(x)) for x in a),
        }[value]()
    return shown


def varied():
    """Return a lossy trace with a masked last layer, a narrow layer and speculative hits."""
    trace = make_trace(n_token=16, n_layer=3, n_used=3, policy="drop", seed=2)
    trace["n_expert_used"].values[1] = 2
    fills = {"weight": np.nan, "expert": -1, "action": 255, "residency": 255, "read": 0}
    for name in ("expert_chosen", "expert_applied", "weight_chosen", "weight_applied", "action"):
        trace[name].values[:, 1, 2] = fills[name.split("_")[0]]
    for name in ("residency", "read_bytes"):
        trace[name].values[:, 1, 2] = fills[name.split("_")[0]]
    hits = trace["residency"].values
    hits[:, 0, 0][hits[:, 0, 0] == 1] = Residency.hit_speculative
    trace["action"].values[12, 0, 1] = Action.substituted
    trace["action"].values[12, 0, 2] = Action.reweighted
    return trace


@pytest.mark.parametrize("value", VALUES)
def test_heatmap_cells_are_what_counting_slot_by_slot_gives(value):
    trace = varied()
    np.testing.assert_allclose(cells(trace, value), one_by_one(trace, value), rtol=1e-6)


@pytest.mark.parametrize("value", VALUES)
def test_heatmap_reads_only_what_the_value_needs(value):
    trace = varied()
    needed = trace[list(VALUES[value].reads(trace))]
    np.testing.assert_array_equal(cells(needed, value), cells(trace, value))
    bare = plots.plot_heatmap(needed, value=value, max_hover_cells=0)
    np.testing.assert_array_equal(bare.data[0].z, plots.plot_heatmap(trace, value=value).data[0].z)


@pytest.mark.parametrize("value", VALUES)
def test_heatmap_cells_do_not_depend_on_the_block_in_memory(value, monkeypatch):
    trace = varied()
    rows = trace["phase"].values == 1
    whole, decode = cells(trace, value, step=3), cells(trace, value, step=3, rows=rows)
    monkeypatch.setattr(values_module, "_BLOCK_BYTES", 1)
    np.testing.assert_array_equal(cells(trace, value, step=3), whole)
    np.testing.assert_array_equal(cells(trace, value, step=3, rows=rows), decode)


def test_heatmap_of_a_trace_on_disk_is_the_same_and_leaves_it_there(tmp_path):
    trace = make_trace(n_token=40, scores=True)
    trace.to_netcdf(tmp_path / "trace.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "trace.nc", engine="h5netcdf", decode_times=False) as lazy:
        for value in heatmap_values(trace):
            window = {"value": value, "tokens": (8, 20), "layers": (0, 2)}
            drawn = plots.plot_heatmap(lazy, **window).data[0]
            np.testing.assert_array_equal(drawn.z, plots.plot_heatmap(trace, **window).data[0].z)
        assert not lazy["residency"].variable._in_memory
        assert not lazy["router_score"].variable._in_memory


# ---------------------------------------------------------------- windows


def test_heatmap_window_keeps_the_numbers_of_the_whole():
    trace = make_trace(n_token=60, n_layer=5)
    whole = plots.plot_heatmap(trace).data[0].z
    figure = plots.plot_heatmap(trace, tokens=(20, 50), layers=(1, 4))
    heat = figure.data[0]
    np.testing.assert_array_equal(heat.z, whole[1:4, 20:50])
    assert (heat.x0, heat.dx, heat.y0, heat.dy) == (20, 1, 1, 1)
    assert tuple(figure.layout.xaxis.range) == (19.5, 49.5)
    assert tuple(figure.layout.yaxis.range) == (0.5, 3.5)
    assert "tokens 20 to 49 of 60, layers 1 to 3 of 5" in subtitle(figure)


def test_heatmap_window_is_reduced_by_itself():
    trace = make_trace(n_token=900, n_layer=2, n_expert=4, n_used=1)
    coarse = plots.plot_heatmap(trace, max_tokens=100)
    assert coarse.data[0].dx == 9
    fine = plots.plot_heatmap(trace, max_tokens=100, tokens=(300, 400))
    assert fine.data[0].dx == 1
    assert "per cell" not in subtitle(fine)
    middle = plots.plot_heatmap(trace, max_tokens=100, tokens=(300, 500))
    assert middle.data[0].dx == 2
    assert middle.data[0].x0 == 300.5
    expected = (trace.residency.values[300:500, 0, 0] == 0).reshape(100, 2).mean(axis=1)
    np.testing.assert_allclose(middle.data[0].z[0], expected)


def test_heatmap_window_beyond_the_trace_is_cut_to_it():
    figure = plots.plot_heatmap(make_trace(n_token=20), tokens=(-5, 1000), layers=(0, 99))
    assert figure.data[0].z.shape == (4, 20)


@pytest.mark.parametrize("tokens", [(30, 40), (5, 5), (7, 3)])
def test_heatmap_window_without_a_token_is_refused(tokens):
    with pytest.raises(SettingsError, match=r"The trace has 20 tokens: use \(0, 20\)"):
        plots.plot_heatmap(make_trace(n_token=20), tokens=tokens)


@pytest.mark.parametrize("tokens", [5, (1,), (0.5, 3), "ab"])
def test_heatmap_window_that_is_no_window_is_refused(tokens):
    with pytest.raises(SettingsError, match="tokens must be two whole numbers"):
        plots.plot_heatmap(make_trace(n_token=20), tokens=tokens)


def test_heatmap_marks_only_what_lies_in_the_window():
    trace = make_trace(n_token=40)  # ten of them in the prompt
    trace["turn"].values[25:] = 1
    assert len(plots.plot_heatmap(trace).layout.shapes) == 2
    assert len(plots.plot_heatmap(trace).layout.annotations) == 1
    late = plots.plot_heatmap(trace, tokens=(20, 40))
    assert [shape.x0 for shape in late.layout.shapes] == [24.5]
    assert not late.layout.annotations
    assert not plots.plot_heatmap(trace, tokens=(12, 20)).layout.shapes


# ---------------------------------------------------------------- phases


def test_heatmap_phase_greys_the_other_tokens_and_says_so():
    trace = make_trace(n_token=40)
    whole, decode = plots.plot_heatmap(trace), plots.plot_heatmap(trace, phase="decode")
    assert np.isnan(decode.data[0].z[:, :10]).all()
    np.testing.assert_array_equal(decode.data[0].z[:, 10:], whole.data[0].z[:, 10:])
    assert tuple(decode.layout.xaxis.range) == (-0.5, 39.5)
    assert "grey: not routed, or not decode" in subtitle(decode)
    assert "not decode" not in subtitle(plots.plot_heatmap(trace, phase="decode", tokens=(10, 40)))


def test_heatmap_phase_is_left_out_of_means_and_firsts():
    trace = make_trace(n_token=40, n_prefill=9, mask_last_layer=False)
    rows = trace["phase"].values == 1
    misses = (trace.residency.values == 0).sum(axis=-1).astype(float)
    shown = plots.plot_heatmap(trace, phase="decode", max_tokens=10).data[0].z
    np.testing.assert_allclose(shown[:, 2], misses[9:12].mean(axis=0))
    first = cells(trace, "expert", 4, rows)
    np.testing.assert_array_equal(first[2], trace.expert_chosen.values[9, :, 0])


def test_heatmap_phase_without_a_token_is_refused():
    trace = make_trace(n_token=40)
    with pytest.raises(SchemaError, match="phase 'draft' to show them; got none from token 0"):
        plots.plot_heatmap(trace, phase="draft")
    with pytest.raises(SchemaError, match="got none from token 20 to 29"):
        plots.plot_heatmap(trace, phase="prefill", tokens=(20, 30))
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plots.plot_heatmap(trace, phase="decoding")


# ---------------------------------------------------------------- values


def test_heatmap_entropy_takes_the_scores_where_they_are_probabilities():
    trace = make_trace(n_token=12, n_layer=2, scores=True, mask_last_layer=False)
    score = trace["router_score"].values.astype(np.float64)
    figure = plots.plot_heatmap(trace, value="entropy")
    expected = -(score * np.log(score)).sum(axis=-1)
    np.testing.assert_allclose(figure.data[0].z, expected.T, rtol=1e-5)
    assert "over all experts (scores)" in subtitle(figure)


@pytest.mark.parametrize("change", ["one layer of logits", "unknown", "no scores"])
def test_heatmap_entropy_without_probabilities_takes_the_weights_and_says_so(change):
    trace = make_trace(n_token=12, n_layer=2, scores=True, mask_last_layer=False)
    if change == "one layer of logits":
        trace["score_is_softmax"].values[1] = 0
    elif change == "unknown":
        trace = trace.drop_vars("score_is_softmax")
    else:
        trace = trace.drop_vars(["router_score", "score_is_softmax"])
    figure = plots.plot_heatmap(trace, value="entropy")
    np.testing.assert_allclose(figure.data[0].z, one_by_one(trace, "entropy").T, rtol=1e-5)
    assert "over the chosen experts (weights)" in subtitle(figure)


def test_heatmap_entropy_with_neither_is_refused():
    trace = make_trace(n_token=12).drop_vars(["weight_chosen", "weight_applied"])
    with pytest.raises(SchemaError, match="'weight_chosen' to show 'entropy'; got none"):
        plots.plot_heatmap(trace, value="entropy")


def test_heatmap_what_was_not_streamed_is_grey_and_not_a_count_of_nothing():
    """A model that is wholly in memory would look like one that never misses."""
    trace = make_trace(n_token=12, mask_last_layer=False)
    trace["residency"].values[:, 1] = Residency.not_streamed
    for value in ("misses", "hits"):
        shown = plots.plot_heatmap(trace, value=value).data[0].z
        assert np.isnan(shown[1]).all()
        assert not np.isnan(shown[0]).any()
    trace["residency"].values[:] = Residency.not_streamed
    assert not {"misses", "hits", "speculative"} & set(heatmap_values(trace))


def test_heatmap_unknown_weights_are_grey_in_their_cells_only():
    trace = make_trace(n_token=12, mask_last_layer=False)
    trace["weight_chosen"].values[3, 2, 1] = np.nan
    for value in ("weight", "entropy"):
        shown = plots.plot_heatmap(trace, value=value).data[0].z
        assert np.argwhere(np.isnan(shown)).tolist() == [[2, 3]]


def test_heatmap_action_has_named_colors_and_keeps_the_strongest():
    trace = varied()
    figure = plots.plot_heatmap(trace, value="action")
    bar = figure.data[0].colorbar
    assert list(bar.ticktext) == ["kept", "reweighted", "substituted", "dropped"]
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-0.5, 3.5)
    assert figure.data[0].z[0, 12] == 2  # substituted beats reweighted
    blocks = plots.plot_heatmap(trace, value="action", max_tokens=4)
    fine = figure.data[0].z
    expected = np.nanmax(np.where(np.isnan(fine), -1, fine).reshape(3, 4, 4), axis=2)
    np.testing.assert_array_equal(blocks.data[0].z, np.where(expected < 0, np.nan, expected))
    assert "strongest of 4 tokens per cell" in subtitle(blocks)
    assert "dropped" in blocks.data[0].text[0]


def test_heatmap_values_offer_what_the_trace_can_show():
    lossless = make_trace(n_token=12)
    plain = ["misses", "hits", "expert", "weight", "entropy", "read"]
    assert list(heatmap_values(lossless)) == plain
    assert list(heatmap_values(make_trace(n_token=12, policy="drop"))) == [
        *plain,
        "changed",
        "action",
    ]
    assert "speculative" in heatmap_values(varied())
    bare = lossless.drop_vars(["residency", "read_bytes", "weight_chosen", "weight_applied"])
    assert list(heatmap_values(bare)) == ["expert"]
    assert heatmap_values(lossless)["misses"] == "experts missed"


@pytest.mark.parametrize("trace", [varied(), make_trace(n_token=9), make_trace(9, policy="drop")])
def test_heatmap_draws_all_that_it_offers(trace):
    for value in heatmap_values(trace):
        assert np.isfinite(plots.plot_heatmap(trace, value=value).data[0].z).any()


def test_heatmap_speculative_hits_that_are_not_there_are_refused():
    with pytest.raises(SchemaError, match="got none in the tokens shown"):
        plots.plot_heatmap(make_trace(n_token=12), value="speculative")


def test_heatmap_colors_follow_most_cells_where_a_few_are_odd():
    trace = make_trace(n_token=100, n_layer=4, mask_last_layer=False)
    weight = trace["weight_chosen"].values
    weight[0, 0] = [1, 0, 0, 0]
    figure = plots.plot_heatmap(trace, value="entropy")
    assert figure.data[0].zmin > 0.1
    assert "colours: 98 % of cells" in subtitle(figure)


# ---------------------------------------------------------------- text


def test_heatmap_shows_the_text_of_a_short_window_with_numbers():
    trace = make_trace(n_token=200)
    trace.coords["piece"] = ("token", np.array([f"w{i}" for i in range(200)]))
    assert plots.plot_heatmap(trace).layout.xaxis.ticktext is None
    axis = plots.plot_heatmap(trace, tokens=(104, 164)).layout.xaxis
    assert list(axis.tickvals) == list(range(104, 164))
    assert axis.ticktext[:3] == ("w104", "w105 · 105", "w106")
    assert plots.plot_heatmap(trace, tokens=(104, 165)).layout.xaxis.ticktext is None


def test_heatmap_text_under_the_axis_is_cut_escaped_and_visible():
    trace = make_trace(n_token=4)
    pieces = ["x", "<b>bold</b>", "a very long piece of text", "  "]
    trace.coords["piece"] = ("token", np.array(pieces))
    labels = plots.plot_heatmap(trace).layout.xaxis.ticktext
    assert labels[1:] == ("&lt;b&gt;bold&lt;/b&gt;", "a very long p…", "␣␣")


def test_heatmap_hover_tells_what_became_of_each_slot():
    trace = make_trace(n_token=4, n_layer=1, n_used=3, n_prefill=0)
    trace["expert_chosen"].values[3, 0] = [5, 6, 7]
    trace["expert_applied"].values[3, 0] = [5, 5, 9]
    trace["weight_chosen"].values[3, 0] = [0.5, np.nan, -1e9]
    trace["action"].values[3, 0] = [Action.kept, Action.dropped, Action.substituted]
    trace["residency"].values[3, 0] = [Residency.miss, Residency.miss, Residency.hit]
    text = plots.plot_heatmap(trace).data[0].text
    assert text[0][3].endswith("experts 5 (0.50) missed, 6 dropped, 7 (beyond 100,000) → 9")
    trace["expert_chosen"].values[2, 0] = [5, 6, 7]
    trace["expert_applied"].values[2, 0] = [5, 6, 8]
    trace["weight_chosen"].values[2, 0, 2] = -1e9
    trace["action"].values[2, 0, 2] = Action.substituted
    trace["residency"].values[2, 0, 2] = Residency.miss
    text = plots.plot_heatmap(trace).data[0].text
    assert text[0][3].endswith("→ 9")
    assert text[0][2].endswith("→ 8 missed")
    trace["expert_chosen"].values[3, 0, 1:] = -1
    assert plots.plot_heatmap(trace).data[0].text[0][3].endswith("experts 5 (0.50) missed")
