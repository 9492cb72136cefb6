"""What happens at the two nodes of an expert layer, while llama.cpp waits.

At the *ids* node the experts are chosen: a policy may choose others. At the *weights* node their
final weights are known: a policy may drop slots. Whichever of the two comes last for this run is
where the experts are loaded. Only the nodes that a run needs are waited for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe_lab.errors import SeamError
from bmoe_lab.routing import engine
from bmoe_lab.routing.base import Routing
from bmoe_lab.schema import Action
from bmoe_lab.seam import tensors

if TYPE_CHECKING:
    from bmoe_lab.runtime.account import RunAccount
    from bmoe_lab.seam.callback import NodeFilter
    from bmoe_lab.seam.capture import ExpertGraph, ExpertLayer
    from bmoe_lab.streaming.streamer import Streamer

__all__ = ["IDS", "WEIGHTS", "Dispatch", "node_keys"]

#: The two nodes of a layer; entry number in the filter = 2 * layer + point.
IDS, WEIGHTS = 0, 1


def node_keys(graph: ExpertGraph) -> list[tuple[int, str, int]]:
    """Return the nodes to know, two per layer, by entry number."""
    keys = []
    for layer in graph.layers:
        keys.append((layer.ids.op, layer.ids.name, layer.ids.hops))
        weights = layer.weights
        # An op that no node has keeps the numbering regular where there is nothing to wait for.
        keys.append(
            (weights.op, weights.name, weights.hops)
            if weights is not None
            else (255, f"absent-{layer.index}", 0)
        )
    return keys


class Dispatch:
    """The handler of the eval callback for one context.

    Parameters
    ----------
    graph : ExpertGraph
    streamer : Streamer
    n_rows : int
        The widest evaluation (n_ubatch).
    """

    def __init__(self, graph: ExpertGraph, streamer: Streamer, n_rows: int) -> None:
        self._graph = graph
        self._streamer = streamer
        self._filter: NodeFilter
        width = max(layer.n_used for layer in graph.layers)
        n_expert = max(layer.n_expert for layer in graph.layers)
        self._ids = np.zeros((n_rows, width), np.int32)
        self._weights = np.zeros((n_rows, width), np.float32)
        self._scores = np.zeros((n_rows, n_expert), np.float32)
        self._all_rows = np.arange(n_rows)
        self._run: RunAccount
        self._fired = 0
        self._stage: list[Any] = []
        self.callback_s = 0.0

    def attach(self, node_filter: NodeFilter) -> None:
        """Set the filter that calls this handler."""
        self._filter = node_filter

    def begin_run(self, run: RunAccount) -> None:
        """Choose the nodes to wait for; each is a barrier in every evaluation."""
        self._run = run
        wanted = []
        self._load_at = []
        for layer in self._graph.layers:
            late = layer.weights is None or not layer.weights_before_experts
            at_weights = not late and (run.weighs or run.records)
            at_ids = run.selects or run.records_scores or run.wants_scores or not at_weights
            self._load_at.append(WEIGHTS if at_weights else IDS)
            wanted += [2 * layer.index + IDS] * at_ids + [2 * layer.index + WEIGHTS] * at_weights
        self._at_ids = [2 * layer.index + IDS in wanted for layer in self._graph.layers]
        self._filter.enable(wanted)

    def begin_evaluation(
        self, *, phase: int, positions: np.ndarray, output_rows: np.ndarray, policy_on: bool
    ) -> None:
        """Tell what the next graph evaluates; `output_rows` are those whose logits are wanted."""
        self._phase = phase
        self._positions = positions
        self._output_rows = output_rows
        self._policy_on = policy_on and self._run.policy_active(phase)
        self._fired = 0
        self._stage = []
        self.callback_s = 0.0

    def check_complete(self) -> None:
        """Raise SeamError unless every expert layer was served in the evaluation that ended."""
        n_layer = len(self._graph.layers)
        if self._fired != n_layer or self._filter.n_matmuls != self._graph.n_matmuls:
            raise SeamError(
                f"every evaluation must pass all {n_layer} expert layers and "
                f"{self._graph.n_matmuls} expert matmuls; got {self._fired} and "
                f"{self._filter.n_matmuls}. The logits of this evaluation are not to be used."
            )

    def __call__(self, tensor: int, entry: int) -> None:
        """Handle one node; runs inside llama.cpp."""
        started = time.perf_counter()
        layer = self._graph.layers[entry >> 1]
        if entry & 1 == IDS:
            self._on_ids(layer, tensor)
        else:
            self._on_weights(layer, tensor)
        self.callback_s += time.perf_counter() - started

    def _rows_of(self, n: int, layer: ExpertLayer) -> np.ndarray:
        """Return which tokens of the evaluation the `n` routings of a layer belong to."""
        n_token = len(self._positions)
        if n == n_token:
            return self._all_rows[:n]
        # The last layer routes only the rows whose logits were asked for.
        if n == len(self._output_rows):
            return self._output_rows
        raise SeamError(
            f"block {layer.block} must route all {n_token} tokens or the "
            f"{len(self._output_rows)} with logits; got {n} rows."
        )

    def _on_ids(self, layer: ExpertLayer, tensor: int) -> None:
        n = int(tensors.gather_ids(tensor, layer.n_used, self._ids))
        rows = self._rows_of(n, layer)
        chosen = self._ids[:n, : layer.n_used]
        load_here = self._load_at[layer.index] == IDS
        if n == 0:
            self._fired += load_here
            self._stage = [layer.index, 0]
            return
        run = self._run
        selecting = self._policy_on and run.selects
        scores = None
        wanted = run.records_scores or (self._policy_on and run.wants_scores)
        if wanted and layer.sorted_hops >= 0:
            scores = self._scores[:n, : layer.n_expert]
            tensors.gather_scores(tensor, layer.sorted_hops, scores)
        applied, action = chosen, None
        if selecting:
            routing = self._routing(layer, rows, chosen, scores, None)
            selection = run.select(routing)
            if selection is not None:
                applied, action = selection.ids, selection.action
                tensors.scatter_ids(tensor, applied)
        self._stage = [layer.index, n, rows, chosen, applied, action, scores, None]
        if load_here:
            self._load(layer, None, None)

    def _on_weights(self, layer: ExpertLayer, tensor: int) -> None:
        ids_tensor = self._filter.address(2 * layer.index + IDS)
        if not self._at_ids[layer.index]:
            n = int(tensors.gather_ids(ids_tensor, layer.n_used, self._ids))
            chosen = self._ids[:n, : layer.n_used]
            rows = self._rows_of(n, layer)
            self._stage = [layer.index, n, rows, chosen, chosen, None, None, None]
        if self._stage[0] != layer.index:
            raise SeamError(
                f"block {layer.block} must be routed before it is weighed; got block "
                f"{self._graph.layers[self._stage[0]].block} routed last."
            )
        n = self._stage[1]
        if n == 0:
            self._fired += 1
            return
        weights = self._weights[:n, : layer.n_used]
        tensors.gather_float(tensor, layer.n_used, n, weights)
        run = self._run
        applied_weights = weights
        if self._policy_on and run.weighs:
            _, _, rows, _, ids, _, scores, _ = self._stage
            routing = self._routing(layer, rows, ids, scores, weights)
            result = run.weigh(routing)
            if result is not None:
                # Judged now: the load that follows changes it.
                self._stage[7] = routing.resident[ids].astype(np.uint8)
                self._stage[4] = result.ids
                selected = self._stage[5]
                self._stage[5] = (
                    result.action if selected is None else engine.strongest(selected, result.action)
                )
                applied_weights = result.weights
                if result.dropped:
                    tensors.scatter_ids(ids_tensor, result.ids)
                tensors.scatter_float(tensor, result.weights)
        self._load(layer, weights, applied_weights)

    def _routing(
        self,
        layer: ExpertLayer,
        rows: np.ndarray,
        ids: np.ndarray,
        scores: np.ndarray | None,
        weights: np.ndarray | None,
    ) -> Routing:
        return Routing(
            layer=layer.index,
            block=layer.block,
            phase=self._phase,
            positions=self._positions[rows],
            ids=ids,
            scores=scores,
            score_kind=layer.score_kind,
            weights=weights,
            resident=self._streamer.resident(layer.index)[: layer.n_expert],
            expert_bytes=layer.expert_bytes,
            seed=self._run.seed,
        )

    def _load(
        self,
        layer: ExpertLayer,
        weights: np.ndarray | None,
        applied_weights: np.ndarray | None,
    ) -> None:
        _, n, rows, chosen, applied, action, scores, found = self._stage
        load = self._streamer.load(layer.index, applied)
        self._fired += 1
        run = self._run
        run.count_load(layer.index, layer.expert_bytes, applied, load, repeats=action is not None)
        if run.recorder is None:
            return
        shape = (n, layer.n_used)
        residency = load.residency.reshape(shape)
        if action is None:
            action = run.kept[:n, : layer.n_used]
            weight_chosen = weights
        else:
            # A dropped expert is not looked up: it was dropped because it was not resident, or
            # whatever its residency was when it was routed.
            dropped = action == Action.dropped
            if found is not None and dropped.any():
                residency = residency.copy()
                residency[dropped] = found[dropped]
            # The router's weights for ids that it chose and that did not run are not computed.
            weight_chosen = weights
            substituted = (action == Action.substituted).any(axis=1)
            if weights is not None and substituted.any():
                weight_chosen = weights.copy()
                weight_chosen[substituted] = np.nan
        unknown = run.unknown[:n, : layer.n_used]
        run.recorder.layer(
            layer.index,
            rows,
            chosen=chosen,
            weight_chosen=unknown if weight_chosen is None else weight_chosen,
            applied=applied,
            weight_applied=unknown if applied_weights is None else applied_weights,
            action=action,
            residency=residency,
            read_bytes=load.read_bytes.reshape(shape),
            scores=scores if run.records_scores else None,
        )
