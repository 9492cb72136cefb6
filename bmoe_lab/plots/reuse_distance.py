"""How long ago experts were last used: what an LRU cache of any size would have held."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.metrics._shared import (
    PhaseName,
    Which,
    _evaluation_starts,
    _experts,
    _n_expert,
    _phase_rows,
)
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import MAX_CELLS

__all__ = ["plot_reuse_distance"]

_TITLES = {
    "byte": "bytes of distinct experts since the last use, itself included",
    "expert": "distinct experts since the last use, itself included",
    "token": "tokens since the last use",
}


def plot_reuse_distance(
    trace: xr.Dataset,
    *,
    unit: Literal["byte", "expert", "token"] = "byte",
    which: Which = "chosen",
    across_turns: bool = False,
    phase: PhaseName = "decode",
) -> go.Figure:
    """Return the share of lookups whose expert was used no longer ago than a distance.

    In bytes, and with ``which="applied"``, it is the hit rate in `phase` of an LRU cache of that
    size which starts empty and serves all phases: where it is steep, a little more memory gains
    most.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace; for bytes with ``expert_bytes``.
    unit : {"byte", "expert", "token"}, default "byte"
        What passes between two uses.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran.
    across_turns : bool, default False
        Let a use in an earlier turn count, as for a cache that stays warm.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Lookups counted. What earlier phases used counts as used: a prompt warms the cache.

    Returns
    -------
    plotly.graph_objects.Figure
        A step line; it ends below 100 % by the first uses, which no size helps. In bytes, lines at
        what one token needs and at the cache of the run.

    Raises
    ------
    SchemaError
        If the phase looked up nothing, or sizes are unknown for ``unit="byte"``.
    UnknownNameError
        If `unit`, `which` or `phase` is not one of the names above.

    See Also
    --------
    bmoe_lab.lru_curve : The same as numbers, at chosen sizes.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_reuse_distance(make_trace(n_token=40, n_layer=2, seed=0), unit="token")
    >>> [line.name.split(":")[0] for line in figure.data]
    ['routings', 'used before']
    """
    if unit not in _TITLES:
        raise unknown_name("unit", unit, list(_TITLES))
    rows = _phase_rows(trace, phase)
    lookups = _lookups(trace, which, rows, whole=unit == "token")
    if lookups == 0:
        raise SchemaError(
            f"trace must route something in phase {phase!r}; got nothing. Choose another phase."
        )
    distance = metrics.reuse_distance(
        trace, unit=unit, which=which, across_turns=across_turns, phase="all"
    ).values[rows]
    distance = np.sort(distance[~np.isnan(distance)])
    first = 1 - distance.size / lookups
    size, share = _steps(distance, lookups)
    largest = float(size[-1]) if size.size else float(trace.attrs.get("cache_budget_bytes", 1))
    factor, unit_name = theme.byte_unit(largest)
    if unit != "byte":
        factor = 1.0
    marks = _marks(trace, factor, unit_name) if unit == "byte" else []
    low, high = _range(size / factor, [mark for mark, *_ in marks])
    noun = "routings" if unit == "token" else "lookups"
    figure = theme.figure(
        title=f"How long ago experts were last used, {phase}",
        subtitle=" · ".join(_notes(trace, which, noun, first, across_turns)),
        x_title=_TITLES[unit] + (f" ({unit_name})" if unit == "byte" else ""),
        y_title=f"used no longer ago (% of {noun})",
        height=500,
    )
    figure.add_trace(
        go.Scatter(
            x=np.concatenate([[low], size / factor, [high]]),
            y=100 * np.concatenate([[0.0], share, [1 - first]]),
            mode="lines",
            name=f"{noun}: {lookups:,}",
            line={"color": theme.BLUE, "width": 2.5, "shape": "hv"},
            hovertemplate=f"%{{x:.4g}} {unit_name if unit == 'byte' else unit + 's'}<br>"
            f"%{{y:.1f}} % of {noun}<extra></extra>",
        )
    )
    _line(
        figure,
        [low, high],
        [100 * (1 - first)] * 2,
        f"used before: {100 * (1 - first):.1f} %, the most that any size finds",
        theme.ORANGE,
        "dash",
    )
    for mark, name, dash in marks:
        _line(figure, [mark, mark], [0, 100], name, theme.TEXT, dash)
    figure.update_xaxes(
        type="log", range=[float(np.log10(low)), float(np.log10(high))], **_ticks(low, high, unit)
    )
    figure.update_yaxes(range=[-2, 104])
    return figure


def _lookups(trace: xr.Dataset, which: Which, rows: npt.NDArray[np.bool_], *, whole: bool) -> int:
    """Return the routings (`whole`) or the distinct experts of loads in `rows`."""
    experts = _experts(trace, which)
    token, layer, _ = here = np.nonzero((experts >= 0) & rows[:, None, None])
    if whole:
        return int(token.size)
    begins = np.zeros(rows.size, dtype=np.int64)
    begins[_evaluation_starts(trace)] = 1
    load = np.cumsum(begins)[token] * experts.shape[1] + layer
    return int(np.unique(load * _n_expert(trace) + experts[here].astype(np.int64)).size)


def _steps(
    distance: npt.NDArray[np.float64], lookups: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the distances that occur with the share up to them, at most MAX_CELLS of them."""
    size, count = np.unique(distance, return_counts=True)
    share = np.cumsum(count) / lookups
    if size.size > MAX_CELLS:
        # Evenly along both the log axis and the curve, so that neither end turns coarse.
        targets = np.geomspace(size[0], size[-1], MAX_CELLS // 2)
        kept = np.union1d(
            np.searchsorted(size, targets).clip(max=size.size - 1),
            np.linspace(0, size.size - 1, MAX_CELLS // 2).round().astype(np.int64),
        )
        size, share = size[kept], share[kept]
    return size, share


def _notes(trace: xr.Dataset, which: str, noun: str, first: float, across_turns: bool) -> list[str]:
    notes = [f"first uses: {100 * first:.1f} % of {noun}, not in the curve", f"{which} experts"]
    if across_turns:
        notes.append("turns share what was used")
    note = theme.run_note(trace.attrs)
    return [*notes, note] if note else notes


def _marks(trace: xr.Dataset, factor: float, unit_name: str) -> list[tuple[float, str, str]]:
    marks = []
    cycle = float(metrics.token_cycle_bytes(trace)) / factor
    if cycle > 0:
        marks.append((cycle, f"one token {cycle:.3g} {unit_name}", "dot"))
    budget = trace.attrs.get("cache_budget_bytes")
    if budget:
        size = float(budget) / factor
        marks.append((size, f"cache of this run {size:.3g} {unit_name}", "dashdot"))
    return marks


def _range(size: npt.NDArray[np.float64], marks: list[float]) -> tuple[float, float]:
    drawn = [*size[:1].tolist(), *size[-1:].tolist(), *marks]
    if not drawn:
        return 0.5, 2.0
    return min(drawn) / 1.25, max(drawn) * 1.25


def _line(
    figure: go.Figure, x: list[float], y: list[float], name: str, color: str, dash: str
) -> None:
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            mode="lines",
            name=theme.escape(name),
            line={"color": color, "width": 1.5, "dash": dash},
            hoverinfo="skip",
        )
    )


def _ticks(low: float, high: float, unit: str) -> dict[str, list[float] | list[str]]:
    """Return ticks at powers of two for bytes, at 1, 2, 5 of each decade for counts."""
    if unit == "byte":
        powers = np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
        values = (2.0**powers).tolist()
    else:
        decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        values = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    values = [value for value in values if low <= value <= high]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}
