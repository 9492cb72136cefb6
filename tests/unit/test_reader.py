from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bmoe_lab.errors import SettingsError, StreamingError
from bmoe_lab.streaming import probe as probe_module
from bmoe_lab.streaming import reader as reader_module
from bmoe_lab.streaming.probe import probe_bandwidth
from bmoe_lab.streaming.reader import Job, ReadCancelled, Reader

PAGE = mmap.PAGESIZE
SIZE = 300 * PAGE + 1234


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "data.bin"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.fixture
def memory():
    """A buffer congruent with the file: byte i is the place of file byte i."""
    return memoryview(mmap.mmap(-1, SIZE + PAGE))


@pytest.fixture
def open_reader():
    readers = []

    def make(paths, *args, **options):
        reader = Reader(paths if isinstance(paths, list) else [paths], *args, **options)
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        reader.close()


def wants_direct(reader: Reader) -> Reader:
    if not reader.direct:
        pytest.skip(f"direct reads are not in effect here: {reader.mode}")
    return reader


@pytest.fixture(params=["direct", "buffered"])
def direct(request) -> bool:
    return request.param == "direct"


def job(memory, start: int, n_bytes: int) -> Job:
    return Job(0, start, n_bytes, memory, 0)


@pytest.mark.parametrize("lanes", [1, 4])
def test_read_puts_every_byte_in_place(file, memory, open_reader, lanes, direct):
    reader = open_reader(file, lanes, direct)
    if direct:
        wants_direct(reader)
    content = file.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(20):
        starts = np.sort(rng.choice(SIZE - 5000, 6, replace=False)).tolist()
        sizes = rng.integers(1, 5000, 6).tolist()
        reader.read([job(memory, a, n) for a, n in zip(starts, sizes, strict=True)])
        for a, n in zip(starts, sizes, strict=True):
            assert memory[a : a + n] == content[a : a + n]
    reader.read([job(memory, 0, SIZE)])
    assert memory[:SIZE] == content


def test_direct_read_fills_whole_blocks_in_place(file, memory, open_reader):
    reader = wants_direct(open_reader(file, 1))
    reader.read([job(memory, PAGE + 10, PAGE)])
    assert memory[PAGE : 3 * PAGE] == file.read_bytes()[PAGE : 3 * PAGE]
    assert bytes(memory[:PAGE]) == bytes(PAGE)
    assert (reader.bytes_requested, reader.bytes_read) == (PAGE, 2 * PAGE)


def test_buffered_read_fills_exactly_the_range(file, memory, open_reader):
    reader = open_reader(file, 1, False)
    reader.read([job(memory, PAGE + 10, 20)])
    assert memory[PAGE + 10 : PAGE + 30] == file.read_bytes()[PAGE + 10 : PAGE + 30]
    assert bytes(memory[: PAGE + 10]) == bytes(PAGE + 10)
    assert bytes(memory[PAGE + 30 : 2 * PAGE]) == bytes(PAGE - 30)
    assert (reader.bytes_requested, reader.bytes_read) == (20, 20)
    assert reader.mode == "buffered: not asked for direct reads"


def test_last_partial_block_of_the_file_is_read(file, memory, open_reader, direct):
    reader = open_reader(file, 2, direct)
    reader.read([job(memory, SIZE - 100, 100)])
    assert memory[SIZE - 100 : SIZE] == file.read_bytes()[-100:]


def test_several_files_are_told_apart(file, tmp_path, memory, open_reader, direct):
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(range(256)) * 64)
    reader = open_reader([file, other], 2, direct)
    with mmap.mmap(-1, 4 * PAGE) as mapping, memoryview(mapping) as view:
        reader.read([job(memory, PAGE, PAGE), Job(1, PAGE, PAGE, view, 0)])
        assert view[PAGE : 2 * PAGE] == other.read_bytes()[PAGE : 2 * PAGE]
    assert memory[PAGE : 2 * PAGE] == file.read_bytes()[PAGE : 2 * PAGE]


