"""A sweep says what replays say, labels it, and keeps what it has when it is stopped."""

import json
import os
import signal

import numpy as np
import pytest
import xarray as xr

from bmoe_lab import metrics, residency, routing
from bmoe_lab.errors import (
    BmoeLabWarning,
    PolicyError,
    SettingsError,
    SweepError,
    UnknownNameError,
)
from bmoe_lab.residency import LRU
from bmoe_lab.simulation import replay
from bmoe_lab.simulation.sweeping import sweep
from bmoe_lab.testing import make_trace

BUDGETS = [40_000, 90_000, 160_000]
PHASES = ("prefill", "decode", "all")


def short_trace(**changes):
    shape = {"n_token": 40, "n_layer": 3, "n_expert": 16, "n_prefill": 12, "n_ubatch": 8}
    return make_trace(**{**shape, "seed": 3, **changes})


def quiet(*args, **kwargs):
    return sweep(*args, progress=False, n_jobs=1, **kwargs)


def policy_of(name, trace):
    """Return the policy called `name`, with what it must know of the trace."""
    return residency.Pin.from_trace(trace) if name == "pin" else name


def assert_equals_replay(cell, again, phase):
    """Every figure of one cell is what the metrics say of the replay."""
    for metric in (metrics.hit_rate, metrics.byte_hit_rate, metrics.read_bytes_per_token):
        assert float(cell[f"{metric.__name__}_{phase}"]) == float(metric(again, phase=phase))
    totals = json.loads(again.attrs["replay_totals"])
    parts = [part for name, part in totals.items() if phase in (name, "all")]
    for name in ("lookups", "read_bytes", "evictions"):
        assert float(cell[f"{name}_{phase}"]) == sum(part[name] for part in parts)
    held = again["cache_resident_bytes"].values
    if phase != "all":
        held = held[again["phase"].values == PHASES.index(phase)]
    held = held[~np.isnan(held)]
    assert float(cell[f"resident_bytes_max_{phase}"]) == held.max()
    assert float(cell[f"resident_bytes_mean_{phase}"]) == sum(held.tolist()) / held.size


@pytest.mark.parametrize("name", residency.names())
def test_sweep_of_every_policy_equals_replay_cell_by_cell(name):
    trace = short_trace()
    policy = policy_of(name, trace)
    grid = quiet(trace, residency=[policy], budgets=BUDGETS, phase=PHASES)
    for budget in BUDGETS:
        again = replay(trace, residency=policy, budget=budget)
        for phase in PHASES:
            assert_equals_replay(grid.squeeze().sel(budget=budget), again, phase)


@pytest.mark.parametrize(
    "policy", [routing.DropCold(0.75), routing.CachePrior(0.3), routing.Lossless()], ids=repr
)
def test_sweep_with_routing_equals_replay_cell_by_cell(policy):
    trace = short_trace(scores=True)
    grid = quiet(trace, residency=["lru"], budgets=BUDGETS, routing=[policy], phase=PHASES)
    for budget in BUDGETS:
        again = replay(trace, residency="lru", budget=budget, routing=policy)
        cell = grid.squeeze().sel(budget=budget)
        for phase in PHASES:
            assert_equals_replay(cell, again, phase)
            for metric in (
                metrics.drop_rate,
                metrics.substitution_rate,
                metrics.weight_discarded_frac,
            ):
                expected = float(metric(again, phase=phase))
                np.testing.assert_equal(float(cell[f"{metric.__name__}_{phase}"]), expected)


@pytest.mark.parametrize("changes", [{"policy": "drop"}, {"policy": "substitute"}])
def test_sweep_of_a_lossy_trace_serves_what_ran(changes):
    trace = short_trace(**changes)
    grid = quiet(trace, residency=["lru"], budgets=BUDGETS[:1])
    again = replay(trace, residency="lru", budget=BUDGETS[0])
    assert_equals_replay(grid.squeeze(), again, "decode")


