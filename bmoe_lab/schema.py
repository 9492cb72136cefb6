"""The form of a saved trace: its names, dimensions, dtypes, flags, attributes.

A trace is one :class:`xarray.Dataset` per run. ``docs/trace-format.md`` says the same for readers
in other languages; a test keeps the two equal. Everything that writes a trace (recorder, replay,
converters) passes it through :func:`validate`, everything that reads one may rely on it.

Dims, always in this order: ``token`` (every routed position, in the order decoded), ``layer`` (one
entry per expert stack group), ``slot`` (the router's rank), ``expert`` (only with scores). They
carry no index: a position along ``token`` means something only within one trace, and the
coordinates ``batch``, ``position``, ``block`` keep their values when a trace is cut.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from bmoe_lab.errors import SchemaError

__all__ = [
    "ATTRIBUTES",
    "COSTS",
    "DIMS",
    "NOT_ROUTED",
    "NO_EXPERT",
    "SCHEMA_VERSION",
    "STATE_PREFIX",
    "VARIABLES",
    "Action",
    "AttributeSpec",
    "Phase",
    "Residency",
    "VariableSpec",
    "clean_attrs",
    "cost_attrs",
    "is_trace",
    "validate",
    "variable_attrs",
]

SCHEMA_VERSION = 1
"""The version written; a reader refuses a newer one by number and upgrades an older one."""

DIMS = ("token", "layer", "slot", "expert")

NO_EXPERT = -1
"""``expert_*`` of a cell that did not route."""

NOT_ROUTED = 255
"""``action`` and ``residency`` of a cell that did not route."""

STATE_PREFIX = "start_state_"
"""Variables that hold the residency state a warm run began with; their form is the policy's."""


class Phase(enum.IntEnum):
    """Why a token was decoded."""

    prefill = 0
    decode = 1
    draft = 2


class Action(enum.IntEnum):
    """What a routing policy did with a slot.

    One value per slot, the strongest: dropped before substituted before reweighted. A slot is
    `reweighted` if the policy itself returned another weight; a survivor that was only scaled up to
    replace what was dropped stays `kept`.
    """

    kept = 0
    dropped = 1
    substituted = 2
    reweighted = 3
    not_routed = NOT_ROUTED


class Residency(enum.IntEnum):
    """Where a slot's expert was before its evaluation loaded anything.

    The expert meant is the applied one; for a dropped slot, which runs a stand-in with weight 0, it
    is the chosen one.
    """

    miss = 0
    hit = 1
    hit_speculative = 2
    not_streamed = 3
    not_routed = NOT_ROUTED


