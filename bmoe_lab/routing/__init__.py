"""Which experts run: one routing policy per file, and the engine that applies their answers."""

from __future__ import annotations

from bmoe_lab.errors import unknown_name
from bmoe_lab.routing.base import ModelFacts, Routing, RoutingPolicy
from bmoe_lab.routing.buddy import Buddy
from bmoe_lab.routing.cache_prior import CachePrior
from bmoe_lab.routing.counters import Counters
from bmoe_lab.routing.cum_sum import CumSum
from bmoe_lab.routing.drop_below import DropBelow
from bmoe_lab.routing.drop_cold import DropCold
from bmoe_lab.routing.engine import Engine
from bmoe_lab.routing.fewer_experts import FewerExperts
from bmoe_lab.routing.lossless import Lossless
from bmoe_lab.routing.max_rank import MaxRank
from bmoe_lab.routing.random_drop import RandomDrop
from bmoe_lab.routing.random_substitute import RandomSubstitute
from bmoe_lab.routing.ratio_skip import RatioSkip
from bmoe_lab.routing.resident_only import ResidentOnly
from bmoe_lab.routing.sensitivity_skip import SensitivitySkip
from bmoe_lab.routing.top_p import TopP

__all__ = [
    "Buddy",
    "CachePrior",
    "Counters",
    "CumSum",
    "DropBelow",
    "DropCold",
    "Engine",
    "FewerExperts",
    "Lossless",
    "MaxRank",
    "ModelFacts",
    "RandomDrop",
    "RandomSubstitute",
    "RatioSkip",
    "ResidentOnly",
    "Routing",
    "RoutingPolicy",
    "SensitivitySkip",
    "TopP",
    "get",
    "names",
]

_REGISTRY: dict[str, type[RoutingPolicy]] = {
    policy.name: policy
    for policy in (
        Lossless,
        FewerExperts,
        DropCold,
        DropBelow,
        RatioSkip,
        SensitivitySkip,
        TopP,
        CachePrior,
        MaxRank,
        CumSum,
        Buddy,
        ResidentOnly,
        RandomDrop,
        RandomSubstitute,
    )
}


def names() -> list[str]:
    """Return the names of the routing policies that ship with the package.

    Returns
    -------
    list of str
        What :func:`get` knows.

    Examples
    --------
    >>> "drop_cold" in names()
    True
    """
    return sorted(_REGISTRY)


def get(name: str) -> type[RoutingPolicy]:
    """Return the routing policy class called `name`.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Returns
    -------
    type
        A subclass of :class:`RoutingPolicy`.

    Raises
    ------
    UnknownNameError
        If there is none; the message lists those that exist.

    Examples
    --------
    >>> get("drop_cold")(0.75)
    DropCold(frac=0.75)
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise unknown_name("routing policy", name, _REGISTRY) from None
