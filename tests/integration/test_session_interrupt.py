"""Ctrl-C and stop: back within a second, the trace so far kept, the session as good as new."""

import contextlib
import json
import signal
import sys
import threading
import time

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.schema import validate
from tests.integration.session_tools import TEXT, at_load, open_demo, resources, run_child, witness

N_LAYER = 6
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def expected():
    with open_demo() as session:
        return witness(session)


@pytest.fixture(scope="module")
def whole():
    with open_demo() as session:
        return session.generate(TEXT * 2, n_predict=24).trace


@pytest.fixture
def session():
    with open_demo() as session:
        yield session


class Interrupt:
    """Sends a real SIGINT to the main thread, and remembers when."""

    def __init__(self, times=1):
        self.times = times
        self.sent = float("nan")

    def __call__(self):
        self.sent = time.monotonic()
        for _ in range(self.times):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    @property
    def elapsed(self):
        return time.monotonic() - self.sent


def assert_prefix(run, whole):
    """What was kept is whole evaluations, equal to those of an undisturbed run."""
    trace = run.trace
    n = trace.sizes["token"]
    assert not run.complete
    assert trace.attrs["complete"] == 0
    assert trace.attrs["ended_by"] == "stopped"
    assert n == whole.sizes["token"] or whole.batch.values[n] != whole.batch.values[n - 1]
    for name in ("expert_chosen", "weight_chosen", "residency", "read_bytes", "logprob", "batch"):
        np.testing.assert_array_equal(trace[name], whole[name][:n])
    validate(trace)
    return n


