"""The policies of the literature, live: neutral ones change no bit, at full strength they fire."""

import json

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import PolicyError
from bmoe_lab.parameters import array_digest
from bmoe_lab.routing import (
    Buddy,
    CumSum,
    DropBelow,
    MaxRank,
    RatioSkip,
    ResidentOnly,
    SensitivitySkip,
    TopP,
)
from bmoe_lab.schema import Action, Phase, Residency
from tests.gates.harness import N_DECODE, assert_same_bits, open_session, streamed
from tests.gates.test_lossy import cells, evicting_cache, watch_loads

pytestmark = [
    pytest.mark.gate,
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning"),
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.PolicyNeverFiredWarning"),
]

#: Softmax scores over one stack and over a fused one; sigmoids with a selection bias.
LAYOUTS = ["demo", "fused", "biased"]
#: By name: how to make the policy at full strength from (layers, experts, a lossless trace).
FULL_STRENGTH = {
    "DropBelow": lambda n_layer, n_expert, trace: DropBelow(1.0),
    "DropBelow in prefill": lambda n_layer, n_expert, trace: DropBelow(1.0, False, prefill=True),
    "RatioSkip": lambda n_layer, n_expert, trace: RatioSkip(1.0),
    "RatioSkip of a trace": lambda n_layer, n_expert, trace: RatioSkip.from_trace(trace),
    "SensitivitySkip": lambda n_layer, n_expert, trace: SensitivitySkip(2.0, np.ones(n_layer)),
    "TopP": lambda n_layer, n_expert, trace: TopP(0.0),
    "TopP of one": lambda n_layer, n_expert, trace: TopP(1.0, k_max=1),
    "MaxRank": lambda n_layer, n_expert, trace: MaxRank(keep=0, rank=n_expert),
    "CumSum": lambda n_layer, n_expert, trace: CumSum(keep=1, p=1.0),
    "Buddy": lambda n_layer, n_expert, trace: Buddy.from_trace(trace, tries=n_expert - 1, keep=0),
    "Buddy by entropy": lambda n_layer, n_expert, trace: Buddy.from_trace(
        trace, tries=n_expert - 1, entropy=0.5
    ),
    "ResidentOnly": lambda n_layer, n_expert, trace: ResidentOnly(every=4, frac=0.25),
    "ResidentOnly in prefill": lambda n_layer, n_expert, trace: ResidentOnly(
        every=8, frac=0.5, keep=1, prefill=True
    ),
}
DROPPING = (DropBelow, RatioSkip, SensitivitySkip, TopP)


@pytest.fixture(params=LAYOUTS)
def case(request, demo_case, tiny_case):
    return demo_case if request.param == "demo" else tiny_case(request.param)


_TRACES = {}


def calibration(case):
    """Return a lossless trace of the case's text, recorded once."""
    if case.path not in _TRACES:
        with open_session(case, cache="1 GiB") as session:
            _TRACES[case.path] = streamed(session, case, record="ids")[1].trace
    return _TRACES[case.path]


def make(name, case):
    trace = calibration(case)
    return FULL_STRENGTH[name](trace.sizes["layer"], int(trace.attrs["n_expert"]), trace)


@pytest.mark.parametrize("name", FULL_STRENGTH)
@pytest.mark.parametrize(
    ("layout", "record"),
    [("demo", "off"), ("demo", "scores"), ("fused", "off"), ("biased", "scores")],
)
def test_neutral_setting_looks_at_every_slot_and_changes_no_bit(
    demo_case, tiny_case, layout, record, name
):
    case = demo_case if layout == "demo" else tiny_case(layout)
    policy = make(name, case).neutral()
    with open_session(case, cache=evicting_cache(case)) as session:
        logits, run = streamed(session, case, policy=policy, record=record)
        n_layer, n_used = session.info()["n_layer"], session.info()["n_expert_used"]
    assert_same_bits(logits, case.expected)
    counters = run.summary.counters
    if not policy.prefill:
        assert counters.routings == N_DECODE * n_layer
    assert counters.examined == counters.routings * n_used > 0
    assert counters.changed == 0
    assert not run.summary.fired