@dataclass(frozen=True)
class VariableSpec:
    """One variable or coordinate of a trace.

    Parameters
    ----------
    name : str
        Its name in the Dataset.
    dims : tuple of str
        Its dimensions, in order.
    dtypes : tuple of str
        Numpy dtypes allowed, the usual one first; ``"str"`` stands for text of any width.
    meaning : str
        Its ``long_name``.
    missing : str
        What a cell without a value holds, in words.
    units : str, optional
        UDUNITS name; empty for text.
    coord : bool, optional
        Whether it is a coordinate.
    required : bool, optional
        Whether every trace has it. A quantity unknown for the whole trace is an absent variable.
    flags : type of enum.IntEnum, optional
        Its values, if it is a flag.
    """

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    meaning: str
    missing: str
    units: str = "1"
    coord: bool = False
    required: bool = False
    flags: type[enum.IntEnum] | None = None


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute of a trace.

    Parameters
    ----------
    name : str
        Its name in ``Dataset.attrs``.
    kind : {"int", "flag", "str", "json", "float"}
        ``flag`` is 0 or 1; ``json`` is a structure as a JSON string.
    meaning : str
        What it says.
    required : bool, optional
        Whether every trace has it.
    unless : tuple of str, optional
        Values of ``source`` whose traces may lack a required one: it is unknown there.
    """

    name: str
    kind: str
    meaning: str
    required: bool = False
    unless: tuple[str, ...] = ()


_SLOTS = ("token", "layer", "slot")

VARIABLES: dict[str, VariableSpec] = {
    spec.name: spec
    for spec in (
        VariableSpec(
            "expert_chosen",
            _SLOTS,
            ("int16",),
            "expert that the router chose",
            "-1: did not route",
            required=True,
        ),
        VariableSpec(
            "weight_chosen",
            _SLOTS,
            ("float32",),
            "router's weight of the expert it chose",
            "NaN: unknown or did not route",
        ),
        VariableSpec(
            "expert_applied",
            _SLOTS,
            ("int16",),
            "expert that ran after the routing policy",
            "-1: did not route",
            required=True,
        ),
        VariableSpec(
            "weight_applied",
            _SLOTS,
            ("float32",),
            "weight that was used after the routing policy; 0 for a dropped slot",
            "NaN: unknown or did not route",
        ),
        VariableSpec(
            "action",
            _SLOTS,
            ("uint8",),
            "what the routing policy did with the slot",
            "255: did not route",
            required=True,
            flags=Action,
        ),
        VariableSpec(
            "residency",
            _SLOTS,
            ("uint8",),
            "where the slot's expert was before its evaluation loaded anything",
            "255: did not route",
            flags=Residency,
        ),
        VariableSpec(
            "read_bytes",
            _SLOTS,
            ("uint32",),
            "bytes that this slot caused to be read; an evaluation charges an expert once",
            "0: nothing was read for it",
            units="byte",
        ),
        VariableSpec(
            "router_score",
            ("token", "layer", "expert"),
            ("float32", "float16"),
            "score that the graph sorted",
            "NaN: did not route",
        ),
        VariableSpec(
            "logprob",
            ("token",),
            ("float32",),
            "natural-log probability of this token given those before, from unmodified logits",
            "NaN: not computed",
        ),
        VariableSpec(
            "expert_bytes",
            ("layer",),
            ("int64",),
            "bytes of one expert: what a miss costs",
            "absent if unknown",
            units="byte",
        ),
        VariableSpec(
            "dense_bytes",
            ("layer",),
            ("int64",),
            "bytes of the layer that are always in memory",
            "absent if unknown",
            units="byte",
        ),
        VariableSpec(
            "n_expert_used",
            ("layer",),
            ("int16",),
            "experts used per token",
            "never missing",
            required=True,
        ),
        VariableSpec(
            "score_is_softmax",
            ("layer",),
            ("uint8",),
            "1 if router_score is the output of a softmax, 0 if not (logits, sigmoids, biased)",
            "absent if unknown",
        ),
        VariableSpec(
            "turn", ("token",), ("int32",), "chat turn", "never missing", coord=True, required=True
        ),
        VariableSpec(
            "phase",
            ("token",),
            ("uint8",),
            "why the token was decoded",
            "never missing",
            coord=True,
            required=True,
            flags=Phase,
        ),
        VariableSpec(
            "batch",
            ("token",),
            ("int32",),
            "index of the graph evaluation",
            "never missing",
            coord=True,
            required=True,
        ),
        VariableSpec(
            "position",
            ("token",),
            ("int32",),
            "place in the context",
            "absent if unknown",
            coord=True,
        ),
        VariableSpec(
            "token_id",
            ("token",),
            ("int32",),
            "id in the model's vocabulary",
            "absent if left out",
            coord=True,
        ),
        VariableSpec(
            "piece",
            ("token",),
            ("str",),
            "text of the token; incomplete UTF-8, NUL and control bytes as \\xNN",
            "absent if left out",
            units="",
            coord=True,
        ),
        VariableSpec(
            "accepted",
            ("token",),
            ("uint8",),
            "1 if the token stayed in the context, 0 if a draft was rejected",
            "absent if unknown",
            coord=True,
        ),
        VariableSpec(
            "block",
            ("layer",),
            ("int32",),
            "block index in the model",
            "never missing",
            coord=True,
            required=True,
        ),
        VariableSpec(
            "group",
            ("layer",),
            ("int16",),
            "0, or 1 for a second expert stack group in that block",
            "never missing",
            coord=True,
            required=True,
        ),
    )
}
"""Every variable and coordinate with a fixed form, by name."""

COSTS: dict[str, tuple[str, str]] = {
    "wall_s": ("s", "wall time of the evaluation"),
    "io_s": ("s", "time that the calling side waited for reads"),
    "stall_s": ("s", "time that compute threads waited for experts"),
    "manage_s": ("s", "time of cache management"),
    "callback_s": ("s", "time inside the evaluation callback, reads and management left out"),
    "compute_s": ("s", "wall time less reads, management and callback"),
    "evictions": ("1", "experts evicted"),
    "major_faults": ("1", "major page faults of the process"),
    "rss_bytes": ("byte", "resident set of the process after the evaluation"),
    "cache_resident_bytes": ("byte", "bytes of resident experts after the evaluation"),
}
"""Variables (token) float64, one value per evaluation on its first token, NaN elsewhere.

