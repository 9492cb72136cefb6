"""``ds.moe``: metrics and plots of a trace, as methods of the Dataset.

Registered when :mod:`bmoe_lab` is imported; what it calls is imported on first use. A comparison
(:class:`xarray.DataTree`) has the same accessor with its own table, plots and report.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import xarray as xr

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

__all__ = ["ComparisonAccessor", "PlotAccessor", "TraceAccessor"]


class _Bound:
    """Offers the functions of a module as methods of its data, with their own docstrings."""

    _module: str
    _prefix = ""
    # Functions of other modules, by name.
    _others: ClassVar[Mapping[str, str]] = {}

    def __init__(self, data: Any) -> None:
        self._data = data

    def _names(self) -> list[str]:
        names = importlib.import_module(self._module).__all__
        own = [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]
        return [*own, *self._others]

    def __getattr__(self, name: str) -> Any:
        # Tools probe for private names; they must not cost an import.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        known = self._names()
        if name not in known:
            raise AttributeError(f"{self._where()} has no {name!r}; it has {sorted(known)}.")
        home, full = self._others.get(name, self._module), name
        if name not in self._others:
            full = self._prefix + name
        function = getattr(importlib.import_module(home), full)
        return types.MethodType(function, self._data)

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self._names()])

    def _where(self) -> str:
        return ".moe"


class PlotAccessor(_Bound):
    """The figures of a trace or comparison: ``.moe.plot.<x>()`` is ``plots.plot_<x>(data)``."""

    _module = "bmoe_lab.plots"
    _prefix = "plot_"

    def _where(self) -> str:
        return ".moe.plot"

    def __repr__(self) -> str:
        return f"<plots: {', '.join(self._names())}>"


@xr.register_dataset_accessor("moe")  # type: ignore[no-untyped-call]  # untyped in xarray
class TraceAccessor(_Bound):
    """Metrics and plots of one routing trace: ``.moe.<metric>()`` is ``metrics.<metric>(trace)``.

    What simulates is here too: ``.moe.replay()``, ``.moe.lru_curve()``, ``.moe.diagnose()``.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> trace = bl.testing.make_trace(n_token=8, n_layer=2, seed=0)
    >>> trace.moe.hit_rate(by="layer").sizes["layer"]
    2
    """

    _module = "bmoe_lab.metrics"
    _others: ClassVar[Mapping[str, str]] = {
        "diagnose": "bmoe_lab.simulation.diagnosis",
        "lru_curve": "bmoe_lab.simulation.curves",
        "replay": "bmoe_lab.simulation.replaying",
    }

    @property
    def plot(self) -> PlotAccessor:
        """Figures, each a :class:`plotly.graph_objects.Figure`."""
        return PlotAccessor(self._data)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page about the trace; returns where it is."""
        from bmoe_lab.report import write_report

        return write_report(self._data, path)

    def __repr__(self) -> str:
        metrics = [name for name in self._names() if name not in self._others]
        return f"<metrics: {', '.join(metrics)}; {', '.join(self._others)}; plots under .plot>"


@xr.register_datatree_accessor("moe")  # type: ignore[no-untyped-call]  # untyped in xarray
class ComparisonAccessor:
    """Table, figures and report of a comparison.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.
    """

    def __init__(self, tree: xr.DataTree) -> None:
        self._data = tree

    @property
    def plot(self) -> PlotAccessor:
        """Figures, each a :class:`plotly.graph_objects.Figure`."""
        return PlotAccessor(self._data)

    def table(self) -> pd.DataFrame:
        """Return one row per run (:func:`bmoe_lab.tables.comparison_frame`)."""
        from bmoe_lab.tables import comparison_frame

        return comparison_frame(self._data)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page about the comparison; returns where it is."""
        from bmoe_lab.report import write_report

        return write_report(self._data, path)

    def __repr__(self) -> str:
        return "<comparison: table(), report(path), plots under .plot>"
