"""A file that a recording appends to while it runs, readable after a kill.

The byte layout is in ``docs/trace-format.md``: frames (:mod:`bmoe_lab.recording.frames`) that
carry a JSON header, an Arrow schema, Arrow record batches of whole evaluations, a JSON end. Every
frame is handed to the operating system unbuffered, so what was flushed survives the death of the
process. It survives a power cut only with ``fsync=True``, which costs a disk flush per frame.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import TraceFileError
from bmoe_lab.recording.frames import DONE, HEAD, ROWS, SCHEMA, pack_frame
from bmoe_lab.recording.spec import Column, TraceSpec
from bmoe_lab.schema import SCHEMA_VERSION, clean_attrs

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["JOURNAL_VERSION", "STATE_DIR_VARIABLE", "SUFFIX", "Journal", "lock", "state_folder"]

JOURNAL_VERSION = 1
SUFFIX = ".journal"
STATE_DIR_VARIABLE = "BMOE_LAB_STATE_DIR"


def state_folder() -> Path:
    """Return the folder for journals of runs without a target.

    The environment variable ``BMOE_LAB_STATE_DIR``, else the user's state folder.
    """
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_state_dir("bmoe-lab"))


def lock(fd: int) -> bool:
    """Mark an open journal as belonging to a living process; False if another one holds it.

    The mark goes with the process, however it dies. Where files cannot be locked, every journal
    counts as free.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Journal:
    """Appends a recording to a file, whole evaluations at a time.

    Parameters
    ----------
    path : path-like
        A file that does not exist yet.
    spec : TraceSpec
        What is recorded.
    fsync : bool, default False
        Flush every frame to the disk: what was flushed then survives a power cut too.

    Attributes
    ----------
    n_token : int
        Tokens written.
    failed : bool
        Whether a write failed; nothing is written any more.

    Raises
    ------
    TraceFileError
        If the file cannot be made or its header cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], spec: TraceSpec, *, fsync: bool = False
    ) -> None:
        self.path = Path(path)
        self.spec = spec
        self.fsync = fsync
        self.n_token = 0
        self.failed = False
        self._columns: list[Column] = spec.columns
        self._schema: pa.Schema | None = None
        try:
            # Never over an existing file: it may be all that is left of a killed run. A device
            # such as /dev/full is no such file.
            mode = "wb" if self.path.is_char_device() else "xb"
            self._file = open(self.path, mode, buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise TraceFileError(
                f"journal must be a new file in a folder that can be written; "
                f"got {str(self.path)!r} ({error.strerror}). Choose another target."
            ) from error
        lock(self._file.fileno())
        self._end = 0
        import pyarrow  # noqa: F401 (paid here, before the run, not in its first flush)

        header = {
            "journal_version": JOURNAL_VERSION,
            "schema_version": SCHEMA_VERSION,
            "pid": os.getpid(),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "spec": spec.to_json(),
        }
        try:
            self._write(HEAD, json.dumps(header).encode())
        except TraceFileError:
            self.remove()
            raise

    @classmethod
    def create(
        cls,
        spec: TraceSpec,
        *,
        save: str | os.PathLike[str] | None = None,
        fsync: bool = False,
    ) -> Journal:
        """Return a new journal beside a target, or in the state folder.

        A leftover of an earlier run is never overwritten: the new journal gets a number.

        Parameters
        ----------
        spec : TraceSpec
            What is recorded.
        save : path-like, optional
            Where the trace will be saved in the end.
        fsync : bool, default False
            As in the class.
        """
        if save is None:
            folder = state_folder()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TraceFileError(
                    f"state folder must be one that can be made; got {str(folder)!r} "
                    f"({error.strerror}). Set {STATE_DIR_VARIABLE} to another one."
                ) from error
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
            stem = str(folder / f"{now}-{os.getpid()}")
        else:
            stem = str(Path(save))
        number = 1
        while True:
            tail = "" if number == 1 else f".{number}"
            path = Path(stem + tail + SUFFIX)
            if not path.exists():
                with contextlib.suppress(FileExistsError):
                    return cls(path, spec, fsync=fsync)
            number += 1

    def append(self, columns: Mapping[str, Any]) -> None:
        """Write rows as one frame.

        Parameters
        ----------
        columns : mapping of str to array
            Every column of the spec, token first, plus the costs: the names of the first call hold
            for the whole journal.

        Raises
        ------
        TraceFileError
            If it cannot be written: disk full, file too large. What was written before stays
            readable.
        """
        import pyarrow as pa

        if self._schema is None:
            known = {column.name for column in self._columns}
            self._columns += [
                Column(name, "float64", missing=np.nan) for name in columns if name not in known
            ]
            fields = [pa.field(c.name, _arrow_type(c), nullable=False) for c in self._columns]
            self._schema = pa.schema(fields)
            self._write(SCHEMA, self._schema.serialize().to_pybytes())
        arrays = [_to_arrow(columns[column.name], column) for column in self._columns]
        batch = pa.record_batch(arrays, schema=self._schema)
        self._write(ROWS, batch.serialize().to_pybytes())
        self.n_token += batch.num_rows

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the end: the journal now holds a whole recording.

        Parameters
        ----------
        attrs : mapping
            Attributes that the end of the run added.
        """
        end = {"n_token": self.n_token, "attrs": clean_attrs(attrs)}
        self._write(DONE, json.dumps(end).encode())

    def close(self) -> None:
        """Close the file and leave it; it counts as a leftover now."""
        self._file.close()

    def remove(self) -> None:
        """Close the file and delete it."""
        self.close()
        if not self.path.is_char_device():
            self.path.unlink(missing_ok=True)

    def _write(self, kind: bytes, payload: bytes) -> None:
        if self.failed:
            raise TraceFileError(
                f"journal must be writable; got an earlier failure in {str(self.path)!r}. "
                "Save what is in memory elsewhere."
            )
        frame = memoryview(pack_frame(kind, payload))
        try:
            written = 0
            while written < len(frame):  # a nearly full disk takes a part, then fails
                written += self._file.write(frame[written:]) or 0
            if self.fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self.failed = True
            # Half a frame is only a torn tail to a reader, but a clean end is better.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)
            raise TraceFileError(
                f"journal must be writable; got {error.strerror!r} at byte {self._end} of "
                f"{str(self.path)!r}. {self.n_token} tokens in it stay readable; "
                "free space or choose another target."
            ) from error
        self._end += len(frame)


def _arrow_type(column: Column) -> pa.DataType:
    import pyarrow as pa

    if column.dtype == "str":
        return pa.string()
    value = pa.from_numpy_dtype(np.dtype(column.dtype))
    if not column.shape:
        return value
    item = pa.field("item", value, nullable=False)
    return pa.list_(item, int(np.prod(column.shape)))


def _to_arrow(values: npt.NDArray[Any], column: Column) -> pa.Array:
    import pyarrow as pa

    kind = _arrow_type(column)
    if column.dtype == "str":
        return pa.array(list(values), type=kind)
    flat = np.ascontiguousarray(values, dtype=column.dtype).reshape(-1)
    if not column.shape:
        return pa.array(flat, type=kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, type=kind.value_type), type=kind)