def recorded_reads(monkeypatch) -> list[tuple[int, int]]:
    calls = []
    real = os.preadv

    def preadv(descriptor, buffers, offset):
        calls.append((offset, len(buffers[0])))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return calls


def test_neighbours_are_joined_into_one_read(file, memory, open_reader, monkeypatch):
    """Experts 3, 4, 5 of two stacks, expert by expert as a load asks for them: two reads."""
    reader = open_reader(file, 1, False)
    calls = recorded_reads(monkeypatch)
    with mmap.mmap(-1, SIZE) as mapping, memoryview(mapping) as view:
        jobs = []
        for expert in (3, 4, 5):
            jobs.append(job(memory, 1000 * expert, 1000))
            jobs.append(Job(0, 50_000 + 1000 * expert, 1000, view, 0))
        reader.read(jobs)
        assert calls == [(3000, 3000), (53_000, 3000)]
        assert view[53_000:56_000] == file.read_bytes()[53_000:56_000]


def test_direct_neighbours_that_share_a_block_read_it_once(file, memory, open_reader, monkeypatch):
    reader = wants_direct(open_reader(file, 1))
    calls = recorded_reads(monkeypatch)
    reader.read([job(memory, 100, PAGE), job(memory, 100 + PAGE, PAGE)])
    assert calls == [(0, 3 * PAGE)]


def test_large_reads_are_cut_so_that_all_lanes_work(file, memory, open_reader, monkeypatch):
    reader = open_reader(file, 4, False)
    calls = recorded_reads(monkeypatch)
    monkeypatch.setattr(reader_module, "MIN_PIECE_BYTES", 16 * PAGE)
    reader.read([job(memory, 0, 256 * PAGE)])
    assert sorted(calls) == [(64 * PAGE * i, 64 * PAGE) for i in range(4)]


def test_small_reads_stay_on_the_calling_thread(file, memory, open_reader, monkeypatch):
    reader = open_reader(file, 4, False)
    threads = set()
    real = os.preadv

    def preadv(*args):
        threads.add(threading.current_thread())
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    reader.read([job(memory, 10_000 * i, 100) for i in range(8)])
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("lanes", [1, 4])
def test_short_reads_go_on_where_they_ended(file, memory, open_reader, monkeypatch, lanes, direct):
    reader = open_reader(file, lanes, direct)
    real = os.preadv
    unit = PAGE if reader.direct else 999

    def short(descriptor, buffers, offset):
        return real(descriptor, [buffers[0][:unit]], offset)

    monkeypatch.setattr(os, "preadv", short)
    reader.read([job(memory, 5, SIZE - 5)])
    assert memory[5:SIZE] == file.read_bytes()[5:]


def test_short_direct_read_within_a_block_reads_the_block_again(
    file, memory, open_reader, monkeypatch
):
    """The kernel refuses to go on in the middle of a block."""
    reader = wants_direct(open_reader(file, 1))
    real = os.preadv

    def short(descriptor, buffers, offset):
        return min(real(descriptor, buffers, offset), 3 * PAGE + 100)

    monkeypatch.setattr(os, "preadv", short)
    reader.read([job(memory, 0, 20 * PAGE)])
    assert memory[: 20 * PAGE] == file.read_bytes()[: 20 * PAGE]


@pytest.mark.parametrize("lanes", [1, 4])
def test_read_error_names_file_byte_and_cause_and_the_next_read_works(
    file, memory, open_reader, monkeypatch, lanes, direct
):
    reader = open_reader(file, lanes, direct)
    real = os.preadv

    def failing(descriptor, buffers, offset):
        if offset >= 100 * PAGE:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        StreamingError, match=r"got EIO \(Input/output error\) at byte \d+ of '.*data\.bin'\. Check"
    ) as caught:
        reader.read([job(memory, i * 10 * PAGE, 5 * PAGE) for i in range(30)])
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    reader.read([job(memory, 0, SIZE)])
    assert memory[:SIZE] == file.read_bytes()


