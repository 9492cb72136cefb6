"""Token by layer: where a run missed, read, changed or spread its routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import MAX_CELLS, block_means, step_for
from bmoe_lab.schema import Action, Residency

__all__ = ["VALUES", "plot_heatmap"]

Value = Literal["misses", "expert", "weight", "read", "changed"]
Cells = npt.NDArray[np.float64]

MAX_HOVER_CELLS = 20_000
"""Cells whose experts hover can list: about 100 bytes each."""

# More lines than this would hide the cells between them.
_MAX_TURNS = 40


@dataclass(frozen=True)
class _View:
    """One thing that a cell can show; `slots` marks counts out of the slots of a routing."""

    label: str
    unit: str
    needs: tuple[str, ...]
    cells: Callable[[xr.Dataset], Cells]
    slots: bool = False


def _misses(trace: xr.Dataset) -> Cells:
    return np.asarray((trace["residency"].values == Residency.miss).sum(axis=-1), np.float64)


def _expert(trace: xr.Dataset) -> Cells:
    return np.asarray(trace["expert_chosen"].values[..., 0], np.float64)


def _weight(trace: xr.Dataset) -> Cells:
    weight = np.asarray(trace["weight_chosen"].values, np.float64)
    total = weight.sum(axis=-1)
    return np.asarray(100 * weight.max(axis=-1) / np.where(total > 0, total, np.nan))


def _read(trace: xr.Dataset) -> Cells:
    return np.asarray(trace["read_bytes"].values.sum(axis=-1, dtype=np.float64))


def _changed(trace: xr.Dataset) -> Cells:
    action = trace["action"].values
    changed = (action == Action.dropped) | (action == Action.substituted)
    return np.asarray(changed.sum(axis=-1), np.float64)


VALUES: dict[str, _View] = {
    "misses": _View("experts missed", "slots", ("residency",), _misses, slots=True),
    "expert": _View("router's first choice", "expert id", (), _expert),
    "weight": _View("share of the largest weight", "%", ("weight_chosen",), _weight),
    "read": _View("bytes read", "bytes", ("read_bytes",), _read),
    "changed": _View("slots changed by the policy", "slots", (), _changed, slots=True),
}
"""What :func:`plot_heatmap` can show, by name."""


def plot_heatmap(
    trace: xr.Dataset,
    *,
    value: Value = "misses",
    max_tokens: int = MAX_CELLS,
    max_hover_cells: int = MAX_HOVER_CELLS,
) -> go.Figure:
    """Return a map of a run: tokens along the text, layers upwards.

    Grey cells routed nothing (the last layer of a prompt, for one). Hover shows the token, its
    experts and their weights while the map is small enough.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    value : {"misses", "expert", "weight", "read", "changed"}, default "misses"
        What a cell shows: slots whose expert was not resident; the router's first choice; how much
        of the weight the largest slot has; bytes read; slots that a policy dropped or substituted.
    max_tokens : int, default 1000
        Cells along the text. A longer trace shows means over neighbouring tokens and says so;
        ``expert`` shows the first token of each group, since a mean of ids means nothing.
    max_hover_cells : int, default 20000
        Cells up to which hover lists each cell's experts; beyond, that text would weigh more than
        the picture. 0 leaves it out.

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    SchemaError
        If the trace is empty or lacks the variable.
    UnknownNameError
        If `value` is not one of the names above.

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
    n_token, n_layer = trace.sizes["token"], trace.sizes["layer"]
    if n_token == 0 or n_layer == 0:
        raise SchemaError(f"trace must hold tokens and layers; got sizes {dict(trace.sizes)}.")
    for name in view.needs:
        if name not in trace:
            raise SchemaError(
                f"trace must hold the variable {name!r} to show {value!r}; got "
                f"{sorted(map(str, trace.data_vars))}. Choose another value."
            )
    routed = (trace["expert_chosen"].values >= 0).any(axis=-1)
    cells = np.where(routed, view.cells(trace), np.nan)
    step = step_for(n_token, max_tokens)
    layer_step = step_for(n_layer)
    unit = view.unit
    if value == "read":
        factor, unit = theme.byte_unit(float(np.nanmax(np.append(cells, 0.0))))
        cells = cells / factor
    shown = cells[::step] if value == "expert" else block_means(cells, step)
    shown = block_means(shown.T, layer_step)

    notes = [f"{n_token} tokens, {n_layer} layers", theme.run_note(trace.attrs)]
    if step > 1 or layer_step > 1:
        how = "first of" if value == "expert" else "means over"
        layers = f" x {layer_step} layers" if layer_step > 1 else ""
        notes.append(f"{how} {step} tokens{layers} per cell")
    if np.isnan(shown).any():
        notes.append("grey: not routed")
    turns = np.flatnonzero(np.diff(trace["turn"].values)) + 1
    if 0 < turns.size <= _MAX_TURNS:
        notes.append("lines: a new turn or text window")
    figure = theme.figure(
        title=f"{view.label[0].upper()}{view.label[1:]} ({unit})",
        subtitle=" · ".join(note for note in notes if note),
        x_title="token (in the order decoded)",
        y_title="layer",
        height=int(min(720, 240 + 26 * shown.shape[0])),
        legend=False,
    )
    small = step == 1 and layer_step == 1 and cells.size <= max_hover_cells
    figure.add_trace(
        go.Heatmap(
            z=shown,
            x0=(step - 1) / 2,
            dx=step,
            y0=(layer_step - 1) / 2,
            dy=layer_step,
            colorscale=theme.SEQUENTIAL,
            zmin=0,
            zmax=float(trace.sizes["slot"]) if view.slots else None,
            hoverongaps=False,
            colorbar=_colorbar(unit, trace.sizes["slot"] if view.slots else None),
            text=_hover_text(trace) if small else None,
            hovertemplate=_template(view.label, unit, small),
        )
    )
    figure.update_layout(plot_bgcolor=theme.GREY)
    figure.update_xaxes(showgrid=False, zeroline=False, range=[-0.5, n_token - 0.5])
    figure.update_yaxes(showgrid=False, zeroline=False, range=[-0.5, n_layer - 0.5])
    _mark_prefill(figure, trace)
    for first in turns if turns.size <= _MAX_TURNS else ():
        figure.add_vline(
            x=float(first) - 0.5, line={"color": theme.VERMILLION, "width": 1.5, "dash": "dot"}
        )
    if n_layer <= 12:
        figure.update_yaxes(dtick=1)
    if "piece" in trace.coords and n_token <= 40:
        pieces = [theme.escape(piece) for piece in trace["piece"].values]
        figure.update_xaxes(tickvals=list(range(n_token)), ticktext=pieces, tickangle=-60)
    return figure


