"""Recorded residency is what the same kernel says of the recorded ids, row for row."""

import json

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.residency import LRU
from bmoe_lab.routing import CachePrior, DropCold, RandomDrop
from bmoe_lab.schema import STATE_PREFIX, Action, Phase, Residency
from tests.gates.harness import open_session

pytestmark = [
    pytest.mark.gate,
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning"),
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.PolicyNeverFiredWarning"),
]

PROMPT = "And it came to pass in those days, that there went out a decree from the king. " * 8
SCORED = [
    "In the beginning God created the heaven and the earth. " * 3,
    "And the earth was void. " * 4,
]
#: Token cycles.
BUDGETS = {"off": 0, "tiny": 0.3, "medium": 1.5, "large": 100}
POLICIES = [
    None,
    DropCold(1.0),
    DropCold(1.0, prefill=True),
    CachePrior(1.0),
    RandomDrop(0.5, prefill=True),
]


@pytest.fixture(params=["demo", "shared", "leading_dense"])
def case(request, demo_case, tiny_case):
    return demo_case if request.param == "demo" else tiny_case(request.param)


@pytest.fixture(params=BUDGETS)
def session(request, case):
    with open_session(case, cache=0) as session:
        budget = int(session.token_cycle_bytes * BUDGETS[request.param])
    with open_session(case, cache=budget) as session:
        yield session


def replay(trace, budget, policy=None):
    """Return residency, read bytes and evictions (by batch) that a cache gives for what ran.

    The cache is an LRU unless `policy` is given.
    """
    policy = LRU() if policy is None else policy
    n_layer, n_expert = trace.sizes["layer"], int(trace.attrs["n_expert"])
    expert_bytes = trace.expert_bytes.values
    key_bytes = np.repeat(expert_bytes, n_expert)
    start = {
        str(name).removeprefix(STATE_PREFIX): variable.values
        for name, variable in trace.variables.items()
        if str(name).startswith(STATE_PREFIX)
    }
    warm = trace.attrs["cache_start"] == "warm"
    assert bool(start) == warm
    state = (
        policy.from_arrays(start, key_bytes, budget, n_layer=n_layer)
        if warm
        else policy.start(key_bytes, budget, n_layer=n_layer)
    )
    # Windows of a cold score are independent of each other.
    cold_windows = not warm and json.loads(trace.attrs["run_settings"])["kind"] == "score"

    applied, chosen = trace.expert_applied.values, trace.expert_chosen.values
    dropped = trace.action.values == Action.dropped
    residency = np.full(applied.shape, Residency.not_routed, np.uint8)
    read_bytes = np.zeros(applied.shape, np.uint32)
    evictions = {}
    batches, turns = trace.batch.values, trace.turn.values
    for batch in np.unique(batches):
        tokens = np.flatnonzero(batches == batch)
        if cold_windows and tokens[0] and turns[tokens[0]] != turns[tokens[0] - 1]:
            state.clear()
        evictions[batch] = 0
        for layer in range(n_layer):
            width = int(trace.n_expert_used.values[layer])
            rows = tokens[applied[tokens, layer, 0] >= 0]
            if not len(rows):
                continue
            ids = applied[rows, layer, :width]
            # A dropped slot shows the residency of the expert that was dropped.
            before = state.contains()[layer * n_expert + chosen[rows, layer, :width]]
            load = state.load(layer * n_expert + ids.ravel().astype(np.int64))
            shown = load.residency.reshape(ids.shape)
            residency[rows, layer, :width] = np.where(dropped[rows, layer, :width], before, shown)
            read_bytes[rows, layer, :width] = load.first.reshape(ids.shape) * expert_bytes[layer]
            evictions[batch] += len(load.victims)
    return residency, read_bytes, evictions


