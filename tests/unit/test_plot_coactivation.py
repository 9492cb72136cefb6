"""Experts of a layer that are chosen together."""

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import plot_coactivation
from bmoe_lab.testing import make_trace
from tests.unit.edge_traces import EDGE_TRACES
from tests.unit.metric_traces import decoded, uniform


def test_map_draws_the_lift_of_the_metric():
    trace = uniform(400, 2, 12, 4, seed=0)
    expected = metrics.coactivation_lift(trace)[1].values
    figure = plot_coactivation(trace, layer=1, order="id")
    actual = 2.0 ** np.asarray(figure.data[0].z)
    off = ~np.eye(12, dtype=bool)
    np.testing.assert_allclose(actual[off], expected[off])
    assert np.isnan(actual[~off]).all()
    np.testing.assert_allclose(figure.data[0].customdata[..., 2][off], expected[off], rtol=1e-6)


def test_map_draws_the_meetings():
    trace = decoded([[0, 1], [0, 1], [1, 2], [3, 0]], n_expert=5)
    shown = np.asarray(plot_coactivation(trace, value="count", order="id").data[0].z)
    assert shown[0, 1] == shown[1, 0] == 2
    assert shown[1, 2] == shown[0, 3] == 1
    assert shown[2, 3] == 0
    # The diagonal and an expert that was never used are unknown, not 0.
    assert np.isnan(np.diagonal(shown)).all()
    assert np.isnan(shown[4]).all()
    assert np.isnan(shown[:, 4]).all()


def test_map_counts_the_applied_experts_if_asked():
    trace = decoded([[0, 1], [0, 1]], n_expert=4)
    trace["expert_applied"].values[:, 0] = [[2, 3], [2, 3]]
    shown = np.asarray(
        plot_coactivation(trace, value="count", which="applied", order="id").data[0].z
    )
    assert shown[2, 3] == 2
    assert np.isnan(shown[0, 1])


def test_map_of_lift_says_what_chance_is():
    bar = plot_coactivation(uniform(50, 1, 8, 2, seed=0)).data[0].colorbar
    assert "1 = chance" in bar.title.text
    assert bar.ticktext[list(bar.tickvals).index(0)] == "1 chance"


def test_map_scale_is_symmetric_about_chance_and_cut_at_both_ends():
    # 0 and 1 always together, rare: a lift of 10; 2 with both once in a while.
    trace = decoded([[0, 1]] * 2 + [[2, 3]] * 18, n_expert=4)
    drawn = plot_coactivation(trace, order="id").data[0]
    assert (drawn.zmin, drawn.zmax) == (-3, 3)
    assert np.asarray(drawn.z)[0, 1] == 3.0
    assert np.asarray(drawn.customdata)[0, 1, 2] == pytest.approx(10.0)


def test_map_of_pairs_that_never_met_is_silent_below_one_meeting_expected():
    """A short run was painted blue: almost no two of many experts ever meet in it."""
    # 0 and 2: expected 3 * 3 / 6 = 1.5 meetings; 4 and 0: 1 * 3 / 6.
    trace = decoded([[0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 4]], n_expert=5)
    shown = np.asarray(plot_coactivation(trace, order="id").data[0].z)
    assert shown[0, 2] == -3.0
    assert np.isnan(shown[0, 4])


def test_map_by_load_begins_with_the_most_used_and_leaves_out_the_unused():
    trace = decoded([[5, 1], [5, 2], [5, 1], [5, 6]], n_expert=9)
    figure = plot_coactivation(trace, value="count")
    ids = np.asarray(figure.data[0].customdata)[0, :, 0]
    assert ids.tolist() == [5, 1, 2, 6]
    assert np.asarray(figure.data[0].z).shape == (4, 4)
    assert "4 of 9 experts used" in figure.layout.title.subtitle.text


def test_map_by_group_puts_those_that_meet_side_by_side():
    rng = np.random.default_rng(0)
    groups = [[0, 3, 5, 6], [1, 2, 4, 7]]
    picks = [rng.choice(groups[i % 2], 2, replace=False).tolist() for i in range(200)]
    figure = plot_coactivation(decoded(picks), order="group")
    ids = np.asarray(figure.data[0].customdata)[0, :, 0].astype(int).tolist()
    assert {frozenset(ids[:4]), frozenset(ids[4:])} == {frozenset(group) for group in groups}


def test_map_of_512_experts_has_a_cell_per_pair():
    trace = uniform(600, 1, 512, 8, seed=0)
    assert np.asarray(plot_coactivation(trace, order="id").data[0].z).shape == (512, 512)


def test_map_of_more_experts_than_cells_shows_means_and_says_so():
    trace = uniform(400, 1, 1500, 8, seed=0)
    figure = plot_coactivation(trace, order="id", value="count")
    shown = np.asarray(figure.data[0].z)
    assert shown.shape == (750, 750)
    assert "means over 2 x 2 experts per cell" in figure.layout.title.subtitle.text
    share = metrics.coactivation(trace)[0].values[:2, 2:4]
    used = metrics.routing_counts(trace)[0].values[:2]
    assert shown[0, 1] == pytest.approx(np.nanmean(share * used[:, None]))


def test_map_takes_a_layer_from_the_end_and_refuses_others():
    trace = make_trace(n_token=20, n_layer=3, seed=0)
    assert "layer 2" in plot_coactivation(trace, layer=-1).layout.title.text
    with pytest.raises(SettingsError, match="layer must be a whole number from 0 to 2"):
        plot_coactivation(trace, layer=3)


def test_map_of_one_expert_per_token_is_refused():
    with pytest.raises(SchemaError, match="must have chosen two experts for a token"):
        plot_coactivation(decoded([[0], [1], [0]]))


def test_map_refuses_names_that_it_does_not_know():
    trace = make_trace(n_token=8)
    with pytest.raises(UnknownNameError, match="value must be one of"):
        plot_coactivation(trace, value="lifts")
    with pytest.raises(UnknownNameError, match="order must be one of"):
        plot_coactivation(trace, order="size")
    with pytest.raises(UnknownNameError, match="which must be one of"):
        plot_coactivation(trace, which="wanted")


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name):
    sentence = None
    try:
        figure = plot_coactivation(EDGE_TRACES[name]())
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
    said = plot_coactivation(trace).layout.title.subtitle.text
    assert "lossy: DropCold(0.75)" in said
    assert "counterfactual" in said


def test_figure_of_an_unknown_phase_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plot_coactivation(make_trace(n_token=8), phase="decoding")


def test_figure_is_found_by_the_accessor():
    assert make_trace(n_token=12).moe.plot.coactivation().data