def test_error_in_another_lane_is_raised_in_the_caller(file, memory, open_reader, monkeypatch):
    reader = open_reader(file, 2, False)
    monkeypatch.setattr(reader_module, "INLINE_BYTES", 0)
    real, caller = os.preadv, threading.current_thread()
    lane_failed = threading.Event()

    def failing(descriptor, buffers, offset):
        if threading.current_thread() is not caller:
            lane_failed.set()
            raise OSError(errno.EIO, "Input/output error")
        assert lane_failed.wait(10)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StreamingError, match="got EIO"):
        reader.read([job(memory, i * 10 * PAGE, PAGE) for i in range(6)])


def test_unexpected_exception_in_a_lane_is_raised_and_does_not_hang(
    file, memory, open_reader, monkeypatch
):
    """A lane that died of something other than an OSError would be waited for forever."""
    reader = open_reader(file, 2, False)
    monkeypatch.setattr(reader_module, "INLINE_BYTES", 0)
    real, caller = os.preadv, threading.current_thread()
    lane_failed = threading.Event()

    def failing(descriptor, buffers, offset):
        if threading.current_thread() is not caller:
            lane_failed.set()
            raise ZeroDivisionError("surprise")
        assert lane_failed.wait(10)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    jobs = [job(memory, i * 2 * PAGE, PAGE) for i in range(100)]
    with pytest.raises(ZeroDivisionError, match="surprise"):
        reader.read(jobs)
    monkeypatch.undo()
    reader.read(jobs)


def test_file_cut_after_open_is_told_as_such(tmp_path, memory, open_reader, direct):
    path = tmp_path / "cut.bin"
    path.write_bytes(bytes(range(256)) * 1024)
    reader = open_reader(path, 1, direct)
    os.truncate(path, 10 * PAGE + 100)
    with pytest.raises(StreamingError, match=f"got its end at byte {10 * PAGE + 100}, before"):
        reader.read([job(memory, 8 * PAGE, 8 * PAGE)])


def test_cancel_stops_reading_until_resume(file, memory, open_reader, monkeypatch):
    reader = open_reader(file, 2, False)
    real = os.preadv
    calls = []

    def cancelling(descriptor, buffers, offset):
        calls.append(offset)
        reader.cancel()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cancelling)
    with pytest.raises(ReadCancelled, match="got an interrupt"):
        reader.read([job(memory, i * 5 * PAGE, PAGE) for i in range(50)])
    assert len(calls) <= 2
    monkeypatch.undo()
    with pytest.raises(ReadCancelled):
        reader.read([job(memory, 0, PAGE)])
    reader.resume()
    reader.read([job(memory, 0, PAGE)])
    assert memory[:PAGE] == file.read_bytes()[:PAGE]


def test_interrupt_in_the_caller_waits_for_the_other_lanes(file, memory, open_reader, monkeypatch):
    """They write to the caller's memory, so it must not come back while they do."""
    reader = open_reader(file, 2, False)
    monkeypatch.setattr(reader_module, "INLINE_BYTES", 0)
    real, caller = os.preadv, threading.current_thread()
    started, finished = threading.Event(), []

    def preadv(descriptor, buffers, offset):
        if threading.current_thread() is caller:
            assert started.wait(10)
            raise KeyboardInterrupt
        started.set()
        got = real(descriptor, buffers, offset)
        finished.append(offset)
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(KeyboardInterrupt):
        reader.read([job(memory, i * 5 * PAGE, PAGE) for i in range(2)])
    assert len(finished) == 1


