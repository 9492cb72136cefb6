"""The cache size that ``cache="auto"`` stands for."""

from __future__ import annotations

from typing import NamedTuple

from bmoe_lab.sizes import format_size, parse_size

__all__ = ["AutoBudget", "auto_budget", "memory_available"]

DEFAULT_FLOOR = "1.5 GiB"
"""Memory that the cache leaves to the KV cache, the buffers of llama.cpp and everybody else."""

LEAST_BUDGET = 1500 * 2**20
"""The cache gets this much even if memory looks short: below it most models stop caching at all."""


class AutoBudget(NamedTuple):
    """A budget and how it came about.

    Attributes
    ----------
    n_bytes : int
    reason : str
        One line for people.
    """

    n_bytes: int
    reason: str


def auto_budget(
    available_bytes: int | None,
    expert_bytes_total: int,
    *,
    dense_to_convert: int = 0,
    floor: int | str = DEFAULT_FLOOR,
    ceiling: int | str | None = None,
) -> AutoBudget:
    """Return the budget for the memory that is available.

    Parameters
    ----------
    available_bytes : int or None
        Memory that could be taken without swapping, *before* the model is mapped; None unknown.
    expert_bytes_total : int
        Bytes of all experts of all layers: a larger cache has no use.
    dense_to_convert : int, default 0
        Bytes that ``dense="anon"`` is about to take.
    floor : int or str, default "1.5 GiB"
        Memory to leave alone.
    ceiling : int or str, optional
        Largest budget.

    Returns
    -------
    AutoBudget

    Notes
    -----
    ``available - dense_to_convert - floor``, at least 1500 MiB, at most `ceiling` and all
    experts. Source: BigMoeOnEdge's sizing rule (0.24). The guard of 1500 MiB is a constant, not
    the model's need: that is its token cycle.

    Examples
    --------
    >>> auto_budget(8 * 2**30, 6 * 2**30).reason
    '6.0 GiB: all experts fit (8.0 GiB available, 1.5 GiB left free)'
    >>> auto_budget(None, 6 * 2**30).n_bytes == 1500 * 2**20
    True
    """
    left_free = parse_size(floor, name="cache_floor")
    cap = expert_bytes_total
    if ceiling is not None:
        cap = min(cap, parse_size(ceiling, name="cache_ceiling"))
    least = min(LEAST_BUDGET, cap)
    if available_bytes is None:
        return AutoBudget(
            least, f"{format_size(least)}: the least, as free memory is unknown on this system"
        )
    room = available_bytes - dense_to_convert - left_free
    n_bytes = min(max(room, least), cap)
    if n_bytes == expert_bytes_total:
        why = "all experts fit" if room >= n_bytes else "all experts, although memory is short"
    elif n_bytes == cap:
        why = "the ceiling"
    elif room >= least:
        why = "what is free"
    else:
        why = "the least, although memory is short"
    return AutoBudget(
        n_bytes,
        f"{format_size(n_bytes)}: {why} ({format_size(available_bytes)} available, "
        f"{format_size(left_free)} left free)",
    )


def memory_available() -> int | None:
    """Return the bytes that could be taken without swapping; None where unknown.

    The page cache counts as available, so ask before llama.cpp maps the model.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    return available if available > 0 else None