Name to (units, long name) of the known ones. The list is open: a recorder may add names.
"""

ATTRIBUTES: dict[str, AttributeSpec] = {
    spec.name: spec
    for spec in (
        AttributeSpec("schema_version", "int", "version of this form", required=True),
        AttributeSpec("n_expert", "int", "experts per layer", required=True),
        AttributeSpec(
            "n_expert_used_model",
            "int",
            "experts per token that the model file asks for; `n_expert_used` is what ran",
        ),
        AttributeSpec(
            "lossless",
            "flag",
            "1 if what ran is exactly what the router chose, with its weights",
            required=True,
            # A file of another engine may not say; nor can a replay of it know.
            unless=("import", "replay"),
        ),
        AttributeSpec(
            "complete",
            "flag",
            "1 if the run ended as planned; 0 if it was interrupted, failed or was killed",
            required=True,
        ),
        AttributeSpec("source", "str", "live, replay, import or synthetic", required=True),
        AttributeSpec("record", "str", "record level: ids, scores or scores16"),
        AttributeSpec("score_exact", "flag", "0 if router_score was rounded to float16"),
        AttributeSpec("replayed_from", "json", "what a replayed trace said of its own run"),
        AttributeSpec("replay_settings", "json", "policies and seed that the replay was asked for"),
        AttributeSpec("replay_totals", "json", "lookups, hits, bytes read, evictions by phase"),
        AttributeSpec(
            "counterfactual", "flag", "1 if a replayed policy could not act on the model"
        ),
        AttributeSpec("instrumented", "flag", "1 if recording slowed the run down"),
        AttributeSpec("cache_start", "str", "cold or warm"),
        AttributeSpec(
            "cold_turns", "flag", "1 if the cache was emptied at the start of every turn"
        ),
        AttributeSpec("cache_budget_bytes", "int", "bytes allowed to resident experts"),
        AttributeSpec("policy", "str", "repr of the routing policy"),
        AttributeSpec("policy_settings", "json", "routing policy: name and parameters"),
        AttributeSpec("policy_fired", "flag", "1 if a lossy policy changed anything"),
        AttributeSpec("policy_counters", "json", "what a lossy policy looked at and changed"),
        AttributeSpec("residency_policy", "str", "repr of the residency policy"),
        AttributeSpec("session_settings", "json", "settings of the session as resolved"),
        AttributeSpec("run_settings", "json", "settings of the run as resolved"),
        AttributeSpec("model_name", "str", "general.name of the model, or its file name"),
        AttributeSpec("model_bytes", "int", "size of the model's files"),
        AttributeSpec("model_fingerprint", "str", "SHA-256 that identifies the model"),
        AttributeSpec("arch", "str", "general.architecture of the model"),
        AttributeSpec("seed", "int", "seed of sampling and of random policies"),
        AttributeSpec("machine", "json", "processor, memory, operating system"),
        AttributeSpec("start_time", "str", "ISO 8601, UTC"),
        AttributeSpec("bmoe_lab_version", "str", "version of this package"),
        AttributeSpec("llama_cpp_python_version", "str", "version of llama-cpp-python"),
        AttributeSpec("llama_cpp_commit", "str", "commit of llama.cpp"),
        AttributeSpec("ended_by", "str", "why the run ended"),
        AttributeSpec(
            "journal_note", "str", "what a reader of an unfinished recording had to drop"
        ),
    )
}
"""Every attribute with a fixed meaning, by name. Others may be added; absent means unknown."""


def variable_attrs(name: str) -> dict[str, Any]:
    """Return the CF attributes of a variable: ``units``, ``long_name``, flags.

    Parameters
    ----------
    name : str
        A name of :data:`VARIABLES`, or any cost.

    Examples
    --------
    >>> variable_attrs("phase")["flag_meanings"]
    'prefill decode draft'
    """
    spec = VARIABLES.get(name)
    if spec is None:
        return cost_attrs(name)
    attrs: dict[str, Any] = {"long_name": spec.meaning}
    if spec.units:
        attrs["units"] = spec.units
    if spec.flags is not None:
        # CF wants the dtype of the variable itself.
        attrs["flag_values"] = np.array([flag.value for flag in spec.flags], dtype=spec.dtypes[0])
        attrs["flag_meanings"] = " ".join(flag.name for flag in spec.flags)
    return attrs


def cost_attrs(name: str) -> dict[str, str]:
    """Return ``units`` and ``long_name`` of a per-evaluation cost.

    Parameters
    ----------
    name : str
        A name of :data:`COSTS`, or another one that ends in ``_s``, ``_bytes`` or neither.

    Examples
    --------
    >>> cost_attrs("queue_s")
    {'long_name': 'queue', 'units': 's'}
    """
    if name in COSTS:
        units, meaning = COSTS[name]
        return {"long_name": meaning, "units": units}
    for ending, units in (("_s", "s"), ("_bytes", "byte")):
        if name.endswith(ending):
            return {"long_name": name.removesuffix(ending).replace("_", " "), "units": units}
    return {"long_name": name.replace("_", " "), "units": "1"}


def clean_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes in the form that every file format keeps.

    Booleans become 0 or 1, structures JSON strings, numpy scalars Python ones. ``None`` is left
    out: an absent value is absent.

    Parameters
    ----------
    attrs : mapping
        What to store.

    Raises
    ------
    SchemaError
        If a value has no such form.

    Examples
    --------
    >>> clean_attrs({"lossless": True, "seed": None, "cache": {"budget": 4}})
    {'lossless': 1, 'cache': '{"budget": 4}'}
    """
    return {
        str(name): _clean_attr(name, value) for name, value in attrs.items() if value is not None
    }


