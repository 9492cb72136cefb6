"""Reads of live ``ggml_tensor`` structs, and of the memory that they point to.

Two kinds of reader: :func:`describe` parses a whole struct into a Python object, for the capture;
the numba functions read or write one thing at a time inside the running callback. An address is
an ``int`` everywhere.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from bmoe_lab.kernels import compiled
from bmoe_lab.seam import library as lib

__all__ = [
    "Tensor",
    "as_pointer",
    "describe",
    "gather_float",
    "gather_ids",
    "gather_scores",
    "n_rows",
    "scatter_float",
    "scatter_ids",
    "set_data",
]

# Indices of 8-byte words inside the struct.
WORD_NE, WORD_NB, WORD_OP = lib.OFF_NE // 8, lib.OFF_NB // 8, lib.OFF_OP // 8
WORD_SRC, WORD_DATA = lib.OFF_SRC // 8, lib.OFF_DATA // 8
N_WORDS = lib.TENSOR_BYTES // 8


@dataclass(frozen=True)
class Tensor:
    """A copy of the fields of one ``ggml_tensor``, with its address."""

    address: int
    name: str
    op: str
    type: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    src: tuple[int, ...]
    view_src: int
    view_offset: int
    data: int
    n_bytes: int

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor is given (a weight, an input), not computed."""
        return self.op == "NONE"


def describe(address: int) -> Tensor:
    """Return the fields of the tensor at `address`."""
    base = lib.library().ggml
    raw = ctypes.string_at(address, lib.TENSOR_BYTES)
    words = np.frombuffer(raw, np.int64)
    op = int(words[WORD_OP]) & 0xFFFFFFFF
    name = raw[lib.OFF_NAME : lib.OFF_NAME + lib.NAME_BYTES].split(b"\0", 1)[0]
    ne = tuple(int(x) for x in words[WORD_NE : WORD_NE + 4])
    nb = tuple(int(x) for x in words[WORD_NB : WORD_NB + 4])
    return Tensor(
        address=address,
        name=name.decode("utf-8", "replace"),
        op=base.ggml_op_name(op).decode(),
        type=int(words[0]) & 0xFFFFFFFF,
        ne=ne,  # type: ignore[arg-type]  # always four entries
        nb=nb,  # type: ignore[arg-type]  # the same
        src=tuple(int(x) for x in words[WORD_SRC : WORD_SRC + lib.MAX_SRC]),
        view_src=int(words[lib.OFF_VIEW_SRC // 8]),
        view_offset=int(words[lib.OFF_VIEW_OFFS // 8]),
        data=int(words[WORD_DATA]),
        n_bytes=int(base.ggml_nbytes(address)),
    )


def set_data(address: int, data: int) -> None:
    """Point the tensor at `address` to other memory."""
    ctypes.c_void_p.from_address(address + lib.OFF_DATA).value = data


@intrinsic
def as_pointer(typingctx: Any, address: Any) -> Any:
    """Turn an integer address into a pointer, inside compiled code."""
    signature = types.voidptr(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return signature, codegen


@compiled
def n_rows(tensor: int) -> int:
    """Return ``ne[1]`` of the tensor: routings (rows of ids) in this evaluation."""
    words: np.ndarray = carray(as_pointer(tensor), N_WORDS, dtype=np.int64)
    return int(words[WORD_NE + 1])


@compiled
def gather_ids(tensor: int, width: int, out: np.ndarray) -> int:
    """Copy the first `width` columns of an int32 matrix into `out`, row by row.

    The ids are a view of the full argsort, so rows are ``nb[1]`` bytes apart, not ``width * 4``.
    Returns the number of rows.
    """
    words = carray(as_pointer(tensor), N_WORDS, dtype=np.int64)
    rows, stride = words[WORD_NE + 1], words[WORD_NB + 1] // 4
    if rows > 0:
        data = carray(as_pointer(words[WORD_DATA]), (rows - 1) * stride + width, dtype=np.int32)
        for row in range(rows):
            for column in range(width):
                out[row, column] = data[row * stride + column]
    return int(rows)


@compiled
def scatter_ids(tensor: int, ids: np.ndarray) -> None:
    """Write `ids` (row, slot) into the int32 matrix of the tensor."""
    words = carray(as_pointer(tensor), N_WORDS, dtype=np.int64)
    rows, stride = ids.shape[0], words[WORD_NB + 1] // 4
    width = ids.shape[1]
    data = carray(as_pointer(words[WORD_DATA]), (rows - 1) * stride + width, dtype=np.int32)
    for row in range(rows):
        for column in range(width):
            data[row * stride + column] = ids[row, column]


@compiled
def gather_scores(tensor: int, hops: int, out: np.ndarray) -> None:
    """Copy the rows of the float32 tensor that `tensor` was sorted from into `out`.

    Parameters
    ----------
    tensor : int
        Address of the ids node.
    hops : int
        ``src[0]`` steps from there to what was sorted.
    out : ndarray
        float32 of shape (row, expert).
    """
    words = carray(as_pointer(tensor), N_WORDS, dtype=np.int64)
    for _ in range(hops):
        words = carray(as_pointer(words[WORD_SRC]), N_WORDS, dtype=np.int64)
    rows, width = out.shape
    stride = words[WORD_NB + 1] // 4
    data = carray(as_pointer(words[WORD_DATA]), (rows - 1) * stride + width, dtype=np.float32)
    for row in range(rows):
        for column in range(width):
            out[row, column] = data[row * stride + column]


@compiled
def gather_float(tensor: int, width: int, rows: int, out: np.ndarray) -> None:
    """Copy `rows` x `width` contiguous float32 values of the tensor into `out`."""
    words = carray(as_pointer(tensor), N_WORDS, dtype=np.int64)
    data = carray(as_pointer(words[WORD_DATA]), rows * width, dtype=np.float32)
    for row in range(rows):
        for column in range(width):
            out[row, column] = data[row * width + column]


@compiled
def scatter_float(tensor: int, values: np.ndarray) -> None:
    """Write `values` (row, column) over the contiguous float32 data of the tensor."""
    words = carray(as_pointer(tensor), N_WORDS, dtype=np.int64)
    rows, width = values.shape
    data = carray(as_pointer(words[WORD_DATA]), rows * width, dtype=np.float32)
    for row in range(rows):
        for column in range(width):
            data[row * width + column] = values[row, column]
