from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import schema
from bmoe_lab.errors import SchemaError, TraceFileError
from bmoe_lab.recording import (
    check_writable,
    display_piece,
    formats,
    open_trace,
    save_trace,
    store,
    upgrades,
)
from bmoe_lab.testing.traces import make_trace

SUFFIXES = [".nc", ".zarr"]


def open_plainly(path: Path) -> xr.Dataset:
    """Open as somebody would who has only xarray; warnings are errors."""
    ds = xr.open_zarr(path) if path.suffix == ".zarr" else xr.open_dataset(path)
    with ds:
        for name, variable in ds.variables.items():
            assert variable.encoding.get("_FillValue") is None, name
        return ds.load()


def assert_same(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Assert equality down to dtypes, attributes, the bits of floats."""
    xr.testing.assert_identical(actual, expected)
    for name, variable in expected.variables.items():
        assert actual[name].dtype == variable.dtype, name
        if variable.dtype.kind == "f":
            assert actual[name].values.tobytes() == variable.values.tobytes(), name


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"scores": True, "policy": "drop"},
        {"scores": "float16", "policy": "substitute"},
        {"text": False},
        {"n_token": 1},
    ],
)
def test_save_trace_plain_xarray_reads_it_back_equal(tmp_path, suffix, arguments):
    trace = make_trace(**arguments)
    path = save_trace(trace, tmp_path / f"a{suffix}")
    assert_same(open_plainly(path), trace)
    assert_same(open_trace(path), trace)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_extreme_values_survive(tmp_path, suffix):
    """Values that a fill value or a scale would swallow; a NaN with a payload."""
    trace = make_trace(8, n_layer=2, n_expert=32767, n_used=2, n_prefill=1)
    trace.expert_chosen.values[3, 0, 0] = trace.expert_applied.values[3, 0, 0] = 32766
    trace.read_bytes.values[3, 0, 0] = 2**32 - 1
    trace.expert_bytes.values[0] = 2**62
    trace.position.values[0] = -(2**31)
    trace.logprob.values[2:5] = [-np.inf, -0.0, np.nan]
    trace.wall_s.values.view(np.uint64)[4] = 0x7FF8000000000ABC
    assert_same(open_plainly(save_trace(trace, tmp_path / f"a{suffix}")), trace)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    raw=st.lists(st.binary(max_size=12), min_size=40, max_size=40), suffix=st.sampled_from(SUFFIXES)
)
def test_save_trace_any_piece_survives(tmp_path_factory, raw, suffix):
    trace = make_trace(40, n_layer=1)
    pieces = np.array([display_piece(one) for one in raw], dtype=np.str_)
    trace = trace.assign_coords(piece=("token", pieces, trace.piece.attrs))
    path = save_trace(trace, tmp_path_factory.mktemp("text") / f"a{suffix}")
    assert open_plainly(path).piece.values.tolist() == pieces.tolist()
    assert open_trace(path).piece.values.tolist() == pieces.tolist()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_puts_attributes_in_stored_form_and_leaves_the_caller_alone(tmp_path, suffix):
    trace = make_trace(8, n_layer=2)
    trace.attrs |= {"session_settings": {"n_ctx": 64}, "note": None, "fraction": 0.1, "text": "é"}
    trace.encoding["unlimited_dims"] = {"token"}
    trace["piece"] = trace.piece.astype(object)
    before = trace.copy(deep=True)
    actual = open_plainly(save_trace(trace, tmp_path / f"a{suffix}"))
    xr.testing.assert_identical(trace, before)
    assert trace.piece.dtype == object
    assert trace.encoding == {"unlimited_dims": {"token"}}
    assert actual.attrs["session_settings"] == '{"n_ctx": 64}'
    assert actual.attrs["fraction"] == 0.1
    assert actual.attrs["text"] == "é"
    assert "note" not in actual.attrs


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_open_trace_gives_python_attributes_and_typed_flags(tmp_path, suffix):
    actual = open_trace(save_trace(make_trace(8, n_layer=2), tmp_path / f"a{suffix}"))
    assert {type(value) for value in actual.attrs.values()} == {int, str}
    assert actual.action.attrs["flag_values"].dtype == np.uint8
    assert all(variable.encoding == {} for variable in actual.variables.values())


def comparison() -> xr.DataTree:
    nodes = {
        "/": xr.Dataset({"n_token": ((), 24)}, attrs={"kind": "comparison", "windows": [1, 2]}),
        "/lossless": make_trace(24, n_layer=2),
        "/DropCold(0.75)": make_trace(24, n_layer=2, policy="drop", budget_frac=0.3),
        "/CachePrior(0.15, keep=1)": make_trace(24, n_layer=2, policy="substitute"),
        "/control": xr.Dataset({"kl": ("window", np.array([0.5, np.nan]))}),
        "/control/inner": make_trace(12, n_layer=1),
    }
    return xr.DataTree.from_dict(nodes)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_tree_comes_back_equal_in_order(tmp_path, suffix):
    tree = comparison()
    actual = open_trace(save_trace(tree, tmp_path / f"a{suffix}"))
    assert isinstance(actual, xr.DataTree)
    assert list(actual.children) == list(tree.children)
    for node in tree.subtree:
        if node.path == "/":
            assert actual.attrs == {"kind": "comparison", "windows": "[1, 2]"}
            assert actual["n_token"].item() == 24
        else:
            assert_same(actual[node.path].to_dataset(), node.to_dataset())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_tree_is_read_by_plain_xarray(tmp_path, suffix):
    tree = comparison()
    path = save_trace(tree, tmp_path / f"a{suffix}")
    with xr.open_datatree(path) as actual:
        assert set(actual.groups) == set(tree.groups)
        for node in tree.subtree:
            if node.path != "/":
                assert_same(actual[node.path].to_dataset().load(), node.to_dataset())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_longer_than_memory_goes_window_by_window(tmp_path, suffix):
    trace = make_trace(200, n_layer=2, scores=True)
    path = save_trace(trace, tmp_path / f"a{suffix}", memory_limit=60_000)
    assert_same(open_plainly(path), trace)
    lazy = open_trace(path, memory_limit=1000)
    assert not lazy.variables["router_score"]._in_memory
    again = save_trace(lazy, tmp_path / f"b{suffix}", memory_limit=60_000)
    lazy.close()
    assert_same(open_plainly(again), trace)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_tree_longer_than_memory_opens_lazily(tmp_path, suffix):
    tree = comparison()
    path = save_trace(tree, tmp_path / f"a{suffix}", memory_limit=10_000)
    actual = open_trace(path, memory_limit=1000)
    assert list(actual.children) == list(tree.children)
    assert not actual["lossless"].to_dataset().variables["action"]._in_memory
    xr.testing.assert_identical(actual["lossless"].to_dataset().load(), make_trace(24, n_layer=2))
    actual.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_replaces_an_older_file(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    save_trace(make_trace(50, scores=True), path)
    expected = make_trace(8, n_layer=2)
    save_trace(expected, path)
    assert_same(open_plainly(path), expected)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_that_reads_back_different_leaves_the_old_file(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"a{suffix}"
    expected = make_trace(8, n_layer=2)
    save_trace(expected, path)
    form = formats.FORMATS[suffix]
    write = type(form).write

    def wrong(self, file, nodes, windows_of):
        bad = nodes["/"].copy(deep=True)
        bad.weight_chosen.values[5, 0, 0] = 0.125
        write(self, file, {"/": bad}, windows_of)

    monkeypatch.setattr(type(form), "write", wrong)
    with pytest.raises(TraceFileError, match="weight_chosen must read back as written"):
        save_trace(make_trace(8, n_layer=2, seed=1), path)
    assert_same(open_plainly(path), expected)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


_LIMITED = """
import resource, sys
from bmoe_lab.errors import TraceFileError
from bmoe_lab.recording import save_trace
from bmoe_lab.testing.traces import make_trace

trace = make_trace(400, scores=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
try:
    save_trace(trace, sys.argv[1])
except TraceFileError as error:
    print(error)
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_trace_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path, suffix):
    child = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / f"a{suffix}")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert "trace must be written to" in child.stdout
    assert child.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_open_trace_with_a_flipped_bit_in_the_data_is_an_error(tmp_path, suffix):
    path = save_trace(make_trace(200, scores=True), tmp_path / f"a{suffix}")
    file = path / "router_score" / "0.0.0" if suffix == ".zarr" else path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8  # the scores are most of the file
    file.write_bytes(data)
    with pytest.raises(TraceFileError, match=r"trace must be readable; got .*file is damaged"):
        open_trace(path)


