"""ggml's own GGUF reader: exact offsets and typed metadata of one file, no tensor loaded.

The C++ reader parses a vocabulary of 150k tokens in a hundredth of the time that a Python one
takes, and what it says is by construction what llama.cpp will use. It is only handed files that
:func:`bmoe_lab.streaming.header.read_header` has accepted.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from bmoe_lab.errors import ModelFileError, SeamError
from bmoe_lab.seam.library import library

__all__ = ["GgufFile", "GgufTensor", "read_gguf", "type_name", "type_sizes"]

#: Arrays with more items (vocabularies, merges) are left out of the metadata.
MAX_ARRAY_ITEMS = 1024

_STRING, _ARRAY = 8, 9
# enum gguf_type -> (suffix of gguf_get_val_*, C type, numpy dtype of array items)
_SCALARS: dict[int, tuple[str, Any, str]] = {
    0: ("u8", ctypes.c_uint8, "u1"),
    1: ("i8", ctypes.c_int8, "i1"),
    2: ("u16", ctypes.c_uint16, "<u2"),
    3: ("i16", ctypes.c_int16, "<i2"),
    4: ("u32", ctypes.c_uint32, "<u4"),
    5: ("i32", ctypes.c_int32, "<i4"),
    6: ("f32", ctypes.c_float, "<f4"),
    7: ("bool", ctypes.c_bool, "i1"),
    10: ("u64", ctypes.c_uint64, "<u8"),
    11: ("i64", ctypes.c_int64, "<i8"),
    12: ("f64", ctypes.c_double, "<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as ggml places it.

    Attributes
    ----------
    name : str
    type : int
        ``enum ggml_type``.
    ne : tuple of int
        Four lengths, fastest first; 1 where the tensor has fewer dimensions.
    offset : int
        First byte, counted from the start of the file.
    n_bytes : int
    """

    name: str
    type: int
    ne: tuple[int, int, int, int]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What ggml read from one file.

    Attributes
    ----------
    version, alignment, data_offset : int
    metadata : dict
        Numbers, bools, strings; arrays of up to 1,024 items as tuples.
    tensors : tuple of GgufTensor
        In file order.
    """

    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


class _InitParams(ctypes.Structure):
    # struct gguf_init_params { bool no_alloc; struct ggml_context ** ctx; }
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@functools.cache
def _ggml() -> Any:
    """Return libggml-base with the gguf functions declared."""
    base = library().ggml
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    i64, size, i32, u32 = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (pointer, [text, _InitParams]),
        "gguf_free": (None, [pointer]),
        "gguf_get_version": (u32, [pointer]),
        "gguf_get_alignment": (size, [pointer]),
        "gguf_get_data_offset": (size, [pointer]),
        "gguf_get_n_kv": (i64, [pointer]),
        "gguf_get_key": (text, [pointer, i64]),
        "gguf_get_kv_type": (i32, [pointer, i64]),
        "gguf_get_arr_type": (i32, [pointer, i64]),
        "gguf_get_arr_n": (size, [pointer, i64]),
        "gguf_get_arr_data": (pointer, [pointer, i64]),
        "gguf_get_arr_str": (text, [pointer, i64, size]),
        "gguf_get_val_str": (text, [pointer, i64]),
        "gguf_get_n_tensors": (i64, [pointer]),
        "gguf_get_tensor_name": (text, [pointer, i64]),
        "gguf_get_tensor_type": (i32, [pointer, i64]),
        "gguf_get_tensor_offset": (size, [pointer, i64]),
        "gguf_get_tensor_size": (size, [pointer, i64]),
        "gguf_get_tensor_ne": (ctypes.POINTER(i64), [pointer, i64]),
        "ggml_blck_size": (i64, [i32]),
        "ggml_type_size": (size, [i32]),
        "ggml_type_name": (text, [i32]),
        **{f"gguf_get_val_{name}": (kind, [pointer, i64]) for name, kind, _ in _SCALARS.values()},
    }
    for name, (restype, argtypes) in signatures.items():
        try:
            function = getattr(base, name)
        except AttributeError as error:
            raise SeamError(
                f"libggml-base must export {name}; got a library without it "
                f"({library().versions}). Install the release that pyproject.toml pins."
            ) from error
        function.restype, function.argtypes = restype, argtypes
    return base


@functools.cache
def type_sizes() -> dict[int, tuple[int, int]]:
    """Return ``enum ggml_type`` to (elements, bytes) per block, for the types in use.

    Examples
    --------
    >>> type_sizes()[0], type_sizes()[8]  # F32, Q8_0
    ((1, 4), (32, 34))
    """
    base = _ggml()
    sizes = {}
    # ggml does not check the number it is given, so the count comes from the pinned bindings.
    for kind in range(int(library().api.GGML_TYPE_COUNT)):
        block, n_bytes = int(base.ggml_blck_size(kind)), int(base.ggml_type_size(kind))
        if block > 0 and n_bytes > 0:
            sizes[kind] = (block, n_bytes)
    return sizes


def type_name(kind: int) -> str:
    """Return ggml's name of a type, or ``"unknown <number>"``.

    Examples
    --------
    >>> type_name(8), type_name(999)
    ('q8_0', 'unknown 999')
    """
    if kind not in type_sizes():
        return f"unknown {kind}"
    return bytes(_ggml().ggml_type_name(kind)).decode()


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Return metadata and tensor places of one GGUF file, as ggml reads them.

    Parameters
    ----------
    path : path-like
        A file whose header has been checked.

    Returns
    -------
    GgufFile

    Raises
    ------
    ModelFileError
        If ggml refuses the file; the message carries what ggml logged.
    """
    base = _ggml()
    context = base.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
    if not context:
        raise ModelFileError(
            f"model file must be readable by ggml; got {library().last_log()} "
            f"for {os.fspath(path)!r}. Download or convert it again."
        )
    try:
        data_offset = int(base.gguf_get_data_offset(context))
        metadata: dict[str, Any] = {}
        for index in range(int(base.gguf_get_n_kv(context))):
            value = _value(base, context, index)
            if value is not None:
                metadata[_decode(base.gguf_get_key(context, index))] = value
        tensors = tuple(
            GgufTensor(
                name=_decode(base.gguf_get_tensor_name(context, index)),
                type=int(base.gguf_get_tensor_type(context, index)),
                ne=_shape(base.gguf_get_tensor_ne(context, index)),
                offset=data_offset + int(base.gguf_get_tensor_offset(context, index)),
                n_bytes=int(base.gguf_get_tensor_size(context, index)),
            )
            for index in range(int(base.gguf_get_n_tensors(context)))
        )
        return GgufFile(
            int(base.gguf_get_version(context)),
            int(base.gguf_get_alignment(context)),
            data_offset,
            metadata,
            tensors,
        )
    finally:
        base.gguf_free(context)


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _shape(lengths: Any) -> tuple[int, int, int, int]:
    return int(lengths[0]), int(lengths[1]), int(lengths[2]), int(lengths[3])


def _value(base: Any, context: int, index: int) -> Any:
    """Return one value as a Python object, None for arrays that are left out."""
    kind = int(base.gguf_get_kv_type(context, index))
    if kind == _STRING:
        return _decode(base.gguf_get_val_str(context, index))
    if kind != _ARRAY:
        return getattr(base, f"gguf_get_val_{_SCALARS[kind][0]}")(context, index)
    count = int(base.gguf_get_arr_n(context, index))
    if count > MAX_ARRAY_ITEMS:
        return None
    item = int(base.gguf_get_arr_type(context, index))
    if item == _STRING:
        return tuple(_decode(base.gguf_get_arr_str(context, index, i)) for i in range(count))
    dtype = np.dtype(_SCALARS[item][2])
    raw = ctypes.string_at(base.gguf_get_arr_data(context, index), count * dtype.itemsize)
    values = np.frombuffer(raw, dtype).tolist()
    return tuple(bool(value) for value in values) if item == 7 else tuple(values)
