"""What a person looks at in a trace: a value, some tokens and layers, one cell, one expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from bmoe_lab.metrics._shared import PhaseName, _phase_rows
from bmoe_lab.plots.windows import Window

__all__ = ["Selection"]


@dataclass(frozen=True)
class Selection:
    """The state of a :class:`bmoe_lab.widgets.RouteExplorer` at one moment.

    Attributes
    ----------
    value : str or None
        What a cell of the map shows; None if the trace can show nothing.
    phase : {"all", "prefill", "decode", "draft"}
    tokens, layers : tuple of int
        First and stop.
    cell : tuple of int or None
        Token and layer.
    expert : tuple of int or None
        Layer and expert.
    """

    value: str | None
    phase: PhaseName
    tokens: Window
    layers: Window
    cell: tuple[int, int] | None = None
    expert: tuple[int, int] | None = None

    def rows(self, trace: xr.Dataset, *, phase: bool = True) -> xr.Dataset:
        """Return the tokens of the trace, of all layers, that are looked at.

        Parameters
        ----------
        trace : xarray.Dataset
            Routing trace.
        phase : bool, default True
            Leave out tokens of other phases.
        """
        part = trace.isel(token=slice(*self.tokens))
        if phase and self.phase != "all":
            part = part.isel(token=np.flatnonzero(_phase_rows(part, self.phase)))
        return part

    def cut(self, trace: xr.Dataset) -> xr.Dataset:
        """Return the part of the trace that is looked at: its tokens, its layers, its phase."""
        return self.rows(trace).isel(layer=slice(*self.layers))