def test_open_trace_truncated_netcdf_is_an_error(tmp_path):
    path = save_trace(make_trace(200), tmp_path / "a.nc")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(TraceFileError, match="trace must be readable"):
        open_trace(path)


def test_open_trace_missing_file_is_a_one_line_error(tmp_path):
    with pytest.raises(TraceFileError, match=r"must be a file that exists; got '.*gone\.nc'"):
        open_trace(tmp_path / "gone.nc")


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "It is empty"), (b"GGUF\3\0\0\0", "another format")]
)
def test_open_trace_other_file_is_a_one_line_error(tmp_path, content, message):
    path = tmp_path / "a.nc"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=f"a netCDF file or a journal; got .* {message}"):
        open_trace(path)


def test_open_trace_other_folder_is_a_one_line_error(tmp_path):
    with pytest.raises(TraceFileError, match="The folder holds no Zarr metadata"):
        open_trace(tmp_path)


def test_open_trace_netcdf_that_is_no_trace_is_refused(tmp_path):
    xr.Dataset({"t": ("x", [1.0])}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(SchemaError, match=r"file must hold a trace; got .* with \['t'\]"):
        open_trace(tmp_path / "a.nc")


def test_open_trace_values_against_the_schema_are_refused(tmp_path):
    trace = make_trace(8, n_layer=2)
    trace.action.values[5, 0, 0] = 99
    path = save_trace(trace, tmp_path / "a.nc")
    with pytest.raises(SchemaError, match="action must be one of"):
        open_trace(path)


@pytest.fixture
def stored_as_version(tmp_path):
    def store_it(version: int) -> Path:
        trace = make_trace(8, n_layer=2)
        trace.attrs["schema_version"] = version
        trace.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
        return tmp_path / "a.nc"

    return store_it


def test_open_trace_newer_version_is_refused_by_number(stored_as_version):
    with pytest.raises(SchemaError, match="schema_version must be at most 1; got 12 in"):
        open_trace(stored_as_version(12))


def test_open_trace_older_version_without_an_upgrade_is_refused(stored_as_version):
    with pytest.raises(SchemaError, match=r"got 0 in .* No upgrade from it is known"):
        open_trace(stored_as_version(0))


def test_open_trace_older_version_is_upgraded_step_by_step(stored_as_version, monkeypatch):
    path = stored_as_version(-1)
    monkeypatch.setitem(upgrades.UPGRADES, -1, lambda ds: ds.assign_attrs(steps="a"))
    monkeypatch.setitem(upgrades.UPGRADES, 0, lambda ds: ds.assign_attrs(steps=ds.steps + "b"))
    actual = open_trace(path)
    assert actual.attrs["steps"] == "ab"
    assert actual.attrs["schema_version"] == schema.SCHEMA_VERSION


def test_save_trace_invalid_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(SchemaError, match="must have the variable 'action'"):
        save_trace(make_trace(8).drop_vars("action"), tmp_path / "a.nc")
    with pytest.raises(SchemaError, match="tree must have a trace in at least one node"):
        save_trace(xr.DataTree.from_dict({"/a": xr.Dataset()}), tmp_path / "a.nc")
    with pytest.raises(SchemaError, match="must be an xarray Dataset or DataTree; got dict"):
        save_trace({}, tmp_path / "a.nc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.csv", "a", "a.nc.gz"])
