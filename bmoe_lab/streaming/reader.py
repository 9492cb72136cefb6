"""Parallel reads of file ranges into memory, past the page cache where that really works.

A reader has lanes. Lane 0 is the calling thread; the others are threads that sleep until there is
work. ``os.preadv`` releases the interpreter lock, so lanes overlap in the kernel, where the time
goes. All lanes take pieces from one list, in the order given: whichever is free takes the next, so
bytes are balanced without a plan.

``O_DIRECT`` is verified at open, twice over: one block from the middle of each file is read both
ways and must be equal (some file systems return garbage), and it must have come from the device
although the page cache held it (tmpfs accepts the flag and ignores it).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from bmoe_lab.errors import SettingsError, StreamingError
from bmoe_lab.seam.pages import free_pages

__all__ = ["Job", "ReadCancelled", "Reader"]

INLINE_BYTES = 128 * 1024
"""Less than this is read by the calling thread alone: waking a lane costs more than it saves."""

MIN_PIECE_BYTES = 256 * 1024
"""Windows are not cut smaller than this to occupy more lanes; flash is flat above it."""

MAX_PIECE_BYTES = 4 * 2**20
"""One system call reads no more, so that a cancelled read ends soon."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class ReadCancelled(StreamingError):
    """A read was given up because :meth:`Reader.cancel` was called."""


class Job(NamedTuple):
    """One range of a file and the memory that it goes to.

    Attributes
    ----------
    shard : int
        Index of the file.
    start, n_bytes : int
        The range, in bytes from the start of the file.
    view : memoryview
        Writable memory; must reach to the ends of the blocks that hold the range, and its address
        must be a multiple of the block for direct reads.
    origin : int
        File offset of ``view[0]``, a multiple of the block for direct reads.
    """

    shard: int
    start: int
    n_bytes: int
    view: memoryview
    origin: int


class _Piece(NamedTuple):
    """One stretch of a file for one system call."""

    descriptor: int
    start: int
    stop: int
    view: memoryview
    origin: int
    block: int  # reads of this descriptor begin at multiples of it
    frees: list[tuple[int, int]]  # (address, bytes) to give back before reading


class _Tally(NamedTuple):
    """What one lane did for one load."""

    n_bytes: int
    busy_s: float
    free_s: float


class _Load:
    """The work of one :meth:`Reader.read`, shared by the lanes."""

    __slots__ = ("cancelled", "failed", "pieces", "tallies", "wake")

    def __init__(self, pieces: Iterable[_Piece], cancelled: threading.Event) -> None:
        self.pieces = deque(pieces)
        self.failed: tuple[_Piece, int, BaseException | None] | None = None
        self.cancelled = cancelled
        self.tallies: list[_Tally] = []  # of the other lanes
        self.wake: SimpleQueue[None] = SimpleQueue()

    def drain(self) -> _Tally:
        """Work until no piece is left, or one has failed in any lane. Raises nothing."""
        clock = time.perf_counter
        began = clock()
        free_s = 0.0
        n_bytes = 0
        pieces, preadv, is_cancelled = self.pieces, os.preadv, self.cancelled.is_set
        while self.failed is None and not is_cancelled():
            try:
                piece = pieces.popleft()
            except IndexError:
                break
            descriptor, at, stop, view, origin, block, frees = piece
            try:
                if frees:
                    started = clock()
                    for address, length in frees:
                        free_pages(address, length)
                    free_s += clock() - started
                while at < stop:
                    got = preadv(descriptor, [view[at - origin : stop - origin]], at)
                    n_bytes += got
                    # A short direct read may end inside a block: that block is read again.
                    after = at + got if at + got >= stop else (at + got) // block * block
                    if after <= at:
                        self.fail(piece, at + got, None)
                        break
                    at = after
            except BaseException as error:
                # Also what is no error of the disk: raised by read(), in the caller's thread.
                self.fail(piece, at, error)
        return _Tally(n_bytes, clock() - began, free_s)

    def serve(self) -> None:
        """Be one of the other lanes."""
        self.tallies.append(self.drain())
        self.wake.put(None)

    def wait(self, n_lanes: int) -> None:
        """Sleep until `n_lanes` other lanes are done; may be called again after an interrupt."""
        while len(self.tallies) < n_lanes:
            self.wake.get()

    def fail(self, piece: _Piece, at: int, error: BaseException | None) -> None:
        """Keep the first failure, which is the one that is told; the rest is not worth reading."""
        if self.failed is None:
            self.failed = piece, at, error

    def free_rest(self) -> None:
        """Free what pieces that nobody will read were to free."""
        while self.pieces:
            for address, length in self.pieces.popleft().frees:
                free_pages(address, length)


