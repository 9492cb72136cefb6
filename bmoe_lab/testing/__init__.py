"""Synthetic traces, random models and suites that any policy can run, for tests of yours."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmoe_lab.testing.large import memory_model, write_large_model
    from bmoe_lab.testing.models import LAYOUTS, tiny_model
    from bmoe_lab.testing.suites import ResidencyPolicySuite, RoutingPolicySuite
    from bmoe_lab.testing.traces import make_trace

__all__ = [
    "LAYOUTS",
    "ResidencyPolicySuite",
    "RoutingPolicySuite",
    "make_trace",
    "memory_model",
    "tiny_model",
    "write_large_model",
]

_HOME = {
    "LAYOUTS": "bmoe_lab.testing.models",
    "ResidencyPolicySuite": "bmoe_lab.testing.suites",
    "RoutingPolicySuite": "bmoe_lab.testing.suites",
    "make_trace": "bmoe_lab.testing.traces",
    "memory_model": "bmoe_lab.testing.large",
    "tiny_model": "bmoe_lab.testing.models",
    "write_large_model": "bmoe_lab.testing.large",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'bmoe_lab.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
