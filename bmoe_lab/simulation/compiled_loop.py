"""The coupled replay of two kernels: one compiled loop, whichever policies they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled_for
from bmoe_lab.residency import KernelState
from bmoe_lab.residency.loads import (
    LOAD_EVICTIONS,
    LOAD_RESIDENT_BYTES,
    N_LOAD_COLUMNS,
    NO_FUTURE,
    LoadLog,
)
from bmoe_lab.residency.signature import KERNEL_TYPE
from bmoe_lab.routing.applying import (
    DROPPED,
    KEPT,
    SUBSTITUTED,
    align_selection,
    count_missing,
    drop_slots,
    first_bad_id,
    known_sum,
)
from bmoe_lab.routing.counters import Counters
from bmoe_lab.routing.engine import Engine
from bmoe_lab.routing.signature import SELECT_TYPE, WEIGH_TYPE
from bmoe_lab.simulation.routed import Routed, RoutedRows, known_weights

__all__ = ["run_compiled"]

# Cells of the counters that the loop fills.
_ROUTINGS, _EXAMINED, _ELIGIBLE, _CHANGED, _DROPPED, _SUBSTITUTED = 0, 1, 2, 3, 4, 5
_WEIGHT_TOTAL, _WEIGHT_DISCARDED, _BYTES_SAVED = 6, 7, 8
_N_COUNTS = 9

_i1 = types.Array(types.int64, 1, "C")
_i2 = types.Array(types.int64, 2, "C")
_f2 = types.Array(types.float64, 2, "C")
_b1 = types.Array(types.boolean, 1, "C")
_u1 = types.Array(types.uint8, 1, "C")
_ids = types.Array(types.int32, 1, "C")
_weights = types.Array(types.float32, 1, "C")

_WALK = types.int64(
    types.boolean,  # selects
    SELECT_TYPE,
    WEIGH_TYPE,
    KERNEL_TYPE,
    _ids,  # ids
    _weights,  # weights
    types.Array(types.float32, 3, "C"),  # scores
    _ids,  # position
    _i1,  # token
    _i1,  # offsets
    _i1,  # load_layer
    _b1,  # acts
    types.int64,  # begin
    types.int64,  # end
    types.int64,  # first_cell
    _i1,  # width
    types.int64,  # n_expert
    _b1,  # log_scores
    types.int64,  # seed
    _f2,  # parameters
    _f2,  # memory
    types.boolean,  # renormalise
    types.int64,  # pinned
    _i1,  # expert_bytes
    _u1,  # recorded
    _i1,  # key_bytes
    types.int64,  # budget
    _i1,  # header
    _i2,  # table
    _i1,  # extra
    _b1,  # resident
    _i2,  # out_keys
    _ids,  # out_ids
    _weights,  # out_weights
    _u1,  # out_action
    _u1,  # out_residency
    _b1,  # out_first
    _i2,  # out_loads
    types.Array(types.float64, 1, "C"),  # counts
)


@compiled_for(SELECT_TYPE.signature)
def _no_select(ids, values, resident, positions, layer, seed, log_scores, parameters, state, out):  # type: ignore[no-untyped-def]
    return 0


@compiled_for(WEIGH_TYPE.signature)
def _no_weigh(ids, values, resident, positions, layer, seed, log_scores, parameters, state, out):  # type: ignore[no-untyped-def]
    return 0


@compiled_for(KERNEL_TYPE.signature)
def _serve_recorded(  # type: ignore[no-untyped-def]
    keys, offsets, begin, end, future, key_bytes, budget, header, table, extra, resident,
    out_residency, out_first, out_keys, out_loads,
):  # fmt: skip
    """Stand in for a cache whose residency is known: `resident` holds it for this load's keys."""
    for load in range(begin, end):
        n_missing = 0
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            out_residency[row] = resident[key]
            first = not resident[key]
            for earlier in range(n_missing):
                if out_keys[0, earlier] == key:
                    first = False
            if first:
                out_keys[0, n_missing] = key
                n_missing += 1
            out_first[row] = first
        out_loads[load, 0] = 0
        out_loads[load, 1] = 0
    return -1


