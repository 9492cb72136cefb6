"""Route traces of BigMoeOnEdge, read without losing anything that they hold.

The form is the engine's ``route_trace v1``: comment lines with the sizes, then one row per routed
expert. What the file says beyond a trace (its comment lines, columns that are new, the order of its
columns) is kept in the attribute ``bigmoeonedge``, so that writing gives the same bytes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.bigmoeonedge_metrics import LAYOUT as METRICS
from bmoe_lab.converters.bigmoeonedge_metrics import Metrics, attrs_of_part, read_metrics
from bmoe_lab.converters.building import imported, kept_actions
from bmoe_lab.converters.files import file_to_read
from bmoe_lab.converters.lines import Kind, TextTable, read_table
from bmoe_lab.converters.number_text import numbers, text_format
from bmoe_lab.converters.route_preamble import (
    VERSION_LINE,
    parse_preamble,
)
from bmoe_lab.converters.route_rows import cells_of
from bmoe_lab.errors import SettingsError, TraceFormatError
from bmoe_lab.schema import NO_EXPERT, NOT_ROUTED, Action, validate

__all__ = ["KINDS", "LAYOUT", "SLOTS", "from_bigmoeonedge", "route_dataset"]

LAYOUT = "bigmoeonedge"
"""Attribute with the comment lines, column names and line end of the file."""

KINDS: dict[str, Kind] = {
    "turn": "int",
    "phase": "int",
    "step": "int",
    "layer": "int",
    "slot": "int",
    "expert": "int",
    "weight": "float",
    "residency": "int",
    "expert_bytes": "int",
    "dropped": "int",
}
"""The columns that have a meaning here, in the engine's order."""

SLOTS = ("token", "layer", "slot")
_REQUIRED = [name for name in KINDS if name != "dropped"]


def from_bigmoeonedge(
    path: str | os.PathLike[str],
    *,
    metrics: str | os.PathLike[str] | None = None,
    turn: int | None = None,
    n_ubatch: int | None = None,
) -> xr.Dataset:
    """Return a route trace of BigMoeOnEdge as a trace.

    A traced run of that engine is slower than others, so ``instrumented`` is 1. Whether a policy
    acted is known only from a ``dropped`` row or from the settings in `metrics`; otherwise
    ``lossless`` is absent.

    Parameters
    ----------
    path : path-like
        A file of the form ``route_trace v1``, with nine columns or more.
    metrics : path-like, optional
        The per-token CSV of the same run. Its rows belong to the decoded tokens: ``wall_s``,
        ``manage_s`` and ``major_faults`` are ours, every other column keeps its own definition as
        ``engine_<column>``, float64 of shape (token,), NaN in the prompt.
    turn : int, optional
        Keep this turn only.
    n_ubatch : int, optional
        Width of the evaluations of a prompt. Left out, the order of the rows tells them.

    Returns
    -------
    xarray.Dataset
        ``source="import"``; ``position`` is the file's ``step``, ``read_bytes`` its
        ``expert_bytes`` of a row, ``expert_bytes`` that of a layer. A column that is unknown here
        is a variable of its name, of shape (token, layer, slot).

    Raises
    ------
    TraceFormatError
        If a file is malformed, with its line; or does not belong to the other one.
    TraceFileError
        If a file cannot be read.
    SettingsError
        If there is no such turn, or `n_ubatch` is impossible.

    See Also
    --------
    to_bigmoeonedge : Writes one.

    Notes
    -----
    Source: BigMoeOnEdge 0.20.0, docs/bench-data/2026-07-15-route-trace, and its recomputation. The
    weight is the one applied before dropping. What the survivors of a drop were scaled to is not in
    the file: ``weight_applied`` is NaN there unless `metrics` says how the engine did it. With
    substitution or route-ahead, which only `metrics` tells, ``expert_chosen`` is what these left.

    Examples
    --------
    >>> import tempfile
    >>> import bmoe_lab.converters
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = bmoe_lab.converters.to_bigmoeonedge(trace, f"{folder}/a.route.csv")
    ...     back = from_bigmoeonedge(path)
    >>> bool((back.expert_chosen == trace.expert_chosen).all()), back.attrs["source"]
    (True, 'import')
    """
    table = read_table(file_to_read(path), first=VERSION_LINE)
    told = None
    if metrics is not None:
        told = read_metrics(file_to_read(metrics))
    ds = route_dataset(table, n_ubatch, told)
    if told is not None:
        ds = told.attach(ds)
    if turn is not None:
        ds = _one_turn(ds, turn)
    return validate(ds)