def test_interrupt_while_waiting_for_other_lanes_waits_on(file, memory, open_reader, monkeypatch):
    """The same, if the interrupt finds the caller asleep."""
    reader = open_reader(file, 2, False)
    monkeypatch.setattr(reader_module, "INLINE_BYTES", 0)
    real, caller = os.preadv, threading.current_thread()
    lane_started, caller_waits, came_back = (threading.Event() for _ in range(3))
    finished = []
    real_wait = reader_module._Load.wait

    def wait(load, n_lanes):
        caller_waits.set()
        real_wait(load, n_lanes)

    def preadv(descriptor, buffers, offset):
        if threading.current_thread() is caller:
            assert lane_started.wait(10)
            return real(descriptor, buffers, offset)
        lane_started.set()
        assert caller_waits.wait(10)
        signal.pthread_kill(caller.ident, signal.SIGINT)
        came_back.wait(0.2)
        finished.append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(reader_module._Load, "wait", wait)
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(KeyboardInterrupt):
        reader.read([job(memory, i * 5 * PAGE, PAGE) for i in range(2)])
    finished_by_then = list(finished)
    came_back.set()
    assert len(finished_by_then) == 1


class Freed:
    """Stands for the kernel: notes what was freed, and what had been read by then."""

    def __init__(self, monkeypatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.lock = threading.Lock()
        real = os.preadv

        def free(address, n_bytes):
            with self.lock:
                self.events.append(("free", n_bytes))

        def preadv(descriptor, buffers, offset):
            with self.lock:
                self.events.append(("read", len(buffers[0])))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(reader_module, "free_pages", free)
        monkeypatch.setattr(os, "preadv", preadv)

    def total(self, kind: str) -> int:
        return sum(n for what, n in self.events if what == kind)


def test_memory_is_freed_before_the_bytes_that_replace_it(file, memory, open_reader, monkeypatch):
    reader = open_reader(file, 1, False)
    freed = Freed(monkeypatch)
    reader.read(
        [job(memory, i * 10 * PAGE, 2 * PAGE) for i in range(5)],
        [(0, PAGE) for _ in range(12)],
    )
    assert freed.total("free") == 12 * PAGE
    balance = 0
    for kind, n_bytes in freed.events:
        balance += n_bytes if kind == "free" else -n_bytes
        assert balance >= 0


def test_memory_is_freed_also_if_nothing_is_read(file, open_reader, monkeypatch):
    reader = open_reader(file, 4, False)
    freed = Freed(monkeypatch)
    reader.read([], [(0, PAGE), (0, PAGE)])
    assert freed.total("free") == 2 * PAGE


@pytest.mark.parametrize("how", ["error", "cancelled"])
def test_memory_is_freed_also_if_the_read_fails(file, memory, open_reader, monkeypatch, how):
    reader = open_reader(file, 2, False)
    freed = Freed(monkeypatch)

    def failing(descriptor, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    if how == "error":
        monkeypatch.setattr(os, "preadv", failing)
    else:
        reader.cancel()
    with pytest.raises(StreamingError):
        reader.read(
            [job(memory, i * 10 * PAGE, PAGE) for i in range(9)], [(0, PAGE) for _ in range(9)]
        )
    assert freed.total("free") == 9 * PAGE


def test_file_smaller_than_a_block_is_read_buffered(tmp_path, open_reader):
    path = tmp_path / "tiny.bin"
    path.write_bytes(b"abc")
    reader = open_reader(path, 1)
    assert not reader.direct
    assert "smaller than a block" in reader.mode


def test_direct_read_with_other_bytes_falls_back(file, memory, open_reader, monkeypatch):
    """O_DIRECT on some FUSE storage opens and returns garbage."""
    wants_direct(open_reader(file))
    real = os.preadv

    def garbage(descriptor, buffers, offset):
        got = real(descriptor, buffers, offset)
        if os.get_blocking(descriptor) and _is_direct(descriptor):
            buffers[0][0] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", garbage)
    reader = open_reader(file)
    assert reader.mode == "buffered: a direct read returned other bytes than a buffered one"
    reader.read([job(memory, 0, PAGE)])
    assert memory[:PAGE] == file.read_bytes()[:PAGE]


def _is_direct(descriptor: int) -> bool:
    flags = int(
        Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8
    )
    return bool(flags & os.O_DIRECT)


def test_direct_open_that_is_refused_falls_back(file, open_reader, monkeypatch):
    real = os.open

    def refusing(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)
    assert open_reader(file).mode == "buffered: O_DIRECT was refused (Invalid argument)"


def test_direct_read_that_is_refused_falls_back(file, open_reader, monkeypatch):
    real = os.preadv

    def refusing(descriptor, buffers, offset):
        if _is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert open_reader(file).mode == "buffered: a direct read was refused (Invalid argument)"


def test_direct_flag_that_is_ignored_is_noticed(open_reader):
    """tmpfs accepts O_DIRECT and reads through the page cache all the same."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    path = shm / f"bmoe-lab-test-{os.getpid()}.bin"
    try:
        path.write_bytes(bytes(64 * PAGE))
        assert not open_reader(path).direct
    finally:
        path.unlink()


@pytest.mark.parametrize("lanes", [0, 65, True, 2.0, "4"])
def test_impossible_lanes_are_refused(file, lanes):
    with pytest.raises(SettingsError, match="io_lanes must be a whole number from 1 to 64; got"):
        Reader([file], lanes)


def test_file_that_is_gone_is_refused_and_nothing_is_left(file, tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StreamingError, match="must stay readable; got No such file"):
        Reader([file, tmp_path / "none.bin"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_closed_reader_leaves_no_thread_or_descriptor_and_refuses(file, memory):
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    reader = Reader([file], 4)
    assert threading.active_count() == threads + 3
    reader.close()
    reader.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    with pytest.raises(StreamingError, match="reader must be open"):
        reader.read([job(memory, 0, 10)])


def test_forgotten_reader_stops_its_lanes(file):
    threads = threading.enumerate()
    reader = Reader([file], 3)
    lanes = [thread for thread in threading.enumerate() if thread not in threads]
    del reader
    gc.collect()
    for lane in lanes:
        lane.join(10)
        assert not lane.is_alive()


def test_forked_child_is_refused(file):
    """Its lanes do not exist: it would wait for them forever."""
    script = f"""
import os
from bmoe_lab.errors import StreamingError
from bmoe_lab.streaming.reader import Reader
reader = Reader([{str(file)!r}], 4)
child = os.fork()
if child == 0:
    try:
        reader.read([])
    except StreamingError as error:
        os._exit(0 if "forked child" in str(error) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
reader.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_bandwidth_probe_reads_the_stretch_and_tells_its_method(file):
    bandwidth = probe_bandwidth(file, request_bytes=4 * PAGE, lanes=2, n_bytes=100 * PAGE)
    assert bandwidth.n_bytes == 100 * PAGE
    assert bandwidth.bytes_per_s == bandwidth.n_bytes / bandwidth.seconds
    assert f"{4 * PAGE} per request, 2 in flight" in bandwidth.method
    assert bandwidth.mode in bandwidth.method


def test_bandwidth_probe_uses_requests_of_the_size_asked_for(file, monkeypatch):
    calls = recorded_reads(monkeypatch)
    probe_bandwidth(file, request_bytes=2 * PAGE, lanes=4, n_bytes=64 * PAGE, direct=False)
    assert sorted(calls) == [(2 * PAGE * i, 2 * PAGE) for i in range(32)]


@pytest.mark.parametrize("request_bytes", [0, 1000, 8 * 2**20])
def test_bandwidth_probe_refuses_odd_requests(file, request_bytes):
    with pytest.raises(SettingsError, match="request_bytes must be a multiple of"):
        probe_bandwidth(file, request_bytes=request_bytes)


def test_bandwidth_probe_beyond_the_file_is_refused(file):
    with pytest.raises(SettingsError, match="offset must leave"):
        probe_module.probe_bandwidth(file, offset=SIZE)
