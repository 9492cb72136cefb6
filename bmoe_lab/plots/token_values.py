"""What the background of a token can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.plots.heatmap_values import VALUES as CELL_VALUES
from bmoe_lab.plots.heatmap_values import heatmap_cells, heatmap_values
from bmoe_lab.plots.windows import Window

__all__ = ["VALUES", "TokenValue", "token_values", "values_of"]

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenValue:
    """One thing that a token can show.

    Attributes
    ----------
    label : str
        What it is, for a title or a list of choices.
    unit : str
        Of its numbers.
    source : str
        Name of a value of a cell, or of a variable over tokens.
    over : {"sum", "mean", "token", "negative"}
        How it comes from the source: over the layers of the token, or as it stands.
    scale : {"sequential", "band", "signed", "agreement"}
        Colours: from zero upwards, over what most tokens hold, around zero, or one of two.
    """

    label: str
    unit: str
    source: str
    over: Literal["sum", "mean", "token", "negative"]
    scale: Literal["sequential", "band", "signed", "agreement"] = "sequential"


VALUES: dict[str, TokenValue] = {
    "misses": TokenValue("experts missed, all layers", "slots", "misses", "sum"),
    "read": TokenValue("bytes read, all layers", "bytes", "read", "sum"),
    "entropy": TokenValue(
        "entropy of the router, mean over layers", "nat", "entropy", "mean", "band"
    ),
    "changed": TokenValue("slots changed by the policy, all layers", "slots", "changed", "sum"),
    "nll": TokenValue("surprise: negative log-probability", "nat", "nll", "token"),
    "kl": TokenValue("KL divergence from lossless", "nat", "kl", "token"),
    "delta_nll": TokenValue(
        "negative log-probability less that of lossless", "nat", "delta_nll", "token", "signed"
    ),
    "top1_agree": TokenValue(
        "most likely token is the lossless one", "", "top1_agree", "token", "agreement"
    ),
    "routing_agreement": TokenValue(
        "lossless experts that also ran", "share", "routing_agreement", "token"
    ),
}
"""What :func:`bmoe_lab.plots.plot_token_text` can show, by name."""


def token_values(trace: xr.Dataset) -> dict[str, str]:
    """Return what :func:`bmoe_lab.plots.plot_token_text` can show of this trace, with labels.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace, or a run of a comparison.

    Returns
    -------
    dict of str to str
        Name to label, in the order of :data:`VALUES`.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> list(token_values(make_trace(n_token=8, n_layer=2, seed=0)))
    ['misses', 'read', 'entropy', 'nll']
    """
    cells = heatmap_values(trace)
    return {
        name: value.label
        for name, value in VALUES.items()
        if value.source in cells or _variable(trace, value) is not None
    }


def values_of(trace: xr.Dataset, value: str, tokens: Window) -> Values:
    """Return one number per token of a window; NaN where it is unknown.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace, or a run of a comparison.
    value : str
        A name of :data:`VALUES`.
    tokens : tuple of int
        The window.

    Returns
    -------
    numpy.ndarray
        Shape (tokens of the window,), float64.

    Raises
    ------
    SchemaError
        If the trace lacks what it comes from.
    UnknownNameError
        If there is no such value.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> values_of(make_trace(n_token=8, n_layer=2, seed=0), "misses", (0, 2)).shape
    (2,)
    """
    if value not in VALUES:
        raise unknown_name("value", value, VALUES)
    view = VALUES[value]
    if view.source in CELL_VALUES:
        layers = (0, trace.sizes["layer"])
        cells = heatmap_cells(trace, view.source, tokens, layers, 1)
        known = ~np.isnan(cells)
        total = np.where(known, cells, 0.0).sum(axis=1)
        count = known.sum(axis=1)
        if view.over == "mean":
            total = total / np.maximum(count, 1)
        return np.where(count > 0, total, np.nan)
    variable = _variable(trace, view)
    if variable is None:
        raise SchemaError(
            f"trace must hold the variable {view.source!r} to show {value!r}; got none. "
            f"This one can show {sorted(token_values(trace))}."
        )
    return np.asarray(variable.isel(token=slice(*tokens)).values, np.float64)


def _variable(trace: xr.Dataset, value: TokenValue) -> xr.Variable | None:
    if value.source in trace.variables:
        variable = trace.variables[value.source]
        return variable if variable.dims == ("token",) else None
    if value.source == "nll" and "logprob" in trace.variables:
        return -trace.variables["logprob"]
    return None
