"""A run below the limit of its drive and cores."""

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import plot_roofline
from bmoe_lab.schema import COSTS
from bmoe_lab.testing import make_trace
from tests.unit.edge_traces import EDGE_TRACES
from tests.unit.test_metrics_roofline import timed

SERIAL = {"wall_s": (9, 3, 5), "io_s": (1, 2, 3), "manage_s": (0, 0.5, 0.5)}
"""Two tokens: 1 s of computing and 10 bytes at 4 bytes/s each, 0.5 s of management."""


def line(figure, start):
    (found,) = (drawn for drawn in figure.data if drawn.name.startswith(start))
    return found


def test_lines_are_the_two_limits():
    figure = plot_roofline(timed(**SERIAL))
    overlap, serial = line(figure, "limit, reads overlap"), line(figure, "limit, one after")
    size = 2**10 * np.asarray(overlap.x)
    np.testing.assert_allclose(overlap.y, 1 / np.maximum(1.0, size / 4))
    np.testing.assert_allclose(serial.y, 1 / (1.0 + size / 4))
    assert size[0] == 0


def test_point_is_the_run_measured():
    figure = plot_roofline(timed(**SERIAL))
    run = line(figure, "this run")
    assert (run.x[0] * 2**10, run.y[0]) == (10.0, 0.25)
    assert "62.5 % of limit (0.4 tokens/s) · reads bind" in figure.layout.title.subtitle.text


def test_lines_pass_through_the_limits_of_the_metric():
    trace = make_trace(n_token=60, n_layer=3, seed=0)
    found = metrics.roofline(trace)
    figure = plot_roofline(trace)
    read = line(figure, "this run").x[0]
    for start, name in (("limit, reads", "limit_overlap"), ("limit, one", "limit_serial")):
        drawn = line(figure, start)
        at = np.interp(read, drawn.x, drawn.y)
        assert at == pytest.approx(float(found[f"{name}_decode"]), rel=1e-3)
    assert read * 2**10 == pytest.approx(float(found["read_bytes_per_token_decode"]))


def test_balance_is_where_reading_takes_as_long_as_computing():
    figure = plot_roofline(timed(**SERIAL))
    assert line(figure, "balance").x[0] * 2**10 == pytest.approx(4.0)


def test_figure_marks_what_a_run_without_a_cache_reads():
    trace = make_trace(n_token=60, n_layer=3, seed=0)
    mark = line(plot_roofline(trace), "without a cache")
    assert mark.x[0] * 2**10 == pytest.approx(float(metrics.demand_bytes_per_token(trace)))


def test_subtitle_says_what_was_derived_from_what():
    said = plot_roofline(timed(**SERIAL)).layout.title.subtitle.text
    assert "computing 1 s/token (wall time less reads, management)" in said
    assert "reads 4 B/s (bytes read over time of reads)" in said
    said = plot_roofline(timed(**SERIAL), compute_s=20, bandwidth=40).layout.title.subtitle.text
    assert said.count("(given)") == 2


def test_subtitle_writes_numbers_out():
    """It said 1.24e+03 tokens/s."""
    said = plot_roofline(make_trace(n_token=20), compute_s=0.0008, bandwidth="1 GiB")
    assert "(1,250 tokens/s)" in said.layout.title.subtitle.text
    assert "computing 0.8 ms/token (given)" in said.layout.title.subtitle.text


def test_run_that_computing_binds_says_so():
    said = plot_roofline(timed(**SERIAL), bandwidth="1 KiB").layout.title.subtitle.text
    assert "computing binds" in said


def test_run_above_its_limit_says_that_a_number_is_wrong():
    said = plot_roofline(timed(**SERIAL), compute_s=8, bandwidth=400).layout.title.subtitle.text
    assert "200 % of limit" in said
    assert "faster than the numbers given allow" in said


def test_trace_without_times_needs_both_numbers_and_has_no_point():
    trace = make_trace(n_token=20, n_layer=2, seed=0)
    trace = trace.drop_vars([name for name in COSTS if name in trace.variables])
    with pytest.raises(SchemaError, match="pass both compute_s="):
        plot_roofline(trace)
    figure = plot_roofline(trace, compute_s=0.001, bandwidth="1 GiB")
    assert not [drawn for drawn in figure.data if drawn.name.startswith("this run")]
    assert "no time measured; at most" in figure.layout.title.subtitle.text


def test_times_that_were_not_measured_are_refused():
    trace = timed(wall_s=(9, 3, 5), io_s=(1, np.nan, np.nan))
    with pytest.raises(SchemaError, match="must know the times and bytes of phase 'decode'"):
        plot_roofline(trace)


def test_overlapped_reads_want_the_bandwidth():
    trace = timed(wall_s=(9, 4, 4), io_s=(9, 6, 6), stall_s=(0, 1, 1))
    with pytest.raises(SettingsError, match="bandwidth must be given"):
        plot_roofline(trace)
    assert plot_roofline(trace, bandwidth=5).data


def test_run_that_reads_nothing_stands_on_the_left_edge():
    trace = timed(wall_s=(9, 1, 1), io_s=(1, 0, 0))
    trace["read_bytes"].values[:] = 0
    figure = plot_roofline(trace)
    assert line(figure, "this run").x == (0.0,)
    assert "100 % of limit (1 tokens/s) · computing binds" in figure.layout.title.subtitle.text


def test_point_and_lines_lie_within_the_axes():
    for seed in range(4):
        figure = plot_roofline(make_trace(n_token=60, n_layer=2 + seed, seed=seed))
        low, high = 10 ** np.asarray(figure.layout.yaxis.range)
        for drawn in figure.data[:2]:
            assert low < min(drawn.y) <= max(drawn.y) < high
        run = line(figure, "this run")
        assert low < run.y[0] < high
        assert 0 <= run.x[0] < figure.layout.xaxis.range[1]


@pytest.mark.parametrize("name", EDGE_TRACES)
def test_figure_of_an_edge_is_a_picture_or_a_sentence(name):
    sentence = None
    try:
        figure = plot_roofline(EDGE_TRACES[name]())
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
    said = plot_roofline(trace).layout.title.subtitle.text
    assert "lossy: DropCold(0.75)" in said
    assert "counterfactual" in said


def test_figure_of_an_unknown_phase_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        plot_roofline(make_trace(n_token=8), phase="decoding")


def test_figure_is_found_by_the_accessor():
    assert make_trace(n_token=12).moe.plot.roofline().data
