"""The command line: each command does what it says, an error is one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bmoe_lab as bl
from bmoe_lab import cli

TEXT = bl.datasets.heldout("kjv")[0].text[:260]
MODEL = str(bl.datasets.demo_model())
SMALL = ["--cache", "2 MiB", "--threads", "1"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command in this process and gives (code, out, err)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bmoe-lab", *arguments])
        monkeypatch.setattr(cli, "console", cli.Console(width=160))
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def test_version_is_the_package_version(run):
    assert run("--version")[:2] == (0, bl.__version__ + "\n")


def test_info_shows_layers_bytes_and_the_cliff(run):
    code, out, _ = run("info", MODEL)
    assert code == 0
    for part in ("6: blocks 0-5", "top 4 of 32", "918.0 KiB (token cycle)", "LRU cliff"):
        assert part in out


def test_doctor_shows_versions_and_direct_reads(run):
    code, out, _ = run("doctor")
    assert code == 0
    for part in ("0.3.36", "tensor layout", "direct reads", "userfaultfd", "memory"):
        assert part in out


def test_record_writes_a_trace_and_the_text(run, tmp_path):
    target = tmp_path / "run.nc"
    code, out, _ = run(
        "record", MODEL, "--prompt", "In the beginning", "-n", "6", "--save", str(target), *SMALL
    )
    assert code == 0
    trace = bl.open_trace(target)
    assert trace.attrs["complete"] == 1
    assert "decode hit rate" in out
    assert list(tmp_path.iterdir()) == [target]


def test_score_prints_what_the_library_gives(run):
    code, out, _ = run("score", MODEL, "--text", TEXT, *SMALL)
    with bl.Session(MODEL, cache="2 MiB", n_threads=1) as session:
        expected = session.score(TEXT)
    assert code == 0
    assert f"{expected.perplexity:.4f}" in out


def test_compare_prints_the_table_and_saves(run, tmp_path):
    target, page = tmp_path / "tree.zarr", tmp_path / "report.html"
    code, out, _ = run(
        "compare",
        MODEL,
        "--policy",
        "DropCold(0.75)",
        "--text",
        TEXT,
        "--save",
        str(target),
        "--report",
        str(page),
        *SMALL,
    )
    assert code == 0
    assert "lossless again" in out
    assert "RandomDrop" in out
    tree = bl.open_trace(target)
    assert list(tree.children)[:3] == ["lossless", "lossless again", "DropCold(frac=0.75)"]
    assert page.stat().st_size > 1_000_000


def test_recover_without_leftovers_says_so(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no recordings were left behind" in run("recover")[1]


def test_demo_leaves_traces_and_report(run, tmp_path, monkeypatch):
    monkeypatch.setattr("bmoe_lab.demo.demo_texts", lambda: [TEXT])
    code, out, _ = run("demo", "--out", str(tmp_path / "demo"))
    assert code == 0
    names = sorted(path.name for path in (tmp_path / "demo").iterdir())
    assert names == ["comparison.nc", "generation.nc", "report.html"]
    for arm in ("DropCold(frac=0.75)", "RandomDrop", "CachePrior(strength=0.15)"):
        assert arm in out
    tree = bl.open_trace(tmp_path / "demo" / "comparison.nc")
    assert len(tree.children) == 6


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["info", "nowhere.gguf"], "nowhere.gguf"),
        (["score", MODEL, "--text", TEXT, "--cache", "12 XB"], "cache must be a size"),
        (["score", MODEL, *SMALL], "one of --text and --file; got neither"),
        (["score", MODEL, "--text", "a", *SMALL], "longer than n_context"),
        (["score", MODEL, "--text", TEXT, "--policy", "DropCol(1)", *SMALL], "Did you mean"),
        (["score", MODEL, "--text", TEXT, "--save", "x.txt", *SMALL], "x.txt"),
        (["record", MODEL, "--prompt", "", "--save", "x.nc", *SMALL], "prompt must not be empty"),
        (["recover", "nothing.journal", "--save", "x.nc"], "nothing.journal"),
    ],
)
def test_error_is_one_line_and_exit_code_1(run, arguments, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    flat = " ".join(err.split())
    assert code == 1
    assert flat.startswith("error: ")
    assert part in flat
    assert "Traceback" not in err
    assert list(Path(tmp_path).iterdir()) == []


def test_unknown_option_is_a_usage_error(run):
    code, _, err = run("info", MODEL, "--bogus")
    assert code == 2
    assert "--bogus" in err


def test_installed_command_runs():
    command = Path(sys.executable).parent / "bmoe-lab"
    done = subprocess.run(
        [command, "info", "nowhere.gguf"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: model file must exist")
    assert len(done.stderr.splitlines()) == 1
