"""ggml's own quantisation: float32 rows to the bytes of a ggml type."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SeamError, SettingsError, unknown_name
from bmoe_lab.seam.gguf import type_name, type_sizes
from bmoe_lab.seam.library import library

__all__ = ["quantize", "row_bytes", "type_number"]


@functools.cache
def _ggml() -> Any:
    """Return libggml-base with the quantisation functions declared."""
    base = library().ggml
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        # size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst,
        #     int64_t start, int64_t nrows, int64_t n_per_row, const float * imatrix);
        "ggml_quantize_chunk": (
            ctypes.c_size_t,
            [i32, pointer, pointer, i64, i64, i64, pointer],
        ),
        "ggml_quantize_requires_imatrix": (ctypes.c_bool, [i32]),
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
def type_number(name: str) -> int:
    """Return the number of the ggml type `name` (any case).

    Raises
    ------
    UnknownNameError
        If ggml has no such type, or cannot quantise to it without an importance matrix.

    Examples
    --------
    >>> type_number("Q8_0"), type_number("f16")
    (8, 1)
    """
    base = _ggml()
    # A type can be written if it is a float or quantised one; ggml asserts, that is aborts the
    # process, on integers.
    known = {
        type_name(kind).upper(): kind
        for kind in type_sizes()
        if not type_name(kind).startswith(("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"))
        and not base.ggml_quantize_requires_imatrix(kind)
    }
    if name.upper() not in known:
        raise unknown_name("type", name, known)
    return known[name.upper()]


def row_bytes(name: str, n_per_row: int) -> int:
    """Return how many bytes a row of `n_per_row` values takes in the ggml type `name`.

    Raises
    ------
    SettingsError
        If the row is not a whole number of the type's blocks.

    Examples
    --------
    >>> row_bytes("Q8_0", 64)  # two blocks of 32 values: 32 bytes and a float16 scale each
    68
    """
    block, n_bytes = type_sizes()[type_number(name)]
    if n_per_row <= 0 or n_per_row % block:
        raise SettingsError(
            f"row length must be a positive multiple of {block} for type {name}; got {n_per_row}."
        )
    return n_per_row // block * n_bytes


def quantize(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.uint8]:
    """Return `values` in the ggml type `name`, as llama.cpp's own tools would store them.

    Parameters
    ----------
    values : ndarray
        float32 of shape (..., value); each row is quantised by itself.
    name : str
        A ggml type: ``"F32"``, ``"F16"``, ``"Q8_0"``, ``"Q4_K"``, ...

    Returns
    -------
    ndarray
        uint8 of shape (..., byte).

    Raises
    ------
    UnknownNameError
        If ggml cannot write that type.
    SettingsError
        If a row is not a whole number of blocks, or a value is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> quantize(np.ones((3, 64), np.float32), "Q8_0").shape
    (3, 68)
    """
    width = row_bytes(name, values.shape[-1])
    source = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(source).all():
        raise SettingsError("values must be finite; got NaN or infinity.")
    result = np.empty((*source.shape[:-1], width), np.uint8)
    if source.size == 0:
        return result
    written = _ggml().ggml_quantize_chunk(
        type_number(name),
        source.ctypes.data,
        result.ctypes.data,
        0,
        source.size // source.shape[-1],
        source.shape[-1],
        None,
    )
    if written != result.nbytes:
        raise SeamError(f"ggml must write {result.nbytes} bytes of {name}; got {written}.")
    return result
