"""How near a run came to the limit of its drive and cores."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.plots import theme
from bmoe_lab.sizes import format_size

__all__ = ["plot_roofline"]

_POINTS = 400

# A drive is measured no better than this: a little above the limit is at the limit.
_NOISE = 1.005


def plot_roofline(
    trace: xr.Dataset,
    *,
    compute_s: float | None = None,
    bandwidth: float | str | None = None,
    phase: PhaseName = "decode",
) -> go.Figure:
    """Return the best tokens per second over the bytes read per token, and the run below it.

    To the left of the balance the cores are the limit, and reading less gains nothing; to its right
    every byte counts. A point between the two lines cannot be reached without reads that overlap
    computing.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace; one without times needs both numbers.
    compute_s : float, optional
        Seconds of computing per token; by default derived from the trace.
    bandwidth : float or str, optional
        Bytes per second of the drive, or their size such as ``"2460 MiB"``; by default derived.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    plotly.graph_objects.Figure
        The subtitle says the share of the limit, what binds, and what was derived from what.

    Raises
    ------
    SchemaError
        If bytes are unknown, or times that were not given.
    SettingsError
        If a number given is none, or reads overlapped computing and `bandwidth` was not given.

    See Also
    --------
    bmoe_lab.metrics.roofline : The numbers, with their formulas.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_roofline(make_trace(n_token=40, n_layer=2, seed=0))
    >>> [line.name for line in figure.data][:2]
    ['limit, reads overlap computing', 'limit, one after the other']
    """
    found = metrics.roofline(trace, compute_s=compute_s, bandwidth=bandwidth, phase=phase)
    number = {str(name).removesuffix(f"_{phase}"): float(value) for name, value in found.items()}
    if np.isnan(number["limit_overlap"]):
        raise SchemaError(
            f"trace must know the times and bytes of phase {phase!r}; got none that are complete. "
            "Choose another phase, or pass compute_s= (seconds of computing per token) and "
            "bandwidth= (bytes per second)."
        )
    compute, rate = number["compute_s"], number["bandwidth"]
    read = number["read_bytes_per_token"]
    demand = _demand(trace, phase)
    balance = compute * rate
    far = _far(read, demand, balance)
    unit, unit_name = theme.byte_unit(far)
    notes = [
        _headline(number, str(found.attrs["binding"])),
        _sources(found, compute, rate),
        theme.run_note(trace.attrs),
    ]
    figure = theme.figure(
        title=f"Speed against the physical limit, {phase}",
        subtitle=" · ".join(note for note in notes if note),
        x_title=f"expert bytes read per token ({unit_name})",
        y_title="tokens per second",
        height=520,
    )
    size = np.unique(np.append(np.linspace(0, far, _POINTS), balance if balance < far else 0.0))
    seconds = size / rate if np.isfinite(rate) else np.zeros_like(size)
    lines = (
        ("limit, reads overlap computing", 1 / np.maximum(compute, seconds), theme.BLUE, "solid"),
        ("limit, one after the other", 1 / (compute + seconds), theme.SKY, "dash"),
    )
    for name, limit, color, dash in lines:
        figure.add_trace(
            go.Scatter(
                x=size / unit,
                y=limit,
                mode="lines",
                name=name,
                line={"color": color, "width": 2.5, "dash": dash},
                hovertemplate=f"{name}<br>%{{x:.3g}} {unit_name} per token<br>"
                "%{y:.3g} tokens/s<extra></extra>",
            )
        )
    top, bottom = 1 / compute, float(lines[1][1].min())
    measured = number["speed"]
    if not np.isnan(measured):
        top, bottom = max(top, measured), min(bottom, measured)
    top, bottom = 1.5 * top, bottom / 1.5
    if balance < far:
        name = f"balance {format_size(balance)}: reading takes as long as computing"
        _mark(figure, balance / unit, bottom, top, name, "dot")
    if demand > 0:
        name = f"without a cache {format_size(demand)}"
        _mark(figure, demand / unit, bottom, top, name, "dashdot")
    if not np.isnan(measured):
        figure.add_trace(
            go.Scatter(
                x=[read / unit],
                y=[measured],
                mode="markers",
                name=f"this run: {_short(measured)} tokens/s",
                marker={"color": theme.VERMILLION, "size": 12, "symbol": "diamond"},
                cliponaxis=False,
                hovertemplate=f"this run<br>%{{x:.3g}} {unit_name} per token<br>"
                "%{y:.3g} tokens/s<extra></extra>",
            )
        )
    figure.update_xaxes(range=[0, far / unit])
    figure.update_yaxes(
        type="log", range=[float(np.log10(bottom)), float(np.log10(top))], **_ticks(bottom, top)
    )
    return figure


def _demand(trace: xr.Dataset, phase: PhaseName) -> float:
    """Return what a run without a cache reads per token; 0 if that is unknown."""
    if "expert_bytes" not in trace.variables:
        return 0.0
    return float(np.nan_to_num(float(metrics.demand_bytes_per_token(trace, phase=phase))))


def _far(read: float, demand: float, balance: float) -> float:
    """Return the right end: what is read and asked for, and the balance if it lies near."""
    wide = max(read, demand)
    if not np.isfinite(balance):
        return 1.15 * wide if wide > 0 else 1.0
    return 1.15 * max(wide, min(1.2 * balance, 4 * wide) if wide > 0 else 1.5 * balance)


def _headline(number: dict[str, float], binding: str) -> str:
    limit = number["limit_overlap"]
    words = f"{binding} bind{'s' if binding == 'computing' else ''}"
    if np.isnan(number["limit_frac"]):
        return f"no time measured; at most {_short(limit)} tokens/s with these reads · {words}"
    share = f"{_short(100 * number['limit_frac'])} % of limit ({_short(limit)} tokens/s)"
    if number["limit_frac"] > _NOISE:
        return f"{share}: faster than the numbers given allow, one of them is wrong"
    return f"{share} · {words}"


def _short(number: float) -> str:
    """Return three digits, but whole numbers whole: 1,240 rather than 1.24e+03."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _sources(found: xr.Dataset, compute: float, rate: float) -> str:
    seconds = f"{compute:.3g} s" if compute >= 1 else f"{1000 * compute:.3g} ms"
    computing = f"computing {seconds}/token ({found.attrs['compute_from']})"
    if not np.isfinite(rate):
        return computing
    return f"{computing} · reads {format_size(rate)}/s ({found.attrs['bandwidth_from']})"


def _mark(figure: go.Figure, size: float, bottom: float, top: float, name: str, dash: str) -> None:
    # Named in the legend: words beside two lines that may be close would overlap.
    figure.add_trace(
        go.Scatter(
            x=[size, size],
            y=[bottom, top],
            mode="lines",
            name=theme.escape(name),
            line={"color": theme.TEXT, "width": 1.5, "dash": dash},
            hoverinfo="skip",
        )
    )


def _ticks(bottom: float, top: float) -> dict[str, list[float] | list[str]]:
    """Return ticks at 1, 2, 5 of every decade, only 1 where there are many."""
    digits = (1, 2, 5) if top / bottom < 1000 else (1,)
    low, high = int(np.floor(np.log10(bottom))), int(np.ceil(np.log10(top)))
    values = [digit * 10.0**power for power in range(low, high + 1) for digit in digits]
    values = [value for value in values if bottom <= value <= top]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}
