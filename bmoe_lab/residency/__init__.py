"""Which experts stay in memory: one compiled kernel per policy, the same live and in replay."""

from __future__ import annotations

from bmoe_lab.errors import unknown_name
from bmoe_lab.residency.base import (
    KernelState,
    Load,
    ResidencyPolicy,
    ResidencyState,
    token_cycle,
)
from bmoe_lab.residency.lru import LRU

__all__ = [
    "LRU",
    "KernelState",
    "Load",
    "ResidencyPolicy",
    "ResidencyState",
    "get",
    "names",
    "token_cycle",
]

_REGISTRY: dict[str, type[ResidencyPolicy]] = {policy.name: policy for policy in (LRU,)}


def names() -> list[str]:
    """Return the names of the residency policies that ship with the package.

    Examples
    --------
    >>> names()
    ['lru']
    """
    return sorted(_REGISTRY)


def get(name: str) -> type[ResidencyPolicy]:
    """Return the residency policy class called `name`.

    Raises
    ------
    UnknownNameError
        If there is none; the message lists those that exist.

    Examples
    --------
    >>> get("lru")("2 GiB")
    LRU(budget='2 GiB')
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise unknown_name("residency policy", name, _REGISTRY) from None
