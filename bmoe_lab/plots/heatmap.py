"""Token by layer: where a run missed, read, changed or spread its routing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.metrics._shared import PhaseName, _phase_rows
from bmoe_lab.plots import theme
from bmoe_lab.plots.heatmap_hover import action_text, slot_text
from bmoe_lab.plots.heatmap_values import (
    ACTION_COLORS,
    ACTIONS,
    VALUES,
    HeatmapValue,
    Value,
    heatmap_cells,
)
from bmoe_lab.plots.reduce import MAX_CELLS, block_largest, block_means, step_for
from bmoe_lab.plots.token_axis import mark_begins, phase_begins, show_pieces, turn_begins
from bmoe_lab.plots.windows import Window, window_of

__all__ = ["plot_heatmap"]

MAX_HOVER_CELLS = 20_000
"""Cells whose experts hover can list: about 100 bytes each."""

# Where colours follow the data: quantiles of the cells at both ends.
_USUAL = (0.01, 0.99)


def plot_heatmap(
    trace: xr.Dataset,
    *,
    value: Value = "misses",
    tokens: Window | None = None,
    layers: Window | None = None,
    phase: PhaseName = "all",
    max_tokens: int = MAX_CELLS,
    max_hover_cells: int = MAX_HOVER_CELLS,
) -> go.Figure:
    """Return a map of a run: tokens along the text, layers upwards.

    Grey cells routed nothing (the last layer of a prompt, for one), or lie in another phase. Only
    what is drawn is read, so a part of a long trace on disk is there at once.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    value : str, default "misses"
        What a cell shows: ``misses``, ``hits`` (slots whose expert was not resident, the share of
        those whose was); ``speculative`` (slots whose expert a prefetch had guessed); ``expert``
        (the router's first choice); ``weight`` (how much of the weight the largest slot has);
        ``entropy`` (of the router over all experts, where scores are softmax outputs, else over the
        chosen ones: the subtitle says which); ``read`` (bytes); ``changed`` (slots that a policy
        dropped or substituted); ``action`` (the strongest thing that a policy did in the cell).
        :func:`bmoe_lab.plots.heatmap_values.heatmap_values` lists what this trace can show.
    tokens, layers : tuple of int, optional
        Part to draw as (first, stop), cut to the trace; the axes keep the numbers of the whole. A
        part is reduced by itself, so it shows finer cells than the whole.
    phase : {"all", "prefill", "decode", "draft"}, default "all"
        Tokens shown; the others are grey.
    max_tokens : int, default 1000
        Cells along the text. A longer trace shows means over neighbouring tokens and says so;
        ``expert`` shows the first token of each group, since a mean of ids means nothing,
        ``action`` the strongest.
    max_hover_cells : int, default 20000
        Cells up to which hover lists each cell's experts; beyond, that text would weigh more than
        the picture. 0 leaves it out.

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    SchemaError
        If the trace is empty, lacks the variable, or has no token of the phase there.
    SettingsError
        If a window lies outside of the trace.
    UnknownNameError
        If `value` or `phase` is not one of the names above.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_heatmap(make_trace(n_token=8, n_layer=2, seed=0))
    >>> figure.data[0].z.shape
    (2, 8)
    """
    if value not in VALUES:
        raise unknown_name("value", value, VALUES)
    if max_tokens < 1:
        raise SettingsError(f"max_tokens must be at least 1; got {max_tokens!r}.")
    view = VALUES[value]
    tokens, layers = window_of(trace, "token", tokens), window_of(trace, "layer", layers)
    rows = _rows(trace, phase, tokens)
    n_token, n_layer = tokens[1] - tokens[0], layers[1] - layers[0]
    step, layer_step = step_for(n_token, max_tokens), step_for(n_layer)
    shown = heatmap_cells(trace, value, tokens, layers, step, rows).T
    shown = (block_largest if value == "action" else block_means)(shown, layer_step)
    if value == "speculative" and not (shown > 0).any():
        raise SchemaError(
            "trace must hold speculative hits to show 'speculative'; got none in the tokens shown. "
            "Only a run with a prefetch has any: choose 'misses'."
        )
    unit = view.unit
    if value == "read":
        factor, unit = theme.byte_unit(float(np.nanmax(np.append(shown, 0.0))))
        shown = shown / factor
    low, high, span = _ends(view, shown, trace)
    phases, turns = phase_begins(trace, tokens), turn_begins(trace, tokens)
    notes = [
        _extent(trace, tokens, layers),
        theme.run_note(trace.attrs),
        view.note(trace),
        _reduction(view, step, layer_step),
        span,
        _grey(shown, rows, phase),
        "lines: a new turn or text window" if turns else "",
    ]
    figure = theme.figure(
        title=f"{view.label[0].upper()}{view.label[1:]}" + (f" ({unit})" if unit else ""),
        subtitle=" · ".join(note for note in notes if note),
        x_title="token (in the order decoded)",
        y_title="layer",
        height=int(min(720, 240 + 26 * shown.shape[0])),
        legend=False,
    )
    cells = step == 1 and layer_step == 1 and shown.size <= max_hover_cells
    text = _text(trace, value, shown, tokens, layers, cells, max_hover_cells)
    figure.add_trace(
        go.Heatmap(
            z=shown.astype(np.float32),
            x0=tokens[0] + (step - 1) / 2,
            dx=step,
            y0=layers[0] + (layer_step - 1) / 2,
            dy=layer_step,
            hoverongaps=False,
            # A list: plotly leaves an array of texts as it is, which no page can take.
            text=None if text is None else text.tolist(),
            hovertemplate=_template(view, unit, step, text is not None),
            **_colors(view, unit, (low, high), trace),
        )
    )
    figure.update_layout(plot_bgcolor=theme.GREY)
    figure.update_xaxes(
        showgrid=False, zeroline=False, range=[tokens[0] - 0.5, tokens[1] - 0.5], hoverformat="d"
    )
    figure.update_yaxes(showgrid=False, zeroline=False, range=[layers[0] - 0.5, layers[1] - 0.5])
    mark_begins(figure, trace, phases, turns)
    if n_layer <= 12:
        figure.update_yaxes(dtick=1)
    show_pieces(figure, trace, tokens)
    return figure


def _rows(trace: xr.Dataset, phase: PhaseName, tokens: Window) -> npt.NDArray[np.bool_] | None:
    """Return which tokens of the window are of the phase; None for all of them."""
    rows = _phase_rows(trace, phase)[slice(*tokens)]
    if phase == "all":
        return None
    if not rows.any():
        raise SchemaError(
            f"trace must hold tokens of phase {phase!r} to show them; got none from token "
            f"{tokens[0]} to {tokens[1] - 1}. Choose another phase or other tokens."
        )
    return rows


def _extent(trace: xr.Dataset, tokens: Window, layers: Window) -> str:
    parts = []
    for dim, (first, stop) in (("token", tokens), ("layer", layers)):
        size = trace.sizes[dim]
        if stop - first == size:
            parts.append(f"{size:,} {dim}{'' if size == 1 else 's'}")
        else:
            parts.append(f"{dim}s {first:,} to {stop - 1:,} of {size:,}")
    return ", ".join(parts)


def _reduction(view: HeatmapValue, step: int, layer_step: int) -> str:
    if step == 1 and layer_step == 1:
        return ""
    layers = f" x {layer_step} layers" if layer_step > 1 else ""
    return f"{view.reduced} {step} tokens{layers} per cell"


def _grey(shown: npt.NDArray[Any], rows: npt.NDArray[np.bool_] | None, phase: str) -> str:
    if not np.isnan(shown).any():
        return ""
    other = "" if rows is None or rows.all() else f", or not {phase}"
    return f"grey: not routed{other}"


def _ends(
    view: HeatmapValue, shown: npt.NDArray[Any], trace: xr.Dataset
) -> tuple[float, float, str]:
    """Return both ends of the colours, and what a reader must know of them."""
    known = shown[~np.isnan(shown)]
    low, high = view.ends(trace)
    if low is not None:
        top = float(known.max(initial=0.0)) if high is None else high
        return low, top if top > low else low + 1.0, ""
    if not known.size:
        return 0.0, 1.0, ""
    low, high = (float(end) for end in np.quantile(known, _USUAL))
    if not high > low:
        return low - 0.5, low + 0.5, ""
    beyond = known.min() < low or known.max() > high
    note = f"colours: {100 * (_USUAL[1] - _USUAL[0]):.0f} % of cells" if beyond else ""
    return low, high, note


def _colors(
    view: HeatmapValue, unit: str, ends: tuple[float, float], trace: xr.Dataset
) -> dict[str, Any]:
    bar: dict[str, Any] = {
        "title": {"text": unit, "side": "right", "font": {"size": 12}},
        "thickness": 14,
        "outlinewidth": 0,
    }
    if view.reduced == "strongest of":
        n = len(ACTIONS)
        edges = [(rank + end) / n for rank in range(n) for end in (0, 1)]
        bar |= {"tickvals": list(range(n)), "ticktext": [action.name for action in ACTIONS]}
        scale = [[edge, ACTION_COLORS[place // 2]] for place, edge in enumerate(edges)]
        return {"colorscale": scale, "zmin": -0.5, "zmax": n - 0.5, "colorbar": bar}
    if unit == "slots" and trace.sizes["slot"] <= 10:
        bar["dtick"] = 1
    return {
        "colorscale": theme.SEQUENTIAL,
        "zmin": ends[0],
        "zmax": ends[1],
        "colorbar": bar,
    }


def _text(
    trace: xr.Dataset,
    value: str,
    shown: npt.NDArray[Any],
    tokens: Window,
    layers: Window,
    cells: bool,
    max_hover_cells: int,
) -> npt.NDArray[np.object_] | None:
    """Return what hover says of each cell, where that is light enough."""
    if cells:
        return slot_text(trace, tokens, layers)
    if value == "action" and shown.size <= max_hover_cells:
        return action_text(shown)
    return None


def _template(view: HeatmapValue, unit: str, step: int, text: bool) -> str:
    where = "token %{x}" if step == 1 else f"{step} tokens around %{{x:.0f}}"
    what = f"<br>{view.label}: %{{z:.3~g}} {unit}"
    if view.reduced == "strongest of":
        what = ""
    return f"{where}, layer %{{y}}{what}" + ("<br>%{text}" if text else "") + "<extra></extra>"
