"""Work in a thread: told at a pace that a page bears, ended when asked, never failing unheard."""

import itertools
import threading

import pytest

from bmoe_lab.errors import SessionError
from bmoe_lab.widgets import job as job_module
from bmoe_lab.widgets.job import INTERVAL, Job, Stopped, Ticket

#: Long enough to never pass in a test that works.
LONG = 30


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Gate:
    """Work that stands still until it may go on."""

    def __init__(self, end=lambda ticket: None):
        self.here, self.go = threading.Event(), threading.Event()
        self.end = end

    def __call__(self, ticket):
        self.here.set()
        assert self.go.wait(LONG)
        return self.end(ticket)


def threads():
    return [t for t in threading.enumerate() if "bmoe-lab job" in t.name]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    for thread in threads():
        thread.join(LONG)
    assert threads() == []
    assert job_module._queues == {}


@pytest.fixture
def job():
    return Job()


# -- telling -----------------------------------------------------------------------------------


def test_updates_come_at_most_five_times_a_second_and_lose_no_last_value():
    clock, seen = Clock(), []
    ticket = Ticket(lambda values: seen.append((clock.now, dict(values))), clock=clock)
    for number in range(1000):
        clock.now += 0.01
        ticket.tell(number=number, **{f"only-{number}": number})
        ticket.pump()
    ticket.end()
    ticket.pump()
    times = [time for time, _ in seen]
    gaps = [after - before for before, after in itertools.pairwise(times[:-1])]
    assert min(gaps) >= INTERVAL - 1e-9
    assert 45 <= len(seen) <= 51  # ten seconds
    together = {}
    for _, values in seen:
        together |= values
    assert together == {"number": 999} | {f"only-{n}": n for n in range(1000)}
    numbers = [values["number"] for _, values in seen]
    assert numbers == sorted(numbers)


def test_time_that_publishing_takes_does_not_count_as_rest():
    clock, seen = Clock(), []

    def slow(values):
        seen.append(clock.now)
        clock.now += 1.0

    ticket = Ticket(slow, clock=clock)
    ticket.tell(n=1)
    assert ticket.pump() == 0.0
    ticket.tell(n=2)
    assert ticket.pump() == pytest.approx(INTERVAL)
    assert len(seen) == 1


def test_a_value_told_too_early_is_published_when_its_time_has_come():
    """It waited for the next one to be told, which may be a long evaluation away."""
    clock, seen = Clock(), []
    ticket = Ticket(seen.append, clock=clock)
    ticket.tell(n=1)
    ticket.pump()
    ticket.tell(n=2)
    wait = ticket.pump()
    assert seen == [{"n": 1}]
    clock.now += wait
    ticket.pump()
    assert seen == [{"n": 1}, {"n": 2}]
    assert ticket.pump() is None


def test_flush_does_not_wait():
    clock, seen = Clock(), []
    ticket = Ticket(seen.append, clock=clock)
    ticket.tell(n=1)
    ticket.pump()
    ticket.tell(n=2)
    ticket.flush()
    ticket.pump()
    assert seen == [{"n": 1}, {"n": 2}]
    ticket.tell(n=3)
    assert ticket.pump() > 0  # the flush before it is used up


def test_what_is_told_is_published_while_the_work_goes_on(job):
    seen = threading.Event()
    gate = Gate()

    def work(ticket):
        ticket.tell(n=1)
        assert seen.wait(LONG)
        gate(ticket)

    job.start(work, publish=lambda values: seen.set())
    assert gate.here.wait(LONG)
    assert job.running
    gate.go.set()
    assert job.wait(LONG) == "done"


def test_publishing_does_not_hold_the_work_up(job):
    drawing, may_draw = threading.Event(), threading.Event()

    def publish(values):
        drawing.set()
        assert may_draw.wait(LONG)

    def work(ticket):
        ticket.tell(n=1)
        assert drawing.wait(LONG)
        for number in range(1000):
            ticket.tell(n=number)
        may_draw.set()

    job.start(work, publish=publish)
    assert job.wait(LONG) == "done"


def test_everything_is_published_before_the_result_is_handed_on(job):
    order = []
    job.start(
        lambda ticket: [ticket.tell(n=n) for n in range(5)] and "result",
        publish=lambda values: order.append(values["n"]),
        then=order.append,
    )
    assert job.wait(LONG) == "done"
    assert order[-2:] == [4, "result"]


