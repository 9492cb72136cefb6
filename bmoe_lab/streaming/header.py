"""A bounded walk over the header of a GGUF file, before any C code sees the file.

llama.cpp and ggml answer a damaged header with a log line, an exception inside C++ or an
``abort()`` that takes the notebook with it. This module reads the same bytes in Python, refuses
what they would stumble over, and says in one line what is wrong, at which byte, and what to do.
It reads nothing but the header and trusts no length in it: every count is compared with the
bytes that are left before anything is allocated.

Source of the format: ``ggml/include/gguf.h`` and ``ggml/src/gguf.cpp`` of the llama.cpp release
that the package is pinned to.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bmoe_lab.errors import ModelFileError

__all__ = ["MAX_HEADER_BYTES", "Header", "TensorInfo", "read_header"]

MAX_HEADER_BYTES = 512 * 2**20
"""No header is read further than this. A vocabulary of 256k tokens takes about 15 MiB."""

_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**20
_MAX_NAME = 63  # GGML_MAX_NAME is 64 with the NUL
_MAX_DIMS = 4
_INT64_MAX = 2**63 - 1
_STRING, _ARRAY = 8, 9
# Bytes of each scalar value type; strings and arrays are walked.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TYPE_NAMES = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32",
    7: "bool", 8: "string", 9: "array", 10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip
# Keys that llama.cpp reads with a getter that aborts, or on which this module relies.
_REQUIRED_TYPES = {
    "general.alignment": 4,
    "general.architecture": _STRING,
    "split.no": 2,
    "split.count": 2,
    "split.tensors.count": 5,
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_AGAIN = "The file is damaged: download or convert it again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    Attributes
    ----------
    name : str
    ne : tuple of int
        Length of each dimension, fastest first; 1 to 4 entries as stored.
    type : int
        ``enum ggml_type``.
    offset : int
        First byte, counted from the start of the file.
    n_bytes : int
        Bytes of data.
    """

    name: str
    ne: tuple[int, ...]
    type: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the walk found.

    Attributes
    ----------
    path : pathlib.Path
    version : int
        2 or 3.
    file_bytes : int
        Size of the file.
    data_offset : int
        First byte of the tensor data; the header and the tensor table are the bytes before it.
    alignment : int
        Of the tensor data.
    scalars : dict
        Every key whose value is a number, a bool or a string (strings up to 1 MiB).
    tensors : tuple of TensorInfo
        In file order.
    """

    path: Path
    version: int
    file_bytes: int
    data_offset: int
    alignment: int
    scalars: dict[str, int | float | bool | str]
    tensors: tuple[TensorInfo, ...]


class _Walk:
    """A cursor that refuses to leave the file."""

    def __init__(self, path: Path, data: mmap.mmap, file_bytes: int) -> None:
        self.path = path
        self.data = data
        self.size = file_bytes
        self.limit = len(data)
        self.at = 0
        self.start = 0  # where the item now being read began

    def fail(self, rule: str, got: str, step: str = _AGAIN) -> ModelFileError:
        return ModelFileError(
            f"model file must {rule}; got {got} at byte {self.start} of {str(self.path)!r}. {step}"
        )

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.limit - self.at:
            if self.limit < self.size:
                raise self.fail(
                    f"have a header smaller than {MAX_HEADER_BYTES} bytes",
                    f"{what} of {n_bytes} bytes",
                )
            raise self.fail(
                "hold its whole header",
                f"{what} of {n_bytes} bytes with {self.limit - self.at} left",
                "The file is cut short: download or convert it again.",
            )

    def u32(self, what: str) -> int:
        self.start = self.at
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.start = self.at
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def string(self, what: str, longest: int) -> str:
        start = self.at
        length = self.u64(f"the length of {what}")
        self.start = start
        if length > longest:
            raise self.fail(f"have {what} of at most {longest} bytes", f"{length} bytes")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        if b"\0" in raw:
            raise self.fail(f"have {what} without NUL bytes", repr(raw[:40]))
        return raw.decode("utf-8", "surrogateescape")

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; written for speed, vocabularies have 10^5 of them."""
        data, at, limit, unpack = self.data, self.at, self.limit, _U64.unpack_from
        self.need(8 * count, f"{count} strings of {what}")
        last = limit - 8
        for _ in range(count):
            if at > last:
                break
            at += 8 + unpack(data, at)[0]
        else:
            if at <= limit:
                self.at = at
                return
        self.start = self.at
        raise self.fail(
            "hold its whole header",
            f"{count} strings of {what} that reach past byte {limit}",
            "The file is cut short or damaged: download or convert it again.",
        )


