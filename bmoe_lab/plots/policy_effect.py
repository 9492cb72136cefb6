"""What a routing policy changes: misses per layer, and weight discarded for the bytes saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.plots import theme
from bmoe_lab.schema import Phase, Residency

__all__ = [
    "QUANTITIES",
    "Effect",
    "EffectSeries",
    "effect_figure",
    "effect_of",
    "plot_policy_effect",
]

Quantity = Literal["misses", "hit_rate", "bytes"]
QUANTITIES: dict[Quantity, tuple[str, str]] = {
    "misses": ("misses_per_token", "misses per token"),
    "hit_rate": ("hit_rate", "hit rate (% of lookups)"),
    "bytes": ("read_bytes_per_token", "bytes read per token"),
}
"""What can be drawn by layer: name in :attr:`Effect.layers`, words."""


@dataclass(frozen=True)
class Effect:
    """Numbers of one run or replay.

    Attributes
    ----------
    numbers : dict of str to float
        ``hit_rate``, ``misses_per_token``, ``read_bytes_per_token``, ``drop_rate``,
        ``substitution_rate``, ``weight_discarded_frac``; NaN where unknown.
    layers : dict of str to numpy.ndarray of float64, shape (layer,)
        ``hit_rate``, ``misses_per_token``, ``read_bytes_per_token``.
    phase : str
        Tokens counted: decode, or all of a trace without decode.
    """

    numbers: dict[str, float]
    layers: dict[str, npt.NDArray[np.float64]]
    phase: PhaseName


@dataclass(frozen=True)
class EffectSeries:
    """One run of the figure.

    Attributes
    ----------
    label : str
        Not escaped.
    effect : Effect
    color, symbol, dash : str
    """

    label: str
    effect: Effect
    color: str
    symbol: str
    dash: str = "solid"


def effect_of(trace: xr.Dataset) -> Effect:
    """Return the numbers of a trace, recorded or replayed.

    Raises
    ------
    SchemaError
        If the trace lacks ``residency`` or ``read_bytes``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> effect = effect_of(make_trace(n_token=16, n_layer=2, seed=0))
    >>> effect.phase, effect.layers["hit_rate"].shape
    ('decode', (2,))
    """
    decode = np.asarray(trace["phase"].values) == Phase.decode
    phase: PhaseName = "decode" if decode.any() else "all"
    rows = decode if decode.any() else np.ones_like(decode)
    missed = metrics.first_of_load(trace).values & (
        np.asarray(trace["residency"].values) == Residency.miss
    )
    n_token = int(rows.sum())
    misses = np.full(missed.shape[1], np.nan)
    if n_token:
        misses = missed[rows].sum(axis=(0, 2)) / n_token
    layers = {
        "hit_rate": metrics.hit_rate(trace, by="layer", phase=phase).values,
        "misses_per_token": misses.astype(np.float64),
        "read_bytes_per_token": metrics.read_bytes_per_token(trace, by="layer", phase=phase).values,
    }
    discarded = math.nan
    if "weight_chosen" in trace.variables:
        discarded = float(metrics.weight_discarded_frac(trace, phase=phase))
    numbers = {
        "hit_rate": float(metrics.hit_rate(trace, phase=phase)),
        "misses_per_token": float(misses.sum()),
        "read_bytes_per_token": float(metrics.read_bytes_per_token(trace, phase=phase)),
        "drop_rate": float(metrics.drop_rate(trace, phase=phase)),
        "substitution_rate": float(metrics.substitution_rate(trace, phase=phase)),
        "weight_discarded_frac": discarded,
    }
    return Effect(numbers, layers, phase)


def plot_policy_effect(
    data: xr.Dataset | xr.DataTree, *, quantity: Quantity = "misses"
) -> go.Figure:
    """Return what policies changed: by layer, and bytes read against weight discarded.

    Parameters
    ----------
    data : xarray.Dataset or xarray.DataTree
        A trace, or runs side by side: a comparison, or the tree of a policy lab.
    quantity : {"misses", "hit_rate", "bytes"}, default "misses"
        What is drawn by layer.

    Returns
    -------
    plotly.graph_objects.Figure
        Left by layer, one line per run; right one point per run.

    Raises
    ------
    SchemaError
        If no run knows its residency.
    UnknownNameError
        If `quantity` is not known.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_policy_effect(make_trace(n_token=16, n_layer=2, seed=0))
    >>> figure.layout.yaxis.title.text
    'misses per token'
    """
    if isinstance(data, xr.Dataset):
        named = [(str(data.attrs.get("policy", "trace")), data)]
    else:
        table = data.to_dataset()
        names = table["arm_name"].values if "arm_name" in table else list(data.children)
        nodes = [node.to_dataset() for node in data.children.values()]
        named = [(str(name), node) for name, node in zip(names, nodes, strict=True)]
    known = [
        (name, run) for name, run in named if {"residency", "read_bytes"} <= set(run.variables)
    ]
    if not known:
        raise SchemaError(
            "data must hold a run with 'residency' and 'read_bytes'; got none. Record a streamed "
            "run, or replay the trace."
        )
    series = []
    for index, (name, run) in enumerate(known):
        color, symbol = theme.series_style(index)
        series.append(EffectSeries(name, effect_of(run), color, symbol))
    note = "; ".join(dict.fromkeys(theme.run_note(run.attrs) for _, run in known))
    return effect_figure(series, quantity=quantity, note=note)


def effect_figure(
    series: list[EffectSeries], *, quantity: Quantity = "misses", note: str = ""
) -> go.Figure:
    """Return the figure of :func:`plot_policy_effect` from numbers that are already there.

    Parameters
    ----------
    series : list of EffectSeries
        At least one.
    quantity : {"misses", "hit_rate", "bytes"}, default "misses"
    note : str, optional
        What a reader must know of the runs, plain text.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> effect = effect_of(make_trace(n_token=16, n_layer=2, seed=0))
    >>> len(effect_figure([EffectSeries("run", effect, theme.BLUE, "circle")]).data)
    2
    """
    if quantity not in QUANTITIES:
        raise unknown_name("quantity", quantity, list(QUANTITIES))
    name, words = QUANTITIES[quantity]
    unit, unit_name = theme.byte_unit(
        max((_largest(one.effect.layers["read_bytes_per_token"]) for one in series), default=0.0)
    )
    scale = {"misses": 1.0, "hit_rate": 100.0, "bytes": 1 / unit}[quantity]
    if quantity == "bytes":
        words = f"{unit_name} read per token"
    phase = series[0].effect.phase
    base = theme.figure(
        title=f"What the policy changes, {phase}",
        subtitle=note or "replayed",
        x_title="layer",
        y_title=words,
        height=430 + 19 * max(0, len(series) - 2),
    )
    layout = base.to_plotly_json()["layout"]
    axis = {key: layout["xaxis"][key] for key in ("gridcolor", "linecolor", "zerolinecolor")}
    axis |= {"ticks": "outside", "tickcolor": theme.TEXT, "automargin": True}
    total = [one.effect.numbers["read_bytes_per_token"] for one in series]
    y_unit, y_name = theme.byte_unit(_largest(np.array(total)))
    lost = [one.effect.numbers["weight_discarded_frac"] for one in series]
    x_words = "router weight discarded (%)"
    if all(map(math.isnan, lost)):
        # Unknown is not 0: the slots are known where weights are not.
        lost = [
            one.effect.numbers["drop_rate"] + one.effect.numbers["substitution_rate"]
            for one in series
        ]
        x_words = "slots changed (%), weights unknown"
    small = {"size": 13}
    layout["xaxis"] |= {"domain": [0.0, 0.58]}
    layout["xaxis2"] = {
        **axis,
        "domain": [0.71, 1.0],
        "anchor": "y2",
        "title": {"text": x_words, "standoff": 10, "font": small},
        "rangemode": "tozero",
    }
    layout["yaxis2"] = {
        **axis,
        "anchor": "x2",
        "title": {"text": f"{y_name} read per token", "standoff": 8, "font": small},
        "rangemode": "tozero",
    }
    if quantity == "hit_rate":
        layout["yaxis"] |= {"range": [-2, 102]}
    else:
        layout["yaxis"] |= {"rangemode": "tozero"}
    n_layer = series[0].effect.layers[name].size
    if n_layer <= 24:
        layout["xaxis"] |= {"dtick": 1}
    layout["margin"] |= {"b": 84 + 19 * len(series)}
    data: list[dict[str, Any]] = []
    for index, one in enumerate(series):
        label = theme.escape(one.label)
        marker = {"color": one.color, "symbol": one.symbol, "size": 6}
        values = one.effect.layers[name] * scale
        data.append(
            {
                "type": "scatter",
                "x": np.arange(values.size),
                "y": values,
                "mode": "lines+markers" if values.size <= 64 else "lines",
                "name": label,
                "legendgroup": str(index),
                "line": {"color": one.color, "width": 2, "dash": one.dash},
                "marker": marker,
                "hovertemplate": f"{label}<br>layer %{{x}}: %{{y:.3~f}}<extra></extra>",
            }
        )
    for index, one in enumerate(series):
        label = theme.escape(one.label)
        data.append(
            {
                "type": "scatter",
                "x": [100 * lost[index]],
                "y": [total[index] / y_unit],
                "xaxis": "x2",
                "yaxis": "y2",
                "mode": "markers",
                "name": label,
                "legendgroup": str(index),
                "showlegend": False,
                "marker": {"color": one.color, "symbol": one.symbol, "size": 13},
                "hovertemplate": (
                    f"{label}<br>%{{x:.3~f}} %<br>%{{y:.4~g}} {y_name} per token<extra></extra>"
                ),
            }
        )
    # Built from checked parts: plotly's own validation takes longer than all the rest.
    return go.Figure({"data": data, "layout": layout}, _validate=False)


def _largest(values: npt.NDArray[np.float64]) -> float:
    return float(np.nanmax(np.append(values, 0.0)))
