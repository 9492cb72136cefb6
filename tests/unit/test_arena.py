from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import StreamingError
from bmoe_lab.streaming.arena import Arena

PAGE = mmap.PAGESIZE


@pytest.fixture
def make_arena():
    arenas = []

    def make(slice_bytes, n_expert, offset=0, **options):
        arena = Arena(slice_bytes * n_expert, offset, slice_bytes, n_expert, **options)
        arenas.append(arena)
        return arena

    yield make
    for arena in arenas:
        arena.close()


def resident_pages(arena: Arena) -> int:
    """Return the pages of the arena that take memory, from the kernel's page map."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(arena.base // PAGE * 8)
        words = np.frombuffer(file.read(len(arena.view) // PAGE * 8), np.uint64)
    return int((words >> np.uint64(62) != 0).sum())  # present or swapped


def fill(arena: Arena, expert: int, byte: int = 1) -> None:
    arena.admit(expert)
    arena.slice(expert)[:] = bytes([byte]) * arena.slice_bytes


@pytest.mark.parametrize("offset", [0, 32, PAGE - 32, PAGE, 5 * PAGE + 96])
def test_address_is_congruent_with_the_file_offset(make_arena, offset):
    arena = make_arena(1000, 7, offset)
    assert arena.address % PAGE == offset % PAGE
    assert arena.origin % PAGE == 0
    assert arena.address - arena.base == offset - arena.origin


def test_address_names_the_memory_of_the_slices(make_arena):
    arena = make_arena(1000, 7, 32)
    fill(arena, 3, 9)
    window, _, _ = arena.window(3)
    whole = np.frombuffer(arena.view, np.uint8)
    start = arena.address - arena.base + 3 * 1000
    assert (whole[start : start + 1000] == 9).all()
    assert int(whole.sum()) == 9 * 1000
    window.release()
    del whole


def test_window_is_the_whole_pages_around_a_slice(make_arena):
    arena = make_arena(PAGE + 100, 3, 10 * PAGE + 32)
    view, offset, n_bytes = arena.window(1)
    assert offset % PAGE == n_bytes % PAGE == 0
    assert offset <= 10 * PAGE + 32 + PAGE + 100
    assert offset + n_bytes >= 10 * PAGE + 32 + 2 * (PAGE + 100)
    assert len(view) == n_bytes
    view.release()


def test_new_arena_takes_no_memory(make_arena):
    assert resident_pages(make_arena(10 * PAGE, 100)) == 0


def test_evict_gives_memory_back(make_arena):
    arena = make_arena(3 * PAGE, 4)
    for expert in range(4):
        fill(arena, expert)
    assert resident_pages(arena) == 12
    arena.evict(1)
    assert resident_pages(arena) == 9
    assert bytes(arena.slice(1)) == bytes(3 * PAGE)
    assert bytes(arena.slice(2)) == b"\1" * (3 * PAGE)


def test_shared_page_stays_while_a_neighbour_is_resident(make_arena):
    """Four experts to a page: only the last to leave releases it."""
    arena = make_arena(PAGE // 4, 8)
    for expert in range(8):
        fill(arena, expert, expert + 1)
    for expert in (0, 1, 3):
        arena.evict(expert)
        assert bytes(arena.slice(2)) == b"\3" * (PAGE // 4)
        assert resident_pages(arena) == 2
    arena.evict(2)
    assert resident_pages(arena) == 1
    assert bytes(arena.slice(4)) == b"\5" * (PAGE // 4)


def test_vacate_returns_only_pages_that_nothing_covers(make_arena):
    arena = make_arena(2 * PAGE + PAGE // 2, 3)
    for expert in range(3):
        fill(arena, expert)
    address, n_bytes = arena.vacate(1)  # pages 2 to 4; 2 is shared with expert 0
    assert (address - arena.base, n_bytes) == (3 * PAGE, 2 * PAGE)
    assert arena.vacate(1) == (0, 0)
    address, n_bytes = arena.vacate(0)
    assert (address - arena.base, n_bytes) == (0, 3 * PAGE)


def test_vacate_leaves_the_last_page_to_the_next_expert(make_arena):
    arena = make_arena(2 * PAGE + PAGE // 2, 3)
    for expert in range(3):
        fill(arena, expert, expert + 1)
    arena.evict(0)  # pages 0 to 2; 2 is shared with expert 1
    assert bytes(arena.slice(1)) == b"\2" * (2 * PAGE + PAGE // 2)
    assert resident_pages(arena) == 6


def test_admit_twice_counts_once(make_arena):
    arena = make_arena(PAGE // 2, 2)
    arena.admit(0)
    arena.admit(0)
    arena.evict(0)
    assert not arena.is_resident(0)
    fill(arena, 1)
    arena.evict(1)
    assert resident_pages(arena) == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    slice_bytes=st.integers(1, 3 * PAGE),
    offset=st.integers(0, 2 * PAGE),
    moves=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=10, max_size=40),
)
def test_arena_keeps_residents_and_holds_no_page_without_one(slice_bytes, offset, moves):
    arena = Arena(slice_bytes * 10, offset, slice_bytes, 10)
    try:
        resident = {}
        for step, (expert, comes) in enumerate(moves):
            if comes:
                fill(arena, expert, step % 255 + 1)
                resident[expert] = step % 255 + 1
            else:
                arena.evict(expert)
                resident.pop(expert, None)
            for e, byte in resident.items():
                assert bytes(arena.slice(e)) == bytes([byte]) * slice_bytes
        skew = arena.address - arena.base
        pages = {
            page
            for e in resident
            for page in range(
                (skew + e * slice_bytes) // PAGE, (skew + (e + 1) * slice_bytes - 1) // PAGE + 1
            )
        }
        assert resident_pages(arena) == len(pages)
    finally:
        arena.close()


def test_poison_fills_everything_that_is_not_resident(make_arena):
    arena = make_arena(100, 50, 32, poison=0xFF)
    assert set(bytes(arena.view)) == {0xFF}
    fill(arena, 3, 1)
    fill(arena, 4, 2)
    arena.evict(3)
    assert bytes(arena.slice(3)) == b"\xff" * 100
    assert bytes(arena.slice(4)) == b"\2" * 100
    assert arena.vacate(4) == (0, 0)  # poisoned memory is not given back
    assert bytes(arena.slice(4)) == b"\xff" * 100


def test_larger_pages_than_the_systems_are_kept_to(make_arena):
    arena = make_arena(PAGE, 8, 3 * PAGE, page_size=4 * PAGE)
    assert arena.origin == 0
    for expert in range(8):
        fill(arena, expert)
    arena.evict(1)  # shares its page of four with 0
    assert bytes(arena.slice(0)) == b"\1" * PAGE


def test_stack_that_is_not_slices_is_refused():
    with pytest.raises(StreamingError, match="must be n_expert slices; got 999 bytes for 10 x 100"):
        Arena(999, 0, 100, 10)


def test_address_space_that_cannot_be_had_is_refused():
    with pytest.raises(StreamingError, match="address space for experts must be available"):
        Arena(2**60, 0, 2**60, 1)


def test_closed_arena_leaves_no_mapping():
    gc.collect()
    arena = Arena(2**30, 0, 2**20, 2**10)
    fill(arena, 5)
    span = f"{arena.base:x}-"
    assert span in Path("/proc/self/maps").read_text()
    arena.close()
    arena.close()
    assert span not in Path("/proc/self/maps").read_text()


def test_view_that_outlives_close_keeps_its_memory():
    """A read in flight must not be cut off from under the kernel."""
    arena = Arena(PAGE, 0, PAGE, 1)
    fill(arena, 0, 7)
    kept = arena.slice(0)
    arena.close()
    assert kept[0] == 7


@pytest.mark.parametrize(("huge", "flag"), [(False, "nh"), (True, "hg")])
def test_arena_huge_pages_only_where_everything_may_stay(make_arena, huge, flag):
    arena = make_arena(4 * 2**20, 2, huge=huge)
    fill(arena, 0)
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and ":" not in head:
            start, stop = (int(x, 16) for x in head.split("-"))
            inside = start <= arena.base < stop
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    if flag not in flags and not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    assert flag in flags
