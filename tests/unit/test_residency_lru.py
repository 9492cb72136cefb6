from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import residency
from bmoe_lab.errors import PolicyError, SettingsError, UnknownNameError
from bmoe_lab.residency import LRU, token_cycle
from bmoe_lab.testing.suites import ResidencyPolicySuite


class TestLRU(ResidencyPolicySuite):
    def make_policy(self):
        return LRU("1 KiB")


class PlainLRU:
    """The rules of a load, written to be read."""

    def __init__(self, key_bytes, budget):
        self.key_bytes, self.budget = key_bytes, budget
        self.order = OrderedDict()  # oldest first

    @property
    def resident_bytes(self):
        return sum(self.key_bytes[key] for key in self.order)

    def load(self, keys):
        before = set(self.order)
        missing = list(dict.fromkeys(key for key in keys if key not in before))
        for key in keys:
            if key in before:
                self.order.move_to_end(key)
        incoming = sum(self.key_bytes[key] for key in missing)
        victims = []
        while self.resident_bytes + incoming > self.budget:
            victim = next((key for key in self.order if key not in keys), None)
            if victim is None:
                break
            del self.order[victim]
            victims.append(victim)
        for key in keys:
            self.order[key] = None
            self.order.move_to_end(key)
        return [int(key in before) for key in keys], missing, victims


@st.composite
def streams(draw):
    n_key = draw(st.integers(1, 12))
    key_bytes = draw(st.lists(st.integers(0, 9), min_size=n_key, max_size=n_key))
    budget = draw(st.integers(0, max(1, sum(key_bytes))))
    key = st.integers(0, n_key - 1)
    loads = draw(st.lists(st.lists(key, max_size=10), max_size=25))
    return key_bytes, budget, loads


@settings(derandomize=True, deadline=None, max_examples=300)
@given(streams())
def test_load_equals_plain_version_request_by_request(stream):
    key_bytes, budget, loads = stream
    state = LRU().start(key_bytes, budget)
    plain = PlainLRU(key_bytes, budget)
    n_victims = 0
    for keys in loads:
        load = state.load(np.array(keys, dtype=np.int64))
        actual = [load.residency.tolist(), load.missing.tolist(), load.victims.tolist()]
        assert actual == list(plain.load(keys))
        n_victims += len(load.victims)
        assert state.resident_bytes == plain.resident_bytes
        assert state.evictions == n_victims
        assert state.to_arrays()["keys"].tolist() == list(plain.order)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(streams(), st.data())
def test_forget_between_loads_equals_plain_version(stream, data):
    key_bytes, budget, loads = stream
    state = LRU().start(key_bytes, budget)
    plain = PlainLRU(key_bytes, budget)
    for keys in loads:
        load = state.load(np.array(keys, dtype=np.int64))
        _, missing, _ = plain.load(keys)
        failed = data.draw(st.lists(st.sampled_from(missing))) if missing else []
        assert load.missing.tolist() == missing
        state.forget(failed)
        for key in failed:
            plain.order.pop(key, None)
        assert state.to_arrays()["keys"].tolist() == list(plain.order)
        assert state.resident_bytes == plain.resident_bytes


def test_load_below_one_token_cycle_never_hits():
    n_layer, n_expert = 6, 4
    key_bytes = np.full(n_layer * n_expert, 10)
    cycle = token_cycle(np.full(n_layer, 10), 2)
    stream = [np.array([0, 1]) + layer * n_expert for _ in range(20) for layer in range(n_layer)]

    def n_hits(budget):
        state = LRU().start(key_bytes, budget)
        return sum(int(state.load(keys).residency.sum()) for keys in stream)

    assert n_hits(cycle - 2 * 10) == 0
    assert n_hits(cycle) == 2 * n_layer * 19


def test_load_under_budget_0_keeps_only_what_it_asked_for():
    state = LRU().start([5, 5, 5], 0)
    state.load(np.array([0, 1]))
    load = state.load(np.array([2]))
    assert (load.victims.tolist(), state.contains().tolist()) == ([0, 1], [False, False, True])


def test_load_larger_than_the_outputs_so_far_is_reported_in_full():
    keys = np.tile(np.arange(10), 200)
    load = LRU().start(np.ones(10), 5).load(keys)
    assert load.residency.shape == load.first.shape == (2000,)
    assert load.missing.tolist() == list(range(10))


