"""Layer by expert: which experts a run used."""

from __future__ import annotations

from typing import Literal

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_means, step_for

__all__ = ["plot_expert_load"]


def plot_expert_load(
    trace: xr.Dataset,
    *,
    which: Literal["chosen", "applied"] = "chosen",
    phase: PhaseName = "decode",
    order: Literal["load", "id"] = "load",
) -> go.Figure:
    """Return how each layer spreads its routings over its experts.

    A steep left edge is a hot set: few experts serve most tokens, and a small cache holds them.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.
    order : {"load", "id"}, default "load"
        Experts of a layer from most to least used, or by id.

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    SchemaError
        If the phase routed nothing.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_expert_load(make_trace(n_token=8, n_layer=2, n_expert=16, seed=0))
    >>> figure.data[0].z.shape
    (2, 16)
    """
    if order not in ("load", "id"):
        raise unknown_name("order", order, ["id", "load"])
    load = metrics.expert_load(trace, which=which, phase=phase).values
    if np.isnan(load).all():
        raise SchemaError(f"trace must route something in phase {phase!r}; got nothing.")
    experts = np.broadcast_to(np.arange(load.shape[1]), load.shape)
    if order == "load":
        experts = np.argsort(-np.nan_to_num(load), axis=1, kind="stable")
        load = np.take_along_axis(load, experts, axis=1)
    step = step_for(load.shape[1])
    shown = 100 * (block_means(load.T, step).T if step > 1 else load)
    notes = [theme.run_note(trace.attrs)]
    if step > 1:
        notes.append(f"means over {step} experts per cell")
    if np.isnan(shown).any():
        notes.append("grey: layer routed nothing")
    figure = theme.figure(
        title=f"Share of each layer's routings ({which}, {phase})",
        subtitle=" · ".join(note for note in notes if note),
        x_title="expert, most used first (rank)" if order == "load" else "expert id",
        y_title="layer",
        height=int(min(720, 240 + 26 * shown.shape[0])),
        legend=False,
    )
    figure.add_trace(
        go.Heatmap(
            z=shown,
            dx=step,
            x0=(step - 1) / 2,
            colorscale=theme.SEQUENTIAL,
            zmin=0,
            hoverongaps=False,
            customdata=experts if step == 1 else None,
            colorbar={
                "title": {"text": "%", "side": "right", "font": {"size": 12}},
                "thickness": 14,
                "outlinewidth": 0,
            },
            hovertemplate=(
                "layer %{y}, "
                + ("expert %{customdata}" if step == 1 else "rank %{x}")
                + "<br>%{z:.2f} % of routings<extra></extra>"
            ),
        )
    )
    figure.update_layout(plot_bgcolor=theme.GREY)
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    if shown.shape[0] <= 12:
        figure.update_yaxes(dtick=1)
    return figure
