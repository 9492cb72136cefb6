"""The watched run, on a session that does what the test says."""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from bmoe_lab.errors import PolicyNeverFiredWarning, SessionError
from bmoe_lab.routing import CachePrior, Counters, DropCold, RoutingPolicy
from bmoe_lab.run import Run, Summary
from bmoe_lab.runtime.account import PhaseTotals
from bmoe_lab.runtime.step import Step
from bmoe_lab.testing import make_trace
from bmoe_lab.widgets.live_run import LiveRun

LONG = 30
N_LAYER = 3


def step_of(number, *, phase="decode", n_planned=8):
    """Return the step after `number` decoded tokens; each looks up 4 per layer and misses one."""
    prefill = PhaseTotals(
        n_token=5, n_evaluation=1, lookups=30, hits=0, read_bytes=5 << 20, wall_s=0.5
    )
    decode = PhaseTotals(
        n_token=number,
        n_evaluation=number,
        lookups=12 * number,
        hits=9 * number,
        read_bytes=number << 20,
        wall_s=0.1 * number,
    )
    loads = np.full((3, N_LAYER), (4, 1, 7)[0], np.int64)
    loads[1], loads[2] = 1, 7
    n_token = 5 if phase == "prefill" else 1
    n_done = 5 if phase == "prefill" else number
    planned = 5 if phase == "prefill" else n_planned
    return Step(number, phase, n_token, n_done, planned, prefill, decode, *loads)


def run_of(text, n_decode, *, policy=None, fired=True, ended_by="n_predict"):
    last = step_of(n_decode)
    summary = Summary(
        kind="generate",
        policy="Lossless()" if policy is None else repr(policy),
        lossless=policy is None,
        fired=fired and policy is not None,
        prefill=last.prefill,
        decode=last.decode,
        counters=Counters(examined=40, eligible=30, changed=3 * fired),
        effective="",
        cautions=(),
        ended_by=ended_by,
        n_expert_used=4,
        n_expert_used_model=4,
        cache_budget_bytes=1 << 20,
        token_cycle_bytes=1 << 18,
        direct=True,
        instrumented=True,
    )
    complete = ended_by not in ("stopped", "failed")
    tokens = np.zeros(n_decode + 1, np.int32)
    trace = make_trace(n_token=5 + n_decode, n_layer=N_LAYER, seed=0)
    return Run(text, tokens, tokens * -1.0, trace, summary, complete)


class FakeSession:
    """Says one piece per step; stands still where the test wants it to."""

    def __init__(self, pieces=("a", "b"), *, error=None, fired=True, at=None):
        self.pieces, self.error, self.fired = pieces, error, fired
        self.n_ctx = 64
        self.last_run = None
        self.asked = []
        self.here, self.go = threading.Event(), threading.Event()
        self.at = at  # the number of the step before which it stands still
        self.stops = 0

    def info(self):
        return {
            "n_layer": N_LAYER,
            "n_expert": 16,
            "n_expert_used": 4,
            "cache_budget_bytes": 1 << 20,
            "token_cycle_bytes": 1 << 18,
        }

    def stop(self):
        self.stops += 1
        self.go.set()

    def _stand(self, number):
        if number == self.at:
            self.here.set()
            assert self.go.wait(LONG)

    def generate(self, prompt, *, n_predict, temperature, seed, policy, on_text, on_step):
        self.asked.append((prompt, n_predict, temperature, seed, policy))
        stops = self.stops
        said = []

        def result(ended_by):
            self.last_run = run_of(
                "".join(said), len(said), policy=policy, fired=self.fired, ended_by=ended_by
            )
            return self.last_run

        if not prompt:
            raise SessionError("prompt must not be empty; got nothing.")
        self._stand(0)
        on_step(step_of(0, phase="prefill"))
        for number, piece in enumerate(self.pieces, 1):
            self._stand(number)
            if self.stops > stops:
                return result("stopped")
            said.append(piece)
            on_text(piece)
            on_step(step_of(number))
        if self.error is not None:
            result("failed")
            raise self.error
        run = result("n_predict")
        if policy is not None and not self.fired:
            warnings.warn("never fired", PolicyNeverFiredWarning, stacklevel=2)
        return run


def finished(session, **options):
    live = LiveRun(session, **options)
    live.start()
    live.wait(LONG)
    return live


def follow(live, name):
    """Return the values that a trait takes."""
    values = []
    live.observe(lambda change: values.append(change.new), name)
    return values