@pytest.mark.parametrize(
    ("load", "n_token"),
    [
        (N_LAYER - 1 + 2, 16),  # second micro-batch
        (2 * (N_LAYER - 1) + 3, 32),  # third
    ],
)
def test_interrupt_in_prefill_keeps_the_micro_batches_before(
    session, expected, whole, load, n_token
):
    interrupt = Interrupt()
    at_load(session, load, interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate(TEXT * 2, n_predict=24)
    assert interrupt.elapsed < LIMIT_S
    assert assert_prefix(session.last_run, whole) == n_token
    assert witness(session) == expected


def test_interrupt_in_the_first_evaluation_leaves_no_trace(session, expected):
    interrupt = Interrupt()
    at_load(session, 3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate(TEXT * 2, n_predict=24)
    assert interrupt.elapsed < LIMIT_S
    assert session.last_run.trace is None
    assert session.last_run.summary.ended_by == "stopped"
    assert witness(session) == expected


@pytest.mark.parametrize("cache", [0, 1_400_000, "1 GiB"])
@pytest.mark.parametrize("evaluation", [1, 7])
def test_interrupt_in_decode_keeps_the_evaluations_before(expected, whole, evaluation, cache):
    interrupt = Interrupt()
    with open_demo(cache=cache) as session:
        n_prompt = len(session.tokenize(TEXT * 2))
        n_before = (-(-n_prompt // 16) * (N_LAYER - 1) + 1) + (evaluation - 1) * N_LAYER
        at_load(session, n_before + 3, interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.generate(TEXT * 2, n_predict=24)
        assert interrupt.elapsed < LIMIT_S
        run = session.last_run
        # The signal is handled in the main thread, a few evaluations later where they are short.
        n_token = run.trace.sizes["token"]
        assert n_prompt + evaluation - 1 <= n_token < n_prompt + 23
        assert len(run.tokens) == n_token - n_prompt + 1
        np.testing.assert_array_equal(run.trace.expert_chosen, whole.expert_chosen[:n_token])
        assert witness(session) == expected


def test_interrupt_in_score_keeps_what_was_scored(session, expected):
    interrupt = Interrupt()
    at_load(session, 60, interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.score(TEXT * 2)
    assert interrupt.elapsed < LIMIT_S
    assert session.last_run.trace.sizes["token"] > 16
    assert len(session.last_run.tokens) > 0
    assert witness(session) == expected


def test_interrupt_twice_at_once_is_one_interrupt(session, expected):
    interrupt = Interrupt(times=2)
    at_load(session, 40, interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate(TEXT * 2, n_predict=24)
    assert interrupt.elapsed < LIMIT_S
    assert not session.last_run.complete
    assert witness(session) == expected


def test_interrupt_with_a_target_saves_the_trace_so_far(session, tmp_path, whole):
    at_load(session, 40, Interrupt())
    with pytest.raises(KeyboardInterrupt):
        session.generate(TEXT * 2, n_predict=24, save=tmp_path / "x.nc")
    assert bl.open_trace(tmp_path / "x.nc").identical(session.last_run.trace)
    assert [p.name for p in tmp_path.iterdir()] == ["x.nc"]
    assert_prefix(session.last_run, whole)


def test_interrupt_before_the_run_has_begun_is_not_lost(session, expected, monkeypatch):
    """It used to be forgotten: the run cleared the request as it began, and went on to its end."""
    live = session._model
    interrupt = Interrupt()
    inner = live.begin_run

    def begin_run(run, *, warm):
        interrupt()
        deadline = time.monotonic() + 5
        while not live.stop_requested and time.monotonic() < deadline:
            time.sleep(0.001)
        inner(run, warm=warm)

    monkeypatch.setattr(live, "begin_run", begin_run)
    with pytest.raises(KeyboardInterrupt):
        session.generate(TEXT, n_predict=100)
    monkeypatch.undo()
    assert session.last_run.summary.ended_by == "stopped"
    assert len(session.last_run.tokens) == 0
    assert witness(session) == expected


def test_interrupt_during_open_leaves_nothing_behind(monkeypatch):
    """It used to leave the model open: what the interrupted open had made belonged to nobody."""
    from bmoe_lab.runtime.live import LiveModel

    with open_demo():
        pass
    before = resources()
    interrupt = Interrupt()
    inner = LiveModel._self_check

    def self_check(self):
        interrupt()
        inner(self)

    monkeypatch.setattr(LiveModel, "_self_check", self_check)
    with pytest.raises(KeyboardInterrupt):
        open_demo()
    assert resources() == before


def test_stop_from_another_thread_ends_the_run(session, expected, whole):
    thread = threading.Thread(target=session.stop)

    def act():
        thread.start()
        thread.join()

    at_load(session, 40, act)
    run = session.generate(TEXT * 2, n_predict=24)
    assert_prefix(run, whole)
    assert session.last_run is run
    assert witness(session) == expected


def test_stop_in_the_middle_of_a_read_ends_the_run_without_an_error(expected, monkeypatch):
    """A cancelled read is how a stop shows there, not a failure of the disk."""
    import os

    inner = os.preadv
    count = [0]
    with open_demo(cache=0, io_lanes=1) as session:

        def preadv(*args):
            count[0] += 1
            if count[0] == 300:
                session.stop()
            return inner(*args)

        monkeypatch.setattr(os, "preadv", preadv)
        run = session.generate(TEXT, n_predict=24)
        monkeypatch.undo()
        assert count[0] >= 300
        assert run.summary.ended_by == "stopped"
        assert run.trace.attrs["complete"] == 0
        assert witness(session) == expected


def test_stop_without_a_run_does_nothing_to_the_next_one(session, expected):
    session.stop()
    assert witness(session) == expected
    session.stop()
    assert session.generate(TEXT, n_predict=4).complete


def test_stop_after_close_does_nothing(session):
    session.close()
    session.stop()
    session.close()


def test_close_from_another_thread_ends_the_run_first(expected):
    session = open_demo()
    thread = threading.Thread(target=session.close)
    at_load(session, 40, thread.start)
    run = None
    with contextlib.suppress(bl.errors.SessionError):
        run = session.generate(TEXT, n_predict=200)
    thread.join(10)
    assert not thread.is_alive()
    assert run is None or run.summary.ended_by in ("stopped", "n_predict")
    with pytest.raises(bl.errors.SessionError, match="closed"):
        session.generate("x")


def test_callers_on_several_threads_take_turns(session, expected):
    results = []

    def call():
        results.append(session.generate(TEXT, n_predict=6).tokens.tolist())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(tokens == results[0] for tokens in results)
    assert witness(session) == expected


CHILD = """
import json, os, random, signal, sys, threading, time
import numpy as np
import bmoe_lab as bl
from tests.integration.session_tools import TEXT, open_demo, witness

session = open_demo()
expected = witness(session)
whole = session.generate(TEXT * 2, n_predict=60).trace
draw = random.Random(int(sys.argv[1]))
out = []
begun = time.monotonic()
session.generate(TEXT * 2, n_predict=60)
length = time.monotonic() - begun
for attempt in range(12):
    delay = draw.random() * length
    sent = []
    def fire(times=1 + attempt % 3):
        sent.append(time.monotonic())
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.002)
    timer = threading.Timer(delay, fire)
    timer.start()
    came = None
    try:
        try:
            session.generate(TEXT * 2, n_predict=60)
            while not sent:
                time.sleep(0.001)
            time.sleep(0.1)
        except KeyboardInterrupt:
            came = time.monotonic() - sent[0]
            time.sleep(0.05)  # the further signals of this attempt
    except KeyboardInterrupt:
        pass
    while timer.is_alive():
        try:
            timer.join()
        except KeyboardInterrupt:
            pass
    trace = session.last_run.trace
    n = 0 if trace is None else trace.sizes["token"]
    same = trace is None or all(
        np.array_equal(trace[name].values, whole[name].values[:n], equal_nan=True)
        for name in ("expert_chosen", "weight_chosen", "residency", "read_bytes")
    )
    out.append({"came": came, "n": n, "same": same, "usable": witness(session) == expected})
session.close()
print(json.dumps(out))
"""


def test_interrupts_at_random_moments_leave_a_working_session():
    """Real signals, one to three of them, anywhere in the run, in a process of their own."""
    result = run_child(CHILD, "20")
    assert result.returncode == 0, result.stderr
    attempts = json.loads(result.stdout)
    assert len(attempts) == 12
    came = [a["came"] for a in attempts if a["came"] is not None]
    assert len(came) >= 6
    assert max(came) < LIMIT_S
    assert all(a["same"] and a["usable"] for a in attempts)
    assert len({a["n"] for a in attempts}) > 3
    assert sys.platform.startswith("linux")


def test_interrupt_that_the_kernel_gives_to_another_thread_is_noticed(session):
    """Such a signal does not end a wait, so the run used to go on to its end now and then."""
    sent = []

    def on_text(new):
        if not sent:
            sent.append(new)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            time.sleep(0.5)  # the caller wakes up in the meantime

    with pytest.raises(KeyboardInterrupt):
        session.generate(TEXT, n_predict=100, on_text=on_text)
    assert session.last_run.summary.ended_by == "stopped"
