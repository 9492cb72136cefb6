"""The watched run on the demo model: what it shows is what the session gives."""

import threading

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.widgets.live_run import LiveRun
from tests.integration.session_tools import open_demo, witness

LONG = 60


@pytest.fixture
def session():
    with open_demo() as session:
        yield session


def until(live, name, right):
    seen = threading.Event()

    def look(change=None):
        if right(getattr(live, name)):
            seen.set()

    live.observe(look, name)
    look()
    assert seen.wait(LONG), getattr(live, name)


def same_routing(actual, expected):
    names = [
        "expert_chosen",
        "weight_chosen",
        "expert_applied",
        "action",
        "residency",
        "read_bytes",
    ]
    for name in [*names, "token_id", "phase", "batch"]:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@pytest.mark.parametrize("policy", [None, bl.routing.DropCold(0.75)], ids=repr)
def test_what_is_shown_is_the_run_that_the_session_gives(session, policy):
    options = {"n_predict": 24, "policy": policy, "temperature": 0.8, "seed": 7}
    expected = session.generate("In the beginning", **options)
    live = LiveRun(session, prompt="In the beginning", **options)
    live.start()
    assert live.wait(LONG) == "done", live.error
    assert live.text == live.run.text == expected.text
    same_routing(live.trace, expected.trace)
    decode = live.run.summary.decode
    for shown in (
        f">{100 * float(live.trace.moe.hit_rate()):.1f} %<" if policy is None else "decode",
        f">{decode.read_bytes / decode.n_token / 2**20:.2f}<",
        f">{decode.n_token}<",
    ):
        assert shown in live._numbers.value
    assert live._bar.value == live._bar.max == 23
    assert live.note == ("lossless" if policy is None else "lossy: DropCold(frac=0.75)")


def test_two_widgets_of_one_session_give_what_it_gives_alone(session):
    prompts = ["In the beginning", "SCENE II. A room"]
    expected = [session.generate(prompt, n_predict=16).trace for prompt in prompts]
    lives = [LiveRun(session, prompt=prompt, n_predict=16) for prompt in prompts]
    for live in lives:
        live.start()
    assert [live.wait(LONG) for live in lives] == ["done", "done"]
    for live, trace in zip(lives, expected, strict=True):
        same_routing(live.trace, trace)


def test_widget_and_a_cell_that_uses_the_session_take_turns(session):
    expected = session.generate("In the", n_predict=16).trace
    live = LiveRun(session, prompt="In the", n_predict=16)
    live.start()
    mine = session.generate("In the", n_predict=16).trace
    assert live.wait(LONG) == "done"
    same_routing(live.trace, expected)
    same_routing(mine, expected)


def test_a_new_widget_waits_for_the_run_of_the_old_one(session):
    old = LiveRun(session, n_predict=200)
    old.start()
    until(old, "text", bool)
    new = LiveRun(session, n_predict=4)  # the cell run again
    new.start()
    assert old.state == "running"
    old.stop()
    assert (old.wait(LONG), new.wait(LONG)) == ("stopped", "done")
    assert old.run.trace.attrs["complete"] == 0
    assert new.run.complete


def test_stop_keeps_the_trace_so_far_and_the_session_as_good_as_new(session):
    with open_demo() as fresh:
        expected = witness(fresh)
    live = LiveRun(session, n_predict=200)
    live.start()
    until(live, "text", bool)
    live.stop()
    assert live.wait(LONG) == "stopped"
    assert 0 < live.trace.sizes["token"] < 200
    assert live.run.summary.ended_by == "stopped"
    assert witness(session) == expected


def test_session_closed_during_the_run_ends_it_and_is_said():
    session = open_demo()
    live = LiveRun(session, n_predict=200)
    live.start()
    until(live, "text", bool)
    session.close()
    assert live.wait(LONG) == "done"
    assert "the session was closed" in live.status
    assert live.trace is not None
    live.start()
    assert live.wait(LONG) == "failed"
    assert "session must be open" in live.error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": ""}, "prompt must not be empty"),
        ({"prompt": "In the beginning " * 200}, "must fit n_ctx=256"),
        ({"policy": bl.routing.DropCold(7.0)}, "frac"),
        ({"policy": "nothing"}, "policy"),
    ],
    ids=["empty", "long", "refused", "no policy"],
)
def test_what_the_session_refuses_is_said(session, options, said):
    live = LiveRun(session, **({"n_predict": 8} | options))
    live.start()
    assert live.wait(LONG) == "failed"
    assert said in live.error
    live.prompt, live.policy = "In the", None
    live.start()
    assert live.wait(LONG) == "done"


def test_policy_that_never_fired_is_said(session):
    live = LiveRun(session, n_predict=8, policy=bl.routing.DropCold(1e-6))
    live.start()
    assert live.wait(LONG) == "done"
    assert "the policy never fired" in live.note
    assert live.run.summary.counters.changed == 0