def test_check_writable_unknown_suffix_names_the_known(tmp_path, name):
    with pytest.raises(TraceFileError, match=r"must end in one of \['.nc', '.zarr'\]; got"):
        check_writable(tmp_path / name)


def test_check_writable_missing_folder_says_which(tmp_path):
    with pytest.raises(TraceFileError, match=r"in a folder that exists; got .* Make '.*gone'"):
        check_writable(tmp_path / "gone" / "a.nc")


def test_check_writable_folder_without_permission_says_so():
    """/proc takes no files from anybody, root included."""
    with pytest.raises(TraceFileError, match=r"must be one that can be written; got '/proc/a\.nc'"):
        check_writable("/proc/a.nc")


def test_check_writable_other_kind_in_the_way_is_refused(tmp_path):
    (tmp_path / "a.nc").mkdir()
    (tmp_path / "a.zarr").write_text("")
    (tmp_path / "b.zarr").mkdir()
    (tmp_path / "b.zarr" / "precious").write_text("")
    with pytest.raises(TraceFileError, match=r"must not be a folder already for \.nc"):
        check_writable(tmp_path / "a.nc")
    with pytest.raises(TraceFileError, match=r"must not be a file already for \.zarr"):
        check_writable(tmp_path / "a.zarr")
    with pytest.raises(TraceFileError, match="That folder holds other files"):
        check_writable(tmp_path / "b.zarr")


def test_check_writable_leaves_nothing(tmp_path):
    assert check_writable(str(tmp_path / "a.nc")) == tmp_path / "a.nc"
    assert list(tmp_path.iterdir()) == []


def test_replace_that_fails_half_way_brings_the_old_folder_back(tmp_path, monkeypatch):
    path = tmp_path / "a.zarr"
    expected = make_trace(8, n_layer=2)
    save_trace(expected, path)
    rename = store.os.rename

    def fail_into_place(source, target):
        if str(source).endswith(".part.zarr"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(store.os, "rename", fail_into_place)
    with pytest.raises(TraceFileError, match="Input/output error"):
        save_trace(make_trace(8), path)
    assert_same(open_plainly(path), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]
