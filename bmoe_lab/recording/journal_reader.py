"""Reading a journal, finished or cut short.

A reader walks the frames and stops at the first one that is not whole or whose checksum is wrong:
what lies before is the trace, what lies behind cannot be trusted. Nothing here raises for damage
behind the first rows; it is said in ``journal_note``.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from bmoe_lab.errors import SchemaError, TraceFileError
from bmoe_lab.recording.frames import DONE, HEAD, MAGIC, ROWS, SCHEMA, Frame, read_frame
from bmoe_lab.recording.journal import JOURNAL_VERSION
from bmoe_lab.recording.spec import Column, TraceSpec, build_trace
from bmoe_lab.schema import SCHEMA_VERSION

__all__ = ["JournalReader"]


@dataclass(frozen=True)
class _Rows:
    """Where one frame of rows is: bytes, tokens."""

    offset: int
    start: int
    stop: int


class JournalReader:
    """The readable part of a journal.

    Parameters
    ----------
    path : path-like
        A journal; it may still grow, what is there now is read.

    Attributes
    ----------
    spec : TraceSpec
        What was recorded.
    n_token : int
        Tokens that can be read.
    complete : bool
        Whether the end was written and fits.
    note : str
        Why not, in words; empty if complete.

    Raises
    ------
    TraceFileError
        If it is not a journal, or its header is damaged.
    SchemaError
        If a newer version wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.n_token = 0
        self.complete = False
        self.end_attrs: dict[str, Any] = {}
        self._rows: list[_Rows] = []
        self._schema: Any = None
        self._lock = threading.Lock()  # one file position for all lazy arrays
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise TraceFileError(
                f"journal must be a readable file; got {str(self.path)!r} ({error.strerror})."
            ) from error
        # A file left to the garbage collector warns; lazy arrays have no better end.
        weakref.finalize(self, self._file.close)
        try:
            self._read_header()
            self.note = self._scan()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; lazy arrays of it stop working."""
        self._file.close()

    def dataset(self, *, lazy: bool = False) -> xr.Dataset:
        """Return the trace.

        Parameters
        ----------
        lazy : bool, default False
            Leave the arrays over layers in the file, which then stays open.

        Raises
        ------
        TraceFileError
            If not one token can be read.
        """
        if not self.n_token:
            raise TraceFileError(
                f"journal must hold at least one token; got none in {str(self.path)!r}. "
                f"{self.note.capitalize()}."
            )
        columns: dict[str, Any] = {}
        small = [column for column in self._columns if not (lazy and column.shape)]
        parts: dict[str, list[npt.NDArray[Any]]] = {column.name: [] for column in small}
        for rows in self._rows:
            batch = self._batch(rows)
            for column in small:
                parts[column.name].append(_to_numpy(batch, column))
        for column in self._columns:
            if column.name in parts:
                columns[column.name] = np.concatenate(parts[column.name])
            else:
                columns[column.name] = indexing.LazilyIndexedArray(_JournalArray(self, column))
        attrs = dict(self.end_attrs)
        attrs["schema_version"] = self._version
        if not self.complete:
            attrs["complete"] = 0
            attrs["journal_note"] = self.note
        return build_trace(self.spec, columns, attrs)

    def read(self, column: Column, start: int, stop: int, inner: tuple[Any, ...]) -> Any:
        """Return tokens start...stop-1 of a column, its other axes indexed by `inner`."""
        parts = []
        for rows in self._rows:
            if rows.start < stop and start < rows.stop:
                block = _to_numpy(self._batch(rows), column)
                here = slice(max(start - rows.start, 0), min(stop, rows.stop) - rows.start)
                parts.append(block[(here, *inner)])
        return np.concatenate(parts)

    def _read_header(self) -> None:
        self._size = os.fstat(self._file.fileno()).st_size
        frame = read_frame(self._file, 0, self._size)
        if isinstance(frame, str) or frame.kind != HEAD:
            self._file.seek(0)
            begins = self._file.read(len(MAGIC)) == MAGIC
            reason = f"{frame} (the header)" if begins else "it does not begin like a journal"
            raise TraceFileError(
                f"journal must begin with a readable header; got {str(self.path)!r}: {reason}. "
                "Nothing can be read from it."
            )
        header = json.loads(frame.payload)
        if header["journal_version"] > JOURNAL_VERSION:
            raise TraceFileError(
                f"journal_version must be at most {JOURNAL_VERSION}; "
                f"got {header['journal_version']} in {str(self.path)!r}. "
                "Update bmoe_lab to read it."
            )
        self._version = int(header["schema_version"])
        if self._version > SCHEMA_VERSION:
            raise SchemaError(
                f"schema_version must be at most {SCHEMA_VERSION}; got {self._version} in "
                f"{str(self.path)!r}. Update bmoe_lab to read it."
            )
        self.created: str = header["created"]
        self.pid: int = header["pid"]
        self.spec = TraceSpec.from_json(header["spec"])
        self._columns = self.spec.columns
        self._offset = frame.end

    def _scan(self) -> str:
        """Walk the frames to the first that cannot be used; return why it cannot."""
        offset = self._offset
        while offset < self._size:
            frame = read_frame(self._file, offset, self._size)
            if isinstance(frame, str):
                return f"{frame} at byte {offset}; {self.n_token} tokens survived"
            if frame.kind == SCHEMA:
                self._read_schema(frame)
            elif frame.kind == ROWS and self._schema is not None:
                count = self._parse(frame.payload).num_rows
                self._rows.append(_Rows(offset, self.n_token, self.n_token + count))
                self.n_token += count
            elif frame.kind == DONE:
                return self._read_done(frame)
            else:
                return f"a frame is out of place at byte {offset}; {self.n_token} tokens survived"
            offset = frame.end
        return f"the recording was not finished; {self.n_token} tokens survived"

    def _read_schema(self, frame: Frame) -> None:
        import pyarrow as pa

        self._schema = pa.ipc.read_schema(pa.py_buffer(frame.payload))
        known = {column.name for column in self._columns}
        self._columns = self._columns + [
            Column(name, "float64") for name in self._schema.names if name not in known
        ]

    def _read_done(self, frame: Frame) -> str:
        end = json.loads(frame.payload)
        if end["n_token"] != self.n_token:
            return f"the end names {end['n_token']} tokens; {self.n_token} tokens survived"
        self.end_attrs = end["attrs"]
        self.complete = True
        return ""

    def _parse(self, payload: bytes) -> Any:
        import pyarrow as pa

        return pa.ipc.read_record_batch(pa.py_buffer(payload), self._schema)

    def _batch(self, rows: _Rows) -> Any:
        with self._lock:
            frame = read_frame(self._file, rows.offset, self._size)
        if isinstance(frame, str):
            raise TraceFileError(
                f"journal must not change while it is read; got: {frame} at byte {rows.offset} "
                f"of {str(self.path)!r}."
            )
        return self._parse(frame.payload)


class _JournalArray(BackendArray):
    """One column of a journal that is read when it is indexed."""

    def __init__(self, reader: JournalReader, column: Column) -> None:
        self.reader, self.column = reader, column
        self.shape = (reader.n_token, *column.shape)
        self.dtype = np.dtype(column.dtype)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key: tuple[int | slice, ...]) -> Any:
        token, *inner = key
        if isinstance(token, slice):
            wanted = range(*token.indices(self.shape[0]))
        else:
            wanted = range(int(token), int(token) + 1)
        if not wanted:
            return np.empty(self.shape, self.dtype)[(slice(0, 0), *inner)]
        low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
        block = self.reader.read(self.column, low, high + 1, tuple(inner))
        if not isinstance(token, slice):
            return block[0]
        return block[np.arange(wanted.start, wanted.stop, wanted.step) - low]


def _to_numpy(batch: Any, column: Column) -> npt.NDArray[Any]:
    array = batch.column(column.name)
    if column.dtype == "str":
        return np.array(array.to_pylist(), dtype=np.str_)
    if column.shape:
        array = array.flatten()
    flat: npt.NDArray[Any] = array.to_numpy(zero_copy_only=True)
    return flat.reshape(batch.num_rows, *column.shape)
