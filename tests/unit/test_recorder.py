from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from bmoe_lab.errors import SchemaError, SessionError, TraceFileError
from bmoe_lab.recording import Journal, Recorder, TraceSpec, open_trace
from bmoe_lab.recording import recorder as recorder_module
from bmoe_lab.testing.recording import feed, spec_of
from bmoe_lab.testing.traces import make_trace


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BMOE_LAB_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def spec(n_layer: int = 2, n_used: tuple[int, ...] = (2, 2), **changes) -> TraceSpec:
    arguments = {
        "n_layer": n_layer,
        "n_slot": max(n_used),
        "n_expert": 8,
        "block": list(range(n_layer)),
        "group": [0] * n_layer,
        "expert_bytes": np.full(n_layer, 100),
        "dense_bytes": None,
        "n_expert_used": np.array(n_used, dtype=np.int16),
        "attrs": {"lossless": True},
    }
    return TraceSpec(**(arguments | changes))


def begin(recorder: Recorder, batch: int = 0, width: int = 1, **changes) -> None:
    arguments = {
        "batch": batch,
        "turn": 0,
        "phase": 1,
        "positions": np.arange(width, dtype=np.int32),
        "token_ids": np.arange(width, dtype=np.int32),
        "pieces": ["x"] * width,
        "logprob": np.full(width, np.nan, np.float32),
        "accepted": np.ones(width, np.uint8),
    }
    recorder.begin(**(arguments | changes))


def layer(recorder: Recorder, index: int, rows: list[int], n_used: int = 2) -> None:
    shape = (len(rows), n_used)
    ids = np.broadcast_to(np.arange(n_used), shape).astype(np.int16)
    weights = np.full(shape, 0.5, np.float32)
    zeros = np.zeros(shape, np.uint8)
    recorder.layer(
        index,
        np.array(rows, dtype=np.int64),
        chosen=ids,
        weight_chosen=weights,
        applied=ids,
        weight_applied=weights,
        action=zeros,
        residency=zeros,
        read_bytes=zeros.astype(np.uint32),
    )


def evaluate(recorder: Recorder, batch: int, width: int = 1, **costs: float) -> None:
    begin(recorder, batch, width)
    for index in range(recorder.spec.n_layer):
        layer(recorder, index, list(range(width)), int(recorder.spec.n_expert_used[index]))
    recorder.commit(costs)


@pytest.mark.parametrize("scores", [False, True, "float16"])
@pytest.mark.parametrize("policy", [None, "drop", "substitute"])
def test_recorder_fed_with_a_trace_gives_that_trace(scores, policy):
    trace = make_trace(150, n_prefill=70, n_ubatch=30, scores=scores, policy=policy)
    recorder = Recorder(spec_of(trace), None)
    feed(recorder, trace)
    xr.testing.assert_identical(recorder.finish(), trace)


def test_recorder_without_text_leaves_it_out(state):
    trace = make_trace(80)
    recorder = Recorder(spec_of(trace, record_text=False), None)
    feed(recorder, trace)
    xr.testing.assert_identical(recorder.finish(), trace.drop_vars(["piece", "token_id"]))


def test_recorder_discarded_evaluation_vanishes():
    recorder = Recorder(spec(), None)
    evaluate(recorder, 0)
    begin(recorder, 1, width=3, pieces=["a", "b", "c"])
    layer(recorder, 0, [0, 1, 2])
    recorder.discard()
    evaluate(recorder, 2)
    trace = recorder.finish()
    assert trace.batch.values.tolist() == [0, 2]
    assert trace.piece.values.tolist() == ["x", "x"]
    assert recorder.n_token == 2


def test_recorder_finish_in_an_open_evaluation_leaves_it_out():
    recorder = Recorder(spec(), None)
    evaluate(recorder, 0)
    begin(recorder, 1)
    assert recorder.finish({"complete": 0}).sizes["token"] == 1


