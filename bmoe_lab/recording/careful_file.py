"""A file that HDF5 can write to without ever seeing an error.

HDF5 keeps what it could not write and tries again when its objects are freed: after a failed write
it reports at random places, and may crash the process at exit. Here a failed write is remembered,
its bytes are kept in memory, and the caller asks :meth:`CarefulFile.check` when it suits.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

__all__ = ["CarefulFile"]


class CarefulFile(io.RawIOBase):
    """A new file, seekable, whose writes do not raise.

    Parameters
    ----------
    path : pathlib.Path
        Where; it is replaced.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []  # what the disk did not take, in order
        self._at = 0
        self._size = 0

    def check(self) -> None:
        """Raise the first error that a write had."""
        if self._error is not None:
            raise self._error

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def write(self, data: Any) -> int:
        """Write all of it, or keep it."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view) and self._error is None:
                done += os.pwrite(self._file.fileno(), view[done:], self._at + done)
        except OSError as error:
            self._error = error
        if done < len(view):
            self._kept.append((self._at + done, bytes(view[done:])))
        self._at += len(view)
        self._size = max(self._size, self._at)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read what was written, kept bytes included."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        data = os.pread(self._file.fileno(), count, self._at)
        view[:count] = data + bytes(count - len(data))
        for start, kept in self._kept:
            low, high = max(start, self._at), min(start + len(kept), self._at + count)
            if low < high:
                view[low - self._at : high - self._at] = kept[low - start : high - start]
        self._at += count
        return count

    def truncate(self, size: int | None = None) -> int:
        """Set the size."""
        self._size = self._at if size is None else size
        try:
            os.ftruncate(self._file.fileno(), self._size)
        except OSError as error:
            self._error = self._error or error
        return self._size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
