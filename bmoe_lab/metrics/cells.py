"""One cell of a trace: what a layer chose for a token, and when it last used those experts."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.metrics._shared import Which
from bmoe_lab.schema import NO_EXPERT, Action, Residency, variable_attrs

__all__ = ["cell_history", "cell_slots"]

# Tokens looked at before looking further back; most experts were used not long ago.
_STEP = 256


def cell_slots(trace: xr.Dataset, *, token: int, layer: int) -> xr.Dataset:
    """Return what one layer did for one token, slot by slot, flags in words.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads the cell of ``expert_chosen``, ``expert_applied``, ``action`` and of what else there
        is: ``weight_chosen``, ``weight_applied``, ``residency``, ``read_bytes``.
    token : int
        Place along the trace; negative from the end.
    layer : int
        Its number; negative from the end.

    Returns
    -------
    xarray.Dataset
        Shape (slot,), the slots that routed: the variables above, ``action`` and ``residency`` as
        text; ``residency`` is that of the applied expert, of the chosen one if it was dropped. What
        the trace does not know is absent. ``.to_pandas()`` makes a table of it.

    Raises
    ------
    SchemaError
        If the trace is empty, or the layer routed nothing for that token.
    SettingsError
        If the trace has no such token or layer.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> cell = cell_slots(make_trace(n_token=8, n_layer=2, n_used=2, seed=0), token=7, layer=1)
    >>> cell["expert_chosen"].values.tolist(), cell["residency"].values.tolist()
    ([5, 8], ['hit', 'hit'])
    """
    token, layer, routed = _cell(trace, token, layer)
    data: dict[str, Any] = {}
    for name in (
        "expert_chosen",
        "weight_chosen",
        "expert_applied",
        "weight_applied",
        "action",
        "residency",
        "read_bytes",
    ):
        if name not in trace.variables:
            continue
        values = np.asarray(trace.variables[name].isel(token=token, layer=layer).values)[routed]
        attrs = variable_attrs(name)
        if name in ("action", "residency"):
            flags = Action if name == "action" else Residency
            values = np.array([flags(value).name for value in values.tolist()])
            attrs = {"long_name": attrs["long_name"], "units": "1"}
        data[name] = ("slot", values, attrs)
    return xr.Dataset(data, {"slot": np.flatnonzero(routed)}, {"token": token, "layer": layer})


def cell_history(
    trace: xr.Dataset,
    *,
    token: int,
    layer: int,
    which: Which = "chosen",
    across_turns: bool = False,
) -> xr.Dataset:
    """Return when the layer last used each expert of a cell.

    Looks back from the cell block by block, so a cell of a long trace on disk is there at once.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or ``expert_applied`` of shape (token, layer, slot), ``action``, the
        coordinates ``turn``, ``batch``.
    token, layer
        As for :func:`cell_slots`.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    across_turns : bool, default False
        Let a use in an earlier turn count, as for a cache that stays warm.

    Returns
    -------
    xarray.Dataset
        Shape (slot,), float64: ``last_token`` (its place), ``tokens_ago``, ``evaluations_ago`` (0:
        earlier in the same graph evaluation). NaN if the expert was never used before, or if the
        slot ran none. The coordinate ``expert`` names it.

    Raises
    ------
    SchemaError
        If the trace is empty, or the layer routed nothing for that token.
    SettingsError
        If the trace has no such token or layer.
    UnknownNameError
        If `which` is not one of the names above.

    See Also
    --------
    reuse_distance : ``tokens_ago`` of every cell, over all phases; also in bytes.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, n_used=2, seed=0)
    >>> cell_history(trace, token=7, layer=1)["tokens_ago"].values.tolist()
    [1.0, 1.0]
    """
    if which not in ("chosen", "applied"):
        raise unknown_name("which", which, ["applied", "chosen"])
    token, layer, routed = _cell(trace, token, layer)
    expert = _row(trace, which, layer, token, token + 1)[0][routed]
    turn, batch = trace["turn"].values, trace["batch"].values
    starts = np.zeros(token + 1, np.int64)
    starts[1:] = (turn[1 : token + 1] != turn[:token]) | (batch[1 : token + 1] != batch[:token])
    evaluation = np.cumsum(starts)
    # Turns come one after the other, so those of the cell's own turn are the last ones.
    other = np.flatnonzero(turn[:token] != turn[token])
    oldest = 0 if across_turns or not other.size else int(other[-1]) + 1
    last = np.full(expert.size, np.nan)
    stop = token
    while stop > oldest and np.isnan(last[expert >= 0]).any():
        first = max(oldest, stop - _STEP)
        used = _row(trace, which, layer, first, stop)
        for slot in np.flatnonzero(np.isnan(last) & (expert >= 0)).tolist():
            found = np.flatnonzero((used == expert[slot]).any(axis=-1))
            if found.size:
                last[slot] = first + found[-1]
        stop = first
    known = ~np.isnan(last)
    evaluations = np.full(expert.size, np.nan)
    evaluations[known] = evaluation[token] - evaluation[last[known].astype(np.int64)]
    where = f"since layer {layer} last used the slot's expert ({which}); NaN: never before"
    return xr.Dataset(
        {
            "last_token": (
                "slot",
                last,
                {
                    "units": "1",
                    "long_name": f"token for which layer {layer} last used the slot's expert "
                    f"({which}); NaN: never before",
                },
            ),
            "tokens_ago": ("slot", token - last, {"units": "1", "long_name": f"tokens {where}"}),
            "evaluations_ago": (
                "slot",
                evaluations,
                {"units": "1", "long_name": f"graph evaluations {where}"},
            ),
        },
        {"slot": np.flatnonzero(routed), "expert": ("slot", expert)},
        {"token": token, "layer": layer},
    )


def _place(trace: xr.Dataset, dim: str, given: Any) -> int:
    """Return a place along a dimension, counted from 0; negative ones count from the end."""
    size = int(trace.sizes.get(dim, 0))
    if size == 0:
        raise SchemaError(f"trace must hold {dim}s; got none. Choose another trace.")
    whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not whole or not -size <= given < size:
        raise SettingsError(
            f"{dim} must be a whole number from 0 to {size - 1}, or from the end from -1 to "
            f"{-size}; got {given!r}. The trace has {size} {dim}{'' if size == 1 else 's'}."
        )
    return int(given) % size


def _cell(trace: xr.Dataset, token: int, layer: int) -> tuple[int, int, npt.NDArray[np.bool_]]:
    """Return the cell's place and which of its slots routed."""
    token, layer = _place(trace, "token", token), _place(trace, "layer", layer)
    chosen = np.asarray(trace.variables["expert_chosen"].isel(token=token, layer=layer).values)
    routed = chosen != NO_EXPERT
    if not routed.any():
        raise SchemaError(
            f"layer {layer} must have routed token {token}; it did not. In a prompt the last layer "
            "routes only the tokens whose logits are asked for: choose another cell."
        )
    return token, layer, routed


def _row(trace: xr.Dataset, which: str, layer: int, first: int, stop: int) -> npt.NDArray[Any]:
    """Return the experts of a layer for some tokens; -1 where none was used."""
    where = {"token": slice(first, stop), "layer": layer}
    expert = np.asarray(trace.variables[f"expert_{which}"].isel(where).values)
    if which == "applied":
        action = np.asarray(trace.variables["action"].isel(where).values)
        # A dropped slot runs a stand-in with weight 0: its applied expert means nothing.
        expert = np.where(action == Action.dropped, expert.dtype.type(NO_EXPERT), expert)
    return expert
