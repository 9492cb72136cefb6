"""Where in the text the runs of a comparison part from the lossless one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.comparison.first_divergence import first_divergence
from bmoe_lab.comparison.tree import runs
from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_means, step_for
from bmoe_lab.plots.series import Series, series_of

__all__ = ["VALUES", "DivergenceValue", "plot_divergence_along_text", "values_along_text"]

Value = Literal["kl", "delta_nll", "top1_agree", "routing_agreement"]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DivergenceValue:
    """One way in which a run differs from the lossless one, token by token.

    Attributes
    ----------
    label : str
        For a list of choices.
    title, axis, unit : str
        Of the figure; the axis title without its unit.
    variable : str
        What the run's trace must hold.
    same : float
        Its value where nothing differs.
    """

    label: str
    title: str
    axis: str
    unit: str
    variable: str
    same: float


VALUES: dict[str, DivergenceValue] = {
    "kl": DivergenceValue(
        "KL from lossless", "KL from lossless along the text", "KL(lossless || run)", "nat", "kl", 0
    ),
    "delta_nll": DivergenceValue(
        "loss less that of lossless",
        "Loss against lossless along the text",
        "difference of negative log-probability",
        "nat",
        "nll",
        0,
    ),
    "top1_agree": DivergenceValue(
        "same most likely token",
        "Agreement with lossless along the text",
        "most likely token is the lossless one",
        "share",
        "top1_agree",
        1,
    ),
    "routing_agreement": DivergenceValue(
        "same experts ran",
        "Experts shared with lossless along the text",
        "lossless experts that also ran",
        "share",
        "routing_agreement",
        1,
    ),
}
"""What :func:`plot_divergence_along_text` can show, by name."""


def plot_divergence_along_text(
    tree: xr.DataTree,
    *,
    value: Value = "kl",
    window: int = 16,
    arm: str | Sequence[str] | None = None,
) -> go.Figure:
    """Return how far each run is from the lossless one, along the text.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.
    value : {"kl", "delta_nll", "top1_agree", "routing_agreement"}, default "kl"
        KL of the whole next-token distribution (nat), loss less that of lossless (nat), share of
        tokens with the same most likely token, share of the lossless experts that also ran.
    window : int, default 16
        Tokens of the centred moving average; 1 shows every token. Averages do not cross text
        windows.
    arm : str or sequence of str, optional
        Only these runs, by their names in the tree (``tree.children``); by default all but the
        noise floor.

    Returns
    -------
    plotly.graph_objects.Figure
        One line per run over the token's place in the trace, with gaps between text windows. A
        star marks the run's first divergence: its first scored token, in the order decoded, whose
        most likely token differs from the lossless one
        (:func:`bmoe_lab.comparison.first_divergence`); it stands on the line, averages included.

    Raises
    ------
    SchemaError
        If the tree is not a comparison, or no run holds the value.
    SettingsError
        If `window` is less than 1, or `arm` is the lossless run.
    UnknownNameError
        If there is no such value or run.

    Notes
    -----
    A token that a run excludes has an infinite loss. Averages that hold one are infinite too: they
    are gaps in the line, and the subtitle counts the tokens.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> text = bl.datasets.heldout("kjv")[0].text[:200]
    >>> with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
    ...     tree = bl.compare(
    ...         session, text, policies=[bl.routing.DropCold(0.75)], progress=False
    ...     )
    >>> plot_divergence_along_text(tree, value="kl").data[0].name
    'DropCold(frac=0.75) (lossy)'
    """
    if value not in VALUES:
        raise unknown_name("value", value, VALUES)
    if isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1:
        raise SettingsError(f"window must be at least 1; got {window!r}. Use 16.")
    view = VALUES[value]
    shown = _chosen(tree, arm)
    base = runs(tree)[0][1]
    turn = base["turn"].values
    lines = {
        run.row: values_along_text(tree, run.row, value)
        for run in shown
        if view.variable in run.trace
    }
    if shown and not lines:
        raise SchemaError(
            f"a run of the comparison must hold the variable {view.variable!r} to show {value!r}; "
            f"got none. Choose another of {sorted(VALUES)}."
        )
    known = {row: np.flatnonzero(~np.isnan(line)) for row, line in lines.items()}
    n_token = max((rows.size for rows in known.values()), default=0)
    step = step_for(n_token)
    firsts = first_divergence(tree)
    figure = theme.figure(
        title=view.title,
        subtitle=" · ".join(_notes(lines, known, turn, step, window)),
        x_title="token",
        y_title=f"{view.axis} ({view.unit})",
        height=430 + 20 * len(shown),
    )
    pieces = base["piece"].values if "piece" in base.coords and step == 1 else None
    n_marked = 0
    for run in shown:
        if run.row not in lines or not known[run.row].size:
            continue
        at = known[run.row]
        smooth = _smooth(lines[run.row][at], turn[at], window)
        smooth[np.isinf(smooth)] = np.nan
        x, y, text = _with_gaps(smooth, at, turn[at], step, pieces)
        figure.add_trace(_line(run, x, y, text, view))
        first = firsts["token"].iloc[run.row]
        if first is not _missing() and int(first) in at:
            height = smooth[np.searchsorted(at, int(first))] if step == 1 else _nearest(x, y, first)
            if np.isfinite(height):
                figure.add_trace(_star(run, firsts.iloc[run.row], float(height)))
                n_marked += 1
    if n_marked:
        subtitle = figure.layout.title.subtitle
        subtitle.text += "<br>★ first token whose most likely token is not the lossless one"
        figure.layout.margin.t += 16
        figure.layout.height += 16
    if view.unit == "share":
        figure.update_yaxes(range=[-0.03, 1.05])
    elif value == "kl":
        figure.update_yaxes(rangemode="tozero")
    figure.add_hline(y=view.same, line={"color": theme.TEXT, "width": 1, "dash": "dash"})
    if not n_token:
        figure.add_annotation(
            text="no token was scored" if shown else "no policy was compared",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
    return figure


def values_along_text(tree: xr.DataTree, row: int, value: str) -> Values:
    """Return a value of a run for every token of its trace.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.
    row : int
        Row of the run in the comparison's table.
    value : {"kl", "delta_nll", "top1_agree", "routing_agreement"}

    Returns
    -------
    numpy.ndarray
        Shape (token,), float64; NaN where unknown: not scored, or infinitely unlikely in both runs.
    """
    named = runs(tree)
    trace = named[row][1]
    if value != "delta_nll":
        return np.asarray(trace[VALUES[value].variable].values, np.float64)
    with np.errstate(invalid="ignore"):  # infinite less infinite is unknown
        return np.asarray(trace["nll"].values - named[0][1]["nll"].values, np.float64)


def _missing() -> Any:
    import pandas as pd

    return pd.NA


def _chosen(tree: xr.DataTree, arm: str | Sequence[str] | None) -> list[Series]:
    """Return the runs to draw, the lossless one left out."""
    shown = [run for run in series_of(tree) if run.kind != "lossless"]
    if arm is None:
        return shown
    nodes = list(tree.children)
    wanted = [arm] if isinstance(arm, str) else list(arm)
    rows = []
    for name in wanted:
        if name not in nodes:
            raise unknown_name("arm", name, nodes)
        if nodes.index(name) == 0:
            raise SettingsError(
                f"arm must be a run to compare with the lossless one; got {name!r} itself. "
                f"Choose one of {nodes[1:]}."
            )
        rows.append(nodes.index(name))
    by_row = {run.row: run for run in shown}
    named = runs(tree)
    return [
        by_row.get(row)
        or Series(named[row][0], named[row][1], row, "noise floor", theme.TEXT, "circle")
        for row in rows
    ]


def _notes(
    lines: dict[int, Values],
    known: dict[int, npt.NDArray[np.int64]],
    turn: npt.NDArray[np.generic],
    step: int,
    window: int,
) -> list[str]:
    n_token = max((rows.size for rows in known.values()), default=0)
    n_window = max((np.unique(turn[rows]).size for rows in known.values()), default=0)
    notes = [
        f"moving average over {window} tokens" if window > 1 else "every token",
        f"{n_token} token{'' if n_token == 1 else 's'} in {n_window} text window"
        + ("" if n_window == 1 else "s"),
    ]
    if step > 1:
        notes.append(f"means over {step} tokens drawn")
    infinite = max((int(np.isinf(line).sum()) for line in lines.values()), default=0)
    if infinite:
        notes.append(f"gaps: infinite at up to {infinite} token{'' if infinite == 1 else 's'}")
    return notes


def _line(
    run: Series, x: Values, y: Values, text: list[str] | None, view: DivergenceValue
) -> go.Scatter:
    sign = "+" if view.variable == "nll" else ""
    unit = "" if view.unit == "share" else f" {view.unit}"
    # A line of one point cannot be seen.
    alone = np.isfinite(y).sum() < 2
    return go.Scatter(
        x=x,
        y=y,
        text=text,
        mode="lines+markers" if alone else "lines",
        name=theme.escape(run.label),
        legendgroup=f"run {run.row}",
        line={**run.line, "width": 1.5},
        marker=run.marker,
        connectgaps=False,
        hovertemplate=(
            f"{theme.escape(run.label)}<br>token %{{x}}"
            + (" ‘%{text}’" if text is not None else "")
            + f"<br>%{{y:{sign}.4f}}{unit}<extra></extra>"
        ),
    )


def _star(run: Series, first: Any, height: float) -> go.Scatter:
    piece = "" if first["piece"] is _missing() else f" ‘{theme.escape(first['piece'])}’"
    kl = "unknown" if np.isnan(first["kl"]) else f"{first['kl']:.4f} nat"
    return go.Scatter(
        x=[int(first["token"])],
        y=[height],
        mode="markers",
        name=f"first divergence of {theme.escape(run.label)}",
        legendgroup=f"run {run.row}",
        showlegend=False,
        marker={
            "symbol": "star",
            "size": 13,
            "color": run.color,
            "line": {"color": theme.TEXT, "width": 1},
        },
        hovertemplate=(
            f"{theme.escape(run.label)}<br>first divergence: token %{{x}}{piece}<br>"
            f"KL {kl}, {first['n_before']} scored tokens before it<extra></extra>"
        ),
    )


def _nearest(x: Values, y: Values, token: Any) -> float:
    return float(y[np.nanargmin(np.abs(x - int(token)))])


def _smooth(values: Values, turn: npt.NDArray[np.generic], window: int) -> Values:
    """Return centred means over up to `window` values of the same text window."""
    smooth = np.empty_like(values)
    for number in np.unique(turn):
        inside = np.flatnonzero(turn == number)
        part = values[inside]
        endless = np.isinf(part)
        # Sums of the finite values: an infinite one would make all later means unknown.
        prefix = np.concatenate(([0.0], np.cumsum(np.where(endless, 0.0, part))))
        n_endless = np.concatenate(([0], np.cumsum(endless)))
        at = np.arange(part.size)
        low = np.maximum(at - (window - 1) // 2, 0)
        high = np.minimum(at + window // 2 + 1, part.size)
        mean = (prefix[high] - prefix[low]) / (high - low)
        smooth[inside] = np.where(n_endless[high] > n_endless[low], np.inf, mean)
    return smooth


def _with_gaps(
    values: Values,
    tokens: npt.NDArray[np.int64],
    turn: npt.NDArray[np.generic],
    step: int,
    pieces: npt.NDArray[np.generic] | None,
) -> tuple[Values, Values, list[str] | None]:
    """Return x, y and text with an empty point between text windows."""
    x: list[Values] = []
    y: list[Values] = []
    text: list[str] = []
    for number in np.unique(turn):
        inside = np.flatnonzero(turn == number)
        x += [block_means(tokens[inside].astype(np.float64), step), np.array([np.nan])]
        y += [block_means(values[inside], step), np.array([np.nan])]
        if pieces is not None:
            text += [theme.escape(piece) for piece in pieces[tokens[inside]]] + [""]
    return np.concatenate(x)[:-1], np.concatenate(y)[:-1], text[:-1] if pieces is not None else None
