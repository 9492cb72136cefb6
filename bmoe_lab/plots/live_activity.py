"""What the layers of a run missed in its last evaluations, while it runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import MAX_CELLS, block_means, step_for

__all__ = ["WINDOW", "plot_live_activity"]

WINDOW = 64
"""Evaluations across the figure at most."""


def plot_live_activity(
    misses: npt.NDArray[np.int64],
    lookups: npt.NDArray[np.int64],
    *,
    phase: str = "decode",
    first: int = 1,
    n_planned: int = 0,
    note: str = "",
) -> go.Figure:
    """Return a map of misses per layer over the last evaluations of a phase.

    Grey is a layer that looked nothing up: no token was routed there, or not yet.

    Parameters
    ----------
    misses, lookups : numpy.ndarray of int64, shape (evaluation, layer)
        As :class:`bmoe_lab.Step` gives them, one row per evaluation; of more than `WINDOW` rows the
        last ones are shown.
    phase : {"decode", "prefill"}, default "decode"
        A prefill evaluation asks for the experts of many tokens at once, so the two phases do not
        share a scale.
    first : int, default 1
        Number, within its phase, of the evaluation in the first row.
    n_planned : int, optional
        Evaluations that the phase will have: room is kept for them, so that cells keep their width.
    note : str, optional
        What a reader must know of the run (:func:`bmoe_lab.plots.theme.run_note`).

    Returns
    -------
    plotly.graph_objects.Figure

    Examples
    --------
    >>> import numpy as np
    >>> figure = plot_live_activity(np.array([[2, 0], [1, 3]]), np.array([[4, 4], [4, 4]]))
    >>> figure.data[0].z.tolist()
    [[2.0, 1.0], [0.0, 3.0]]
    """
    cut = max(0, len(misses) - WINDOW)
    misses, lookups, first = misses[cut:], lookups[cut:], first + cut
    n_evaluation, n_layer = misses.shape
    values = np.where(lookups > 0, misses, np.nan).T
    step = step_for(n_layer)
    what = "token" if phase == "decode" else "evaluation"
    widest = int(lookups.max(initial=0))
    notes = [
        note,
        f"of at most {widest} lookups" if widest else "nothing looked up yet",
        f"means over {step} layers" if step > 1 else "",
        "grey: not routed, or not yet",
    ]
    figure = theme.figure(
        title=f"Misses per layer, {phase}",
        subtitle=" · ".join(part for part in notes if part),
        x_title="decoded token" if phase == "decode" else "prefill evaluation",
        y_title="layer",
        height=int(min(520, 230 + 12 * min(n_layer, MAX_CELLS))),
        legend=False,
    )
    figure.add_trace(
        go.Heatmap(
            z=block_means(values, step).astype(np.float32),
            x=np.arange(first, first + n_evaluation),
            y=np.arange(0, n_layer, step),
            zmin=0,
            zmax=max(1, widest),
            colorscale=theme.SEQUENTIAL,
            colorbar={
                "title": {"text": "misses", "side": "right"},
                "thickness": 14,
                "tickformat": "d" if widest > 1 else "",
                **({"dtick": 1} if 1 <= widest <= 10 else {}),
            },
            hovertemplate=f"{what} %{{x}}, layer %{{y}}: %{{z}} misses<extra></extra>",
            hoverongaps=False,
        )
    )
    figure.update_layout(plot_bgcolor=theme.GREY)
    width = min(WINDOW, max(n_evaluation, n_planned, 1))
    figure.update_xaxes(range=[first - 0.5, first + width - 0.5], tickformat="d")
    if width <= 10:
        figure.update_xaxes(dtick=1)
    # An empty range cannot be drawn.
    figure.update_yaxes(range=[max(n_layer, 1) - 0.5, -0.5])
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    if n_layer <= 16:
        figure.update_yaxes(dtick=1)
    return figure
