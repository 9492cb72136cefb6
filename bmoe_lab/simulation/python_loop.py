"""The coupled replay of policies written in Python: load by load, as a live session calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.residency import ResidencyState
from bmoe_lab.residency.loads import LoadLog
from bmoe_lab.routing.applying import DROPPED, SUBSTITUTED
from bmoe_lab.routing.base import Routing
from bmoe_lab.routing.engine import Engine, strongest
from bmoe_lab.simulation.routed import Routed, RoutedRows, known_weights

__all__ = ["run_python"]

Array = npt.NDArray[Any]


def run_python(rows: RoutedRows, engine: Engine, state: ResidencyState | None, seed: int) -> Routed:
    """Call the policies load by load, through the engine of a live session; see `run_coupled`."""
    stream = rows.stream
    n_row, n_load, n_expert = stream.keys.size, stream.n_load, stream.n_expert
    all_ids = (stream.keys - stream.per_row(stream.layer) * n_expert).astype(np.int32)
    all_weights = known_weights(rows)
    out_ids, out_weights = all_ids.copy(), all_weights.copy()
    out_action, out_residency = np.zeros(n_row, np.uint8), np.empty(n_row, np.uint8)
    out_first = np.empty(n_row, np.bool_)
    evictions, resident_bytes = np.zeros(n_load, np.int64), np.zeros(n_load, np.int64)
    resident = np.zeros(stream.n_key, np.bool_) if state is None else state.contains()
    restarts = set(stream.restarts.tolist()[1:])
    recorded = None if rows.recorded is None else rows.recorded.astype(bool)
    acts = [phase for phase in range(3) if engine.acts_in(phase)]
    cell = 0
    offsets, layers = stream.offsets.tolist(), stream.layer.tolist()
    phases, widths = stream.phase.tolist(), rows.width.tolist()
    blocks, sizes = rows.block.tolist(), rows.expert_bytes.tolist()
    for load in range(n_load):
        if load in restarts and state is not None:
            state.clear()
            resident = state.contains()
        low, high, layer = offsets[load], offsets[load + 1], layers[load]
        shape = ((high - low) // widths[layer], widths[layer])
        ids = all_ids[low:high].reshape(shape)
        here = resident[layer * n_expert : (layer + 1) * n_expert]
        if recorded is not None:
            here[all_ids[low:high]] = recorded[low:high]
        before = here[all_ids[low:high]]
        ran, action = ids, None
        if phases[load] in acts:
            token = rows.token[cell : cell + shape[0]]
            weights = all_weights[low:high].reshape(shape)
            routing = Routing(
                layer=layer,
                block=blocks[layer],
                phase=phases[load],
                positions=rows.position[token],
                ids=ids,
                scores=None if rows.scores is None else rows.scores[token, layer],
                score_kind="softmax" if rows.log_scores[layer] else "other",
                weights=None,
                resident=here,
                expert_bytes=sizes[layer],
                seed=seed,
            )
            selection = engine.select(routing)
            if selection is not None:
                ran, action = selection.ids, selection.action
                weights = weights.copy()
                weights[(action == SUBSTITUTED).any(axis=1)] = np.nan
                out_weights[low:high] = weights.ravel()
            if engine.weighs:
                routing.ids, routing.weights = ran, weights
                weighing = engine.weigh(routing)
                if weighing is not None:
                    ran = weighing.ids
                    out_weights[low:high] = weighing.weights.ravel()
                    action = (
                        weighing.action if action is None else strongest(action, weighing.action)
                    )
            if action is not None:
                out_action[low:high] = action.ravel()
                out_ids[low:high] = ran.ravel()
        if state is None:
            out_residency[low:high] = here[out_ids[low:high]]
            out_first[low:high] = _first_missing(out_ids[low:high], here)
        else:
            served = state.load(layer * n_expert + ran.ravel().astype(np.int64))
            out_residency[low:high] = served.residency
            out_first[low:high] = served.first
            evictions[load] = served.victims.size
            resident_bytes[load] = state.resident_bytes
        if action is not None:
            dropped = out_action[low:high] == DROPPED
            out_residency[low:high][dropped] = before[dropped]
        cell += shape[0]
    log = LoadLog(out_residency, out_first, evictions, resident_bytes)
    return Routed(out_ids, out_weights, out_action, log, engine.counters)


def _first_missing(ids: npt.NDArray[np.int32], here: npt.NDArray[np.bool_]) -> Array:
    first = np.zeros(ids.size, np.bool_)
    first[np.unique(ids, return_index=True)[1]] = True
    return first & ~here[ids]