def test_recorder_rows_missing_from_the_last_block_are_masked():
    recorder = Recorder(spec(), None)
    begin(recorder, 0, width=3)
    layer(recorder, 0, [0, 1, 2])
    layer(recorder, 1, [2])
    recorder.commit({})
    trace = recorder.finish()
    assert trace.expert_chosen.values[:, 1, 0].tolist() == [-1, -1, 0]
    assert trace.action.values[:, 1, 0].tolist() == [255, 255, 0]
    assert np.isnan(trace.weight_chosen.values[:2, 1]).all()


def test_recorder_rows_missing_from_another_block_are_an_error(tmp_path):
    journal = Journal.create(spec(), save=tmp_path / "a.nc")
    recorder = Recorder(spec(), journal)
    begin(recorder, 0, width=3)
    layer(recorder, 0, [0, 2])
    layer(recorder, 1, [0, 1, 2])
    recorder.commit({})
    with pytest.raises(SchemaError, match=r"layer 0 must route every token \(3\); got 2"):
        recorder.finish(save=tmp_path / "a.nc")
    assert journal.path.exists()
    journal.close()


def test_recorder_layer_that_never_routed_is_an_error():
    recorder = Recorder(spec(), None)
    begin(recorder)
    layer(recorder, 0, [0])
    recorder.commit({})
    with pytest.raises(SchemaError, match=r"layer 1 must route every token \(1\); got 0"):
        recorder.finish()


def test_recorder_row_given_twice_is_an_error_and_the_evaluation_is_dropped():
    recorder = Recorder(spec(), None)
    begin(recorder, 7, width=3)
    layer(recorder, 0, [0, 1, 2])
    layer(recorder, 1, [1, 1])
    with pytest.raises(SchemaError, match=r"layer 1 must route each row .* once; got 2 rows for 1"):
        recorder.commit({})
    assert recorder.n_token == 0


def test_recorder_slots_not_filled_are_an_error():
    recorder = Recorder(spec(), None)
    begin(recorder)
    layer(recorder, 0, [0])
    layer(recorder, 1, [0])
    recorder._chosen[0, 1, 1] = -1
    recorder.commit({})
    with pytest.raises(SchemaError, match="tokens x layers x slots = 4 routed slots; got 3"):
        recorder.finish()


def test_recorder_narrow_layer_leaves_its_last_slots_empty():
    recorder = Recorder(spec(n_used=(2, 1)), None)
    evaluate(recorder, 0)
    trace = recorder.finish()
    assert trace.expert_chosen.values[0].tolist() == [[0, 1], [0, -1]]
    assert trace.n_expert_used.values.tolist() == [2, 1]


@pytest.mark.parametrize("with_journal", [True, False])
def test_recorder_empty_recording_is_an_error_and_leaves_nothing(state, with_journal):
    journal = Journal.create(spec()) if with_journal else None
    recorder = Recorder(spec(), journal)
    with pytest.raises(SchemaError, match="at least one token; got none: no evaluation"):
        recorder.finish()
    assert not with_journal or list(state.iterdir()) == []


def test_recorder_two_begins_are_an_error():
    recorder = Recorder(spec(), None)
    begin(recorder)
    with pytest.raises(SessionError, match="between evaluations"):
        begin(recorder)


def test_recorder_commit_without_begin_is_an_error():
    with pytest.raises(SessionError, match="in an evaluation to commit it"):
        Recorder(spec(), None).commit({})


def test_recorder_tokens_of_different_lengths_are_an_error():
    with pytest.raises(SchemaError, match=r"one value each; got lengths \[1, 2\]"):
        begin(Recorder(spec(), None), width=2, pieces=["x"])


def test_recorder_costs_have_one_value_per_evaluation():
    recorder = Recorder(spec(), None)
    evaluate(recorder, 0, width=3, wall_s=0.5, odd_bytes=7.0)
    evaluate(recorder, 1, wall_s=0.25)
    trace = recorder.finish()
    np.testing.assert_array_equal(trace.wall_s, [0.5, np.nan, np.nan, 0.25])
    np.testing.assert_array_equal(trace.odd_bytes, [7.0, np.nan, np.nan, np.nan])
    assert trace.odd_bytes.attrs["units"] == "byte"