def read_header(
    path: str | os.PathLike[str], *, type_sizes: Mapping[int, tuple[int, int]] | None = None
) -> Header:
    """Return the checked header of one GGUF file.

    Only the header is read; that the tensor data is there is seen from the file's size.

    Parameters
    ----------
    path : path-like
        One file; a shard of a split model counts as one.
    type_sizes : mapping of int to (int, int), optional
        ``enum ggml_type`` to (elements, bytes) per block. By default the table of the installed
        ggml, which loads llama_cpp.

    Returns
    -------
    Header

    Raises
    ------
    ModelFileError
        If the file is missing, no regular file, not a GGUF, of a version or byte order that
        llama.cpp does not read, cut short, or inconsistent. The message names the byte.

    Notes
    -----
    Stricter than ggml in three points, each of which has no honest use: tensors need a name and
    at least one element, arrays of arrays are refused (ggml refuses them too), and keys that
    llama.cpp reads with a fixed type must have it.
    """
    path = Path(path)
    if type_sizes is None:
        from bmoe_lab.seam.gguf import type_sizes as installed_type_sizes

        type_sizes = installed_type_sizes()
    file_bytes = _regular_file_bytes(path)
    try:
        with (
            path.open("rb", buffering=0) as file,
            mmap.mmap(
                file.fileno(), min(file_bytes, MAX_HEADER_BYTES), access=mmap.ACCESS_READ
            ) as data,
        ):
            return _walk(_Walk(path, data, file_bytes), type_sizes)
    except OSError as error:
        raise ModelFileError(
            f"model file must be readable; got {error.strerror} for {str(path)!r}. "
            "Check its permissions."
        ) from error


def _regular_file_bytes(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelFileError(f"model file must exist; got {str(path)!r}. Check the path.") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"model file must be readable; got {error} for {str(path)!r}. Check the path."
        ) from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(
            f"model file must be a file; got the folder {str(path)!r}. Name the .gguf file in it."
        )
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(
            f"model file must be a regular file; got {str(path)!r}. "
            "Copy it to a disk: experts are read from it at random."
        )
    if status.st_size == 0:
        raise ModelFileError(
            f"model file must be a GGUF; got the empty file {str(path)!r}. Download it again."
        )
    return status.st_size


