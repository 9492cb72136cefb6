"""Replay: the cache alone, or a routing policy and the cache together."""

import json
import warnings

import numpy as np
import pytest
import xarray as xr

import bmoe_lab as bl
from bmoe_lab import residency, routing
from bmoe_lab.errors import (
    PolicyError,
    PolicyNeverFiredWarning,
    SchemaError,
    SettingsError,
    UnknownNameError,
)
from bmoe_lab.metrics import first_of_load
from bmoe_lab.residency import LRU
from bmoe_lab.routing import CachePrior, Counters, DropCold, FewerExperts, RandomDrop, RoutingPolicy
from bmoe_lab.schema import Action, Residency, validate
from bmoe_lab.simulation import replay
from bmoe_lab.testing import make_trace

SLOTS = ("expert_applied", "weight_applied", "action", "residency", "read_bytes")
CACHE = ("residency", "read_bytes", "evictions", "cache_resident_bytes")


def trace_of(**changes):
    shape = {"n_token": 60, "n_layer": 3, "n_prefill": 17, "n_ubatch": 8, "scores": True, "seed": 3}
    return make_trace(**(shape | changes))


@pytest.fixture(scope="module")
def trace():
    return trace_of()


@pytest.fixture(scope="module")
def budget(trace):
    return trace.attrs["cache_budget_bytes"]


def shipped_policies():
    """Return every shipped policy that is made from numbers alone, at a setting that acts."""
    made = [
        DropCold(1.0),
        DropCold(1.0, renormalise=False),
        DropCold(0.75, prefill=True),
        FewerExperts(2),
        CachePrior(0.5),
        CachePrior(0.5, keep=0, range="running"),
        RandomDrop(0.4, prefill=True),
        routing.RandomSubstitute(0.4),
    ]
    return made


# --- the cache alone ----------------------------------------------------------------------------


def test_replay_of_recorded_cache_equals_trace(trace, budget):
    again = replay(trace, residency=LRU(budget))
    for name in CACHE:
        np.testing.assert_array_equal(again[name].values, trace[name].values, name)
    for name in ("expert_chosen", "expert_applied", "weight_applied", "action", "logprob"):
        np.testing.assert_array_equal(again[name].values, trace[name].values, name)
    validate(again)
    assert again.attrs["source"] == "replay"
    assert again.attrs["lossless"] == 1
    assert "counterfactual" not in again.attrs
    assert json.loads(again.attrs["replayed_from"])["source"] == "synthetic"


@pytest.mark.parametrize("policy", ["drop", "substitute"])
def test_replay_of_lossy_trace_keeps_what_ran(policy):
    lossy = trace_of(policy=policy)
    again = replay(lossy, residency="lru", budget=lossy.attrs["cache_budget_bytes"])
    for name in CACHE:
        np.testing.assert_array_equal(again[name].values, lossy[name].values, name)
    np.testing.assert_array_equal(again.action.values, lossy.action.values)
    assert again.attrs["lossless"] == 0
    validate(again)


def test_replay_leaves_out_what_it_cannot_know(trace, budget):
    again = replay(trace, residency=LRU(budget))
    for name in ("wall_s", "io_s", "manage_s", "callback_s", "major_faults", "rss_bytes"):
        assert name in trace
        assert name not in again
    assert "logprob" not in replay(trace, residency=LRU(budget), routing=DropCold(1.0))


