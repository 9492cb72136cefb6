"""``bmoe-lab report`` makes one page of files, or says in one line why not."""

import sys
from pathlib import Path

import pytest

import bmoe_lab as bl
from bmoe_lab import cli
from tests.unit.comparison_data import make_tree


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command in this process and gives (code, out, err)."""

    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bmoe-lab", "report", *map(str, arguments)])
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
    return bl.testing.make_trace(n_token=30, n_layer=3, n_expert=16, seed=4)


@pytest.fixture
def path(trace, tmp_path):
    return bl.save_trace(trace, tmp_path / "demo.nc")


def refused(result: tuple[int, str, str], *words: str) -> None:
    """One line on the error stream, with these words, and no traceback."""
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_report_of_one_trace(run, trace, path, tmp_path):
    page = tmp_path / "report.html"
    code, out, err = run(path, "-o", page)
    assert (code, err) == (0, "")
    assert out == f"report: {page}\n"
    assert page.read_text(encoding="utf-8") == bl.report.report_html(trace)


@pytest.mark.parametrize("suffix", ["zarr", "parquet", "csv"])
def test_report_reads_every_format(suffix, run, trace, tmp_path):
    path = tmp_path / f"demo.{suffix}"
    write = {"zarr": bl.save_trace, "parquet": bl.to_parquet, "csv": bl.to_bigmoeonedge}[suffix]
    write(trace, path)
    code, _, err = run(path, "-o", tmp_path / "report.html", "--title", "Mine & yours")
    assert (code, err) == (0, "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>Mine &amp; yours</h1>" in page
    assert "What it missed" in page


def test_report_of_several_traces_and_a_comparison(run, path, tmp_path):
    priced = bl.save_trace(make_tree(), tmp_path / "priced.nc")
    page = tmp_path / "report.html"
    code, _, err = run(path, priced, "-o", page)
    assert (code, err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    assert 'id="part-1">demo<' in text
    assert 'id="part-2">priced<' in text


def test_report_of_traces_with_the_same_name_tells_them_apart(run, trace, path, tmp_path):
    (tmp_path / "other").mkdir()
    other = bl.save_trace(trace, tmp_path / "other" / "demo.nc")
    page = tmp_path / "report.html"
    assert run(path, other, "-o", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert f'id="part-1">{path}<' in text
    assert f'id="part-2">{other}<' in text


def test_report_of_a_file_named_twice_is_refused(run, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(run(path, "demo.nc", "-o", "report.html"), "'demo.nc' twice")
    assert not Path("report.html").exists()


def test_report_of_a_missing_file_is_refused(run, path, tmp_path):
    page = tmp_path / "report.html"
    for name in ("missing.nc", "missing.csv", "missing.parquet"):
        refused(run(path, tmp_path / name, "-o", page), name)
    assert not page.exists()


@pytest.mark.parametrize("suffix", ["nc", "zarr", "parquet", "csv", "txt"])
def test_report_of_what_is_no_trace_is_refused(suffix, run, tmp_path):
    path = tmp_path / f"other.{suffix}"
    if suffix == "zarr":
        path.mkdir()
    else:
        path.write_text("hello\n")
    page = tmp_path / "report.html"
    refused(run(path, "-o", page), f"other.{suffix}")
    assert not page.exists()


def test_report_of_a_netcdf_of_something_else_is_refused(run, tmp_path):
    import xarray as xr

    path = tmp_path / "rain.nc"
    xr.Dataset({"rain": ("day", [1.0, 2.0])}).to_netcdf(path, engine="h5netcdf")
    refused(run(path, "-o", tmp_path / "report.html"), "rain.nc")


def test_report_into_a_missing_folder_is_refused_before_a_trace_is_opened(run, tmp_path):
    page = tmp_path / "missing" / "report.html"
    refused(run(tmp_path / "also missing.nc", "-o", page), "folder that exists", str(page))


def test_report_does_not_replace_a_trace_or_a_folder(run, path, tmp_path):
    before = path.read_bytes()
    refused(run(path, "-o", path), "out must end in one of")
    assert path.read_bytes() == before
    (tmp_path / "folder.html").mkdir()
    refused(run(path, "-o", tmp_path / "folder.html"), "out must be a file")


def test_report_replaces_an_old_page_whole_or_not_at_all(run, path, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    page.write_text("old")
    with monkeypatch.context() as patch:

        def fails(self, target):
            raise OSError(28, "No space left on device")

        patch.setattr(Path, "replace", fails)
        refused(run(path, "-o", page), "No space left on device")
    assert page.read_text() == "old"
    assert run(path, "-o", page)[0] == 0
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["demo.nc", "report.html"]


def test_report_shows_markup_in_names_and_texts_as_text(run, trace, tmp_path):
    nasty = "<img src=x>"
    trace.attrs["model_name"] = nasty
    trace.coords["piece"] = ("token", [nasty] * trace.sizes["token"])
    first = bl.save_trace(trace, tmp_path / f"{nasty}.nc")
    second = bl.save_trace(trace, tmp_path / "b.nc")
    page = tmp_path / "report.html"
    code, _, err = run(first, second, "-o", page, "--title", nasty)
    assert (code, err) == (0, "")
    text = page.read_text(encoding="utf-8")
    library = text.index("</script>")
    assert nasty not in text[library:]
    assert nasty not in text[: text.index("<script>")]
    assert "&lt;img src=x&gt;" in text[library:]


def test_report_needs_a_target_and_a_trace(run, path):
    assert run(path)[0] == 2
    assert run("-o", "report.html")[0] == 2
