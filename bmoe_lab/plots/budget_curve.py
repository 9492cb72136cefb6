"""What caches of many policies would hit, over their size: the bounds and the cliff."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.plots import theme

__all__ = ["plot_budget_curve"]

# The curves that stand out: how a sweep labels them, by name and by repr, and their style.
_SPECIAL = {
    "lru": (("lru", "LRU()"), 0),
    "belady": (("belady", "Belady()"), 2),
    "stationary_oracle": (("stationary_oracle", "StationaryOracle()"), 3),
}
OTHERS = "other online policies"
_NAMES = {
    "lru": "LRU",
    "belady": "Belady (knows the future; exact for equal sizes)",
    "stationary_oracle": "stationary oracle (best fixed set, there from the start)",
}


def plot_budget_curve(
    sweep: xr.Dataset,
    *,
    trace: str | None = None,
    routing: str | None = None,
    phase: PhaseName = "decode",
) -> go.Figure:
    """Return hit rate over cache size: LRU, the best online policy, and the bounds.

    What the best online policy leaves between LRU and Belady is what a better policy could still
    gain; where the stationary oracle is as high as LRU, a fixed set of experts would do as well.
    A better hit rate is not yet speed: reads that overlap cost nothing, management does.

    Parameters
    ----------
    sweep : xarray.Dataset
        What :func:`bmoe_lab.sweep` returned; dims (trace, residency, budget, routing).
    trace : str, optional
        Which trace; needed where there are several.
    routing : str, optional
        Which routing policy's label; the first one by default.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted; must have been swept.

    Returns
    -------
    plotly.graph_objects.Figure
        The other online policies are thin grey lines; one that may hold more than the budget is
        never the best. A dashed line marks the token cycle, below
        which a global LRU hits nothing in decode.

    Raises
    ------
    SchemaError
        If `sweep` is not a sweep, or nothing was looked up in that phase, or it was not swept.
    SettingsError
        If there are several traces and none is chosen.
    UnknownNameError
        If `trace` or `routing` is not in it.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> made = bl.testing.make_trace(n_token=40, n_layer=2, seed=0)
    >>> sizes = bl.budgets(made, n=4)
    >>> grid = bl.sweep(made, residency=["lru", "lfu"], budgets=sizes, progress=False)
    >>> [line.name for line in plot_budget_curve(grid).data]
    ['other online policies', 'best online policy', 'LRU']
    """
    variable = f"hit_rate_{phase}"
    missing = {"trace", "residency", "budget", "routing"} - set(sweep.dims)
    if missing or variable not in sweep:
        raise SchemaError(
            f"sweep must be what bmoe_lab.sweep returned, with {variable!r}; got the dims "
            f"{sorted(map(str, sweep.dims))} and {sorted(map(str, sweep.data_vars))}. "
            f"Sweep with phase={phase!r}."
        )
    chosen = _chosen(sweep, "trace", trace)
    acting = _chosen(sweep, "routing", routing, default=str(sweep["routing"].values[0]))
    shown = sweep.sel(trace=chosen, routing=acting)
    rates = shown[variable].dropna("budget", how="all")
    if not rates["budget"].size:
        raise SchemaError(
            f"sweep must hold a lookup in phase {phase!r} of {chosen!r}; got none. "
            "Choose another phase or trace."
        )
    unit, unit_name = theme.byte_unit(float(rates["budget"].max()))
    size = rates["budget"].values / unit
    cycle = float(shown["token_cycle_bytes"]) / unit
    figure = theme.figure(
        title=f"Hit rate over cache size, {phase}",
        subtitle=" · ".join(_notes(sweep, chosen, acting)),
        x_title=f"cache ({unit_name})",
        y_title="hit rate (% of lookups)",
        height=560,
    )
    online = [
        name
        for name, is_online in zip(
            rates["residency"].values.tolist(), shown["online"].values.tolist(), strict=True
        )
        if is_online
    ]
    special = {
        label: (name, place)
        for name, (spellings, place) in _SPECIAL.items()
        for label in rates["residency"].values.tolist()
        if label in spellings
    }
    for name in online:
        if name not in special:
            _line(
                figure,
                size,
                rates.sel(residency=name),
                str(name),
                theme.GREY,
                width=1,
                group=OTHERS,
            )
    # What holds more than the budget is no fair best.
    fair = [name for name in online if int(shown["keeps_budget"].sel(residency=name))]
    best = rates.sel(residency=fair)
    if len(fair) > 1:
        which = best.fillna(-1.0).argmax("residency").values
        names = [str(fair[i]) for i in which]
        color, _ = theme.series_style(1)
        _line(
            figure, size, best.max("residency"), "best online policy", color, width=3, names=names
        )
    offline = [label for label in rates["residency"].values.tolist() if label not in online]
    # Another bound, such as an oracle of a given profile, has its own label.
    for label in [*special, *(label for label in offline if label not in special)]:
        if rates.sel(residency=label).notnull().any():
            name, place = special.get(label, (label, 4))
            color, _ = theme.series_style(place)
            _line(
                figure,
                size,
                rates.sel(residency=label),
                _NAMES.get(name, name),
                color,
                width=2.5,
                dash="dash" if label in offline else "solid",
            )
    figure.add_vline(x=cycle, line={"color": theme.TEXT, "width": 1.5, "dash": "dot"})
    figure.add_annotation(
        x=float(np.log10(cycle)),  # of a logarithmic axis plotly wants the exponent
        y=100,
        text=f"token cycle {cycle:.3g} {unit_name}",
        xanchor="right",
        showarrow=False,
    )
    ticks = 2.0 ** np.arange(np.floor(np.log2(size[0])), np.ceil(np.log2(size[-1])) + 1)
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    figure.update_yaxes(range=[-2, 104])
    return figure


def _chosen(sweep: xr.Dataset, dim: str, name: str | None, default: str | None = None) -> str:
    names = [str(value) for value in sweep[dim].values]
    if name is None:
        if default is not None:
            return default
        if len(names) > 1:
            raise SettingsError(
                f"{dim} must be chosen where a sweep holds several; got none of {names}. "
                f"Pass {dim}={names[0]!r}."
            )
        return names[0]
    if name not in names:
        raise unknown_name(dim, name, names)
    return name


def _notes(sweep: xr.Dataset, trace: str, routing: str) -> list[str]:
    notes = [trace]
    if int(sweep["counterfactual"].sel(routing=routing)):
        notes.append(f"{routing}, counterfactual (open loop)")
    if not int(sweep.attrs.get("complete", 1)):
        notes.append("interrupted: what is missing is not drawn")
    notes.append("one lookup per distinct expert, layer and evaluation")
    return notes


def _line(
    figure: go.Figure,
    size: np.ndarray,
    rate: xr.DataArray,
    name: str,
    color: str,
    *,
    width: float,
    dash: str = "solid",
    names: list[str] | None = None,
    group: str | None = None,
) -> None:
    # One entry in the legend stands for a group; its lines still name themselves under the mouse.
    first = group is None or all(line.legendgroup != group for line in figure.data)
    figure.add_trace(
        go.Scatter(
            x=size,
            y=100 * rate.values,
            customdata=names,
            mode="lines",
            name=theme.escape(group or name),
            legendgroup=group,
            showlegend=first,
            line={"color": color, "width": width, "dash": dash},
            hovertemplate=(
                f"{theme.escape(name)}"
                + (" (%{customdata})" if names else "")
                + "<br>%{x:.4g}<br>%{y:.1f} % of lookups<extra></extra>"
            ),
        )
    )