def assert_replays(run, budget, policy=None):
    trace = run.trace
    residency, read_bytes, evictions = replay(trace, budget, policy)
    np.testing.assert_array_equal(residency, trace.residency.values)
    np.testing.assert_array_equal(read_bytes, trace.read_bytes.values)
    first = np.flatnonzero(~np.isnan(trace.evictions.values))
    np.testing.assert_array_equal(first, np.unique(trace.batch.values, return_index=True)[1])
    assert (
        dict(zip(trace.batch.values[first], trace.evictions.values[first], strict=True))
        == evictions
    )

    for phase, totals in (
        (Phase.prefill, run.summary.prefill),
        (Phase.decode, run.summary.decode),
    ):
        tokens = trace.phase.values == phase
        assert trace.read_bytes.values[tokens].sum(dtype=np.int64) == totals.read_bytes
        assert np.nansum(trace.evictions.values[tokens]) == totals.evictions
        assert tokens.sum() == totals.n_token
        lookups, hits = lookups_of(trace.isel(token=tokens))
        assert (lookups, hits) == (totals.lookups, totals.hits)


def lookups_of(trace):
    """Count each distinct expert that ran once per layer and evaluation."""
    lookups = hits = 0
    applied, dropped = trace.expert_applied.values, trace.action.values == Action.dropped
    for batch in np.unique(trace.batch.values):
        tokens = trace.batch.values == batch
        for layer in range(trace.sizes["layer"]):
            ran = ~dropped[tokens, layer] & (applied[tokens, layer] >= 0)
            ids, first = np.unique(applied[tokens, layer][ran], return_index=True)
            lookups += len(ids)
            hits += int((trace.residency.values[tokens, layer][ran][first] == Residency.hit).sum())
    return lookups, hits


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_replay_of_generate_cold_then_warm_equals_recorded(session, policy):
    if session.cache_budget_bytes == 0 and policy is not None and "cache" in policy.needs:
        with pytest.raises(bl.errors.PolicyError, match="must have a cache"):
            session.generate(PROMPT[:60], n_predict=1, policy=policy)
        return
    cold = session.generate(PROMPT[:280], n_predict=12, policy=policy)
    warm = session.generate(PROMPT[:60], n_predict=12, policy=policy, start="warm")
    budget = session.cache_budget_bytes
    assert (cold.trace.phase.values == Phase.prefill).sum() > 2 * 32  # several micro-batches
    assert_replays(cold, budget)
    assert_replays(warm, budget)
    if budget > 50 * session.token_cycle_bytes:
        assert (warm.trace.residency.values[0] == Residency.hit).any()


@pytest.mark.parametrize("start", ["cold", "warm"])
@pytest.mark.parametrize("policy", [None, DropCold(1.0), CachePrior(1.0)], ids=repr)
def test_replay_of_score_in_windows_equals_recorded(demo_case, policy, start):
    with open_session(demo_case, cache=0) as session:
        budget = session.token_cycle_bytes * 3 // 2
    with open_session(demo_case, cache=budget) as session:
        session.generate("Before", n_predict=2)
        run = session.score(SCORED, n_context=8, policy=policy, start=start)
    assert len(np.unique(run.trace.turn)) == 2
    assert_replays(run, budget)


def test_hit_rate_of_trace_equals_summary(demo_case):
    with open_session(demo_case, cache="3 MiB") as session:
        run = session.generate(PROMPT[:280], n_predict=24)
    decode = run.trace.isel(token=run.trace.phase.values == Phase.decode)
    lookups, hits = lookups_of(decode)
    assert hits / lookups == run.summary.decode.hit_rate
    by_layer = bl.metrics.hit_rate(decode, by="layer")
    # Every layer is looked up equally often in decode.
    assert float(by_layer.mean()) == pytest.approx(run.summary.decode.hit_rate, rel=1e-12)


def test_replay_notices_one_wrong_row(demo_case):
    """Test the test: another order of rows, or a lost row, would show."""
    with open_session(demo_case, cache=0) as session:
        budget = session.token_cycle_bytes * 3 // 2
    with open_session(demo_case, cache=budget) as session:
        run = session.generate(PROMPT[:280], n_predict=12)
    assert_replays(run, budget)
    cell = np.argwhere(run.trace.residency.values == Residency.hit)[0]
    run.trace.residency.values[tuple(cell)] = Residency.miss
    with pytest.raises(AssertionError):
        assert_replays(run, budget)
