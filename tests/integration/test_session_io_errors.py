"""Disks that fail, fill up or vanish: words instead of crashes, the recording kept."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import StreamingError, TraceFileError
from bmoe_lab.recording import find_leftovers
from bmoe_lab.schema import validate
from tests.integration.session_tools import TEXT, open_demo, run_child, witness


@pytest.fixture(scope="module")
def expected():
    with open_demo() as session:
        return witness(session)


@pytest.fixture(scope="module")
def whole():
    with open_demo(cache=0) as session:
        return session.generate(TEXT, n_predict=12).trace


def assert_one_line(error):
    text = str(error)
    assert "\n" not in text
    assert " must " in text
    assert "; got " in text
    assert text.endswith(".")


def assert_kept(run, whole):
    """The evaluations before the failure are kept, and none of the failed one."""
    n = run.trace.sizes["token"]
    assert not run.complete
    assert run.trace.attrs["complete"] == 0
    assert run.summary.ended_by == "failed"
    assert whole.batch.values[n] != whole.batch.values[n - 1]
    for name in ("expert_chosen", "weight_chosen", "residency", "read_bytes"):
        np.testing.assert_array_equal(run.trace[name], whole[name][:n])
    validate(run.trace)
    return n


# --- reading experts ----------------------------------------------------------------------------


class FailingRead:
    """``os.preadv`` that fails once, at its n-th call."""

    def __init__(self, number, code):
        self.number, self.code = number, code
        self.count = 0
        self.inner = os.preadv

    def __call__(self, *args):
        self.count += 1
        if self.count == self.number:
            raise OSError(self.code, os.strerror(self.code))
        return self.inner(*args)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("number", [450, 650])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_read_error_ends_the_run_and_discards_its_evaluation(
    monkeypatch, expected, whole, lanes, number, code
):
    with open_demo(cache=0, io_lanes=lanes) as session:
        read = FailingRead(number, code)
        monkeypatch.setattr(os, "preadv", read)
        with pytest.raises(StreamingError, match=errno.errorcode[code]) as caught:
            session.generate(TEXT, n_predict=12)
        monkeypatch.undo()
        assert read.count >= number
        assert_one_line(caught.value)
        assert caught.value.__cause__.errno == code
        assert_kept(session.last_run, whole)
        assert witness(session) == expected
        again = session.generate(TEXT, n_predict=12)
        np.testing.assert_array_equal(again.trace.expert_chosen, whole.expert_chosen)


def test_read_error_with_a_warm_cache_leaves_nothing_wrong_behind(monkeypatch, expected):
    """The experts of the failed load are read again, even though the cache stays."""
    with open_demo() as session:
        session.generate(TEXT, n_predict=6)
        read = FailingRead(40, errno.EIO)
        monkeypatch.setattr(os, "preadv", read)
        with pytest.raises(StreamingError):
            session.generate(TEXT[30:] + TEXT, n_predict=30, start="warm")
        monkeypatch.undo()
        fresh = []
        with open_demo(cache=0) as other:
            other.score(TEXT, n_context=3, observe=lambda *a: fresh.append(a[3].tobytes()))
        warm = []
        session.score(
            TEXT, n_context=3, start="warm", observe=lambda *a: warm.append(a[3].tobytes())
        )
        assert warm == fresh
        assert witness(session) == expected


TRUNCATED = """
import json, os, shutil, sys
import numpy as np
from bmoe_lab.errors import StreamingError
from bmoe_lab.schema import validate
from tests.integration.session_tools import TEXT, at_load, open_demo, witness

