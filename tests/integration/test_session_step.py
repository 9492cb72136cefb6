"""What a run tells after each evaluation: true to its summary and trace, and free of effects."""

import dataclasses
import inspect

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import SettingsError
from bmoe_lab.routing import RoutingPolicy
from tests.integration.session_tools import TEXT, at_load, open_demo, witness

N_UBATCH = 16
PHASES = ("prefill", "decode")
POLICIES = [None, bl.routing.DropCold(0.75), bl.routing.CachePrior(0.3)]


class Mine(Exception):
    pass


class Fails(RoutingPolicy):
    """Fails in the third evaluation of the decode."""

    def __init__(self, error):
        self.error = error

    def clone(self):
        return Fails(self.error)

    def reset(self, seed=0):
        self.seen_ = set()

    def weigh(self, routing):
        self.seen_.add(int(routing.positions[0]))
        if len(self.seen_) == 3:
            raise self.error


@pytest.fixture(scope="module")
def session():
    with open_demo() as session:
        yield session


@pytest.fixture(scope="module")
def expected():
    with open_demo() as session:
        return witness(session)


def prompt_of(session, n_token):
    return session.tokenize(TEXT * 4)[:n_token]


def generated(session, **options):
    steps = []
    prompt = prompt_of(session, 40)  # two whole micro-batches and a narrow one
    run = session.generate(prompt, n_predict=12, on_step=steps.append, **options)
    return run, steps


def scored(session, **options):
    steps = []
    texts = [prompt_of(session, 40), prompt_of(session, 30)]
    run = session.score(texts, n_context=20, on_step=steps.append, **options)
    return run, steps


def assert_sums(steps, summary):
    """Sums over the evaluations of a phase are the running sums, to the last one the run's."""
    for phase in PHASES:
        mine = [step for step in steps if step.phase == phase]
        total = getattr(summary, phase)
        assert total.n_evaluation == len(mine)
        assert total.n_token == sum(step.n_token for step in mine)
        assert total.lookups == sum(int(step.lookups.sum()) for step in mine)
        assert total.hits == sum(int((step.lookups - step.misses).sum()) for step in mine)
        assert total.read_bytes == sum(int(step.read_bytes.sum()) for step in mine)
        assert total == getattr(steps[-1], phase)
        for step, others in zip(mine, np.cumsum([x.n_token for x in mine]), strict=True):
            assert step.totals.n_token == others == step.n_done


@pytest.mark.parametrize("make", [generated, scored])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("record", ["off", "ids"])
def test_steps_add_up_to_the_summary(session, make, policy, record):
    run, steps = make(session, policy=policy, record=record)
    assert_sums(steps, run.summary)
    assert run.summary.decode.hits > 0


@pytest.mark.parametrize("make", [generated, scored])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_steps_add_up_to_the_metrics_of_the_trace(session, make, policy):
    run, steps = make(session, policy=policy)
    trace = run.trace
    drops = policy is not None and policy.name == "drop_cold"
    for phase in PHASES:
        mine = [step for step in steps if step.phase == phase]
        rows = trace.isel(token=trace["phase"].values == PHASES.index(phase))
        read = sum(step.read_bytes for step in mine)
        np.testing.assert_array_equal(read, rows["read_bytes"].sum(("token", "slot")))
        lookups, misses = sum(s.lookups for s in mine), sum(s.misses for s in mine)
        np.testing.assert_array_equal(misses * trace["expert_bytes"].values, read)
        if phase == "prefill" or not drops:  # a dropped slot is no lookup, its stand-in is one
            rate = bl.metrics.hit_rate(trace, by="layer", phase=phase)
            np.testing.assert_allclose(1 - misses / lookups, rate, rtol=1e-14)
            assert mine[-1].totals.hit_rate == pytest.approx(
                float(bl.metrics.hit_rate(trace, phase=phase)), rel=1e-14
            )


@pytest.mark.parametrize("make", [generated, scored])
def test_steps_come_in_the_order_of_the_trace(session, make):
    run, steps = make(session)
    trace = run.trace
    assert [step.batch for step in steps] == np.unique(trace["batch"]).tolist()
    for step in steps:
        rows = trace.isel(token=trace["batch"].values == step.batch)
        assert rows.sizes["token"] == step.n_token
        assert set(rows["phase"].values) == {PHASES.index(step.phase)}
        np.testing.assert_array_equal(step.read_bytes, rows["read_bytes"].sum(("token", "slot")))


def test_prefill_and_decode_of_a_generation_are_told_apart(session):
    run, steps = generated(session)
    told = [(s.phase, s.n_token, s.n_done, s.n_planned) for s in steps]
    prefill = [("prefill", n, done, 40) for n, done in ((16, 16), (16, 32), (8, 40))]
    assert told == prefill + [("decode", 1, n, 11) for n in range(1, 12)]
    assert len(run.tokens) == 12
    first, last = steps[0], steps[-1]
    assert first.decode.n_token == first.decode.lookups == 0
    assert last.prefill == steps[2].prefill