def until(live, name, right):
    """Wait until a trait has a value that is right."""
    seen = threading.Event()

    def look(change=None):
        if right(getattr(live, name)):
            seen.set()

    live.observe(look, name)
    look()
    assert seen.wait(LONG), getattr(live, name)
    live.unobserve(look, name)


def drawn(live):
    """Return the shape of the map that is shown, empty while a sentence stands there."""
    data = live._figure.figure["data"]
    if not data:
        return ()
    return tuple(int(n) for n in data[0]["z"]["shape"].split(","))


# -- a run that ends well ------------------------------------------------------------------------


def test_run_is_asked_for_what_the_traits_say():
    policy = DropCold(0.5)
    session = FakeSession()
    live = LiveRun(session, prompt="x", n_predict=5, temperature=0.5, seed=3, policy=policy)
    live.start()
    live.wait(LONG)
    live.prompt, live.n_predict, live.temperature, live.seed, live.policy = "y", 6, 0.0, 4, None
    live.start()
    live.wait(LONG)
    assert session.asked == [("x", 5, 0.5, 3, policy), ("y", 6, 0.0, 4, None)]


def test_controls_and_traits_are_the_same():
    live = LiveRun(FakeSession(), n_predict=5)
    live._n_predict.value = 9
    assert live.n_predict == 9
    live.n_predict = 11
    assert live._n_predict.value == 11
    assert live._n_predict.max == 64  # what fits the context


def test_at_the_end_there_are_run_trace_and_summary():
    session = FakeSession()
    live = finished(session)
    assert live.state == "done"
    assert live.run is session.last_run
    assert live.trace is session.last_run.trace
    assert live.text == "ab"
    assert live._summary.value.count(session.last_run._repr_html_()) == 1
    assert live.status == "done: 3 tokens, ended by n_predict"
    assert live._bar.bar_style == "success"
    assert live._bar.value == 2
    assert repr(live) == "<LiveRun: done: 3 tokens, ended by n_predict>"


def test_policy_is_chosen_and_its_parameters_set_with_controls():
    session = FakeSession()
    live = LiveRun(session)
    assert (live._picker.menu.value, live.policy) == ("lossless", None)
    live._picker.menu.value = "DropCold"
    live._picker.controls["frac"].value = 0.25
    assert live.policy == DropCold(0.25)
    live._picker.controls["prefill"].value = True
    assert live.policy == DropCold(0.25, prefill=True)
    live.start()
    live.wait(LONG)
    assert session.asked[-1][-1] == DropCold(0.25, prefill=True)
    live._picker.menu.value = "lossless"
    assert live.policy is None
    assert live._picker.controls == {}


def test_policy_set_from_python_is_shown():
    live = LiveRun(FakeSession(), policy=DropCold(0.5))
    assert live._picker.menu.value == "DropCold"
    assert live._picker.controls["frac"].value == 0.5
    live.policy = CachePrior(0.3, keep=2)
    assert live._picker.menu.value == "CachePrior"
    assert live._picker.controls["keep"].value == 2
    assert live.policy == CachePrior(0.3, keep=2)
    live.policy = None
    assert (live._picker.menu.value, live._picker.controls) == ("lossless", {})


def test_policy_that_cannot_be_made_is_refused_not_run_as_the_one_before():
    session = FakeSession()
    live = LiveRun(session, policy=DropCold(0.5))
    live._picker.menu.value = "Buddy"  # needs a table
    assert "Buddy: needs an array" in live._status.value
    live.start()
    assert live.wait(LONG) == "failed"
    assert live.error.startswith("Buddy: needs an array (table)")
    assert session.asked == []
    live._picker.menu.value = "DropCold"
    assert live.error == ""
    live.start()
    assert live.wait(LONG) == "done"
    assert isinstance(session.asked[-1][-1], DropCold)


def test_policy_of_the_users_own_gets_controls_too():
    class Mine(RoutingPolicy):
        def __init__(self, n=2):
            self.n = n

        def weigh(self, routing):
            return None

    policy = Mine(3)
    live = LiveRun(FakeSession(), policy=policy)
    assert live.policy is policy
    assert (live._picker.menu.value, live._picker.controls["n"].value) == ("Mine", 3)
    live._picker.controls["n"].value = 4
    assert live.policy == Mine(4)


def test_every_listed_policy_is_one_or_says_why_not():
    live = LiveRun(FakeSession())
    refused = []
    for name in live._picker.menu.options:
        live._picker.menu.value = name
        if live._picker.error:
            refused.append(name)
        elif name != "lossless":
            assert type(live.policy).__name__ == name
    assert refused == ["Buddy", "SensitivitySkip"]


