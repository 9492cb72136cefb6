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
    )
    from bmoe_lab.comparison.comparing import compare
    from bmoe_lab.recording import open_trace, save_trace
    from bmoe_lab.recording.recover import recover
    from bmoe_lab.run import Run
    from bmoe_lab.session import Session
    from bmoe_lab.simulation import replay

__all__ = [
    "Run",
    "Session",
    "__version__",
    "compare",
    "datasets",
    "errors",
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
    "tables",
    "testing",
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
}
_HOME = {
    "Run": "bmoe_lab.run",
    "Session": "bmoe_lab.session",
    "compare": "bmoe_lab.comparison",
    "open_trace": "bmoe_lab.recording",
    "recover": "bmoe_lab.recording",
    "replay": "bmoe_lab.simulation",
    "save_trace": "bmoe_lab.recording",
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
