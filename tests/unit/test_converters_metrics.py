"""The per-token CSV of BigMoeOnEdge: what its columns become, and that they come back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.converters import from_bigmoeonedge, to_bigmoeonedge
from bmoe_lab.errors import TraceFormatError
from bmoe_lab.testing import make_trace
from tests.unit.converter_traces import damaged
from tests.unit.test_converters_bigmoeonedge import FILE, TURNS, dropped_file, rows, write

NAMES = (
    "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms"
)
ROWS = """\
1,2,265.825,529.595,99.116,456413184,4.37,109.331,57.378,189,1016.588
2,2,183.393,338.242,83.264,275042304,9.91,67.454,32.674,0,645.448
"""
SUMMARY = "# summary tokens=2 s/tok=0.177 read_MiB=697.6 n_prompt=2 cache_budget_MiB=4000.0"
SUMMARY += " cache_resizes=0 majflt/tok=94.50\n"
V2 = """\
# bmoe_metrics v2
# engine=0.20.0
# model=/data/my models/tiny.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used={used} threads=4
# moe_stream=1 cache_mb=4000 route_ahead=0 drop_cold_frac={frac} drop_renorm={renorm} drop_prefill=0
# temp=0 top_k=40 spec=off
"""
LATER = (
    "dense_resident_frac,turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,"
    "mem_available_mib,mem_free_mib,swap_free_mib,loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,"
    "adopt_ms,ra_issue_ms,ra_wd_ms"
)
LATER_CELLS = ",{frac},{turn},0.00,2000.0,4218.1,3778.5,439.1,83.3,2444.7,276.7,8000.9"
LATER_CELLS += ",1.500,0,0.000,0.000,0.000,0.000,0.000"


def wide(first: str = "-1.000", second: str = "1.000") -> str:
    """Return a file of 29 columns."""
    one, two = ROWS.splitlines()
    return (
        f"{NAMES},{LATER}\n{one}{LATER_CELLS.format(frac=first, turn=0)}\n"
        f"{two}{LATER_CELLS.format(frac=second, turn=0)}\n"
    )


def read(folder: Path, metrics: str, route: str = FILE):
    path = write(folder, route)
    return from_bigmoeonedge(path, metrics=write(folder, metrics, "a.metrics"))


def test_metrics_rows_belong_to_the_decoded_tokens(tmp_path):
    ds = read(tmp_path, f"{NAMES}\n{ROWS}{SUMMARY}")
    np.testing.assert_allclose(ds.wall_s, [np.nan, np.nan, 0.265825, 0.183393])
    np.testing.assert_allclose(ds.manage_s, [np.nan, np.nan, 0.057378, 0.032674])
    np.testing.assert_array_equal(ds.major_faults, [np.nan, np.nan, 189, 0])
    assert ds.wall_s.attrs["units"] == "s"


def test_metrics_columns_of_another_meaning_keep_their_own_name(tmp_path):
    """`io_ms` sums lanes; under `io_s` it would look like more waiting than there was time."""
    ds = read(tmp_path, f"{NAMES}\n{ROWS}{SUMMARY}")
    for name in ("io_s", "stall_s", "compute_s"):
        assert name not in ds
    assert ds.engine_io_ms.values[2:].tolist() == [529.595, 338.242]
    assert ds.engine_io_ms.attrs["units"] == "ms"
    assert ds.engine_compute_ms.attrs["long_name"].endswith("a residual")
    assert ds.engine_read_bytes.values[2] == 456413184
    assert ds.read_bytes.dtype == np.uint32  # the trace's own stays the trace's


def test_metrics_what_was_not_measured_is_absent(tmp_path):
    text = f"{NAMES}\n{ROWS}{SUMMARY}".replace(",189,1016.588", ",0,0.000")
    text = text.replace(",0,645.448", ",0,0.000").replace(",4.37,", ",-1.00,")
    ds = read(tmp_path, text)
    assert "major_faults" not in ds
    assert "engine_cpu_ms" not in ds
    assert np.isnan(ds.engine_cache_hit_pct.values[2])
    assert ds.engine_cache_hit_pct.values[3] == 9.91
    to_bigmoeonedge(ds, tmp_path / "b.csv", metrics=tmp_path / "b.metrics")
    assert (tmp_path / "b.metrics").read_text() == text


def test_metrics_summary_and_settings_are_kept(tmp_path):
    text = V2.format(used=2, frac=0, renorm=1) + f"{NAMES}\n{ROWS}{SUMMARY}"
    attrs = read(tmp_path, text).attrs
    assert json.loads(attrs["engine_summary"])[0]["s/tok"] == "0.177"
    settings = json.loads(attrs["engine_settings"])
    assert (settings["model"], settings["threads"]) == ("/data/my models/tiny.gguf", "4")
    assert attrs["cache_budget_bytes"] == 4000 * 2**20
    assert attrs["complete"] == 1


def test_metrics_without_a_summary_tell_that_the_run_was_cut_short(tmp_path):
    assert read(tmp_path, f"{NAMES}\n{ROWS}").attrs["complete"] == 0


@pytest.mark.parametrize(("frac", "lossless"), [("0", 1), ("0.75", 0), ("0.000", 1)])
def test_metrics_settings_prove_whether_a_policy_was_on(tmp_path, frac, lossless):
    text = V2.format(used=2, frac=frac, renorm=1) + f"{NAMES}\n{ROWS}{SUMMARY}"
    attrs = read(tmp_path, text).attrs
    assert attrs["lossless"] == lossless
    assert ("drop_cold_frac=0.75" in attrs.get("policy", "")) is not lossless


def test_metrics_without_settings_prove_nothing(tmp_path):
    assert "lossless" not in read(tmp_path, f"{NAMES}\n{ROWS}{SUMMARY}").attrs


def test_metrics_substitution_is_lossy(tmp_path):
    text = V2.format(used=2, frac=0, renorm=1).replace("route_ahead=0", "substitute_lambda=0.15")
    attrs = read(tmp_path, text + f"{NAMES}\n{ROWS}{SUMMARY}").attrs
    assert attrs["lossless"] == 0
    assert attrs["policy"] == "BigMoeOnEdge: substitute_lambda=0.15"


@pytest.mark.parametrize("renorm", [0, 1])
def test_metrics_tell_what_survivors_of_a_drop_were_scaled_to(tmp_path, renorm):
    route = dropped_file(tmp_path)
    text = V2.format(used=3, frac=1, renorm=renorm) + f"{NAMES}\n{ROWS}{SUMMARY}"
    ds = from_bigmoeonedge(route, metrics=write(tmp_path, text, "a.metrics"))
    expected = [0.5, 0, 0.25] if renorm == 0 else [0.5 / 0.75, 0, 0.25 / 0.75]
    np.testing.assert_allclose(ds.weight_applied.values[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        f"{NAMES}\n{ROWS}{SUMMARY}",
        f"{NAMES}\n{ROWS}",
        V2.format(used=2, frac=0, renorm=1) + f"{NAMES}\n{ROWS}{SUMMARY}",
        V2.format(used=2, frac=0, renorm=1) + wide() + SUMMARY,
        wide("0.500", "-1.000") + SUMMARY,
        f"{NAMES},later\n" + ROWS.replace("\n", ",a b\n") + SUMMARY,
        f"{NAMES},odd\n" + ROWS.replace("588\n", "588,1.50\n").replace("448\n", "448,1.5\n"),
        f"{NAMES}\n{ROWS}{SUMMARY}".replace("265.825", "265.8250"),
        f"{NAMES}\n{ROWS}{SUMMARY}".replace("\n", "\r\n"),
    ],
)
def test_metrics_come_back_byte_for_byte(tmp_path, text):
    ds = read(tmp_path, text)
    to_bigmoeonedge(ds, tmp_path / "b.csv", metrics=tmp_path / "b.metrics")
    assert (tmp_path / "b.metrics").read_bytes() == text.encode()
    assert (tmp_path / "b.csv").read_text() == FILE


def test_metrics_of_29_columns_are_all_there(tmp_path):
    ds = read(tmp_path, V2.format(used=2, frac=0, renorm=1) + wide() + SUMMARY)
    assert len(f"{NAMES},{LATER}".split(",")) == 29
    assert ds.engine_rss_mib.values[2] == 4218.1
    assert ds.engine_rss_mib.attrs["units"] == "MiB"
    assert np.isnan(ds.engine_dense_resident_frac.values[2])
    assert ds.engine_turn.values[2] == 0


def test_metrics_of_several_turns_keep_their_summaries(tmp_path):
    one = ROWS.splitlines()[0]
    text = f"{NAMES}\n{one}\n{SUMMARY}{one}\n{SUMMARY}"
    ds = read(tmp_path, text, rows(TURNS))
    np.testing.assert_allclose(ds.wall_s, [np.nan, 0.265825, np.nan, 0.265825])
    to_bigmoeonedge(ds, tmp_path / "b.csv", metrics=tmp_path / "b.metrics")
    assert (tmp_path / "b.metrics").read_text() == text


def test_metrics_of_one_turn_write_that_turn(tmp_path):
    one = ROWS.splitlines()[0]
    text = f"{NAMES}\n{one}\n{SUMMARY}{one.replace('265', '777')}\n{SUMMARY}"
    path, beside = write(tmp_path, rows(TURNS)), write(tmp_path, text, "a.metrics")
    ds = from_bigmoeonedge(path, metrics=beside, turn=2)
    np.testing.assert_allclose(ds.wall_s, [np.nan, 0.777825])
    to_bigmoeonedge(ds, tmp_path / "b.csv", metrics=tmp_path / "b.metrics")
    assert (tmp_path / "b.metrics").read_text() == (
        f"{NAMES}\n{one.replace('265', '777')}\n{SUMMARY}"
    )
    assert len(json.loads(ds.attrs["engine_summary"])) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        (f"{NAMES}\n", "must have rows; got none"),
        (f"{NAMES}\n{ROWS}".replace("wall_ms", "wall"), r"must include .*none of \['wall_ms'\]"),
        (f"{NAMES}\n{ROWS}".replace("99.116", "fast"), "compute_ms must be a number.*line 2"),
        (f"{NAMES}\n{ROWS}".removesuffix("448\n"), "last line must end with a line end.*line 3"),
        (f"{NAMES}\n{ROWS}".removesuffix(",645.448\n") + "\n", "rows must have 11 cells.*line 3"),
        (f"{NAMES}\n{ROWS}{SUMMARY}".replace("588\n", "588\r\n"), "line ends must be all of one"),
        (f"{NAMES}\n" + ROWS[: ROWS.index("\n") + 1], "one row per decoded token, 2; got 1"),
        (f"{NAMES}\n" + ROWS.replace("\n2,", "\n3,"), "step must be that of the decoded token, 2"),
        (V2.format(used=3, frac=0, renorm=1) + f"{NAMES}\n{ROWS}", "n_expert_used must be that of"),
        (wide().replace(",0,0.00,2000.0", ",1,0.00,2000.0"), "turn must be that of the decoded"),
        (wide().replace("1.500,0,", "1.500,2,"), "mtp_batch must be at most 1; got '2'.*line 2"),
    ],
)  # fmt: skip
def test_metrics_malformed_or_of_another_run_is_one_clear_error(tmp_path, text, message):
    with pytest.raises(TraceFormatError, match=f"(?s){message}"):
        read(tmp_path, text)


def test_to_bigmoeonedge_metrics_of_a_run_without_them_is_refused(tmp_path):
    with pytest.raises(TraceFormatError, match="only for a trace that was read with them"):
        to_bigmoeonedge(make_trace(), tmp_path / "a.csv", metrics=tmp_path / "a.metrics")
    assert list(tmp_path.iterdir()) == []


NUMBER = st.one_of(
    st.integers(-(10**17), 10**17).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda x: f"{x:.3f}"),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.just("nan"),
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(cells=st.lists(st.tuples(*[NUMBER] * 9), min_size=2, max_size=2), extra=st.booleans())
def test_metrics_any_numbers_come_back(tmp_path_factory, cells, extra):
    names = NAMES + ",later" * extra
    text = names + "\n"
    for step, row in enumerate(cells, start=1):
        text += ",".join([str(step), "2", *row, *[row[0]] * extra]) + "\n"
    folder = tmp_path_factory.mktemp("metrics")
    ds = read(folder, text)
    to_bigmoeonedge(ds, folder / "b.csv", metrics=folder / "b.metrics")
    assert (folder / "b.metrics").read_text() == text


@settings(derandomize=True, deadline=None, max_examples=100)
@given(raw=damaged((V2.format(used=2, frac=0, renorm=1) + wide() + SUMMARY).encode()))
def test_metrics_any_damage_gives_our_error_or_the_same_file(tmp_path_factory, raw):
    folder = tmp_path_factory.mktemp("damage")
    route, beside = write(folder, FILE), folder / "a.metrics"
    beside.write_bytes(raw)
    try:
        ds = from_bigmoeonedge(route, metrics=beside)
    except TraceFormatError:
        return
    to_bigmoeonedge(ds, folder / "b.csv", metrics=folder / "b.metrics")
    assert (folder / "b.metrics").read_bytes() == raw
