"""A user's policy that fails: their own exception, the trace so far, a session that still works."""

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import PolicyError, SessionError
from bmoe_lab.routing import RoutingPolicy
from bmoe_lab.schema import validate
from tests.integration.session_tools import TEXT, open_demo, resources, witness

N_LAYER = 6


class Planned(RoutingPolicy):
    """Answers None until its n-th call, then what it was given."""

    def __init__(self, answer, number=1, prefill=False):
        self.answer = answer
        self.number = number
        self.prefill = prefill

    def reset(self, seed=0):
        self.calls_ = 0

    def _next(self, routing):
        self.calls_ += 1
        return self.answer(routing) if self.calls_ == self.number else None


class Selecting(Planned):
    def select(self, routing):
        return self._next(routing)


class Weighing(Planned):
    def weigh(self, routing):
        return self._next(routing)


class Custom(Exception):
    pass


@pytest.fixture(scope="module")
def expected():
    with open_demo() as session:
        return witness(session)


@pytest.fixture(scope="module")
def lossless():
    with open_demo() as session:
        return session.generate(TEXT, n_predict=20).trace


@pytest.fixture(scope="module")
def session():
    with open_demo() as session:
        yield session


def assert_kept(session, n_token, lossless=None):
    """The run so far is kept as a valid trace, cut short, that says why."""
    run = session.last_run
    assert not run.complete
    assert run.summary.ended_by == "failed"
    assert run.trace.attrs["complete"] == 0
    assert run.trace.sizes["token"] == n_token
    validate(run.trace)
    if lossless is not None:
        for name in ("expert_chosen", "weight_applied", "residency"):
            np.testing.assert_array_equal(run.trace[name], lossless[name][:n_token])


@pytest.mark.parametrize("kind", [Selecting, Weighing])
@pytest.mark.parametrize("evaluation", [1, 5])
@pytest.mark.parametrize("layer", [0, 3, N_LAYER - 1])
def test_policy_that_raises_gives_that_very_exception(
    session, expected, lossless, kind, evaluation, layer
):
    error = Custom("mine")

    def fail(routing):
        raise error

    policy = kind(fail, number=(evaluation - 1) * N_LAYER + layer + 1)
    with pytest.raises(Custom) as caught:
        session.generate(TEXT, n_predict=20, policy=policy)
    assert caught.value is error
    # The evaluation in which it failed went on as the router chose, and is part of the trace.
    n_prompt = len(session.tokenize(TEXT))
    assert_kept(session, n_prompt + evaluation, lossless)
    assert witness(session) == expected


def test_policy_that_raises_in_prefill_keeps_the_evaluations_before(session, expected, lossless):
    error = Custom("mine")

    def fail(routing):
        raise error

    policy = Weighing(fail, number=(N_LAYER - 1) + 2, prefill=True)  # second micro-batch
    with pytest.raises(Custom) as caught:
        session.generate(TEXT, n_predict=4, policy=policy)
    assert caught.value is error
    assert_kept(session, min(32, len(session.tokenize(TEXT))), None)
    assert witness(session) == expected


def test_policy_that_raises_in_the_first_micro_batch_keeps_it(session, expected):
    def fail(routing):
        raise Custom

    policy = Weighing(fail, prefill=True)
    with pytest.raises(Custom):
        session.generate(TEXT, n_predict=4, policy=policy)
    assert_kept(session, 16)
    assert witness(session) == expected


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_policy_that_raises_what_is_no_error_passes_it_on(session, expected, error):
    def fail(routing):
        raise error

    with pytest.raises(type(error)) as caught:
        session.generate(TEXT, n_predict=4, policy=Weighing(fail, number=8))
    assert caught.value is error
    assert not session.last_run.complete
    assert witness(session) == expected


def test_policy_that_raises_with_record_off_keeps_the_summary(session, expected):
    def fail(routing):
        raise Custom

    with pytest.raises(Custom):
        session.generate(TEXT, n_predict=4, policy=Weighing(fail), record="off")
    assert session.last_run.trace is None
    assert session.last_run.summary.ended_by == "failed"
    assert witness(session) == expected