def test_recorder_new_cost_later_is_an_error():
    recorder = Recorder(spec(), None)
    evaluate(recorder, 0, wall_s=0.5)
    with pytest.raises(SchemaError, match=r"names of the first commit \['wall_s'\]; got 'io_s'"):
        evaluate(recorder, 1, io_s=0.5)


def test_recorder_grows_within_one_wide_evaluation():
    recorder = Recorder(spec(), None)
    evaluate(recorder, 0)
    evaluate(recorder, 1, width=700)
    assert recorder.finish().expert_chosen.values[1:].max() == 1


def test_recorder_state_of_a_warm_start_is_kept(tmp_path):
    state = {"order": np.array([3, 1, 2], dtype=np.int32), "start_state_clock": np.array(9)}
    warm = spec(state=state)
    recorder = Recorder(warm, Journal.create(warm, save=tmp_path / "a.nc"))
    evaluate(recorder, 0)
    recorder.flush()
    for trace in (open_trace(recorder.journal.path), recorder.finish(save=tmp_path / "a.nc")):
        assert trace.start_state_order.values.tolist() == [3, 1, 2]
        assert trace.start_state_order.dtype == np.int32
        assert trace.start_state_clock.item() == 9


def test_recorder_attributes_say_complete_unless_told():
    for given, expected in (({}, 1), ({"complete": False, "note": None}, 0)):
        recorder = Recorder(spec(), None)
        evaluate(recorder, 0)
        trace = recorder.finish(given)
        assert trace.attrs["complete"] == expected
        assert "note" not in trace.attrs


def test_recorder_flushes_after_64_tokens(monkeypatch):
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: 0.0)
    recorder = Recorder(spec(), Journal.create(spec()))
    for batch in range(63):
        evaluate(recorder, batch)
    assert recorder.journal.n_token == 0
    evaluate(recorder, 63)
    assert recorder.journal.n_token == 64
    evaluate(recorder, 64, width=100)
    assert recorder.journal.n_token == 164
    recorder.finish()


def test_recorder_flushes_after_one_second(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: clock[0])
    recorder = Recorder(spec(), Journal.create(spec()))
    for batch, (now, expected) in enumerate([(0.6, 0), (0.99, 0), (1.01, 3), (1.9, 3), (2.1, 5)]):
        clock[0] = now
        evaluate(recorder, batch)
        assert recorder.journal.n_token == expected
    recorder.finish()


def test_recorder_layer_writes_no_file(tmp_path):
    journal = Journal.create(spec(), save=tmp_path / "a.nc")
    recorder = Recorder(spec(), journal)
    before = journal.path.stat().st_size
    begin(recorder, 0, width=500)
    layer(recorder, 0, list(range(500)))
    layer(recorder, 1, list(range(500)))
    assert journal.path.stat().st_size == before
    recorder.discard()
    journal.remove()


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("scores", [False, True])
def test_recorder_longer_than_memory_gives_the_same_trace(tmp_path, suffix, scores):
    trace = make_trace(400, n_layer=2, n_prefill=100, n_ubatch=30, scores=scores)
    path = tmp_path / f"a{suffix}"
    recorder = Recorder(
        spec_of(trace), Journal.create(spec_of(trace), save=path), memory_limit=60_000
    )
    feed(recorder, trace)
    assert sum(array.nbytes for array in recorder._arrays.values()) < trace.nbytes
    actual = recorder.finish(save=path)
    assert not actual.variables["expert_chosen"]._in_memory
    xr.testing.assert_identical(actual.load(), trace)
    actual.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a{suffix}"]


def test_recorder_longer_than_memory_without_a_file_goes_with_the_dataset(state):
    trace = make_trace(200, scores=True)
    recorder = Recorder(spec_of(trace), Journal.create(spec_of(trace)), memory_limit=20_000)
    feed(recorder, trace)
    actual = recorder.finish()
    assert not actual.variables["router_score"]._in_memory
    picks = {"token": slice(190, 3, -7), "layer": [3, 1]}
    xr.testing.assert_identical(actual.isel(picks).load(), trace.isel(picks))
    xr.testing.assert_identical(actual.isel(token=5).load(), trace.isel(token=5))
    xr.testing.assert_identical(actual.isel(token=[9, 2]).load(), trace.isel(token=[9, 2]))
    assert len(list(state.iterdir())) == 1
    del actual, recorder
    gc.collect()
    assert list(state.iterdir()) == []


