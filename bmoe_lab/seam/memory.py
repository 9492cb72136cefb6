"""Memory of the process that is not Python's: pages of llama.cpp's mapping, peak residency."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

__all__ = ["major_faults", "release_pages", "reset_peak", "rss_bytes"]

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def release_pages(ranges: list[tuple[int, int]]) -> int:
    """Give back the whole pages inside each (address, n_bytes) of a file mapping.

    The pages are clean copies of the file, so they are read again if anything touches them.
    Neighbouring ranges are joined first: an expert stack need not end at a page.

    Returns
    -------
    int
        Bytes of address space released; 0 where the platform has no ``madvise``.
    """
    if not sys.platform.startswith("linux"):
        return 0
    page = mmap.PAGESIZE
    merged: list[list[int]] = []
    for start, size in sorted(ranges):
        # GGUF pads tensors, so neighbours are up to one alignment apart.
        if merged and start - (merged[-1][0] + merged[-1][1]) <= page:
            merged[-1][1] = max(merged[-1][1], start + size - merged[-1][0])
        else:
            merged.append([start, size])
    released = 0
    for start, size in merged:
        first = -(-start // page) * page
        last = (start + size) // page * page
        if last > first:
            code = _libc.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED
            )
            if code == 0:
                released += last - first
    return released


def reset_peak() -> bool:
    """Reset the kernel's peak-RSS counter of this process; False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


#: Process id to descriptor of its statm file: in a forked child the parent's would still read
#: the parent.
_statm: dict[int, int] = {}


def rss_bytes() -> float:
    """Return the resident bytes of this process now; NaN where unknown."""
    try:
        descriptor = _statm.get(os.getpid())
        if descriptor is None:
            descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            _statm[os.getpid()] = descriptor
        return float(int(os.pread(descriptor, 128, 0).split()[1]) * mmap.PAGESIZE)
    except (OSError, IndexError, ValueError):
        return float("nan")


def major_faults() -> float:
    """Return the major page faults of this process so far; NaN where unknown."""
    try:
        import resource
    except ImportError:
        return float("nan")
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)