@pytest.mark.parametrize("name", FULL_STRENGTH)
@pytest.mark.parametrize("budget", ["large", "evicting"])
def test_full_strength_fires_and_uses_residents_only(case, name, budget):
    policy = make(name, case)
    with open_session(
        case, cache="1 GiB" if budget == "large" else evicting_cache(case)
    ) as session:
        loaded = watch_loads(session, case)
        logits, run = streamed(session, case, policy=policy)
    counters = run.summary.counters
    assert np.isfinite(logits).all()
    assert loaded["experts"] > 0
    assert run.summary.fired
    assert counters.changed == counters.dropped + counters.substituted > 0
    assert (counters.dropped > 0) == isinstance(policy, DROPPING)
    assert counters.changed <= counters.eligible
    assert (logits.view(np.uint32) != case.expected.view(np.uint32)).any()
    if budget == "evicting":
        assert run.summary.decode.evictions > 0


@pytest.mark.parametrize("name", FULL_STRENGTH)
def test_run_is_the_same_whatever_is_recorded(demo_case, name):
    policy = make(name, demo_case)
    with open_session(demo_case, cache=evicting_cache(demo_case)) as session:
        bare, first = streamed(session, demo_case, policy=policy)
        recorded, second = streamed(session, demo_case, policy=policy, record="scores")
    assert_same_bits(recorded, bare)
    assert first.summary.counters == second.summary.counters


@pytest.mark.parametrize("layout", ["demo", "biased"])
@pytest.mark.parametrize("name", FULL_STRENGTH)
def test_replay_of_a_run_makes_the_same_choices(demo_case, tiny_case, layout, name):
    """A trace of the run holds what the router said under the policy: live equals replay."""
    case = demo_case if layout == "demo" else tiny_case(layout)
    policy, budget = make(name, case), evicting_cache(case)
    with open_session(case, cache=budget) as session:
        _, run = streamed(session, case, policy=policy, record="scores")
    replayed = bl.replay(run.trace, residency=bl.residency.LRU(budget), routing=policy)
    for variable in ("expert_applied", "action", "residency", "read_bytes"):
        np.testing.assert_array_equal(
            replayed[variable].values, run.trace[variable].values, err_msg=variable
        )
    assert json.loads(replayed.attrs["policy_counters"]) == run.summary.counters.to_dict()


def traced(case, policy):
    """Return the decode cells of a recorded run: (chosen, given weights, action, trace)."""
    with open_session(case, cache=evicting_cache(case)) as session:
        _, run = streamed(session, case, policy=policy, record="scores")
    trace = run.trace
    names = ("expert_chosen", "weight_chosen", "action")
    return *(cells(trace, name) for name in names), trace


def heavier(share):
    """Return what the slots hold that weigh more than each."""
    return np.where(share[..., None, :] > share[..., None], share[..., None, :], 0).sum(axis=-1)


def test_trace_of_dropping_policies_drops_exactly_what_the_rules_say(demo_case):
    """The rules, written down once more over the recorded weights."""
    n_layer = calibration(demo_case).sizes["layer"]
    sensitivity = np.linspace(0.5, 4, n_layer)
    ratios = np.linspace(0.3, 0.9, n_layer)
    for policy, rule in (
        (DropBelow(0.22), lambda w, share: share < 0.22),
        (RatioSkip(ratios), lambda w, share: w < ratios[:, None] * w.max(axis=2, keepdims=True)),
        (
            SensitivitySkip(0.1, sensitivity),
            lambda w, share: share < np.sqrt(0.1 / sensitivity)[:, None],
        ),
        (TopP(0.6), lambda w, share: heavier(share) >= 0.6),
    ):
        _, weight, action, _ = traced(demo_case, policy)
        weight = weight.astype(np.float64)
        expected = rule(weight, weight / weight.sum(axis=2, keepdims=True))
        expected &= weight != weight.max(axis=2, keepdims=True)
        np.testing.assert_array_equal(action == Action.dropped, expected, err_msg=repr(policy))
        assert 0 < expected.mean() < 0.9