def _walk(walk: _Walk, type_sizes: Mapping[int, tuple[int, int]]) -> Header:
    magic = walk.data[:4]
    if magic != b"GGUF":
        raise walk.fail(
            "be a GGUF, whose first bytes are b'GGUF'",
            repr(magic),
            "Name a .gguf file; other formats need llama.cpp's converter first.",
        )
    walk.at = 4
    version = walk.u32("the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version != 0:
            raise walk.fail(
                "be little endian",
                f"version {version:#010x}",
                "A big-endian file needs llama.cpp's gguf_convert_endian.py first.",
            )
        raise walk.fail(
            "be GGUF version 2 or 3",
            f"version {version}",
            "Convert it with a current llama.cpp.",
        )
    n_tensors = walk.u64("the number of tensors")
    # A row of the tensor table takes at least 8+1+4+8+4+8 bytes, a key at least 8+1+4+1.
    if n_tensors > walk.size // 33:
        raise walk.fail(
            f"have at most {walk.size // 33} tensors in its {walk.size} bytes", str(n_tensors)
        )
    n_kv = walk.u64("the number of keys")
    if n_kv > walk.size // 14:
        raise walk.fail(f"have at most {walk.size // 14} keys in its {walk.size} bytes", str(n_kv))

    scalars: dict[str, int | float | bool | str] = {}
    seen: set[str] = set()
    for index in range(n_kv):
        start = walk.at
        key = walk.string(f"key {index}", 65535)
        walk.start = start
        if not key:
            raise walk.fail("name every key", f"an empty name for key {index}")
        if key in seen:
            raise walk.fail("have every key once", f"{key!r} twice")
        seen.add(key)
        _value(walk, key, scalars)
    alignment = _alignment(walk, scalars)

    rows = [_tensor_row(walk, index, type_sizes) for index in range(n_tensors)]
    data_offset = -(-walk.at // alignment) * alignment if rows else walk.at
    tensors = _place(walk, rows, data_offset, alignment)
    return Header(walk.path, version, walk.size, data_offset, alignment, scalars, tensors)


def _value(walk: _Walk, key: str, scalars: dict[str, int | float | bool | str]) -> None:
    """Step over the value of `key`; keep it if it is one number or one short string."""
    kind = walk.u32(f"the type of {key!r}")
    if kind not in _TYPE_NAMES:
        raise walk.fail(f"have a known type for {key!r}", f"type {kind}")
    required = _REQUIRED_TYPES.get(key)
    if required is not None and kind != required:
        raise walk.fail(f"have {_TYPE_NAMES[required]} for {key!r}", _TYPE_NAMES[kind])
    if kind == _ARRAY:
        item = walk.u32(f"the item type of {key!r}")
        if item not in _TYPE_NAMES or item == _ARRAY:
            raise walk.fail(f"have an array of numbers or strings for {key!r}", f"type {item}")
        count = walk.u64(f"the length of {key!r}")
        if item == _STRING:
            walk.skip_strings(count, repr(key))
        else:
            n_bytes = count * _SCALAR_BYTES[item]
            walk.need(n_bytes, f"{count} items of {key!r}")
            walk.at += n_bytes
    elif kind == _STRING:
        length = walk.u64(f"the length of {key!r}")
        walk.need(length, f"the text of {key!r}")
        if length <= 2**20:
            raw = walk.data[walk.at : walk.at + length]
            scalars[key] = raw.decode("utf-8", "surrogateescape")
        walk.at += length
    else:
        walk.start = walk.at
        walk.need(_SCALAR_BYTES[kind], f"the value of {key!r}")
        (scalars[key],) = struct.unpack_from(_FORMATS[kind], walk.data, walk.at)
        walk.at += _SCALAR_BYTES[kind]


def _alignment(walk: _Walk, scalars: Mapping[str, int | float | bool | str]) -> int:
    alignment = int(scalars.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment < 1 or alignment & (alignment - 1) or alignment > _MAX_ALIGNMENT:
        raise walk.fail(
            f"have a power of two up to {_MAX_ALIGNMENT} as general.alignment", str(alignment)
        )
    return alignment


def _tensor_row(
    walk: _Walk, index: int, type_sizes: Mapping[int, tuple[int, int]]
) -> tuple[int, TensorInfo]:
    """Return the row's own byte offset and its content, ``offset`` still relative to the data."""
    row = walk.at
    name = walk.string(f"the name of tensor {index}", _MAX_NAME)
    walk.start = row
    if not name:
        raise walk.fail("name every tensor", f"an empty name for tensor {index}")
    n_dims = walk.u32(f"the dimensions of {name!r}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise walk.fail(f"have 1 to {_MAX_DIMS} dimensions in {name!r}", str(n_dims))
    ne = tuple(walk.u64(f"a dimension of {name!r}") for _ in range(n_dims))
    walk.start = row
    n_elements = 1
    for length in ne:
        n_elements *= length
        if length == 0 or n_elements > _INT64_MAX:
            raise walk.fail(f"have from 1 to 2^63-1 elements in {name!r}", f"the shape {ne}")
    kind = walk.u32(f"the type of {name!r}")
    if kind not in type_sizes:
        raise walk.fail(
            f"have a tensor type that the installed llama.cpp knows for {name!r}",
            f"type {kind}",
            "Convert it again, or to another quantisation.",
        )
    block, block_bytes = type_sizes[kind]
    if ne[0] % block:
        raise walk.fail(f"have rows of whole blocks of {block} in {name!r}", f"the shape {ne}")
    n_bytes = n_elements // block * block_bytes
    offset = walk.u64(f"the offset of {name!r}")
    return row, TensorInfo(name, ne, kind, offset, n_bytes)


def _place(
    walk: _Walk, rows: list[tuple[int, TensorInfo]], data_offset: int, alignment: int
) -> tuple[TensorInfo, ...]:
    """Check that the tensors lie one after the other inside the file, as ggml demands."""
    tensors = []
    names: set[str] = set()
    expected = 0
    for row, info in rows:
        walk.start = row
        if info.name in names:
            raise walk.fail("have every tensor name once", f"{info.name!r} twice")
        names.add(info.name)
        if info.offset != expected:
            raise walk.fail(
                f"have {info.name!r} at offset {expected} of the data", f"offset {info.offset}"
            )
        first = data_offset + info.offset
        if first + info.n_bytes > walk.size:
            raise walk.fail(
                f"hold the data of {info.name!r}, bytes {first} to {first + info.n_bytes}",
                f"{walk.size} bytes in all and the tensor's row",
                "The file is cut short: download it again.",
            )
        tensors.append(TensorInfo(info.name, info.ne, info.type, first, info.n_bytes))
        expected += -(-info.n_bytes // alignment) * alignment
    return tuple(tensors)
