"""Which experts stay in memory: one compiled kernel per policy, the same live and in replay."""

from __future__ import annotations

from bmoe_lab.errors import unknown_name
from bmoe_lab.residency.arc import ARC
from bmoe_lab.residency.base import ResidencyPolicy
from bmoe_lab.residency.belady import Belady
from bmoe_lab.residency.clock import Clock
from bmoe_lab.residency.fifo import FIFO
from bmoe_lab.residency.gdsf import GDSF
from bmoe_lab.residency.least_stale import LeastStale
from bmoe_lab.residency.lfu import LFU
from bmoe_lab.residency.loads import Load, token_cycle
from bmoe_lab.residency.lru import LRU
from bmoe_lab.residency.per_layer import PerLayer
from bmoe_lab.residency.pin import Pin
from bmoe_lab.residency.plain import PlainPolicy
from bmoe_lab.residency.random_eviction import Random
from bmoe_lab.residency.s3fifo import S3FIFO
from bmoe_lab.residency.sieve import SIEVE
from bmoe_lab.residency.slru import SLRU
from bmoe_lab.residency.state import KernelState, ResidencyState
from bmoe_lab.residency.stationary_oracle import StationaryOracle
from bmoe_lab.residency.w_tinylfu import WTinyLFU

__all__ = [
    "ARC",
    "FIFO",
    "GDSF",
    "LFU",
    "LRU",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "Belady",
    "Clock",
    "KernelState",
    "LeastStale",
    "Load",
    "PerLayer",
    "Pin",
    "PlainPolicy",
    "Random",
    "ResidencyPolicy",
    "ResidencyState",
    "StationaryOracle",
    "WTinyLFU",
    "get",
    "names",
    "token_cycle",
]

_POLICIES: tuple[type[ResidencyPolicy], ...] = (
    LRU,
    FIFO,
    Clock,
    SLRU,
    ARC,
    S3FIFO,
    SIEVE,
    WTinyLFU,
    LFU,
    GDSF,
    PerLayer,
    LeastStale,
    Random,
    Pin,
    Belady,
    StationaryOracle,
)
_REGISTRY: dict[str, type[ResidencyPolicy]] = {policy.name: policy for policy in _POLICIES}


def names() -> list[str]:
    """Return the names of the residency policies that ship with the package.

    Returns
    -------
    list of str
        What :func:`get` knows.

    Examples
    --------
    >>> "lru" in names(), "w_tinylfu" in names()
    (True, True)
    """
    return sorted(_REGISTRY)


def get(name: str) -> type[ResidencyPolicy]:
    """Return the residency policy class called `name`.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Returns
    -------
    type
        A subclass of :class:`ResidencyPolicy`.

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
