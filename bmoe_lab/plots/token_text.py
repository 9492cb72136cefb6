"""The text itself, each token on a background that tells what it cost."""

from __future__ import annotations

import functools
import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.plots import theme
from bmoe_lab.plots.heatmap_values import VALUES as CELL_VALUES
from bmoe_lab.plots.token_values import VALUES, TokenValue, values_of
from bmoe_lab.plots.windows import Window, window_of

__all__ = ["plot_token_text"]

Values = npt.NDArray[np.float64]

_MAX_ROWS = 60
_ROW_PIXELS = 22
_TOP, _BOTTOM = 84, 66

# An even number, so that zero has a colour of its own where values have signs.
_TOP_RANK = 254

# Colours end here where a few tokens would leave all others dark.
_QUANTILE = 0.98
_SIGNED = (theme.BLUE, "#F2F2F2", theme.VERMILLION)
_AGREEMENT = (theme.VERMILLION, theme.SKY)
_UNKNOWN = "rgba(0,0,0,0)"


def plot_token_text(
    trace: xr.Dataset,
    *,
    value: str = "misses",
    tokens: Window | None = None,
    max_tokens: int = 600,
    width: int = 100,
) -> go.Figure:
    """Return the text of a run in wrapped rows, each token coloured by a value.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace with text, or a run of a comparison.
    value : str, default "misses"
        ``misses``, ``read``, ``changed`` (sums over layers), ``entropy`` (of the router, mean over
        layers), ``nll`` (negative log-probability of the token); in a comparison also ``kl``,
        ``top1_agree``, ``routing_agreement``, and ``delta_nll`` where you have put that variable.
        :func:`bmoe_lab.plots.token_values.token_values` lists what this trace can show.
    tokens : tuple of int, optional
        Part to show as (first, stop), cut to the trace.
    max_tokens : int, default 600
        At most so many, from the first on, in at most 60 rows; the subtitle says which.
    width : int, default 100
        Characters per row. 100 are readable from 700 pixels on.

    Returns
    -------
    plotly.graph_objects.Figure
        The first trace is one bar per token shown; its customdata is the token's number. Outlined
        tokens have no value.

    Raises
    ------
    SchemaError
        If the trace is empty, holds no text, or lacks what the value comes from.
    SettingsError
        If a window lies outside of the trace, or `width` or `max_tokens` is too small.
    UnknownNameError
        If there is no such value.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_token_text(make_trace(n_token=8, n_layer=2, seed=0))
    >>> figure.data[0].customdata.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if value not in VALUES:
        raise unknown_name("value", value, VALUES)
    if max_tokens < 1:
        raise SettingsError(f"max_tokens must be at least 1; got {max_tokens!r}. Use 600.")
    if width < 10:
        raise SettingsError(f"width must be at least 10 characters; got {width!r}. Use 100.")
    first, stop = window_of(trace, "token", tokens)
    if "piece" not in trace.coords:
        raise SchemaError(
            "trace must hold the coordinate 'piece' to show its text; got "
            f"{sorted(map(str, trace.coords))}. "
            "Record the text too (record_text=True, the default)."
        )
    stop = min(stop, first + max_tokens)
    pieces = [str(p) for p in trace["piece"].variable.isel(token=slice(first, stop)).values]
    base, cells, row = _wrapped(pieces, width)
    shown = int(np.searchsorted(row, _MAX_ROWS))
    pieces, base, cells, row = pieces[:shown], base[:shown], cells[:shown], row[:shown]
    stop = first + shown
    view = VALUES[value]
    values = values_of(trace, value, (first, stop))
    unit = view.unit
    if value == "read":
        factor, unit = theme.byte_unit(float(np.nanmax(np.append(values, 0.0))))
        values = values / factor
    low, high, cut = _bounds(view, values)
    notes = [
        f"tokens {first:,} to {stop - 1:,} of {trace.sizes['token']:,}",
        theme.run_note(trace.attrs),
        CELL_VALUES["entropy"].note(trace) if value == "entropy" else "",
        cut,
        "outlined: unknown" if np.isnan(values).any() else "",
    ]
    n_row = int(row[-1]) + 1
    figure = theme.figure(
        title=f"{view.label[0].upper()}{view.label[1:]}" + (f" ({unit})" if unit else ""),
        subtitle=" · ".join(note for note in notes if note),
        x_title="",
        y_title="token",
        height=_TOP + _BOTTOM + _ROW_PIXELS * max(2, n_row),
        legend=False,
    )
    share = np.clip((np.nan_to_num(values) - low) / (high - low), 0, 1)
    rank = np.where(np.isnan(values), -1, np.rint(share * _TOP_RANK)).astype(np.int64)
    background, ink = _palette(view.scale)
    figure.add_trace(
        go.Bar(
            orientation="h",
            base=base.tolist(),
            x=cells,
            y=row,
            width=0.84,
            text=[theme.escape(_cut(piece, width)) for piece in pieces],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            cliponaxis=False,
            textfont={
                "family": "monospace",
                "size": _font_size(width),
                "color": [ink[place] for place in rank.tolist()],
            },
            marker={
                "color": [background[place] for place in rank.tolist()],
                "line": {"color": theme.GREY, "width": 1},
                "cornerradius": 3,
            },
            customdata=np.arange(first, stop),
            hovertext=_hover(pieces, values, view, unit),
            hovertemplate="token %{customdata}%{hovertext}<extra></extra>",
            showlegend=False,
        )
    )
    if not np.isnan(values).all():
        figure.add_trace(_key(view, _scale(view), low, high))
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    figure.update_layout(barmode="overlay", margin={"l": 56, "r": 10, "t": _TOP, "b": _BOTTOM})
    figure.update_xaxes(range=[0, width], visible=False, fixedrange=True)
    figure.update_yaxes(
        range=[n_row - 0.4, -0.6],
        tickvals=row[begins],
        ticktext=[f"{first + int(begin)}" for begin in begins],
        tickfont={"size": 10},
        showgrid=False,
        zeroline=False,
        ticks="",
        fixedrange=True,
    )
    return figure


def _wrapped(
    pieces: list[str], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each token begins in its row, its cells, and its row; a newline ends a row."""
    base, cells, rows = [], [], []
    at, row = 0, 0
    for piece in pieces:
        size = min(width, max(1, _cells(piece)))
        if at and at + size > width:
            at, row = 0, row + 1
        base.append(at)
        cells.append(size)
        rows.append(row)
        at += size
        if "\\x0a" in piece:
            at, row = 0, row + 1
    return np.array(base, np.int64), np.array(cells, np.int64), np.array(rows, np.int64)