def test_sweep_empties_the_cache_where_the_trace_did():
    trace = short_trace()
    trace["turn"] = ("token", np.repeat([0, 1], 20).astype(np.int32))
    trace["batch"] = ("token", np.where(np.arange(40) < 20, trace.batch, trace.batch + 1))
    trace.attrs["cold_turns"] = 1
    grid = quiet(trace, residency=["lru"], budgets=BUDGETS)
    for budget in BUDGETS:
        cell = grid.squeeze().sel(budget=budget)
        assert_equals_replay(cell, replay(trace, residency="lru", budget=budget), "all")


def test_sweep_starts_cold_whatever_the_run_began_with():
    trace = short_trace()
    cold = quiet(trace, residency=["lru"], budgets=BUDGETS)
    trace.attrs["cache_start"] = "warm"
    xr.testing.assert_identical(cold, quiet(trace, residency=["lru"], budgets=BUDGETS))
    assert cold.attrs["cache_start"] == "cold"


def test_sweep_on_threads_equals_one_thread():
    trace = short_trace()
    one = quiet(trace, residency=["lru", "fifo"], budgets=BUDGETS)
    three = sweep(trace, residency=["lru", "fifo"], budgets=BUDGETS, progress=False, n_jobs=3)
    xr.testing.assert_identical(one, three)


def test_sweep_labels_what_it_holds():
    grid = quiet(
        {"a": short_trace(), "b": short_trace(n_token=20)},
        residency=["lru", LRU(), "fifo"],
        budgets=["40 KiB", 2**20],
        routing=[None, routing.DropCold(0.75)],
        seed=7,
    )
    assert grid.hit_rate_decode.dims == ("trace", "residency", "budget", "routing")
    assert grid.trace.values.tolist() == ["a", "b"]
    assert grid.residency.values.tolist() == ["lru", "LRU()", "fifo"]
    assert grid.budget.values.tolist() == [40 * 2**10, 2**20]
    assert grid.routing.values.tolist() == ["none", "DropCold(frac=0.75)"]
    assert grid.counterfactual.values.tolist() == [0, 1]
    assert int(grid.token_cycle_bytes[0]) == int(metrics.token_cycle_bytes(short_trace()))
    told = {key: grid.attrs[key] for key in ("source", "complete", "seed", "notes")}
    assert told == {"source": "sweep", "complete": 1, "seed": 7, "notes": "[]"}
    for name, variable in grid.data_vars.items():
        assert variable.attrs["units"] in ("1", "byte"), name
        assert "_decode" in name or "_all" in name
    assert np.isnan(grid.drop_rate_decode.sel(routing="none")).all()


def test_sweep_of_one_trace_is_named_by_its_model():
    grid = quiet(short_trace(), residency="lru", budgets=BUDGETS[0])
    assert grid.trace.values.tolist() == ["synthetic"]


