"""One expert of one layer: where along the text it is used, and on which pieces."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import BmoeLabError
from bmoe_lab.plots.expert_use import plot_expert_use
from bmoe_lab.widgets.controls import ROW, PairControl
from bmoe_lab.widgets.drawing import Drawing
from bmoe_lab.widgets.html_table import html_table
from bmoe_lab.widgets.selection import Selection

__all__ = ["ExpertPanel"]

_MAX_PIECES = 20
_NONE = "No expert chosen: click a bar of a cell's scores, or give layer and expert here."


class ExpertPanel(ipywidgets.VBox):
    """Use of one expert within the tokens that are looked at.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    n_expert : int
        Experts per layer.
    on_expert : callable
        Takes layer and expert, when they are given by keyboard.
    on_cell : callable
        Takes token and layer, when a use is clicked.

    Attributes
    ----------
    use : Drawing
        Where it is used.
    control : PairControl
        Layer and expert.
    pieces : xarray.Dataset or None
        What the table shows; None without an expert, or without text.
    """

    def __init__(
        self,
        trace: xr.Dataset,
        *,
        n_expert: int,
        on_expert: Callable[[int, int], None],
        on_cell: Callable[[int, int], None],
    ) -> None:
        self._trace = trace
        self._on_cell = on_cell
        self._expert: tuple[int, int] | None = None
        self.pieces: xr.Dataset | None = None
        self.use = Drawing()
        self.use.view.observe(self._pointed, "clicked")
        self.control = PairControl(("layer", "expert"), (trace.sizes["layer"], n_expert), on_expert)
        button = ipywidgets.Button(
            description="show expert",
            tooltip="show where the expert whose numbers are given is used",
            disabled=not trace.sizes["layer"] or not n_expert,
            layout=ipywidgets.Layout(width="auto"),
        )
        button.on_click(lambda _: self.control.tell())
        self._text = ipywidgets.HTML(f"<i>{_NONE}</i>")
        self._figure = ipywidgets.VBox([])
        super().__init__(
            [ipywidgets.HBox([self.control, button], layout=ROW), self._figure, self._text]
        )

    def refresh(self, selection: Selection) -> None:
        """Draw what has changed."""
        self._expert = selection.expert
        self.control.show(selection.expert)
        if selection.expert is None:
            return
        layer, expert = selection.expert
        key = (selection.expert, selection.phase, selection.tokens)
        if not self.use.update(
            key,
            lambda: plot_expert_use(
                self._trace,
                layer=layer,
                expert=expert,
                phase=selection.phase,
                tokens=selection.tokens,
            ),
        ):
            return
        self._figure.children = (self.use.view,)
        try:
            part = selection.rows(self._trace, phase=False)
            self.pieces = metrics.expert_pieces(
                part, layer=layer, expert=expert, phase=selection.phase
            )
            self._text.value = _shown(self.pieces, selection.phase)
        except BmoeLabError as error:
            self.pieces = None
            self._text.value = escape(str(error))

    def _pointed(self, change: Any) -> None:
        figure = self.use.figure
        if figure is None or self._expert is None or "index" not in change.new:
            return
        # Uses counted along the text are no single tokens, and carry no numbers.
        numbers = figure.data[change.new["curve"]].customdata
        if numbers is not None:
            self._on_cell(int(numbers[change.new["index"][0]]), self._expert[0])


def _shown(pieces: xr.Dataset, phase: str) -> str:
    count = pieces[f"expert_piece_count_{phase}"].values.tolist()
    if not count:
        return "The expert is not used on any of these tokens."
    rows = [
        [f"‘{piece}’", f"{used:.0f}", f"{overall:.0f}", f"{lift:.2f}"]
        for piece, used, overall, lift in zip(
            pieces["piece"].values.tolist()[:_MAX_PIECES],
            count,
            pieces[f"piece_count_{phase}"].values.tolist(),
            pieces[f"expert_piece_lift_{phase}"].values.tolist(),
            strict=False,
        )
    ]
    more = len(count) - len(rows)
    note = f"<div>and {more:,} other pieces</div>" if more > 0 else ""
    head = ["piece", "uses", "of", "times chance"]
    return f"<b>Pieces that it is used on</b>{html_table(head, rows, left=1)}{note}"