def test_from_arrays_refuses_what_is_no_state():
    policy = LRU()
    with pytest.raises(PolicyError, match=r"a start state of LRU must hold 'keys'; got \['x'\]"):
        policy.from_arrays({"x": np.zeros(1)}, [1, 1], 5)
    for keys in ([0, 0], [2], [-1]):
        with pytest.raises(PolicyError, match="must be distinct and lie in"):
            policy.from_arrays({"keys": np.array(keys)}, [1, 1], 5)


def test_from_arrays_under_a_smaller_budget_trims_at_the_next_load():
    state = LRU().start([1, 1, 1, 1], 4)
    state.load(np.array([0, 1, 2, 3]))
    smaller = LRU().from_arrays(state.to_arrays(), [1, 1, 1, 1], 2)
    assert smaller.load(np.array([0])).victims.tolist() == [1, 2]


def test_load_names_the_row_of_a_key_out_of_range():
    state = LRU().start([1, 1], 5)
    with pytest.raises(PolicyError, match=r"keys must lie in \[0, 2\); got 7 in row 1\."):
        state.load(np.array([0, 7]))


def test_start_refuses_sizes_that_cannot_be():
    with pytest.raises(SettingsError, match="key_bytes must be"):
        LRU().start([1, -1], 5)
    with pytest.raises(SettingsError, match="budget_bytes must be at least 0; got -5"):
        LRU().start([1], -5)


def test_budget_is_stored_as_given_and_read_as_bytes():
    assert LRU("2 GiB").budget_bytes == 2 * 2**30
    assert LRU(4096).budget_bytes == 4096
    assert LRU().budget_bytes is None
    assert repr(LRU("2 GiB")) == "LRU(budget='2 GiB')"
    assert repr(LRU()) == "LRU()"
    with pytest.raises(SettingsError, match="budget must be a size"):
        _ = LRU("12 XB").budget_bytes


def test_get_knows_lru_and_suggests_it():
    assert residency.get("lru") is LRU
    with pytest.raises(UnknownNameError, match=r"residency policy must be one of .*mean 'lru'\?"):
        residency.get("lru_")


def test_token_cycle_sums_layers_of_different_size_and_width():
    assert token_cycle([100, 200, 300], [4, 4, 2]) == 400 + 800 + 600


# --- recorded runs of 26B-120B models -------------------------------------------------------------

RECORDED = [("qwen", 4000, 8469), ("gemma", 4000, 4645), ("gptoss", 3000, 4072)]


def reference_trace(tag):
    folder = os.environ.get("BMOE_LAB_REFERENCE_DATA")
    if not folder:
        pytest.skip("BMOE_LAB_REFERENCE_DATA is not set")
    path = Path(folder) / "bigmoeonedge" / "2026-07-15-route-trace" / f"{tag}.route.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the reference data")
    pandas = pytest.importorskip("pandas")
    return path, pandas.read_csv(path, comment="#")


@pytest.mark.reference_data
@pytest.mark.parametrize(("tag", "budget_mib", "evictions"), RECORDED)
def test_replay_predicts_recorded_residency_of_every_decode_row(tag, budget_mib, evictions):
    path, rows = reference_trace(tag)
    n_expert = 128
    sizes = {}
    with path.open() as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "expert_bytes" in fields:
                sizes[int(fields["layer"])] = int(fields["expert_bytes"])
    layers = sorted(sizes)
    state = LRU().start(
        np.repeat([sizes[layer] for layer in layers], n_expert),
        budget_mib * 2**20,
        n_layer=len(layers),
    )
    rows["key"] = rows["layer"] * n_expert + rows["expert"]
    prefill = rows[rows["phase"] == 0].sort_values(["layer", "step", "slot"])
    decode = rows[rows["phase"] == 1].sort_values(["step", "layer", "slot"])
    read_bytes = 0
    for keys in prefill.groupby("layer")["key"]:
        load = state.load(keys[1].to_numpy())
        read_bytes += state.key_bytes[load.missing].sum()
    assert read_bytes == prefill["expert_bytes"].sum()

    predicted = [
        state.load(keys.to_numpy()).residency.copy()
        for _, keys in decode.groupby(["step", "layer"])["key"]
    ]

    n_wrong = np.count_nonzero(np.concatenate(predicted) != decode["residency"].to_numpy())
    assert n_wrong == 0
    assert state.evictions == evictions
