"""Colours and layout that every figure shares.

Backgrounds are transparent and text is a middle grey, so one figure reads on a light page and in a
dark notebook. Categories use the palette of Okabe and Ito ("Color Universal Design", 2008), which
people with any common colour blindness can tell apart; quantities use viridis, which is monotone in
lightness and holds no grey, so that grey can mean "nothing was routed here".
"""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

__all__ = [
    "BLUE",
    "CATEGORIES",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "SEQUENTIAL",
    "SKY",
    "TEXT",
    "VERMILLION",
    "byte_unit",
    "escape",
    "figure",
    "run_note",
    "series_style",
]

BLUE = "#0072B2"
VERMILLION = "#D55E00"
GREEN = "#009E73"
ORANGE = "#E69F00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
TEXT = "#808690"
"""Text and axis lines: contrast of at least 3.6 against both white and #111."""
GREY = "rgba(128,134,144,0.28)"
"""Cells without a value, behind heat maps."""
GRID = "rgba(128,134,144,0.22)"

CATEGORIES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
SEQUENTIAL = "Viridis"

# Letters of a subtitle that fit a page 700 pixels wide, and the height of one more line.
_WIDTH = 100
_LINE = 16
# Space for the title, for what a page's tools cover, and for a label over the axes.
_TOP = 72

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon")


def escape(text: object) -> str:
    """Return text that plotly shows literally: unescaped, it takes ``<b>`` for markup."""
    return html.escape(str(text), quote=False)


def series_style(index: int) -> tuple[str, str]:
    """Return colour and marker symbol of the `index`-th series; both differ, for prints in grey."""
    return CATEGORIES[index % len(CATEGORIES)], _SYMBOLS[index % len(_SYMBOLS)]


def run_note(attrs: Mapping[Any, Any]) -> str:
    """Return what a reader must know of a run before believing its figure.

    Parameters
    ----------
    attrs : mapping
        Attributes of a trace; absent ones are not guessed.

    Examples
    --------
    >>> run_note({"lossless": 0, "policy": "DropCold(frac=0.5)", "counterfactual": 1})
    'lossy: DropCold(frac=0.5); counterfactual (open loop)'
    >>> run_note({"lossless": 1, "complete": 0})
    'lossless; incomplete run'
    >>> run_note({"schema_version": 1, "source": "import"})
    'policy unknown'
    """
    notes = []
    if "lossless" in attrs:
        if int(attrs["lossless"]):
            notes.append("lossless")
        else:
            policy = attrs.get("policy")
            notes.append(f"lossy: {policy}" if policy else "lossy")
    elif "schema_version" in attrs:
        notes.append("policy unknown")
    settings = json.loads(attrs.get("session_settings", "{}"))
    width = settings.get("n_expert_used")
    if width is not None and width != attrs.get("n_expert_used_model", width):
        notes.append(f"n_expert_used={width} of the model's {attrs['n_expert_used_model']}")
    if int(attrs.get("counterfactual", 0)):
        notes.append("counterfactual (open loop)")
    if not int(attrs.get("complete", 1)):
        notes.append("incomplete run")
    return "; ".join(notes)


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit in which `largest` bytes read well, as (bytes per unit, name).

    Examples
    --------
    >>> byte_unit(3 * 2**20)
    (1048576.0, 'MiB')
    """
    for factor, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if largest >= factor:
            return factor, name
    return 1.0, "bytes"


def _wrapped(subtitle: str) -> list[str]:
    """Return the lines of a subtitle, broken between its notes where there is room for that."""
    lines: list[str] = []
    for part in subtitle.split(" · ") if subtitle else []:
        if lines and len(lines[-1]) + 3 + len(part) <= _WIDTH:
            lines[-1] += f" · {part}"
        else:
            lines += textwrap.wrap(part, _WIDTH)
    return lines


def figure(
    *,
    title: str,
    subtitle: str = "",
    x_title: str,
    y_title: str,
    height: int = 420,
    legend: bool = True,
) -> go.Figure:
    """Return an empty figure in the package's style.

    Parameters
    ----------
    title, subtitle, x_title, y_title : str
        Plain text: escaped here. Axis titles carry their unit. A long subtitle is broken into
        lines, between its notes (" · ") if possible.
    height : int, default 420
        Height in pixels; the width follows the page.
    legend : bool, default True
        Whether the legend is shown, below the axes where it cannot cover data.
    """
    heading: dict[str, Any] = {
        "text": escape(title),
        "x": 0.0,
        "xref": "paper",
        "xanchor": "left",
        # From the top down, so that more lines of subtitle grow towards the margin made for them.
        "yref": "container",
        "y": 1.0,
        "yanchor": "top",
        "pad": {"t": 26},
        "font": {"size": 17},
    }
    lines = _wrapped(subtitle)
    if subtitle:
        text = "<br>".join(escape(line) for line in lines)
        heading["subtitle"] = {"text": text, "font": {"size": 12, "color": TEXT}}
    axis = {
        "gridcolor": GRID,
        "linecolor": TEXT,
        "zerolinecolor": GRID,
        "ticks": "outside",
        "tickcolor": TEXT,
        "automargin": True,
    }
    font = {"size": 13}
    layout = go.Layout(
        title=heading,
        font={"color": TEXT, "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=list(CATEGORIES),
        height=height + max(0, len(lines) - 1) * _LINE,
        margin={"l": 64, "r": 24, "t": _TOP + len(lines) * _LINE, "b": 56},
        xaxis={**axis, "title": {"text": escape(x_title), "standoff": 10, "font": font}},
        yaxis={**axis, "title": {"text": escape(y_title), "standoff": 10, "font": font}},
        showlegend=legend,
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
        },
        hoverlabel={"align": "left"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": TEXT, "activecolor": BLUE},
    )
    return go.Figure(layout=layout)
