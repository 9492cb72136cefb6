"""An axis along the text: the tokens' own words, where a phase or a turn begins."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.plots import theme
from bmoe_lab.plots.windows import Window
from bmoe_lab.schema import Phase

__all__ = ["MAX_PIECES", "mark_begins", "phase_begins", "show_pieces", "turn_begins"]

MAX_PIECES = 60
"""Tokens up to which their text stands under the axis; more would overlap."""

# More lines than this would hide the cells between them.
_MAX_TURNS = 40

# Longer pieces are cut under the axis; hover shows them whole.
_MAX_LENGTH = 14


def show_pieces(figure: go.Figure, trace: xr.Dataset, tokens: Window) -> None:
    """Put the text of the tokens under the axis where there is room; every fifth has its number.

    Parameters
    ----------
    figure : plotly.graph_objects.Figure
        Its x axis counts tokens.
    trace : xarray.Dataset
        Routing trace; without text nothing is done.
    tokens : tuple of int
        The window drawn.
    """
    n_token = tokens[1] - tokens[0]
    if "piece" not in trace.coords or n_token > MAX_PIECES:
        return
    pieces = trace["piece"].variable.isel(token=slice(*tokens)).values.tolist()
    labels = [
        f"{_short(str(piece))} · {number}" if number % 5 == 0 else _short(str(piece))
        for number, piece in enumerate(pieces, tokens[0])
    ]
    figure.update_xaxes(
        tickvals=list(range(*tokens)),
        ticktext=[theme.escape(label) for label in labels],
        showgrid=False,
        tickangle=-60 if n_token <= 30 else -90,
        tickfont={"size": 12 if n_token <= 30 else 10 if n_token <= 45 else 9},
    )


def _short(piece: str) -> str:
    if piece and not piece.strip():
        return "␣" * len(piece[:_MAX_LENGTH])
    return piece if len(piece) <= _MAX_LENGTH else piece[: _MAX_LENGTH - 1] + "…"


def phase_begins(trace: xr.Dataset, tokens: Window) -> list[int]:
    """Return where the phase changes, if it does once: from the prompt to what follows.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    tokens : tuple of int
        The window drawn; a change outside of it is left out.
    """
    phase = trace["phase"].values
    changes = np.flatnonzero(phase[1:] != phase[:-1]) + 1
    if changes.size != 1 or phase[0] != Phase.prefill:
        return []
    return [first for first in changes.tolist() if tokens[0] < first < tokens[1]]


def turn_begins(trace: xr.Dataset, tokens: Window) -> list[int]:
    """Return the tokens at which a turn or a text window begins; none if there are too many.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    tokens : tuple of int
        The window drawn.
    """
    turn = trace["turn"].values[slice(*tokens)]
    begins = (tokens[0] + np.flatnonzero(np.diff(turn)) + 1).tolist()
    return begins if len(begins) <= _MAX_TURNS else []


def mark_begins(figure: go.Figure, trace: xr.Dataset, phases: list[int], turns: list[int]) -> None:
    """Draw a line where prefill ends, since its evaluations are wide, and where turns begin.

    Parameters
    ----------
    figure : plotly.graph_objects.Figure
        Its x axis counts tokens.
    trace : xarray.Dataset
        Routing trace.
    phases, turns : list of int
        From :func:`phase_begins` and :func:`turn_begins`.
    """
    lines = [(first, 2.0) for first in phases] + [(first, 1.5) for first in turns]
    figure.update_layout(
        shapes=[
            {
                "type": "line",
                "x0": first - 0.5,
                "x1": first - 0.5,
                "y0": 0,
                "y1": 1,
                "yref": "y domain",
                "line": {"color": theme.VERMILLION, "width": width, "dash": "dot"},
            }
            for first, width in lines
        ],
        annotations=[
            {
                "text": f"prefill | {Phase(int(trace['phase'].values[first])).name}",
                "font": {"color": theme.VERMILLION, "size": 11},
                "showarrow": False,
                "x": first - 0.5,
                "y": 1.0,
                "yref": "paper",
                "yanchor": "bottom",
                "xanchor": "center",
            }
            for first in phases
        ],
    )
