"""Which experts of a layer are chosen together."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.metrics._shared import PhaseName, Which, _experts, _phase_rows
from bmoe_lab.metrics.cells import _place
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_means, step_for

__all__ = ["plot_coactivation"]

Matrix = npt.NDArray[np.float64]

# Blue for seldom, vermillion for often: colour-blind people tell them apart. The middle is a pale
# yellow, which is not the grey of cells that tell nothing, on a light page either.
_DIVERGING = (
    (0.0, "#00456E"),
    (0.25, theme.SKY),
    (0.5, "#FFF9C9"),
    (0.75, "#F0904D"),
    (1.0, "#8F3000"),
)
_OCTAVES = 3
"""Colours end at 2^3 times chance, above and below; hover has the number itself."""


def plot_coactivation(
    trace: xr.Dataset,
    *,
    layer: int = 0,
    value: Literal["lift", "count"] = "lift",
    which: Which = "chosen",
    phase: PhaseName = "decode",
    order: Literal["load", "id", "group"] = "load",
) -> go.Figure:
    """Return how often each two experts of a layer were chosen for the same token.

    Experts that go together are worth reading together, or lying side by side on the disk.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    layer : int, default 0
        Its number; negative from the end.
    value : {"lift", "count"}, default "lift"
        Meetings over those expected of experts that do not care for each other, or their number.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.
    order : {"load", "id", "group"}, default "load"
        Experts by how often they were used, by id, or so that those which meet more often than
        chance lie side by side.

    Returns
    -------
    plotly.graph_objects.Figure
        Experts that were never used are left out, but not in order of id. Grey: the diagonal, and
        in a map of the lift two that never met where less than one meeting was expected, which
        tells nothing.

    Raises
    ------
    SchemaError
        If the layer routed nothing in the phase, or never two experts for one token.
    SettingsError
        If there is no such layer.
    UnknownNameError
        If `value`, `which`, `phase` or `order` is not one of the names above.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> made = make_trace(n_token=20, n_layer=2, n_expert=8, seed=0)
    >>> figure = plot_coactivation(made, layer=1, order="id")
    >>> figure.data[0].z.shape, figure.data[0].colorbar.title.text
    ((8, 8), 'meetings / chance (1 = chance)')
    """
    if value not in ("lift", "count"):
        raise unknown_name("value", value, ["count", "lift"])
    if order not in ("load", "id", "group"):
        raise unknown_name("order", order, ["group", "id", "load"])
    layer = _place(trace, "layer", layer)
    part = trace.isel(layer=[layer])
    used = np.nan_to_num(metrics.routing_counts(part, which=which, phase=phase).values[0])
    lift = metrics.coactivation_lift(part, which=which, phase=phase).values[0]
    # Rounded: P(j | i) N_i is a whole number but for the last bits.
    meetings = np.round(
        metrics.coactivation(part, which=which, phase=phase).values[0] * used[:, None]
    )
    if not (np.nan_to_num(meetings) > 0).any():
        raise SchemaError(
            f"layer {layer} must have chosen two experts for a token of phase {phase!r}; it did "
            "not. Choose another phase or layer."
        )
    meetings[:, used == 0] = np.nan
    place = _order(order, used, lift)
    if order != "id":
        # Most layers use few of many experts in a short run: the others would be an empty panel.
        place = place[used[place] > 0]
    at = np.ix_(place, place)
    lift, meetings = lift[at], meetings[at]
    if value == "lift":
        # Two that never met have a lift of 0 whatever was expected; below one meeting expected that
        # is no news, and would paint a short run blue.
        routed = _routings(part, which, phase)
        expected = np.outer(used[place], used[place]) / routed
        lift = np.where((meetings == 0) & (expected < 1), np.nan, lift)
    step = step_for(place.size)
    axis = {
        "load": "most used first (rank)",
        "id": "id",
        "group": "those that meet side by side (rank)",
    }[order]
    figure = theme.figure(
        title=f"Experts of layer {layer} chosen together ({which}, {phase})",
        subtitle=" · ".join(note for note in _notes(trace, value, order, used, step) if note),
        x_title=f"expert, {axis}",
        y_title=f"expert, {axis}",
        height=640,
        legend=False,
    )
    names = np.broadcast_to(place[None, :], lift.shape)
    draw = _lift if value == "lift" else _count
    figure.add_trace(draw(lift, meetings, names, step))
    figure.update_layout(plot_bgcolor=theme.GREY)
    figure.update_xaxes(showgrid=False, zeroline=False)
    # The first expert at the top left, as one reads a matrix.
    figure.update_yaxes(showgrid=False, zeroline=False, autorange="reversed")
    if place.size <= 12:
        figure.update_layout(xaxis_dtick=1, yaxis_dtick=1)
    return figure


def _routings(part: xr.Dataset, which: Which, phase: PhaseName) -> int:
    """Return the tokens that the layer routed."""
    experts = _experts(part, which)[_phase_rows(part, phase)]
    return int((experts >= 0).any(axis=-1).sum())


def _order(order: str, used: Matrix, lift: Matrix) -> npt.NDArray[np.int64]:
    if order == "id":
        return np.arange(used.size)
    by_load = np.argsort(-used, kind="stable")
    if order == "load":
        return by_load
    alive = by_load[used[by_load] > 0]
    if alive.size < 3:
        return alive
    # Spectral seriation (Atkins and others 1998): along the second eigenvector of the Laplacian,
    # large affinities lie near the diagonal. A floor keeps the graph in one piece.
    affinity = np.nan_to_num(lift[np.ix_(alive, alive)]) + 1e-3
    affinity = np.minimum(affinity, 2.0**_OCTAVES)
    np.fill_diagonal(affinity, 0.0)
    degree = affinity.sum(axis=1)
    scale = 1 / np.sqrt(degree)
    _, vectors = np.linalg.eigh(np.eye(alive.size) - affinity * scale[:, None] * scale[None, :])
    along = vectors[:, 1] * scale
    # The sign of an eigenvector means nothing: the most used expert lies in the first half.
    along = along if along[0] <= np.median(along) else -along
    return alive[np.argsort(along, kind="stable")]


def _notes(trace: xr.Dataset, value: str, order: str, used: Matrix, step: int) -> list[str]:
    grey = ["diagonal"]
    if order == "id" and (used == 0).any():
        grey.append("experts never used")
    if value == "lift":
        grey.append("pairs that never met where less than one meeting was expected")
    notes = [
        f"{int((used > 0).sum())} of {used.size} experts used",
        "grey: " + ", ".join(grey),
        theme.run_note(trace.attrs),
    ]
    if step > 1:
        notes.insert(0, f"means over {step} x {step} experts per cell")
    return notes


def _lift(lift: Matrix, meetings: Matrix, names: npt.NDArray[np.int64], step: int) -> go.Heatmap:
    shown = _blocks(lift, step)
    with np.errstate(divide="ignore"):
        octaves = np.clip(np.log2(shown), -_OCTAVES, _OCTAVES)
    ticks = list(range(-_OCTAVES, _OCTAVES + 1))
    words = [f"1/{2**-t}" if t < 0 else f"{2**t}" for t in ticks]
    words[0], words[_OCTAVES], words[-1] = f"≤ {words[0]}", "1 chance", f"≥ {words[-1]}"
    single = step == 1
    return go.Heatmap(
        z=octaves,
        x0=(step - 1) / 2,
        dx=step,
        y0=(step - 1) / 2,
        dy=step,
        zmin=-_OCTAVES,
        zmax=_OCTAVES,
        colorscale=_DIVERGING,
        hoverongaps=False,
        customdata=_hover(names, shown, meetings) if single else shown[..., None],
        colorbar=_bar("meetings / chance (1 = chance)", tickvals=ticks, ticktext=words),
        hovertemplate=(
            "experts %{customdata[0]} and %{customdata[1]}<br>%{customdata[2]:.2f} times chance"
            "<br>%{customdata[3]} meetings<extra></extra>"
            if single
            else "ranks %{x} and %{y}<br>%{customdata[0]:.2f} times chance<extra></extra>"
        ),
    )


def _count(lift: Matrix, meetings: Matrix, names: npt.NDArray[np.int64], step: int) -> go.Heatmap:
    shown = _blocks(meetings, step)
    single = step == 1
    return go.Heatmap(
        z=shown,
        x0=(step - 1) / 2,
        dx=step,
        y0=(step - 1) / 2,
        dy=step,
        zmin=0,
        colorscale=theme.SEQUENTIAL,
        hoverongaps=False,
        customdata=_hover(names, lift, meetings) if single else None,
        colorbar=_bar("tokens with both"),
        hovertemplate=(
            "experts %{customdata[0]} and %{customdata[1]}<br>%{z} tokens with both"
            "<br>%{customdata[2]:.2f} times chance<extra></extra>"
            if single
            else "ranks %{x} and %{y}<br>%{z:.2f} tokens with both<extra></extra>"
        ),
    )


def _hover(names: npt.NDArray[np.int64], lift: Matrix, meetings: Matrix) -> Matrix:
    return np.stack([names, names.T, lift, meetings], axis=-1).astype(np.float32)


def _blocks(values: Matrix, step: int) -> Matrix:
    return block_means(block_means(values, step).T, step).T


def _bar(title: str, **more: object) -> dict[str, object]:
    return {
        "title": {"text": title, "side": "right", "font": {"size": 12}},
        "thickness": 14,
        "outlinewidth": 0,
        **more,
    }
