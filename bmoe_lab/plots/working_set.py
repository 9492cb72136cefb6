"""How many experts a stretch of text needs, and how much memory that is."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.metrics._shared import PhaseName, Which, _any_slot, _n_expert, _phase_rows
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_means, step_for
from bmoe_lab.sizes import format_size

__all__ = ["plot_working_set"]

Array = npt.NDArray[np.float64]
Unit = Literal["expert", "byte"]


def plot_working_set(
    trace: xr.Dataset,
    *,
    window: int | None = None,
    unit: Unit = "expert",
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> go.Figure:
    """Return the distinct experts that the last tokens wanted, over all layers.

    Over the window's length: a curve far below chance means that neighbouring tokens share experts,
    and where it turns flat, a cache of that size serves the text. Along the text: where the topic,
    and with it the experts, change.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace; for bytes with ``expert_bytes``.
    window : int, optional
        Draw this many tokens' working set along the text. By default its mean over the length of
        the window, 1, 2, 4 and so on.
    unit : {"expert", "byte"}, default "expert"
        Count experts, or sum their bytes. The other is in the hover, if known.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        All tokens of a window are of this phase.

    Returns
    -------
    plotly.graph_objects.Figure
        Sums over the layers that routed every token of the phase; the subtitle says if some did
        not. Chance is a router to which all experts are alike.

    Raises
    ------
    SchemaError
        If no layer routed every token of the phase, no window of that length fits, or sizes are
        unknown for ``unit="byte"``.
    SettingsError
        If `window` is less than 1.
    UnknownNameError
        If `unit`, `which` or `phase` is not one of the names above.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=20, n_layer=2, n_prefill=0, n_used=3, seed=0)
    >>> figure = plot_working_set(trace)
    >>> list(figure.data[2].x), float(figure.data[2].y[0])
    ([1, 2, 4, 8, 16], 6.0)
    """
    if unit not in ("expert", "byte"):
        raise unknown_name("unit", unit, ["byte", "expert"])
    rows = _phase_rows(trace, phase)
    whole = _any_slot(trace)[rows].all(axis=0) if rows.any() else np.zeros(0, dtype=bool)
    if not whole.any():
        raise SchemaError(
            f"trace must hold a layer that routed every token of phase {phase!r}; got none. "
            "Choose another phase."
        )
    counted = trace.isel(layer=np.flatnonzero(whole))
    view = _View(counted, unit, which, phase)
    notes = [f"{which} experts", theme.run_note(trace.attrs)]
    if not whole.all():
        left_out = int((~whole).sum())
        notes.insert(0, f"layers left out, since they did not route every token: {left_out}")
    if window is None:
        return _over_length(view, notes)
    return _along_text(view, window, np.flatnonzero(rows), notes)


class _View:
    """The working set of a window over all layers, in the unit drawn."""

    def __init__(self, trace: xr.Dataset, unit: Unit, which: Which, phase: PhaseName) -> None:
        self.trace, self.unit, self.which, self.phase = trace, unit, which, phase
        if unit == "byte" and "expert_bytes" not in trace.variables:
            # The metric's own refusal names what is there.
            metrics.working_set(trace, 1, unit="byte", phase=phase)
        self.size: Array | None = None
        if "expert_bytes" in trace.variables:
            size = trace["expert_bytes"].values.astype(np.float64)
            self.size = size if (size > 0).all() else None
        budget = trace.attrs.get("cache_budget_bytes")
        self.budget = float(budget) if budget and unit == "byte" else None

    def of(self, window: int) -> tuple[Array, Array | None]:
        """Return the experts and their bytes at every token; NaN until the window is full."""
        found = metrics.working_set(self.trace, window, which=self.which, phase=self.phase).values
        experts = found.sum(axis=1)
        return experts, None if self.size is None else found @ self.size

    def by_chance(self, windows: list[int]) -> Array:
        """Return what a router would need that draws k of E experts anew for every token."""
        n_expert = _n_expert(self.trace)
        left = 1 - self.trace["n_expert_used"].values.astype(np.float64) / n_expert
        weight = np.ones(left.size) if self.unit == "expert" else self.bytes_of_layers()
        return np.array([(weight * n_expert * (1 - left**w)).sum() for w in windows])

    def all_experts(self) -> float:
        weight = np.ones(self.trace.sizes["layer"])
        weight = weight if self.unit == "expert" else self.bytes_of_layers()
        return float(weight.sum() * _n_expert(self.trace))

    def bytes_of_layers(self) -> Array:
        return np.asarray(self.trace["expert_bytes"].values, dtype=np.float64)

    def scale(self, largest: float) -> tuple[float, str]:
        """Return what a number is divided by to be drawn, and the unit's name."""
        return theme.byte_unit(largest) if self.unit == "byte" else (1.0, "experts")


