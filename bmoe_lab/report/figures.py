"""Figures as page fragments: one id each, of a sensible size, or a sentence in their place."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING

from bmoe_lab.errors import SchemaError, SettingsError

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["MAX_FIGURE_BYTES", "Figures"]

# Beside 4.8 MB of plotly.js; a matrix of 128 experts takes 0.4 MB, of 512 it would take 7 MB.
MAX_FIGURE_BYTES = 1_000_000


class Figures:
    """Turns figures into page fragments with predictable ids.

    Parameters
    ----------
    level : int, default 2
        Level of the headings of sections.
    hover_cells : int, default 5000
        Cells of a map up to which each says what it stands for: about 100 bytes per cell.
    """

    def __init__(self, *, level: int = 2, hover_cells: int = 5000) -> None:
        self.level = level
        self.hover_cells = hover_cells
        self._n = 0

    def heading(self, text: str) -> str:
        """Return the heading of a section; `text` is plain."""
        return f"<h{self.level}>{html.escape(text)}</h{self.level}>"

    def section(self, heading: str, note: str, draw: Callable[[], go.Figure]) -> str:
        """Return a heading, what the figure shows, and the figure."""
        return f'{self.heading(heading)}\n<p class="note">{html.escape(note)}</p>\n{self.add(draw)}'

    def add(self, draw: Callable[[], go.Figure]) -> str:
        """Return the figure, or in its place the sentence that says why there is none.

        Parameters
        ----------
        draw : callable
            Makes the figure. What the trace cannot show is said by the error that it raises.
        """
        import plotly.io

        try:
            figure = draw()
        except (SchemaError, SettingsError) as error:
            return _instead(str(error))
        name = f"figure-{self._n + 1}"
        fragment: str = plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=False,
            div_id=name,
            config={"responsive": True, "displaylogo": False},
        )
        size = len(fragment.encode())
        if size > MAX_FIGURE_BYTES:
            return _instead(
                f"This figure would add {size / 1e6:.1f} MB to the page; draw it in a notebook."
            )
        self._n += 1
        return fragment


def _instead(text: str) -> str:
    return f'<p class="instead">No figure: {html.escape(text)}</p>'
