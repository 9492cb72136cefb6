"""What policies cost in perplexity against what they read."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.plots import theme
from bmoe_lab.plots.series import series_of

__all__ = ["plot_quality_vs_bytes"]


def plot_quality_vs_bytes(tree: xr.DataTree) -> go.Figure:
    """Return perplexity over bytes read per token, one point per run.

    Down and to the left is better. A control changes as many slots as its policy, but at random:
    the distance between the two is what the policy's choice is worth.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.

    Returns
    -------
    plotly.graph_objects.Figure
        Vertical bars: lossless perplexity times exp of the interval of the paired difference, so
        two runs are compared on the same text. Horizontal bars: interval of the mean bytes.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.

    See Also
    --------
    plot_nll_along_text : Where in the text the difference arises.
    """
    shown = series_of(tree)
    table = tree.to_dataset()
    largest = float(np.nanmax(np.append(table["read_bytes_per_token"].values, 0.0)))
    unit, unit_name = theme.byte_unit(largest)
    level = 100 * float(tree.attrs["bootstrap_level"])
    figure = theme.figure(
        title="Perplexity against bytes read",
        subtitle=(
            f"{int(table['n_scored'].values[0])} tokens; bars: {level:g} % block-bootstrap "
            "intervals, vertical ones paired with lossless"
        ),
        x_title=f"expert bytes read per token ({unit_name})",
        y_title="perplexity",
        height=430 + 20 * len(shown),
    )
    for run in shown:
        x, x_low, x_high = _bounds(table, "read_bytes_per_token", run.row, unit)
        y, y_low, y_high = _bounds(table, "perplexity", run.row, 1.0)
        lossless = run.kind == "lossless"
        if lossless:
            figure.add_hline(y=y, line={"color": theme.TEXT, "width": 1, "dash": "dash"})
        figure.add_trace(
            go.Scatter(
                x=[x],
                y=[y],
                error_x=_bar(x, x_low, x_high, run.color),
                error_y=_bar(y, y_low, y_high, run.color),
                mode="markers",
                name=theme.escape(run.label),
                marker={
                    **run.marker,
                    "symbol": "star" if lossless else run.marker["symbol"],
                    "size": 15 if lossless else 12,
                },
                hovertemplate=(
                    f"{theme.escape(run.label)}<br>%{{x:.4~g}} {unit_name} per token<br>"
                    f"perplexity %{{y:.4f}}{_interval_text(y_low, y_high)}<extra></extra>"
                ),
            )
        )
    if not any(np.isfinite(point.x[0] + point.y[0]) for point in figure.data):
        figure.add_annotation(
            text="no token was scored" if not table["n_scored"].values.any() else "bytes unknown",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
    figure.update_xaxes(rangemode="tozero")
    return figure


def _bounds(table: xr.Dataset, name: str, row: int, unit: float) -> tuple[float, float, float]:
    return (
        float(table[name].values[row]) / unit,
        float(table[f"{name}_low"].values[row]) / unit,
        float(table[f"{name}_high"].values[row]) / unit,
    )


def _bar(value: float, low: float, high: float, color: str) -> dict[str, object] | None:
    if np.isnan(low) or np.isnan(high):
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value],
        "arrayminus": [value - low],
        "color": color,
        "thickness": 1.5,
        "width": 5,
    }


def _interval_text(low: float, high: float) -> str:
    return "" if np.isnan(low) or np.isnan(high) else f" [{low:.4f}, {high:.4f}]"
