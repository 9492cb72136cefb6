"""Where in the text a policy costs quality."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_means, step_for
from bmoe_lab.plots.series import series_of

__all__ = ["plot_nll_along_text"]


def plot_nll_along_text(tree: xr.DataTree, *, window: int = 16) -> go.Figure:
    """Return the loss of each run less that of the lossless one, along the text.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.
    window : int, default 16
        Tokens of the moving average; 1 shows every token. Averages do not cross text windows.

    Returns
    -------
    plotly.graph_objects.Figure
        Above zero the policy is worse. One line per run, with gaps between text windows.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    SettingsError
        If `window` is less than 1.
    """
    if window < 1:
        raise SettingsError(f"window must be at least 1; got {window!r}. Use 16.")
    shown = series_of(tree)
    base = shown[0].trace
    base_nll = base["nll"].values
    scored = np.flatnonzero(~np.isnan(base_nll))
    turn = base["turn"].values[scored]
    step = step_for(scored.size)
    notes = [
        f"moving average over {window} tokens" if window > 1 else "every token",
        f"{scored.size} tokens in {np.unique(turn).size} text window"
        + ("s" if np.unique(turn).size > 1 else ""),
    ]
    if step > 1:
        notes.append(f"means over {step} tokens drawn")
    figure = theme.figure(
        title="Loss against lossless along the text",
        subtitle=" · ".join(notes),
        x_title="scored token",
        y_title="difference of negative log-probability (nat)",
        height=430 + 20 * len(shown),
    )
    pieces = base["piece"].values[scored] if "piece" in base.coords and step == 1 else None
    for run in shown[1:]:
        if not scored.size:
            break
        difference = run.trace["nll"].values[scored] - base_nll[scored]
        x, y, text = _with_gaps(_smooth(difference, turn, window), turn, step, pieces)
        figure.add_trace(
            go.Scatter(
                x=x,
                y=y,
                text=text,
                mode="lines",
                name=theme.escape(run.label),
                line={**run.line, "width": 1.5},
                connectgaps=False,
                hovertemplate=(
                    f"{theme.escape(run.label)}<br>token %{{x}}"
                    + (" ‘%{text}’" if text is not None else "")
                    + "<br>%{y:+.4f} nat<extra></extra>"
                ),
            )
        )
    figure.add_hline(y=0, line={"color": theme.TEXT, "width": 1, "dash": "dash"})
    if len(shown) == 1 or not scored.size:
        figure.add_annotation(
            text="no token was scored" if len(shown) > 1 else "no policy was compared",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
    return figure


def _smooth(
    values: npt.NDArray[np.float64], turn: npt.NDArray[np.generic], window: int
) -> npt.NDArray[np.float64]:
    """Return centred means over up to `window` values of the same text window."""
    smooth = np.empty_like(values)
    for number in np.unique(turn):
        inside = np.flatnonzero(turn == number)
        part = values[inside]
        prefix = np.concatenate(([0.0], np.cumsum(part)))
        at = np.arange(part.size)
        low = np.maximum(at - (window - 1) // 2, 0)
        high = np.minimum(at + window // 2 + 1, part.size)
        smooth[inside] = (prefix[high] - prefix[low]) / (high - low)
    return smooth


def _with_gaps(
    values: npt.NDArray[np.float64],
    turn: npt.NDArray[np.generic],
    step: int,
    pieces: npt.NDArray[np.generic] | None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[str] | None]:
    """Return x, y and text with an empty point between text windows."""
    x: list[npt.NDArray[np.float64]] = []
    y: list[npt.NDArray[np.float64]] = []
    text: list[str] = []
    for number in np.unique(turn):
        inside = np.flatnonzero(turn == number)
        part = block_means(values[inside], step)
        place = inside[0] + step * np.arange(part.size) + (step - 1) / 2
        x += [place, np.array([np.nan])]
        y += [part, np.array([np.nan])]
        if pieces is not None:
            text += [theme.escape(piece) for piece in pieces[inside]] + [""]
    return np.concatenate(x)[:-1], np.concatenate(y)[:-1], text[:-1] if pieces is not None else None
