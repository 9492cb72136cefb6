"""One way to compile a kernel: cached on disk, without the GIL, types kept for the checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` on its first call; afterwards take it from the cache beside its file.

    The same as ``numba.njit(cache=True, nogil=True)``, except that type checkers go on seeing the
    function's own annotations. Arguments are plain arrays and numbers.
    """
    return cast(F, njit(cache=True, nogil=True)(function))