# -- ending ------------------------------------------------------------------------------------


def test_stop_reaches_the_work(job):
    stopped = threading.Event()

    def work(ticket):
        ticket.while_stoppable(stopped.set)
        assert stopped.wait(LONG)
        ticket.check()

    job.start(work)
    job.stop()
    assert job.wait(LONG) == "stopped"
    assert (job.error, job.exception) == ("", None)


def test_stop_before_the_work_has_begun_keeps_it_from_beginning(job, monkeypatch):
    begun, asked, check = [], threading.Event(), Ticket.check

    def late(ticket):
        assert asked.wait(LONG)
        check(ticket)

    monkeypatch.setattr(Ticket, "check", late)
    job.start(begun.append)
    job.stop()
    asked.set()
    assert job.wait(LONG) == "stopped"
    assert begun == []


def test_stop_that_came_before_the_work_was_stoppable_is_not_lost(job):
    ended = []
    gate = Gate(lambda ticket: ticket.while_stoppable(lambda: ended.append(1)))
    job.start(gate)
    assert gate.here.wait(LONG)
    job.stop()
    assert job.state == "stopping"
    gate.go.set()
    assert job.wait(LONG) == "stopped"
    assert ended == [1]


def test_stop_after_the_stoppable_part_ends_nothing(job):
    ended = []
    gate = Gate()

    def work(ticket):
        ticket.while_stoppable(lambda: ended.append(1))
        ticket.while_stoppable(None)
        return gate(ticket)

    job.start(work)
    assert gate.here.wait(LONG)
    job.stop()
    gate.go.set()
    assert job.wait(LONG) == "stopped"
    assert ended == []


def test_work_that_returns_what_it_has_when_stopped_hands_it_on(job):
    results = []
    gate = Gate(lambda ticket: "half")
    job.start(gate, then=results.append)
    assert gate.here.wait(LONG)
    job.stop()
    gate.go.set()
    assert job.wait(LONG) == "stopped"
    assert results == ["half"]


@pytest.mark.parametrize("n_stop", [1, 2])
def test_stop_while_the_work_ends_does_not_leave_the_job_stopping(job, n_stop):
    """A state set between the question and the answer stayed for good."""
    states = []
    job.observe(lambda change: states.append(change.new), "state")
    for _ in range(200):
        job.start(lambda ticket: None)
        for _ in range(n_stop):
            job.stop()
        assert job.wait(LONG) in ("done", "stopped")
        assert not job.running
    assert states[-1] in ("done", "stopped")


def test_stop_without_work_does_nothing(job):
    job.stop()
    assert job.state == "idle"
    job.start(lambda ticket: None)
    job.wait(LONG)
    job.stop()
    assert job.state == "done"


def test_second_start_is_refused_while_the_first_runs(job):
    gate = Gate()
    job.start(gate)
    with pytest.raises(SessionError, match="the job must have ended"):
        job.start(gate)
    gate.go.set()
    assert job.wait(LONG) == "done"


@pytest.mark.parametrize("end", ["done", "failed", "stopped"])
def test_job_can_be_started_again_after_every_end(job, end):
    def work(ticket):
        if end == "failed":
            raise ValueError("first")
        if end == "stopped":
            job.stop()
            ticket.check()

    job.start(work)
    assert job.wait(LONG) == end
    results = []
    job.start(lambda ticket: 3, then=results.append)
    assert job.wait(LONG) == "done"
    assert (results, job.error, job.exception) == ([3], "", None)


def test_wait_from_within_does_not_wait_for_itself(job):
    states = []
    job.start(lambda ticket: states.append(job.wait(LONG)))
    assert job.wait(LONG) == "done"
    assert states == ["running"]


# -- failing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no such thing"), "no such thing"), (KeyError(), "KeyError")]
)
def test_failure_is_kept_with_its_words(job, error, said):
    def work(ticket):
        ticket.tell(n=1)
        raise error

    seen = []
    job.start(work, publish=seen.append)
    assert job.wait(LONG) == "failed"
    assert job.error == said
    assert job.exception is error
    assert seen == [{"n": 1}]


def test_failure_to_publish_stops_the_work_and_is_said(job):
    results = []
    stopped = threading.Event()

    def work(ticket):
        ticket.while_stoppable(stopped.set)
        ticket.tell(n=1)
        assert stopped.wait(LONG)
        return "half"

    def publish(values):
        raise ValueError("cannot draw")

    job.start(work, publish=publish, then=results.append)
    assert job.wait(LONG) == "failed"
    assert job.error == "cannot draw"
    assert results == []