def _one_turn(ds: xr.Dataset, turn: int) -> xr.Dataset:
    turns = ds["turn"].values
    known = np.unique(turns).tolist()
    if turn not in known:
        raise SettingsError(f"turn must be one of {known}; got {turn!r}. Leave it out for all.")
    keep = np.asarray(turns == turn)
    attrs = attrs_of_part(ds, keep) if METRICS in ds.attrs else {}
    return ds.isel(token=np.flatnonzero(keep)).assign_attrs(attrs)


def route_dataset(table: TextTable, n_ubatch: int | None, metrics: Metrics | None) -> xr.Dataset:
    """Return the trace of a route table.

    Parameters
    ----------
    table : TextTable
        The file.
    n_ubatch : int or None
        Width of the evaluations of a prompt, if the caller knows it.
    metrics : Metrics or None
        The per-token CSV of the run, for how a drop was made up for.
    """
    preamble = parse_preamble(table.preamble, table.where)
    missing = [name for name in _REQUIRED if name not in table.names]
    if missing:
        raise TraceFormatError(
            f"columns must include {_REQUIRED}; got none of {missing} in {table.where!r}, "
            f"line {len(table.preamble) + 1}. The file is damaged or of another kind."
        )
    rows = table.columns({name: KINDS.get(name, "text") for name in table.names})
    rows.setdefault("dropped", np.zeros(table.n_row, dtype=np.int64))
    cells = cells_of(rows, table, preamble, n_ubatch)
    shape = (cells.turn.size, cells.block.size, preamble.n_expert_used)
    where = (cells.row_token, cells.row_layer, rows["slot"])

    def spread(values: Any, fill: Any, dtype: Any) -> npt.NDArray[Any]:
        array = np.full(shape, fill, dtype=dtype)
        array[where] = values
        return array

    expert = spread(rows["expert"], NO_EXPERT, np.int16)
    dropped = spread(rows["dropped"], 0, bool)
    values: dict[str, Any] = {
        "expert_chosen": expert,
        "expert_applied": expert,
        "action": kept_actions(expert),
        "residency": spread(rows["residency"], NOT_ROUTED, np.uint8),
        "read_bytes": spread(rows["expert_bytes"], 0, np.uint32),
        "expert_bytes": np.array([preamble.expert_bytes[b] for b in cells.block.tolist()]),
        "n_expert_used": np.full(cells.block.size, preamble.n_expert_used),
        "turn": cells.turn,
        "phase": cells.phase,
        "batch": cells.batch,
        "block": cells.block,
        "group": np.zeros(cells.block.size),
    }
    weight = spread(rows["weight"], np.nan, np.float32)
    if not np.isnan(weight).all():
        values |= {"weight_chosen": weight, "weight_applied": weight}
    if (cells.position >= 0).any():
        values["position"] = cells.position
    if all(block in preamble.dense_bytes for block in cells.block.tolist()):
        values["dense_bytes"] = [preamble.dense_bytes[b] for b in cells.block.tolist()]
    if dropped.any():
        _check_survivors(dropped, expert, table, cells.row_token, cells.row_layer)
        renormalised = None if metrics is None else metrics.renormalised
        values |= _as_dropped(expert, weight, dropped, renormalised)
        if "weight_chosen" not in values:
            del values["weight_applied"]
    attrs = {
        "n_expert": preamble.n_expert,
        "lossless": 0 if dropped.any() else None,
        "record": "ids",
        "instrumented": 1,
        "model_name": _file_name(preamble.model),
        "arch": preamble.arch or None,
        LAYOUT: {
            "preamble": table.preamble,
            "columns": table.names,
            "line_end": table.line_end,
        },
    }
    taken = set(values) | {"token", "layer", "slot", "expert"}
    others = {}
    for name in table.names:
        if name not in KINDS:
            others[_free_name(name, taken)] = _unknown_column(name, rows[name], shape, where)
    return imported(values, attrs, others)


