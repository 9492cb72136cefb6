from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import SchemaError, TraceFileError
from bmoe_lab.recording import Journal, Recorder, open_trace
from bmoe_lab.recording import journal as journal_module
from bmoe_lab.recording.frames import DONE, HEAD, ROWS, SCHEMA, Frame, pack_frame, read_frame
from bmoe_lab.recording.journal import lock
from bmoe_lab.recording.journal_reader import JournalReader
from bmoe_lab.testing.recording import feed, spec_of
from bmoe_lab.testing.traces import make_trace

TRACE = make_trace(90, n_layer=2, n_expert=8, n_used=2, n_prefill=20)
# One evaluation of 20 tokens, then one each: the recorder flushes at 64, the end brings the rest.
FRAMES = [HEAD, SCHEMA, ROWS, ROWS, DONE]
TOKENS = [0, 64, 90]


def record(path: Path, trace: xr.Dataset = TRACE, *, done: bool = True) -> Path:
    journal = Journal(path, spec_of(trace))
    recorder = Recorder(journal.spec, journal)
    recorder._last_flush = float("inf")  # flush by count alone: a slow machine changes nothing
    feed(recorder, trace)
    recorder.flush()
    if done:
        journal.finish({"complete": 1})
    journal.close()
    return path


def frames_of(path: Path) -> list[tuple[bytes, int, int]]:
    """Return kind, start and end of every frame."""
    found, offset, size = [], 0, path.stat().st_size
    with open(path, "rb") as file:
        while offset < size:
            frame = read_frame(file, offset, size)
            assert isinstance(frame, Frame)
            found.append((frame.kind, offset, frame.end))
            offset = frame.end
    return found


def expect_prefix(path: Path, n_token: int, note: str) -> None:
    """Assert that a damaged journal gives exactly the tokens before the damage, or says none."""
    if n_token == 0:
        with pytest.raises(TraceFileError, match=f"(?i)at least one token; got none.*{note}"):
            open_trace(path)
        return
    actual = open_trace(path)
    assert actual.attrs.pop("complete") == 0
    assert note.lower() in actual.attrs.pop("journal_note").lower()
    expected = TRACE.isel(token=slice(0, n_token)).drop_attrs(deep=False)
    xr.testing.assert_equal(actual, expected)


@pytest.mark.parametrize("scores", [False, True, "float16"])
def test_journal_finished_gives_the_trace(tmp_path, scores):
    trace = make_trace(90, n_prefill=20, scores=scores, policy="drop")
    xr.testing.assert_identical(open_trace(record(tmp_path / "a.journal", trace)), trace)


def test_journal_has_the_documented_frames(tmp_path):
    assert [kind for kind, _, _ in frames_of(record(tmp_path / "a.journal"))] == FRAMES


def test_journal_not_finished_is_incomplete_and_says_how_much_survived(tmp_path):
    path = record(tmp_path / "a.journal", done=False)
    expect_prefix(path, 90, "the recording was not finished; 90 tokens survived")


def test_journal_cut_anywhere_gives_every_whole_frame(tmp_path):
    whole = record(tmp_path / "a.journal")
    frames, data = frames_of(whole), whole.read_bytes()
    path = tmp_path / "cut.journal"
    ends = [end for _, _, end in frames]
    cuts = {cut + by for cut in ends for by in (-9, -1, 0, 1, 23, 24, 25)} & set(range(len(data)))
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        survived = sum(kind == ROWS and end <= cut for kind, _, end in frames)
        if cut < ends[0]:
            with pytest.raises(TraceFileError, match="must begin with a readable header"):
                open_trace(path)
            continue
        note = "was not finished" if cut in ends else "the file ends inside a frame"
        expect_prefix(path, TOKENS[survived], note)


