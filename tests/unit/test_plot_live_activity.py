import numpy as np
import pytest

from bmoe_lab.plots import theme
from bmoe_lab.plots.live_activity import WINDOW, plot_live_activity


def shown(figure):
    (heatmap,) = figure.data
    return np.asarray(heatmap.z), np.asarray(heatmap.x), np.asarray(heatmap.y)


def counts(n_evaluation, n_layer):
    misses = np.arange(n_evaluation * n_layer).reshape(n_evaluation, n_layer) % 4
    return misses, np.full((n_evaluation, n_layer), 4)


def test_each_cell_is_the_misses_of_one_layer_in_one_evaluation():
    misses, lookups = counts(5, 3)
    z, x, y = shown(plot_live_activity(misses, lookups, first=7))
    np.testing.assert_array_equal(z, misses.T)
    assert (x.tolist(), y.tolist()) == ([7, 8, 9, 10, 11], [0, 1, 2])


def test_layer_without_a_lookup_is_missing_not_zero():
    misses, lookups = counts(2, 3)
    misses[:, 2] = lookups[:, 2] = 0
    figure = plot_live_activity(misses, lookups)
    z, _, _ = shown(figure)
    assert np.isnan(z[2]).all()
    assert not np.isnan(z[:2]).any()
    assert figure.layout.plot_bgcolor == theme.GREY
    assert "grey: not routed, or not yet" in figure.layout.title.subtitle.text


def test_only_the_last_evaluations_are_shown_under_their_own_numbers():
    misses, lookups = counts(100, 2)
    figure = plot_live_activity(misses, lookups, first=11)
    z, x, _ = shown(figure)
    np.testing.assert_array_equal(z, misses[-WINDOW:].T)
    assert (x[0], x[-1]) == (111 - WINDOW, 110)
    assert figure.layout.xaxis.range == (x[0] - 0.5, x[-1] + 0.5)


@pytest.mark.parametrize(("planned", "width"), [(0, 3), (20, 20), (5000, WINDOW)])
def test_room_is_kept_for_what_will_come(planned, width):
    figure = plot_live_activity(*counts(3, 2), n_planned=planned)
    assert figure.layout.xaxis.range == (0.5, width + 0.5)


def test_scale_goes_to_the_widest_load_and_says_so():
    figure = plot_live_activity(*counts(3, 2), phase="prefill")
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0, 4)
    assert "of at most 4 lookups" in figure.layout.title.subtitle.text
    assert figure.layout.title.text == "Misses per layer, prefill"
    assert figure.layout.xaxis.title.text == "prefill evaluation"


def test_lossy_run_is_marked_and_its_name_not_taken_for_markup():
    figure = plot_live_activity(*counts(3, 2), note="lossy: <b>Mine</b>")
    assert figure.layout.title.subtitle.text.startswith("lossy: &lt;b&gt;Mine")


@pytest.mark.parametrize("shape", [(0, 6), (0, 0), (1, 1), (64, 2000)])
def test_every_size_is_drawn(shape):
    figure = plot_live_activity(*counts(*shape), first=1)
    z, _, _ = shown(figure)
    assert z.shape[0] <= 1000
    low, high = figure.layout.yaxis.range
    assert low > high
    if shape[1] > 1000:
        assert "means over 2 layers" in figure.layout.title.subtitle.text
    if shape[0] == 0:
        assert "nothing looked up yet" in figure.layout.title.subtitle.text
