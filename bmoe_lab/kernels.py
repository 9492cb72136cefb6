"""One way to compile a kernel: cached on disk, without the GIL, types kept for the checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

__all__ = ["compiled", "compiled_for"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` on its first call; afterwards take it from the cache beside its file.

    The same as ``numba.njit(cache=True, nogil=True)``, except that type checkers go on seeing the
    function's own annotations. Arguments are plain arrays and numbers.
    """
    return cast(F, njit(cache=True, nogil=True)(function))


def compiled_for(signature: Any) -> Callable[[F], F]:
    """Compile a function at once, for one signature of numba types.

    For functions that are given kernels as pointers (``numba.types.FunctionType``): compiled once
    for all of them, where types taken from the arguments would compile once for each.
    """

    def wrap(function: F) -> F:
        return cast(F, njit([signature], cache=True, nogil=True)(function))

    return wrap
