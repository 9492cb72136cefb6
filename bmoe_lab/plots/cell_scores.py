"""One cell: how the router scored the experts of a layer for one token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.plots import theme

__all__ = ["plot_cell_scores"]

NOT_CHOSEN = "not chosen"

# How a bar is filled; the pattern tells the groups apart in grey prints too.
_STYLES: dict[str, tuple[str, str]] = {
    NOT_CHOSEN: ("rgba(128,134,144,0.55)", ""),
    "chosen": (theme.BLUE, ""),
    "chosen, dropped": (theme.VERMILLION, "/"),
    "chosen, substituted": (theme.ORANGE, "\\"),
    "chosen, reweighted": (theme.PURPLE, "."),
    "substitute": (theme.GREEN, "x"),
}


@dataclass
class _Group:
    experts: list[int] = field(default_factory=list)
    heights: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)


def plot_cell_scores(
    trace: xr.Dataset, *, token: int, layer: int, order: Literal["id", "score"] = "id"
) -> go.Figure:
    """Return the router's scores of all experts of a layer for one token.

    Without recorded scores, the weights of the chosen experts only: those of the others are
    unknown, not zero.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    token : int
        Place along the trace; negative from the end.
    layer : int
        Its number; negative from the end.
    order : {"id", "score"}, default "id"
        Experts by id, or from the best to the worst.

    Returns
    -------
    plotly.graph_objects.Figure
        One bar per expert, grouped by what became of it: not chosen, chosen, dropped, substituted,
        reweighted, or run as a substitute.

    Raises
    ------
    SchemaError
        If the layer routed nothing for that token, or neither scores nor weights are known.
    SettingsError
        If the trace has no such token or layer.
    UnknownNameError
        If `order` is not one of the names above.

    See Also
    --------
    bmoe_lab.metrics.cell_slots : The slots of the cell as a table.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, n_expert=16, n_used=4, scores=True, seed=0)
    >>> [(bars.name, len(bars.x)) for bars in plot_cell_scores(trace, token=7, layer=0).data]
    [('not chosen', 12), ('chosen', 4)]
    """
    if order not in ("id", "score"):
        raise unknown_name("order", order, ["id", "score"])
    slots = metrics.cell_slots(trace, token=token, layer=layer)
    token, layer = int(slots.attrs["token"]), int(slots.attrs["layer"])
    heights, what, note = _heights(trace, slots, token, layer)
    groups = _groups(slots, heights)
    figure = theme.figure(
        title=f"{what[0].upper()}{what[1:]}: token {token}{_piece(trace, token)}, layer {layer}",
        subtitle=" · ".join(part for part in (note, theme.run_note(trace.attrs)) if part),
        x_title="expert id" if order == "id" else "expert, best first (id)",
        y_title=what,
        height=400,
    )
    ranked = sorted(heights, key=lambda expert: (-heights[expert], expert))
    place = {expert: at for at, expert in enumerate(ranked)}
    for name, group in groups.items():
        color, pattern = _STYLES[name]
        figure.add_trace(
            go.Bar(
                x=group.experts if order == "id" else [place[e] for e in group.experts],
                y=group.heights,
                name=name,
                customdata=group.experts,
                # plotly takes the width from the distance to the next bar of the same group.
                width=0.85,
                text=group.ranks,
                textposition="outside",
                textangle=0,
                constraintext="none",
                textfont={"color": theme.TEXT, "size": 11},
                cliponaxis=False,
                hovertext=group.texts,
                marker={
                    "color": color,
                    "line": {"width": 0},
                    "pattern": {"shape": pattern, "solidity": 0.35},
                },
                hovertemplate=f"expert %{{customdata}}, {name}<br>{what}: %{{y:.4~g}}"
                "%{hovertext}<extra></extra>",
            )
        )
    figure.update_layout(barmode="overlay", showlegend=True)
    _ticks(figure, trace, order, ranked)
    return figure


def _heights(
    trace: xr.Dataset, slots: xr.Dataset, token: int, layer: int
) -> tuple[dict[int, float], str, str]:
    """Return the height of every expert known, what it is, and what to say of it."""
    if "router_score" in trace.variables:
        score = trace.variables["router_score"].isel(token=token, layer=layer).values
        known = {
            expert: value
            for expert, value in enumerate(score.astype(np.float64).tolist())
            # A graph rules experts out with minus infinity.
            if np.isfinite(value)
        }
        note = f"{len(known)} experts scored; numbers: slots of the chosen ones"
        hidden = int(np.isneginf(score).sum())
        if hidden:
            note += f", {hidden} ruled out by the graph"
        if known:
            return known, "router score", note
    if "weight_chosen" in slots and not np.isnan(slots["weight_chosen"].values).all():
        pairs = zip(
            slots["expert_chosen"].values.tolist(),
            slots["weight_chosen"].values.tolist(),
            strict=True,
        )
        known = {int(e): float(w) for e, w in pairs if not np.isnan(w)}
        return known, "router weight", "of the chosen experts; no scores recorded; numbers: slots"
    raise SchemaError(
        "trace must hold 'router_score' or 'weight_chosen' for this cell; got neither. "
        "Record them with record='scores', as in session.generate(prompt, record='scores')."
    )


def _groups(slots: xr.Dataset, heights: dict[int, float]) -> dict[str, _Group]:
    """Return the experts with what became of them."""
    groups = {name: _Group() for name in _STYLES}
    told: dict[int, tuple[str, str, str]] = {}
    for slot, rank in enumerate(slots["slot"].values.tolist()):
        at = slots.isel(slot=slot)
        chosen, applied = int(at["expert_chosen"]), int(at["expert_applied"])
        action = str(at["action"].values)
        name = "chosen" if action == "kept" else f"chosen, {action}"
        told[chosen] = (name, _words(at, rank), str(rank))
        if action == "substituted":
            told.setdefault(applied, ("substitute", f"<br>instead of expert {chosen}", ""))
    for expert, height in heights.items():
        name, text, rank = told.get(expert, (NOT_CHOSEN, "", ""))
        groups[name].experts.append(expert)
        groups[name].heights.append(height)
        groups[name].texts.append(text)
        groups[name].ranks.append(rank)
    return {name: group for name, group in groups.items() if group.experts}


def _words(slot: xr.Dataset, rank: int) -> str:
    parts = [f"slot {rank}"]
    if "weight_chosen" in slot and not np.isnan(float(slot["weight_chosen"])):
        parts.append(f"weight {float(slot['weight_chosen']):.4g}")
    residency = str(slot["residency"].values).replace("_", " ") if "residency" in slot else ""
    if str(slot["action"].values) == "substituted":
        # The residency of a substituted slot is that of the expert that ran.
        instead = f"expert {int(slot['expert_applied'])} ran instead"
        residency = f"{instead} ({residency})" if residency else instead
    if residency:
        parts.append(residency)
    return "<br>" + ", ".join(parts)


def _piece(trace: xr.Dataset, token: int) -> str:
    if "piece" not in trace.coords:
        return ""
    piece = str(trace["piece"].variable.isel(token=token).values)
    return f" ‘{piece if len(piece) <= 24 else piece[:23] + '…'}’"


def _ticks(figure: go.Figure, trace: xr.Dataset, order: str, ranked: list[int]) -> None:
    n_expert = int(trace.attrs.get("n_expert", max(ranked) + 1))
    if order == "id":
        axis: dict[str, Any] = {"range": [-0.6, n_expert - 0.4]}
        if n_expert <= 32:
            axis["dtick"] = 1 if n_expert <= 16 else 2
    else:
        every = -(-len(ranked) // 16)
        axis = {
            "range": [-0.6, len(ranked) - 0.4],
            "tickvals": list(range(0, len(ranked), every)),
            "ticktext": [str(expert) for expert in ranked[::every]],
            "tickangle": 0,
        }
    figure.update_xaxes(**axis, showgrid=False, zeroline=False)
