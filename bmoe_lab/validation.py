"""The rules that every trace obeys, checked array by array.

Called by :func:`bmoe_lab.schema.validate`. No rule here may fail for a part of a valid trace.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError
from bmoe_lab.schema import (
    ATTRIBUTES,
    COSTS,
    NO_EXPERT,
    NOT_ROUTED,
    SCHEMA_VERSION,
    VARIABLES,
    Action,
    Phase,
    Residency,
)

__all__ = ["check_attrs", "check_structure", "check_values"]

_SLOTS = ("token", "layer", "slot")

# Values are checked over at most this many cells at a time, so that a trace on disk stays there.
_CHECK_CELLS = 4_000_000


def check_attrs(ds: xr.Dataset) -> None:
    """Raise if a required attribute is absent, or one is of the wrong kind."""
    version = ds.attrs.get("schema_version")
    if version is None:
        raise SchemaError(
            f"trace must have the attribute 'schema_version'; got {sorted(ds.attrs)}. "
            "Is this a trace of bmoe_lab?"
        )
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"schema_version must be {SCHEMA_VERSION}; got {version!r}. "
            + (
                "Update bmoe_lab to read it."
                if version > SCHEMA_VERSION
                else "Open the file with bmoe_lab.open_trace, which upgrades it."
            )
        )
    for spec in ATTRIBUTES.values():
        if spec.name not in ds.attrs:
            if spec.required and ds.attrs.get("source") not in spec.unless:
                raise SchemaError(
                    f"trace must have the attribute {spec.name!r}; got {sorted(ds.attrs)}. "
                    f"It says: {spec.meaning}."
                )
            continue
        value = ds.attrs[spec.name]
        if not _attr_fits(value, spec.kind):
            raise SchemaError(
                f"attribute {spec.name!r} must be of kind {spec.kind}; got {value!r}. "
                "Leave it out if it is unknown."
            )


def _attr_fits(value: Any, kind: str) -> bool:
    if kind in ("str", "json"):
        return isinstance(value, str)
    if isinstance(value, (bool, np.bool_)):  # no file format keeps a bool
        return False
    if kind == "float":
        return isinstance(value, (float, int, np.floating, np.integer))
    whole = isinstance(value, (int, np.integer))
    return whole and (kind == "int" or value in (0, 1))


def check_structure(ds: xr.Dataset) -> None:
    """Raise if a variable is absent, or its dims or dtype are wrong."""
    for spec in VARIABLES.values():
        if spec.name not in ds.variables:
            if spec.required:
                raise SchemaError(
                    f"trace must have the variable {spec.name!r}; "
                    f"got {sorted(map(str, ds.variables))}. It is: {spec.meaning}."
                )
            continue
        variable = ds.variables[spec.name]
        if variable.dims != spec.dims:
            raise SchemaError(
                f"{spec.name} must have the dims {spec.dims}; got {variable.dims}. "
                f"Transpose it first."
            )
        if not _dtype_fits(variable.dtype, spec.dtypes):
            raise SchemaError(
                f"{spec.name} must have the dtype {' or '.join(spec.dtypes)}; "
                f"got {variable.dtype}. "
                "Convert it first; a _FillValue encoding makes integers floats."
            )
        if (spec.name in ds.coords) is not spec.coord:
            kind = "a coordinate" if spec.coord else "a data variable"
            raise SchemaError(
                f"{spec.name} must be {kind}; got the other. Use ds.set_coords or ds.reset_coords."
            )
    for dim in ("token", "layer", "slot"):
        if ds.sizes[dim] == 0:
            raise SchemaError(
                f"trace must have at least one {dim}; got none. Nothing was recorded in it."
            )
    for name, variable in ds.variables.items():
        known_cost = name in COSTS
        if known_cost and (variable.dims != ("token",) or variable.dtype != np.float64):
            raise SchemaError(
                f"{name} must be float64 over ('token',); "
                f"got {variable.dtype} over {variable.dims}. "
                "A cost has one value per evaluation, on its first token, NaN elsewhere."
            )
    if "router_score" in ds.variables:
        n_expert = int(ds.attrs["n_expert"])
        if ds.sizes["expert"] != n_expert:
            raise SchemaError(
                f"dim 'expert' must have the size n_expert = {n_expert}; got {ds.sizes['expert']}. "
                "Scores are kept for all experts."
            )
        if ds.variables["router_score"].dtype == np.float16 and ds.attrs.get("score_exact") != 0:
            raise SchemaError(
                "score_exact must be 0 for float16 scores; "
                f"got {ds.attrs.get('score_exact')!r}. They were rounded."
            )


def _dtype_fits(dtype: np.dtype[Any], allowed: tuple[str, ...]) -> bool:
    if allowed == ("str",):
        return dtype.kind in "UOT"
    return any(dtype == np.dtype(name) for name in allowed)


def check_values(ds: xr.Dataset) -> None:
    """Raise if a value is outside its range, or does not fit the others of its cell."""
    _check_layers(ds)
    _check_tokens(ds)
    for start, window in _windows(ds):
        _check_cells(window, start)


def _check_layers(ds: xr.Dataset) -> None:
    used = np.asarray(ds.variables["n_expert_used"].values)
    _require(
        (used >= 1) & (used <= ds.sizes["slot"]),
        used,
        f"n_expert_used must be from 1 to the {ds.sizes['slot']} slots",
        ("layer",),
    )
    for name in ("expert_bytes", "dense_bytes"):
        if name in ds.variables:
            size = np.asarray(ds.variables[name].values)
            _require(size >= 0, size, f"{name} must not be negative", ("layer",))
    group = np.asarray(ds.variables["group"].values)
    _require((group == 0) | (group == 1), group, "group must be 0 or 1", ("layer",))


def _check_tokens(ds: xr.Dataset) -> None:
    for name in ("batch", "turn"):
        values = np.asarray(ds.variables[name].values)
        _require(values >= 0, values, f"{name} must not be negative", ("token",))
        rises = np.diff(values, prepend=values[:1]) >= 0
        _require(rises, values, f"{name} must not fall along token", ("token",))
    phase = np.asarray(ds.variables["phase"].values)
    _require(_in_flags(phase, Phase), phase, _flag_rule("phase", Phase), ("token",))
    if "accepted" in ds.variables:
        accepted = np.asarray(ds.variables["accepted"].values)
        _require(accepted <= 1, accepted, "accepted must be 0 or 1", ("token",))
    if "logprob" in ds.variables:
        logprob = np.asarray(ds.variables["logprob"].values)
        # Log-softmax in float32 may round to a hair above zero.
        fits = np.isnan(logprob) | (logprob <= 1e-4)
        _require(fits, logprob, "logprob must not be positive", ("token",))


def _windows(ds: xr.Dataset) -> Iterator[tuple[int, xr.Dataset]]:
    """Yield the slot variables token window by token window, loaded."""
    per_token = ds.sizes["layer"] * ds.sizes["slot"]
    step = max(1, _CHECK_CELLS // per_token)
    names = [name for name, spec in VARIABLES.items() if spec.dims == _SLOTS]
    cells = ds[[name for name in names if name in ds.variables]].reset_coords(drop=True)
    for start in range(0, ds.sizes["token"], step):
        yield start, cells.isel(token=slice(start, start + step))


def _check_cells(ds: xr.Dataset, start: int) -> None:
    values = {str(name): np.asarray(variable.values) for name, variable in ds.variables.items()}
    chosen, applied, action = (values[n] for n in ("expert_chosen", "expert_applied", "action"))
    n_expert = int(ds.attrs["n_expert"])

    def require(holds: npt.NDArray[np.bool_], of: str, rule: str) -> None:
        _require(holds, values[of], rule, _SLOTS, start)

    for name in ("expert_chosen", "expert_applied"):
        ids = values[name]
        inside = (ids >= NO_EXPERT) & (ids < n_expert)
        require(inside, name, f"{name} must be from -1 to n_expert - 1 = {n_expert - 1}")
    require(_in_flags(action, Action), "action", _flag_rule("action", Action))

    routed = chosen != NO_EXPERT
    require((applied != NO_EXPERT) == routed, "expert_applied", _same_cells("expert_applied = -1"))
    require((action != NOT_ROUTED) == routed, "action", _same_cells("action = 255"))
    if "residency" in values:
        residency = values["residency"]
        require(_in_flags(residency, Residency), "residency", _flag_rule("residency", Residency))
        require((residency != NOT_ROUTED) == routed, "residency", _same_cells("residency = 255"))
    if "read_bytes" in values:
        holds = routed | (values["read_bytes"] == 0)
        require(holds, "read_bytes", "read_bytes must be 0 where nothing routed")
    for name in ("weight_chosen", "weight_applied"):
        if name in values:
            holds = routed | np.isnan(values[name])
            require(holds, name, f"{name} must be NaN where nothing routed")
    require(
        _unique_in_row(chosen),
        "expert_chosen",
        "expert_chosen must not repeat an expert in a routing",
    )
    running = np.where(action == Action.dropped, np.int16(NO_EXPERT), applied)
    require(
        _unique_in_row(running),
        "expert_applied",
        "expert_applied must not repeat an expert in a routing, dropped slots left out",
    )
    if ds.attrs.get("lossless") == 1:
        require(
            applied == chosen,
            "expert_applied",
            "expert_applied must equal expert_chosen if lossless",
        )
        kept = (action == Action.kept) | ~routed
        require(kept, "action", "action must be kept if lossless")
        if "weight_chosen" in values and "weight_applied" in values:
            one, other = values["weight_applied"], values["weight_chosen"]
            holds = (one == other) | (np.isnan(one) & np.isnan(other))
            require(holds, "weight_applied", "weight_applied must equal weight_chosen if lossless")


def _unique_in_row(ids: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Return, per cell, whether its expert appears in no earlier slot of its routing."""
    unique = np.ones(ids.shape, dtype=bool)
    for slot in range(1, ids.shape[-1]):  # few slots, whole arrays
        here = ids[..., slot, None]
        seen = (ids[..., :slot] == here).any(axis=-1)
        unique[..., slot] = ~seen | (ids[..., slot] == NO_EXPERT)
    return unique


def _in_flags(values: npt.NDArray[Any], flags: type[enum.IntEnum]) -> npt.NDArray[np.bool_]:
    table = np.zeros(256, dtype=bool)
    table[[flag.value for flag in flags]] = True
    found: npt.NDArray[np.bool_] = table[values]
    return found


def _flag_rule(name: str, flags: type[enum.IntEnum]) -> str:
    return f"{name} must be one of {[flag.value for flag in flags]}"


def _same_cells(what: str) -> str:
    return f"{what} must mark the same cells as expert_chosen = -1"


def _require(
    holds: npt.NDArray[np.bool_],
    values: npt.NDArray[Any],
    rule: str,
    dims: tuple[str, ...],
    start: int = 0,
) -> None:
    """Raise with the first place where a rule does not hold."""
    if holds.all():
        return
    where = np.unravel_index(int(np.argmin(holds)), holds.shape)
    place = {
        dim: int(i) + (start if dim == "token" else 0) for dim, i in zip(dims, where, strict=True)
    }
    count = int(holds.size - np.count_nonzero(holds))
    raise SchemaError(
        f"{rule}; got {values[where].item()!r} at {place}. "
        f"{count} of {holds.size} values break this rule."
    )
