"""Where the time went: nothing claimed that was not measured."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, UnknownNameError
from bmoe_lab.schema import COSTS
from tests.unit.metric_traces import hand_made

PARTS = ["read", "wait", "manage", "callback", "compute", "rest", "between"]


def timed(**costs):
    """Return the hand-made trace with these costs of its three evaluations, and no others."""
    trace = hand_made()
    trace = trace.drop_vars([name for name in COSTS if name in trace.variables])
    values = {}
    for name, (prefill, first, second) in costs.items():
        values[name] = ("token", np.array([prefill, np.nan, first, second], dtype=np.float64))
    return trace.assign(values)


def split(trace, **more):
    return dict(zip(PARTS, metrics.time_split(trace, **more).values.tolist(), strict=True))


def test_time_split_of_a_serial_run_adds_up_to_one():
    trace = timed(
        wall_s=(8, 1, 3), io_s=(1, 0.5, 0.5), manage_s=(0, 0.1, 0.3), callback_s=(0, 0.2, 0)
    )
    actual = split(trace)
    assert list(metrics.time_split(trace)["part"].values) == PARTS
    assert actual["read"] == 0.25
    assert actual["manage"] == pytest.approx(0.1)
    assert actual["callback"] == pytest.approx(0.05)
    assert actual["rest"] == pytest.approx(0.6)
    # What nobody measured is not claimed, computing least of all.
    assert np.isnan([actual[part] for part in ("wait", "compute", "between")]).all()


def test_time_split_under_overlap_claims_no_reading():
    """Lanes are busy for longer than the wall: their time is no share of it."""
    trace = timed(wall_s=(9, 1, 3), io_s=(9, 3, 5), stall_s=(0, 0.5, 0.5), manage_s=(0, 0, 0))
    actual = split(trace)
    assert np.isnan(actual["read"])
    assert (actual["wait"], actual["rest"]) == (0.25, 0.75)


def test_time_split_under_overlap_claims_no_reading_even_if_it_would_fit():
    """Part of it passed beside the computing; how much, nobody knows."""
    actual = split(timed(wall_s=(9, 1, 3), io_s=(9, 0.5, 0.5), stall_s=(0, 0, 1)))
    assert np.isnan(actual["read"])
    assert actual["rest"] == 0.75


def test_time_split_reading_that_does_not_fit_is_no_part():
    """Overlap without a stall: the recorded computing fills the wall time by itself."""
    trace = timed(wall_s=(9, 1, 1), io_s=(9, 1, 1), stall_s=(0, 0, 0), compute_s=(9, 1, 1))
    actual = split(trace)
    assert np.isnan(actual["read"])
    assert (actual["compute"], actual["rest"], actual["wait"]) == (1.0, 0.0, 0.0)


def test_time_split_serial_run_of_an_engine_that_records_no_stall_keeps_its_reading():
    trace = timed(
        wall_s=(9, 1, 1),
        engine_io_ms=(9, 400, 400),
        engine_stall_ms=(9, 0, 0),
        engine_compute_ms=(9, 600, 600),
    )
    actual = split(trace)
    assert (actual["read"], actual["compute"]) == pytest.approx((0.4, 0.6))
    assert actual["rest"] == pytest.approx(0.0)


def test_time_split_reads_the_columns_of_an_engine():
    trace = timed(
        wall_s=(9, 1, 1),
        engine_io_ms=(9, 2000, 2000),
        engine_stall_ms=(9, 250, 250),
        engine_compute_ms=(9, 700, 700),
        engine_loop_overhead_ms=(9, 100, 300),
        manage_s=(9, 0.05, 0.05),
    )
    actual = split(trace)
    assert actual["wait"] == pytest.approx(0.25)
    assert actual["compute"] == pytest.approx(0.7)
    assert actual["rest"] == pytest.approx(0.0)
    # Time between evaluations is no part of the wall time.
    assert actual["between"] == pytest.approx(0.2)


def test_time_split_leaves_out_evaluations_with_an_unknown_part():
    trace = timed(wall_s=(8, 1, 3), io_s=(1, 0.5, np.nan))
    assert split(trace)["read"] == 0.5
    # In the prefill nothing was measured of it.
    trace["io_s"].values[0] = np.nan
    prefill = split(trace, phase="prefill")
    assert np.isnan(prefill["read"])
    assert prefill["rest"] == 1.0


def test_time_split_text_column_is_not_a_time():
    trace = timed(wall_s=(8, 1, 3)).assign(engine_stall_ms=("token", np.array(["", "", "a", "b"])))
    assert np.isnan(split(trace)["wait"])


def test_time_split_without_wall_time_is_refused():
    with pytest.raises(SchemaError, match="must hold the variable 'wall_s'"):
        metrics.time_split(timed(io_s=(1, 1, 1)))


def test_read_bandwidth_of_known_reads():
    trace = timed(io_s=(4, 2, 3))  # decode: 10 bytes each; prefill: 20
    assert float(metrics.read_bandwidth(trace)) == 4.0
    assert float(metrics.read_bandwidth(trace, phase="prefill")) == 5.0
    trace["io_s"].values[3] = np.nan  # its bytes must not be counted either
    assert float(metrics.read_bandwidth(trace)) == 5.0


def test_read_bandwidth_without_reading_is_unknown():
    assert np.isnan(float(metrics.read_bandwidth(timed(io_s=(0, 0, 0)))))
    with pytest.raises(SchemaError, match="must hold the variable 'io_s'"):
        metrics.read_bandwidth(timed(wall_s=(1, 1, 1)))


def test_read_bandwidth_of_an_engine_uses_its_own_bytes():
    trace = timed(engine_io_ms=(9, 500, 500), engine_read_bytes=(9, 4096, 8192))
    assert float(metrics.read_bandwidth(trace)) == 12288


def test_faults_and_evictions_per_token_leave_unknown_evaluations_out():
    trace = timed(major_faults=(6, 3, 5), evictions=(4, np.nan, 2))
    assert float(metrics.major_faults_per_token(trace)) == 4.0
    # The prefill is one evaluation of two tokens.
    assert float(metrics.major_faults_per_token(trace, phase="prefill")) == 3.0
    assert float(metrics.evictions_per_token(trace)) == 2.0
    np.testing.assert_array_equal(
        metrics.major_faults_per_token(trace, by="token", phase="all"), [6, np.nan, 3, 5]
    )
    with pytest.raises(UnknownNameError, match=r"by must be one of \['token'\]"):
        metrics.evictions_per_token(trace, by="layer")


def test_resident_bytes_after_evaluations():
    trace = timed(cache_resident_bytes=(100, 60, 40))
    values = {of: float(metrics.resident_bytes(trace, of=of)) for of in ("mean", "max", "last")}
    assert values == {"mean": 50.0, "max": 60.0, "last": 40.0}
    assert float(metrics.resident_bytes(trace, of="max", phase="all")) == 100
    with pytest.raises(UnknownNameError, match=r"of must be one of \['last', 'max', 'mean'\]"):
        metrics.resident_bytes(trace, of="min")


def test_decode_speed_counts_the_tokens_whose_time_is_known():
    """Tokens of evaluations without a time made the speed look too high."""
    trace = timed(wall_s=(8, 0.25, np.nan))
    assert float(metrics.decode_speed(trace)) == 4.0
    assert float(metrics.decode_speed(trace, phase="prefill")) == 0.25
