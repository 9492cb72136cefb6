"""Replays of three recorded traces of 26B-120B models reproduce the published figures.

Source: BigMoeOnEdge, route traces of 2026-07-15; the re-simulated drop tables were recomputed from
the same files with an independent script.
"""

import json
import warnings

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.converters import from_bigmoeonedge
from bmoe_lab.errors import PolicyNeverFiredWarning
from bmoe_lab.residency import LRU
from bmoe_lab.routing import DropCold, FewerExperts
from bmoe_lab.schema import validate
from bmoe_lab.simulation import load_stream

pytestmark = pytest.mark.reference_data

BUDGET = {"qwen": "4000 MiB", "gemma": "4000 MiB", "gptoss": "3000 MiB"}
TAGS = list(BUDGET)
FRACTIONS = (0.25, 0.5, 0.75, 1.0)

# Reads avoided %, weight discarded %.
STATIC = {
    "qwen": [(0.07, 0.00), (5.84, 0.49), (36.83, 4.44), (66.13, 9.46)],
    "gemma": [(1.92, 0.06), (13.30, 0.87), (41.23, 4.09), (67.35, 8.18)],
    "gptoss": [(0.08, 0.01), (1.69, 0.36), (11.57, 4.00), (54.45, 25.19)],
}
STATIC_DROPPED = {
    "qwen": (0.01, 1.13, 7.26, 13.07),
    "gemma": (0.32, 2.36, 7.43, 12.21),
    "gptoss": (0.04, 0.93, 6.38, 30.03),
}
# Reads avoided %, weight discarded %, routings' slots dropped %.
DYNAMIC = {
    "qwen": [(0.09, 0.00, 0.01), (6.79, 0.53, 1.23), (45.01, 4.91, 8.11), (72.87, 12.15, 17.02)],
    "gemma": [(1.59, 0.06, 0.37), (16.51, 1.00, 2.74), (45.22, 4.84, 9.08), (73.07, 10.89, 16.75)],
    "gptoss": [(0.08, 0.01, 0.04), (1.61, 0.41, 1.06), (10.46, 4.34, 6.97), (54.76, 27.73, 33.18)],
}
# Experts kept -> reads avoided %, weight discarded %.
KEEP = {
    "qwen": {5: (23.17, 10.60), 4: (42.82, 22.70), 3: (58.82, 36.78), 2: (73.54, 53.38),
             1: (87.24, 73.47)},
    "gemma": {5: (20.28, 9.80), 4: (39.44, 20.84), 3: (56.13, 33.56), 2: (70.31, 48.86),
              1: (84.21, 68.85)},
    "gptoss": {1: (54.45, 42.32)},
}  # fmt: skip


@pytest.fixture(scope="module")
def traces(reference_data):
    folder = reference_data / "bigmoeonedge" / "2026-07-15-route-trace"
    return {tag: from_bigmoeonedge(folder / f"{tag}.route.csv") for tag in TAGS}


def decode_reads(trace):
    return int(trace.read_bytes.values[trace.phase.values == 1].sum(dtype=np.int64))


def percent(part, whole):
    return round(100 * part / whole, 2)


def counters(trace):
    return json.loads(trace.attrs["policy_counters"])


@pytest.mark.parametrize("tag", TAGS)
def test_replay_of_lru_gives_the_recorded_residency_of_every_decode_row(traces, tag):
    trace = traces[tag]
    again = bl.replay(trace, residency=LRU(BUDGET[tag]))
    decode = trace.phase.values == 1
    assert decode.sum() * trace.sizes["layer"] * trace.sizes["slot"] == {
        "qwen": 36864, "gemma": 23040, "gptoss": 4608,
    }[tag]  # fmt: skip
    np.testing.assert_array_equal(again.residency.values, trace.residency.values)
    np.testing.assert_array_equal(again.read_bytes.values, trace.read_bytes.values)
    totals = json.loads(again.attrs["replay_totals"])
    evictions = sum(phase["evictions"] for phase in totals.values())
    assert evictions == {"qwen": 8469, "gemma": 4645, "gptoss": 4072}[tag]
    validate(again)


