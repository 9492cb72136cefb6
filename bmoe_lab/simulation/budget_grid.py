"""Budgets worth looking at: from part of a token's demand to all that a trace ever asks for.

The module is not called ``budgets``: importing it would put a module where the package has the
function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency import token_cycle
from bmoe_lab.simulation.chunked import chunk_tokens
from bmoe_lab.simulation.stream import cache_facts
from bmoe_lab.sizes import parse_size

__all__ = ["Budgets", "budgets", "check_budgets", "touched_bytes"]

Budgets: TypeAlias = int | str | Sequence[int | str] | npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]

# The grid starts at this part of the token cycle: below, only policies of the future hit at all.
_LOWEST = 0.25
# Sizes are denser by this factor at the cliff, fading with this width in log2 of the size.
_CLIFF_WEIGHT = 4.0
_CLIFF_WIDTH = 0.3
# A size is rounded by at most this part of itself.
_ROUND = 1 / 40


def budgets(trace_or_traces: xr.Dataset | Mapping[str, xr.Dataset], n: int = 20) -> IntArray:
    """Return sizes of a cache that tell something about a trace.

    From a quarter of the token cycle T up to all bytes that the trace touches. T itself is among
    them, and so is a size just below: there the curve of a global LRU jumps from nothing.

    Parameters
    ----------
    trace_or_traces : xarray.Dataset or dict of these
        Reads ``expert_applied``, ``expert_bytes``, ``n_expert_used``. Of several traces the grid
        spans all, each one's T included.
    n : int, default 20
        How many; fewer where they would coincide.

    Returns
    -------
    numpy.ndarray of int64, shape (budget,)
        Bytes, ascending, rounded to few digits in binary units, T and the last apart.

    Raises
    ------
    SettingsError
        If `n` is too small to hold each T, the size below it, and the two ends.

    See Also
    --------
    sweep, lru_curve : What the sizes are for.

    Notes
    -----
    T = sum over layers of ``expert_bytes * n_expert_used``
    (:func:`bmoe_lab.metrics.token_cycle_bytes`). Between the ends the sizes are even in their
    logarithm, and up to five times as dense near each T.

    Examples
    --------
    >>> from bmoe_lab.metrics import token_cycle_bytes
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=64, n_layer=4, expert_bytes=2**20, seed=0)
    >>> sizes = budgets(trace, n=8)
    >>> bool((sizes == int(token_cycle_bytes(trace))).any())
    True
    """
    # A Dataset is a mapping of its variables.
    one = isinstance(trace_or_traces, xr.Dataset) or not isinstance(trace_or_traces, Mapping)
    traces: list[Any] = [trace_or_traces] if one else list(trace_or_traces.values())
    if not traces or not all(isinstance(trace, xr.Dataset) for trace in traces):
        raise SettingsError(
            f"trace_or_traces must be a trace or a dict of them; got {trace_or_traces!r}."
        )
    cycles = sorted({_cycle(trace) for trace in traces})
    least = 2 * len(cycles) + 2
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
        raise SettingsError(
            f"n must be a whole number of at least {least}, which holds both ends and each token "
            f"cycle with a size below it; got {n!r}."
        )
    top = max(touched_bytes(trace) for trace in traces)
    return _grid(cycles, max(top, cycles[-1]), int(n))


def touched_bytes(trace: xr.Dataset) -> int:
    """Return the bytes of all distinct experts that a trace asks for, in any phase.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=1, n_layer=2, n_used=2, expert_bytes=100, seed=0)
    >>> touched_bytes(trace) == 2 * (100 + 125)
    True
    """
    key_bytes, n_layer, n_expert = cache_facts(trace)
    seen = np.zeros((n_layer, n_expert), np.bool_)
    expert = trace["expert_applied"]
    step = chunk_tokens(trace)
    for begin in range(0, trace.sizes["token"], step):
        window = np.asarray(expert.isel(token=slice(begin, begin + step)).values, np.int16)
        _mark(np.ascontiguousarray(window), seen)
    return int(key_bytes[seen.ravel()].sum())


def check_budgets(asked: Budgets) -> IntArray:
    """Return budgets in bytes, ascending.

    Raises
    ------
    SettingsError
        If there is none, one is not a size, or one is there twice.

    Examples
    --------
    >>> check_budgets(["2 GiB", 2**30])
    array([1073741824, 2147483648])
    """
    items: list[Any]
    if isinstance(asked, np.ndarray):
        if asked.ndim > 1 or asked.dtype.kind not in "iu":
            raise SettingsError(
                f"budgets must be whole numbers of bytes; got an array of {asked.dtype} and shape "
                f"{asked.shape}."
            )
        items = np.atleast_1d(asked).tolist()
    elif isinstance(asked, int | str | np.integer):
        items = [asked]
    else:
        items = list(asked)
    if not items:
        raise SettingsError("budgets must hold at least one size; got none.")
    plain = [int(item) if isinstance(item, np.integer) else item for item in items]
    sizes = [parse_size(item, name="budgets") for item in plain]
    for size, item in zip(sizes, items, strict=True):
        if sizes.count(size) > 1:
            raise SettingsError(
                f"budgets must name each size once; got {item!r} twice, which is {size} bytes."
            )
    return np.array(sorted(sizes), dtype=np.int64)


def _cycle(trace: xr.Dataset) -> int:
    cache_facts(trace)  # says what is missing
    return token_cycle(
        np.asarray(trace["expert_bytes"].values), np.asarray(trace["n_expert_used"].values)
    )


def _grid(cycles: list[int], top: int, n: int) -> IntArray:
    """Return about `n` sizes as quantiles of a density that peaks at the cliffs."""
    low = max(1.0, _LOWEST * cycles[0])
    fine = np.linspace(np.log2(low), np.log2(max(top, low * 1.001)), 4001)
    density = np.ones_like(fine)
    for cycle in cycles:
        density += _CLIFF_WEIGHT * np.exp(-(((fine - np.log2(cycle)) / _CLIFF_WIDTH) ** 2))
    share = np.cumsum(density)
    share = (share - share[0]) / (share[-1] - share[0])
    fixed = {*cycles, top} | {_rounded(cycle * (1 - _ROUND), down=True) for cycle in cycles}
    wanted = n - len(fixed)
    found: list[int] = []
    # As many quantiles as are still wanted; those that coincide are made up for by more.
    for extra in range(n, 3 * n):
        quantiles = 2 ** np.interp(np.linspace(0, 1, extra), share, fine)
        rounded = sorted({_rounded(size) for size in quantiles.tolist()})
        found = [size for size in rounded if size < top and not _beside(size, fixed)]
        if len(found) >= wanted:
            break
    sizes = sorted(fixed | set(found))
    while len(sizes) > n:
        # Without the one that leaves the smallest gap.
        place = np.interp(np.log2(np.maximum(sizes, 1)), fine, share)
        gap = np.append(place[2:] - place[:-2], np.inf)
        gap[[size in fixed for size in sizes[1:]]] = np.inf
        del sizes[1 + int(np.argmin(gap))]
    return np.array([size for size in sizes if size > 0], dtype=np.int64)


def _beside(size: int, fixed: set[int]) -> bool:
    return any(abs(size - one) < one * _ROUND for one in fixed)


def _rounded(size: float, *, down: bool = False) -> int:
    """Return a size with few digits in the unit that it would be shown in."""
    unit = 1
    while size >= 1024 * unit and unit < 2**30:
        unit *= 1024
    step: float = unit
    # Of 1, 2, 5 times a power of ten, the largest step that moves the size little.
    while step > size * 2 * _ROUND:
        step /= 10
    for factor in (5, 2):
        if factor * step <= size * 2 * _ROUND:
            step *= factor
            break
    while 10 * step <= size * 2 * _ROUND:
        step *= 10
    count = size / step
    return round((math.floor(count) if down else round(count)) * step)


@compiled
def _mark(expert: npt.NDArray[np.int16], seen: npt.NDArray[np.bool_]) -> None:
    n_token, n_layer, n_slot = expert.shape
    for token in range(n_token):
        for layer in range(n_layer):
            for slot in range(n_slot):
                if expert[token, layer, slot] >= 0:
                    seen[layer, expert[token, layer, slot]] = True
