from __future__ import annotations

import os

import pytest
import xarray as xr

from bmoe_lab.errors import TraceFileError
from bmoe_lab.recording import Journal, Recorder, find_leftovers, open_trace, recover
from bmoe_lab.recording.journal import state_folder
from bmoe_lab.testing.recording import feed, spec_of
from bmoe_lab.testing.traces import make_trace

TRACE = make_trace(40, n_layer=2)


def left_over(path=None, *, done: bool = False, close: bool = True) -> Journal:
    journal = Journal.create(spec_of(TRACE), save=path)
    recorder = Recorder(journal.spec, journal)
    feed(recorder, TRACE)
    recorder.flush()
    if done:
        journal.finish({"complete": 1})
    if close:
        journal.close()
    return journal


def test_recover_lists_what_was_left_with_its_state():
    first, second = left_over(), left_over(done=True)
    os.utime(first.path, (1, 1))
    newest, oldest = recover()
    assert (newest.path, oldest.path) == (second.path, first.path)
    assert (newest.complete, oldest.complete) == (True, False)
    assert (newest.model, newest.n_token, newest.running) == ("synthetic", 40, False)
    assert oldest.note == "the recording was not finished; 40 tokens survived"
    assert oldest.age_s > newest.age_s
    assert oldest.n_bytes == first.path.stat().st_size


def test_recover_finds_journals_beside_targets_in_a_folder(tmp_path):
    left_over(tmp_path / "a.nc")
    assert [leftover.path.name for leftover in recover(tmp_path)] == ["a.nc.journal"]
    assert recover() == []


def test_recover_running_journal_is_reported_not_offered(tmp_path):
    journal = left_over(close=False)
    (leftover,) = recover()
    assert leftover.running
    assert leftover.note == "still running"
    with pytest.raises(TraceFileError, match="a process still writes"):
        recover(journal.path, save=tmp_path / "a.nc")
    journal.remove()


def test_recover_damaged_journal_is_listed_with_the_reason():
    journal = left_over()
    journal.path.write_bytes(b"BMJ\x01 not much")
    (leftover,) = find_leftovers()
    assert leftover.n_token == 0
    assert "must begin with a readable header" in leftover.note


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_recover_saves_a_verified_file_and_removes_the_journal(tmp_path, suffix):
    journal = left_over()
    expected = open_trace(journal.path)
    actual = recover(journal.path, save=tmp_path / f"a{suffix}")
    xr.testing.assert_identical(actual, expected)
    assert actual.attrs["complete"] == 0
    assert not journal.path.exists()
    xr.testing.assert_identical(open_trace(tmp_path / f"a{suffix}"), expected)


def test_recover_that_cannot_save_keeps_the_journal(tmp_path):
    journal = left_over()
    with pytest.raises(TraceFileError, match="folder that exists"):
        recover(journal.path, save=tmp_path / "gone" / "a.nc")
    assert journal.path.exists()


def test_recover_without_a_target_returns_the_trace_and_keeps_the_journal():
    journal = left_over(done=True)
    xr.testing.assert_identical(recover(journal.path), TRACE)
    assert journal.path.exists()


def test_recover_of_a_finished_file_points_to_open_trace(tmp_path):
    (tmp_path / "a.nc").write_bytes(b"")
    with pytest.raises(TraceFileError, match="must be a journal"):
        recover(tmp_path / "a.nc")


def test_recover_with_a_target_but_no_journal_is_refused(tmp_path):
    with pytest.raises(TraceFileError, match="path must be a journal to save it"):
        recover(save=tmp_path / "a.nc")


def test_recover_without_a_state_folder_lists_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("BMOE_LAB_STATE_DIR", str(tmp_path / "never"))
    assert find_leftovers(state_folder()) == []
