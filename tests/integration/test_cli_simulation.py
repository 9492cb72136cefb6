"""``bmoe-lab replay`` and ``bmoe-lab sweep`` do what the library does, from files to files."""

import sys

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import bmoe_lab as bl
from bmoe_lab import cli
from bmoe_lab.converters import from_parquet, to_bigmoeonedge, to_parquet
from bmoe_lab.simulation import replay
from bmoe_lab.simulation.files import save_grid
from bmoe_lab.simulation.sweeping import sweep

SIZE = "120 KiB"


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command in this process and gives (code, out, err)."""

    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bmoe-lab", *map(str, arguments)])
        monkeypatch.setattr(cli, "console", cli.Console(width=160))
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


@pytest.fixture
def trace():
    return bl.testing.make_trace(n_token=60, n_layer=3, n_expert=16, seed=4)


@pytest.fixture
def path(trace, tmp_path):
    return bl.save_trace(trace, tmp_path / "demo.nc")


def test_replay_prints_totals_and_saves_the_trace(run, trace, path, tmp_path):
    target = tmp_path / "again.nc"
    code, out, err = run("replay", path, "--budget", SIZE, "--save", target)
    expected = replay(trace, residency="lru", budget=SIZE)
    assert (code, err) == (0, "")
    assert "LRU(budget='120 KiB')" in out
    assert f"{100 * float(expected.moe.hit_rate()):.1f} %" in out
    assert bl.open_trace(target).identical(expected)


@pytest.mark.parametrize("suffix", [".zarr", ".parquet", ".csv"])
def test_replay_writes_what_the_suffix_says(suffix, run, trace, path, tmp_path):
    target = tmp_path / f"again{suffix}"
    code, _, err = run("replay", path, "--residency", "lfu", "--budget", SIZE, "--save", target)
    assert code == 0, err
    expected = replay(trace, residency="lfu", budget=SIZE)
    if suffix == ".csv":
        assert target.read_text().startswith("# route_trace v1")
    else:
        read = from_parquet if suffix == ".parquet" else bl.open_trace
        np.testing.assert_array_equal(read(target).residency, expected.residency)


def test_replay_with_routing_says_that_it_is_counterfactual(run, path):
    code, out, _ = run("replay", path, "--budget", SIZE, "--routing", "DropCold(0.75)")
    assert code == 0
    assert "DropCold(frac=0.75)" in out
    assert "counterfactual" in out


def test_replay_of_a_policy_that_never_fires_warns_in_one_line(run, path):
    code, _, err = run("replay", path, "--budget", SIZE, "--routing", "DropCold(0)")
    assert code == 0
    assert err.startswith("warning: DropCold(frac=0) changed nothing")
    assert err.count("\n") == 1


@pytest.mark.parametrize("form", ["csv", "parquet", "zarr"])
def test_replay_reads_every_format(form, run, trace, tmp_path):
    target = tmp_path / f"demo.{form}"
    write = {"csv": to_bigmoeonedge, "parquet": to_parquet, "zarr": bl.save_trace}[form]
    write(trace, target)
    code, out, err = run("replay", target, "--budget", SIZE)
    assert code == 0, err
    expected = replay(trace, residency="lru", budget=SIZE)
    assert f"{100 * float(expected.moe.hit_rate()):.1f} %" in out


def test_sweep_prints_a_table_with_the_token_cycle(run, path):
    code, out, err = run("sweep", path, "--quiet", "--residency", "lru", "--residency", "belady")
    assert (code, err) == (0, "")
    assert "demo: hit rate (decode); token cycle" in out
    assert " = T" in out
    assert "belady" in out


def test_sweep_saves_what_the_library_gives(run, trace, path, tmp_path):
    expected = sweep(
        {"demo": trace}, residency=["lru", "fifo"], budgets=["100 KiB", SIZE],
        routing=[None, bl.routing.DropCold(0.75)], phase="decode", progress=False,
    )  # fmt: skip
    for suffix in (".nc", ".parquet", ".csv"):
        target = tmp_path / f"grid{suffix}"
        code, _, err = run(
            "sweep", path, "--quiet", "--residency", "lru", "--residency", "fifo",
            "--budget", "100 KiB", "--budget", SIZE, "--routing", "none",
            "--routing", "DropCold(0.75)", "--save", target,
        )  # fmt: skip
        assert (code, err) == (0, "")
        if suffix == ".nc":
            with xr.open_dataset(target, engine="h5netcdf") as grid:
                xr.testing.assert_equal(grid.load(), expected)
                assert grid.attrs["notes"] == expected.attrs["notes"]
            continue
        table = pd.read_parquet(target) if suffix == ".parquet" else pd.read_csv(target)
        assert len(table) == expected.hit_rate_decode.size
        found = table.set_index(["trace", "residency", "budget", "routing"])["hit_rate_decode"]
        for key, value in found.items():
            labels = dict(zip(("trace", "residency", "budget", "routing"), key, strict=True))
            assert value == float(expected.hit_rate_decode.sel(labels))


def test_sweep_says_in_one_line_what_cannot_be(run, path):
    code, out, err = run(
        "sweep", path, "--quiet", "--budget", SIZE, "--residency", "lru", "--residency", "belady",
        "--routing", "DropCold(0.75)",
    )  # fmt: skip
    assert code == 0
    assert "–" in out
    assert err.startswith("warning: 1 combinations cannot be")
    assert err.count("\n") == 1


def test_sweep_interrupted_saves_what_it_has_and_says_so(run, trace, path, tmp_path, monkeypatch):
    partial = sweep({"demo": trace}, residency=["lru"], budgets=[SIZE], progress=False)
    partial.attrs["complete"] = 0
    monkeypatch.setattr("bmoe_lab.simulation.sweeping.sweep", lambda *a, **k: partial)
    target = tmp_path / "grid.nc"
    code, _, _ = run("sweep", path, "--quiet", "--budget", SIZE, "--save", target)
    assert code == 130
    with xr.open_dataset(target, engine="h5netcdf") as grid:
        assert grid.attrs["complete"] == 0


def test_save_grid_leaves_the_old_file_if_it_cannot_write(trace, tmp_path, monkeypatch):
    target = tmp_path / "grid.csv"
    target.write_text("old")
    grid = sweep(trace, residency=["lru"], budgets=[SIZE], progress=False)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(bl.errors.TraceFileError, match="No space left"):
        save_grid(grid, target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["replay", "{}", "--residency", "lruu", "--budget", "1 MiB"], "Did you mean 'lru'"),
        (["replay", "{}", "--budget", "1 MB"], "budget must be a size"),
        (["replay", "{}"], "budget must be given once"),
        (["replay", "nowhere.csv", "--budget", "1 MiB"], "nowhere.csv"),
        (["replay", "{}", "--metrics", "x.metrics"], "metrics must go with a route trace"),
        (["replay", "{}", "--budget", "1 MiB", "--save", "a.txt"], "path must end in"),
        (["sweep", "{}", "--save", "grid.xlsx"], "must end in one of ['.csv', '.nc', '.parquet']"),
        (["sweep", "{}", "--residency", "Lru()"], "Did you mean"),
        (["sweep", "{}", "--budget", "1 MiB", "--n-budget", "9"], "n_budget must be left out"),
        (["sweep", "{}", "--phase", "decoded", "--quiet"], "Did you mean 'decode'"),
    ],
)
def test_simulation_errors_are_one_line(run, path, arguments, part):
    code, _, err = run(*(str(path) if word == "{}" else word for word in arguments))
    assert code == 1
    assert part in err
    assert err.count("\n") == 1


def test_replay_to_an_unknown_suffix_names_all_that_it_writes(run, tmp_path):
    bl.save_trace(bl.testing.make_trace(8), tmp_path / "t.nc")
    code, _, err = run(
        "replay", tmp_path / "t.nc", "--budget", "1 MiB", "--save", tmp_path / "o.txt"
    )
    assert code == 1
    assert "['.csv', '.nc', '.parquet', '.zarr']" in err
