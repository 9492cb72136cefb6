"""A sentence where a figure cannot be: what is missing, in the figure's place."""

from __future__ import annotations

import textwrap

import plotly.graph_objects as go

from bmoe_lab.plots import theme

__all__ = ["sentence"]


def sentence(text: str, *, title: str = "", height: int = 220) -> go.Figure:
    """Return a figure that says `text` instead of showing data.

    Parameters
    ----------
    text : str
        Plain text, wrapped here; the words of the error that kept the figure from being drawn.
    title : str, optional
        Heading.
    height : int, default 220
        Height in pixels.

    Examples
    --------
    >>> sentence("trace must hold router scores.").layout.annotations[0].text
    'trace must hold router scores.'
    """
    lines = [theme.escape(line) for line in textwrap.wrap(text, 88)]
    figure = theme.figure(title=title, x_title="", y_title="", height=height, legend=False)
    figure.add_annotation(
        text="<br>".join(lines),
        xref="paper",
        yref="paper",
        x=0.5,
        y=0.5,
        showarrow=False,
        font={"size": 13, "color": theme.TEXT},
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