def _over_length(view: _View, notes: list[str]) -> go.Figure:
    windows, quantiles, means, bytes_ = [], [], [], []
    window = 1
    while window <= view.trace.sizes["token"]:
        experts, size = view.of(window)
        shown = experts if view.unit == "expert" or size is None else size
        full = ~np.isnan(shown)
        if not full.any():
            break
        windows.append(window)
        quantiles.append(np.quantile(shown[full], [0.1, 0.9]))
        means.append((shown[full].mean(), experts[full].mean()))
        bytes_.append(np.nan if size is None else float(size[full].mean()))
        window *= 2
    if not windows:
        raise SchemaError(
            f"trace must hold a token of phase {view.phase!r}; got none. Choose another phase."
        )
    low, high = np.array(quantiles).T
    mean, experts = np.array(means).T
    chance = view.by_chance(windows)
    factor, unit_name = view.scale(float(max(high.max(), chance.max())))
    notes = ["mean over the text; shaded: 10 to 90 % of its places", *notes]
    figure = _figure(view, f"Working set over its window, {view.phase}", notes, unit_name)
    # A filled band turns the legend round.
    figure.update_layout(legend_traceorder="normal")
    figure.update_xaxes(title_text="window (tokens)")
    _band(figure, windows, low / factor, high / factor)
    words = [_words(e, b) for e, b in zip(experts.tolist(), bytes_, strict=True)]
    _curve(figure, windows, mean / factor, "this run", theme.BLUE, words)
    # A line of one point would be no line.
    single = len(windows) == 1
    name = "chance: experts alike"
    _curve(figure, windows, chance / factor, name, theme.PURPLE, dash="dash", markers=single)
    _levels(figure, view, factor, unit_name, (windows[0] / 1.15, windows[-1] * 1.15))
    figure.update_xaxes(
        type="log", tickvals=windows, ticktext=[str(w) for w in windows],
        range=[np.log10(windows[0] / 1.15), np.log10(windows[-1] * 1.15)],
    )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    return figure


def _along_text(
    view: _View, window: int, tokens: npt.NDArray[np.int64], notes: list[str]
) -> go.Figure:
    experts, size = view.of(window)
    shown = experts if view.unit == "expert" or size is None else size
    if np.isnan(shown).all():
        raise SchemaError(
            f"window must fit into the tokens of phase {view.phase!r} that follow each other; got "
            f"{window}. Choose a smaller one."
        )
    step = step_for(shown.size)
    if step > 1:
        notes = [f"means over {step} tokens per point", *notes]
    factor, unit_name = view.scale(float(np.nanmax(shown)))
    notes = ["a gap until the window is full", *notes]
    title = f"Working set of {window} tokens along the text, {view.phase}"
    figure = _figure(view, title, notes, unit_name)
    figure.update_xaxes(title_text="token (in the order decoded)", hoverformat="d")
    at = block_means(tokens.astype(np.float64), step)
    values = block_means(shown, step)
    numbers = block_means(experts, step).tolist()
    bytes_ = [np.nan] * len(numbers) if size is None else block_means(size, step).tolist()
    words = [_words(e, b) for e, b in zip(numbers, bytes_, strict=True)]
    _curve(figure, at, values / factor, "this run", theme.BLUE, words, markers=at.size < 60)
    ends = (float(at[0]) - 0.5, float(at[-1]) + 0.5)
    level = float(view.by_chance([window])[0]) / factor
    name = "chance: experts alike"
    _curve(figure, ends, [level] * 2, name, theme.PURPLE, dash="dash", markers=False)
    _levels(figure, view, factor, unit_name, ends)
    figure.update_xaxes(range=list(ends), zeroline=False)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _figure(view: _View, title: str, notes: list[str], unit_name: str) -> go.Figure:
    what = "distinct experts" if view.unit == "expert" else f"distinct experts ({unit_name})"
    return theme.figure(
        title=title,
        subtitle=" · ".join(note for note in notes if note),
        x_title="",
        y_title=f"{what}, all layers",
        height=480,
    )


def _words(experts: float, size: float) -> str:
    if np.isnan(experts):
        return ""
    return f"{experts:,.0f} experts" + ("" if np.isnan(size) else f", {format_size(size)}")


def _band(figure: go.Figure, x: list[int], low: Array, high: Array) -> None:
    for values, fill in ((low, None), (high, "tonexty")):
        figure.add_trace(
            go.Scatter(
                x=x,
                y=values,
                mode="lines",
                line={"width": 0, "color": theme.SKY},
                fill=fill,
                fillcolor="rgba(86,180,233,0.3)",
                showlegend=False,
                hoverinfo="skip",
            )
        )


def _curve(
    figure: go.Figure,
    x: object,
    y: object,
    name: str,
    color: str,
    words: list[str] | None = None,
    *,
    dash: str = "solid",
    markers: bool = True,
) -> None:
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            text=words,
            mode="lines+markers" if markers else "lines",
            name=name,
            line={"color": color, "width": 2.5, "dash": dash},
            marker={"size": 7},
            hovertemplate=f"{name}<br>%{{x}} tokens: %{{text}}<extra></extra>"
            if words
            else f"{name}<br>%{{y:.4g}}<extra></extra>",
        )
    )


def _levels(
    figure: go.Figure, view: _View, factor: float, unit_name: str, ends: tuple[float, float]
) -> None:
    whole = view.all_experts() / factor
    word = f"{whole:,.0f}" if view.unit == "expert" else f"{whole:.3g} {unit_name}"
    levels = [(whole, f"all experts: {word}", theme.TEXT, "dot")]
    if view.budget is not None:
        size = view.budget / factor
        levels.append((size, f"cache of this run: {size:.3g} {unit_name}", theme.ORANGE, "dashdot"))
    for level, name, color, dash in levels:
        _curve(figure, list(ends), [level] * 2, name, color, dash=dash, markers=False)
