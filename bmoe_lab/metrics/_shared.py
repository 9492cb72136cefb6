"""What the metrics share: rows of a phase, routed cells, sums, ratios, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.schema import Action, Phase, Residency

By = Literal["token", "layer", "slot"]
PhaseName = Literal["all", "prefill", "decode", "draft"]
Which = Literal["chosen", "applied"]

_DIMS = ("token", "layer", "slot")
Bools = npt.NDArray[np.bool_]


def _values(trace: xr.Dataset, name: str) -> npt.NDArray[Any]:
    if name not in trace.variables:
        present = sorted(str(key) for key in trace.data_vars)
        raise SchemaError(
            f"trace must hold the variable {name!r}; got {present}. "
            "Record it, or choose a metric that does not need it."
        )
    return np.asarray(trace[name].values)


def _n_expert(trace: xr.Dataset) -> int:
    if "n_expert" in trace.attrs:
        return int(trace.attrs["n_expert"])
    if "expert" in trace.sizes:
        return int(trace.sizes["expert"])
    raise SchemaError(
        f"trace must hold the attribute 'n_expert'; got {sorted(map(str, trace.attrs))}. "
        "Set trace.attrs['n_expert'] to the experts per layer."
    )


def _phase_rows(trace: xr.Dataset, phase: str) -> Bools:
    names = {member.name: member.value for member in Phase}
    if phase == "all":
        return np.ones(trace.sizes["token"], dtype=bool)
    if phase not in names:
        raise unknown_name("phase", phase, ["all", *names])
    return np.asarray(_values(trace, "phase") == names[phase])


def _routed(trace: xr.Dataset) -> Bools:
    return np.asarray(_values(trace, "expert_chosen") >= 0)


def _any_slot(trace: xr.Dataset) -> Bools:
    """Return the (token, layer) cells that routed."""
    return np.asarray(_routed(trace).any(axis=-1))


def _acted(trace: xr.Dataset, action: Action) -> Bools:
    """Return the routed slots to which `action` was done."""
    return np.asarray(_values(trace, "action") == action.value)


def _asked(trace: xr.Dataset) -> Bools:
    """Return the rows that asked the cache: routed, streamed and not dropped."""
    residency = _values(trace, "residency")
    asked = np.isin(
        residency,
        [Residency.miss.value, Residency.hit.value, Residency.hit_speculative.value],
    )
    return np.asarray(asked & ~_acted(trace, Action.dropped))


def _experts(trace: xr.Dataset, which: str) -> npt.NDArray[Any]:
    """Return the expert of every slot; -1 where none is meant.

    A dropped slot runs a stand-in with weight 0: its applied expert means nothing.
    """
    if which not in ("chosen", "applied"):
        raise unknown_name("which", which, ["applied", "chosen"])
    counted = _routed(trace)
    if which == "applied":
        counted = counted & ~_acted(trace, Action.dropped)
    expert = _values(trace, f"expert_{which}")
    return np.where(counted, expert, expert.dtype.type(-1))


def _segments(trace: xr.Dataset) -> npt.NDArray[np.int64]:
    """Return a number per token that changes where one does not follow the one before.

    A token follows if it stands in the same turn at the next position. Without positions the order
    alone decides.
    """
    turn = _values(trace, "turn")
    if turn.size == 0:
        return np.zeros(0, dtype=np.int64)
    breaks = turn[1:] != turn[:-1]
    if "position" in trace.variables:
        position = _values(trace, "position").astype(np.int64)
        breaks |= position[1:] != position[:-1] + 1
    return np.concatenate(([0], np.cumsum(breaks))).astype(np.int64)


def _check_at_least(name: str, value: Any, least: int, meaning: str) -> int:
    """Return `value` as an int, or refuse it."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or int(value) < least:
        rule = f"at least {least}" if whole else "a whole number"
        raise SettingsError(f"{name} must be {rule}; got {value!r}. {meaning}")
    return int(value)


def _check_by(by: object, known: Sequence[str]) -> None:
    if by is not None and by not in known:
        raise unknown_name("by", by, known)


def _evaluation_starts(trace: xr.Dataset) -> npt.NDArray[np.int64]:
    """Return the first token of every graph evaluation."""
    turn, batch = _values(trace, "turn"), _values(trace, "batch")
    if batch.size == 0:
        return np.zeros(0, dtype=np.int64)
    change = (batch[1:] != batch[:-1]) | (turn[1:] != turn[:-1])
    return np.concatenate(([0], np.flatnonzero(change) + 1)).astype(np.int64)