def _lane(inbox: SimpleQueue[_Load | None]) -> None:
    """Serve loads until None comes. Knows no Reader, so that a forgotten one can be collected."""
    while (load := inbox.get()) is not None:
        load.serve()
        del load


def _shut(inboxes: list[SimpleQueue[_Load | None]], descriptors: list[int]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    while descriptors:
        os.close(descriptors.pop())


class Reader:
    """Reads file ranges on several lanes.

    Parameters
    ----------
    paths : sequence of path-like
        The files, by shard.
    lanes : int, default 4
        Reads in flight at once, the calling thread included.
    direct : bool, default True
        Ask for ``O_DIRECT``. What came of it is in :attr:`direct`.
    block : int, optional
        Alignment of direct reads; the page by default, which every device takes.

    Attributes
    ----------
    direct : bool
        Whether reads bypass the page cache, as verified.
    mode : str
        ``"direct"``, or ``"buffered"`` with the reason.
    bytes_requested, bytes_read : int
        What jobs asked for, and what was read for it: direct reads are rounded to blocks.
    busy_s, free_s : float
        Seconds that lanes worked, and the part of it in which they freed memory, summed over
        lanes.

    Raises
    ------
    StreamingError
        If a file cannot be opened.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        lanes: int = 4,
        direct: bool = True,
        *,
        block: int | None = None,
    ) -> None:
        if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= 64:
            raise SettingsError(f"io_lanes must be a whole number from 1 to 64; got {lanes!r}.")
        self.lanes = lanes
        self.block = mmap.PAGESIZE if block is None else block
        self.bytes_requested = 0
        self.bytes_read = 0
        self.busy_s = 0.0
        self.free_s = 0.0
        self._paths = [Path(path) for path in paths]
        self._pid = os.getpid()
        self._cancelled = threading.Event()
        self._inboxes: list[SimpleQueue[_Load | None]] = []
        self._descriptors: list[int] = []
        self._finalizer = weakref.finalize(self, _shut, self._inboxes, self._descriptors)
        self._threads: list[threading.Thread] = []
        try:
            self._buffered = [self._open(path, 0) for path in self._paths]
            self._sizes = [os.fstat(descriptor).st_size for descriptor in self._buffered]
            self._direct: list[int] = []
            self.mode = self._try_direct() if direct else "buffered: not asked for direct reads"
            self.direct = self.mode == "direct"
        except BaseException:
            self._finalizer()
            raise
        for number in range(1, lanes):
            inbox: SimpleQueue[_Load | None] = SimpleQueue()
            self._inboxes.append(inbox)
            thread = threading.Thread(
                target=_lane, args=(inbox,), name=f"bmoe-lab-lane-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _open(self, path: Path, flags: int) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            raise StreamingError(
                f"model file must stay readable; got {error.strerror} for {str(path)!r}. "
                "Check that it is still there."
            ) from error
        self._descriptors.append(descriptor)
        if not flags and hasattr(os, "posix_fadvise"):
            # Experts are read at random: read-ahead would fetch the neighbours.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def _try_direct(self) -> str:
        """Open every file for direct reads; return ``"direct"`` or why not."""
        if not _O_DIRECT:
            return "buffered: this system has no O_DIRECT"
        for path, buffered, size in zip(self._paths, self._buffered, self._sizes, strict=True):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
            except OSError as error:
                return f"buffered: O_DIRECT was refused ({error.strerror})"
            self._descriptors.append(descriptor)
            doubt = _doubt(descriptor, buffered, size, self.block)
            if doubt is not None:
                self._direct.clear()
                return f"buffered: {doubt}"
            self._direct.append(descriptor)
        return "direct"

    def read(self, jobs: Sequence[Job], frees: Sequence[tuple[int, int]] = ()) -> None:
        """Read every job; return when the last byte is in place.

        Parameters
        ----------
        jobs : sequence of Job
            In the order in which they are wanted. Neighbours in file and memory are joined.
        frees : sequence of (int, int), optional
            Address and bytes of memory to give back. Freed in the lanes, as freeing takes time in
            which others can read, but always as many bytes as are read, before they are read; all
            of it also if the read fails.

        Raises
        ------
        StreamingError
            The first failure, naming file, byte and cause; the other jobs may or may not have
            been read. The next call starts afresh.
        ReadCancelled
            If :meth:`cancel` was called.
        """
        if not self._finalizer.alive:
            raise StreamingError("reader must be open; got a closed one. Open the session again.")
        if os.getpid() != self._pid:
            raise StreamingError(
                "experts must be read by the process that opened the model; got a forked child. "
                "Open a session of its own in the child."
            )
        pieces, n_bytes = self._plan(jobs)
        _attach(pieces, frees)
        load = _Load(pieces, self._cancelled)
        helpers = 0 if n_bytes < INLINE_BYTES else min(len(self._inboxes), max(len(pieces) - 1, 0))
        for inbox in self._inboxes[:helpers]:
            inbox.put(load)
        try:
            own = load.drain()
            load.wait(helpers)
        except BaseException as error:
            # An interrupt in this thread: the lanes still write to the caller's memory.
            if pieces:
                load.fail(pieces[0], pieces[0].start, error)
            load.wait(helpers)
            load.free_rest()
            raise
        load.free_rest()
        for tally in (own, *load.tallies):
            self.bytes_read += tally.n_bytes
            self.busy_s += tally.busy_s
            self.free_s += tally.free_s
        if load.failed is not None:
            raise self._failure(*load.failed)
        if self._cancelled.is_set():
            raise ReadCancelled("reading must run to its end; got an interrupt. Run it again.")
        self.bytes_requested += sum(job.n_bytes for job in jobs)

    def cancel(self) -> None:
        """Stop reading between two pieces, now and until :meth:`resume`. Safe in any thread."""
        self._cancelled.set()

    def resume(self) -> None:
        """Allow reading again after :meth:`cancel`."""
        self._cancelled.clear()

    def close(self) -> None:
        """Stop the lanes and close the files. A second call does nothing."""
        if self._finalizer.alive:
            own = os.getpid() == self._pid
            self._finalizer()
            if own:
                for thread in self._threads:
                    thread.join()

    def _plan(self, jobs: Sequence[Job]) -> tuple[list[_Piece], int]:
        """Round jobs to blocks, join neighbours, cut what is large; return pieces and bytes."""
        direct, block = self.direct, self.block
        merged: list[list[int]] = []  # shard, start, stop, index of a job with its view
        open_ranges: dict[int, list[int]] = {}  # by view, the range that the next job may extend
        for index, (shard, start, n_bytes, view, _) in enumerate(jobs):
            stop = start + n_bytes
            if direct:
                start -= start % block
                stop = -(-stop // block) * block
            last = open_ranges.get(id(view))
            if last is not None and last[0] == shard and last[1] <= start <= last[2]:
                last[2] = max(last[2], stop)
            else:
                open_ranges[id(view)] = last = [shard, start, stop, index]
                merged.append(last)

        total = sum(stop - start for _, start, stop, _ in merged)
        cut = min(max(MIN_PIECE_BYTES, -(-total // self.lanes)), MAX_PIECE_BYTES)
        cut = -(-cut // block) * block
        pieces: list[_Piece] = []
        for shard, start, stop, index in merged:
            view, origin = jobs[index].view, jobs[index].origin
            end = stop
            if direct:
                # The last, partial block of the file has no whole block to read.
                end = min(stop, self._sizes[shard] // block * block)
                tail = min(stop, self._sizes[shard])
                if tail > end:
                    pieces.append(_Piece(self._buffered[shard], end, tail, view, origin, 1, []))
            descriptor = (self._direct if direct else self._buffered)[shard]
            unit = block if direct else 1
            for at in range(start, end, cut):
                pieces.append(_Piece(descriptor, at, min(at + cut, end), view, origin, unit, []))
        return pieces, total

    def _failure(self, piece: _Piece, at: int, error: BaseException | None) -> BaseException:
        """Return the exception that tells what went wrong with `piece`."""
        if error is not None and (
            not isinstance(error, OSError) or isinstance(error, StreamingError)
        ):
            return error
        descriptors = self._buffered if piece.descriptor in self._buffered else self._direct
        path = str(self._paths[descriptors.index(piece.descriptor)])
        size = os.fstat(piece.descriptor).st_size
        if error is None or at >= size:
            failure = StreamingError(
                f"model file must stay as it was at open; got its end at byte {min(at, size)}, "
                f"before byte {piece.stop}, of {path!r}. Restore the file, then open the session "
                "again."
            )
        else:
            code = errno.errorcode.get(error.errno or 0, str(error.errno))
            failure = StreamingError(
                f"model file must stay readable; got {code} ({error.strerror}) at byte {at} of "
                f"{path!r}. Check the disk, then run again."
            )
        failure.__cause__ = error
        return failure


def _attach(pieces: list[_Piece], frees: Sequence[tuple[int, int]]) -> None:
    """Give every piece what is to be freed before it: at least its own bytes, while there are."""
    if not frees:
        return
    if not pieces:
        for address, n_bytes in frees:
            free_pages(address, n_bytes)
        return
    balance = 0  # freed less read
    rest = iter(frees)
    for piece in pieces:
        balance -= piece.stop - piece.start
        while balance < 0 and (free := next(rest, None)) is not None:
            piece.frees.append(free)
            balance += free[1]
    pieces[0].frees.extend(rest)


def _doubt(direct: int, buffered: int, size: int, block: int) -> str | None:
    """Return why direct reads of this file cannot be trusted, None if they can."""
    if size < block:
        return f"the file is smaller than a block of {block} bytes"
    at = size // 2 // block * block
    at = min(at, size // block * block - block)
    with mmap.mmap(-1, 2 * block) as scratch, memoryview(scratch) as view:
        plain, straight = view[:block], view[block:]
        try:
            # Buffered first: then the page cache holds the block, and only a read that really
            # bypasses it makes the device work.
            if os.preadv(buffered, [plain], at) != block:
                return "a block in the middle could not be read"
            before = _device_bytes()
            try:
                got = os.preadv(direct, [straight], at)
            except OSError as error:
                return f"a direct read was refused ({error.strerror})"
            after = _device_bytes()
            if got != block or plain != straight:
                return "a direct read returned other bytes than a buffered one"
        finally:
            plain.release()
            straight.release()
    if before is not None and after is not None and after == before:
        return "the file system takes O_DIRECT but reads through the page cache"
    return None


def _device_bytes() -> int | None:
    """Return the bytes that this thread made devices read; None where the kernel does not say."""
    try:
        with open("/proc/thread-self/io", "rb", buffering=0) as file:
            for line in file.read().splitlines():
                if line.startswith(b"read_bytes:"):
                    return int(line.split()[1])
    except OSError:
        return None
    return None
