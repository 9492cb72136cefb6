"""Hit rate of every layer, one series per run."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.plots import theme
from bmoe_lab.plots.series import Series, series_of

__all__ = ["plot_hit_rate"]


def plot_hit_rate(data: xr.Dataset | xr.DataTree, *, phase: PhaseName = "decode") -> go.Figure:
    """Return the hit rate per layer, one series per run.

    A policy that drops misses raises the hit rate without any expert being resident more often:
    read the bytes beside it.

    Parameters
    ----------
    data : xarray.Dataset or xarray.DataTree
        A trace, or a comparison (its noise floor is left out: it equals the lossless run).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    plotly.graph_objects.Figure
        Where no expert was looked up, it says so.

    Raises
    ------
    SchemaError
        If no run knows its residency.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_hit_rate(make_trace(n_token=8, n_layer=2, seed=0))
    >>> figure.layout.yaxis.title.text
    'hit rate (% of lookups)'
    """
    shown = [run for run in series_of(data) if "residency" in run.trace]
    if not shown:
        raise SchemaError(
            "data must hold a run with the variable 'residency'; got none. Record a streamed run."
        )
    overall = [float(metrics.hit_rate(run.trace, phase=phase)) for run in shown]
    figure = theme.figure(
        title=f"Hit rate per layer, {phase}",
        subtitle=_subtitle(shown, overall),
        x_title="layer",
        y_title="hit rate (% of lookups)",
        height=400 + 18 * len(shown),
        legend=len(shown) > 1,
    )
    for run, mean in zip(shown, overall, strict=True):
        rate = metrics.hit_rate(run.trace, by="layer", phase=phase)
        figure.add_trace(
            go.Scatter(
                x=np.arange(rate.size),
                y=100 * rate.values,
                customdata=rate["block"].values if "block" in rate.coords else None,
                mode="lines+markers",
                name=theme.escape(f"{run.label}: {100 * mean:.1f} %"),
                line=run.line,
                marker=run.marker,
                hovertemplate=(
                    f"{theme.escape(run.label)}<br>layer %{{x}} (block %{{customdata}})<br>"
                    "%{y:.1f} % of lookups<extra></extra>"
                ),
            )
        )
    if np.isnan(overall).all():
        where = "" if phase == "all" else f" in {phase}"
        figure.add_annotation(
            text=f"no expert was looked up{where}",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
    figure.update_yaxes(range=[-2, 102])
    if shown[0].trace.sizes["layer"] <= 24:
        figure.update_xaxes(dtick=1)
    return figure


def _subtitle(shown: list[Series], overall: list[float]) -> str:
    if len(shown) > 1:
        return "share of lookups that found their expert resident; legend: over all layers"
    mean = "unknown" if np.isnan(overall[0]) else f"{100 * overall[0]:.1f} %"
    note = theme.run_note(shown[0].trace.attrs)
    return " · ".join(part for part in (f"over all layers {mean}", note) if part)
