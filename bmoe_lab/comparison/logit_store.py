"""The logits of one run, kept on disk while other runs are compared with it.

The file has no name: it is gone when the store is closed, and when the process dies.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError

__all__ = ["LogitStore"]

# Left on the disk beside our file: filling it to the last byte would hurt other programs.
_MARGIN_BYTES = 64 << 20


class LogitStore:
    """Rows of float32 logits in an unlinked temporary file.

    The space is reserved before the first row is written, so a full disk is an error here, not a
    crash later. Rows are written and read one at a time: memory does not grow with the text.

    Parameters
    ----------
    n_row : int
        Rows that will be written.
    n_vocab : int
        Logits per row.
    folder : str, optional
        Where the file lies; the system's folder for temporary files if left out (``TMPDIR``).

    Raises
    ------
    SettingsError
        If the folder has too little free space.

    Examples
    --------
    >>> import numpy as np
    >>> with LogitStore(2, 3) as store:
    ...     store.append(np.array([1, 2, 3], dtype=np.float32))
    ...     store.row(0).tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(self, n_row: int, n_vocab: int, folder: str | None = None) -> None:
        self.n_row = n_row
        self.n_vocab = n_vocab
        self.n_written = 0
        where = tempfile.gettempdir() if folder is None else folder
        n_bytes = 4 * n_row * n_vocab
        free = shutil.disk_usage(where).free
        if n_bytes + _MARGIN_BYTES > free:
            raise self._no_space(n_bytes, free, where)
        self._file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115  (closed by close())
        self._buffer = np.empty(n_vocab, dtype=np.float32)
        try:
            if n_bytes:
                os.posix_fallocate(self._file.fileno(), 0, n_bytes)
        except OSError as error:
            self._file.close()
            raise self._no_space(n_bytes, free, where) from error

    def _no_space(self, n_bytes: int, free: int, where: str) -> SettingsError:
        return SettingsError(
            f"the temporary folder must have room for the baseline's logits, {self.n_row} tokens x "
            f"{self.n_vocab} x 4 bytes = {n_bytes / 2**20:.1f} MiB; got {free / 2**20:.1f} MiB "
            f"free in {where!r}. Compare on less text, or set TMPDIR to a larger disk."
        )

    def append(self, logits: npt.NDArray[np.float32]) -> None:
        """Write the next row."""
        if logits.shape != (self.n_vocab,) or self.n_written >= self.n_row:
            raise SettingsError(
                f"logits must be row {self.n_written} of {self.n_row} with shape "
                f"({self.n_vocab},); got shape {logits.shape}. Score the same text in every run."
            )
        data = np.ascontiguousarray(logits, dtype=np.float32).data.cast("B")
        offset = 4 * self.n_vocab * self.n_written
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written
        self.n_written += 1

    def row(self, index: int) -> npt.NDArray[np.float32]:
        """Return a row; the array is overwritten by the next call."""
        if not 0 <= index < self.n_written:
            raise SettingsError(
                f"index must be a row written before, 0 to {self.n_written - 1}; got {index!r}. "
                "Score the same text in every run."
            )
        target = self._buffer.data.cast("B")
        offset = 4 * self.n_vocab * index
        while target:
            n_read = os.preadv(self._file.fileno(), [target], offset)
            if n_read == 0:
                raise EOFError(f"row {index} ends early: the temporary file was cut from outside")
            target, offset = target[n_read:], offset + n_read
        return self._buffer

    def close(self) -> None:
        """Delete the file. Calling it again does nothing."""
        self._file.close()

    def __enter__(self) -> LogitStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
