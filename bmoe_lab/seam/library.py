"""The installed llama.cpp, loaded once, its struct layout checked before anything relies on it.

Everything that the seam assumes about the library beyond its exported functions stands in this
module: the offsets inside ``struct ggml_tensor``. They are compared with what exported ggml
functions say of live tensors, so that a library with another layout is refused with words
instead of being read wrongly.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any

from bmoe_lab.errors import SeamError, SettingsError

__all__ = ["Library", "fill_params", "library"]

#: The release that the gates are run against.
PROVED_VERSION = "0.3.36"

# Byte offsets inside struct ggml_tensor (ggml.h of the proved version).
TENSOR_BYTES = 336
OFF_TYPE, OFF_NE, OFF_NB, OFF_OP = 0, 16, 48, 80
OFF_FLAGS, OFF_SRC, OFF_VIEW_SRC, OFF_VIEW_OFFS = 148, 152, 232, 240
OFF_DATA, OFF_NAME = 248, 256
MAX_SRC, NAME_BYTES = 10, 64

_logger = logging.getLogger("bmoe_lab.llama_cpp")


@dataclass(frozen=True)
class Library:
    """Handles and versions of the llama.cpp in use.

    Attributes
    ----------
    api : module
        ``llama_cpp.llama_cpp``: the low-level bindings.
    ggml : ctypes.CDLL
        libggml-base.
    versions : dict of str
        ``llama_cpp_python``, ``llama_cpp`` (its version string), ``ggml_commit``.
    log : collections.deque of str
        The last lines that llama.cpp logged, for error messages.
    """

    api: Any
    ggml: Any
    versions: dict[str, str]
    log: collections.deque[str]
    keep: tuple[Any, ...]

    def last_log(self, n: int = 3) -> str:
        """Return the last `n` warnings and errors of llama.cpp in one line."""
        return " | ".join(list(self.log)[-n:]) or "llama.cpp logged nothing"


@functools.cache
def library() -> Library:
    """Return the loaded library; the first call imports llama_cpp and checks the struct layout.

    Raises
    ------
    SeamError
        If llama-cpp-python is missing or cannot be loaded, or lays tensors out differently.
    """
    try:
        from llama_cpp import _ggml, llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise SeamError(
            f"llama-cpp-python must be importable; got {error}. "
            f"Install it: pip install llama-cpp-python=={PROVED_VERSION}."
        ) from error

    version = importlib.metadata.version("llama-cpp-python")
    # The extension part of ggml that holds tensors and gguf; it is already loaded as a
    # dependency, so this returns a handle to the same image.
    base = ctypes.CDLL(str(_ggml.libggml_base_path / _base_name()))
    _declare(base)
    log: collections.deque[str] = collections.deque(maxlen=20)
    callback = _log_callback(log)
    log_set = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
        ("llama_log_set", llama_cpp._lib)
    )
    log_set(ctypes.cast(callback, ctypes.c_void_p), None)
    llama_cpp.llama_backend_init()

    versions = {
        "llama_cpp_python": version,
        "llama_cpp": _text(llama_cpp._lib, "llama_version"),
        "ggml_commit": _text(base, "ggml_commit"),
    }
    _check_layout(base, versions)
    return Library(llama_cpp, base, versions, log, (callback,))


def _base_name() -> str:
    import sys

    return "libggml-base.dylib" if sys.platform == "darwin" else "libggml-base.so"


def _text(handle: Any, function: str) -> str:
    symbol = getattr(handle, function, None)
    if symbol is None:
        return "unknown"
    symbol.restype = ctypes.c_char_p
    symbol.argtypes = []
    value = symbol()
    return value.decode() if value else "unknown"


def _log_callback(log: collections.deque[str]) -> Any:
    """Return a C callback that keeps warnings and errors and passes everything to `logging`."""
    # ggml_log_level of ggml.h; 0 is a line without a level.
    levels = {
        0: logging.DEBUG,
        1: logging.DEBUG,
        2: logging.DEBUG,
        3: logging.WARNING,
        4: logging.ERROR,
    }
    last = [logging.DEBUG]

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def callback(level: int, text: bytes, _: Any) -> None:
        # Level 5 continues the previous line.
        last[0] = levels.get(level, last[0])
        line = text.decode("utf-8", "replace").strip()
        if line and last[0] >= logging.WARNING:
            log.append(line)
        # llama.cpp's warnings are about its own defaults; what concerns the user is raised.
        _logger.debug("%s", line)

    return callback


def fill_params(params: Any, **fields: Any) -> Any:
    """Set `fields` on a ctypes structure and return it; an unknown field is an error.

    ctypes accepts any attribute silently, so a field that a newer llama.cpp renamed would
    otherwise be ignored.

    Raises
    ------
    SettingsError
        If the structure has no such field.
    """
    known = {entry[0] for entry in params._fields_}
    for name, value in fields.items():
        if name not in known:
            raise SettingsError(
                f"{type(params).__name__} must have a field {name!r}; got {sorted(known)}."
            )
        setattr(params, name, value)
    return params


def _declare(base: Any) -> None:
    """Give the ggml functions that the seam calls their C types."""
    pointer, size, i64, i32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [_InitParams]),
        "ggml_free": (None, [pointer]),
        "ggml_new_tensor_3d": (pointer, [pointer, i32, i64, i64, i64]),
        "ggml_new_tensor_2d": (pointer, [pointer, i32, i64, i64]),
        "ggml_mul_mat_id": (pointer, [pointer, pointer, pointer, pointer]),
        "ggml_view_2d": (pointer, [pointer, pointer, i64, i64, size, size]),
        "ggml_set_name": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_get_name": (pointer, [pointer]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_nbytes": (size, [pointer]),
        "ggml_nelements": (i64, [pointer]),
        "ggml_element_size": (size, [pointer]),
        "ggml_op_name": (ctypes.c_char_p, [i32]),
        "ggml_type_name": (ctypes.c_char_p, [i32]),
    }
    for name, (restype, argtypes) in signatures.items():
        try:
            function = getattr(base, name)
        except AttributeError as error:
            raise SeamError(
                f"libggml-base must export {name}; got a library without it. "
                f"Install llama-cpp-python=={PROVED_VERSION}."
            ) from error
        function.restype = restype
        function.argtypes = argtypes


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def _check_layout(base: Any, versions: dict[str, str]) -> None:
    """Compare the assumed offsets with what ggml's own functions say of live tensors."""
    context = base.ggml_init(_InitParams(1 << 20, None, False))
    if not context:
        raise SeamError("ggml_init must return a context; got NULL. Is there free memory?")
    try:
        stack = base.ggml_new_tensor_3d(context, 0, 4, 3, 8)
        rows = base.ggml_new_tensor_3d(context, 0, 4, 1, 5)
        ids = base.ggml_new_tensor_2d(context, 26, 2, 5)
        base.ggml_set_name(stack, b"probe-stack")
        product = base.ggml_mul_mat_id(context, stack, rows, ids)
        view = base.ggml_view_2d(context, ids, 1, 5, 8, 4)

        def word(tensor: int, offset: int) -> int:
            return int(ctypes.c_int64.from_address(tensor + offset).value)

        def op(tensor: int) -> bytes:
            return bytes(base.ggml_op_name(word(tensor, OFF_OP) & 0xFFFFFFFF))

        checks = {
            "name": base.ggml_get_name(stack) == stack + OFF_NAME
            and ctypes.string_at(stack + OFF_NAME) == b"probe-stack",
            "data": base.ggml_get_data(stack) == word(stack, OFF_DATA),
            "ne": [word(stack, OFF_NE + 8 * i) for i in range(4)] == [4, 3, 8, 1],
            "nb": word(stack, OFF_NB + 24) == base.ggml_nbytes(stack)
            and word(stack, OFF_NB) == base.ggml_element_size(stack),
            "type": (word(ids, OFF_TYPE) & 0xFFFFFFFF) == 26
            and bytes(base.ggml_type_name(26)) == b"i32",
            "op": op(product) == b"MUL_MAT_ID" and op(view) == b"VIEW" and op(stack) == b"NONE",
            "src": [word(product, OFF_SRC + 8 * i) for i in range(4)] == [stack, rows, ids, 0],
            "view": word(view, OFF_VIEW_SRC) == ids and word(view, OFF_VIEW_OFFS) == 4,
        }
    finally:
        base.ggml_free(context)
    wrong = [name for name, ok in checks.items() if not ok]
    if wrong:
        raise SeamError(
            f"struct ggml_tensor must be laid out as in llama-cpp-python {PROVED_VERSION}; "
            f"got other offsets of {wrong} in llama-cpp-python {versions['llama_cpp_python']} "
            f"(llama.cpp {versions['llama_cpp']}, ggml {versions['ggml_commit']}). "
            f"Install llama-cpp-python=={PROVED_VERSION}."
        )
