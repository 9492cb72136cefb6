"""Traces as Parquet: exact, readable by others, never read by half."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bmoe_lab.converters import from_bigmoeonedge, from_parquet, to_parquet
from bmoe_lab.converters import parquet as module
from bmoe_lab.errors import (
    BmoeLabError,
    SchemaError,
    SettingsError,
    TraceFileError,
    TraceFormatError,
)
from bmoe_lab.testing import make_trace
from tests.unit.converter_traces import traces
from tests.unit.test_converters_bigmoeonedge import FILE, write


def identical(one: xr.Dataset, other: xr.Dataset) -> bool:
    """Return whether two Datasets are the same to the bit, dtypes, order and attributes too."""
    if not one.identical(other) or list(one.variables) != list(other.variables):
        return False
    return all(
        variable.dtype == other.variables[name].dtype
        and variable.values.tobytes() == other.variables[name].values.tobytes()
        for name, variable in one.variables.items()
    )


@pytest.mark.parametrize("scores", [False, True, "float16"])
@pytest.mark.parametrize("policy", [None, "drop", "substitute"])
def test_parquet_round_trip_keeps_everything(tmp_path, scores, policy):
    trace = make_trace(n_token=20, n_layer=3, scores=scores, policy=policy)
    trace["start_state_order"] = ("start_state_order_axis0", np.arange(5, dtype=np.uint32))
    trace["start_state_seed"] = ((), np.int64(7))
    trace["note"] = ("note_axis", np.array(["a", "né\\x0a"]))
    trace["flag"] = (("token", "layer"), np.arange(60, dtype=np.int8).reshape(20, 3))
    trace = trace.assign_attrs(start_time="2026-01-01T00:00:00Z", policy_settings='{"name": "x"}')
    back = from_parquet(to_parquet(trace, tmp_path / "a.parquet"))
    assert set(back.variables) == set(trace.variables)
    assert identical(back[list(trace.variables)], trace[list(trace.variables)])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(ds=traces(), group=st.integers(1, 40))
def test_parquet_any_trace_round_trip_is_exact(tmp_path_factory, ds, group):
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    before, module._ROW_GROUP = module._ROW_GROUP, group
    try:
        back = from_parquet(to_parquet(ds, path))
    finally:
        module._ROW_GROUP = before
    names = list(ds.variables)
    assert identical(back[names], ds[names])


def test_parquet_imported_trace_keeps_its_file(tmp_path):
    ds = from_bigmoeonedge(write(tmp_path, FILE))
    assert from_parquet(to_parquet(ds, tmp_path / "a.parquet")).identical(ds)


def test_parquet_is_a_table_that_others_can_read(tmp_path):
    trace = make_trace(n_token=6, n_layer=2, n_used=3, n_prefill=2)
    table = parquet.read_table(to_parquet(trace, tmp_path / "a.parquet")).to_pandas()
    assert len(table) == 12
    assert table.indices[3].tolist() == trace.expert_chosen.values[1, 1].tolist()
    assert table.scores[2].tolist() == trace.weight_chosen.values[1, 0].tolist()
    assert table.phase.tolist() == np.repeat(trace.phase.values, 2).tolist()
    assert table.expert_bytes.tolist() == trace.expert_bytes.values.tolist() * 6
    # A quantity of a token stands once, so that its sum is right; a label stands in each row.
    assert table.wall_s.sum() == pytest.approx(float(trace.wall_s.sum()))
    assert table.piece.tolist() == np.repeat(trace.piece.values, 2).tolist()


def test_parquet_variable_named_as_a_column_is_kept_apart(tmp_path):
    trace = make_trace(n_token=4, n_layer=2)
    trace["scores"] = ("token", np.arange(4.0))
    trace["indices"] = ("layer", np.arange(2))
    back = from_parquet(to_parquet(trace, tmp_path / "a.parquet"))
    assert identical(back[list(trace.variables)], trace[list(trace.variables)])


def test_to_parquet_not_a_trace_is_refused(tmp_path):
    with pytest.raises(SchemaError):
        to_parquet(make_trace().drop_vars("action"), tmp_path / "a.parquet")
    bad = make_trace().assign(when=("other", np.array(["2026-01-01"], dtype="M8[ns]")))
    with pytest.raises(TraceFormatError, match="variables must be numbers or text"):
        to_parquet(bad, tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


def test_to_parquet_file_that_reads_back_otherwise_is_not_kept(tmp_path, monkeypatch):
    path = to_parquet(make_trace(n_token=4), tmp_path / "a.parquet")
    before = path.read_bytes()
    monkeypatch.setattr(module, "_same", lambda one, other: False)
    with pytest.raises(TraceFormatError, match="must read back as written"):
        to_parquet(make_trace(n_token=8), path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["a.parquet"]


def test_to_parquet_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = to_parquet(make_trace(n_token=4), tmp_path / "a.parquet")
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", full)
    with pytest.raises(TraceFileError, match="No space left"):
        to_parquet(make_trace(n_token=8), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_from_parquet_damaged_file_is_our_error(tmp_path, part):
    path = to_parquet(make_trace(n_token=40, scores=True), tmp_path / "a.parquet")
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(TraceFormatError, match="must be Parquet"):
        from_parquet(path)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_from_parquet_flipped_bit_is_our_error_or_no_matter(tmp_path_factory, at, bit):
    trace = make_trace(n_token=12, n_layer=2)
    path = to_parquet(trace, tmp_path_factory.mktemp("flip") / "a.parquet")
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(bytes(data))
    try:
        back = from_parquet(path)
    except BmoeLabError:
        return
    # Statistics, the writer's name and the like carry nothing of the trace.
    assert identical(back[list(trace.variables)], trace[list(trace.variables)])


def test_from_parquet_rows_that_were_sorted_or_cut_are_refused(tmp_path):
    path = to_parquet(make_trace(n_token=8, n_layer=2), tmp_path / "a.parquet")
    table = parquet.read_table(path)
    for changed, message in (
        (table.take(pa.array(range(15, -1, -1))), "must be those of every token and layer"),
        (table.slice(0, 15), "must be those of every token and layer"),
        (table.slice(0, 14), "must hold 8 tokens; got 7"),
    ):
        parquet.write_table(changed, tmp_path / "b.parquet")
        with pytest.raises(TraceFormatError, match=message):
            from_parquet(tmp_path / "b.parquet")


def with_head(table, head):
    text = json.dumps(head).encode()
    crc = str(zlib.crc32(text)).encode()
    return table.replace_schema_metadata({b"bmoe_lab": text, b"bmoe_lab_crc32": crc})


def test_from_parquet_newer_version_is_refused(tmp_path):
    path = to_parquet(make_trace(n_token=4), tmp_path / "a.parquet")
    table = parquet.read_table(path)
    head = json.loads(table.schema.metadata[b"bmoe_lab"])
    parquet.write_table(with_head(table, head | {"version": 2}), path)
    with pytest.raises(TraceFormatError, match="version of the long form must be at most 1; got 2"):
        from_parquet(path)
    head["attrs"]["schema_version"] = 99
    parquet.write_table(with_head(table, head), path)
    with pytest.raises(SchemaError, match="schema_version must be at most 1; got 99"):
        from_parquet(path)


def capture(folder: Path, name: str, ids, scores=None, kind=None) -> Path:
    columns = {"indices": pa.array(ids, type=kind or pa.list_(pa.int16()))}
    if scores is not None:
        columns["scores"] = pa.array(scores, type=pa.list_(pa.float16()))
    parquet.write_table(pa.table(columns), folder / name)
    return folder / name


HALVES = [[np.float16(0.75), np.float16(0.25)], [np.float16(0.5), np.float16(0.125)]]


def test_from_parquet_capture_of_a_folder_has_its_layers_in_order(tmp_path):
    capture(tmp_path, "ckpt_5_layer_10.parquet", [[3, 1], [0, 2]], HALVES)
    capture(tmp_path, "ckpt_5_layer_2.parquet", [[1, 0], [2, 3]], HALVES)
    ds = from_parquet(tmp_path, n_expert=4)
    assert ds.block.values.tolist() == [2, 10]
    assert ds.expert_chosen.values.tolist() == [[[1, 0], [3, 1]], [[2, 3], [0, 2]]]
    assert ds.weight_chosen.values[1, 1].tolist() == [0.5, 0.125]
    assert ds.phase.values.tolist() == [0, 0]
    assert "lossless" not in ds.attrs
    assert "residency" not in ds


def test_from_parquet_capture_of_one_file_without_scores(tmp_path):
    kind = pa.list_(pa.int16(), 2)
    ds = from_parquet(capture(tmp_path, "layer_7.parquet", [[3, 1], [0, 2]], kind=kind), n_expert=4)
    assert ds.block.values.tolist() == [7]
    assert "weight_chosen" not in ds


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "must hold Parquet files; got none"),
        ({"layer_0": [[0, 4]]}, r"from 0 to n_expert - 1 = 3, or -1; got \[0, 4\]"),
        ({"layer_0": [[0, -2]]}, r"from 0 to n_expert - 1 = 3, or -1; got \[0, -2\]"),
        ({"layer_0": [[0, 1], [2, 2]]}, r"must appear once in a row; got \[2, 2\].*row 1"),
        ({"layer_0": [[0, 1], [2]]}, "lists of one length.*row 1"),
        ({"layer_0": [[0, 1], None]}, "lists of one length without nulls"),
        ({"layer_0": []}, "file must have rows; got none"),
        ({"layer_0": [[0, 1]], "layer_1": [[0, 1], [2, 3]]}, "must have equally many tokens"),
        ({"layer_0": [[0, 1]], "moe_layer_0": [[0, 1]]}, "must name different layers"),
        ({"a": [[0, 1]], "b": [[0, 1]]}, "must name their layer"),
    ],
)
def test_from_parquet_malformed_capture_is_one_clear_error(tmp_path, files, message):
    for name, ids in files.items():
        capture(tmp_path, f"{name}.parquet", ids)
    with pytest.raises(TraceFormatError, match=message):
        from_parquet(tmp_path, n_expert=4)


def test_from_parquet_table_of_another_kind_is_refused(tmp_path):
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(TraceFormatError, match=r"must include 'indices'; got \['x'\]"):
        from_parquet(tmp_path / "a.parquet", n_expert=4)
    parquet.write_table(pa.table({"indices": [1]}), tmp_path / "b.parquet")
    with pytest.raises(TraceFormatError, match="indices must be lists; got int64"):
        from_parquet(tmp_path / "b.parquet", n_expert=4)


def test_from_parquet_capture_needs_n_expert(tmp_path):
    path = capture(tmp_path, "layer_0.parquet", [[0, 1]])
    with pytest.raises(SettingsError, match="n_expert must be given for a capture"):
        from_parquet(path)