def test_journal_with_any_bit_flipped_is_noticed_and_never_crashes(tmp_path):
    """Every byte of every frame's head, and a stride over the payloads."""
    whole = record(tmp_path / "a.journal")
    frames, data = frames_of(whole), whole.read_bytes()
    path = tmp_path / "flip.journal"
    rng = np.random.default_rng(0)
    heads = [start + i for _, start, _ in frames for i in range(24)]
    payloads = list(range(0, len(data), max(1, len(data) // 150)))
    tails = [end - 1 for _, _, end in frames]
    for place in [*heads, *payloads, *tails]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        hit = next(i for i, (_, start, end) in enumerate(frames) if start <= place < end)
        survived = sum(kind == ROWS for kind, _, _ in frames[:hit])
        if hit == 0:
            with pytest.raises(TraceFileError):
                open_trace(path)
        else:
            expect_prefix(path, TOKENS[survived], "checksum failed")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.binary(max_size=300), head=st.booleans())
def test_journal_of_any_bytes_is_an_error_not_a_crash(tmp_path_factory, data, head):
    path = tmp_path_factory.mktemp("any") / "a.journal"
    path.write_bytes((b"BMJ\x01" if head else b"") + data)
    with pytest.raises(TraceFileError):
        open_trace(path)


def test_journal_two_frames_swapped_is_noticed(tmp_path):
    whole = record(tmp_path / "a.journal")
    (_, _, _), (_, s1, e1), (_, s2, e2), *_ = frames_of(whole)
    data = whole.read_bytes()
    path = tmp_path / "b.journal"
    path.write_bytes(data[:s1] + data[s2:e2] + data[s1:e1] + data[e2:])
    expect_prefix(path, 0, "out of place")


def test_journal_missing_rows_are_noticed_at_the_end(tmp_path):
    whole = record(tmp_path / "a.journal")
    frames, data = frames_of(whole), whole.read_bytes()
    _, start, end = frames[3]
    path = tmp_path / "b.journal"
    path.write_bytes(data[:start] + data[end:])
    expect_prefix(path, 64, "the end names 90 tokens; 64 tokens survived")


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("journal_version", TraceFileError, "journal_version must be at most 1; got 7"),
        ("schema_version", SchemaError, "schema_version must be at most 1; got 7"),
    ],
)
def test_journal_of_a_newer_version_is_refused_by_number(tmp_path, key, kind, message):
    whole = record(tmp_path / "a.journal")
    with open(whole, "rb") as file:
        frame = read_frame(file, 0, whole.stat().st_size)
    header = json.loads(frame.payload) | {key: 7}
    path = tmp_path / "b.journal"
    path.write_bytes(
        pack_frame(HEAD, json.dumps(header).encode()) + whole.read_bytes()[frame.end :]
    )
    with pytest.raises(kind, match=message):
        open_trace(path)


def test_journal_longer_than_memory_opens_lazily(tmp_path):
    path = record(tmp_path / "a.journal")
    lazy = open_trace(path, memory_limit=1000)
    assert not lazy.variables["expert_chosen"]._in_memory
    xr.testing.assert_identical(
        lazy.isel(token=slice(80, 10, -3)).load(), TRACE.isel(token=slice(80, 10, -3))
    )
    xr.testing.assert_identical(lazy.isel(token=slice(5, 5)).load(), TRACE.isel(token=slice(5, 5)))
    xr.testing.assert_identical(lazy.load(), TRACE)
    lazy.close()


def test_journal_changed_while_it_is_read_is_noticed(tmp_path):
    path = record(tmp_path / "a.journal")
    lazy = open_trace(path, memory_limit=1000)
    _, start, _ = frames_of(path)[2]
    data = bytearray(path.read_bytes())
    data[start + 100] ^= 4
    path.write_bytes(data)
    with pytest.raises(TraceFileError, match="must not change while it is read"):
        lazy.load()
    lazy.close()


def test_journal_name_never_overwrites_a_leftover(tmp_path):
    spec = spec_of(TRACE)
    journals = [Journal.create(spec, save=tmp_path / "a.nc") for _ in range(3)]
    names = [journal.path.name for journal in journals]
    assert names == ["a.nc.journal", "a.nc.2.journal", "a.nc.3.journal"]
    for journal in journals:
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_journal_without_a_target_lies_in_the_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BMOE_LAB_STATE_DIR", str(tmp_path / "deep" / "state"))
    journal = Journal.create(spec_of(TRACE))
    assert journal.path.parent == tmp_path / "deep" / "state"
    journal.remove()
    monkeypatch.delenv("BMOE_LAB_STATE_DIR")
    assert journal_module.state_folder().name == "bmoe-lab"


