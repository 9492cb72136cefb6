"""Recorded traces of BigMoeOnEdge: what reading them must give (their README, sections 1, 2, 4)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from bmoe_lab.converters import (
    from_bigmoeonedge,
    from_parquet,
    to_bigmoeonedge,
    to_parquet,
)
from bmoe_lab.recording import open_trace, save_trace
from bmoe_lab.schema import Phase

pytestmark = pytest.mark.reference_data

MIB = 2**20
TAGS = ("qwen", "gemma", "gptoss")


@functools.cache
def read(folder: Path, tag: str):
    path = folder / "bigmoeonedge" / "2026-07-15-route-trace" / tag
    return from_bigmoeonedge(f"{path}.route.csv", metrics=f"{path}.metrics")


@pytest.fixture(params=TAGS)
def tag(request):
    return request.param


@pytest.fixture
def trace(reference_data, tag):
    return read(reference_data, tag)


@pytest.fixture
def decode(trace):
    return trace.isel(token=trace.phase.values == Phase.decode)


def pick(tag, **figures):
    return figures[tag]


def test_reference_shape(trace, tag):
    n_layer, n_used, n_prompt, n_decode, arch = pick(
        tag,
        qwen=(48, 6, 28, 128, "qwen3moe"),
        gemma=(30, 6, 29, 128, "gemma4"),
        gptoss=(36, 2, 85, 64, "gpt-oss"),
    )
    assert dict(trace.sizes) == {"token": n_prompt + n_decode, "layer": n_layer, "slot": n_used}
    assert trace.attrs["n_expert"] == 128
    assert trace.attrs["arch"] == arch
    assert trace.phase.values.tolist() == [0] * n_prompt + [1] * n_decode
    assert trace.position.values.tolist() == list(range(n_prompt + n_decode))
    assert trace.block.values.tolist() == list(range(n_layer))
    assert np.unique(trace.turn) == 0
    # Batches are loads of one layer: one wide evaluation, then one per token.
    assert n_layer * np.unique(trace.batch.values[:n_prompt]).size == pick(
        tag, qwen=48, gemma=30, gptoss=36
    )
    assert n_layer * np.unique(trace.batch.values[n_prompt:]).size == pick(
        tag, qwen=6144, gemma=3840, gptoss=2304
    )


def test_reference_last_layer_of_the_prompt(trace, tag):
    """llama.cpp gathers the output token before the last feed-forward, but not in gemma."""
    prompt = trace.isel(token=trace.phase.values == Phase.prefill).expert_chosen.values >= 0
    assert prompt[:, :-1].all()
    assert prompt[:, -1].all(axis=-1).sum() == pick(tag, qwen=1, gemma=29, gptoss=1)
    assert prompt[-1, -1].all()


def test_reference_weights_and_bytes(trace, decode):
    weight = trace.weight_chosen.values
    routed = trace.expert_chosen.values >= 0
    total = np.nansum(weight, axis=-1)[routed.any(axis=-1)]
    assert 0.999997 < total.min() <= total.max() < 1.000003
    assert (np.diff(np.where(routed, weight, 0), axis=-1) <= 0).all()
    size = np.broadcast_to(decode.expert_bytes.values[None, :, None], decode.residency.shape)
    np.testing.assert_array_equal(decode.read_bytes, np.where(decode.residency == 0, size, 0))
    prompt = trace.isel(token=trace.phase.values == Phase.prefill)
    assert set(np.unique(prompt.residency)) <= {0, 255}


def test_reference_prompt_charges_an_expert_once(trace):
    prompt = trace.isel(token=trace.phase.values == Phase.prefill)
    for layer in range(trace.sizes["layer"]):
        ids = prompt.expert_chosen.values[:, layer].ravel()
        read_bytes = prompt.read_bytes.values[:, layer].ravel()
        _, first = np.unique(ids, return_index=True)
        expected = np.zeros(ids.size, dtype=np.int64)
        expected[first] = int(trace.expert_bytes[layer])
        np.testing.assert_array_equal(read_bytes, np.where(ids >= 0, expected, 0))


def test_reference_sizes(trace, decode, tag):
    size = trace.expert_bytes.values
    assert round(size.mean() / MIB, 2) == pick(tag, qwen=2.72, gemma=3.76, gptoss=12.61)
    assert round(size[0] / MIB, 2) == pick(tag, qwen=2.92, gemma=4.14, gptoss=12.61)
    assert round(size.sum() * 128 / MIB) == pick(tag, qwen=16740, gemma=14429, gptoss=58092)
    assert round(trace.dense_bytes.values.sum() / MIB) == pick(
        tag, qwen=541, gemma=1224, gptoss=790
    )
    assert round(float(trace.moe.token_cycle_bytes()) / MIB) == pick(
        tag, qwen=785, gemma=676, gptoss=908
    )
    for ds, figures in (
        (decode, {"qwen": 8386, "gemma": 7576, "gptoss": 16288}),
        (trace, {"qwen": 10214, "gemma": 8897, "gptoss": 28580}),
    ):
        touched = sum(n * int(b) for n, b in zip(distinct(ds), size, strict=True))
        assert round(touched / MIB) == figures[tag]


def distinct(ds):
    """Return the experts that each layer used."""
    ids = ds.expert_chosen.values
    return [np.unique(row[row >= 0]).size for row in ids.swapaxes(0, 1)]


def test_reference_distinct_experts(decode, tag):
    counts = np.array(distinct(decode))
    mean, low, high = pick(tag, qwen=(64, 33, 107), gemma=(67, 52, 97), gptoss=(36, 19, 64))
    assert (round(counts.mean()), counts.min(), counts.max()) == (mean, low, high)


def test_reference_hot_experts(reference_data):
    trace = read(reference_data, "qwen")
    ids = trace.expert_chosen.values[trace.phase.values == Phase.decode].swapaxes(0, 1)
    share = np.array([np.sort(np.bincount(row.ravel()))[-8:].sum() / row.size for row in ids])
    assert round(100 * share[0], 1) == 21.5
    assert round(100 * share[5], 1) == 43.2
    assert round(100 * share.mean(), 1) == 44.5


def test_reference_hit_rates(trace, tag):
    recorded = 100 * float(trace.moe.hit_rate(phase="all"))
    decoded = 100 * float(trace.moe.hit_rate())
    assert round(recorded, 2) == pick(tag, qwen=74.88, gemma=76.78, gptoss=32.41)
    assert round(decoded, 2) == pick(tag, qwen=80.29, gemma=81.91, gptoss=44.84)
    # The mistake that the definitions warn of.
    rows = 100 * float(trace.moe.hit_rate(per="routing", phase="all"))
    assert round(rows, 1) == pick(tag, qwen=66.1, gemma=66.8, gptoss=19.6)


def test_reference_metrics_hit_column_is_the_recorded_one(trace):
    """It counts since load, the prompt included: one lookup per distinct expert per evaluation."""
    first = trace.moe.first_of_load().values
    hit = first & (trace.residency.values == 1)
    rate = np.cumsum(hit.sum(axis=(1, 2))) / np.cumsum(first.sum(axis=(1, 2)))
    told = trace.engine_cache_hit_pct.values
    known = ~np.isnan(told)
    assert known.sum() == (trace.phase == Phase.decode).sum()
    assert np.abs(100 * rate - told)[known].max() <= 0.005 + 1e-9


def test_reference_speed_and_reads(trace, decode, tag):
    wall = decode.wall_s.values
    assert round(wall.size / wall.sum(), 3) == pick(tag, qwen=5.657, gemma=4.971, gptoss=0.503)
    assert round(float(trace.moe.decode_speed()), 3) == pick(
        tag, qwen=5.657, gemma=4.971, gptoss=0.503
    )
    compute = decode.engine_compute_ms.values
    assert round(compute.mean() / 1000, 3) == pick(tag, qwen=0.114, gemma=0.133, gptoss=1.705)
    residual = 1000 * (wall - decode.manage_s.values) - decode.engine_stall_ms.values
    assert np.abs(residual - compute).max() < 0.0011
    summary = json.loads(trace.attrs["engine_summary"])[-1]
    engine_read = decode.engine_read_bytes.values.sum() / MIB
    assert round(engine_read, 1) == float(summary["read_MiB"])
    assert float(summary["read_MiB"]) == pick(tag, qwen=20023.9, gemma=15785.2, gptoss=32075.9)
    requested = decode.read_bytes.values.sum(dtype=np.int64) / MIB
    assert round(requested, 1) == pick(tag, qwen=19938.8, gemma=15753.2, gptoss=32046.5)
    excess = round(100 * (engine_read / requested - 1), 2)
    assert excess == pick(tag, qwen=0.43, gemma=0.20, gptoss=0.09)
    assert round(requested / wall.size, 2) == pick(tag, qwen=155.77, gemma=123.07, gptoss=500.73)
    assert trace.attrs["cache_budget_bytes"] == pick(tag, qwen=4000, gemma=4000, gptoss=3000) * MIB


def test_reference_faults(decode, tag):
    faults, wall = decode.major_faults.values, 1000 * decode.wall_s.values
    quarters = [round(part.mean(), 1) for part in np.split(faults, 4)]
    expected = pick(
        tag,
        qwen=[17.4, 14.1, 20.2, 21.3],
        gemma=[42.4, 34.8, 54.1, 65.5],
        gptoss=[1875, 5924, 7922, 8431],
    )
    assert [round(q, 1 if tag != "gptoss" else None) for q in quarters] == expected
    correlation = np.corrcoef(faults, wall)[0, 1]
    assert round(correlation, 3) == pick(tag, qwen=0.045, gemma=0.187, gptoss=0.492)
    if tag == "gptoss":
        share = decode.engine_compute_ms.values.sum() / wall.sum()
        assert round(100 * share) == 86
        assert [round(part.mean()) for part in np.split(wall, 4)] == [1640, 2019, 2255, 2039]


def test_reference_says_what_is_not_known(trace):
    """No settings above the metrics, no dropped column: nothing proves what the policy was."""
    assert "lossless" not in trace.attrs
    assert trace.attrs["complete"] == 1
    assert trace.attrs["instrumented"] == 1


def test_reference_files_come_back_byte_for_byte(reference_data, tmp_path, tag):
    ds = read(reference_data, tag)
    folder = reference_data / "bigmoeonedge" / "2026-07-15-route-trace"
    to_bigmoeonedge(ds, tmp_path / "a.route.csv", metrics=tmp_path / "a.metrics")
    assert (tmp_path / "a.route.csv").read_bytes() == (folder / f"{tag}.route.csv").read_bytes()
    assert (tmp_path / "a.metrics").read_bytes() == (folder / f"{tag}.metrics").read_bytes()


def test_reference_survives_every_format(reference_data, tmp_path):
    """Through netCDF, Zarr and Parquet, and still the same bytes as a route trace."""
    ds = read(reference_data, "gptoss")
    folder = reference_data / "bigmoeonedge" / "2026-07-15-route-trace"
    for back in (
        open_trace(save_trace(ds, tmp_path / "a.nc")),
        open_trace(save_trace(ds, tmp_path / "a.zarr")),
        from_parquet(to_parquet(ds, tmp_path / "a.parquet")),
    ):
        assert back.identical(ds)
        to_bigmoeonedge(back, tmp_path / "a.route.csv", metrics=tmp_path / "a.metrics")
        for ending in ("route.csv", "metrics"):
            written = (tmp_path / f"a.{ending}").read_bytes()
            assert written == (folder / f"gptoss.{ending}").read_bytes()