@compiled_for(_WALK)
def _walk(  # type: ignore[no-untyped-def]
    selects, select, weigh, serve, ids, weights, scores, position, token, offsets, load_layer,
    acts, begin, end, first_cell, width, n_expert, log_scores, seed, parameters, memory,
    renormalise, pinned, expert_bytes, recorded, key_bytes, budget, header, table, extra,
    resident, out_keys, out_ids, out_weights, out_action, out_residency, out_first, out_loads,
    counts,
):  # fmt: skip
    """Run loads `begin` to `end`; return -1, or the load whose answer could not be applied."""
    cell = first_cell
    future = np.empty(0, np.int64)
    bounds = np.zeros(2, np.int64)
    load_out = np.empty((1, 2), np.int64)
    for load in range(begin, end):
        low, high = offsets[load], offsets[load + 1]
        layer = load_layer[load]
        k = width[layer]
        n_cell = (high - low) // k
        chosen = ids[low:high].reshape(n_cell, k)
        ran = out_ids[low:high].reshape(n_cell, k)
        ran[:] = chosen
        weight = weights[low:high].reshape(n_cell, k)
        ran_weight = out_weights[low:high].reshape(n_cell, k)
        ran_weight[:] = weight
        action = out_action[low:high].reshape(n_cell, k)
        action[:] = KEPT
        here = resident[layer * n_expert : (layer + 1) * n_expert]
        if recorded.size:
            for row in range(low, high):
                here[ids[row]] = recorded[row] != 0
        if acts[load]:
            positions = np.empty(n_cell, np.int32)
            for i in range(n_cell):
                positions[i] = position[token[cell + i]]
            counts[_ROUTINGS] += n_cell
            counts[_EXAMINED] += n_cell * k
            counts[_ELIGIBLE] += n_cell * max(k - pinned, 0)
            n_changed = 0
            if selects:
                values = np.empty((n_cell if scores.size else 0, n_expert), np.float32)
                for i in range(values.shape[0]):
                    values[i] = scores[token[cell + i], layer]
                new = chosen.copy()
                n_changed = select(
                    chosen, values, here, positions, layer, seed, log_scores[layer],
                    parameters[layer], memory[layer], new,
                )  # fmt: skip
                if n_changed > 0:
                    wide = new.astype(np.int64)
                    if first_bad_id(wide, n_expert)[0]:
                        return load
                    n_changed = align_selection(chosen, wide, ran, action)
                    counts[_SUBSTITUTED] += n_changed
                    for i in range(n_cell):
                        altered = False
                        for slot in range(k):
                            altered |= action[i, slot] == SUBSTITUTED
                        if altered:
                            # The graph computes the weights of the new set; no trace knows them.
                            ran_weight[i] = np.nan
            else:
                counts[_WEIGHT_TOTAL] += known_sum(weight)
                drop = np.zeros((n_cell, k), np.bool_)
                n_changed = weigh(
                    chosen, weight, here, positions, layer, seed, log_scores[layer],
                    parameters[layer], memory[layer], drop,
                )  # fmt: skip
                if n_changed > 0:
                    n_changed, discarded = drop_slots(
                        drop, renormalise, chosen, weight, ran, ran_weight, action
                    )
                    counts[_DROPPED] += n_changed
                    counts[_WEIGHT_DISCARDED] += discarded
            if n_changed > 0:
                counts[_CHANGED] += n_changed
                counts[_BYTES_SAVED] += (
                    count_missing(chosen, here) - count_missing(ran, here)
                ) * expert_bytes[layer]
        keys = np.empty(high - low, np.int64)
        for row in range(low, high):
            keys[row - low] = layer * n_expert + out_ids[row]
            # A dropped slot shows where the expert was that it does without.
            out_residency[row] = here[ids[row]]
        bounds[1] = high - low
        found = np.empty(high - low, np.uint8)
        serve(
            keys, bounds, 0, 1, future, key_bytes, budget, header, table, extra, resident,
            found, out_first[low:high], out_keys, load_out,
        )  # fmt: skip
        for row in range(low, high):
            if out_action[row] != DROPPED:
                out_residency[row] = found[row - low]
        out_loads[load] = load_out[0]
        cell += n_cell
    return -1


