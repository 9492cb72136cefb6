"""Widgets for notebooks: thin, over metrics, simulation, comparison and plots.

Each is an ipywidgets box: the last line of a cell shows it, its traits are its state, and all of it
can be driven and read without a browser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmoe_lab.widgets.compare_view import CompareView
    from bmoe_lab.widgets.figure_view import FigureView
    from bmoe_lab.widgets.live_run import LiveRun
    from bmoe_lab.widgets.policy_lab import PolicyLab
    from bmoe_lab.widgets.route_explorer import RouteExplorer

__all__ = ["CompareView", "FigureView", "LiveRun", "PolicyLab", "RouteExplorer"]

_HOME = {
    "CompareView": "bmoe_lab.widgets.compare_view",
    "FigureView": "bmoe_lab.widgets.figure_view",
    "LiveRun": "bmoe_lab.widgets.live_run",
    "PolicyLab": "bmoe_lab.widgets.policy_lab",
    "RouteExplorer": "bmoe_lab.widgets.route_explorer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'bmoe_lab.widgets' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