def _isin_last(needle: npt.NDArray[Any], hay: npt.NDArray[Any]) -> Bools:
    """Return, slot by slot, whether the value occurs in the other routing of that cell."""
    found = np.zeros(needle.shape, dtype=bool)
    for slot in range(hay.shape[-1]):
        found |= needle == hay[..., slot, None]
    return found


def _check_same_tokens(trace: xr.Dataset, reference: xr.Dataset) -> None:
    for dim in ("token", "layer"):
        if trace.sizes[dim] != reference.sizes[dim]:
            raise SettingsError(
                f"reference must hold the same {dim}s, {trace.sizes[dim]}; got "
                f"{reference.sizes[dim]}. Compare runs over the same text."
            )
    for name in ("turn", "position", "token_id"):
        if name in trace.variables and name in reference.variables:
            differs = np.flatnonzero(_values(trace, name) != _values(reference, name))
            if differs.size:
                raise SettingsError(
                    f"reference must hold the same tokens; got another {name} at token "
                    f"{int(differs[0])}. Compare runs over the same text."
                )


def _sum(values: npt.NDArray[np.float64], by: str | None) -> npt.NDArray[np.float64]:
    if by is not None and by not in _DIMS:
        raise unknown_name("by", by, list(_DIMS))
    axes = tuple(axis for axis, dim in enumerate(_DIMS) if dim != by)
    return np.asarray(values.sum(axis=axes))


def _ratio(
    trace: xr.Dataset,
    numerator: npt.NDArray[Any],
    denominator: npt.NDArray[Any],
    by: str | None,
    phase: str,
    name: str,
    long_name: str,
    *,
    rows: Bools | None = None,
    units: str = "1",
) -> xr.DataArray:
    """Return sum over sum; NaN where there is nothing to divide by."""
    rows = _phase_rows(trace, phase) if rows is None else rows
    top = _sum(numerator[rows].astype(np.float64), by)
    bottom = _sum(denominator[rows].astype(np.float64), by)
    safe = np.where(bottom == 0, 1.0, bottom)
    values = np.where(bottom == 0, np.nan, top / safe)
    return _result(trace, values, rows, by, phase, name, long_name, units)


def _per_token(
    trace: xr.Dataset,
    amount: npt.NDArray[Any],
    by: str | None,
    phase: str,
    name: str,
    long_name: str,
    units: str,
) -> xr.DataArray:
    """Return a sum over slots divided by the tokens of the phase; NaN without a token."""
    rows = _phase_rows(trace, phase)
    total = _sum(amount[rows].astype(np.float64), by)
    if by != "token":
        total = total / rows.sum() if rows.any() else np.full(np.shape(total), np.nan)
    return _result(trace, total, rows, by, phase, name, long_name, units)


def _evaluation_costs(
    trace: xr.Dataset, name: str, rows: Bools
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the cost of every evaluation of `rows`, NaN unknown, beside its number of tokens."""
    values = _values(trace, name).astype(np.float64)
    start = _evaluation_starts(trace)
    size = np.diff(np.append(start, values.size))
    wanted = rows[start]
    return values[start][wanted], size[wanted]


def _coords(trace: xr.Dataset, dims: tuple[str, ...]) -> dict[str, xr.Variable]:
    return {
        str(name): coord.variable
        for name, coord in trace.coords.items()
        if coord.dims and set(coord.dims) <= set(dims)
    }


def _result(
    trace: xr.Dataset,
    values: npt.NDArray[np.float64] | np.float64,
    rows: Bools,
    by: str | None,
    phase: str,
    name: str,
    long_name: str,
    units: str,
) -> xr.DataArray:
    dims = () if by is None else (by,)
    source = trace.isel(token=np.flatnonzero(rows)) if by == "token" else trace
    return xr.DataArray(
        np.asarray(values, dtype=np.float64),
        dims=dims,
        coords=_coords(source, dims),
        name=f"{name}_{phase}",
        attrs={"units": units, "long_name": f"{long_name} ({phase})"},
    )


def _labelled(
    values: npt.NDArray[Any],
    dims: tuple[str, ...],
    coords: Mapping[str, Any],
    phase: str,
    name: str,
    long_name: str,
    units: str = "1",
) -> xr.DataArray:
    """Return an array of any shape, float64, with the phase in its name."""
    return xr.DataArray(
        np.asarray(values, dtype=np.float64),
        dims=dims,
        coords=coords,
        name=f"{name}_{phase}",
        attrs={"units": units, "long_name": f"{long_name} ({phase})"},
    )