@pytest.mark.parametrize("layout", ["demo", "biased"])
def test_trace_of_max_rank_takes_residents_of_its_window_only(layout, demo_case, tiny_case):
    case = demo_case if layout == "demo" else tiny_case(layout)
    rank = 12 if layout == "demo" else 6
    chosen, _, action, trace = traced(case, MaxRank(keep=1, rank=rank))
    applied, score = cells(trace, "expert_applied"), cells(trace, "router_score")
    place = (-score).argsort(axis=2, kind="stable").argsort(axis=2)
    newcomer = action == Action.substituted
    assert newcomer.any()
    assert (np.take_along_axis(place, applied, axis=2)[newcomer] < rank).all()
    assert (cells(trace, "residency")[newcomer] == Residency.hit).all()
    assert (cells(trace, "read_bytes")[newcomer] == 0).all()
    best = score.argmax(axis=2)[..., None]
    assert (applied == best).any(axis=2).all()
    assert (np.take_along_axis(place, chosen, axis=2) < chosen.shape[2]).all()


def test_trace_of_buddy_takes_residents_that_ran_beside_the_missing_one(demo_case):
    policy = make("Buddy", demo_case)
    chosen, _, action, trace = traced(demo_case, policy)
    applied = cells(trace, "expert_applied")
    newcomer = np.argwhere(action == Action.substituted)
    assert len(newcomer) > 0
    assert (cells(trace, "residency")[action == Action.substituted] == Residency.hit).all()
    for token, layer, slot in newcomer:
        one, other = chosen[token, layer, slot], applied[token, layer, slot]
        assert policy.table[layer, one, other] > 0


def test_trace_of_resident_only_runs_few_experts_between_two_choices(demo_case):
    """From the second choice on, the experts that run in a window are those of the set."""
    _, _, action, trace = traced(demo_case, ResidentOnly(every=12, frac=0.25))
    applied = cells(trace, "expert_applied")
    assert (action[:12] == Action.kept).all()
    for start in range(12, N_DECODE, 12):
        for layer in range(applied.shape[1]):
            window = applied[start : start + 12, layer]
            assert len(np.unique(window)) <= 8, (start, layer)
    assert (action[12:] == Action.substituted).any(axis=(0, 2)).all()


def test_trace_names_array_parameters_by_shape_and_digest(demo_case):
    policy = make("RatioSkip of a trace", demo_case)
    _, _, _, trace = traced(demo_case, policy)
    params = json.loads(trace.attrs["policy_settings"])["params"]
    assert params["ratio"] == {
        "shape": [6],
        "dtype": "float64",
        "sha256": array_digest(policy.ratio),
    }
    assert trace.attrs["policy"] == repr(policy)
    assert params["ratio"]["sha256"][:8] in trace.attrs["policy"]


@pytest.mark.parametrize("name", ["RatioSkip of a trace", "Buddy"])
def test_calibration_of_another_model_is_refused(demo_case, tiny_case, name):
    with (
        open_session(tiny_case("fused"), cache="1 MiB") as session,
        pytest.raises(PolicyError, match="made for another model"),
    ):
        session.check(make(name, demo_case))


def test_policy_in_decode_only_leaves_the_prompt_alone(demo_case):
    for name in ("DropBelow", "MaxRank", "Buddy", "ResidentOnly"):
        _, _, _, trace = traced(demo_case, make(name, demo_case))
        prompt = cells(trace, "action", Phase.prefill)
        assert np.isin(prompt, (Action.kept, Action.not_routed)).all(), name
