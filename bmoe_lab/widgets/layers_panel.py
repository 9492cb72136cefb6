"""The layers side by side: how often they find their experts, how evenly they use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets
import xarray as xr

from bmoe_lab.plots import theme
from bmoe_lab.plots.expert_load import plot_expert_load
from bmoe_lab.plots.hit_rate import plot_hit_rate
from bmoe_lab.widgets.drawing import Drawing
from bmoe_lab.widgets.selection import Selection

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["LayersPanel"]


class LayersPanel(ipywidgets.VBox):
    """Hit rate and load of every layer, over the tokens that are looked at.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.

    Attributes
    ----------
    hits, load : Drawing
        The two figures.
    """

    def __init__(self, trace: xr.Dataset) -> None:
        self._trace = trace
        self.hits, self.load = Drawing(), Drawing()
        super().__init__([self.hits.view, self.load.view])

    def refresh(self, selection: Selection) -> None:
        """Draw what has changed."""
        key = (selection.phase, selection.tokens)
        for drawing, plot in ((self.hits, plot_hit_rate), (self.load, plot_expert_load)):
            drawing.update(key, lambda plot=plot: self._draw(plot, selection))  # type: ignore[misc]

    def _draw(self, plot: object, selection: Selection) -> go.Figure:
        part = selection.rows(self._trace, phase=False)
        figure = plot(part, phase=selection.phase)  # type: ignore[operator]
        first, stop = selection.tokens
        if stop - first < self._trace.sizes["token"]:
            subtitle = figure.layout.title.subtitle
            note = f"tokens {first:,} to {stop - 1:,} of {self._trace.sizes['token']:,}"
            subtitle.text = " · ".join(filter(None, (note, subtitle.text)))
            subtitle.font = {"size": 12, "color": theme.TEXT}
        return figure
