"""Where along the text an expert was used."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.errors import SchemaError
from bmoe_lab.metrics._shared import PhaseName, _phase_rows
from bmoe_lab.metrics.cells import _place
from bmoe_lab.metrics.experts import _expert_of
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import MAX_CELLS, step_for
from bmoe_lab.plots.token_axis import mark_begins, phase_begins, show_pieces, turn_begins
from bmoe_lab.plots.windows import Window, window_of
from bmoe_lab.schema import Action, Residency

__all__ = ["plot_expert_use"]

Bools = npt.NDArray[np.bool_]

# Uses drawn one by one; more are counted along the text.
_MAX_USES = 1000

# Name, colour, symbol, in the order of the legend.
_STYLES = (
    ("resident", theme.BLUE, "circle"),
    ("guessed by a prefetch", theme.GREEN, "diamond"),
    ("missed", theme.VERMILLION, "x"),
    ("missed and dropped", theme.ORANGE, "x-open"),
    ("replaced by another", theme.PURPLE, "square-open"),
    ("run as a substitute", theme.SKY, "triangle-up"),
    ("used", theme.BLUE, "circle"),
)


def plot_expert_use(
    trace: xr.Dataset,
    *,
    layer: int,
    expert: int,
    phase: PhaseName = "all",
    tokens: Window | None = None,
) -> go.Figure:
    """Return the tokens along the text for which a layer used one expert.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    layer : int
        Its number; negative from the end.
    expert : int
        Its id in that layer.
    phase : {"all", "prefill", "decode", "draft"}, default "all"
        Tokens counted.
    tokens : tuple of int, optional
        Part to draw as (first, stop), cut to the trace; the axis keeps the numbers of the whole.

    Returns
    -------
    plotly.graph_objects.Figure
        One marker per use, as high as its weight (its slot, if weights are unknown), by what became
        of it: resident, missed, dropped, replaced. More than 1,000 uses are drawn as shares of
        tokens. Customdata of a marker is the token's number.

    Raises
    ------
    SchemaError
        If the trace is empty, or the layer routed nothing there in that phase.
    SettingsError
        If there is no such layer or expert, or the window lies outside of the trace.
    UnknownNameError
        If `phase` is not one of the names above.

    See Also
    --------
    bmoe_lab.metrics.expert_pieces : The pieces of text that the expert is used on.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> figure = plot_expert_use(make_trace(n_token=8, n_layer=2, seed=0), layer=0, expert=8)
    >>> [(marks.name, len(marks.x)) for marks in figure.data]
    [('resident', 1), ('missed', 1)]
    """
    first, stop = window_of(trace, "token", tokens)
    layer, expert = _place(trace, "layer", layer), _expert_of(trace, expert)
    rows = _phase_rows(trace, phase)[first:stop]
    use = _Use(trace, layer, expert, first, stop, rows)
    if not use.n_routed:
        raise SchemaError(
            f"layer {layer} must have routed a token of phase {phase!r} from token {first} to "
            f"{stop - 1}; it did not. Choose another phase, layer or window."
        )
    phases, turns = phase_begins(trace, (first, stop)), turn_begins(trace, (first, stop))
    single = use.token.size <= _MAX_USES
    figure = theme.figure(
        title=f"Use of expert {expert} in layer {layer}" + ("" if phase == "all" else f", {phase}"),
        subtitle=" · ".join(part for part in (theme.run_note(trace.attrs), use.words()) if part),
        x_title="token (in the order decoded)",
        y_title=use.y_title if single else "tokens that use it (%)",
        height=420,
    )
    (_markers if single else _shares)(figure, use)
    figure.update_layout(showlegend=True)
    figure.update_xaxes(range=[first - 0.5, stop - 0.5], zeroline=False, hoverformat="d")
    mark_begins(figure, trace, phases, turns)
    if not use.token.size:
        figure.add_annotation(
            text="not used here", xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False
        )
    show_pieces(figure, trace, (first, stop))
    return figure


class _Use:
    """The uses of one expert within a window: token, height, and which style."""

    def __init__(
        self, trace: xr.Dataset, layer: int, expert: int, first: int, stop: int, rows: Bools
    ) -> None:
        where = {"token": slice(first, stop), "layer": layer}

        def values(name: str) -> npt.NDArray[Any]:
            return np.asarray(trace.variables[name].isel(where).values)

        chosen, applied, action = (
            values(name) for name in ("expert_chosen", "expert_applied", "action")
        )
        routed = (chosen >= 0) & rows[:, None]
        self.routed: Bools = np.asarray(routed.any(axis=-1))
        self.n_routed = int(self.routed.sum())
        wanted = routed & (chosen == expert)
        # A dropped slot runs a stand-in with weight 0: its applied expert means nothing.
        brought = routed & (applied == expert) & (chosen != expert) & (action != Action.dropped)
        token, self.slot = np.nonzero(wanted | brought)
        self.token = token + first
        self.first, self.stop = first, stop
        at = (token, self.slot)
        self.wanted = wanted[at]
        self.n_chosen = int(self.wanted.sum())
        self.n_first = int((self.slot[self.wanted] == 0).sum())
        residency = values("residency")[at] if "residency" in trace else None
        # The residency of a substituted slot is that of the expert that ran instead.
        own = self.wanted & (action[at] != Action.substituted)
        self.n_missed = (
            None if residency is None else int((own & (residency == Residency.miss)).sum())
        )
        self.style = self._styles(action[at], residency)
        self.y_title, self.height = "slot (0: the router's first choice)", self.slot.astype(float)
        self.weight: npt.NDArray[Any] | None = None
        if "weight_chosen" in trace:
            chosen_weight = values("weight_chosen")[at].astype(np.float64)
            weight = chosen_weight
            if "weight_applied" in trace:
                weight = np.where(self.wanted, chosen_weight, values("weight_applied")[at])
            if not np.isnan(weight).all() or not weight.size:
                self.y_title, self.height = "router's weight", weight
                self.weight = weight
        self.pieces: list[str] | None = None
        if "piece" in trace.coords:
            pieces = trace["piece"].variable.isel(token=slice(first, stop)).values
            self.pieces = [str(piece) for piece in pieces[token].tolist()]

    def _styles(
        self, action: npt.NDArray[Any], residency: npt.NDArray[Any] | None
    ) -> npt.NDArray[np.int64]:
        style = np.full(action.shape, 6)
        if residency is not None:
            style[residency == Residency.hit] = 0
            style[residency == Residency.hit_speculative] = 1
            style[residency == Residency.miss] = 2
        style[action == Action.dropped] = 3
        style[(action == Action.substituted) & self.wanted] = 4
        style[~self.wanted] = 5
        return style

    def words(self) -> str:
        """Return the counts for a subtitle."""
        share = 100 * self.n_chosen / self.n_routed
        parts = [f"chosen for {self.n_chosen:,} of {self.n_routed:,} tokens ({share:.3g} %)"]
        if self.n_chosen:
            parts.append(f"{self.n_first:,} as first choice")
        if self.n_missed is not None and self.n_chosen:
            parts.append(f"{self.n_missed:,} not resident")
        brought = int((~self.wanted).sum())
        if brought:
            parts.append(f"{brought:,} as a substitute")
        return ", ".join(parts)


def _markers(figure: go.Figure, use: _Use) -> None:
    for style, (name, color, symbol) in enumerate(_STYLES):
        at = np.flatnonzero(use.style == style)
        if not at.size:
            continue
        figure.add_trace(
            go.Scatter(
                x=use.token[at],
                y=use.height[at],
                customdata=use.token[at],
                text=[_hover(use, int(place)) for place in at],
                mode="markers",
                name=name,
                marker={
                    "color": color,
                    "symbol": symbol,
                    "size": 8,
                    "line": {"color": color, "width": 1.5},
                },
                hovertemplate=f"token %{{x}}%{{text}}<br>{name}<extra></extra>",
            )
        )
    if use.weight is None:
        figure.update_yaxes(autorange="reversed", dtick=1)
    else:
        figure.update_yaxes(rangemode="tozero")


def _hover(use: _Use, place: int) -> str:
    piece = "" if use.pieces is None else f" ‘{theme.escape(use.pieces[place])}’"
    weight = ""
    if use.weight is not None and not np.isnan(use.weight[place]):
        weight = f", weight {use.weight[place]:.3g}"
    return f"{piece}<br>slot {use.slot[place]}{weight}"


def _shares(figure: go.Figure, use: _Use) -> None:
    """Draw stacked shares of the routed tokens of each block that use the expert."""
    n_token = use.stop - use.first
    step = step_for(n_token, MAX_CELLS // 4)
    n_block = -(-n_token // step)
    routed = np.bincount(np.flatnonzero(use.routed) // step, minlength=n_block)
    middle = use.first + step * np.arange(n_block) + (step - 1) / 2
    for style, (name, color, _) in enumerate(_STYLES):
        at = use.style == style
        if not at.any():
            continue
        count = np.bincount((use.token[at] - use.first) // step, minlength=n_block)
        figure.add_trace(
            go.Bar(
                x=middle,
                y=100 * count / np.where(routed > 0, routed, np.nan),
                width=step,
                name=name,
                marker={"color": color, "line": {"width": 0}},
                hovertemplate=(
                    f"{step} tokens around %{{x:.0f}}<br>{name}: %{{y:.3~g}} %<extra></extra>"
                ),
            )
        )
    figure.update_layout(barmode="stack", bargap=0)
    figure.layout.title.subtitle.text += f" · shares of {step} tokens per bar"