def test_recorder_finish_without_a_target_removes_the_journal(state):
    recorder = Recorder(spec(), Journal.create(spec()))
    evaluate(recorder, 0)
    recorder.finish()
    assert list(state.iterdir()) == []


def test_recorder_final_file_fails_journal_is_kept_and_finish_can_be_repeated(tmp_path):
    journal = Journal.create(spec(), save=tmp_path / "a.nc")
    recorder = Recorder(spec(), journal)
    evaluate(recorder, 0)
    with pytest.raises(
        TraceFileError, match=r"must be in a folder that exists.*is kept in '.*a.nc"
    ):
        recorder.finish(save=tmp_path / "gone" / "a.nc")
    kept = open_trace(journal.path)
    assert kept.attrs["complete"] == 1
    xr.testing.assert_identical(recorder.finish(save=tmp_path / "a.nc"), kept)
    assert not journal.path.exists()


def test_recorder_journal_fails_at_commit_the_trace_in_memory_goes_on(tmp_path, monkeypatch):
    journal = Journal.create(spec(), save=tmp_path / "a.nc")
    recorder = Recorder(spec(), journal)
    evaluate(recorder, 0, width=64)

    def full(kind: bytes, payload: bytes) -> None:
        journal.failed = True
        raise TraceFileError("journal must be writable; got 'No space left on device'.")

    monkeypatch.setattr(journal, "_write", full)
    with pytest.raises(TraceFileError, match="No space left"):
        evaluate(recorder, 1, width=64)
    evaluate(recorder, 2)  # no second error
    assert open_trace(journal.path).sizes["token"] == 64
    assert recorder.finish({"complete": 0}).sizes["token"] == 129


def test_recorder_longer_than_memory_on_a_full_disk_keeps_what_was_flushed(tmp_path, monkeypatch):
    journal = Journal.create(spec(), save=tmp_path / "a.nc")
    recorder = Recorder(spec(), journal, memory_limit=5_000)
    for batch in range(3):
        evaluate(recorder, batch, width=64)
    assert recorder._spilled == 192

    def full(kind: bytes, payload: bytes) -> None:
        journal.failed = True
        raise TraceFileError("journal must be writable; got 'No space left on device'.")

    monkeypatch.setattr(journal, "_write", full)
    with pytest.raises(TraceFileError, match="No space left"):
        evaluate(recorder, 3, width=64)
    trace = recorder.finish({"complete": 0, "ended_by": "error"})
    assert trace.sizes["token"] == 192
    assert trace.attrs["complete"] == 0
    assert trace.attrs["ended_by"] == "error"
    assert "192 tokens survived" in trace.attrs["journal_note"]
    trace.close()


def test_recorder_disk_full_at_the_end_finish_can_be_repeated(tmp_path, monkeypatch):
    journal = Journal.create(spec(), save=tmp_path / "a.nc")
    recorder = Recorder(spec(), journal)
    evaluate(recorder, 0, width=3)

    def full(kind: bytes, payload: bytes) -> None:
        journal.failed = True
        raise TraceFileError("journal must be writable; got 'No space left on device'.")

    monkeypatch.setattr(journal, "_write", full)
    with pytest.raises(TraceFileError, match="No space left"):
        recorder.finish(save=tmp_path / "a.nc")
    assert recorder.finish().sizes["token"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": "off"}, "level must be one of"),
        ({"block": [0]}, r"block must have one value per layer \(2\); got 1"),
        ({"n_expert_used": np.array([3, 2])}, "1 <= n_expert_used <= n_slot"),
        ({"attrs": {}}, "attrs must say whether the run is 'lossless'"),
    ],
)
def test_trace_spec_parts_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(SchemaError, match=message):
        spec(**changes)