def _cells(text: str) -> int:
    """Return how many columns a monospaced text takes; East Asian characters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def _cut(piece: str, width: int) -> str:
    if _cells(piece) <= width:
        return piece
    kept = piece[: width - 1]
    while _cells(kept) > width - 1:
        kept = kept[:-1]
    return kept + "…"


def _font_size(width: int) -> float:
    """Return a size at which a row fits a page of 700 pixels; a character is 0.6 of it wide."""
    return float(np.clip(np.floor(2 * 634 / width / 0.602) / 2, 6, 14))


def _bounds(view: TokenValue, values: Values) -> tuple[float, float, str]:
    """Return the ends of the colours, and a note if tokens lie beyond them."""
    if view.scale == "agreement":
        return 0.0, 1.0, ""
    if view.unit == "share":
        return 0.0, 1.0, ""
    known = values[~np.isnan(values)]
    if view.scale == "band" and known.size:
        low, high = (float(end) for end in np.quantile(known, (1 - _QUANTILE, _QUANTILE)))
        if high > low:
            return low, high, f"colours: {100 * (2 * _QUANTILE - 1):.0f} % of tokens"
        return low - 0.5, low + 0.5, ""
    size = np.abs(known)
    top = float(size.max(initial=0.0))
    usual = float(np.quantile(size, _QUANTILE)) if size.size else 0.0
    note = ""
    if 0 < usual < top / 2:
        top, note = usual, f"colours end at {100 * _QUANTILE:g} % of the tokens"
    top = top or 1.0
    return (-top if view.scale == "signed" else 0.0), top, note


def _scale(view: TokenValue) -> Any:
    if view.scale == "signed":
        return list(_SIGNED)
    if view.scale == "agreement":
        low, high = _AGREEMENT
        return [[0, low], [0.5, low], [0.5, high], [1, high]]
    return theme.SEQUENTIAL


@functools.cache
def _palette(scale: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return backgrounds by rank with the ink that reads on each; the last is for the unknown."""
    from plotly.colors import get_colorscale, hex_to_rgb

    if scale == "agreement":
        stops = [hex_to_rgb(color) for color in _AGREEMENT]
        colors = np.array([stops[rank * 2 > _TOP_RANK] for rank in range(_TOP_RANK + 1)], float)
    else:
        if scale == "signed":
            names = [hex_to_rgb(color) for color in _SIGNED]
            places = [0.0, 0.5, 1.0]
        else:
            pairs = get_colorscale(theme.SEQUENTIAL)
            places = [place for place, _ in pairs]
            names = [hex_to_rgb(color) for _, color in pairs]
        at = np.linspace(0, 1, _TOP_RANK + 1)
        channels = np.array(names, float)
        colors = np.stack([np.interp(at, places, channels[:, i]) for i in range(3)], axis=1)
    share = np.rint(colors) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    # The contrasts with black and with white are equal at a luminance of 0.179 (WCAG 2).
    ink = ["#000000" if light > 0.179 else "#ffffff" for light in luminance.tolist()]
    back = [f"rgb({r},{g},{b})" for r, g, b in np.rint(colors).astype(int).tolist()]
    return (*back, _UNKNOWN), (*ink, theme.TEXT)


def _hover(pieces: list[str], values: Values, view: TokenValue, unit: str) -> list[str]:
    texts = []
    for piece, value in zip(pieces, values.tolist(), strict=True):
        if np.isnan(value):
            said = "unknown"
        elif view.scale == "agreement":
            said = "yes" if value else "no"
        else:
            said = f"{value:{'+.3g' if view.scale == 'signed' else '.3g'}} {unit}"
        shown = theme.escape(piece if len(piece) <= 200 else piece[:199] + "…")
        texts.append(f": ‘{shown}’<br>{view.label}: {said}")
    return texts


def _key(view: TokenValue, scale: Any, low: float, high: float) -> go.Scatter:
    """Return an invisible point that brings the colour bar along."""
    bar: dict[str, Any] = {
        "orientation": "h",
        "thickness": 12,
        "lenmode": "pixels",
        "len": 280,
        "x": 0,
        "xanchor": "left",
        "yref": "container",
        "y": 0.0,
        "yanchor": "bottom",
        "outlinewidth": 0,
        "ypad": 8,
        "tickfont": {"size": 11},
    }
    if view.scale == "agreement":
        bar |= {"tickvals": [0.25, 0.75], "ticktext": ["another token", "the same token"]}
    marker = {
        "color": [low],
        "colorscale": scale,
        "cmin": low,
        "cmax": high,
        "showscale": True,
        "colorbar": bar,
    }
    return go.Scatter(
        x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", showlegend=False
    )
