"""One cell of a trace: its slots in a table, its scores in a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import BmoeLabError
from bmoe_lab.plots.cell_scores import plot_cell_scores
from bmoe_lab.sizes import format_size
from bmoe_lab.widgets.controls import ROW, PairControl
from bmoe_lab.widgets.drawing import Drawing
from bmoe_lab.widgets.html_table import html_table

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CellPanel", "cell_table"]

_NONE = "no cell chosen: click one in the map, click a token, or give its numbers here"

# Columns of :func:`cell_table` as they are shown.
_COLUMNS = {
    "expert_chosen": "expert",
    "weight_chosen": "weight",
    "action": "action",
    "expert_applied": "ran",
    "weight_applied": "weight that ran",
    "residency": "residency",
    "read_bytes": "read",
    "tokens_ago": "tokens since last use",
    "evaluations_ago": "evaluations since",
}


def cell_table(trace: xr.Dataset, token: int, layer: int) -> pd.DataFrame:
    """Return the slots of a cell with when the layer last used their experts.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    token, layer : int
        The cell.

    Returns
    -------
    pandas.DataFrame
        One row per slot that routed: the variables of :func:`bmoe_lab.metrics.cell_slots` and of
        :func:`bmoe_lab.metrics.cell_history` (of the chosen experts).

    Raises
    ------
    SchemaError
        If the trace is empty, or the layer routed nothing for that token.
    SettingsError
        If the trace has no such token or layer.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> table = cell_table(make_trace(n_token=8, n_layer=2, n_used=2, seed=0), 7, 1)
    >>> table["tokens_ago"].tolist()
    [1.0, 1.0]
    """
    slots = metrics.cell_slots(trace, token=token, layer=layer).to_dataframe()
    history = metrics.cell_history(trace, token=token, layer=layer).drop_vars("expert")
    return slots.join(history.to_dataframe())


class CellPanel(ipywidgets.VBox):
    """What one layer did for one token.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    on_cell : callable
        Takes token and layer, when they are given by keyboard.
    on_expert : callable
        Takes layer and expert, when the bar of an expert is clicked.

    Attributes
    ----------
    scores : Drawing
        The scores of the layer's experts.
    control : PairControl
        Token and layer.
    slots : pandas.DataFrame or None
        What the table shows; None without a cell, or if nothing was routed there.
    """

    def __init__(
        self,
        trace: xr.Dataset,
        *,
        on_cell: Callable[[int, int], None],
        on_expert: Callable[[int, int], None],
    ) -> None:
        self._trace = trace
        self._on_expert = on_expert
        self._cell: tuple[int, int] | None = None
        self.slots: pd.DataFrame | None = None
        self.scores = Drawing()
        self.scores.view.observe(self._pointed, "clicked")
        self.control = PairControl(
            ("token", "layer"), (trace.sizes["token"], trace.sizes["layer"]), on_cell
        )
        button = ipywidgets.Button(
            description="show cell",
            tooltip="show the slots of the cell whose numbers are given",
            disabled=0 in (trace.sizes["token"], trace.sizes["layer"]),
            layout=ipywidgets.Layout(width="auto"),
        )
        button.on_click(lambda _: self.control.tell())
        self._text = ipywidgets.HTML(f"<i>{_NONE}</i>")
        self._figure = ipywidgets.VBox([])
        super().__init__(
            [
                ipywidgets.HBox([ipywidgets.HTML("<b>cell</b>"), self.control, button], layout=ROW),
                self._text,
                self._figure,
            ]
        )

    def refresh(self, cell: tuple[int, int] | None) -> None:
        """Show `cell`, if it is another one."""
        if cell == self._cell:
            return
        self._cell = cell
        self.control.show(cell)
        self.slots = None
        if cell is None:
            self._text.value = f"<i>{_NONE}</i>"
            self._figure.children = ()
            return
        token, layer = cell
        try:
            self.slots = cell_table(self._trace, token, layer)
        except BmoeLabError as error:
            self._text.value = escape(str(error))
            self._figure.children = ()
            return
        self._text.value = _shown(self.slots)
        self.scores.update(cell, lambda: plot_cell_scores(self._trace, token=token, layer=layer))
        self._figure.children = (self.scores.view,)

    def _pointed(self, change: Any) -> None:
        if self._cell is not None and self.scores.figure is not None and "x" in change.new:
            self._on_expert(self._cell[1], int(change.new["x"]))


def _shown(slots: pd.DataFrame) -> str:
    """Return the table for a page; what ran is left out where all slots ran as chosen."""
    columns = {name: title for name, title in _COLUMNS.items() if name in slots}
    if (slots["action"] == "kept").all():
        columns = {name: t for name, t in columns.items() if not name.endswith("_applied")}
    rows = [
        [str(slot), *(_word(name, row[name]) for name in columns)] for slot, row in slots.iterrows()
    ]
    return html_table(["slot", *columns.values()], rows)


def _word(name: str, value: Any) -> str:
    if name.endswith("_ago"):
        return "never before" if math.isnan(value) else f"{value:,.0f}"
    if name == "read_bytes":
        return format_size(int(value)) if value else "0"
    if name.startswith("weight"):
        return "unknown" if math.isnan(value) else f"{value:.4f}"
    return str(value).replace("_", " ")
