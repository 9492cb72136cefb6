"""How much of a token's choice the tokens before it had made too, layer by layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError
from bmoe_lab.metrics._shared import PhaseName, Which, _experts, _phase_rows
from bmoe_lab.plots import theme

__all__ = ["plot_overlap"]


def plot_overlap(
    trace: xr.Dataset,
    *,
    lag: int = 1,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> go.Figure:
    """Return the overlap of neighbouring tokens per layer, against two kinds of chance.

    What lies between the overlap and that with any other token is locality in time: what a cache
    gains over a fixed set of popular experts.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    lag : int, default 1
        Distance of the two tokens in positions.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Both tokens are of this phase.

    Returns
    -------
    plotly.graph_objects.Figure
        Overlap and Jaccard similarity; the overlap of two tokens picked at random from the phase
        (chance, given which experts are popular); k / E (chance, all experts alike).

    Raises
    ------
    SchemaError
        If the phase has no two tokens at that distance that a layer routed.
    SettingsError
        If `lag` is less than 1.
    UnknownNameError
        If `which` or `phase` is not one of the names above.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_overlap(make_trace(n_token=20, n_layer=2, seed=0))
    >>> [line.name.split(":")[0] for line in figure.data]
    ['overlap', 'Jaccard', 'overlap with any other token', 'overlap if experts were alike, k / E']
    """
    overlap = metrics.consecutive_overlap(trace, lag=lag, which=which, by="layer", phase=phase)
    if not overlap.size or bool(overlap.isnull().all()):
        raise SchemaError(
            f"trace must hold tokens of phase {phase!r} that follow each other at distance {lag}, "
            "both routed; got none. Choose another phase or a smaller lag."
        )
    jaccard = metrics.consecutive_jaccard(trace, lag=lag, which=which, by="layer", phase=phase)
    mean = float(metrics.consecutive_overlap(trace, lag=lag, which=which, phase=phase))
    mean_jaccard = float(metrics.consecutive_jaccard(trace, lag=lag, which=which, phase=phase))
    other, mean_other = _any_other(trace, which, phase)
    chance = metrics.chance_overlap(trace, by="layer", phase=phase).values
    mean_chance = float(metrics.chance_overlap(trace, phase=phase))
    notes = [f"{which} experts", "legend: over all layers", theme.run_note(trace.attrs)]
    if bool(overlap.isnull().any()):
        notes.insert(1, "gaps: layer routed no pair")
    before = "the token before" if lag == 1 else f"{lag} tokens before"
    figure = theme.figure(
        title=f"Choice shared with {before}, {phase}",
        subtitle=" · ".join(note for note in notes if note),
        x_title="layer",
        y_title="shared experts (%)",
        height=480,
    )
    _line(figure, f"overlap: {100 * mean:.1f} %", overlap.values, theme.BLUE, "circle")
    _line(
        figure,
        f"Jaccard: {100 * mean_jaccard:.1f} %",
        jaccard.values,
        theme.ORANGE,
        "square",
        width=1.2,
    )
    _line(
        figure,
        f"overlap with any other token: {100 * mean_other:.1f} %",
        other,
        theme.PURPLE,
        "diamond-open",
        "dot",
    )
    _line(
        figure,
        f"overlap if experts were alike, k / E: {100 * mean_chance:.1f} %",
        chance,
        theme.TEXT,
        "line-ew-open",
        "dash",
    )
    drawn = np.concatenate([overlap.values, jaccard.values, other, chance])
    figure.update_yaxes(range=[0, min(104.0, 115 * float(np.nanmax(drawn)) + 1)])
    n_layer = trace.sizes["layer"]
    figure.update_xaxes(range=[-0.6, n_layer - 0.4], zeroline=False)
    if n_layer <= 24:
        figure.update_xaxes(dtick=1)
    return figure


def _any_other(
    trace: xr.Dataset, which: Which, phase: PhaseName
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the mean overlap of all pairs of different tokens, per layer and over all layers.

    Of the slots that hold expert e, n_e, each finds it in n_e - 1 of the other T - 1 tokens.
    """
    count = np.nan_to_num(metrics.routing_counts(trace, which=which, phase=phase).values)
    experts = _experts(trace, which)[_phase_rows(trace, phase)]
    others = (experts >= 0).any(axis=-1).sum(axis=0) - 1
    shared, pairs = (count * (count - 1)).sum(axis=1), count.sum(axis=1) * others
    share = shared / np.where(pairs > 0, pairs, np.nan)
    slots = np.where(pairs > 0, count.sum(axis=1), 0.0)
    total = float(slots.sum())
    mean = float((np.nan_to_num(share) * slots).sum()) / total if total > 0 else np.nan
    return share, mean


def _line(
    figure: go.Figure,
    name: str,
    share: npt.NDArray[np.float64],
    color: str,
    symbol: str,
    dash: str = "solid",
    *,
    width: float = 2,
) -> None:
    figure.add_trace(
        go.Scatter(
            x=np.arange(share.size),
            y=100 * share,
            mode="lines+markers",
            name=name,
            line={"color": color, "width": width, "dash": dash},
            marker={
                "color": color,
                "symbol": symbol,
                "size": 3 + 2 * width,
                "line": {"width": width, "color": color},
            },
            hovertemplate=f"{name.split(':')[0]}<br>layer %{{x}}: %{{y:.1f}} %<extra></extra>",
        )
    )
