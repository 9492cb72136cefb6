"""The figures that are published, or were recomputed, for three recorded traces.

Names, digits and definitions are those of the README beside the data; each figure is compared as
printed.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.converters.bigmoeonedge import from_bigmoeonedge

pytestmark = pytest.mark.reference_data

MIB = 2**20
TAGS = ("qwen", "gemma", "gptoss")


@functools.cache
def _read(folder: Path, tag: str) -> xr.Dataset:
    runs = folder / "bigmoeonedge" / "2026-07-15-route-trace"
    return from_bigmoeonedge(runs / f"{tag}.route.csv", metrics=runs / f"{tag}.metrics")


@pytest.fixture(params=TAGS)
def case(request, reference_data) -> tuple[str, xr.Dataset]:
    return request.param, _read(reference_data, request.param)


@pytest.fixture
def trace(reference_data):
    return functools.partial(_read, reference_data)


def percent(value: xr.DataArray, digits: int) -> float:
    return round(100 * float(value), digits)


# ---------------------------------------------------------------- 4.1 shape


def test_sizes_of_experts_and_bank(case):
    tag, ds = case
    expert, layer_0, bank, dense, cycle = {
        "qwen": (2.72, 2.92, 16740, 541, 785),
        "gemma": (3.76, 4.14, 14429, 1224, 676),
        "gptoss": (12.61, 12.61, 58092, 790, 908),
    }[tag]
    assert round(float(ds.expert_bytes.mean()) / MIB, 2) == expert
    assert round(int(ds.expert_bytes[0]) / MIB, 2) == layer_0
    assert round(int(metrics.expert_bank_bytes(ds)) / MIB) == bank
    assert round(int(ds.dense_bytes.sum()) / MIB) == dense
    assert round(int(metrics.token_cycle_bytes(ds)) / MIB) == cycle


def test_experts_used_and_their_bytes(case):
    tag, ds = case
    decode, share, both, mean, least, most = {
        "qwen": (8386, 50, 10214, 64, 33, 107),
        "gemma": (7576, 53, 8897, 67, 52, 97),
        "gptoss": (16288, 28, 28580, 36, 19, 64),
    }[tag]
    used = metrics.used_bytes(ds).sum()
    assert round(float(used) / MIB) == decode
    assert percent(used / metrics.expert_bank_bytes(ds), 0) == share
    assert round(float(metrics.used_bytes(ds, phase="all").sum()) / MIB) == both
    experts = metrics.experts_used(ds)
    assert (round(float(experts.mean())), int(experts.min()), int(experts.max())) == (
        mean,
        least,
        most,
    )


def test_load_counts(case):
    tag, ds = case
    expected = {"qwen": (48, 6144), "gemma": (30, 3840), "gptoss": (36, 2304)}[tag]
    actual = (metrics.load_count(ds, phase="prefill"), metrics.load_count(ds))
    assert tuple(int(count) for count in actual) == expected


def test_lookup_counts(case):
    tag, ds = case
    expected = {"qwen": (2662, 36864), "gemma": (1538, 23040), "gptoss": (1767, 4608)}[tag]
    first = metrics.first_of_load(ds)
    assert tuple(int(first[ds.phase.values == phase].sum()) for phase in (0, 1)) == expected


def test_top_share_of_qwen(trace):
    share = metrics.top_share(trace("qwen"), 8)
    assert int(metrics.experts_used(trace("qwen"))[0]) == 107
    assert percent(share[0], 1) == 21.5
    assert percent(share[5], 1) == 43.2
    assert percent(share.mean(), 1) == 44.5


def test_room_of_a_cache_over_the_demand_of_gptoss(trace):
    # All layers of gptoss have experts of one size, so an even split is the published quotient.
    ds = trace("gptoss")
    ratio = metrics.slots_per_demand(ds, "3000 MiB")
    places = ratio * metrics.experts_used(ds).values
    assert percent(3000 * MIB / metrics.used_bytes(ds).sum(), 0) == 18
    assert round(float(places.mean()), 1) == 6.6
    assert round(float(places.sum())) == 238


# ---------------------------------------------------------------- 4.2 recorded runs


def test_recorded_hit_rates(case):
    tag, ds = case
    everything, decode, per_row = {
        "qwen": (74.88, 80.29, 66.1),
        "gemma": (76.78, 81.91, 66.8),
        "gptoss": (32.41, 44.84, 19.6),
    }[tag]
    assert percent(metrics.hit_rate(ds, phase="all"), 2) == everything
    assert percent(metrics.hit_rate(ds), 2) == decode
    # The first mistake that the README warns of: every row counted.
    assert percent(metrics.hit_rate(ds, per="routing", phase="all"), 1) == per_row


def test_speed_and_compute(case):
    tag, ds = case
    speed, compute = {
        "qwen": (5.657, 0.114),
        "gemma": (4.971, 0.133),
        "gptoss": (0.503, 1.705),
    }[tag]
    assert round(float(metrics.decode_speed(ds)), 3) == speed
    split = metrics.time_split(ds)
    seconds = float(split.sel(part="compute")) * float(ds.wall_s.mean())
    assert round(seconds, 3) == compute
    # compute is the residual: nothing is left, and lane time is no part of the wall time.
    assert abs(float(split.sel(part="rest"))) < 1e-4
    assert np.isnan(split.sel(part=["read", "callback", "between"])).all()


def test_compute_share_of_gptoss(trace):
    assert percent(metrics.time_split(trace("gptoss")).sel(part="compute"), 0) == 86


def test_lane_time_of_qwen_exceeds_its_wall_time(trace):
    """Lanes are busy while compute threads work: their time must not be a share of the wall."""
    ds = trace("qwen")
    assert float(ds.engine_io_ms.sum()) / 1000 > float(ds.wall_s.sum())
    bandwidth = float(metrics.read_bandwidth(ds))
    assert bandwidth == pytest.approx(20023.9 * MIB / 26.61, rel=1e-3)


def test_read_bytes_per_token(case):
    tag, ds = case
    per_token, total = {
        "qwen": (155.77, 19938.8),
        "gemma": (123.07, 15753.2),
        "gptoss": (500.73, 32046.5),
    }[tag]
    read = metrics.read_bytes_per_token(ds)
    assert round(float(read) / MIB, 2) == per_token
    assert round(float(read) * int((ds.phase == 1).sum()) / MIB, 1) == total
    # One minus the byte hit rate is what was read of what was needed.
    needed = metrics.demand_bytes_per_token(ds)
    assert float(read / needed) == pytest.approx(1 - float(metrics.byte_hit_rate(ds)))
    assert int(needed) == int(metrics.token_cycle_bytes(ds))


def test_major_faults_in_quarters(case):
    tag, ds = case
    expected, correlation = {
        "qwen": ([17.4, 14.1, 20.2, 21.3], 0.045),
        "gemma": ([42.4, 34.8, 54.1, 65.5], 0.187),
        "gptoss": ([1875, 5924, 7922, 8431], 0.492),
    }[tag]
    digits = 0 if tag == "gptoss" else 1
    decode = ds.isel(token=ds.phase.values == 1)
    quarter = decode.sizes["token"] // 4
    actual = [
        round(
            float(metrics.major_faults_per_token(decode.isel(token=slice(at, at + quarter)))),
            digits,
        )
        for at in range(0, 4 * quarter, quarter)
    ]
    assert actual == expected
    faults = metrics.major_faults_per_token(ds, by="token")
    assert round(float(np.corrcoef(faults, decode.wall_s)[0, 1]), 3) == correlation


def test_wall_time_of_gptoss_in_quarters(trace):
    ds = trace("gptoss")
    decode = ds.isel(token=ds.phase.values == 1)
    quarter = decode.sizes["token"] // 4
    parts = [decode.isel(token=slice(at, at + quarter)) for at in range(0, 4 * quarter, quarter)]
    assert [round(1000 / float(metrics.decode_speed(part))) for part in parts] == [
        1640,
        2019,
        2255,
        2039,
    ]


# ---------------------------------------------------------------- 4.4, 4.5 static tables

FRACS = [0.25, 0.5, 0.75, 1.0]
DROP = {
    ("qwen", "decode"): ([0.07, 5.84, 36.83, 66.13], [0.00, 0.49, 4.44, 9.46]),
    ("gemma", "decode"): ([1.92, 13.30, 41.23, 67.35], [0.06, 0.87, 4.09, 8.18]),
    ("gptoss", "decode"): ([0.08, 1.69, 11.57, 54.45], [0.01, 0.36, 4.00, 25.19]),
    ("qwen", "prefill"): ([8.99, 15.17, 40.42, 68.20], [0.22, 2.21, 17.21, 42.27]),
    ("gemma", "prefill"): ([4.70, 22.83, 52.97, 77.51], [0.43, 4.93, 21.01, 43.16]),
    ("gptoss", "prefill"): ([0.96, 5.49, 18.17, 56.25], [0.09, 1.39, 8.67, 40.11]),
}
DROPPED = {
    "qwen": [0.01, 1.13, 7.26, 13.07],
    "gemma": [0.32, 2.36, 7.43, 12.21],
    "gptoss": [0.04, 0.93, 6.38, 30.03],
}
KEEP = {
    ("qwen", "decode"): (
        [23.17, 42.82, 58.82, 73.54, 87.24],
        [10.60, 22.70, 36.78, 53.38, 73.47],
    ),
    ("gemma", "decode"): ([20.28, 39.44, 56.13, 70.31, 84.21], [9.80, 20.84, 33.56, 48.86, 68.85]),
    ("gptoss", "decode"): ([54.45], [42.32]),
    ("qwen", "prefill"): (
        [18.96, 38.21, 56.07, 72.33, 87.67],
        [10.00, 21.33, 34.48, 50.08, 69.40],
    ),
    ("gemma", "prefill"): ([22.57, 43.07, 60.24, 76.45, 89.41], [9.32, 19.83, 31.98, 46.63, 66.13]),
    ("gptoss", "prefill"): ([56.25], [40.11]),
}


def column(values: xr.DataArray) -> list[float]:
    return [percent(value, 2) for value in values]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_static_drop_table(case, phase):
    tag, ds = case
    table = metrics.drop_savings(ds, FRACS, phase=phase)
    reads, weight = DROP[tag, phase]
    assert column(table[f"reads_avoided_frac_{phase}"]) == reads
    assert column(table[f"weight_discarded_frac_{phase}"]) == weight
    if phase == "decode":
        assert column(table.slots_dropped_frac_decode) == DROPPED[tag]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_static_keep_table(case, phase):
    tag, ds = case
    table = metrics.keep_savings(ds, list(range(ds.sizes["slot"] - 1, 0, -1)), phase=phase)
    reads, weight = KEEP[tag, phase]
    assert column(table[f"reads_avoided_frac_{phase}"]) == reads
    assert column(table[f"weight_discarded_frac_{phase}"]) == weight


# ---------------------------------------------------------------- 4.6 predictors


def test_predictors(case):
    tag, ds = case
    chance, previous, lag_8, decode, prompt = {
        "qwen": (4.7, 38.0, 26.7, 37.6, 17.9),
        "gemma": (4.7, 35.7, 26.1, 39.6, 26.8),
        "gptoss": (1.6, 17.9, 13.1, 26.7, 8.2),
    }[tag]
    assert percent(metrics.predictor_recall(ds, "random"), 1) == chance
    assert percent(metrics.chance_overlap(ds), 1) == chance
    assert percent(metrics.predictor_recall(ds, "previous"), 1) == previous
    assert percent(metrics.predictor_recall(ds, "previous", lag=8), 1) == lag_8
    assert percent(metrics.predictor_recall(ds, "decode"), 1) == decode
    assert percent(metrics.predictor_recall(ds, "prompt"), 1) == prompt
    overlap = metrics.consecutive_overlap(ds, lag=[1, 8])
    assert [percent(value, 1) for value in overlap] == [previous, lag_8]


def test_predictor_of_24_experts_and_lag_2(trace):
    assert percent(metrics.predictor_recall(trace("qwen"), "prompt", n_guess=24), 1) == 52.0
    assert percent(metrics.consecutive_overlap(trace("gptoss"), lag=2), 1) == 21.0


# ---------------------------------------------------------------- 4.7 coalescing


def test_coalescing(case):
    tag, ds = case
    pairs, reads = {"qwen": (4.0, 5.76), "gemma": (3.9, 5.77), "gptoss": (0.6, 1.99)}[tag]
    assert percent(metrics.consecutive_id_rate(ds), 1) == pairs
    assert round(float(metrics.merged_reads(ds)), 2) == reads


# ---------------------------------------------------------------- 5 further anchors


def test_weights(case):
    tag, ds = case
    bits, top = {"qwen": (2.493, 26.53), "gemma": (2.409, 31.15), "gptoss": (0.969, 57.68)}[tag]
    assert round(float(metrics.router_entropy(ds, by="layer").mean()) / np.log(2), 3) == bits
    assert percent(metrics.top_weight_share(ds, by="layer").mean(), 2) == top


def test_hit_rate_of_the_worst_and_the_best_layer(case):
    tag, ds = case
    expected = {"qwen": (57.7, 92.1), "gemma": (68.9, 88.2), "gptoss": (19.5, 71.1)}[tag]
    rate = metrics.hit_rate(ds, by="layer")
    assert (percent(rate.min(), 1), percent(rate.max(), 1)) == expected


def test_reuse_distances(case):
    tag, ds = case
    count, half, ninth, most, once = {
        "qwen": (33805, 2, 16, 122, 475),
        "gemma": (21032, 2, 19, 118, 282),
        "gptoss": (3316, 3, 19, 58, 518),
    }[tag]
    distance = metrics.reuse_distance(ds).values
    known = np.sort(distance[~np.isnan(distance)])
    assert known.size == count
    assert (known[int(0.5 * count)], known[int(0.9 * count)], known[-1]) == (half, ninth, most)
    assert int(metrics.experts_used_once(ds).sum()) == once


@pytest.mark.parametrize(
    ("tag", "budget", "everything", "decode"),
    [
        ("qwen", 4000, 74.9, 80.3),
        ("gemma", 4000, 76.8, 81.9),
        ("gptoss", 3000, 32.4, 44.8),
        ("qwen", 750, 0.0, 0.0),
        ("qwen", 1000, 35.1, 37.7),
        ("gemma", 750, 33.2, 35.4),
        ("gptoss", 8000, 47.6, 65.9),
    ],
)
def test_lru_curve_from_reuse_distances(trace, tag, budget, everything, decode):
    """Stack distances in bytes give the replayed LRU of any budget, to the printed digit."""
    ds = trace(tag)
    hit = metrics.reuse_distance(ds, unit="byte", phase="all") <= budget * MIB
    first = metrics.first_of_load(ds)
    assert percent(hit.sum() / first.sum(), 1) == everything
    rows = ds.phase.values == 1
    assert percent(hit[rows].sum() / first[rows].sum(), 1) == decode


def test_first_budget_with_a_hit(case):
    tag, ds = case
    expected = {"qwen": 771, "gemma": 656, "gptoss": 896}[tag]
    smallest = float(metrics.reuse_distance(ds, unit="byte", phase="all").min())
    assert int(np.ceil(smallest / MIB)) == expected


def test_recorded_residency_equals_that_of_the_distances(case):
    """Every decode row that was recorded as a hit lies within the budget, and no other."""
    tag, ds = case
    budget = (3000 if tag == "gptoss" else 4000) * MIB
    within = metrics.reuse_distance(ds, unit="byte", phase="all").values <= budget
    rows = ds.phase.values == 1
    np.testing.assert_array_equal(within[rows], ds.residency.values[rows] == 1)
