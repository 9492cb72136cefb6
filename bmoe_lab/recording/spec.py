"""What one recording holds: its sizes, columns, attributes.

A recording is a table with one row per token. :class:`TraceSpec` lists its columns, the recorder
fills them, the journal stores them, :func:`build_trace` makes the Dataset of them: each knows only
this list.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError
from bmoe_lab.schema import (
    NO_EXPERT,
    NOT_ROUTED,
    SCHEMA_VERSION,
    STATE_PREFIX,
    VARIABLES,
    clean_attrs,
    cost_attrs,
    variable_attrs,
)

__all__ = ["LEVELS", "Column", "TraceSpec", "build_trace"]

LEVELS = ("ids", "scores", "scores16")
"""Record levels that make a trace; ``"off"`` makes none."""

_MISSING: dict[str, Any] = {
    "expert_chosen": NO_EXPERT,
    "weight_chosen": np.nan,
    "expert_applied": NO_EXPERT,
    "weight_applied": np.nan,
    "action": NOT_ROUTED,
    "residency": NOT_ROUTED,
    "read_bytes": 0,
}


@dataclass(frozen=True)
class Column:
    """One column of a recording.

    Parameters
    ----------
    name : str
        The variable it becomes.
    dtype : str
        Its dtype; ``"str"`` for text.
    shape : tuple of int
        What each token has of it.
    missing : object
        What a cell holds that nothing was written to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    missing: Any = 0

    @property
    def n_bytes(self) -> int:
        """Bytes per token; an estimate for text."""
        each = 16 if self.dtype == "str" else np.dtype(self.dtype).itemsize
        return each * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class TraceSpec:
    """The form of one recording, known before it starts.

    Parameters
    ----------
    n_layer, n_slot, n_expert : int
        Sizes of the dims; `n_slot` is the widest layer's width.
    block, group : sequence of int
        Per layer: block in the model, stack group in the block.
    expert_bytes, dense_bytes : int64 array of shape (layer,), optional
        Bytes of one expert, bytes always in memory; None if unknown.
    n_expert_used : int array of shape (layer,)
        Width of each layer.
    level : {"ids", "scores", "scores16"}
        ``"scores"`` adds ``router_score``, ``"scores16"`` rounds it to float16.
    record_text : bool, default True
        Keep ``piece`` and ``token_id``.
    attrs : mapping
        Attributes known at the start; ``lossless`` is needed.
    state : mapping of str to array
        Residency state that a warm run begins with, kept as ``start_state_*``.
    score_is_softmax : sequence of int, optional
        Per layer: whether the scores are the output of a softmax; stored beside scores only.

    Raises
    ------
    SchemaError
        If the parts do not fit each other.
    """

    n_layer: int
    n_slot: int
    n_expert: int
    block: Sequence[int]
    group: Sequence[int]
    expert_bytes: npt.NDArray[np.int64] | None
    dense_bytes: npt.NDArray[np.int64] | None
    n_expert_used: npt.NDArray[np.int16]
    level: str = "ids"
    record_text: bool = True
    attrs: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    score_is_softmax: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise SchemaError(
                f"level must be one of {list(LEVELS)} to record; got {self.level!r}. "
                "At level 'off' there is no recorder."
            )
        for name in (
            "block",
            "group",
            "expert_bytes",
            "dense_bytes",
            "n_expert_used",
            "score_is_softmax",
        ):
            values = getattr(self, name)
            if values is not None and len(values) != self.n_layer:
                raise SchemaError(
                    f"{name} must have one value per layer ({self.n_layer}); got {len(values)}."
                )
        used = np.asarray(self.n_expert_used)
        if not (self.n_layer and used.min() >= 1 and used.max() <= self.n_slot <= self.n_expert):
            raise SchemaError(
                "sizes must have 1 <= n_expert_used <= n_slot <= n_expert; "
                f"got {used.tolist()}, {self.n_slot}, {self.n_expert}."
            )
        if "lossless" not in self.attrs:
            raise SchemaError(
                f"attrs must say whether the run is 'lossless'; got {sorted(self.attrs)}."
            )

    @property
    def columns(self) -> list[Column]:
        """Every column but the costs, whose names come with the first evaluation."""
        columns = [
            Column("turn", "int32"),
            Column("phase", "uint8"),
            Column("batch", "int32"),
            Column("position", "int32"),
            Column("logprob", "float32", missing=np.nan),
            Column("accepted", "uint8"),
        ]
        if self.record_text:
            columns += [Column("token_id", "int32"), Column("piece", "str")]
        for name, missing in _MISSING.items():
            dtype = VARIABLES[name].dtypes[0]
            columns.append(Column(name, dtype, (self.n_layer, self.n_slot), missing))
        if self.level != "ids":
            dtype = "float16" if self.level == "scores16" else "float32"
            columns.append(Column("router_score", dtype, (self.n_layer, self.n_expert), np.nan))
        return columns

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes."""
        return sum(column.n_bytes for column in self.columns)

    def start_attrs(self) -> dict[str, Any]:
        """Return the attributes that hold from the start, in stored form."""
        attrs: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "source": "live",
            "n_expert": self.n_expert,
            "record": self.level,
        }
        if self.level != "ids":
            attrs["score_exact"] = int(self.level == "scores")
        return clean_attrs(attrs | dict(self.attrs))

    def to_json(self) -> dict[str, Any]:
        """Return everything as a structure for the journal's header."""
        return {
            "n_layer": self.n_layer,
            "n_slot": self.n_slot,
            "n_expert": self.n_expert,
            "block": [int(value) for value in self.block],
            "group": [int(value) for value in self.group],
            "expert_bytes": _to_list(self.expert_bytes),
            "dense_bytes": _to_list(self.dense_bytes),
            "n_expert_used": _to_list(self.n_expert_used),
            "level": self.level,
            "record_text": self.record_text,
            "attrs": clean_attrs(self.attrs),
            "state": {name: _pack(values) for name, values in self.state.items()},
            "score_is_softmax": None
            if self.score_is_softmax is None
            else [int(value) for value in self.score_is_softmax],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TraceSpec:
        """Return the spec that :meth:`to_json` stored."""
        stored = dict(stored)
        for name in ("expert_bytes", "dense_bytes"):
            if stored[name] is not None:
                stored[name] = np.array(stored[name], dtype=np.int64)
        stored["n_expert_used"] = np.array(stored["n_expert_used"], dtype=np.int16)
        stored["state"] = {name: _unpack(values) for name, values in stored["state"].items()}
        return cls(**stored)


def _to_list(values: npt.NDArray[Any] | None) -> list[int] | None:
    return None if values is None else [int(value) for value in values]


def _pack(values: npt.NDArray[Any]) -> dict[str, Any]:
    values = np.ascontiguousarray(values)
    return {
        "dtype": values.dtype.str,
        "shape": list(np.shape(values)),
        "data": base64.b64encode(values.tobytes()).decode("ascii"),
    }


def _unpack(stored: Mapping[str, Any]) -> npt.NDArray[Any]:
    flat = np.frombuffer(base64.b64decode(stored["data"]), dtype=np.dtype(stored["dtype"]))
    return flat.reshape(stored["shape"]).copy()


def build_trace(
    spec: TraceSpec, columns: Mapping[str, Any], attrs: Mapping[str, Any]
) -> xr.Dataset:
    """Return the Dataset of a recording's columns.

    Parameters
    ----------
    spec : TraceSpec
        The form.
    columns : mapping of str to array
        Every column, token first; names that `spec` does not list are costs. Arrays may be lazy.
    attrs : mapping
        Attributes that the end of the run added.
    """
    known = {column.name for column in spec.columns}
    variables: dict[str, xr.Variable] = {}
    for name, values in columns.items():
        if name in known:
            variables[name] = xr.Variable(VARIABLES[name].dims, values, variable_attrs(name))
        else:
            variables[name] = xr.Variable(("token",), values, cost_attrs(name))
    per_layer = {
        "expert_bytes": spec.expert_bytes,
        "dense_bytes": spec.dense_bytes,
        "n_expert_used": spec.n_expert_used,
        "score_is_softmax": None if spec.level == "ids" else spec.score_is_softmax,
        "block": spec.block,
        "group": spec.group,
    }
    for name, per in per_layer.items():
        if per is not None:
            values = np.array(per, dtype=VARIABLES[name].dtypes[0])
            variables[name] = xr.Variable(("layer",), values, variable_attrs(name))
    for name, values in spec.state.items():
        full = name if name.startswith(STATE_PREFIX) else STATE_PREFIX + name
        dims = [f"{full}_axis{axis}" for axis in range(np.ndim(values))]
        meaning = f"residency state at the start: {full.removeprefix(STATE_PREFIX)}"
        variables[full] = xr.Variable(dims, values, {"long_name": meaning, "units": "1"})
    # The order of the schema, then costs, then state: the same whoever builds it.
    order = [name for name in VARIABLES if name in variables]
    order += [name for name in variables if name not in VARIABLES]
    coords = {name for name in order if name in VARIABLES and VARIABLES[name].coord}
    return xr.Dataset(
        {name: variables[name] for name in order if name not in coords},
        {name: variables[name] for name in order if name in coords},
        spec.start_attrs() | clean_attrs(attrs),
    )
