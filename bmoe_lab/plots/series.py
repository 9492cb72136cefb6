"""The runs of a figure: their labels, colours, dashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xarray as xr

from bmoe_lab.comparison.tree import runs
from bmoe_lab.plots import theme

__all__ = ["Series", "series_of"]


@dataclass(frozen=True)
class Series:
    """One run in a figure.

    Attributes
    ----------
    label : str
        Name with "lossy" or "control" said; not escaped.
    trace : xarray.Dataset
    row : int
        Row in the comparison's table; 0 for a single trace.
    kind : str
        ``lossless``, ``policy``, ``control``, or ``trace`` outside a comparison.
    color, symbol : str
    """

    label: str
    trace: xr.Dataset
    row: int
    kind: str
    color: str
    symbol: str

    @property
    def line(self) -> dict[str, Any]:
        """Line style: controls are dotted in the colour of what they control."""
        dash = "dot" if self.kind == "control" else "solid"
        return {"color": self.color, "width": 2, "dash": dash}

    @property
    def marker(self) -> dict[str, Any]:
        """Marker style: controls are hollow."""
        symbol = f"{self.symbol}-open" if self.kind == "control" else self.symbol
        line = {"width": 2, "color": self.color}
        return {"color": self.color, "symbol": symbol, "size": 8, "line": line}


def series_of(data: xr.Dataset | xr.DataTree) -> list[Series]:
    """Return the runs to draw; the noise floor is left out, it lies on the lossless run.

    Raises
    ------
    SchemaError
        If a tree is not a comparison.
    """
    if isinstance(data, xr.Dataset):
        color, symbol = theme.series_style(0)
        label = str(data.attrs.get("policy", "trace"))
        return [Series(label, data, 0, "trace", color, symbol)]
    named = runs(data)
    table = data.to_dataset()
    kinds = [str(kind) for kind in table["arm_kind"].values]
    owners = table["control_of"].values.tolist()
    styles: dict[int, tuple[str, str]] = {}
    shown = []
    for row, (name, trace) in enumerate(named):
        kind = kinds[row]
        if kind == "noise floor":
            continue
        owner = owners[row] if kind == "control" and owners[row] in styles else row
        if owner == row:
            styles[row] = theme.series_style(len(styles))
        marks = {"policy": "lossy", "control": "control"}
        label = f"{name} ({marks[kind]})" if kind in marks else name
        if table["fired"].values[row] == 0:
            label += ", never fired"
        shown.append(Series(label, trace, row, kind, *styles[owner]))
    return shown