def test_policy_that_raises_saves_the_trace_so_far(session, tmp_path):
    def fail(routing):
        raise Custom

    with pytest.raises(Custom):
        session.generate(TEXT, n_predict=4, policy=Weighing(fail), save=tmp_path / "x.nc")
    opened = bl.open_trace(tmp_path / "x.nc")
    assert opened.identical(session.last_run.trace)
    assert opened.attrs["complete"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.nc"]


WRONG_IDS = {
    "shape": (lambda r: r.ids[:, :-1], r"shape \(token, slot\)"),
    "flat": (lambda r: r.ids.ravel(), r"shape \(token, slot\)"),
    "rows": (lambda r: np.repeat(r.ids, 2, axis=0), r"shape \(token, slot\)"),
    "float": (lambda r: r.ids.astype(float), "integers"),
    "bool": (lambda r: r.ids > 3, "integers"),
    "object": (lambda r: r.ids.astype(object), "integers"),
    "text": (lambda r: "experts", r"shape \(token, slot\)"),
    "too large": (lambda r: r.ids + 32, r"lie in \[0, 32\)"),
    "negative": (lambda r: r.ids - 100, r"lie in \[0, 32\)"),
    "huge": (lambda r: r.ids.astype(np.uint64) + np.uint64(2**63), r"lie in \[0, 32\)"),
    "wraps": (lambda r: r.ids.astype(np.int64) + 2**32, r"lie in \[0, 32\)"),
    "repeated": (lambda r: np.repeat(r.ids[:, :1], 4, axis=1), "distinct"),
}
WRONG_WEIGHTS = {
    "shape": (lambda r: r.weights[:, :-1], r"shape \(token, slot\)"),
    "scalar": (lambda r: 0.5, r"shape \(token, slot\)"),
    "integer": (lambda r: r.ids, "bool .* or float"),
    "complex": (lambda r: r.weights.astype(complex), "bool .* or float"),
    "NaN": (lambda r: r.weights * np.nan, "finite"),
    "infinite": (lambda r: r.weights * np.inf, "finite"),
    "overflow": (lambda r: np.full(r.weights.shape, 1e300), "finite"),
    "all zero": (lambda r: r.weights * 0, "at least one"),
}


def assert_refused(session, expected, policy, message):
    with pytest.raises(PolicyError, match=message) as caught:
        session.generate(TEXT, n_predict=4, policy=policy)
    assert "\n" not in str(caught.value)
    assert (
        "layer 2" in str(caught.value)
        or "shape" in message
        or "dtype" in str(caught.value)
        or ("at least" in message)
    )
    assert_kept(session, len(session.tokenize(TEXT)) + 1)
    assert witness(session) == expected


@pytest.mark.parametrize("name", WRONG_IDS)
def test_policy_with_wrong_ids_is_told_what_is_wrong(session, expected, name):
    answer, message = WRONG_IDS[name]
    assert_refused(session, expected, Selecting(answer, number=3), message)


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_policy_with_wrong_weights_is_told_what_is_wrong(session, expected, name):
    answer, message = WRONG_WEIGHTS[name]
    assert_refused(session, expected, Weighing(answer, number=3), message)


@pytest.mark.parametrize("name", ["ids", "weights", "scores", "resident", "positions"])
def test_policy_that_writes_into_what_it_sees_fails(session, expected, name):
    def write(routing):
        getattr(routing, name)[...] = 0

    with pytest.raises(ValueError, match="read-only"):
        session.generate(TEXT, n_predict=4, policy=Weighing(write), record="scores")
    assert_kept(session, len(session.tokenize(TEXT)) + 1)
    assert witness(session) == expected


def test_policy_may_keep_what_it_saw_without_harm(session, expected):
    """Views are overwritten by later layers, never freed."""
    kept = []

    class Keeping(RoutingPolicy):
        def weigh(self, routing):
            kept.append((routing.ids, routing.weights, routing.resident))

    with pytest.warns(bl.errors.PolicyNeverFiredWarning):
        session.generate(TEXT, n_predict=4, policy=Keeping())
    assert all(np.isfinite(weights).all() for _, weights, _ in kept)
    assert witness(session) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.generate("x", n_predict=1),
        lambda s: s.score(TEXT),
        lambda s: bl.compare(s, TEXT, policies=[bl.routing.DropCold(1.0)]),
        lambda s: s.close(),
    ],
    ids=["generate", "score", "compare", "close"],
)
def test_policy_that_calls_its_own_session_is_refused(session, expected, call):
    with pytest.raises(SessionError, match="inside its own run"):
        session.generate(TEXT, n_predict=4, policy=Weighing(lambda routing: call(session)))
    assert_kept(session, len(session.tokenize(TEXT)) + 1)
    assert witness(session) == expected


def test_policy_may_stop_its_own_session(session, expected):
    """What a policy may do from inside: ask for the end."""
    policy = Weighing(lambda routing: session.stop(), number=N_LAYER * 3)
    run = session.generate(TEXT, n_predict=20, policy=policy)
    assert run.summary.ended_by == "stopped"
    assert not run.complete
    assert witness(session) == expected


def test_policy_that_uses_another_session_works(session, expected):
    with open_demo() as other:
        policy = Weighing(lambda routing: other.generate("x", n_predict=1) and None)
        with pytest.warns(bl.errors.PolicyNeverFiredWarning):
            run = session.generate(TEXT, n_predict=4, policy=policy)
    assert run.complete
    assert witness(session) == expected


@pytest.mark.parametrize("where", ["on_text", "observe", "progress"])
def test_callback_that_raises_gives_that_very_exception(session, expected, where):
    error = Custom("mine")

    def fail(*args):
        raise error

    run = session.generate if where == "on_text" else session.score
    with pytest.raises(Custom) as caught:
        run(TEXT, **{where: fail})
    assert caught.value is error
    assert session.last_run.trace.attrs["complete"] == 0
    assert witness(session) == expected


def test_failure_in_a_constructor_of_the_clone_comes_before_the_run(session, expected):
    class NotAClone(RoutingPolicy):
        def __init__(self, value):
            self.other = value

        def weigh(self, routing):
            return None

    before = session.last_run
    with pytest.raises((PolicyError, AttributeError, TypeError)):
        session.generate(TEXT, n_predict=2, policy=NotAClone(3))
    assert session.last_run is before
    assert witness(session) == expected


def test_policy_that_fails_holds_no_session_back():
    """An exception that a user keeps must not keep the model open."""
    with open_demo() as session:  # what an import opens stays open
        session.generate(TEXT, n_predict=2)
    before = resources()
    session = open_demo()

    def fail(routing):
        raise Custom

    with pytest.raises(Custom) as caught:
        session.generate(TEXT, n_predict=2, policy=Weighing(fail))
    session.close()
    assert resources() == before
    assert caught.value is not None
