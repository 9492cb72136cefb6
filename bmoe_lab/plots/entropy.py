"""How decided each layer's router is, over the tokens of a run."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.metrics._scores import Gate
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.plots import theme

__all__ = ["plot_entropy"]

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def plot_entropy(
    trace: xr.Dataset,
    *,
    of: Literal["scores", "weights"] | None = None,
    unit: Literal["nat", "bit"] = "nat",
    gate: Gate = "recorded",
    phase: PhaseName = "decode",
) -> go.Figure:
    """Return the router's entropy in every layer: its quantiles over tokens.

    Low: one expert decides and the others are cheap to lose. Near the dashed line: the router has
    no preference, and its choice is easily moved towards experts that are resident.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace with ``router_score`` or ``weight_chosen``.
    of : {"scores", "weights"}, optional
        Over all experts, or over those chosen. By default scores where they were recorded as
        probabilities, else weights.
    unit : {"nat", "bit"}, default "nat"
        Natural or binary logarithm.
    gate : {"recorded", "softmax", "normalised"}, default "recorded"
        How scores become probabilities (:func:`bmoe_lab.metrics.score_entropy`).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    plotly.graph_objects.Figure
        One box per layer: median, quartiles, whiskers at 10 and 90 % of its tokens.

    Raises
    ------
    SchemaError
        If neither scores nor weights are known, or the phase routed nothing.
    SettingsError
        If the scores do not fit `gate`.
    UnknownNameError
        If `of`, `unit`, `gate` or `phase` is not one of the names above.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_entropy(make_trace(n_token=8, n_layer=2, n_used=4, seed=0))
    >>> [line.name for line in figure.data]
    ['tokens', 'median', 'largest (ln 4)']
    """
    if unit not in ("nat", "bit"):
        raise unknown_name("unit", unit, ["bit", "nat"])
    if of not in (None, "scores", "weights"):
        raise unknown_name("of", of, ["scores", "weights"])
    chosen = of or _best(trace, gate)
    scale = 1.0 if unit == "nat" else 1 / np.log(2)
    cells = scale * _cells(trace, chosen, gate, phase)
    known = (~np.isnan(cells)).sum(axis=0)
    if not known.any():
        what = "scores" if chosen == "scores" else "weights"
        raise SchemaError(
            f"trace must know {what} of phase {phase!r}; got none. Choose another phase, or record "
            "a run with record='scores'."
        )
    layers = np.flatnonzero(known)
    quantiles = np.array([np.nanquantile(cells[:, layer], _QUANTILES) for layer in layers])
    largest, name = _largest(trace, chosen, unit)
    over = "over all experts (scores)" if chosen == "scores" else "over the chosen (weights)"
    notes = [over, "box: quartiles over tokens, whiskers: 10 and 90 %", theme.run_note(trace.attrs)]
    if layers.size < cells.shape[1]:
        notes.insert(2, f"layers without a known value: {cells.shape[1] - layers.size}")
    figure = theme.figure(
        title=f"Router entropy per layer, {phase}",
        subtitle=" · ".join(note for note in notes if note),
        x_title="layer",
        y_title=f"entropy ({unit})",
        height=460,
    )
    low, first, middle, third, high = quantiles.T
    figure.add_trace(
        go.Box(
            x=layers,
            q1=first,
            median=middle,
            q3=third,
            lowerfence=low,
            upperfence=high,
            name="tokens",
            line={"color": theme.BLUE, "width": 1.5},
            fillcolor="rgba(86,180,233,0.45)",
            width=0.7 if layers.size > 1 else 0.2,
            hoverinfo="skip",
        )
    )
    # Hover on a box shows five labels that cover each other; a point on its median says it all.
    figure.add_trace(
        go.Scatter(
            x=layers,
            y=middle,
            customdata=np.column_stack([quantiles, known[layers], largest[layers]]),
            mode="markers",
            marker={"size": 14, "opacity": 0, "color": theme.BLUE},
            name="median",
            showlegend=False,
            hovertemplate=(
                f"layer %{{x}}<br>median %{{y:.3f}} {unit}<br>"
                "quartiles %{customdata[1]:.3f} to %{customdata[3]:.3f}<br>"
                "10 to 90 %: %{customdata[0]:.3f} to %{customdata[4]:.3f}<br>"
                "largest %{customdata[6]:.3f}<br>%{customdata[5]} tokens<extra></extra>"
            ),
        )
    )
    # A step per layer, half a layer to either side, so that one layer has a line too.
    edges = np.column_stack([np.arange(largest.size) - 0.5, np.arange(largest.size) + 0.5])
    figure.add_trace(
        go.Scatter(
            x=edges.ravel(),
            y=np.repeat(largest, 2),
            mode="lines",
            name=name,
            line={"color": theme.VERMILLION, "width": 2, "dash": "dash"},
            hoverinfo="skip",
        )
    )
    figure.update_layout(showlegend=True)
    figure.update_xaxes(range=[-0.7, cells.shape[1] - 0.3], zeroline=False)
    figure.update_yaxes(range=_range(float(low.min()), float(largest.max())))
    if cells.shape[1] <= 24:
        figure.update_xaxes(dtick=1)
    return figure


def _range(low: float, largest: float) -> tuple[float, float]:
    """Return a range from 0, unless all that is drawn lies in its upper half."""
    if largest <= 0:
        return -0.05, 1.0
    bottom = 0.0 if low < largest / 2 else low - 0.15 * (largest - low)
    return bottom, largest + 0.06 * (largest - bottom) + 1e-6


def _best(trace: xr.Dataset, gate: str) -> Literal["scores", "weights"]:
    """Return what tells most: scores, unless their entropy means nothing."""
    if "router_score" not in trace:
        return "weights"
    if gate != "recorded":
        return "scores"
    softmax = "score_is_softmax" in trace and bool((trace["score_is_softmax"].values == 1).all())
    return "scores" if softmax else "weights"


def _cells(trace: xr.Dataset, chosen: str, gate: Gate, phase: PhaseName) -> npt.NDArray[np.float64]:
    """Return the entropy of every routing in nats, (token, layer); NaN unknown or not routed."""
    layers = []
    for layer in range(trace.sizes["layer"]):
        part = trace.isel(layer=[layer])
        if chosen == "scores":
            found = metrics.score_entropy(part, gate=gate, by="token", phase=phase)
        else:
            found = metrics.router_entropy(part, by="token", phase=phase)
        layers.append(found.values)
    return np.column_stack(layers) if layers else np.empty((0, 0))


def _largest(trace: xr.Dataset, chosen: str, unit: str) -> tuple[npt.NDArray[np.float64], str]:
    """Return the entropy of no preference in every layer, and its name in the legend."""
    if chosen == "scores":
        width = np.full(trace.sizes["layer"], float(trace.sizes["expert"]))
    else:
        width = trace["n_expert_used"].values.astype(np.float64)
    log, word = (np.log, "ln") if unit == "nat" else (np.log2, "log2")
    several = np.unique(width)
    number = f"{several[0]:g}" if several.size == 1 else "k of the layer"
    return np.asarray(log(width)), f"largest ({word} {number})"