def _file_name(model: str | None) -> str | None:
    """Return the last part of a path of any system."""
    return None if not model else model.replace("\\", "/").rpartition("/")[2] or model


def _check_survivors(
    dropped: npt.NDArray[np.bool_],
    expert: npt.NDArray[np.int16],
    table: TextTable,
    row_token: npt.NDArray[np.int64],
    row_layer: npt.NDArray[np.int64],
) -> None:
    empty = dropped.all(axis=-1) & (expert[..., 0] != NO_EXPERT)
    if empty.any():
        token, layer = np.argwhere(empty)[0].tolist()
        row = int(np.flatnonzero((row_token == token) & (row_layer == layer))[0])
        table.fail(
            "a token must keep one expert in a layer",
            "dropped = 1 in all its rows",
            row,
            "The engine never drops the best one: the file is damaged.",
        )


def _as_dropped(
    expert: npt.NDArray[np.int16],
    weight: npt.NDArray[np.float32],
    dropped: npt.NDArray[np.bool_],
    renormalised: bool | None,
) -> dict[str, Any]:
    """Return what ran: a dropped slot runs the best kept expert with weight 0."""
    kept_weight = np.where(dropped | np.isnan(weight), np.float32(-np.inf), weight)
    best = np.argmax(kept_weight, axis=-1)
    # All weights unknown: the router's first choice among the kept.
    none = np.isneginf(kept_weight).all(axis=-1)
    best = np.where(none, np.argmax(~dropped, axis=-1), best)[..., None]
    action = kept_actions(expert)
    action[dropped] = Action.dropped
    applied = weight.copy()
    thinned = dropped.any(axis=-1)
    if renormalised is None:
        applied[thinned] = np.nan
    elif renormalised:
        total = weight[thinned].sum(axis=-1, keepdims=True)
        kept = np.where(dropped, np.float32(0), weight)[thinned].sum(axis=-1, keepdims=True)
        applied[thinned] = weight[thinned] * (total / kept)
    applied[dropped] = 0
    return {
        "expert_applied": np.where(dropped, np.take_along_axis(expert, best, axis=-1), expert),
        "weight_applied": applied,
        "action": action,
    }


def _free_name(name: str, taken: set[str]) -> str:
    """Return a name for a variable that every file format can hold and no other variable has."""
    free = name if name and "/" not in name else f"column_{name.replace('/', '_')}"
    while free in taken:
        free = f"column_{free}"
    taken.add(free)
    return free


def _unknown_column(
    name: str, texts: list[str], shape: tuple[int, ...], where: tuple[npt.NDArray[Any], ...]
) -> xr.Variable:
    """Return a column without a meaning here: numbers if they give back their texts, else texts."""
    values = numbers(texts)
    form = None if values is None else text_format(texts, values)
    attrs = {"long_name": f"column {name!r} of the file", "csv_column": name}
    array: npt.NDArray[Any]
    if form is None or values is None:
        array = np.full(shape, "", dtype=f"U{max(1, max(map(len, texts)))}")
        array[where] = texts
    else:
        # Whole numbers have no NaN: a cell without a row holds one that the column does not.
        fill = np.nan if values.dtype == np.float64 else min(-1, int(values.min()) - 1)
        array = np.full(shape, fill, dtype=values.dtype)
        array[where] = values
        attrs["csv_format"] = form
    return xr.Variable(SLOTS, array, attrs)
