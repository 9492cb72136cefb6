"""The map of a trace beside its text, for a person to zoom into and point at."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets
import xarray as xr

from bmoe_lab.errors import SchemaError
from bmoe_lab.plots import theme
from bmoe_lab.plots.heatmap import plot_heatmap
from bmoe_lab.plots.token_text import plot_token_text
from bmoe_lab.plots.token_values import token_values
from bmoe_lab.plots.windows import Window
from bmoe_lab.widgets.drawing import Drawing
from bmoe_lab.widgets.selection import Selection

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["MapPanel"]

_NO_TEXT = "No text was recorded with this trace (record_text=True, the default, keeps it)."

# As much text as is read at a glance; more would push the cell's panel out of sight.
_MAX_TEXT = 200

# Characters per row and their size: a row fits the figure in a tab of a page of 800 pixels.
_TEXT_WIDTH, _TEXT_SIZE = 64, 11


class MapPanel(ipywidgets.VBox):
    """Token by layer map with the text below it.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    on_window : callable
        Takes tokens and layers, each (first, stop) or None for what was not zoomed.
    on_cell : callable
        Takes token and layer, the latter None where the text was clicked.

    Attributes
    ----------
    map, text : Drawing
        The two figures.
    """

    def __init__(
        self,
        trace: xr.Dataset,
        *,
        on_window: Callable[[Window | None, Window | None], None],
        on_cell: Callable[[int, int | None], None],
    ) -> None:
        self._trace = trace
        self._on_window, self._on_cell = on_window, on_cell
        self.map, self.text = Drawing(), Drawing()
        self._text_values = token_values(trace)
        self._unmarked: tuple[Any, go.Figure, Any] | None = None
        self.map.view.observe(self._zoomed, "view")
        self.map.view.observe(self._pointed, "clicked")
        self.text.view.observe(self._read, "clicked")
        # A figure of its own for the sentence would push the cell's panel out of sight.
        self._has_text = "piece" in trace.coords
        below = self.text.view if self._has_text else ipywidgets.HTML(f"<i>{_NO_TEXT}</i>")
        super().__init__([self.map.view, below])

    def refresh(self, selection: Selection) -> None:
        """Draw what has changed."""
        s = selection
        window = (s.value, s.phase, s.tokens, s.layers)
        self.map.update((*window, s.cell), lambda: self._marked(selection, window))
        if not self._has_text:
            return
        value = self._text_value(s.value)
        self.text.update((value, s.tokens), lambda: self._text(value, s.tokens))

    def _marked(self, s: Selection, window: Any) -> go.Figure:
        """Return the map with a frame around the cell; another cell costs no other map."""
        if self._unmarked is None or self._unmarked[0] != window:
            if s.value is None:
                raise SchemaError("trace must hold something to show in a map; got nothing.")
            figure = plot_heatmap(
                self._trace,
                value=s.value,  # type: ignore[arg-type]  # checked where it was set
                tokens=s.tokens,
                layers=s.layers,
                phase=s.phase,
            )
            self._unmarked = (window, figure, figure.layout.shapes)
        _, figure, lines = self._unmarked
        frame = [] if s.cell is None else [_frame(*s.cell, s.tokens, s.layers)]
        figure.layout.shapes = [*lines, *frame]
        return figure

    def _text_value(self, value: str | None) -> str | None:
        """Return what colours the text: what the map shows, else the first that there is."""
        if value in self._text_values:
            return value
        return next(iter(self._text_values), None)

    def _text(self, value: str | None, tokens: Window) -> go.Figure:
        figure = plot_token_text(
            self._trace,
            value=value or "misses",
            tokens=tokens,
            max_tokens=_MAX_TEXT,
            width=_TEXT_WIDTH,
        )
        figure.data[0].textfont.size = _TEXT_SIZE
        # A view sends the arrays of the data as bytes, those of the layout only as lists; plotly
        # keeps what is there if the new values are equal.
        rows = [int(row) for row in figure.layout.yaxis.tickvals]
        figure.layout.yaxis.tickvals = None
        figure.layout.yaxis.tickvals = rows
        return figure

    def _zoomed(self, change: Any) -> None:
        axes = {name: ends for name, ends in change.new.items() if name in ("xaxis", "yaxis")}
        if not axes:
            return
        # A page repeats the axes zoomed before; once read, they must not come again.
        self.map.view.view = {}
        if self.map.figure is None:
            return
        self.map.forget()  # the page shows the zoomed range, not yet that of the window
        self._on_window(
            *(
                _window(axes[axis], self._trace.sizes[dim]) if axis in axes else None
                for axis, dim in (("xaxis", "token"), ("yaxis", "layer"))
            )
        )

    def _pointed(self, change: Any) -> None:
        if self.map.figure is not None and {"x", "y"} <= change.new.keys():
            self._on_cell(math.floor(change.new["x"]), math.floor(change.new["y"]))

    def _read(self, change: Any) -> None:
        if self.text.figure is None or change.new.get("curve") != 0:
            return
        number = self.text.figure.data[0].customdata[change.new["index"][0]]
        self._on_cell(int(number), None)


def _frame(token: int, layer: int, tokens: Window, layers: Window) -> dict[str, Any]:
    """Return a frame around a cell, never too thin to be seen in a map of a long text."""
    x, y = (tokens[1] - tokens[0]) / 250, (layers[1] - layers[0]) / 100
    return {
        "type": "rect",
        "x0": token - max(0.5, x),
        "x1": token + max(0.5, x),
        "y0": layer - max(0.5, y),
        "y1": layer + max(0.5, y),
        "line": {"color": theme.VERMILLION, "width": 3},
    }


def _window(ends: list[float] | None, size: int) -> Window:
    """Return the cells of a zoomed range; the nearest edges, so that panning keeps the width."""
    if ends is None:
        return 0, size
    first = min(max(0, math.floor(min(ends) + 1)), size - 1)
    stop = min(max(first + 1, math.floor(max(ends) + 1)), size)
    return first, stop