def _colorbar(unit: str, n_slot: int | None) -> dict[str, Any]:
    bar: dict[str, Any] = {
        "title": {"text": unit, "side": "right", "font": {"size": 12}},
        "thickness": 14,
        "outlinewidth": 0,
    }
    if n_slot is not None and n_slot <= 10:
        bar["dtick"] = 1
    return bar


def _template(label: str, unit: str, small: bool) -> str:
    text = "<br>%{text}" if small else ""
    return f"token %{{x}}, layer %{{y}}<br>{label}: %{{z:.3~g}} {unit}{text}<extra></extra>"


def _mark_prefill(figure: go.Figure, trace: xr.Dataset) -> None:
    """Draw a line where prefill ends: its evaluations are wide, so misses look different."""
    phase = trace["phase"].values
    changes = np.flatnonzero(phase[1:] != phase[:-1]) + 1
    if changes.size == 1 and phase[0] == 0:
        figure.add_vline(
            x=float(changes[0]) - 0.5,
            line={"color": theme.VERMILLION, "width": 2, "dash": "dot"},
            annotation={
                "text": "prefill | decode",
                "font": {"color": theme.VERMILLION, "size": 11},
                "yref": "paper",
                "y": 1.0,
                "yanchor": "bottom",
                "xanchor": "center",
            },
        )


def _hover_text(trace: xr.Dataset) -> list[list[str]]:
    """Return per layer and token: the piece, the experts with weights, what a policy did."""
    chosen, applied = trace["expert_chosen"].values, trace["expert_applied"].values
    action = trace["action"].values
    weight = trace["weight_chosen"].values if "weight_chosen" in trace else None
    pieces = trace["piece"].values if "piece" in trace.coords else None
    rows: list[list[str]] = []
    for layer in range(chosen.shape[1]):
        row = []
        for token in range(chosen.shape[0]):
            slots = []
            for slot, expert in enumerate(chosen[token, layer].tolist()):
                if expert < 0:
                    continue
                part = str(expert)
                if weight is not None and not np.isnan(weight[token, layer, slot]):
                    part += f" ({weight[token, layer, slot]:.2f})"
                if action[token, layer, slot] == Action.dropped:
                    part += " dropped"
                elif action[token, layer, slot] == Action.substituted:
                    part += f" → {int(applied[token, layer, slot])}"
                slots.append(part)
            piece = "" if pieces is None else f"‘{theme.escape(pieces[token])}’<br>"
            row.append(f"{piece}experts {', '.join(slots)}")
        rows.append(row)
    return rows
