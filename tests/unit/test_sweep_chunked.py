"""A trace served in chunks says, bit for bit, what it says in one piece."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import residency, save_trace
from bmoe_lab.errors import SettingsError
from bmoe_lab.recording import open_trace
from bmoe_lab.residency.belady import Belady
from bmoe_lab.residency.future import next_use
from bmoe_lab.simulation import chunked, replay
from bmoe_lab.simulation.chunked import chunks, token_windows
from bmoe_lab.simulation.stream import load_stream
from bmoe_lab.simulation.sweeping import sweep
from bmoe_lab.testing import make_trace

BUDGETS = [40_000, 90_000, 160_000]


def a_trace(**changes):
    shape = {"n_token": 400, "n_layer": 3, "n_expert": 16, "n_prefill": 50, "n_ubatch": 16}
    return make_trace(**{**shape, "seed": 5, "text": False, **changes})


def in_turns(trace, *lengths):
    """Return a trace whose cache was emptied with each turn."""
    turn = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    assert turn.size == trace.sizes["token"]
    batch = trace["batch"].values + turn
    trace = trace.assign_coords(turn=("token", turn), batch=("token", batch.astype(np.int32)))
    trace.attrs["cold_turns"] = 1
    return trace


def every_policy(trace):
    names = [name for name in residency.names() if name != "pin"]
    return [*names, residency.Pin.from_trace(trace)]


def quiet(trace, names, **kwargs):
    return sweep(
        trace, residency=names, budgets=BUDGETS, phase=["prefill", "decode", "all"],
        progress=False, n_jobs=1, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("make", [a_trace, lambda: in_turns(a_trace(), 170, 130, 100)])
@pytest.mark.parametrize("rows", [60, 500])
def test_sweep_in_chunks_equals_one_piece_for_every_policy(make, rows, monkeypatch):
    trace = make()
    names = every_policy(trace)
    whole = quiet(trace, names)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", rows)
    assert len(list(chunks(trace))) > 5
    xr.testing.assert_identical(whole, quiet(trace, names))


def test_sweep_in_chunks_over_tens_of_thousands_of_tokens_equals_one_piece(monkeypatch):
    rng = np.random.default_rng(0)
    short = a_trace(n_token=64, n_prefill=0)
    part = short.isel(token=rng.integers(0, 64, 20_000))
    trace = part.assign_coords(
        batch=("token", np.arange(20_000, dtype=np.int32)),
        position=("token", np.arange(20_000, dtype=np.int32)),
    )
    names = every_policy(trace)
    whole = quiet(trace, names)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 10_000)
    xr.testing.assert_identical(whole, quiet(trace, names))


class Watched(xr.backends.BackendArray):
    """An array on a slow disk: it notes how much of it was read at once."""

    def __init__(self, values, read):
        self.values, self.read = values, read
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, key):
        return xr.core.indexing.explicit_indexing_adapter(
            key, self.shape, xr.core.indexing.IndexingSupport.BASIC, self._get
        )

    def _get(self, key):
        found = self.values[key]
        self.read.append(found.shape[0] if found.ndim else 1)
        return found


def watched(trace, read):
    lazy = {}
    for name in ("expert_applied", "expert_chosen", "turn", "batch", "phase"):
        array = xr.core.indexing.LazilyIndexedArray(Watched(trace[name].values, read))
        lazy[name] = (trace[name].dims, array)
    return trace.assign_coords({k: lazy[k] for k in ("turn", "batch", "phase")}).assign(
        {k: lazy[k] for k in ("expert_applied", "expert_chosen")}
    )


def test_sweep_of_a_trace_on_disk_never_reads_a_whole_array(monkeypatch):
    trace = a_trace()
    names = every_policy(trace)
    whole = quiet(trace, names)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 600)
    read = []
    lazy = watched(trace, read)
    xr.testing.assert_identical(whole, quiet(lazy, names))
    assert read
    assert max(read) <= 50 + 1  # 50 tokens a chunk, and the one before it


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_sweep_reads_a_path_as_it_reads_the_trace(suffix, tmp_path, monkeypatch):
    trace = a_trace()
    path = save_trace(trace, tmp_path / f"synthetic{suffix}")
    whole = quiet(trace, ["lru"])
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 600)
    xr.testing.assert_identical(whole, quiet(path, ["lru"]))
    lazy = open_trace(path, memory_limit=0)
    xr.testing.assert_identical(whole, quiet(lazy, ["lru"]))
    lazy.close()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=30), n_token=st.integers(1, 12))
def test_windows_are_whole_evaluations_in_order(widths, n_token):
    batch = np.repeat(np.arange(len(widths)), widths)
    trace = xr.Dataset(coords={"batch": ("token", batch), "turn": ("token", 0 * batch)})
    found = list(token_windows(trace, n_token))
    ends = set(np.cumsum(widths).tolist())
    assert found[0][0] == 0
    assert found[-1][1] == batch.size
    assert all(end in ends for _, end in found)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    for begin, end in found:
        evaluations = np.unique(batch[begin:end]).size
        assert end - begin <= n_token or evaluations == 1


def test_future_in_one_piece_is_next_use():
    trace = a_trace()
    stream = load_stream(trace)
    (chunk,) = chunks(trace, future=True)
    expected = next_use(stream.keys, stream.offsets, stream.n_key)
    np.testing.assert_array_equal(chunk.future, expected)


def test_belady_in_chunks_equals_its_replay(monkeypatch):
    trace = in_turns(a_trace(), 170, 130, 100)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 240)
    grid = quiet(trace, [Belady()])
    for budget in BUDGETS:
        again = replay(trace, residency=Belady(budget))
        cell = grid.squeeze().sel(budget=budget)
        assert float(cell.hit_rate_all) == float(again.moe.hit_rate(phase="all"))
        assert float(cell.evictions_all) == np.nansum(again.evictions)
        assert float(cell.resident_bytes_max_all) == np.nanmax(again.cache_resident_bytes)


def test_sweep_in_chunks_empties_the_cache_of_a_turn_that_begins_with_a_chunk(monkeypatch):
    trace = in_turns(a_trace(n_token=150, n_prefill=0), 40, 50, 60)
    names = every_policy(trace)
    whole = quiet(trace, names)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 120)
    assert {40, 90} <= {chunk.begin for chunk in chunks(trace)}
    assert [chunk.begin for chunk in chunks(trace) if chunk.fresh] == [0, 40, 90]
    xr.testing.assert_identical(whole, quiet(trace, names))


@pytest.mark.parametrize("rows", [120, 170, 10_000])
def test_future_ends_where_the_cache_is_emptied(rows, monkeypatch):
    """What a key is asked for in a later turn is nothing to a cache that is empty by then."""
    trace = in_turns(a_trace(n_token=150, n_prefill=0), 40, 50, 60)
    stream = load_stream(trace)
    expected = []  # loads until the next use; to the end of the turn, or more, where there is none
    for begin, end in stream.segments():
        low, high = stream.offsets[begin], stream.offsets[end]
        offsets = stream.offsets[begin : end + 1] - low
        expected.append(next_use(stream.keys[low:high], offsets, stream.n_key))
    monkeypatch.setattr(chunked, "CHUNK_ROWS", rows)
    found, base = [], 0
    for chunk in chunks(trace, future=True):
        for number, (begin, end) in enumerate(chunk.stream.segments()):
            if number or chunk.fresh:
                base = 0
            low, high = chunk.stream.offsets[begin], chunk.stream.offsets[end]
            found.append(chunk.future[low:high] + base)
            base += end - begin
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))


def test_future_that_does_not_fit_its_disk_is_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 240)
    monkeypatch.setattr(chunked.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(SettingsError, match=r"must have room for 18.8 KiB .* got 100 B in"):
        list(chunks(a_trace(), future=True))
