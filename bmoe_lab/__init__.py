"""A laboratory for Mixture-of-Experts routing on llama.cpp.

Models larger than memory run on a CPU: only the experts that the router picks are read from disk.
The routing is recorded into xarray Datasets, and lossy routing policies are compared with the
lossless run. The public names are loaded on first use, so importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Registers ``Dataset.moe``; costs little beside xarray itself.
from bmoe_lab import accessor as _accessor  # noqa: F401  (imported for its effect)
from bmoe_lab._version import __version__

if TYPE_CHECKING:
    from bmoe_lab import (
        datasets,
        errors,
        metrics,
        plots,
        report,
        residency,
        routing,
        schema,
        tables,
        testing,
        widgets,
    )
    from bmoe_lab.comparison.comparing import compare
    from bmoe_lab.converters import (
        from_bigmoeonedge,
        from_moe_trace,
        from_parquet,
        from_routed_experts,
        to_bigmoeonedge,
        to_moe_trace,
        to_parquet,
        to_routed_experts,
    )
    from bmoe_lab.recording import open_trace, save_trace
    from bmoe_lab.recording.recover import recover
    from bmoe_lab.run import Run
    from bmoe_lab.runtime.step import Step
    from bmoe_lab.session import Session
    from bmoe_lab.simulation import budgets, diagnose, lru_curve, replay, sweep

__all__ = [
    "Run",
    "Session",
    "Step",
    "__version__",
    "budgets",
    "compare",
    "datasets",
    "diagnose",
    "errors",
    "from_bigmoeonedge",
    "from_moe_trace",
    "from_parquet",
    "from_routed_experts",
    "lru_curve",
    "metrics",
    "open_trace",
    "plots",
    "recover",
    "replay",
    "report",
    "residency",
    "routing",
    "save_trace",
    "schema",
    "sweep",
    "tables",
    "testing",
    "to_bigmoeonedge",
    "to_moe_trace",
    "to_parquet",
    "to_routed_experts",
    "widgets",
]

_MODULES = {
    "datasets",
    "errors",
    "metrics",
    "plots",
    "report",
    "residency",
    "routing",
    "schema",
    "tables",
    "testing",
    "widgets",
}
_HOME = {
    "Run": "bmoe_lab.run",
    "Session": "bmoe_lab.session",
    "Step": "bmoe_lab.runtime.step",
    "budgets": "bmoe_lab.simulation",
    "compare": "bmoe_lab.comparison",
    "diagnose": "bmoe_lab.simulation",
    "from_bigmoeonedge": "bmoe_lab.converters",
    "from_moe_trace": "bmoe_lab.converters",
    "from_parquet": "bmoe_lab.converters",
    "from_routed_experts": "bmoe_lab.converters",
    "lru_curve": "bmoe_lab.simulation",
    "open_trace": "bmoe_lab.recording",
    "recover": "bmoe_lab.recording",
    "replay": "bmoe_lab.simulation",
    "save_trace": "bmoe_lab.recording",
    "sweep": "bmoe_lab.simulation",
    "to_bigmoeonedge": "bmoe_lab.converters",
    "to_moe_trace": "bmoe_lab.converters",
    "to_parquet": "bmoe_lab.converters",
    "to_routed_experts": "bmoe_lab.converters",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"bmoe_lab.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'bmoe_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
