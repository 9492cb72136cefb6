"""PolicyLab on a session: recording, scoring pinned settings, stopping, taking turns."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.comparison.tree import is_comparison
from bmoe_lab.errors import PolicyError, SessionError
from bmoe_lab.widgets.policy_lab import PolicyLab

TEXT = bl.datasets.heldout("kjv")[0].text[:260]


@pytest.fixture(scope="module")
def session():
    with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_ctx=256, n_threads=1) as opened:
        opened.generate("In the beginning", n_predict=24, record="scores")
        yield opened


@pytest.fixture
def lab(session):
    session.generate("In the beginning", n_predict=24, record="scores")
    made = PolicyLab(session, text=TEXT)
    made.routing = "drop_cold"
    made.parameters = {"frac": 0.75}
    return made


def finished(lab):
    lab.job.wait(120)
    assert lab.live_state == "done", lab.job.error
    return lab.tree()


def test_lab_begins_with_the_cache_of_the_session(lab, session):
    assert (lab.residency, lab.budget) == ("lru", session.cache_budget_bytes)
    assert lab.trace is session.last_run.trace


def test_lab_without_a_run_records_a_trace():
    with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_ctx=256, n_threads=1) as session:
        lab = PolicyLab(session)
        assert lab.state == "no trace"
        lab.ui.n_predict.value = 8
        lab.ui.record.click()
        assert lab.recording.wait(60) == "done", lab.recording.error
        assert lab.state == "ready"
        assert "router_score" in lab.trace
        assert "cache_prior" not in lab.refused


def test_lab_live_tree_is_the_one_that_compare_gives(lab, session):
    lab.pin()
    lab.routing = "cache_prior"
    lab.parameters = {"strength": 0.15}
    lab.pin()
    lab.run_live()
    tree = finished(lab)
    policies = [bl.routing.DropCold(0.75), bl.routing.CachePrior(0.15)]
    expected = bl.compare(session, TEXT, policies=policies, noise_floor=False, progress=False)
    for name in ("nll", "delta_nll", "kl_mean", "hit_rate", "read_bytes_per_token"):
        np.testing.assert_array_equal(tree[name].values, expected[name].values)
    assert is_comparison(tree)
    assert "Live: NLL" in lab.ui.questions.value
    assert "with the model" in lab.ui.live_table.value


def test_lab_live_setting_of_another_cache_is_scored_with_that_cache(lab, session):
    lab.pin()
    lab.residency = "lfu"
    lab.budget = "1 MiB"
    lab.pin()
    lab.routing = "none"
    lab.pin()
    lab.run_live()
    tree = finished(lab)
    with session.with_cache(bl.residency.LFU("1 MiB")) as other:
        expected = bl.compare(
            other, TEXT, policies=[bl.routing.DropCold(0.75)], noise_floor=False, progress=False
        )
    for name in ("nll", "hit_rate", "read_bytes_per_token"):
        assert float(tree[name][2]) == float(expected[name][1])
        assert float(tree[name][3]) == float(expected[name][0])
    assert int(tree["is_lossless"][3]) == 1
    assert "cache_budget_bytes" not in tree.attrs


def test_lab_live_code_gives_the_same_numbers(lab, session):
    lab.pin()
    lab.run_live()
    tree = finished(lab)
    names = {"trace": lab.trace, "session": session}
    exec(lab.code, names)
    (again,) = names["trees"].values()
    np.testing.assert_array_equal(again["delta_nll"].values, tree["delta_nll"].values)


def test_lab_live_refuses_before_anything_runs(lab):
    with pytest.raises(SessionError, match="Press pin"):
        lab.run_live()
    lab.routing = "none"
    lab.residency = "belady"
    lab.pin()
    with pytest.raises(PolicyError, match="needs to know the future"):
        lab.run_live()
    lab.ui.run.click()
    assert "needs to know the future" in lab.ui.live_message.value
    assert lab.live_state == "idle"


def test_lab_stop_keeps_finished_runs(lab):
    lab.pin()
    lab.parameters = {"frac": 1.0}
    lab.pin()
    seen = threading.Event()

    def watch(change):
        if "DropCold" in change.new and " 5 of" not in change.new:
            seen.set()
            lab.stop()

    lab.ui.live_message.observe(watch, "value")
    lab.run_live()
    assert lab.job.wait(120) == "stopped"
    assert seen.is_set()
    tree = lab.tree()
    assert 1 <= len(tree.children) < 3
    assert next(iter(tree.children)) == "lossless"
    assert tree.attrs["complete"] == 0
    assert "kept" in lab.ui.live_message.value


def test_lab_results_stream_in_as_runs_finish(lab):
    lab.pin()
    sizes = []
    lab.ui.live_table.observe(lambda change: sizes.append(change.new.count("<tr>")), "value")
    lab.run_live()
    finished(lab)
    assert sizes[0] < sizes[-1]


def test_two_labs_on_one_session_take_turns(lab, session):
    other = PolicyLab(session, text=TEXT)
    other.routing = "drop_cold"
    states = []
    other.observe(lambda change: states.append(change.new), "live_state")
    for one in (lab, other):
        one.pin()
    lab.run_live()
    other.run_live()
    finished(lab)
    finished(other)
    assert "waiting" in states


def test_lab_failure_is_said_in_the_widget(session):
    class Breaks(bl.routing.RoutingPolicy):
        def __init__(self, at=3):
            self.at = at

        def reset(self, seed=0):
            super().reset(seed)
            self.n_ = 0

        def weigh(self, routing):
            self.n_ += 1
            if routing.positions[0] > 40 + self.at:
                raise ZeroDivisionError("deep in the text")

    session.generate("In the beginning", n_predict=16, record="scores")
    lab = PolicyLab(session, policies=[Breaks], text=TEXT)
    lab.routing = "Breaks"
    lab.pin()
    lab.run_live()
    lab.job.wait(120)
    assert lab.live_state == "failed"
    assert "deep in the text" in lab.ui.live_message.value
    assert list(lab.tree().children) == ["lossless"]
