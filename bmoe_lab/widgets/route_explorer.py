"""A trace to look into: map, text, cells, experts, layers, linked."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import traitlets
import xarray as xr

from bmoe_lab.errors import SettingsError, unknown_name
from bmoe_lab.metrics._shared import _n_expert
from bmoe_lab.metrics.cells import _place
from bmoe_lab.plots.heatmap_values import heatmap_values
from bmoe_lab.plots.windows import Window, window_of
from bmoe_lab.schema import Phase, validate
from bmoe_lab.widgets.cell_panel import CellPanel
from bmoe_lab.widgets.controls import ROW
from bmoe_lab.widgets.expert_panel import ExpertPanel
from bmoe_lab.widgets.layers_panel import LayersPanel
from bmoe_lab.widgets.map_panel import MapPanel
from bmoe_lab.widgets.selection import Selection
from bmoe_lab.widgets.trace_summary import TraceSummary

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RouteExplorer"]

TABS = ("Map", "Expert", "Layers")
_STATE = ("value", "phase", "tokens", "layers", "cell", "expert", "tab")


class RouteExplorer(ipywidgets.VBox):
    """Look into a trace: is there a hot set, which layers miss, what did the policy change.

    Zooming into the map draws finer cells of that part and moves the sliders, and the other way
    round. A click on a cell or on the text shows the cell's slots; a click on one of its bars, the
    use of that expert. Everything is a trait: it can be driven, and read, without a browser.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace, in memory or opened from a file; it is only read, and only where looked at.

    Attributes
    ----------
    value : str or None
        What a cell of the map shows (:func:`bmoe_lab.plots.heatmap_values.heatmap_values`); None if
        the trace can show nothing.
    phase : {"all", "prefill", "decode", "draft"}
    tokens, layers : tuple of int
        Part looked at as (first, stop), cut to the trace.
    cell : tuple of int or None
        Token and layer of the cell in the panel.
    expert : tuple of int or None
        Layer and expert of the tab "Expert".
    tab : int
        0 map, 1 expert, 2 layers; a tab is drawn when it is open.
    map_panel, cell_panel, expert_panel, layers_panel, summary
        Its parts, with their figures.

    Raises
    ------
    SchemaError
        If `trace` is no trace.
    SettingsError
        If a trait is set to what the trace does not have.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> explorer = RouteExplorer(bl.testing.make_trace(n_token=8, n_layer=2, seed=0))
    >>> explorer.tokens = (4, 8)
    >>> explorer.cell = (7, 1)
    >>> explorer.slots["expert_chosen"].tolist()
    [5, 8, 1, 9]
    >>> print(explorer.code)
    ds.moe.plot.heatmap(value='misses', tokens=(4, 8), layers=(0, 2), phase='all')
    ds.moe.plot.cell_scores(token=7, layer=1)
    >>> explorer.window.sizes["token"]
    4
    """

    value = traitlets.Unicode(None, allow_none=True)
    phase = traitlets.Unicode("all")
    tokens = traitlets.Any((0, 0))
    layers = traitlets.Any((0, 0))
    cell = traitlets.Any(None, allow_none=True)
    expert = traitlets.Any(None, allow_none=True)
    tab = traitlets.Int(0)

    def __init__(self, trace: xr.Dataset) -> None:
        if trace.sizes.get("token", 0):  # an empty one is shown as such
            validate(trace, values=False)
        self._trace = trace
        self._values = heatmap_values(trace)
        self._n_expert = _n_expert(trace)
        self._ready = False
        super().__init__()
        self.tokens, self.layers = (0, trace.sizes["token"]), (0, trace.sizes["layer"])
        self.value = next(iter(self._values), None)
        self.summary = TraceSummary(trace)
        self.map_panel = MapPanel(trace, on_window=self._zoom, on_cell=self._point)
        self.cell_panel = CellPanel(trace, on_cell=self._point, on_expert=self._take_expert)
        self.expert_panel = ExpertPanel(
            trace, n_expert=self._n_expert, on_expert=self._take_expert, on_cell=self._point
        )
        self.layers_panel = LayersPanel(trace)
        self._code = ipywidgets.HTML()
        self._tabs = ipywidgets.Tab(
            [
                ipywidgets.VBox([self.map_panel, self.cell_panel]),
                self.expert_panel,
                self.layers_panel,
            ]
        )
        for number, title in enumerate(TABS):
            self._tabs.set_title(number, title)
        traitlets.link((self, "tab"), (self._tabs, "selected_index"))
        self.children = [self.summary, *self._controls(), self._tabs, self._code]
        self._ready = True
        self.observe(lambda change: self._refresh(), _STATE)
        self._refresh()

    def _controls(self) -> list[Any]:
        wide = {"description_width": "initial"}
        value = ipywidgets.Dropdown(
            options=[(label, name) for name, label in self._values.items()],
            description="a cell shows",
            tooltip="what the colours of the map tell",
            style=wide,
        )
        present = np.unique(self._trace["phase"].values).tolist()
        phases = [phase.name for phase in Phase if phase.value in present]
        phase = ipywidgets.Dropdown(
            options=["all", *phases],
            description="phase",
            tooltip="prefill: the prompt, many tokens at once; decode: one token at a time",
            style=wide,
            layout=ipywidgets.Layout(width="170px"),
        )
        traitlets.link((self, "value"), (value, "value"))
        phase.value = self.phase
        phase.observe(lambda change: self.set_trait("phase", change.new), "value")
        # Not a link: from code, a phase may be asked for that the trace does not have.
        self.observe(
            lambda change: change.new in phase.options and phase.set_trait("value", change.new),
            "phase",
        )
        buttons = []
        for name, tip, act in (
            ("◀ earlier", "tokens before these, half of them new", lambda _: self._shift(-1)),
            ("later ▶", "tokens after these, half of them new", lambda _: self._shift(1)),
            ("whole trace", "all tokens and layers", lambda _: self._whole()),
        ):
            button = ipywidgets.Button(
                description=name, tooltip=tip, layout=ipywidgets.Layout(width="auto")
            )
            button.on_click(act)
            buttons.append(button)
        sliders = [
            slider
            for name in ("tokens", "layers")
            if (slider := self._slider(name, self._trace.sizes[name.removesuffix("s")]))
        ]
        return [
            ipywidgets.HBox([value, phase, *buttons], layout=ROW),
            ipywidgets.HBox(sliders, layout=ROW),
        ]

    def _slider(self, name: str, size: int) -> Any:
        """Return a slider from the first to the last; None where there is nothing to choose."""
        if size < 2:
            return None
        slider = ipywidgets.IntRangeSlider(
            value=(0, size - 1),
            min=0,
            max=size - 1,
            description=name,
            tooltip=f"first and last of the {name} looked at; arrow keys move one end",
            style={"description_width": "initial"},
            layout=ipywidgets.Layout(width="430px" if name == "tokens" else "330px"),
        )

        def moved(change: Any) -> None:
            setattr(self, name, (change.new[0], change.new[1] + 1))

        def follow(change: Any) -> None:
            slider.value = (change.new[0], change.new[1] - 1)

        slider.observe(moved, "value")
        self.observe(follow, name)
        return slider

    # -- what may be set -----------------------------------------------------------------------

    @traitlets.validate("value")
    def _check_value(self, proposal: Any) -> Any:
        value = proposal["value"]
        if value not in self._values and (value is not None or self._values):
            raise unknown_name("value", value, self._values)
        return value

    @traitlets.validate("phase")
    def _check_phase(self, proposal: Any) -> Any:
        known = ["all", *(phase.name for phase in Phase)]
        if proposal["value"] not in known:
            raise unknown_name("phase", proposal["value"], known)
        return proposal["value"]

    @traitlets.validate("tokens", "layers")
    def _check_window(self, proposal: Any) -> Window:
        dim = proposal["trait"].name.removesuffix("s")
        if not self._trace.sizes[dim]:
            return 0, 0
        return window_of(self._trace, dim, proposal["value"])

    @traitlets.validate("cell")
    def _check_cell(self, proposal: Any) -> Any:
        pair = _pair("cell", "token, layer", proposal["value"])
        if pair is None:
            return None
        return _place(self._trace, "token", pair[0]), _place(self._trace, "layer", pair[1])

    @traitlets.validate("expert")
    def _check_expert(self, proposal: Any) -> Any:
        from bmoe_lab.metrics.experts import _expert_of

        pair = _pair("expert", "layer, expert", proposal["value"])
        if pair is None:
            return None
        return _place(self._trace, "layer", pair[0]), _expert_of(self._trace, pair[1])

    # -- what a person does --------------------------------------------------------------------

    def _zoom(self, tokens: Window | None, layers: Window | None) -> None:
        with self.hold_trait_notifications():
            self.tokens = tokens or self.tokens
            self.layers = layers or self.layers
        self._refresh()

    def _whole(self) -> None:
        self._zoom((0, self._trace.sizes["token"]), (0, self._trace.sizes["layer"]))

    def _shift(self, sign: int) -> None:
        """Move the tokens by half of their number, and keep that number."""
        first, stop = self.tokens
        n, size = stop - first, self._trace.sizes["token"]
        if not size:
            return
        first = min(max(0, first + sign * max(1, n // 2)), size - n)
        self.tokens = (first, first + n)

    def _point(self, token: int, layer: int | None) -> None:
        if layer is None:
            layer = self.layers[0] if self.cell is None else self.cell[1]
        self.cell = (token, layer)

    def _take_expert(self, layer: int, expert: int) -> None:
        self.expert = (layer, expert)

    # -- what is shown -------------------------------------------------------------------------

    def _selection(self) -> Selection:
        phase: Any = self.phase  # checked where it was set
        return Selection(self.value, phase, self.tokens, self.layers, self.cell, self.expert)

    def _refresh(self) -> None:
        """Draw what has changed in the open tab."""
        if not self._ready:
            return
        selection = self._selection()
        if self.tab == 0:
            self.map_panel.refresh(selection)
            self.cell_panel.refresh(self.cell)
        elif self.tab == 1:
            self.expert_panel.refresh(selection)
        elif self.tab == 2:
            self.layers_panel.refresh(selection)
        if self.expert is not None:
            # Says that a clicked bar did something, without leaving what is looked at.
            self._tabs.set_title(1, f"Expert {self.expert[1]}")
        code = escape(self.code)
        self._code.value = (
            "<details><summary>this in code</summary>"
            f"<pre style='white-space:pre-wrap'>{code}</pre></details>"
        )

    @property
    def slots(self) -> pd.DataFrame | None:
        """Slots of :attr:`cell` (:func:`bmoe_lab.widgets.cell_panel.cell_table`); None if none."""
        self.cell_panel.refresh(self.cell)
        return self.cell_panel.slots

    @property
    def window(self) -> xr.Dataset:
        """The part of the trace that is looked at: its tokens, its layers, its phase."""
        return self._selection().cut(self._trace)

    @property
    def code(self) -> str:
        """Calls that make the figures of the open tab, for a trace called ``ds``."""
        calls = []
        phase, tokens = f"phase={self.phase!r}", f"tokens={self.tokens!r}"
        if self.tab == 0:
            if self.value is not None:
                calls.append(
                    f"ds.moe.plot.heatmap(value={self.value!r}, {tokens}, "
                    f"layers={self.layers!r}, {phase})"
                )
            if self.cell is not None:
                token, layer = self.cell
                calls.append(f"ds.moe.plot.cell_scores(token={token}, layer={layer})")
        elif self.tab == 1 and self.expert is not None:
            layer, expert = self.expert
            calls.append(
                f"ds.moe.plot.expert_use(layer={layer}, expert={expert}, {phase}, {tokens})"
            )
        elif self.tab == 2:
            part = f"ds.isel(token=slice{self.tokens!r})"
            calls += [f"{part}.moe.plot.{name}({phase})" for name in ("hit_rate", "expert_load")]
        return "\n".join(calls)

    def __repr__(self) -> str:
        n_token, n_layer = self._trace.sizes["token"], self._trace.sizes["layer"]
        return f"<RouteExplorer: {n_token} tokens x {n_layer} layers>"


def _pair(name: str, parts: str, given: Any) -> Any:
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise SettingsError(f"{name} must be ({parts}) or None; got {given!r}. Give both numbers.")
    return given
