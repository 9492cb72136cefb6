"""Native controls for a pair of whole numbers, such as a cell's token and layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

__all__ = ["ROW", "PairControl"]

ROW = ipywidgets.Layout(flex_flow="row wrap", align_items="center")
"""Layout of a row that breaks where the page is narrow."""


class PairControl(ipywidgets.HBox):
    """Two number boxes that are set and read as one.

    Parameters
    ----------
    names : tuple of str
        What the numbers are.
    sizes : tuple of int
        Each number is below its size.
    on_pair : callable
        Takes both numbers when a person changes one.

    Examples
    --------
    >>> pair = PairControl(("token", "layer"), (8, 2), lambda token, layer: print(token, layer))
    >>> pair.show((3, 1))
    >>> pair.boxes[0].value = 4
    4 1
    """

    def __init__(
        self,
        names: tuple[str, str],
        sizes: tuple[int, int],
        on_pair: Callable[[int, int], None],
    ) -> None:
        self._on_pair = on_pair
        self._showing = False
        self.boxes = tuple(
            ipywidgets.BoundedIntText(
                value=0,
                min=0,
                max=max(0, size - 1),
                description=name,
                disabled=size < 1,
                style={"description_width": "initial"},
                layout=ipywidgets.Layout(width="150px"),
            )
            for name, size in zip(names, sizes, strict=True)
        )
        for box in self.boxes:
            box.observe(self._changed, "value")
        super().__init__(self.boxes, layout=ROW)

    def show(self, pair: tuple[int, int] | None) -> None:
        """Show `pair` without telling of a change; None leaves what is there."""
        if pair is None:
            return
        self._showing = True
        try:
            for box, number in zip(self.boxes, pair, strict=True):
                box.value = number
        finally:
            self._showing = False

    def tell(self) -> None:
        """Act as if a person had just set what is shown."""
        self._on_pair(self.boxes[0].value, self.boxes[1].value)

    def _changed(self, change: Any) -> None:
        if not self._showing:
            self.tell()
