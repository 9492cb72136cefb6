"""Live equals replay: every residency policy that can run live, row for row, cold and warm."""

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab import residency
from bmoe_lab.routing import DropCold
from bmoe_lab.schema import STATE_PREFIX, Phase
from tests.gates.harness import open_session
from tests.gates.test_replay import assert_replays

pytestmark = [
    pytest.mark.gate,
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning"),
]

PROMPT = "And it came to pass in those days, that there went out a decree from the king. " * 8
#: Token cycles: one budget below all that a token needs, one that keeps what is popular.
BUDGETS = (0.6, 2.0)
ONLINE = [name for name in residency.names() if residency.get(name).online]
#: Settings under which a policy's kernel takes another way.
VARIANTS = {
    "lfu ageing": lambda budget, trace: residency.LFU(budget, ageing=True),
    "lfu forgetting": lambda budget, trace: residency.LFU(budget, keep_counts=False),
    "per_layer lfu": lambda budget, trace: residency.PerLayer("lfu", budget=budget),
    "per_layer visited": lambda budget, trace: residency.PerLayer(trim="visited", budget=budget),
    "pin": lambda budget, trace: residency.Pin.from_trace(trace, budget=budget),
}


def make(name, budget, trace):
    """Return the policy; a profile, where one is needed, is counted in `trace`."""
    if name in VARIANTS:
        return VARIANTS[name](budget, trace)
    return residency.get(name)(budget=budget)


@pytest.fixture(scope="module")
def other(demo_case):
    """Return the trace of another run."""
    with open_session(demo_case, cache=0) as session:
        return session.generate(PROMPT[40:160], n_predict=16).trace


@pytest.fixture(scope="module")
def cycle(other):
    return residency.token_cycle(other.expert_bytes.values, other.n_expert_used.values)


def assert_package_replays(trace, policy):
    again = bl.replay(trace, residency=policy)
    for name in ("residency", "read_bytes", "expert_applied", "action"):
        np.testing.assert_array_equal(again[name].values, trace[name].values, err_msg=name)
    np.testing.assert_array_equal(again["evictions"].values, trace["evictions"].values)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", sorted({*ONLINE, *VARIANTS}))
def test_replay_of_live_runs_cold_then_warm_equals_recorded(demo_case, cycle, other, name, budget):
    policy = make(name, int(cycle * budget), other)
    with open_session(demo_case, cache=policy) as session:
        assert session.info()["residency_policy"] == repr(policy)
        cold = session.generate(PROMPT[:280], n_predict=12)
        warm = session.generate(PROMPT[:30], n_predict=6, start="warm", policy=DropCold(1.0))
    for run in (cold, warm):
        assert_replays(run, policy.budget_bytes, policy)
        assert run.trace.attrs["residency_policy"] == repr(policy)
    assert (cold.trace.phase.values == Phase.prefill).sum() > 2 * 32  # several micro-batches
    assert cold.summary.decode.evictions > 0
    assert cold.summary.decode.hits > 0 or budget < 1
    assert_package_replays(cold.trace, policy)
    assert_package_replays(warm.trace, policy)


@pytest.mark.parametrize("name", ["arc", "s3fifo", "w_tinylfu", "random"])
def test_start_state_of_a_warm_run_survives_its_file(demo_case, cycle, other, tmp_path, name):
    policy = make(name, cycle * 2, other)
    with open_session(demo_case, cache=policy) as session:
        session.generate(PROMPT[:60], n_predict=4)
        warm = session.generate(
            PROMPT[:30], n_predict=4, start="warm", save=tmp_path / "warm.zarr"
        ).trace
    stored = bl.open_trace(tmp_path / "warm.zarr")
    states = {str(name) for name in warm.variables if str(name).startswith(STATE_PREFIX)}
    assert states
    for variable in states:
        assert stored[variable].dtype == warm[variable].dtype
        np.testing.assert_array_equal(stored[variable].values, warm[variable].values)
    assert_package_replays(stored, policy)


def test_session_names_what_a_residency_policy_lacks(demo_case):
    with pytest.raises(bl.errors.SettingsError, match=r"cache must have a budget; got SIEVE\(\)"):
        open_session(demo_case, cache=residency.SIEVE())
    with pytest.raises(bl.errors.PolicyError, match=r"small_frac must be a number in \[0, 1\]"):
        open_session(demo_case, cache=residency.S3FIFO("2 MiB", small_frac=10))


def test_warning_below_one_token_cycle_says_of_whom_it_is_true(demo_case, cycle):
    with pytest.warns(bl.errors.CacheBelowCycleWarning, match=r"so it hits nothing\. Give more"):
        open_session(demo_case, cache=residency.LRU(cycle // 2)).close()
    rest = r"so it hits nothing; what SIEVE\(.*\) keeps longer may hit\. Give more"
    with pytest.warns(bl.errors.CacheBelowCycleWarning, match=rest):
        open_session(demo_case, cache=residency.SIEVE(cycle // 2)).close()


def test_replay_under_another_policy_is_noticed(demo_case, cycle):
    """Test the test: the runs tell the policies apart."""
    with open_session(demo_case, cache=residency.SIEVE(cycle * 2)) as session:
        run = session.generate(PROMPT[:280], n_predict=12)
    for other in (residency.LRU(), residency.FIFO(), residency.Clock(), residency.S3FIFO()):
        with pytest.raises(AssertionError):
            assert_replays(run, cycle * 2, other)