def test_sweep_survives_a_file(tmp_path):
    grid = quiet(short_trace(), residency=["lru"], budgets=BUDGETS)
    grid.to_netcdf(tmp_path / "grid.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "grid.nc", engine="h5netcdf") as back:
        xr.testing.assert_equal(grid, back.load())


def test_sweep_phase_without_tokens_is_unknown():
    grid = quiet(short_trace(n_prefill=0), residency=["lru"], budgets=BUDGETS, phase="prefill")
    assert all(np.isnan(variable).all() for variable in grid.data_vars.values())


def test_sweep_budgets_by_trace_leave_the_others_unknown():
    traces = {"a": short_trace(), "b": short_trace(seed=4)}
    grid = quiet(traces, residency=["lru"], budgets={"a": [40_000], "b": [90_000, 40_000]})
    assert np.isnan(grid.hit_rate_decode.sel(trace="a", budget=90_000)).all()
    assert not np.isnan(grid.hit_rate_decode.sel(trace="b")).any()


# --- what cannot be ------------------------------------------------------------------------------


def test_sweep_of_the_future_under_a_lossy_policy_is_unknown_and_says_why():
    names = [name for name in residency.names() if not residency.get(name).online]
    assert names
    asked = {"residency": ["lru", *names], "budgets": BUDGETS}
    with pytest.warns(BmoeLabWarning, match="combinations cannot be and are NaN.*the future"):
        grid = quiet(short_trace(), routing=[None, routing.DropCold(0.75)], **asked)
    lossy = grid.hit_rate_decode.isel(trace=0, routing=1)
    assert not np.isnan(grid.hit_rate_decode.isel(routing=0)).any()
    assert np.isnan(lossy.sel(residency=names)).all()
    assert not np.isnan(lossy.sel(residency="lru")).any()
    notes = json.loads(grid.attrs["notes"])
    assert [note["residency"] for note in notes] == names
    assert notes[0]["budgets"] == BUDGETS
    assert "the future" in notes[0]["reason"]


def test_sweep_of_a_policy_that_lacks_what_it_needs_is_unknown_and_says_why():
    with pytest.warns(BmoeLabWarning, match="residency 'pin'.*profile must be given"):
        grid = quiet(short_trace(), residency=["lru", "pin"], budgets=BUDGETS)
    assert np.isnan(grid.hit_rate_all.sel(residency="pin")).all()
    assert not np.isnan(grid.hit_rate_all.sel(residency="lru")).any()


def test_sweep_of_which_nothing_can_be_is_refused():
    with pytest.raises(PolicyError, match=r"one combination must be possible.*scores"):
        quiet(short_trace(), residency="lru", budgets=BUDGETS, routing=routing.CachePrior(0.1))


def test_sweep_says_if_a_routing_policy_never_fired():
    with pytest.warns(BmoeLabWarning, match=r"DropCold\(frac=0.0\) changed nothing in this sweep"):
        quiet(short_trace(), residency="lru", budgets=BUDGETS, routing=routing.DropCold(0.0))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"residency": ["lruu"]}, UnknownNameError, r"'lru'.*got 'lruu'. Did you mean 'lru'"),
        ({"residency": []}, SettingsError, "residency must hold at least one policy"),
        ({"residency": [3]}, PolicyError, "residency must hold residency policies or their names"),
        ({"residency": ["lru", "lru"]}, SettingsError, "each policy once; got 'lru' twice"),
        ({"residency": [LRU("1 MiB")]}, SettingsError, "budget must be left to the sweep"),
        ({"budgets": ["4 MB"]}, SettingsError, "budgets must be a size such as.*got '4 MB'"),
        ({"budgets": []}, SettingsError, "budgets must hold at least one size"),
        ({"budgets": ["1 KiB", 1024]}, SettingsError, "each size once; got '1 KiB' twice"),
        ({"budgets": np.array([1.5])}, SettingsError, "whole numbers of bytes"),
        ({"budgets": {"b": [1]}}, SettingsError, r"one entry per trace, \['synthetic'\]"),
        ({"routing": [None, None]}, SettingsError, "each policy once; got 'none' twice"),
        ({"routing": ["DropCold"]}, PolicyError, "must be an instance of a RoutingPolicy"),
        ({"phase": "decoded"}, UnknownNameError, "Did you mean 'decode'"),
        ({"n_jobs": 0}, SettingsError, "n_jobs must be a whole number of at least 1"),
        ({"seed": 0.5}, SettingsError, "seed must be a whole number"),
    ],
)
def test_sweep_refuses_what_it_cannot_mean(changes, error, message):
    asked = {"residency": ["lru"], "budgets": BUDGETS, "progress": False, **changes}
    with pytest.raises(error, match=message):
        sweep(short_trace(), **asked)


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ({}, "at least one trace"),
        ([1], "a trace, the path of one, or a dict"),
        (xr.DataTree(), "got a DataTree"),
    ],
)
def test_sweep_refuses_what_is_no_trace(traces, message):
    with pytest.raises(SettingsError, match=message):
        quiet(traces, residency="lru", budgets=BUDGETS)


