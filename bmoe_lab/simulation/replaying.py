"""A recorded trace again under other policies, without the model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import (
    PolicyError,
    PolicyNeverFiredWarning,
    SchemaError,
    SettingsError,
    unknown_name,
)
from bmoe_lab.residency import ResidencyPolicy, ResidencyState
from bmoe_lab.residency import get as residency_class
from bmoe_lab.routing import ModelFacts, RoutingPolicy
from bmoe_lab.routing.engine import as_policy
from bmoe_lab.schema import STATE_PREFIX, Action, Residency
from bmoe_lab.simulation.coupled import run_coupled
from bmoe_lab.simulation.plan import trace_facts
from bmoe_lab.simulation.replayed_trace import RECORDED, replayed_trace
from bmoe_lab.simulation.routed import Routed, RoutedRows
from bmoe_lab.simulation.serving import serve_around_dropped, serve_stream
from bmoe_lab.simulation.stream import cache_facts, load_stream

__all__ = ["RECORDED", "as_residency", "replay"]


def replay(
    trace: xr.Dataset,
    *,
    residency: ResidencyPolicy | str,
    routing: RoutingPolicy | None = None,
    budget: int | str | None = None,
    start: Literal["recorded", "cold"] = "recorded",
    seed: int = 0,
) -> xr.Dataset:
    """Return the trace as it would have been under other policies.

    Without `routing`, what ran stands and only the cache is another: exact, row for row what a
    live session with that cache records. With `routing`, the router's recorded choices pass
    through the policy and the cache together. That is *open loop*: a changed expert changes what
    later layers and tokens would have chosen, which no replay can know; the result carries
    ``counterfactual = 1``. Its quality comes only from the model (:meth:`bmoe_lab.Session.score`,
    :func:`bmoe_lab.compare`).

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace; see :mod:`bmoe_lab.schema`.
    residency : ResidencyPolicy or str
        A policy, the name of one, or ``"recorded"``: the recorded residency stands and only
        `routing` acts (static replay).
    routing : RoutingPolicy, optional
        Starts from ``expert_chosen``, the router's own choice.
    budget : int or str, optional
        Bytes allowed, such as ``"2 GiB"``, where the residency policy has none of its own.
    start : {"recorded", "cold"}, default "recorded"
        As the run began, or with an empty cache. A warm run holds the state of its own policy;
        no other can go on from it.
    seed : int, default 0
        Of routing policies with random parts.

    Returns
    -------
    xarray.Dataset
        A trace with ``source = "replay"``: every metric and figure works on it. New are
        ``expert_applied``, ``weight_applied``, ``action``, ``residency``, ``read_bytes`` and the
        costs ``evictions``, ``cache_resident_bytes``; times are absent, since nothing was timed.
        Totals by phase are in the attribute ``replay_totals`` (JSON), what was replayed in
        ``replayed_from``.

    Raises
    ------
    SchemaError
        If the trace lacks what the replay needs, such as ``expert_bytes``.
    PolicyError
        If a policy cannot mean anything here: no scores were recorded, no cache, the future is
        asked for where a routing policy changes it.
    SettingsError
        If there is no budget, or two; if `budget` or `start` is given for ``"recorded"``.
    UnknownNameError
        If a residency policy's name or `start` is not known.

    Warns
    -----
    PolicyNeverFiredWarning
        If a lossy routing policy changed nothing.

    See Also
    --------
    sweep : The same over a grid of policies and budgets.

    Notes
    -----
    A dropped slot is not looked up; it names its routing's best kept expert, and its residency is
    that of the expert that was dropped. A substituted routing's weights are NaN: the graph would
    compute them. ``residency="recorded"`` knows only the chosen experts, so policies that look for
    others are refused; in a wide evaluation an expert that one token drops is still read if
    another one asks for it. Definitions: BigMoeOnEdge, ``route-replay.py`` and
    ``route-drop-replay.py`` (0.20.0).

    Examples
    --------
    >>> import json
    >>> import bmoe_lab as bl
    >>> trace = bl.testing.make_trace(n_token=32, n_layer=2, seed=0)
    >>> again = replay(trace, residency=bl.residency.LRU("300 KiB"))
    >>> again.attrs["source"], sorted(json.loads(again.attrs["replay_totals"]))
    ('replay', ['decode', 'prefill'])
    """
    _check_read_bytes(trace)
    static = isinstance(residency, str) and residency == RECORDED
    if start not in ("recorded", "cold"):
        raise unknown_name("start", start, ["cold", "recorded"])
    if static:
        if routing is None:
            raise SettingsError(
                "routing must be given where the recorded residency stands; got None. "
                "Pass a routing policy, or a residency policy to replay the cache."
            )
        if budget is not None:
            raise SettingsError(
                f"budget must be left out where the recorded residency stands; got {budget!r}. "
                "It is that of the run."
            )
        if start != "recorded":
            raise SettingsError(
                f"start must be left out where the recorded residency stands; got {start!r}. "
                "Pass a residency policy to begin with an empty cache."
            )
    cache = None if static else as_residency(residency, budget)
    routed: Routed | None = None
    if routing is None:
        assert cache is not None
        stream = load_stream(trace)
        state, warm = _start_state(trace, cache, start)
        dropped = np.asarray(trace["action"].values).ravel()[stream.cells] == Action.dropped
        if dropped.any():
            chosen = np.asarray(trace["expert_chosen"].values).ravel()[stream.cells]
            chosen = chosen.astype(np.int64) + stream.per_row(stream.layer) * stream.n_expert
            log = serve_around_dropped(stream, cache, state, chosen, dropped)
        else:
            log = serve_stream(stream, cache, state)
    else:
        policy = as_policy(routing)
        _check_scores(trace, policy)
        policy.check(_facts(trace, cache))
        _check_pair(policy, cache, static)
        rows = _routed_rows(trace, static=static, needs_scores="scores" in policy.needs)
        stream = rows.stream
        held: ResidencyState | None = None
        warm = False
        if cache is not None:
            held, warm = _start_state(trace, cache, start)
        routed = run_coupled(rows, policy, held, seed=seed)
        log = routed.log
    result = replayed_trace(
        trace, stream, log, cache=cache, routing=routing, routed=routed, warm=warm, seed=seed
    )
    if routed is not None and not policy.lossless and not routed.counters.fired:
        warnings.warn(
            f"{routing!r} changed nothing in this replay: it looked at "
            f"{routed.counters.examined} slots. Its figures are those of the lossless run.",
            PolicyNeverFiredWarning,
            stacklevel=2,
        )
    return result


def as_residency(policy: ResidencyPolicy | str, budget: int | str | None) -> ResidencyPolicy:
    """Return a residency policy with a budget.

    Raises
    ------
    UnknownNameError
        If `policy` is a name that is not known.
    PolicyError
        If it is neither a name nor a policy.
    SettingsError
        If there is no budget, or two.

    Examples
    --------
    >>> as_residency("lru", "2 GiB")
    LRU(budget='2 GiB')
    """
    if isinstance(policy, str):
        policy = residency_class(policy)()
    if not isinstance(policy, ResidencyPolicy):
        raise PolicyError(
            f"residency must be a residency policy, the name of one, or 'recorded'; got "
            f"{policy!r}. For example bmoe_lab.residency.LRU('2 GiB')."
        )
    if (policy.budget is None) == (budget is None):
        given = "none" if budget is None else f"{policy.budget!r} and {budget!r}"
        raise SettingsError(
            f"budget must be given once, in {type(policy).__name__}(...) or as budget=; got "
            f"{given}. For example {type(policy).__name__}('2 GiB')."
        )
    if budget is None:
        return policy.clone()
    return type(policy)(**{**policy.get_params(), "budget": budget})


def _start_state(
    trace: xr.Dataset, policy: ResidencyPolicy, start: str
) -> tuple[ResidencyState, bool]:
    """Return the cache at the start, and whether it holds anything."""
    key_bytes, n_layer, _ = cache_facts(trace)
    assert policy.budget_bytes is not None
    arrays = {
        str(name).removeprefix(STATE_PREFIX): np.asarray(variable.values)
        for name, variable in trace.variables.items()
        if str(name).startswith(STATE_PREFIX)
    }
    if start == "cold" or trace.attrs.get("cache_start", "cold") == "cold":
        return policy.start(key_bytes, policy.budget_bytes, n_layer=n_layer), False
    recorded = str(trace.attrs.get("residency_policy", ""))
    if not arrays or not _same_rule(policy, recorded):
        raise SettingsError(
            f"start must be 'cold' for {policy!r}: the run began with what its own cache held, "
            f"{recorded or 'of an unknown policy'}, from which it cannot go on; got 'recorded'. "
            "The first loads of such a replay miss what was resident then."
        )
    state = policy.from_arrays(arrays, key_bytes, policy.budget_bytes, n_layer=n_layer)
    return state, True


def _same_rule(policy: ResidencyPolicy, recorded: str) -> bool:
    """Return whether `recorded`, a repr, differs from `policy` in no more than the budget."""

    def rule(text: str) -> str:
        name, _, rest = text.partition("(")
        parts = [part.strip() for part in rest.rstrip(")").split(",") if part.strip()]
        return name + "|".join(part for part in parts if not part.startswith("budget="))

    return rule(repr(policy)) == rule(recorded)


def _facts(trace: xr.Dataset, cache: ResidencyPolicy | None) -> ModelFacts:
    facts = trace_facts(trace)
    if cache is not None:
        budget = cache.budget_bytes
    else:
        budget = trace.attrs.get("cache_budget_bytes")
        if budget is None and "residency" in trace.variables:
            # An import may not tell; a hit proves that something was kept.
            found = np.asarray(trace["residency"].values)
            hit = (found == Residency.hit) | (found == Residency.hit_speculative)
            budget = int(facts.key_bytes.sum()) if hit.any() else None
    return replace(facts.routing, cache_budget=None if budget is None else int(budget))


def _check_scores(trace: xr.Dataset, policy: RoutingPolicy) -> None:
    if "scores" not in policy.needs or "router_score" not in trace.variables:
        return  # its own check says what is missing
    if "score_is_softmax" not in trace.variables:
        raise SchemaError(
            f"trace must say whether its scores are the output of a softmax for {policy!r}; got "
            "no 'score_is_softmax'. Traces recorded before it was stored lack it: set "
            "trace['score_is_softmax'] = ('layer', uint8 array of 0 and 1)."
        )


def _check_read_bytes(trace: xr.Dataset) -> None:
    if "expert_bytes" not in trace.variables:
        return  # refused where the sizes are needed
    largest = int(np.max(trace["expert_bytes"].values, initial=0))
    if largest > np.iinfo(np.uint32).max:
        raise SchemaError(
            f"expert_bytes must be less than 4 GiB to be replayed; got {largest}. A trace holds "
            "read_bytes as uint32; bmoe_lab.sweep counts in larger numbers."
        )


def _check_pair(policy: RoutingPolicy, cache: ResidencyPolicy | None, static: bool) -> None:
    if static and policy.acts_at("select"):
        raise PolicyError(
            f"policy must leave the choice of experts alone; got {policy!r}, which picks others, "
            "and no trace records where those were. Replay it with a residency policy, such as "
            "residency=bmoe_lab.residency.LRU('2 GiB')."
        )
    if cache is not None and not cache.online and not policy.lossless:
        raise PolicyError(
            f"residency must be an online policy where a routing policy changes what is asked "
            f"for; got {cache!r}, which needs to know the future, with {policy!r}. Replay the "
            "routing under an online policy first, then the result under this one."
        )


def _routed_rows(trace: xr.Dataset, *, static: bool, needs_scores: bool) -> RoutedRows:
    stream = load_stream(trace, which="chosen")
    used = np.asarray(trace["n_expert_used"].values, dtype=np.int64)
    shape = trace["expert_chosen"].shape
    n_slot = shape[2]
    sizes = np.diff(stream.offsets)
    uneven = np.flatnonzero(sizes % used[stream.layer])
    if uneven.size:
        load = int(uneven[0])
        raise SchemaError(
            f"every routing of layer {int(stream.layer[load])} must fill its "
            f"{int(used[stream.layer[load]])} slots; got {int(sizes[load])} rows in the evaluation "
            f"that begins at token {int(stream.token[load])}. Routing policies need whole routings."
        )
    per_row = np.repeat(used[stream.layer], sizes)
    # The first row of each routing: widths are even within a load.
    heads = np.flatnonzero(
        (np.arange(stream.keys.size) - np.repeat(stream.offsets[:-1], sizes)) % per_row == 0
    )
    scores = None
    log_scores = np.zeros(stream.n_layer, np.bool_)
    if needs_scores:
        scores = np.ascontiguousarray(trace["router_score"].values, np.float32)
        log_scores = np.asarray(trace["score_is_softmax"].values) != 0
    recorded = None
    if static:
        if "residency" not in trace.variables:
            raise SchemaError(
                "trace must hold 'residency' for residency='recorded'; got "
                f"{sorted(map(str, trace.data_vars))}. Pass a residency policy instead."
            )
        if (np.asarray(trace["action"].values) == Action.substituted).any():
            raise SchemaError(
                "trace must hold the residency of the router's own choice for "
                "residency='recorded'; got one in which a policy substituted experts, so that it "
                "tells about those. Pass a residency policy, or replay a lossless trace."
            )
        found = np.asarray(trace["residency"].values).ravel()[stream.cells]
        if (found == Residency.not_streamed).any():
            raise SchemaError(
                "trace must have been streamed for residency='recorded'; got rows that were not "
                "(residency = not_streamed). Pass a residency policy instead."
            )
        recorded = ((found == Residency.hit) | (found == Residency.hit_speculative)).astype(
            np.uint8
        )
    position = (
        np.asarray(trace["position"].values, dtype=np.int32)
        if "position" in trace.variables
        else np.arange(shape[0], dtype=np.int32)
    )
    weights = None
    if "weight_chosen" in trace.variables:
        weights = np.asarray(trace["weight_chosen"].values).ravel()[stream.cells]
    return RoutedRows(
        stream=stream,
        weights=weights,
        scores=scores,
        log_scores=log_scores,
        position=position,
        token=stream.cells[heads] // (stream.n_layer * n_slot),
        expert_bytes=np.asarray(trace["expert_bytes"].values, dtype=np.int64),
        block=np.asarray(trace["block"].values, dtype=np.int64),
        width=used,
        recorded=recorded,
    )
