"""The trace that a replay returns: what changed, what is not known, what it says of itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr

from bmoe_lab import schema
from bmoe_lab._version import __version__
from bmoe_lab.metrics.cache import first_of_load
from bmoe_lab.policy_settings import policy_settings
from bmoe_lab.residency import ResidencyPolicy
from bmoe_lab.residency.loads import LoadLog
from bmoe_lab.routing import Counters, RoutingPolicy
from bmoe_lab.schema import NO_EXPERT, NOT_ROUTED, STATE_PREFIX, Residency
from bmoe_lab.simulation.routed import Routed
from bmoe_lab.simulation.stream import PHASE_NAMES, LoadStream

__all__ = ["RECORDED", "replayed_trace"]

#: What stands for a residency policy where the recorded residency stands.
RECORDED = "recorded"

# What a trace says of the run that recorded it, not of a replay.
_OF_THE_RUN = frozenset(
    {"session_settings", "run_settings", "machine", "start_time", "ended_by", "journal_note",
     "llama_cpp_python_version", "llama_cpp_commit", "instrumented"}
)  # fmt: skip
# The same, of other engines: what their files tell of a run's settings, speed and layout.
_OF_ANOTHER_ENGINE = ("engine_", "bigmoeonedge_")
_OF_THE_POLICY = frozenset({"policy", "policy_settings", "policy_fired", "policy_counters"})


def replayed_trace(
    trace: xr.Dataset,
    stream: LoadStream,
    log: LoadLog,
    *,
    cache: ResidencyPolicy | None,
    routing: RoutingPolicy | None,
    routed: Routed | None,
    warm: bool,
    seed: int,
) -> xr.Dataset:
    """Return `trace` with what a replay found in place of what was recorded.

    Parameters
    ----------
    trace : xarray.Dataset
        What was replayed; not changed.
    stream, log : LoadStream, LoadLog
        Its loads, and what the cache did.
    cache : ResidencyPolicy or None
        None: the recorded residency stands.
    routing, routed : RoutingPolicy or None, Routed or None
        The routing policy, and what ran under it.
    warm : bool
        Whether the cache began with what the recorded run began with.
    seed : int
        Of the routing policy.
    """
    attrs = _attrs(trace, cache, routing, warm=warm, seed=seed)
    if routed is None:
        fields = _cache_fields(trace, stream, log)
    else:
        assert routing is not None
        fields = _routed_fields(trace, stream, routed)
        attrs |= _policy_attrs(routed.counters, lossless=routing.lossless)
    result = _dataset(trace, fields, attrs, routing=routing is not None, warm=warm)
    if cache is not None:
        result = result.assign(_cache_costs(trace, stream, log))
    result.attrs["replay_totals"] = json.dumps(_totals(result))
    return result


def _scattered(like: xr.DataArray, cells: Any, values: Any, fill: Any, dtype: Any) -> Any:
    flat = np.full(like.size, fill, dtype)
    flat[cells] = values
    return flat.reshape(like.shape)


def _cache_fields(trace: xr.Dataset, stream: LoadStream, log: LoadLog) -> dict[str, Any]:
    like = trace["expert_applied"]
    size = np.asarray(trace["expert_bytes"].values, dtype=np.int64)
    return {
        "residency": _scattered(like, stream.cells, log.residency, NOT_ROUTED, np.uint8),
        "read_bytes": _scattered(
            like, stream.cells, log.first * size[stream.per_row(stream.layer)], 0, np.uint32
        ),
    }


def _routed_fields(trace: xr.Dataset, stream: LoadStream, routed: Routed) -> dict[str, Any]:
    like, cells = trace["expert_chosen"], stream.cells
    expert_bytes = np.asarray(trace["expert_bytes"].values, dtype=np.int64)
    size = expert_bytes[stream.per_row(stream.layer)]
    fields = {
        "expert_applied": _scattered(like, cells, routed.expert, NO_EXPERT, np.int16),
        "action": _scattered(like, cells, routed.action, NOT_ROUTED, np.uint8),
        "residency": _scattered(like, cells, routed.log.residency, NOT_ROUTED, np.uint8),
        "read_bytes": _scattered(like, cells, routed.log.first * size, 0, np.uint32),
    }
    if "weight_chosen" in trace.variables:
        fields["weight_applied"] = _scattered(like, cells, routed.weight, np.nan, np.float32)
    return fields


def _dataset(
    trace: xr.Dataset,
    fields: dict[str, Any],
    attrs: dict[str, Any],
    *,
    routing: bool,
    warm: bool,
) -> xr.Dataset:
    dims = ("token", "layer", "slot")
    gone = [
        name
        for name, variable in trace.variables.items()
        if name in schema.COSTS
        or (str(name).startswith(STATE_PREFIX) and not warm)
        # Costs of any name: per evaluation, on its first token.
        or (variable.dims == ("token",) and variable.dtype == np.float64)
    ]
    if routing:
        # What the model would have said after another expert, nobody knows.
        gone += [name for name in ("logprob",) if name in trace.variables]
    result = trace.drop_vars(gone)
    result = result.assign(
        {
            name: xr.Variable(dims, values, schema.variable_attrs(name))
            for name, values in fields.items()
        }
    )
    result.attrs = schema.clean_attrs(attrs)
    return result


def _cache_costs(trace: xr.Dataset, stream: LoadStream, log: LoadLog) -> dict[str, xr.Variable]:
    evictions = np.full(trace.sizes["token"], np.nan)
    held = np.full(trace.sizes["token"], np.nan)
    if stream.n_load:  # else nothing routed
        last = np.flatnonzero(np.append(stream.token[1:] != stream.token[:-1], True))
        first = np.append(0, last[:-1] + 1)
        evictions[stream.token[first]] = np.add.reduceat(log.evictions, first)
        held[stream.token[last]] = log.resident_bytes[last]
    return {
        name: xr.Variable(("token",), values, schema.cost_attrs(name))
        for name, values in (("evictions", evictions), ("cache_resident_bytes", held))
    }


def _attrs(
    trace: xr.Dataset,
    cache: ResidencyPolicy | None,
    routing: RoutingPolicy | None,
    *,
    warm: bool,
    seed: int,
) -> dict[str, Any]:
    attrs = {
        name: value
        for name, value in trace.attrs.items()
        if name not in _OF_THE_RUN and not str(name).startswith(_OF_ANOTHER_ENGINE)
    }
    # How many experts were asked for decides what was routed, whoever replays it.
    width = json.loads(trace.attrs.get("session_settings", "{}")).get("n_expert_used")
    if width is not None:
        attrs["session_settings"] = {"n_expert_used": width}
    told = ("source", "residency_policy", "cache_budget_bytes", "cache_start", "policy", "lossless")
    attrs["replayed_from"] = {name: trace.attrs[name] for name in told if name in trace.attrs}
    attrs["source"] = "replay"
    attrs["bmoe_lab_version"] = __version__
    attrs["replay_settings"] = {
        "residency": RECORDED if cache is None else repr(cache),
        "routing": None if routing is None else repr(routing),
        "seed": seed,
    }
    if cache is not None:
        attrs["residency_policy"] = repr(cache)
        attrs["cache_budget_bytes"] = cache.budget_bytes
        attrs["cache_start"] = "warm" if warm else "cold"
    if routing is not None:
        for name in _OF_THE_POLICY:
            attrs.pop(name, None)
        attrs["policy"] = repr(routing)
        attrs["policy_settings"] = policy_settings(routing)
        # The router's choices already answer what a lossy run did to earlier layers.
        attrs["counterfactual"] = not (routing.lossless and trace.attrs.get("lossless") == 1)
        attrs["seed"] = seed
        if not routing.lossless:
            attrs["lossless"] = 0
        elif "lossless" in attrs:
            attrs["lossless"] = 1
    return attrs


def _policy_attrs(counters: Counters, *, lossless: bool) -> dict[str, Any]:
    if lossless:
        return {}
    return {"policy_fired": counters.fired, "policy_counters": counters.to_dict()}


def _totals(trace: xr.Dataset) -> dict[str, dict[str, int]]:
    """Return lookups, hits, read bytes and evictions of each phase that occurs."""
    lookup = first_of_load(trace).values
    residency = np.asarray(trace["residency"].values)
    hit = lookup & ((residency == Residency.hit) | (residency == Residency.hit_speculative))
    phase = np.asarray(trace["phase"].values)
    read = np.asarray(trace["read_bytes"].values)
    totals = {}
    for number, name in PHASE_NAMES.items():
        rows = phase == number
        if not rows.any():
            continue
        totals[name] = {
            "lookups": int(lookup[rows].sum()),
            "hits": int(hit[rows].sum()),
            "read_bytes": int(read[rows].sum(dtype=np.int64)),
        }
        if "evictions" in trace.variables:
            totals[name]["evictions"] = int(np.nansum(trace["evictions"].values[rows]))
    return totals
