"""Helpers that become part of the kernel that calls them.

Called as functions, the few steps of a heap cost half as much again: each array goes over as
seven words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

__all__ = ["inlined"]

F = TypeVar("F", bound=Callable[..., Any])


def inlined(function: F) -> F:
    """Compile `function` into its callers; see :func:`bmoe_lab.kernels.compiled`."""
    return cast(F, njit(cache=True, nogil=True, inline="always")(function))