def test_before_the_first_run_there_is_nothing_but_a_sentence():
    live = LiveRun(FakeSession())
    assert (live.state, live.run, live.trace, live.text) == ("idle", None, None, "")
    assert "Nothing has run yet" in live.status
    assert live._figure.figure["layout"]["annotations"][0]["text"].startswith("Nothing has run")


def test_while_it_runs_it_says_how_far_it_is_and_what_it_reads():
    session = FakeSession(tuple("abcdef"), at=5)
    live = LiveRun(session)
    live.start()
    assert session.here.wait(LONG)
    until(live._figure, "version", lambda version: drawn(live) == (N_LAYER, 4))
    assert live.status == "decode: 4 of 8 tokens"
    assert live.text == "abcd"
    assert (live._bar.value, live._bar.max) == (4, 8)
    assert live.state == "running"
    assert live._run_button.disabled
    assert not live._stop_button.disabled
    numbers = live._numbers.value
    # four tokens in 0.4 s, nine hits of twelve lookups, 1 MiB each; five tokens of 5 MiB before
    for cell in (">4<", ">10.0<", ">75.0 %<", ">1.00<", ">5<", ">0.0 %<", ">4.0 MiB<", ">5.0 MiB<"):
        assert cell in numbers
    session.go.set()
    assert live.wait(LONG) == "done"
    assert not live._run_button.disabled
    assert live._stop_button.disabled


def test_prefill_is_shown_apart_from_decode():
    session = FakeSession(at=1)
    live = LiveRun(session)
    live.start()
    until(live._figure, "version", lambda version: drawn(live) == (N_LAYER, 1))
    assert live.status == "prefill: 5 of 5 tokens"
    assert live._figure.figure["layout"]["title"]["text"] == "Misses per layer, prefill"
    assert "–" in live._numbers.value  # nothing is known of the decode
    session.go.set()
    live.wait(LONG)
    assert live._figure.figure["layout"]["title"]["text"] == "Misses per layer, decode"


def test_text_is_escaped_and_keeps_its_white_space():
    live = finished(FakeSession(("<b>", " \n  x")), prompt="<i>&")
    assert live.text == "<b> \n  x"
    assert "&lt;i&gt;&amp;</span>&lt;b&gt; \n  x" in live._text.value
    assert "white-space:pre-wrap" in live._text.value


def test_figure_is_drawn_a_few_times_whatever_the_number_of_tokens():
    live = LiveRun(FakeSession(tuple("x" * 3000)))
    versions = []
    live._figure.observe(lambda change: versions.append(change.new), "version")
    live.start()
    live.wait(LONG)
    assert live.text == "x" * 3000
    assert len(versions) < 100


# -- what must be known of it ---------------------------------------------------------------------


def test_lossless_run_says_so():
    assert finished(FakeSession()).note == "lossless"


def test_lossy_run_is_marked_while_it_runs_and_after():
    session = FakeSession(at=2)
    live = LiveRun(session, policy=DropCold(0.5))
    live.start()
    until(live, "note", lambda note: note == "lossy: DropCold(frac=0.5)")
    session.go.set()
    live.wait(LONG)
    assert live.note == "lossy: DropCold(frac=0.5)"
    subtitle = live._figure.figure["layout"]["title"]["subtitle"]["text"]
    assert subtitle.startswith("lossy: DropCold(frac=0.5)")


def test_policy_that_never_fired_is_said_in_the_widget_and_not_warned_of(recwarn):
    """A warning from a thread ends in a log that nobody reads; the run it came with was lost."""
    live = finished(FakeSession(fired=False), policy=DropCold(0.5))
    assert live.state == "done"
    assert "never fired: it looked at 40 slots and changed none" in live.note
    assert "never fired" in live._status.value
    assert [w for w in recwarn if issubclass(w.category, PolicyNeverFiredWarning)] == []


# -- stop ---------------------------------------------------------------------------------------


def test_stop_ends_the_run_and_keeps_what_there_is():
    session = FakeSession(tuple("abcdef"), at=4)
    live = LiveRun(session)
    live.start()
    assert session.here.wait(LONG)
    live._stop_button.click()
    assert live.wait(LONG) == "stopped"
    assert session.stops == 1
    assert (live.text, live.run, live.run.complete) == ("abc", session.last_run, False)
    assert "cut short" in live.note
    assert live.status == "stopped after 3 decoded tokens"


def test_stop_before_the_first_step_does_not_touch_the_session_until_then():
    """What the session runs until then may be another one's run."""
    session = FakeSession(at=0)
    live = LiveRun(session)
    live.start()
    assert session.here.wait(LONG)
    live.stop()
    assert session.stops == 0
    assert live.state == "stopping"
    assert "after the first evaluation" in live.status
    session.go.set()
    assert live.wait(LONG) == "stopped"
    assert session.stops == 1


