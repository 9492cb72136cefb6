"""A lossy run replayed from the router's recorded choices is the recorded run, row for row.

The recorded choices already hold what the policy's changes did to later layers, so the loop is
closed and nothing may differ: experts, actions, weights, residency, bytes, evictions, counters.
"""

import json

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab import routing
from bmoe_lab.schema import Action
from tests.gates.harness import open_session

pytestmark = [
    pytest.mark.gate,
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning"),
]

PROMPT = "And it came to pass in those days, that there went out a decree from the king. " * 8
N_LAYER = 12  # at least as many as any model here has


def policies():
    """Return every shipped lossy policy at a setting that acts, some in several variants."""
    sensitivity = np.linspace(0.5, 2.0, N_LAYER)
    return {
        "DropCold": routing.DropCold(1.0),
        "DropCold prefill": routing.DropCold(1.0, prefill=True),
        "DropCold plain": routing.DropCold(1.0, renormalise=False),
        "CachePrior": routing.CachePrior(1.0),
        "CachePrior running": routing.CachePrior(0.6, keep=0, range="running"),
        "FewerExperts": routing.FewerExperts(1),
        "RandomDrop": routing.RandomDrop(0.5, prefill=True),
        "RandomSubstitute": routing.RandomSubstitute(0.5),
        "DropBelow": routing.DropBelow(0.3),
        "RatioSkip": routing.RatioSkip(0.9),
        "SensitivitySkip": lambda n: routing.SensitivitySkip(0.1, sensitivity[:n]),
        "TopP": routing.TopP(0.5),
        "MaxRank": routing.MaxRank(keep=1, rank=12),
        "CumSum": routing.CumSum(keep=1, p=0.95),
        "Buddy": "from_trace",
        "ResidentOnly": routing.ResidentOnly(8, 0.5),
    }


@pytest.fixture(scope="module")
def lossless(demo_case):
    with open_session(demo_case, cache=0) as session:
        return session.generate(PROMPT[:280], n_predict=24, record="scores").trace, (
            session.token_cycle_bytes
        )


def made(name, trace):
    policy = policies()[name]
    if policy == "from_trace":
        return routing.Buddy.from_trace(trace)
    return policy(trace.sizes["layer"]) if callable(policy) else policy


def test_every_shipped_policy_is_replayed():
    shipped = {routing.get(name).__name__ for name in routing.names()} - {"Lossless"}
    assert {name.split()[0] for name in policies()} == shipped


@pytest.mark.parametrize("name", policies())
def test_replay_of_a_lossy_run_equals_the_run(demo_case, lossless, name):
    trace, cycle = lossless
    policy = made(name, trace)
    with open_session(demo_case, cache=cycle * 2) as session:
        run = session.generate(PROMPT[:280], n_predict=24, policy=policy, record="scores", seed=5)
        budget = session.cache_budget_bytes
    assert run.summary.counters.changed > 0
    recorded = run.trace
    again = bl.replay(recorded, residency=bl.residency.LRU(budget), routing=policy, seed=5)
    for variable in (
        "expert_applied",
        "action",
        "residency",
        "read_bytes",
        "evictions",
        "cache_resident_bytes",
    ):
        np.testing.assert_array_equal(again[variable], recorded[variable], err_msg=variable)
    substituted = (recorded.action.values == Action.substituted).any(axis=-1)
    np.testing.assert_array_equal(
        again.weight_applied.values[~substituted], recorded.weight_applied.values[~substituted]
    )
    assert np.isnan(again.weight_applied.values[substituted]).all()
    assert again.attrs["policy_counters"] == recorded.attrs["policy_counters"]
    assert json.loads(again.attrs["policy_settings"]) == json.loads(
        recorded.attrs["policy_settings"]
    )


def test_replay_under_another_policy_differs_from_the_run(demo_case, lossless):
    """Test the test: another threshold shows."""
    _, cycle = lossless
    with open_session(demo_case, cache=cycle * 2) as session:
        run = session.generate(PROMPT[:280], n_predict=24, policy=routing.DropCold(1.0))
        budget = session.cache_budget_bytes
    again = bl.replay(run.trace, residency=bl.residency.LRU(budget), routing=routing.DropCold(0.9))
    assert (again.action.values != run.trace.action.values).any()


@pytest.mark.parametrize("layout", ["biased", "fused", "shared"])
def test_replay_ranks_scores_as_the_graph_did(tiny_case, layout):
    """Scores that are no softmax are compared as they are, not as logarithms."""
    policy = routing.CachePrior(0.4)
    with open_session(tiny_case(layout), cache=0) as session:
        cycle = session.token_cycle_bytes
    with open_session(tiny_case(layout), cache=cycle * 2) as session:
        run = session.generate(PROMPT[:120], n_predict=24, policy=policy, record="scores")
        budget = session.cache_budget_bytes
    assert run.trace.score_is_softmax.values.tolist() == (
        [int(layout != "biased")] * run.trace.sizes["layer"]
    )
    again = bl.replay(run.trace, residency=bl.residency.LRU(budget), routing=policy)
    for variable in ("expert_applied", "action", "residency", "read_bytes"):
        np.testing.assert_array_equal(again[variable], run.trace[variable], err_msg=variable)
    assert run.summary.counters.substituted > 0
