from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bmoe_lab.errors import SettingsError, StreamingError
from bmoe_lab.residency import LRU
from bmoe_lab.streaming import arena as arena_module
from bmoe_lab.streaming import reader as reader_module
from bmoe_lab.streaming.budget import LEAST_BUDGET, auto_budget, memory_available
from bmoe_lab.streaming.dense import DenseWeights
from bmoe_lab.streaming.layout import read_layout
from bmoe_lab.streaming.reader import ReadCancelled, Reader
from bmoe_lab.streaming.streamer import StackGroup, Streamer
from tests.unit.tiny_gguf import write_moe

PAGE = mmap.PAGESIZE
N_LAYER, N_EXPERT = 3, 8
SLICE = 50 * 12 * 4
EXPERT = 3 * SLICE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("streamer") / "moe.gguf"
    arrays = write_moe(path)
    return read_layout(path), arrays


def groups(n_layer: int = N_LAYER) -> list[StackGroup]:
    return [
        StackGroup(
            b, 0, tuple(f"blk.{b}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        )
        for b in range(n_layer)
    ]


@pytest.fixture
def open_streamer(model):
    streamers = []

    def make(budget, **options):
        streamer = Streamer(model[0], groups(), LRU(), budget, **options)
        streamers.append(streamer)
        return streamer

    yield make
    for streamer in streamers:
        streamer.close()


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def slice_of(streamer: Streamer, layer: int, part: int, expert: int) -> bytes:
    return bytes(streamer.arenas[layer][part].slice(expert))


def expected_slice(model, layer: int, part: int, expert: int) -> bytes:
    return model[1][groups()[layer].tensors[part]][expert].tobytes()


def assert_resident_experts_are_right(streamer: Streamer, model) -> None:
    for layer in range(N_LAYER):
        for expert in np.flatnonzero(streamer.resident(layer)):
            for part in range(3):
                assert slice_of(streamer, layer, part, expert) == expected_slice(
                    model, layer, part, expert
                ), (layer, part, expert)


@pytest.mark.parametrize("budget", [0, 3 * EXPERT, 10 * EXPERT, 10**9])
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("poison", [None, 0xFF], ids=["plain", "poison"])
def test_load_makes_exactly_the_right_bytes_resident(
    open_streamer, model, monkeypatch, budget, lanes, direct, poison
):
    """Experts of 2,400 bytes share pages, so neighbours come and go on the same page."""
    streamer = open_streamer(budget, lanes=lanes, direct=direct, poison=poison)
    if direct and not streamer.reader.direct:
        pytest.skip(f"direct reads are not in effect here: {streamer.reader.mode}")
    monkeypatch.setattr(reader_module, "INLINE_BYTES", 0)
    rng = np.random.default_rng(0)
    for step in range(40):
        n_token = 5 if step % 8 == 0 else 1
        for layer in range(N_LAYER):
            wanted = np.stack([rng.permutation(N_EXPERT)[:2] for _ in range(n_token)])
            streamer.load(layer, wanted.astype(np.int32))
            assert streamer.resident(layer)[wanted].all()
            assert_resident_experts_are_right(streamer, model)
            assert streamer.state.resident_bytes <= max(budget, len(np.unique(wanted)) * EXPERT)


def test_memory_that_holds_no_resident_expert_is_given_back(open_streamer):
    streamer = open_streamer(2 * EXPERT)
    rng = np.random.default_rng(0)
    for _ in range(50):
        for layer in range(N_LAYER):
            streamer.load(layer, rng.permutation(N_EXPERT)[:2].astype(np.int32))
    pages = 0
    for arenas in streamer.arenas:
        for arena in arenas:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
                file.seek(arena.base // PAGE * 8)
                words = np.frombuffer(file.read(len(arena.view) // PAGE * 8), np.uint64)
            pages += int((words >> np.uint64(62) != 0).sum())
    assert pages <= 2 * 3 * 2  # two experts of three slices, each on at most two pages
    streamer.clear()
    assert not any(streamer.resident(layer).any() for layer in range(N_LAYER))


def test_page_shared_by_a_victim_and_an_expert_to_be_read_is_not_freed(
    open_streamer, model, monkeypatch
):
    """A lane could free it after another had read into it."""
    streamer = open_streamer(EXPERT, lanes=1, direct=False)
    real, order = reader_module.free_pages, []
    monkeypatch.setattr(reader_module, "free_pages", lambda *free: order.append(free))
    streamer.load(0, ids(0))
    streamer.load(0, ids(1))  # the neighbour, partly on the same page
    for address, n_bytes in order:  # as late as can be
        real(address, n_bytes)
    assert_resident_experts_are_right(streamer, model)


def test_load_charges_an_expert_once_to_the_first_row(open_streamer):
    streamer = open_streamer(10**9)
    streamer.load(1, ids(3))
    actual = streamer.load(1, np.array([[3, 5], [5, 3], [6, 5]], np.int32))
    assert actual.residency.tolist() == [1, 0, 0, 1, 0, 0]
    assert actual.read_bytes.tolist() == [0, EXPERT, 0, 0, EXPERT, 0]
    assert actual.read_bytes.dtype == np.uint32
    assert actual.n_missing == 2


def test_load_without_rows_does_nothing(open_streamer):
    actual = open_streamer(10**9).load(0, np.empty((0, 2), np.int32))
    assert (actual.residency.size, actual.read_bytes.size, actual.n_missing) == (0, 0, 0)


def test_layers_have_keys_of_their_own(open_streamer):
    streamer = open_streamer(10**9)
    streamer.load(0, ids(2))
    assert streamer.resident(0).tolist() == [i == 2 for i in range(N_EXPERT)]
    assert not streamer.resident(1).any()
    assert streamer.load(1, ids(2)).residency.tolist() == [0]


def test_costs_are_counted_and_taken_once(open_streamer):
    streamer = open_streamer(2 * EXPERT)
    streamer.load(0, ids(0, 1))
    streamer.load(1, ids(0, 1))
    costs = streamer.take_costs()
    assert costs.evictions == 2
    assert costs.bytes_read >= 4 * EXPERT
    assert costs.io_s > 0
    assert costs.manage_s > 0
    assert streamer.take_costs().bytes_read == 0


def test_victims_are_freed_before_the_misses_are_read(open_streamer, monkeypatch):
    streamer = open_streamer(2 * EXPERT, lanes=1)
    streamer.load(0, ids(0, 1))
    events = []
    real = os.preadv
    monkeypatch.setattr(reader_module, "free_pages", lambda *free: events.append("free"))
    monkeypatch.setattr(os, "preadv", lambda *a: events.append("read") or real(*a))
    streamer.load(1, ids(0, 1))
    assert events[0] == "free"
    assert "read" in events


@pytest.mark.parametrize("id_", [-1, N_EXPERT, 2**31 - 1])
def test_id_out_of_range_is_refused_and_changes_nothing(open_streamer, id_):
    streamer = open_streamer(10**9)
    streamer.load(0, ids(1))
    with pytest.raises(StreamingError, match=f"expert ids must be from 0 to {N_EXPERT - 1}; got"):
        streamer.load(0, ids(2, id_))
    assert streamer.resident(0).tolist() == [i == 1 for i in range(N_EXPERT)]


@pytest.mark.parametrize("lanes", [1, 4])
def test_failed_read_leaves_no_key_and_the_next_load_works(
    open_streamer, model, monkeypatch, lanes
):
    streamer = open_streamer(4 * EXPERT, lanes=lanes)
    monkeypatch.setattr(reader_module, "INLINE_BYTES", 0)
    streamer.load(0, ids(0, 1, 2))
    calls = []

    def failing(descriptor, buffers, offset):
        calls.append(offset)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StreamingError, match="got EIO"):
        streamer.load(0, ids(2, 3, 4))
    monkeypatch.undo()
    # 0 went as a victim, 3 and 4 were not read; what was resident and wanted stays.
    assert np.flatnonzero(streamer.resident(0)).tolist() == [1, 2]
    assert streamer.state.resident_bytes == 2 * EXPERT
    for arena in streamer.arenas[0]:
        assert [e for e in range(N_EXPERT) if arena.is_resident(e)] == [1, 2]
    assert_resident_experts_are_right(streamer, model)
    assert streamer.load(0, ids(2, 3, 4)).residency.tolist() == [1, 0, 0]
    assert_resident_experts_are_right(streamer, model)


def test_cancelled_load_leaves_no_key(open_streamer, model):
    streamer = open_streamer(10**9)
    streamer.reader.cancel()
    with pytest.raises(ReadCancelled):
        streamer.load(0, ids(0, 1))
    assert not streamer.resident(0).any()
    streamer.reader.resume()
    streamer.load(0, ids(0, 1))
    assert_resident_experts_are_right(streamer, model)


def test_addresses_are_where_llama_cpp_would_look(open_streamer, model):
    streamer = open_streamer(10**9)
    streamer.load(2, ids(7))
    for part, name in enumerate(groups()[2].tensors):
        raw = ctypes.string_at(streamer.addresses[name] + 7 * SLICE, SLICE)
        assert raw == expected_slice(model, 2, part, 7)
        assert streamer.addresses[name] % PAGE == model[0].tensors[name].offset % PAGE
    assert streamer.expert_bytes.tolist() == [EXPERT] * N_LAYER


def test_stack_in_two_groups_is_refused_and_nothing_is_left(model):
    before = os.listdir("/proc/self/fd"), threading.active_count()
    with pytest.raises(StreamingError, match="must be its own"):
        Streamer(model[0], [groups()[0], groups()[0]], LRU(), 0)
    assert len(os.listdir("/proc/self/fd")) == len(before[0])
    assert threading.active_count() == before[1]


def test_other_platform_is_refused_with_words(model, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(StreamingError, match="streaming must run on Linux; got 'darwin'"):
        Streamer(model[0], groups(), LRU(), 0)


def arena_lines() -> int:
    return sum(1 for _ in Path("/proc/self/maps").open())


def test_closed_streamer_leaves_no_mapping_descriptor_or_thread(model, monkeypatch):
    gc.collect()
    mapped = []
    real = arena_module._anonymous

    def noted(length, huge):
        mapping = real(length, huge)
        mapped.append(np.frombuffer(mapping, np.uint8).__array_interface__["data"][0])
        return mapping

    monkeypatch.setattr(arena_module, "_anonymous", noted)
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    streamer = Streamer(model[0], groups(), LRU(), 10**9, lanes=4)
    for layer in range(N_LAYER):
        streamer.load(layer, ids(*range(N_EXPERT)))
    streamer.close()
    streamer.close()
    assert len(mapped) == 3 * N_LAYER
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    ranges = [(int(low, 16), int(high, 16)) for low, high in spans]
    assert not [a for a in mapped if (a, a + 5 * PAGE) in ranges]
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert threading.active_count() == threads


# Dense weights


def dense_list(layout) -> list[tuple[str, int]]:
    return [(e.name, e.n_bytes) for e in layout.tensors.values() if "_exps" not in e.name]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_dense_weights_are_copied_whole_and_aligned(model, direct):
    layout, arrays = model
    reader = Reader([layout.path], 2, direct)
    dense = DenseWeights(layout, dense_list(layout), reader)
    try:
        assert set(dense.addresses) == {name for name in arrays if "_exps" not in name}
        for name, address in dense.addresses.items():
            assert ctypes.string_at(address, arrays[name].nbytes) == arrays[name].tobytes()
            assert address % PAGE == layout.tensors[name].offset % PAGE
    finally:
        dense.close()
        dense.close()
        reader.close()
    assert dense.addresses == {}


def test_dense_weights_take_little_more_than_their_bytes(model):
    layout, _ = model
    reader = Reader([layout.path], 1)
    dense = DenseWeights(layout, dense_list(layout) * 2, reader)
    assert dense.n_bytes <= sum(n for _, n in dense_list(layout)) + 2 * PAGE * (N_LAYER + 1)
    dense.close()
    reader.close()


def test_no_dense_weights_is_no_memory(model):
    reader = Reader([model[0].path], 1)
    assert DenseWeights(model[0], [], reader).n_bytes == 0
    reader.close()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [([("none.weight", 4)], "no such tensor"), ([("token_embd.weight", 4)], "1280 bytes there")],
)
def test_dense_weights_that_differ_from_the_file_are_refused(model, wanted, expected):
    reader = Reader([model[0].path], 1)
    with pytest.raises(StreamingError, match=expected):
        DenseWeights(model[0], wanted, reader)
    reader.close()


def test_dense_weights_that_cannot_be_read_leave_no_memory(model, monkeypatch):
    reader = Reader([model[0].path], 1)

    def failing(descriptor, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StreamingError, match="got EIO"):
        DenseWeights(model[0], dense_list(model[0]), reader)
    reader.close()


# The automatic budget

GIB = 2**30


@pytest.mark.parametrize(
    ("available", "experts", "options", "expected"),
    [
        (8 * GIB, 20 * GIB, {}, 8 * GIB - 3 * GIB // 2),
        (8 * GIB, 20 * GIB, {"dense_to_convert": GIB}, 7 * GIB - 3 * GIB // 2),
        (8 * GIB, 20 * GIB, {"floor": "4 GiB"}, 4 * GIB),
        (8 * GIB, 20 * GIB, {"ceiling": "2 GiB"}, 2 * GIB),
        (8 * GIB, GIB, {}, GIB),
        (2 * GIB, 20 * GIB, {}, LEAST_BUDGET),
        (0, 20 * GIB, {}, LEAST_BUDGET),
        (2 * GIB, 20 * GIB, {"ceiling": "1 GiB"}, GIB),
        (2 * GIB, GIB, {}, GIB),
        (None, 20 * GIB, {}, LEAST_BUDGET),
        (None, GIB, {"ceiling": 0}, 0),
    ],
)
def test_auto_budget_follows_the_sizing_rule(available, experts, options, expected):
    assert auto_budget(available, experts, **options).n_bytes == expected


def test_auto_budget_says_so_if_memory_is_unknown():
    assert "free memory is unknown" in auto_budget(None, 20 * GIB).reason


def test_auto_budget_says_so_if_memory_is_short():
    assert "although memory is short" in auto_budget(GIB, 20 * GIB).reason


def test_auto_budget_with_an_impossible_floor_is_refused():
    with pytest.raises(SettingsError, match="cache_floor must be a size"):
        auto_budget(GIB, GIB, floor="12 XB")


def test_memory_available_is_known_here():
    available = memory_available()
    assert available is not None
    assert available > 2**20
