"""PolicyLab without a browser: traits and controls in step, one redraw a change, exact numbers."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import PolicyError, SettingsError, UnknownNameError
from bmoe_lab.routing import RoutingPolicy
from bmoe_lab.widgets.policy_lab import PolicyLab
from tests.unit.edge_traces import EDGE_TRACES


class TwoThenResident(RoutingPolicy):
    """The ten lines of the documentation."""

    needs = frozenset({"cache"})

    def __init__(self, n_sure=2):
        self.n_sure = n_sure

    def weigh(self, routing):
        drop = ~routing.resident[routing.ids]
        drop[:, : self.n_sure] = False
        return drop


class Raising(RoutingPolicy):
    def __init__(self, n=1):
        self.n = n

    def weigh(self, routing):
        raise ZeroDivisionError("of my own")


@pytest.fixture
def trace():
    return bl.testing.make_trace(n_token=48, n_layer=3, scores=True, seed=0)


@pytest.fixture
def lab(trace):
    return PolicyLab(trace)


def control(lab, name):
    return next(one for one in lab.ui.parameters.children if one.description == name)


def test_lab_numbers_are_those_of_replay(lab, trace):
    lab.routing = "drop_cold"
    lab.parameters = {"frac": 1.0}
    lab.budget = "150 KiB"
    run = bl.replay(
        trace,
        residency="lru",
        budget="150 KiB",
        routing=bl.routing.DropCold(1.0),
        start="cold",
    )
    base = bl.replay(trace, residency="lru", budget="150 KiB", start="cold")
    for name in ("hit_rate", "read_bytes_per_token", "drop_rate", "weight_discarded_frac"):
        metric = getattr(bl.metrics, name)
        assert lab.numbers["setting"][name] == float(metric(run)), name
        assert lab.numbers["lossless"][name] == float(metric(base)), name
    assert lab.result.equals(run)


def test_lab_redraws_once_per_change(lab):
    for change in (
        lambda: setattr(lab, "routing", "drop_cold"),
        lambda: setattr(lab, "parameters", {"frac": 0.9}),
        lambda: setattr(control(lab, "frac"), "value", 0.7),
        lambda: setattr(lab, "budget", 120_000),
        lambda: setattr(lab.ui.budget, "value", lab.ui.budget.options[2][1]),
        lambda: setattr(lab.ui.residency, "value", "lfu"),
        lambda: setattr(lab, "quantity", "bytes"),
        lambda: lab.pin(),
        lambda: setattr(lab, "routing", "none"),
        lambda: lab.clear(),
    ):
        before = lab.view.version
        change()
        assert lab.view.version == before + 1


def test_lab_does_nothing_where_nothing_changed(lab):
    before = lab.view.version
    lab.budget = lab.budget
    lab.parameters = {}
    assert lab.view.version == before


def test_lab_traits_and_controls_follow_each_other(lab):
    lab.routing = "cache_prior"
    assert lab.ui.routing.value == "cache_prior"
    assert lab.parameters == {"strength": 0.5, "keep": 1, "range": "token"}
    control(lab, "range").value = "running"
    assert lab.parameters["range"] == "running"
    lab.parameters = {"keep": 2}
    assert control(lab, "keep").value == 2
    assert lab.parameters["range"] == "running"
    lab.ui.residency.value = "sieve"
    assert lab.residency == "sieve"
    lab.budget = "100 KiB"
    assert lab.ui.budget.value == 102_400


def test_lab_routing_and_parameters_can_be_set_together(lab):
    before = lab.view.version
    with lab.hold_trait_notifications():
        lab.routing = "drop_cold"
        lab.parameters = {"frac": 0.25}
    assert lab.parameters["frac"] == 0.25
    assert lab.view.version == before + 1


def test_lab_refused_value_keeps_the_last_picture_and_says_so(lab):
    lab.routing = "drop_cold"
    numbers, version = lab.numbers, lab.view.version
    lab.parameters = {"frac": 3.0}
    assert lab.state == "stale"
    assert "frac must be a number in [0, 1]" in lab.ui.message.value
    assert "Stale" in lab.ui.message.value
    assert (lab.numbers, lab.view.version) == (numbers, version)
    with pytest.raises(SettingsError, match="refused"):
        lab.pin()
    lab.parameters = {"frac": 0.5}
    assert lab.state == "ready"
    assert "Stale" not in lab.ui.message.value


def test_lab_offline_policy_with_routing_says_why_not(lab):
    lab.routing = "drop_cold"
    lab.residency = "belady"
    assert lab.state == "stale"
    assert "needs to know the future" in lab.ui.message.value


def test_lab_open_loop_is_said_while_a_policy_is_on(lab):
    assert "counterfactual" not in lab.ui.message.value
    lab.routing = "drop_cold"
    assert "counterfactual (open loop)" in lab.ui.message.value
    assert "counterfactual (open loop)" in lab.view.figure["layout"]["title"]["subtitle"]["text"]


def test_lab_policy_that_never_fired_says_so(lab):
    lab.routing = "drop_cold"
    lab.parameters = {"frac": 0.0}
    assert "never fired" in lab.ui.message.value
    assert "never fired" in lab.ui.questions.value


def test_lab_lists_refused_policies_with_their_reason():
    lab = PolicyLab(EDGE_TRACES["no scores"]())
    assert "record='scores'" in lab.refused["cache_prior"]
    assert "pass an instance" in lab.refused["sensitivity_skip"]
    with pytest.raises(PolicyError, match="record='scores'"):
        lab.routing = "cache_prior"


def test_lab_unknown_names_are_answered_with_the_known(lab):
    with pytest.raises(UnknownNameError, match="drop_cold"):
        lab.routing = "drop_colt"
    with pytest.raises(UnknownNameError, match="lru"):
        lab.residency = "lru_"
    lab.routing = "drop_cold"
    with pytest.raises(UnknownNameError, match="frac"):
        lab.parameters = {"frack": 1}


def test_lab_takes_own_classes_and_instances(trace):
    given = bl.routing.SensitivitySkip(0.1, np.ones(3))
    lab = PolicyLab(trace, policies=[TwoThenResident, given])
    lab.routing = "TwoThenResident"
    lab.parameters = {"n_sure": 1}
    assert lab.numbers["setting"]["drop_rate"] > 0
    lab.routing = repr(given)
    assert lab.parameters["threshold"] == 0.1
    assert lab.setting.routing == given


def test_lab_own_policy_that_raises_is_said_in_the_widget(trace):
    lab = PolicyLab(trace, policies=[Raising])
    lab.routing = "Raising"
    assert lab.state == "stale"
    assert "of my own" in lab.ui.message.value


def test_lab_pinned_series_keep_their_colours(lab):
    lab.routing = "drop_cold"
    for frac in (0.5, 0.75, 1.0):
        lab.parameters = {"frac": frac}
        lab.pin()
    colours = {one.name: one.style for one in lab.pinned}
    assert len(set(colours.values())) == 3
    lab.unpin(lab.pinned[0].name)
    assert {one.name: one.style for one in lab.pinned}.items() <= colours.items()
    with pytest.raises(SettingsError, match="pinned once"):
        lab.pin()
    lab.pinned = []
    assert lab.ui.pinned.children == ()


@pytest.mark.parametrize(
    ("residency", "routing", "parameters"),
    [
        ("lru", "drop_cold", {"frac": 1.0}),
        ("per_layer", "cache_prior", {"strength": 0.25, "range": "running"}),
        ("recorded", "drop_below", {"threshold": 0.2}),
        ("belady", "none", {}),
        ("s3fifo", "TwoThenResident", {"n_sure": 1}),
    ],
)
def test_lab_code_gives_the_numbers_that_are_shown(trace, residency, routing, parameters):
    lab = PolicyLab(trace, policies=[TwoThenResident])
    lab.routing = "drop_cold"
    lab.pin()
    with lab.hold_trait_notifications():
        lab.residency, lab.routing = residency, routing
    lab.parameters = parameters
    assert lab.state == "ready"
    names = {"trace": trace, "TwoThenResident": TwoThenResident}
    exec(lab.code, names)
    found = names["numbers"]
    for ours, theirs in (("setting", "this setting"), ("lossless", "lossless baseline")):
        assert len(found[theirs]) == 5
        for name, value in found[theirs].items():
            assert lab.numbers[ours][name] == value
    pinned = lab.pinned[0]
    assert found[pinned.name].items() <= pinned.outcome.numbers.items()


def test_lab_code_of_an_instance_with_an_array_names_it(trace):
    given = bl.routing.SensitivitySkip(0.1, np.ones(3))
    lab = PolicyLab(trace, policies=[given])
    lab.routing = repr(given)
    lab.parameters = {"threshold": 0.2}
    names = {"trace": trace, "given_SensitivitySkip": given}
    exec(lab.code, names)
    assert names["numbers"]["this setting"]["drop_rate"] == lab.numbers["setting"]["drop_rate"]


def test_lab_tree_holds_a_replay_per_setting_and_survives_the_disk(lab, tmp_path):
    lab.routing = "drop_cold"
    lab.pin()
    tree = lab.tree()
    assert tree["arm_name"].values.tolist()[:2] == ["lossless", "this setting"]
    assert float(tree["hit_rate"][1]) == lab.numbers["setting"]["hit_rate"]
    assert len(tree.children) == 3
    tree.to_netcdf(tmp_path / "tree.nc", engine="h5netcdf")


def test_lab_lossy_trace_has_the_routers_own_choice_as_baseline():
    trace = EDGE_TRACES["lossy"]()
    lab = PolicyLab(trace)
    assert lab.numbers["lossless"]["drop_rate"] == 0
    assert lab.numbers["setting"]["drop_rate"] == float(bl.metrics.drop_rate(trace)) > 0


def test_lab_budget_says_where_the_cliff_is(lab, trace):
    cycle = int(bl.metrics.token_cycle_bytes(trace))
    lab.budget = cycle - 1
    assert "below the cliff" in lab.ui.budget_words.value
    lab.budget = cycle
    assert "below the cliff" not in lab.ui.budget_words.value
    sizes = [value for _, value in lab.ui.budget.options]
    assert sizes[0] < cycle
    assert sizes[-1] == int(trace["expert_bytes"].sum()) * trace.attrs["n_expert"]


@pytest.mark.parametrize("edge", EDGE_TRACES)
def test_lab_of_an_edge_is_a_picture_or_a_sentence(edge):
    lab = PolicyLab(EDGE_TRACES[edge]())
    if edge in ("empty", "no residency"):
        assert lab.state == "unable"
        assert "must" in lab.ui.message.value
        return
    assert lab.state == "ready"
    for routing in ("drop_cold", "random_substitute", "fewer_experts", "none"):
        if routing in lab.refused:
            continue
        lab.routing = routing
        for quantity in ("hit_rate", "bytes", "misses"):
            lab.quantity = quantity
        assert "rror" not in lab.ui.message.value
    for residency in ("recorded", "lfu", "belady", "per_layer"):
        lab.residency = residency
    assert lab.view.version > 3


def test_lab_repr_is_a_short_line(lab):
    assert "\n" not in repr(lab)
    assert len(repr(lab)) < 120


@pytest.mark.reference_data
def test_lab_change_takes_at_most_120_ms():
    folder = os.environ.get("BMOE_LAB_REFERENCE_DATA")
    if not folder:
        pytest.skip("BMOE_LAB_REFERENCE_DATA is not set")
    path = Path(folder) / "bigmoeonedge" / "2026-07-15-route-trace" / "qwen.route.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the reference data")
    lab = PolicyLab(bl.from_bigmoeonedge(path))
    lab.routing = "drop_cold"
    times = []
    for _, budget in lab.ui.budget.options[:20]:
        begin = time.perf_counter()
        lab.ui.budget.value = budget
        times.append(time.perf_counter() - begin)
    # Best of many, not the median: the machine is shared.
    assert sorted(times)[5] < 0.12