@pytest.mark.parametrize("tag", TAGS)
def test_static_drop_replay_gives_the_published_table(traces, tag):
    trace = traces[tag]
    for frac, (avoided, discarded), dropped in zip(
        FRACTIONS, STATIC[tag], STATIC_DROPPED[tag], strict=True
    ):
        again = bl.replay(trace, residency="recorded", routing=DropCold(frac))
        found = counters(again)
        whole = decode_reads(trace)
        assert percent(whole - decode_reads(again), whole) == avoided, frac
        assert percent(found["weight_discarded"], found["weight_total"]) == discarded, frac
        assert percent(found["dropped"], found["examined"]) == dropped, frac
        assert found["bytes_saved"] == whole - decode_reads(again)


@pytest.mark.parametrize("tag", TAGS)
def test_re_simulated_drop_replay_gives_the_recomputed_table(traces, tag):
    trace = traces[tag]
    whole = decode_reads(bl.replay(trace, residency=LRU(BUDGET[tag])))
    for frac, (avoided, discarded, dropped) in zip(FRACTIONS, DYNAMIC[tag], strict=True):
        again = bl.replay(trace, residency=LRU(BUDGET[tag]), routing=DropCold(frac))
        found = counters(again)
        assert percent(whole - decode_reads(again), whole) == avoided, frac
        assert percent(found["weight_discarded"], found["weight_total"]) == discarded, frac
        assert percent(found["dropped"], found["examined"]) == dropped, frac
        assert again.attrs["counterfactual"] == 1


@pytest.mark.parametrize("tag", TAGS)
def test_fewer_experts_over_recorded_residency_gives_the_published_table(traces, tag):
    trace = traces[tag]
    whole = decode_reads(trace)
    for kept, (avoided, discarded) in KEEP[tag].items():
        again = bl.replay(trace, residency="recorded", routing=FewerExperts(kept))
        found = counters(again)
        assert percent(whole - decode_reads(again), whole) == avoided, kept
        assert percent(found["weight_discarded"], found["weight_total"]) == discarded, kept


def test_neutral_settings_over_a_real_trace_change_nothing(traces):
    trace = traces["qwen"]
    for policy in (DropCold(0.0), FewerExperts(6)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyNeverFiredWarning)
            again = bl.replay(trace, residency="recorded", routing=policy)
        np.testing.assert_array_equal(again.read_bytes.values, trace.read_bytes.values)
        assert counters(again)["examined"] == 36864


@pytest.mark.parametrize("tag", TAGS)
def test_replay_gives_the_engines_own_hit_rate_at_every_step(reference_data, tag):
    """The engine printed its cumulative hit rate, prefill included, with each token."""
    folder = reference_data / "bigmoeonedge" / "2026-07-15-route-trace"
    trace = from_bigmoeonedge(folder / f"{tag}.route.csv", metrics=folder / f"{tag}.metrics")
    again = bl.replay(trace, residency=LRU(BUDGET[tag]))
    lookup = bl.metrics.first_of_load(again).values
    hit = lookup & (again.residency.values == 1)
    lookups = lookup.sum(axis=(1, 2)).cumsum()
    hits = hit.sum(axis=(1, 2)).cumsum()
    decode = trace.phase.values == 1
    actual = (100 * hits / lookups)[decode]
    printed = trace["engine_cache_hit_pct"].values[decode]
    assert not np.isnan(printed).any()
    np.testing.assert_allclose(actual, printed, rtol=0, atol=0.005 + 1e-9)


@pytest.mark.parametrize("tag", TAGS)
def test_loads_and_token_cycle_of_the_recorded_traces(traces, tag):
    trace = traces[tag]
    stream = load_stream(trace)
    phases = np.bincount(stream.phase, minlength=2).tolist()
    expected = {"qwen": [48, 6144], "gemma": [30, 3840], "gptoss": [36, 2304]}
    assert phases == expected[tag]
    cycle = int(trace.moe.token_cycle_bytes())
    assert round(cycle / 2**20) == {"qwen": 785, "gemma": 676, "gptoss": 908}[tag]