def run_compiled(rows: RoutedRows, engine: Engine, state: KernelState | None, seed: int) -> Routed:
    """Run a routing kernel and a residency kernel over all loads; see `run_coupled`."""
    stream, policy = rows.stream, engine.policy
    n_row, n_load, n_key = stream.keys.size, stream.n_load, stream.n_key
    selects = policy.stage == "select"
    # Uncopied where they have the form already; an empty array stands for what is not known.
    ids = (stream.keys - stream.per_row(stream.layer) * stream.n_expert).astype(np.int32)
    weights = known_weights(rows)
    scores = np.empty((0, 0, 0), np.float32) if rows.scores is None else rows.scores
    out_ids, out_weights = np.empty(n_row, np.int32), np.empty(n_row, np.float32)
    out_action, out_residency = np.empty(n_row, np.uint8), np.empty(n_row, np.uint8)
    out_first = np.empty(n_row, np.bool_)
    out_loads = np.empty((n_load, N_LOAD_COLUMNS), np.int64)
    counts = np.zeros(_N_COUNTS)
    if state is None:
        serve: Any = _serve_recorded
        recorded = rows.recorded
        key_bytes, budget = np.zeros(n_key, np.int64), 0
        header, table, extra = np.zeros(1, np.int64), np.zeros((1, 1), np.int64), NO_FUTURE
        resident, out_keys = np.zeros(n_key, np.bool_), np.empty((2, n_key), np.int64)
    else:
        serve = state.policy.kernel
        recorded = np.empty(0, np.uint8)
        key_bytes, budget = state.key_bytes, state.budget_bytes
        header, table, extra = state.header, state.table, state.extra
        resident, out_keys = state.resident, state.out_keys
    cells = np.concatenate(([0], np.cumsum(np.diff(stream.offsets) // rows.width[stream.layer])))
    for number, (begin, end) in enumerate(stream.segments()):
        if number and state is not None:
            state.clear()
        failed = _walk(  # type: ignore[no-untyped-call]  # numba types, above
            selects, policy.kernel if selects else _no_select,
            _no_weigh if selects else policy.kernel, serve,
            ids, weights, np.ascontiguousarray(scores, np.float32), rows.position, rows.token,
            stream.offsets, stream.layer, np.isin(stream.phase, list(policy.phases)),
            begin, end, int(cells[begin]), rows.width, stream.n_expert, rows.log_scores, seed,
            policy.layer_parameters(stream.n_layer),
            policy.layer_state(stream.n_layer, stream.n_expert), policy.renormalise,
            policy.pinned, rows.expert_bytes, recorded, key_bytes, budget, header, table, extra,
            resident, out_keys, out_ids, out_weights, out_action, out_residency, out_first,
            out_loads, counts,
        )  # fmt: skip
        if failed >= 0:
            raise PolicyError(
                f"ids from the kernel of {policy!r} must be distinct and lie in "
                f"[0, {stream.n_expert}); got others in layer {int(stream.layer[failed])}, "
                f"token {int(stream.token[failed])}."
            )
    integers = [int(counts[i]) for i in range(_WEIGHT_TOTAL)]
    counters = Counters(
        routings=integers[_ROUTINGS],
        examined=integers[_EXAMINED],
        eligible=integers[_ELIGIBLE],
        changed=integers[_CHANGED],
        dropped=integers[_DROPPED],
        substituted=integers[_SUBSTITUTED],
        weight_total=float(counts[_WEIGHT_TOTAL]),
        weight_discarded=float(counts[_WEIGHT_DISCARDED]),
        bytes_saved=int(counts[_BYTES_SAVED]),
    )
    log = LoadLog(
        out_residency, out_first, out_loads[:, LOAD_EVICTIONS], out_loads[:, LOAD_RESIDENT_BYTES]
    )
    return Routed(out_ids, out_weights, out_action, log, counters)