def test_stop_while_another_widget_has_the_session_ends_only_the_waiting():
    session = FakeSession(at=1)
    first, second = LiveRun(session), LiveRun(session, prompt="second")
    first.start()
    assert session.here.wait(LONG)
    second.start()
    until(second, "status", lambda status: "another run has it" in status)
    second.stop()
    assert second.wait(LONG) == "stopped"
    assert second.status == "stopped before it began"
    assert (second.run, session.stops, first.state) == (None, 0, "running")
    session.go.set()
    assert first.wait(LONG) == "done"
    assert [prompt for prompt, *_ in session.asked] == ["In the beginning"]


def test_two_widgets_of_one_session_take_turns():
    session = FakeSession(at=1)
    first, second = LiveRun(session), LiveRun(session, prompt="second")
    first.start()
    assert session.here.wait(LONG)
    second.start()
    until(second, "status", lambda status: "waiting for the session: another run" in status)
    session.go.set()
    assert (first.wait(LONG), second.wait(LONG)) == ("done", "done")
    assert [prompt for prompt, *_ in session.asked] == ["In the beginning", "second"]


def test_end_from_outside_is_said():
    session = FakeSession(at=2)
    live = LiveRun(session)
    live.start()
    assert session.here.wait(LONG)
    session.stop()
    assert live.wait(LONG) == "done"
    assert live.status == "stopped from outside after 1 decoded tokens"


def test_session_closed_while_it_runs_is_said():
    class Closing(FakeSession):
        n_ctx = property(lambda self: self._n_ctx(), lambda self, value: None)

        def _n_ctx(self):
            if self.stops:
                raise SessionError("session must be open; got a closed one.")
            return 64

    session = Closing(at=2)
    live = LiveRun(session)
    live.start()
    assert session.here.wait(LONG)
    session.stop()
    live.wait(LONG)
    assert live.status == "stopped: the session was closed after 1 decoded tokens"


# -- failures -----------------------------------------------------------------------------------


def test_refusal_is_shown_and_the_widget_usable_again():
    live = finished(FakeSession(), prompt="")
    assert live.state == "failed"
    assert live.error == "prompt must not be empty; got nothing."
    assert "prompt must not be empty" in live._status.value
    assert (live.run, live._bar.bar_style, live._run_button.disabled) == (None, "danger", False)
    live.prompt = "x"
    live._run_button.click()
    assert live.wait(LONG) == "done"
    assert live.error == ""
    assert "must not be empty" not in live._status.value


def test_words_of_a_failure_are_not_taken_for_markup():
    live = finished(FakeSession(error=ValueError("<b>bad</b>")))
    assert "&lt;b&gt;bad" in live._status.value


def test_run_that_fails_on_its_way_leaves_what_there_is():
    error = ValueError("of the policy")
    session = FakeSession(error=error)
    live = finished(session)
    assert (live.state, live.error) == ("failed", "of the policy")
    assert live.run is session.last_run
    assert live.text == "ab"
    assert "cut short" in live.note


def test_refused_run_does_not_pass_off_an_older_one_as_its_own():
    session = FakeSession()
    session.last_run = run_of("older", 2)
    live = finished(session, prompt="")
    assert live.run is None


def test_run_of_before_is_gone_when_the_next_one_begins():
    session = FakeSession()
    live = finished(session)
    session.at = 0
    live.start()
    assert session.here.wait(LONG)
    assert (live.run, live.text, live._summary.value) == (None, "", "")
    session.go.set()
    live.wait(LONG)


def test_start_while_it_runs_is_refused_and_a_second_click_ignored():
    session = FakeSession(at=1)
    live = LiveRun(session)
    live.start()
    with pytest.raises(SessionError, match="must have ended"):
        live.start()
    live._on_run(None)
    session.go.set()
    assert live.wait(LONG) == "done"
    assert len(session.asked) == 1


def test_closed_session_is_a_sentence():
    class Closed(SimpleNamespace):
        @property
        def n_ctx(self):
            raise SessionError("session must be open; got a closed one.")

        def info(self):
            raise SessionError("session must be open; got a closed one.")

    live = LiveRun(Closed())
    assert live._picker.menu.options == ("lossless",)
    assert "session must be open" in live._status.value


def test_no_thread_is_left_behind():
    finished(FakeSession())
    assert [t.name for t in threading.enumerate() if "bmoe-lab job" in t.name] == []
