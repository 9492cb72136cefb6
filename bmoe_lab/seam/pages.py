"""Giving pages of a private mapping back to the kernel without holding the interpreter lock.

``mmap.madvise`` does the same but keeps the lock, so that lanes could not free memory while
others read.
"""

from __future__ import annotations

import ctypes
import os
import sys

from bmoe_lab.errors import StreamingError

__all__ = ["free_pages"]

_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform != "win32":
    # int madvise(void *addr, size_t length, int advice);
    _libc.madvise.restype = ctypes.c_int
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def free_pages(address: int, n_bytes: int) -> None:
    """Give back whole pages of a private anonymous mapping; they read as zeros afterwards.

    Parameters
    ----------
    address, n_bytes : int
        Multiples of the page.

    Raises
    ------
    StreamingError
        If the kernel refuses; the range is not such a mapping, or is locked.
    """
    if _libc.madvise(address, n_bytes, _MADV_DONTNEED):
        code = ctypes.get_errno()
        raise StreamingError(
            f"memory of an expert must be freed; got {os.strerror(code)} for {n_bytes} bytes at "
            f"{address:#x}. Close the session."
        )
