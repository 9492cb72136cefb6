"""How fast the disk delivers a model: the bandwidth that a streamed run is measured against."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bmoe_lab.errors import SettingsError
from bmoe_lab.streaming.reader import MAX_PIECE_BYTES, MIN_PIECE_BYTES, Job, Reader

__all__ = ["Bandwidth", "probe_bandwidth"]


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured read rate.

    Attributes
    ----------
    bytes_per_s : float
    n_bytes : int
        Bytes read.
    seconds : float
    request_bytes, lanes : int
        Bytes per system call, and calls in flight.
    mode : str
        ``"direct"``, or ``"buffered"`` with the reason.
    """

    bytes_per_s: float
    n_bytes: int
    seconds: float
    request_bytes: int
    lanes: int
    mode: str

    @property
    def method(self) -> str:
        """One line for people."""
        return (
            f"{self.n_bytes} bytes in file order, {self.request_bytes} per request, "
            f"{self.lanes} in flight, into memory already in use, {self.mode}"
        )


def probe_bandwidth(
    path: str | os.PathLike[str],
    *,
    request_bytes: int = 2**20,
    lanes: int = 4,
    n_bytes: int = 256 * 2**20,
    offset: int = 0,
    direct: bool = True,
) -> Bandwidth:
    """Read a stretch of a file front to back and return the rate.

    Parameters
    ----------
    path : path-like
    request_bytes : int, default 1 MiB
        From 4 KiB to 4 MiB, a multiple of the page: about the size of an expert's slice.
    lanes : int, default 4
    n_bytes : int, default 256 MiB
        How much to read at most; less if the file ends before.
    offset : int, default 0
        Where to begin, rounded down to a page.
    direct : bool, default True
        Where direct reads are not to be had, the stretch is dropped from the page cache first,
        as far as the kernel follows that advice; :attr:`Bandwidth.mode` tells.

    Returns
    -------
    Bandwidth

    Raises
    ------
    SettingsError
        If `request_bytes` is no such multiple, or nothing lies behind `offset`.
    StreamingError
        If the file cannot be read.
    """
    page = mmap.PAGESIZE
    if request_bytes % page or not page <= request_bytes <= MAX_PIECE_BYTES:
        raise SettingsError(
            f"request_bytes must be a multiple of {page} up to {MAX_PIECE_BYTES}; "
            f"got {request_bytes!r}."
        )
    size = Path(path).stat().st_size
    start = offset // page * page
    stop = min(start + n_bytes, size)
    count = (stop - start) // request_bytes
    if count < 1:
        raise SettingsError(
            f"offset must leave {request_bytes} bytes to read; got {offset!r} of {size} bytes."
        )
    # Enough for the lanes to overlap, in batches whose pieces are exactly the requests.
    batch = lanes * max(8, -(-MIN_PIECE_BYTES // request_bytes))
    reader = Reader([path], lanes, direct)
    try:
        with mmap.mmap(-1, batch * request_bytes) as scratch, memoryview(scratch) as view:
            for at in range(0, len(view), page):
                view[at] = 1
            slots = [view[i * request_bytes : (i + 1) * request_bytes] for i in range(batch)]
            if not reader.direct:
                _drop_cached(path, start, count * request_bytes)
            try:
                began = time.perf_counter()
                for first in range(0, count, batch):
                    reader.read(
                        [
                            Job(0, at, request_bytes, slots[i], at)
                            for i in range(min(batch, count - first))
                            for at in [start + (first + i) * request_bytes]
                        ]
                    )
                seconds = time.perf_counter() - began
            finally:
                for slot in slots:
                    slot.release()
    finally:
        reader.close()
    total = count * request_bytes
    return Bandwidth(total / seconds, total, seconds, request_bytes, lanes, reader.mode)


def _drop_cached(path: str | os.PathLike[str], start: int, n_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, start, n_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
