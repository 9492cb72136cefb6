"""A plotly figure in a page: drawn there, told back what was clicked and zoomed.

plotly's own ``FigureWidget`` carries plotly.js (5 MB) in the state of every figure and answers each
update with a message about the layout that resulted. Here one copy serves a whole kernel, a figure
is one message with its arrays as binary, and the page speaks only of what a person did.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from ipywidgets import Widget, widget_serialization

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["FigureView"]

_CONFIG = {
    "displaylogo": False,
    "responsive": False,  # the page's own observer does it
    "modeBarButtonsToRemove": ["lasso2d", "autoScale2d"],
}


class _Library(Widget):
    """plotly.js, sent to a page once."""

    source = traitlets.Bytes().tag(sync=True)
    version = traitlets.Unicode().tag(sync=True)


_library: _Library | None = None


def _plotly_library() -> _Library:
    global _library
    if _library is None or _library.comm is None:
        from plotly.offline import get_plotlyjs, get_plotlyjs_version

        _library = _Library(source=get_plotlyjs().encode(), version=get_plotlyjs_version())
    return _library


class FigureView(anywidget.AnyWidget):
    """A figure that can be replaced, clicked, zoomed and selected in.

    Parameters
    ----------
    figure : plotly.graph_objects.Figure, optional
        What is drawn first.

    Attributes
    ----------
    clicked : dict
        ``curve`` (index of the trace), ``index`` (list of int: the point; row and column in a heat
        map), ``x``, ``y``, ``data`` (the point's customdata, None without), ``event`` (a number
        that tells two equal clicks apart). Empty at first.
    view : dict
        Per axis (``"xaxis"``, ``"yaxis2"``, ...) the range that a person zoomed to, None after a
        reset; ``event``. Empty at first.
    selected : dict
        Per axis (``"x"``, ``"y"``) the range of the box selection, ``event``; empty axes after
        a reset.
    version : int
        Counts the figures shown; a page marks its element ``data-drawn`` with the last one drawn.

    Examples
    --------
    >>> import plotly.graph_objects as go
    >>> view = FigureView(go.Figure(go.Scatter(y=[1, 2, 3])))
    >>> view.observe(lambda change: print(change.new["x"]), "clicked")
    >>> view.clicked = {"curve": 0, "index": [2], "x": 2, "y": 3, "event": 1}
    2
    """

    _esm = Path(__file__).with_name("figure_view.js")

    figure = traitlets.Dict().tag(sync=True)
    version = traitlets.Int().tag(sync=True)
    clicked = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    selected = traitlets.Dict().tag(sync=True)
    library = traitlets.Instance(Widget).tag(sync=True, **widget_serialization)

    # plotly keeps what a person zoomed to for as long as this stays the same.
    _revision = 1  # 0 would mean that nothing is kept

    def __init__(self, figure: go.Figure | None = None) -> None:
        super().__init__(library=_plotly_library())
        if figure is not None:
            self.show(figure)

    def show(self, figure: go.Figure, *, keep_view: bool = True) -> None:
        """Draw `figure` instead of the last one.

        Parameters
        ----------
        figure : plotly.graph_objects.Figure
            At most about a million cells: reduce first.
        keep_view : bool, default True
            Leave what a person zoomed to as it is; False shows the figure's own ranges.
        """
        drawn = figure.to_dict()
        version = self.version + 1
        layout = drawn["layout"]
        if not keep_view:
            self._revision += 1
        layout["uirevision"] = self._revision
        # The template repeats plotly's defaults, 6 kB of them.
        layout.pop("template", None)
        with self.hold_sync():
            self.figure = _binary({"data": drawn["data"], "layout": layout}) | {"config": _CONFIG}
            self.version = version

    def __repr__(self) -> str:
        title = self.figure.get("layout", {}).get("title", {}).get("text", "empty")
        return f"<FigureView: {title}>"


def _binary(value: Any) -> Any:
    """Return the figure's parts with arrays as bytes; plotly writes them as base64 text."""
    if isinstance(value, dict):
        if "bdata" in value and "dtype" in value:
            return value | {"bdata": base64.b64decode(value["bdata"])}
        return {key: _binary(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_binary(item) for item in value]
    return value
