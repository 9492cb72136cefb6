"""One way to compile a kernel: cached on disk, without the GIL, types kept for the checker.

numba takes a function from its cache if the function's own file is as it was. What a kernel calls
or reads of other modules is compiled into it all the same, so that a changed helper would leave
every kernel that uses it as it was: here these count as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core.dispatcher import Dispatcher

__all__ = ["compiled", "compiled_for", "inlined"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` on its first call; afterwards take it from the cache beside its file.

    The same as ``numba.njit(cache=True, nogil=True)``, except that the cache also knows what the
    function takes from other modules, and that type checkers go on seeing the function's own
    annotations. Arguments are plain arrays and numbers.
    """
    return cast(F, _cached(njit(nogil=True)(function)))


def compiled_for(signature: Any) -> Callable[[F], F]:
    """Compile a function at once, for one signature of numba types.

    For functions that are given kernels as pointers (``numba.types.FunctionType``): compiled once
    for all of them, where types taken from the arguments would compile once for each.
    """

    def wrap(function: F) -> F:
        dispatcher: Any = _cached(njit(nogil=True)(function))
        if isinstance(dispatcher, Dispatcher):
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return cast(F, dispatcher)

    return wrap


def inlined(function: F) -> F:
    """Compile `function` into the kernels that call it.

    Called as functions, the few steps of a heap cost half as much again: each array goes over as
    seven words.
    """
    return cast(F, _cached(njit(nogil=True, inline="always")(function)))


def _cached(dispatcher: Any) -> Any:
    """Switch on the cache of a function, good as long as all that goes into it is the same."""
    if not isinstance(dispatcher, Dispatcher):  # NUMBA_DISABLE_JIT
        return dispatcher
    kept: Any = dispatcher
    kept.enable_caching()
    inputs = hashlib.sha256(repr(_stamp(dispatcher)).encode())
    # By module, not by name used: what a function needs may be defined below it in its own file.
    for name, value in sorted(dispatcher.py_func.__globals__.items()):
        if isinstance(value, Dispatcher):
            inputs.update(f"{name}={_stamp(value)!r}".encode())
        elif isinstance(value, np.ndarray):
            inputs.update(f"{name}={value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, int | float | tuple | np.generic) and not name.startswith("__"):
            inputs.update(f"{name}={value!r}".encode())
    kept._cache._cache_file._source_stamp = inputs.digest()
    return kept


def _stamp(dispatcher: Any) -> object:
    """Return what numba holds a cached function's file against; None if it is not cached."""
    file = getattr(dispatcher._cache, "_cache_file", None)
    return None if file is None else file._source_stamp