def test_journal_state_folder_that_cannot_be_made_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BMOE_LAB_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(
        TraceFileError, match=r"state folder must be one that can be made.*Set BMOE"
    ):
        Journal.create(spec_of(TRACE))


def test_journal_in_a_missing_folder_says_so(tmp_path):
    with pytest.raises(TraceFileError, match=r"in a folder that can be written.*No such file"):
        Journal(tmp_path / "gone" / "a.journal", spec_of(TRACE))


def test_journal_is_locked_while_it_is_written(tmp_path):
    journal = Journal(tmp_path / "a.journal", spec_of(TRACE))
    with open(journal.path, "rb") as file:
        assert not lock(file.fileno())
    journal.close()
    with open(journal.path, "rb") as file:
        assert lock(file.fileno())


def test_journal_with_fsync_syncs_every_frame(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(journal_module.os, "fsync", synced.append)
    journal = Journal(tmp_path / "a.journal", spec_of(TRACE), fsync=True)
    journal.finish({})
    assert len(synced) == 2
    journal.close()


def test_journal_on_a_full_device_says_so_before_the_run():
    with pytest.raises(TraceFileError, match="journal must be writable; got 'No space left"):
        Journal("/dev/full", spec_of(TRACE))


class _FullFile:
    """A file that takes a part of the write at which the disk is full, then nothing."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()

    def write(self, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data), 1000)
        self.room -= taken
        return self.file.write(data[:taken])


def test_journal_disk_full_while_recording_keeps_what_was_written(tmp_path):
    path = record(tmp_path / "whole.journal")
    _, start, end = frames_of(path)[3]
    journal = Journal(tmp_path / "a.journal", spec_of(TRACE))
    room = (start + end) // 2 - frames_of(path)[0][2]  # full in the middle of the second rows
    journal._file = _FullFile(journal._file, room)
    recorder = Recorder(journal.spec, journal)
    recorder._last_flush = float("inf")
    feed(recorder, TRACE)
    message = r"got 'No space left on device' at byte \d+ .* 64 tokens in it stay readable"
    with pytest.raises(TraceFileError, match=message):
        recorder.flush()
    assert journal.failed
    assert journal.path.stat().st_size == start  # the half frame is gone
    expect_prefix(journal.path, 64, "was not finished; 64 tokens survived")
    journal.close()


_LIMITED = """
import resource, sys
from bmoe_lab.errors import TraceFileError
from bmoe_lab.recording import Journal, Recorder
from bmoe_lab.testing.recording import feed, spec_of
from bmoe_lab.testing.traces import make_trace

trace = make_trace(90, n_layer=2, n_expert=8, n_used=2, n_prefill=20)
journal = Journal(sys.argv[1], spec_of(trace))
recorder = Recorder(journal.spec, journal)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    for turn in range(100):
        feed(recorder, trace, first_batch=1000 * turn)
except TraceFileError as error:
    print(journal.n_token, error)
"""


def test_journal_file_size_limit_while_recording_is_an_error_not_a_signal(tmp_path):
    path = tmp_path / "a.journal"
    child = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, timeout=120
    )
    assert (child.returncode, child.stderr) == (0, "")
    n_token, message = child.stdout.split(" ", 1)
    assert "journal must be writable; got 'File too large'" in message
    assert int(n_token) >= 64
    assert open_trace(path).sizes["token"] == int(n_token)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # Python's own doing; relied on


def test_journal_reader_of_a_growing_journal_reads_what_is_there(tmp_path):
    journal = Journal(tmp_path / "a.journal", spec_of(TRACE))
    recorder = Recorder(journal.spec, journal)
    assert JournalReader(journal.path).n_token == 0
    feed(recorder, TRACE)
    recorder.flush()
    assert JournalReader(journal.path).n_token == 90
    journal.remove()