path = sys.argv[1]
size = os.path.getsize(path)
content = open(path, "rb").read()
with open_demo(path, cache=0, dense="anon", direct=sys.argv[2] == "direct") as session:
    expected = witness(session)
    at_load(session, 30, lambda: os.truncate(path, size // 2))
    try:
        session.generate(TEXT, n_predict=12)
    except StreamingError as error:
        message = str(error)
    run = session.last_run
    with open(path, "r+b") as file:
        file.write(content)
    usable = witness(session) == expected
    validate(run.trace)
    print(json.dumps([message, run.complete, run.trace.sizes["token"], usable]))
"""


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_file_cut_while_open_is_a_streaming_error(tmp_path, mode):
    """With ``dense="mmap"`` llama.cpp itself would touch the lost pages, which kills a process."""
    path = tmp_path / "model.gguf"
    shutil.copy(bl.datasets.demo_model(), path)
    result = run_child(TRUNCATED, str(path), mode)
    assert result.returncode == 0, result.stderr
    message, complete, n_token, usable = json.loads(result.stdout)
    assert "model file must stay as it was at open" in message
    assert not complete
    assert n_token > 0
    assert usable


# --- writing a trace ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    with open_demo() as session:
        yield session


@pytest.fixture
def target(tmp_path, request):
    """Return a path that cannot be written, and what its message says."""
    kind = request.param
    if kind == "missing folder":
        return tmp_path / "no" / "x.nc", "folder that exists"
    if kind == "suffix":
        return tmp_path / "x.csv", "must end in one of"
    if kind == "no suffix":
        return tmp_path / "x", "must end in one of"
    if kind == "folder":
        (tmp_path / "x.nc").mkdir()
        return tmp_path / "x.nc", "must not be a folder"
    if kind == "file":
        (tmp_path / "x.zarr").write_text("mine")
        return tmp_path / "x.zarr", "must not be a file"
    if kind == "folder of others":
        (tmp_path / "x.zarr").mkdir()
        (tmp_path / "x.zarr" / "mine.txt").write_text("mine")
        return tmp_path / "x.zarr", "other files"
    if kind == "device":
        return Path("/dev/full"), "must end in one of"
    assert kind == "system folder"
    return Path("/proc/x.nc"), "/proc/x.nc"


@pytest.mark.parametrize(
    "target",
    [
        "missing folder",
        "suffix",
        "no suffix",
        "folder",
        "file",
        "folder of others",
        "device",
        "system folder",
    ],
    indirect=True,
)
def test_target_that_cannot_be_written_is_refused_before_the_run(session, tmp_path, target):
    path, message = target
    before = session.last_run, sorted(tmp_path.rglob("*"))
    with pytest.raises(TraceFileError, match=message) as caught:
        session.generate(TEXT, n_predict=2, save=path)
    assert_one_line(caught.value)
    assert (session.last_run, sorted(tmp_path.rglob("*"))) == before


@pytest.mark.parametrize("kind", ["file", "below a file", "device"])
def test_state_folder_that_cannot_be_used_is_refused_before_the_run(
    session, tmp_path, monkeypatch, kind
):
    (tmp_path / "file").write_text("mine")
    folder = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "state",
        "device": Path("/dev/full"),
    }[kind]
    monkeypatch.setenv("BMOE_LAB_STATE_DIR", str(folder))
    before = session.last_run
    with pytest.raises(TraceFileError, match="BMOE_LAB_STATE_DIR") as caught:
        session.generate(TEXT, n_predict=2)
    assert_one_line(caught.value)
    assert session.last_run is before
    assert (tmp_path / "file").read_text() == "mine"
    assert session.generate(TEXT, n_predict=2, record="off").trace is None


def test_journal_on_a_full_device_is_refused_before_the_run(session, monkeypatch, expected):
    from bmoe_lab.recording import Journal

    monkeypatch.setattr(
        Journal, "create", classmethod(lambda cls, spec, save=None: cls("/dev/full", spec))
    )
    before = session.last_run
    with pytest.raises(TraceFileError, match="No space left on device") as caught:
        session.generate(TEXT, n_predict=2)
    assert_one_line(caught.value)
    assert session.last_run is before
    monkeypatch.undo()
    assert witness(session) == expected


LIMITED = """
import json, os, resource, signal, sys
import numpy as np
import bmoe_lab as bl
from bmoe_lab.errors import TraceFileError
from bmoe_lab.schema import validate
from tests.integration.session_tools import TEXT, open_demo, witness

folder, limit, with_target = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "target"
os.environ["BMOE_LAB_STATE_DIR"] = folder + "/state"
with open_demo() as session:
    expected = witness(session)
    whole = session.generate(TEXT * 2, n_predict=140).trace
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    message = None
    try:
        save = folder + "/x.nc" if with_target else None
        session.generate(TEXT * 2, n_predict=140, save=save)
    except TraceFileError as error:
        message = str(error)
    run = session.last_run
    n = run.trace.sizes["token"]
    same = all(
        np.array_equal(run.trace[name].values, whole[name].values[:n], equal_nan=True)
        for name in ("expert_chosen", "weight_chosen", "residency", "read_bytes")
    )
    validate(run.trace)
    print(json.dumps({
        "message": message, "complete": run.trace.attrs["complete"], "n": n, "same": same,
        "whole": whole.sizes["token"], "usable": witness(session) == expected,
        "left": sorted(os.listdir(folder)),
    }))
"""


@pytest.mark.parametrize("limit", [12_000, 60_000])
@pytest.mark.parametrize("where", ["state", "target"])
def test_journal_that_hits_a_file_size_limit_keeps_the_trace_in_hand(tmp_path, limit, where):
    """What ``RLIMIT_FSIZE`` does is what a full disk does: a write that fails half-way."""
    result = run_child(LIMITED, str(tmp_path), str(limit), where)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["message"] is not None
    assert "must be writable" in report["message"]
    assert "\n" not in report["message"]
    assert 0 < report["n"] < report["whole"]
    assert report["complete"] == 0
    assert report["same"]
    assert report["usable"]
    assert "x.nc" not in report["left"]  # no half-written file


def test_full_disk_at_the_end_keeps_the_trace_and_its_journal(session, tmp_path, monkeypatch):
    """The final file cannot be written: the run is in hand, the journal stays on disk."""
    from bmoe_lab.recording import store

    def full(*args, **kwargs):
        raise TraceFileError("path must be writable; got 'No space left on device'. Free space.")

    monkeypatch.setattr(store, "save_trace", full)
    with pytest.raises(TraceFileError, match="No space left") as caught:
        session.generate(TEXT, n_predict=4, save=tmp_path / "x.nc")
    monkeypatch.undo()
    assert "recording is kept" in str(caught.value)
    run = session.last_run
    validate(run.trace)
    assert run.trace.attrs["complete"] == 1
    assert run.complete
    left = [x.path for x in find_leftovers(tmp_path) if x.path.parent == tmp_path]
    assert len(left) == 1
    journal = bl.open_trace(left[0])
    np.testing.assert_array_equal(journal.expert_chosen, run.trace.expert_chosen)
    bl.save_trace(run.trace, tmp_path / "elsewhere.nc")
