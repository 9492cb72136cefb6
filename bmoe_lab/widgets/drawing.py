"""A figure that is drawn when what it shows has changed, and only then."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from bmoe_lab.errors import BmoeLabError
from bmoe_lab.plots.sentence import sentence
from bmoe_lab.widgets.figure_view import FigureView

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Drawing"]


class Drawing:
    """A view with a memory of what it shows; errors of ours become sentences in its place.

    Whoever changes something may call :meth:`update` as often as they like: one change is one
    redraw, so sliders, zooms and clicks that set each other cannot go round in circles.

    Attributes
    ----------
    view : FigureView
        What stands in the page.
    figure : plotly.graph_objects.Figure or None
        The last figure; None at first, or while a sentence stands in its place.

    Examples
    --------
    >>> import plotly.graph_objects as go
    >>> drawing = Drawing()
    >>> drawing.update("a", go.Figure), drawing.update("a", go.Figure)
    (True, False)
    """

    def __init__(self) -> None:
        self.view = FigureView()
        self.figure: go.Figure | None = None
        self._shown: Hashable = None

    def update(self, key: Hashable, draw: Callable[[], go.Figure]) -> bool:
        """Draw if `key` is not the last one; return whether that was so.

        Parameters
        ----------
        key : hashable
            All that the figure depends on; not None.
        draw : callable
            Returns the figure. Its own ranges are shown, not those a person zoomed to.
        """
        if key == self._shown:
            return False
        self._shown = key
        self.figure = None
        try:
            figure = self.figure = draw()
            # Else each redraw would put the person's tool, such as panning, back to zooming.
            figure.update_layout(modebar_uirevision="kept")
        except BmoeLabError as error:
            figure = sentence(str(error))
        self.view.show(figure, keep_view=False)
        return True

    def forget(self) -> None:
        """Have the next :meth:`update` draw in any case."""
        self._shown = None
