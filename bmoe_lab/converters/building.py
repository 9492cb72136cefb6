"""What every reader ends with: arrays made into a valid trace, ``source="import"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError, TraceFormatError
from bmoe_lab.schema import (
    NO_EXPERT,
    NOT_ROUTED,
    SCHEMA_VERSION,
    VARIABLES,
    Action,
    clean_attrs,
    validate,
    variable_attrs,
)

__all__ = ["checked_count", "checked_ids", "imported", "kept_actions", "routed_only"]


def kept_actions(expert: npt.NDArray[np.int16]) -> npt.NDArray[np.uint8]:
    """Return ``action`` of shape (token, layer, slot): kept wherever something routed.

    Parameters
    ----------
    expert : numpy.ndarray
        int16 of shape (token, layer, slot); -1 did not route.
    """
    return np.where(expert == NO_EXPERT, NOT_ROUTED, Action.kept).astype(np.uint8)


def imported(
    values: Mapping[str, Any],
    attrs: Mapping[str, Any],
    others: Mapping[str, xr.Variable] | None = None,
) -> xr.Dataset:
    """Return a valid trace from arrays.

    Parameters
    ----------
    values : mapping
        Arrays by the names of :data:`bmoe_lab.schema.VARIABLES`; any integer or float type.
    attrs : mapping
        Attributes; ``schema_version``, ``source`` and ``complete`` are added, None is left out.
    others : mapping, optional
        Variables that the schema does not name.

    Raises
    ------
    SchemaError
        If it is not a valid trace.
    """
    data: dict[str, xr.Variable] = {}
    coords: dict[str, xr.Variable] = {}
    for name, array in values.items():
        spec = VARIABLES[name]
        if spec.dtypes != ("str",):
            array = np.asarray(array)
            array = array if array.dtype.name in spec.dtypes else array.astype(spec.dtypes[0])
        variable = xr.Variable(spec.dims, array, variable_attrs(name))
        (coords if spec.coord else data)[name] = variable
    own = {"schema_version": SCHEMA_VERSION, "source": "import", "complete": 1}
    return validate(xr.Dataset(data | dict(others or {}), coords, clean_attrs(own | dict(attrs))))


def checked_ids(
    ids: npt.NDArray[Any], n_expert: int, where: str, *, row: str = "row", layer: str = "layer"
) -> npt.NDArray[np.int16]:
    """Return expert ids as int16 if each row is a routing, or all -1.

    Parameters
    ----------
    ids : numpy.ndarray
        Integers of shape (token, layer, slot).
    n_expert : int
        Experts per layer.
    where : str
        Where they come from, for messages.
    row, layer : str
        What the message calls a place along the first two axes.

    Raises
    ------
    TraceFormatError
        With the first row that is at fault.
    """
    checked_count("n_expert", n_expert)
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise TraceFormatError(
            "expert ids must be whole numbers of shape (token, layer, slot), none of them 0 long; "
            f"got {ids.dtype} of shape {ids.shape} in {where}. Convert them first."
        )
    missing = ids == NO_EXPERT
    ordered = np.sort(ids, axis=-1)
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=-1)
    for wrong, rule, step in (
        (
            ((ids < NO_EXPERT) | (ids >= n_expert)).any(axis=-1),
            f"expert ids must be from 0 to n_expert - 1 = {n_expert - 1}, or -1",
            "Is n_expert that of the model?",
        ),
        (
            missing.any(axis=-1) != missing.all(axis=-1),
            "a row must have all its expert ids, or only -1",
            "The data are damaged.",
        ),
        (
            repeated,
            "an expert must appear once in a row",
            "A row of zeros means that the layer does not route: leave such layers out.",
        ),
    ):
        if wrong.any():
            token, at = np.argwhere(wrong)[0].tolist()
            raise TraceFormatError(
                f"{rule}; got {ids[token, at].tolist()} in {where}, {row} {token}, {layer} {at}. "
                f"{step}"
            )
    return ids.astype(np.int16)


def checked_count(name: str, value: Any, low: int = 1, high: int = 32767) -> int:
    """Return a count that a caller passed, if it is a whole number in range."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and low <= value <= high):
        raise SettingsError(
            f"{name} must be a whole number from {low} to {high}; got {value!r}. "
            "Take it from the model's metadata."
        )
    return int(value)


def routed_only(
    ids: npt.NDArray[np.int16],
    *,
    n_expert: int,
    phase: npt.NDArray[Any],
    batch: npt.NDArray[Any],
    block: npt.NDArray[Any],
    weight: npt.NDArray[np.float32] | None = None,
    position: npt.NDArray[Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Return a trace from chosen experts alone: no residency, no bytes, no sizes.

    Parameters
    ----------
    ids : numpy.ndarray
        int16 of shape (token, layer, slot), checked.
    n_expert : int
        Experts per layer.
    phase, batch : numpy.ndarray
        Of shape (token,).
    block : numpy.ndarray
        Of shape (layer,).
    weight : numpy.ndarray, optional
        float32 of shape (token, layer, slot).
    position : numpy.ndarray, optional
        Of shape (token,).
    attrs : mapping, optional
        More attributes.
    """
    n_token, n_layer, n_used = ids.shape
    values: dict[str, Any] = {
        "expert_chosen": ids,
        "expert_applied": ids,
        "action": kept_actions(ids),
        "n_expert_used": np.full(n_layer, n_used),
        "turn": np.zeros(n_token),
        "phase": phase,
        "batch": batch,
        "block": block,
        "group": np.zeros(n_layer),
    }
    if weight is not None:
        values |= {"weight_chosen": weight, "weight_applied": weight}
    if position is not None:
        values["position"] = position
    return imported(values, {"n_expert": n_expert, "record": "ids", **(attrs or {})})