def test_sweep_without_sizes_of_experts_is_refused():
    with pytest.raises(ValueError, match="expert_bytes"):
        quiet(short_trace().drop_vars("expert_bytes"), residency="lru", budgets=BUDGETS)


# --- policies of users, interrupts, failures ------------------------------------------------------


class Plain(residency.PlainPolicy):
    """A user's policy: the smallest key goes. `fault` is what happens at the second budget."""

    def __init__(self, fault=None, budget=None):
        self.fault = fault
        self.budget = budget

    def reset(self, key_bytes, budget_bytes, n_layer):
        self.fault_ = self.fault if budget_bytes == BUDGETS[1] else None

    def victim(self, evictable):
        if self.fault_ == "raise":
            raise ZeroDivisionError("a slip of the user's")
        if self.fault_ == "interrupt":
            self.fault_ = None
            os.kill(os.getpid(), signal.SIGINT)
        return int(evictable[0])


def test_sweep_takes_a_policy_in_plain_python():
    grid = quiet(short_trace(), residency=[Plain()], budgets=BUDGETS)
    assert grid.residency.values.tolist() == ["Plain()"]
    hits = grid.hit_rate_decode.values.ravel()
    assert (np.diff(hits) >= 0).all()
    assert hits[-1] > 0
    assert (grid.resident_bytes_max_decode.values.ravel() <= BUDGETS).all()


def test_sweep_failing_policy_keeps_what_was_finished():
    with pytest.raises(SweepError) as caught:
        quiet(short_trace(), residency=["lru", Plain("raise")], budgets=BUDGETS)
    message = str(caught.value)
    for part in ("ZeroDivisionError", "a slip", "Plain(fault='raise')", "90000", ".partial"):
        assert part in message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    partial = caught.value.partial
    assert partial.attrs["complete"] == 0
    assert not np.isnan(partial.hit_rate_decode.sel(residency="lru")).any()
    assert np.isnan(partial.hit_rate_decode.isel(residency=1).sel(budget=BUDGETS[1])).all()


def test_sweep_interrupted_returns_what_was_finished():
    trace = short_trace()
    expected = quiet(trace, residency=["lru"], budgets=BUDGETS)
    slow = [Plain("interrupt"), "fifo"]
    with pytest.warns(BmoeLabWarning, match=r"interrupted: \d of 9 cells are finished") as said:
        grid = quiet(trace, residency=["lru", *slow], budgets=BUDGETS)
    assert grid.attrs["complete"] == 0
    assert "interrupted" in grid.attrs["stopped"]
    done = grid.hit_rate_decode.sel(residency="lru", drop=True)
    xr.testing.assert_equal(done, expected.hit_rate_decode.isel(residency=0, drop=True))
    # How far the threads had come is for the machine to say; what is there is what was counted.
    n_done = int(grid.hit_rate_decode.notnull().sum())
    assert f"interrupted: {n_done} of 9" in str(said[0].message)


def test_sweep_interrupted_before_anything_is_finished_raises(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bmoe_lab.simulation.sweeping.evaluate_trace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quiet(short_trace(), residency=["lru"], budgets=BUDGETS)


def test_sweep_shows_progress_unless_told_not_to(capsys, monkeypatch):
    import tqdm.auto

    bars = []

    class Bar(tqdm.auto.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "delay": 0})
            bars.append(self)

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    sweep(short_trace(), residency=["lru"], budgets=BUDGETS, n_jobs=1)
    assert [(bar.n, bar.total) for bar in bars] == [(3 * 40, 3 * 40)]
    quiet(short_trace(), residency=["lru"], budgets=BUDGETS)
    assert len(bars) == 1