def test_replay_does_not_change_its_argument(trace, budget):
    before = trace.copy(deep=True)
    replay(trace, residency=LRU(budget // 2), routing=DropCold(1.0))
    xr.testing.assert_identical(trace, before)


def test_replay_totals_agree_with_the_rows(trace, budget):
    again = replay(trace, residency=LRU(budget // 2))
    totals = json.loads(again.attrs["replay_totals"])
    lookup = first_of_load(again).values
    for name, phase in (("prefill", 0), ("decode", 1)):
        rows = again.phase.values == phase
        assert totals[name]["lookups"] == lookup[rows].sum()
        hits = (again.residency.values == Residency.hit)[rows] & lookup[rows]
        assert totals[name]["hits"] == hits.sum()
        assert totals[name]["read_bytes"] == again.read_bytes.values[rows].sum(dtype=np.int64)
        assert totals[name]["evictions"] == np.nansum(again.evictions.values[rows])
    missed = totals["decode"]["lookups"] - totals["decode"]["hits"]
    assert missed > 0


def test_replay_of_cold_turns_empties_the_cache_at_each(trace, budget):
    parts = trace.copy(deep=True)
    parts["turn"].values[30:] = 1
    parts.attrs["cold_turns"] = 1
    whole = replay(parts, residency=LRU(budget))
    second = parts.isel(token=slice(30, None))
    alone = replay(second, residency=LRU(budget))
    for name in CACHE:
        np.testing.assert_array_equal(whole[name].values[30:], alone[name].values, name)
    assert (whole.residency.values[30] != Residency.hit).all()


def test_replay_of_cold_turns_with_routing_empties_the_cache_at_each(trace, budget):
    parts = trace.copy(deep=True)
    parts["turn"].values[30:] = 1
    parts.attrs["cold_turns"] = 1

    class Mine(DropCold):
        def weigh(self, routing):
            return self.run_kernel(routing)

    second = parts.isel(token=slice(30, None))
    for policy in (DropCold(1.0), Mine(1.0)):
        whole = replay(parts, residency=LRU(budget), routing=policy)
        alone = replay(second, residency=LRU(budget), routing=policy)
        for name in (*SLOTS, *CACHE):
            np.testing.assert_array_equal(whole[name].values[30:], alone[name].values, name)


def test_replay_of_warm_run_goes_on_from_its_state(trace, budget):
    state = LRU().start(np.repeat(trace.expert_bytes.values, 16), budget, n_layer=3)
    state.load(np.arange(10))
    warm = trace.assign(
        {f"start_state_{k}": (f"{k}_axis0", v) for k, v in state.to_arrays().items()}
    )
    warm.attrs |= {"cache_start": "warm", "residency_policy": repr(LRU(budget))}
    again = replay(warm, residency=LRU(budget // 2))
    assert (again.residency.values[:8, 0] == Residency.hit).any()
    assert again.attrs["cache_start"] == "warm"
    assert "start_state_keys" in again
    cold = replay(warm, residency=LRU(budget // 2), start="cold")
    assert not (cold.residency.values[:8] == Residency.hit).any()
    assert "start_state_keys" not in cold
    warm.attrs["residency_policy"] = "Other(budget=4)"
    with pytest.raises(SettingsError, match="start must be 'cold' for LRU"):
        replay(warm, residency=LRU(budget))


def test_replay_of_an_import_does_not_claim_to_be_lossless(trace, budget):
    imported = trace.copy()
    del imported.attrs["lossless"]
    imported.attrs |= {"source": "import", "engine_summary": "{}", "bigmoeonedge_metrics": "{}"}
    for policy in (None, routing.Lossless()):
        again = replay(imported, residency=LRU(budget), routing=policy)
        assert "lossless" not in again.attrs
        assert "engine_summary" not in again.attrs
        assert "bigmoeonedge_metrics" not in again.attrs
        validate(again)
    assert again.attrs["counterfactual"] == 1  # what an unknown policy did is not undone
    assert replay(imported, residency=LRU(budget), routing=DropCold(1.0)).attrs["lossless"] == 0


def test_replay_of_the_routers_choice_in_a_lossy_run_is_counterfactual(trace, budget):
    again = replay(trace_of(policy="drop"), residency=LRU(budget), routing=routing.Lossless())
    assert again.attrs["counterfactual"] == 1
    assert again.attrs["lossless"] == 1
    assert (again.action.values[again.expert_chosen.values >= 0] == Action.kept).all()
    clean = replay(trace, residency=LRU(budget), routing=routing.Lossless())
    assert clean.attrs["counterfactual"] == 0


def test_replay_keeps_what_width_was_asked_for(trace, budget):
    narrow = trace.assign_attrs(
        session_settings=json.dumps({"n_expert_used": 4, "cache": "1"}), n_expert_used_model=8
    )
    again = replay(narrow, residency=LRU(budget))
    assert json.loads(again.attrs["session_settings"]) == {"n_expert_used": 4}
    assert "n_expert_used=4 of the model's 8" in bl.plots.theme.run_note(again.attrs)


# --- settings -----------------------------------------------------------------------------------


def test_replay_without_a_budget_or_with_two_is_refused(trace):
    with pytest.raises(SettingsError, match=r"budget must be given once.*got none"):
        replay(trace, residency="lru")
    with pytest.raises(SettingsError, match=r"budget must be given once.*got 5 and 6"):
        replay(trace, residency=LRU(5), budget=6)
    with pytest.raises(SettingsError, match="must be left out where the recorded"):
        replay(trace, residency="recorded", budget=6, routing=DropCold(1.0))


def test_replay_with_unknown_names_lists_the_known(trace):
    with pytest.raises(UnknownNameError, match=r"must be one of .*'lru'"):
        replay(trace, residency="lruu", budget=5)
    with pytest.raises(PolicyError, match="residency must be a residency policy"):
        replay(trace, residency=4, budget=5)
    with pytest.raises(UnknownNameError, match=r"start must be one of \['cold', 'recorded'\]"):
        replay(trace, residency=LRU(5), start="warm")


def test_replay_of_recorded_residency_alone_is_refused_as_inert(trace):
    with pytest.raises(SettingsError, match="routing must be given"):
        replay(trace, residency="recorded")


@pytest.mark.parametrize("inert", [{"budget": "1 MiB"}, {"start": "cold"}])
def test_replay_of_recorded_residency_refuses_what_could_not_act(trace, inert):
    with pytest.raises(SettingsError, match=f"{next(iter(inert))} must be left out where the rec"):
        replay(trace, residency="recorded", routing=DropCold(0.5), **inert)


@pytest.mark.parametrize("policy", [None, DropCold(1.0)])
def test_replay_of_a_part_that_routed_nothing_asks_for_nothing(trace, policy):
    # Of the last layer a prompt routes the last token only.
    part = trace.isel(token=slice(0, 3), layer=[-1])
    assert (part.expert_chosen == -1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyNeverFiredWarning)
        again = replay(part, residency=LRU("1 MiB"), routing=policy, start="cold")
    assert np.isnan(again.evictions).all()
    told = {"lookups": 0, "hits": 0, "read_bytes": 0, "evictions": 0}
    assert json.loads(again.attrs["replay_totals"]) == {"prefill": told}


def test_replay_without_sizes_is_refused(trace):
    with pytest.raises(SchemaError, match="must hold 'expert_bytes'"):
        replay(trace.drop_vars("expert_bytes"), residency=LRU(5))


def test_replay_of_experts_that_read_bytes_cannot_hold_is_refused(trace):
    large = trace.copy(deep=True)
    large["expert_bytes"].values[1] = 2**32
    with pytest.raises(SchemaError, match="less than 4 GiB to be replayed; got 4294967296"):
        replay(large, residency=LRU("1 TiB"))
    large["expert_bytes"].values[1] = 2**32 - 1
    assert replay(large, residency=LRU("1 TiB")).read_bytes.max() == 2**32 - 1


def test_replay_with_a_budget_of_the_grid_works(trace):
    size = bl.budgets(trace, n=6)[3]
    assert replay(trace, residency=LRU(size)).attrs["cache_budget_bytes"] == size


def test_replay_of_scoring_policy_without_scores_says_how_to_record(budget):
    bare = trace_of(scores=False)
    with pytest.raises(PolicyError, match=r"record='scores'"):
        replay(bare, residency=LRU(budget), routing=CachePrior(0.5))


def test_replay_of_scoring_policy_without_their_kind_is_refused(trace, budget):
    with pytest.raises(SchemaError, match="score_is_softmax"):
        replay(trace.drop_vars("score_is_softmax"), residency=LRU(budget), routing=CachePrior(0.5))


def test_replay_of_weighing_policy_without_weights_is_refused(trace, budget):
    bare = trace.drop_vars(["weight_chosen", "weight_applied"])
    with pytest.raises(PolicyError, match="must see the router's weights"):
        replay(bare, residency=LRU(budget), routing=DropCold(0.5))


def test_replay_with_cache_off_refuses_policies_that_look_at_it(trace):
    with pytest.raises(PolicyError, match="must have a cache to look at"):
        replay(trace, residency=LRU(0), routing=DropCold(0.5))


def test_replay_of_future_knowing_cache_with_routing_policy_is_refused(trace, budget):
    class Seer(LRU):
        online = False

    with pytest.raises(PolicyError, match="needs to know the future"):
        replay(trace, residency=Seer(budget), routing=DropCold(0.5))
    replay(trace, residency=Seer(budget), routing=routing.Lossless())


# --- both together ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", shipped_policies(), ids=repr)
def test_replay_by_kernel_equals_replay_by_methods(trace, budget, policy):
    """The compiled loop and the engine of a live session agree, counters and all."""

    stage = policy.stage
    methods = {stage: lambda self, seen: self.run_kernel(seen)}
    plain = type("Plain", (type(policy),), methods)(**policy.get_params())
    assert not plain.uses_kernel(stage)
    for cache in ({"residency": LRU(budget // 2)}, {"residency": "recorded"}):
        if cache["residency"] == "recorded" and stage == "select":
            continue
        fast = replay(trace, routing=policy, seed=11, **cache)
        slow = replay(trace, routing=plain, seed=11, **cache)
        for name in (*SLOTS, *(CACHE[2:] if cache["residency"] != "recorded" else ())):
            np.testing.assert_array_equal(fast[name].values, slow[name].values, name)
        assert json.loads(fast.attrs["policy_counters"]) == json.loads(
            slow.attrs["policy_counters"]
        )
        assert fast.attrs["policy_fired"] == 1
        assert fast.attrs["counterfactual"] == 1
        validate(fast)


@pytest.mark.parametrize("policy", shipped_policies(), ids=repr)
def test_replay_counters_agree_with_the_actions(trace, budget, policy):
    again = replay(trace, residency=LRU(budget), routing=policy)
    counters = Counters(
        **{
            name: value
            for name, value in json.loads(again.attrs["policy_counters"]).items()
            if name in Counters.__dataclass_fields__
        }
    )
    acts = np.isin(trace.phase.values, sorted(policy.phases))
    assert counters.routings == (trace.expert_chosen.values[acts, :, 0] >= 0).sum()
    assert counters.dropped == (again.action.values == Action.dropped).sum()
    assert counters.substituted == (again.action.values == Action.substituted).sum()
    assert (again.action.values[~acts] != Action.dropped).all()


def test_replay_drops_only_what_the_replayed_cache_lacks(trace, budget):
    again = replay(trace, residency=LRU(budget // 2), routing=DropCold(1.0))
    dropped = again.action.values == Action.dropped
    assert dropped.any()
    assert (again.residency.values[dropped] == Residency.miss).all()
    assert (again.read_bytes.values[dropped] == 0).all()
    np.testing.assert_allclose(
        again.weight_applied.sum("slot").values, trace.weight_chosen.sum("slot").values, rtol=1e-6
    )


@pytest.mark.parametrize("cold_turns", [False, True])
@pytest.mark.parametrize("name", residency.names())
def test_replay_of_a_lossy_trace_under_any_policy_is_that_of_what_ran(budget, name, cold_turns):
    """Those that know the future were refused, though what ran is as well known as in any trace."""
    trace = trace_of().assign_attrs(cold_turns=int(cold_turns))
    trace["turn"] = trace.turn.copy(data=np.arange(60) // 30)
    lossy = replay(trace, residency=LRU(budget // 2), routing=DropCold(1.0))
    # The same loads without a word of what was dropped.
    ran = lossy.assign(action=lossy.action.where(lossy.action == 255, 0).astype(np.uint8))
    dropped = lossy.action.values == Action.dropped
    given = {"profile": np.ones((3, trace.attrs["n_expert"]))} if name == "pin" else {}
    cache = residency.get(name)(budget=budget // 2, **given)
    actual, expected = replay(lossy, residency=cache), replay(ran, residency=cache)
    for field in ("read_bytes", "evictions", "cache_resident_bytes"):
        np.testing.assert_array_equal(actual[field].values, expected[field].values)
    np.testing.assert_array_equal(
        actual.residency.values[~dropped], expected.residency.values[~dropped]
    )
    if name == "lru":
        np.testing.assert_array_equal(actual.residency.values, lossy.residency.values)


def test_replay_of_recorded_residency_leaves_it_as_it_was(trace):
    again = replay(trace, residency="recorded", routing=DropCold(1.0))
    np.testing.assert_array_equal(again.residency.values, trace.residency.values)
    dropped = again.action.values == Action.dropped
    decode = trace.phase.values == 1
    # In a decode nobody else asks for a dropped expert, so exactly its bytes are saved.
    saved = trace.read_bytes.values[decode][dropped[decode]].sum()
    assert saved > 0
    assert again.read_bytes.values.sum() == trace.read_bytes.values.sum() - saved
    assert "evictions" not in again


def test_replay_of_recorded_residency_still_reads_what_another_token_asks_for():
    trace = make_trace(6, n_layer=1, n_expert=4, n_used=2, n_prefill=6, mask_last_layer=False)
    again = replay(trace, residency="recorded", routing=DropCold(1.0, prefill=True))
    ran = again.expert_applied.values[again.action.values == Action.kept]
    size = int(trace.expert_bytes[0])
    assert again.read_bytes.values.sum() == len(np.unique(ran)) * size


def test_replay_of_recorded_residency_refuses_what_looks_for_other_experts(trace):
    class Mine(RoutingPolicy):
        def select(self, routing):
            return None

    for policy in (CachePrior(0.5), Mine()):
        with pytest.raises(PolicyError, match="no trace records where those were"):
            replay(trace, residency="recorded", routing=policy)


def test_replay_of_recorded_residency_refuses_a_substituted_trace():
    with pytest.raises(SchemaError, match="a policy substituted experts"):
        replay(trace_of(policy="substitute"), residency="recorded", routing=DropCold(0.5))


def test_replay_starts_from_the_routers_choice(budget):
    lossy, lossless = trace_of(policy="drop"), trace_of()
    np.testing.assert_array_equal(lossy.expert_chosen.values, lossless.expert_chosen.values)
    one = replay(lossy, residency=LRU(budget), routing=FewerExperts(2))
    other = replay(lossless, residency=LRU(budget), routing=FewerExperts(2))
    for name in SLOTS:
        np.testing.assert_array_equal(one[name].values, other[name].values, name)


def test_replay_substituted_routing_has_unknown_weights(trace, budget):
    again = replay(trace, residency=LRU(budget // 2), routing=CachePrior(1.0))
    changed = (again.action.values == Action.substituted).any(axis=-1)
    assert changed.any()
    assert np.isnan(again.weight_applied.values[changed]).all()
    np.testing.assert_array_equal(
        again.weight_applied.values[~changed], trace.weight_chosen.values[~changed]
    )


def test_replay_with_neutral_setting_looks_and_changes_nothing(trace, budget):
    for policy in shipped_policies():
        with pytest.warns(PolicyNeverFiredWarning, match="changed nothing in this replay"):
            again = replay(trace, residency=LRU(budget), routing=policy.neutral())
        assert again.attrs["policy_fired"] == 0
        assert json.loads(again.attrs["policy_counters"])["examined"] > 0
        for name in (*SLOTS, *CACHE):
            np.testing.assert_array_equal(again[name].values, trace[name].values, name)


def test_replay_with_same_seed_is_the_same_and_another_is_not(trace, budget):
    def run(seed):
        return replay(trace, residency=LRU(budget), routing=RandomDrop(0.5), seed=seed)

    xr.testing.assert_identical(run(1), run(1))
    assert (run(1).action.values != run(2).action.values).any()


def test_replay_of_a_users_own_policy_sees_what_a_session_shows(trace, budget):
    seen = []

    class Mine(RoutingPolicy):
        def select(self, routing):
            seen.append(("select", routing.layer, routing.positions.tolist()))
            assert routing.scores.shape == (len(routing.ids), 16)
            assert routing.score_kind == "softmax"
            assert not routing.resident.flags.writeable
            ids = routing.ids.copy()
            for row in ids:
                row[-1] = np.setdiff1d(np.arange(16), row)[0]
            return ids

        def weigh(self, routing):
            assert np.isnan(routing.weights).all()

    class Wants(Mine):
        needs = frozenset({"scores"})

    again = replay(trace, residency=LRU(budget), routing=Wants())
    decode = trace.phase.values == 1
    assert len(seen) == decode.sum() * 3
    assert (again.action.values[decode][..., -1] == Action.substituted).all()
    validate(again)


def test_replay_of_a_policy_that_raises_passes_its_exception_on(trace, budget):
    class Broken(RoutingPolicy):
        def weigh(self, routing):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        replay(trace, residency=LRU(budget), routing=Broken())


def test_replay_survives_every_file_format(trace, budget, tmp_path):
    again = replay(trace, residency=LRU(budget), routing=DropCold(1.0))
    for name in ("r.nc", "r.zarr"):
        bl.save_trace(again, tmp_path / name)
        back = bl.open_trace(tmp_path / name)
        xr.testing.assert_identical(back.load(), again)
