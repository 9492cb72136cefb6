"""The physical limit of a run: what follows from its reads, its computing, its drive."""

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError
from bmoe_lab.schema import COSTS
from bmoe_lab.testing import make_trace
from tests.unit.metric_traces import hand_made


def timed(**costs):
    """Return the hand-made trace with these costs of its three evaluations, and no others.

    Its prefill reads 20 bytes for two tokens, each of its two decoded tokens 10.
    """
    trace = hand_made()
    trace = trace.drop_vars([name for name in COSTS if name in trace.variables])
    values = {}
    for name, (prefill, first, second) in costs.items():
        values[name] = ("token", np.array([prefill, np.nan, first, second], dtype=np.float64))
    return trace.assign(values)


def numbers(trace, **given):
    found = metrics.roofline(trace, **given)
    return {str(name).removesuffix("_decode"): float(value) for name, value in found.items()}


def test_roofline_of_a_serial_run_derives_both_numbers():
    """Wall 8 s for two tokens: 5 s of reading 20 bytes, 1 s of management, 2 s of computing."""
    trace = timed(wall_s=(9, 3, 5), io_s=(1, 2, 3), manage_s=(0, 0.5, 0.5))
    actual = numbers(trace)
    assert actual["compute_s"] == pytest.approx(1.0)
    assert actual["bandwidth"] == 4.0
    assert actual["read_bytes_per_token"] == 10.0
    assert actual["limit_overlap"] == pytest.approx(1 / 2.5)
    assert actual["limit_serial"] == pytest.approx(1 / 3.5)
    assert actual["speed"] == 0.25
    assert actual["limit_frac"] == pytest.approx(0.25 * 2.5)
    attrs = metrics.roofline(trace).attrs
    assert attrs == {
        "binding": "reads",
        "compute_from": "wall time less reads, management",
        "bandwidth_from": "bytes read over time of reads",
    }


def test_roofline_of_a_serial_run_without_management_is_its_serial_limit():
    actual = numbers(timed(wall_s=(9, 3, 5), io_s=(1, 2, 3)))
    assert actual["speed"] == pytest.approx(actual["limit_serial"])


def test_roofline_with_both_numbers_given_needs_no_times():
    trace = timed()
    actual = numbers(trace, compute_s=2.0, bandwidth=20)
    assert (actual["limit_overlap"], actual["limit_serial"]) == (0.5, 0.4)
    assert np.isnan(actual["speed"])
    assert np.isnan(actual["limit_frac"])
    attrs = metrics.roofline(trace, compute_s=2.0, bandwidth=20).attrs
    assert attrs == {"binding": "computing", "compute_from": "given", "bandwidth_from": "given"}


def test_roofline_takes_a_bandwidth_as_a_size():
    actual = numbers(timed(), compute_s=1, bandwidth="2 KiB")
    assert actual["bandwidth"] == 2048.0


def test_roofline_given_number_wins_over_the_recorded_one():
    trace = timed(wall_s=(9, 3, 5), io_s=(1, 2, 3))
    assert numbers(trace, bandwidth=40)["compute_s"] == pytest.approx(1.5)
    assert numbers(trace, bandwidth=40)["bandwidth"] == 40.0
    assert numbers(trace, compute_s=0.5)["bandwidth"] == 4.0


def test_roofline_uses_recorded_computing_where_there_is_some():
    trace = timed(wall_s=(9, 4, 4), io_s=(1, 2, 2), compute_s=(1, 1, 1))
    assert numbers(trace)["compute_s"] == pytest.approx(1.0)
    assert metrics.roofline(trace).attrs["compute_from"] == "recorded computing time"


def test_roofline_of_overlapped_reads_wants_the_bandwidth():
    """The busy time of lanes would give the bandwidth of one lane, and a limit below the truth."""
    trace = timed(wall_s=(9, 4, 4), io_s=(9, 6, 6), stall_s=(0, 1, 1))
    with pytest.raises(SettingsError, match="bandwidth must be given where reads overlapped"):
        metrics.roofline(trace)
    actual = numbers(trace, bandwidth=5)
    assert actual["compute_s"] == pytest.approx(3.0)
    assert actual["limit_overlap"] == pytest.approx(1 / 3)


def test_roofline_leaves_out_evaluations_with_an_unknown_part():
    trace = timed(wall_s=(9, 3, 50), io_s=(1, 2, np.nan))
    actual = numbers(trace)
    assert actual["compute_s"] == pytest.approx(1.0)
    assert actual["speed"] == pytest.approx(1 / 3)
    assert actual["read_bytes_per_token"] == 10.0
    trace["read_bytes"].values[3] = 0  # of the evaluation that is left out
    assert numbers(trace)["read_bytes_per_token"] == 10.0


def test_roofline_of_a_prefill_counts_its_tokens():
    found = metrics.roofline(timed(wall_s=(8, 1, 1), io_s=(4, 1, 1)), phase="prefill")
    assert float(found["compute_s_prefill"]) == 2.0
    assert float(found["bandwidth_prefill"]) == 5.0
    assert float(found["limit_overlap_prefill"]) == 0.5


def test_roofline_without_times_names_what_to_pass():
    with pytest.raises(SchemaError, match=r"got none of \['wall_s', 'io_s'\].*pass both compute_s"):
        metrics.roofline(timed())
    with pytest.raises(SchemaError, match=r"got none of \['wall_s'"):
        metrics.roofline(timed(), compute_s=1.0)
    with pytest.raises(SchemaError, match=r"got none of \['wall_s'"):
        metrics.roofline(timed(), bandwidth=1.0)


def test_roofline_of_times_that_were_not_measured_is_unknown():
    """Without the time of reads, the wall time is not computing."""
    trace = timed(wall_s=(9, 3, 5), io_s=(1, np.nan, np.nan))
    actual = numbers(trace)
    assert np.isnan([actual["compute_s"], actual["bandwidth"], actual["limit_overlap"]]).all()
    assert actual["speed"] == 0.25
    assert metrics.roofline(trace).attrs["binding"] == "unknown"


def test_roofline_of_a_run_that_reads_nothing_is_bound_by_computing():
    trace = timed(wall_s=(9, 1, 1), io_s=(1, 0, 0))
    trace["read_bytes"].values[:] = 0
    actual = numbers(trace)
    assert actual["limit_overlap"] == actual["limit_serial"] == 1.0
    assert metrics.roofline(trace).attrs["binding"] == "computing"


def test_roofline_of_a_synthetic_run_finds_what_it_was_made_of():
    trace = make_trace(n_token=200, n_layer=2, seed=0)
    assert numbers(trace)["bandwidth"] == pytest.approx(1e9)
    wall, io = (float(trace[name][trace.phase == 1].mean()) for name in ("wall_s", "io_s"))
    assert numbers(trace)["compute_s"] == pytest.approx(wall - io - 6e-5)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "fast"])
def test_roofline_refuses_seconds_that_are_none(wrong):
    with pytest.raises(SettingsError, match="compute_s must be a positive number of seconds"):
        metrics.roofline(timed(), compute_s=wrong, bandwidth=1)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), True, "0 B", "2 MB", [1]])
def test_roofline_refuses_a_bandwidth_that_is_none(wrong):
    with pytest.raises(SettingsError, match="bandwidth must be a"):
        metrics.roofline(timed(), compute_s=1, bandwidth=wrong)