def test_failure_of_the_last_publish_is_said(job):
    gate = Gate(lambda ticket: ticket.tell(n=1))

    def publish(values):
        raise ValueError("cannot draw")

    job.start(gate, publish=publish)
    gate.go.set()
    assert job.wait(LONG) == "failed"
    assert job.error == "cannot draw"


def test_failure_of_what_takes_the_result_is_said(job):
    def then(result):
        raise ValueError("cannot take it")

    job.start(lambda ticket: None, then=then)
    assert job.wait(LONG) == "failed"
    assert job.error == "cannot take it"


def test_failure_of_an_observer_of_the_end_is_said(job):
    def observer(change):
        if change.new == "done":
            raise ValueError("observer")

    job.observe(observer, "state")
    job.start(lambda ticket: None)
    assert job.wait(LONG) == "failed"
    assert job.error == "observer"


def test_failure_of_an_observer_of_a_stop_does_not_keep_the_work_going(job):
    def observer(change):
        if change.new == "stopping":
            raise ValueError("observer")

    job.observe(observer, "state")
    gate = Gate(lambda ticket: ticket.check())
    job.start(gate)
    assert gate.here.wait(LONG)
    with pytest.raises(ValueError, match="observer"):
        job.stop()
    gate.go.set()
    assert job.wait(LONG) == "stopped"


# -- turns -------------------------------------------------------------------------------------


def take(owner, gate, waiting=None):
    def work(ticket):
        with ticket.turn(owner, (waiting or threading.Event()).set):
            gate(ticket)

    return work


def test_jobs_have_one_session_in_the_order_in_which_they_asked():
    session, order = object(), []
    jobs, gates, waits = [], [], []
    for number in range(3):
        gate = Gate(lambda ticket, number=number: order.append(number))
        waiting = threading.Event()
        job = Job()
        job.start(take(session, gate, waiting))
        assert (gate.here if number == 0 else waiting).wait(LONG)
        jobs.append(job)
        gates.append(gate)
        waits.append(waiting)
    assert [gate.here.is_set() for gate in gates] == [True, False, False]
    assert [waiting.is_set() for waiting in waits] == [False, True, True]
    for gate in gates:
        gate.go.set()
    assert [job.wait(LONG) for job in jobs] == ["done"] * 3
    assert order == [0, 1, 2]


def test_jobs_of_two_sessions_do_not_wait_for_each_other():
    gates, jobs = [Gate(), Gate()], [Job(), Job()]
    for gate, job in zip(gates, jobs, strict=True):
        job.start(take(object(), gate))
        assert gate.here.wait(LONG)
    for gate, job in zip(gates, jobs, strict=True):
        gate.go.set()
        assert job.wait(LONG) == "done"


@pytest.mark.parametrize("which", [1, 2])
def test_stop_breaks_off_the_waiting_and_leaves_the_others_alone(which):
    session = object()
    jobs, gates = [Job(), Job(), Job()], [Gate(), Gate(), Gate()]
    jobs[0].start(take(session, gates[0]))
    assert gates[0].here.wait(LONG)
    for job, gate in zip(jobs[1:], gates[1:], strict=True):
        waiting = threading.Event()
        job.start(take(session, gate, waiting))
        assert waiting.wait(LONG)
    jobs[which].stop()
    assert jobs[which].wait(LONG) == "stopped"
    assert not gates[which].here.is_set()
    (queue,) = job_module._queues.values()
    assert list(queue) == [job._ticket for n, job in enumerate(jobs) if n != which]
    assert jobs[0].state == "running"
    for gate in gates:
        gate.go.set()
    assert {job.wait(LONG) for n, job in enumerate(jobs) if n != which} == {"done"}


def test_turn_is_given_on_by_work_that_fails():
    session = object()
    gate = Gate(lambda ticket: 1 / 0)
    first, second = Job(), Job()
    first.start(take(session, gate))
    assert gate.here.wait(LONG)
    waiting, other = threading.Event(), Gate()
    second.start(take(session, other, waiting))
    assert waiting.wait(LONG)
    gate.go.set()
    other.go.set()
    assert (first.wait(LONG), second.wait(LONG)) == ("failed", "done")


def test_stopped_is_no_error():
    assert not issubclass(Stopped, SessionError)