def test_windows_of_a_score_are_counted_together(session):
    _, steps = scored(session)
    told = [(s.phase, s.n_done, s.n_planned) for s in steps]
    assert told[:2] == [("prefill", 16, 40), ("prefill", 20, 40)]
    assert told[-1] == ("decode", 30, 30)
    assert [s.n_done for s in steps if s.phase == "prefill"] == [16, 20, 36, 40]


def test_arrays_have_one_number_per_layer_and_cannot_be_written(session):
    _, steps = generated(session)
    for name in ("lookups", "misses", "read_bytes"):
        values = getattr(steps[-1], name)
        assert (values.dtype, values.shape) == (np.int64, (session.info()["n_layer"],))
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        steps[-1].n_done = 0


def test_a_step_keeps_its_numbers_while_the_run_goes_on(session):
    seen = []

    def look(step):
        seen.append((step, step.misses.copy(), step.totals.lookups, step.totals.wall_s))

    session.generate(TEXT, n_predict=6, on_step=look)
    for step, misses, lookups, wall in seen:
        np.testing.assert_array_equal(step.misses, misses)
        assert (step.totals.lookups, step.totals.wall_s) == (lookups, wall)


def test_stop_from_within_ends_the_run_after_that_evaluation(session, expected):
    steps = []

    def look(step):
        steps.append(step)
        if step.phase == "decode" and step.n_done == 4:
            session.stop()

    run = session.generate(TEXT, n_predict=50, on_step=look)
    assert run.summary.ended_by == "stopped"
    assert not run.complete
    assert run.trace.attrs["complete"] == 0
    assert run.summary.decode.n_token == 4
    assert run.trace.sizes["token"] == len(run.prompt) + 4
    assert_sums(steps, run.summary)
    assert witness(session) == expected


def test_sums_leave_out_the_evaluation_that_was_cut_off(session, expected):
    """Its loads were counted, though neither its tokens were nor does the trace hold its rows."""
    steps = []
    # The prompt is two evaluations of six layers.
    at_load(session, 6 * 4 + 3, session.stop)
    run = session.generate(prompt_of(session, 24), n_predict=50, on_step=steps.append)
    assert run.summary.ended_by == "stopped"
    assert run.summary.decode.n_token == 2
    assert_sums(steps, run.summary)
    trace = run.trace.isel(token=run.trace["phase"].values == 1)
    assert run.summary.decode.read_bytes == int(trace["read_bytes"].sum())
    assert witness(session) == expected


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("method", ["generate", "score"])
def test_exception_inside_ends_the_run_with_that_very_exception(session, expected, method, where):
    error = Mine("mine")
    steps = []

    def fail(step):
        steps.append(step)
        if step.phase == where:
            raise error

    with pytest.raises(Mine) as caught:
        getattr(session, method)(TEXT, on_step=fail)
    assert caught.value is error
    run = session.last_run
    assert run.summary.ended_by == "failed"
    assert run.trace.attrs["complete"] == 0
    assert run.trace.sizes["token"] == sum(step.n_token for step in steps)
    assert_sums(steps, run.summary)
    assert witness(session) == expected


@pytest.mark.parametrize("also", [False, True], ids=["only-policy", "both"])
def test_evaluation_in_which_the_policy_failed_is_told_and_the_policy_blamed(session, also):
    error = Mine("the policy's")
    steps = []

    def look(step):
        steps.append(step)
        if also and step.phase == "decode" and step.n_done == 3:
            raise RuntimeError("the caller's")

    with pytest.raises(Mine) as caught:
        session.generate(TEXT, n_predict=9, policy=Fails(error), on_step=look)
    assert caught.value is error
    assert_sums(steps, session.last_run.summary)
    assert steps[-1].n_done == 3


def test_session_used_from_within_is_refused_as_it_is_for_policies(session, expected):
    with pytest.raises(bl.errors.SessionError, match="inside its own run"):
        session.generate(TEXT, on_step=lambda step: session.generate("x"))
    assert witness(session) == expected


@pytest.mark.parametrize("method", ["generate", "score"])
def test_what_cannot_be_called_is_refused(session, method):
    before = session.last_run
    with pytest.raises(SettingsError, match="on_step must be a function or None; got 3"):
        getattr(session, method)(TEXT, on_step=3)
    assert session.last_run is before


def test_nothing_is_collected_where_nobody_asks(session, monkeypatch):
    """Left out, it costs nothing: what collects the layers is not even made."""

    def never(*args):
        raise AssertionError("made")

    monkeypatch.setattr("bmoe_lab.runtime.recorded_run.StepTeller", never)
    run = session.generate(TEXT, n_predict=3, on_step=None)
    assert run.summary.decode.lookups > 0
    session.score(TEXT)
    assert inspect.signature(session.generate).parameters["on_step"].default is None


def test_step_is_public():
    assert bl.Step.__module__ == "bmoe_lab.runtime.step"