def _clean_attr(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (enum.IntEnum, int)):
        return int(value)
    if isinstance(value, (str, float)):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iuf":
        return value
    if isinstance(value, (list, tuple, dict)):
        try:
            # JSON has no NaN: what is unknown is left out.
            return json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"attribute {name!r} must be a structure that JSON can hold; got {value!r}. "
                f"{error}."
            ) from error
    raise SchemaError(
        f"attribute {name!r} must be a number, a text or a JSON structure; "
        f"got {type(value).__name__} {value!r}. Store its repr instead."
    )


def is_trace(ds: xr.Dataset) -> bool:
    """Return whether a Dataset says that it is a trace.

    Parameters
    ----------
    ds : xarray.Dataset
        Any Dataset.
    """
    return "schema_version" in ds.attrs and "expert_chosen" in ds.variables


def validate(ds: xr.Dataset, *, values: bool = True) -> xr.Dataset:
    """Return a trace unchanged if it is valid.

    A part of a trace (some tokens, some layers) is a valid trace too. Variables and attributes that
    the schema does not name are left alone.

    Parameters
    ----------
    ds : xarray.Dataset
        What should be a trace. Data on disk stays there: it is read in windows.
    values : bool, default True
        Check the values too, not only names, dims, dtypes and attributes.

    Raises
    ------
    SchemaError
        With the first rule that does not hold, and where.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, seed=0)
    >>> validate(trace) is trace
    True
    >>> validate(trace.drop_vars("action"))
    Traceback (most recent call last):
    bmoe_lab.errors.SchemaError: trace must have the variable 'action'; got [...]. ...
    """
    if not isinstance(ds, xr.Dataset):
        raise SchemaError(
            f"trace must be an xarray.Dataset; got {type(ds).__name__}. "
            "Pass one node of a tree as node.to_dataset()."
        )
    # Imported here: the checks stand on the tables above.
    from bmoe_lab import validation

    validation.check_attrs(ds)
    validation.check_structure(ds)
    if values:
        validation.check_values(ds)
    return ds
