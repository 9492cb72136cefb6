"""An opened model: llama.cpp, the captured graph, and the streamer behind its expert weights."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe_lab.errors import (
    BeyondTrainingWarning,
    CacheBelowCycleWarning,
    ModelFileError,
    SeamError,
    SettingsError,
)
from bmoe_lab.recording.text import display_piece
from bmoe_lab.residency import LRU, ResidencyPolicy, token_cycle
from bmoe_lab.routing.base import ModelFacts
from bmoe_lab.runtime.dispatch import Dispatch, node_keys
from bmoe_lab.runtime.stop import RunStopped
from bmoe_lab.seam import memory, tensors
from bmoe_lab.seam.callback import CAPTURE, FILTER, PASS, NodeFilter
from bmoe_lab.seam.capture import ExpertGraph, capture_graph
from bmoe_lab.seam.context import ABORTED, Context, Model
from bmoe_lab.sizes import format_size
from bmoe_lab.streaming.budget import auto_budget, memory_available
from bmoe_lab.streaming.dense import DenseWeights
from bmoe_lab.streaming.layout import ModelLayout, read_layout
from bmoe_lab.streaming.reader import ReadCancelled
from bmoe_lab.streaming.streamer import StackGroup, Streamer

if TYPE_CHECKING:
    from bmoe_lab.runtime.account import RunAccount
    from bmoe_lab.runtime.settings import Settings

__all__ = ["LiveModel"]


class LiveModel:
    """Everything native that a session owns; used only on the session's worker thread.

    Parameters
    ----------
    settings : Settings

    Raises
    ------
    ModelFileError
        If the file is missing, damaged, dense, or not a text generator.
    SettingsError
        If a setting does not fit the model.
    SeamError
        If the graph cannot be streamed.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stop_requested = False
        self.n_past = 0
        self._pieces: dict[int, str] = {}
        with ExitStack() as stack:
            self._open(stack)
            self._close = stack.pop_all()

    def close(self) -> None:
        """Free everything, in the order opposite to opening."""
        self._close.close()

    # -- opening -------------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        self.layout: ModelLayout = read_layout(self.settings.path)
        settings = self.settings = self.settings.fitted(self.layout.context_length)
        self._check_layout()
        # Asked before the model is mapped: its pages would count as taken.
        self._available = memory_available()
        self.model = Model(
            settings.path, n_expert_used=settings.n_expert_used, arch=self.layout.arch
        )
        stack.callback(self.model.close)
        if not self.model.is_decoder:
            raise ModelFileError(
                f"model must generate text; got an encoder ({self.layout.arch}) in "
                f"{settings.path}. Encoder models are not supported."
            )
        trained = self.model.n_ctx_train
        if self.n_ctx > trained > 0:
            warnings.warn(
                f"n_ctx is {self.n_ctx}, but the model was trained for {trained} positions; "
                "beyond them its output is not to be trusted.",
                BeyondTrainingWarning,
                stacklevel=2,
            )
        self._filter = NodeFilter(self._on_node)
        self.context = Context(
            self.model,
            n_ctx=self.n_ctx,
            n_ubatch=settings.n_ubatch,
            n_threads=settings.n_threads,
            callbacks=self._filter,
        )
        stack.callback(self.context.close)
        self.graph = self._capture()
        self.expert_bytes = np.array([x.expert_bytes for x in self.graph.layers], np.int64)
        self.n_used = np.array([x.n_used for x in self.graph.layers], np.int16)
        self.dense_bytes = self._dense_bytes()
        self.token_cycle = token_cycle(self.expert_bytes, self.n_used)
        self.expert_bytes_total = sum(s.n_bytes for x in self.graph.layers for s in x.stacks)
        self.residency_policy, self.cache_budget = self._cache()
        self._warn_below_cycle()
        self.streamer = Streamer(
            self.layout,
            [
                StackGroup(x.block, x.group, tuple(s.name for s in x.stacks))
                for x in self.graph.layers
            ],
            self.residency_policy,
            self.cache_budget,
            lanes=settings.io_lanes,
            direct=settings.direct,
            poison=settings.poison,
        )
        stack.callback(self.streamer.close)
        # llama.cpp frees what it mapped by its own record of the mapping, but a tensor should
        # never point to memory that is gone.
        self._repoint(stack)
        self.dispatch = Dispatch(self.graph, self.streamer, settings.n_ubatch)
        self.dispatch.attach(self._filter)
        self._filter.set_table(node_keys(self.graph), matmul_op=self.graph.matmul_op)
        self.context.clear()
        self.not_editable: dict[int, str] = {}
        self._self_check()
        memory.reset_peak()

    def _check_layout(self) -> None:
        layout, settings = self.layout, self.settings
        if not layout.is_moe:
            raise ModelFileError(
                f"model must be a Mixture-of-Experts model; got a dense {layout.arch} model "
                f"in {settings.path}. Nothing in it can be streamed."
            )
        n_expert = layout.n_expert or 0
        used = layout.hparam("expert_used_count")
        # llama.cpp asserts this, which ends the process.
        if used is not None and not all(
            1 <= n <= n_expert for n in (used if isinstance(used, tuple) else (used,))
        ):
            raise ModelFileError(
                f"model file must use 1 to {n_expert} of its {n_expert} experts per token; got "
                f"{used!r} in {str(settings.path)!r}. The file is damaged: convert it again."
            )
        if settings.n_expert_used is not None and settings.n_expert_used > n_expert:
            raise SettingsError(
                f"n_expert_used must be at most the model's {n_expert} experts; got "
                f"{settings.n_expert_used}."
            )

    def _capture(self) -> ExpertGraph:
        # Every node is offered before the first is computed, so the evaluation can be aborted
        # before it touches an expert.
        self._filter.begin(CAPTURE)
        self._filter.abort()
        token = max(self.model.bos, 0)
        code = self.context.decode(np.array([token], np.int32), 0, np.array([True]))
        addresses = self._filter.captured()
        self._filter.begin(PASS)
        if code != ABORTED or not len(addresses):
            raise SeamError(
                f"the capture must be aborted after all nodes were offered; got code {code} "
                f"after {len(addresses)} nodes."
            )
        return capture_graph(addresses)

    def _dense_bytes(self) -> np.ndarray:
        """Return the bytes of each layer's block that are not experts, int64 of shape (layer,)."""
        experts = {s.name for x in self.graph.layers for s in x.stacks}
        per_block: dict[int, int] = {}
        for name, entry in self.layout.tensors.items():
            parts = name.split(".")
            if name not in experts and parts[0] == "blk" and parts[1].isdigit():
                block = int(parts[1])
                per_block[block] = per_block.get(block, 0) + entry.n_bytes
        # A second stack group of a block shares the block's dense weights: they count once.
        return np.array(
            [per_block.get(x.block, 0) if x.group == 0 else 0 for x in self.graph.layers],
            np.int64,
        )

    def _cache(self) -> tuple[ResidencyPolicy, int]:
        settings = self.settings
        cache = settings.cache
        if isinstance(cache, ResidencyPolicy):
            policy = cache.clone()
            assert policy.budget_bytes is not None  # checked with the settings
            return policy, policy.budget_bytes
        if cache == "auto":
            convert = self._dense_total() if settings.dense == "anon" else 0
            budget = auto_budget(
                self._available,
                self.expert_bytes_total,
                floor=settings.cache_floor,
                ceiling=settings.cache_ceiling,
                dense_to_convert=convert,
            ).n_bytes
            return LRU(budget), budget
        return LRU(cache), cache

    def _dense_total(self) -> int:
        return sum(
            self.layout.tensors[w.name].n_bytes
            for w in self.graph.weights
            if w.name in self.layout.tensors
        )

    def _warn_below_cycle(self) -> None:
        if 0 < self.cache_budget < self.token_cycle:
            policy = self.residency_policy
            rest = "" if isinstance(policy, LRU) else f"; what {policy!r} keeps longer may hit"
            warnings.warn(
                f"cache of {format_size(self.cache_budget)} is below one token cycle of "
                f"{format_size(self.token_cycle)} (sum over layers of expert bytes x experts "
                "used): an LRU cache evicts every expert before it is used again, so it hits "
                f"nothing{rest}. Give more, or switch the cache off with cache=0.",
                CacheBelowCycleWarning,
                stacklevel=2,
            )

    def _repoint(self, stack: ExitStack) -> None:
        ranges = []
        for layer in self.graph.layers:
            for expert_stack in layer.stacks:
                entry = self.layout.tensors[expert_stack.name]
                if entry.n_bytes != expert_stack.n_bytes:
                    raise SeamError(
                        f"{expert_stack.name} must have the size that the file gives, "
                        f"{entry.n_bytes} bytes; got {expert_stack.n_bytes} in the graph."
                    )
                ranges.append((expert_stack.data, expert_stack.n_bytes))
                stack.callback(tensors.set_data, expert_stack.address, expert_stack.data)
                tensors.set_data(expert_stack.address, self.streamer.addresses[expert_stack.name])
        self.anon: Any = None
        if self.settings.dense == "anon":
            known = [w for w in self.graph.weights if w.name in self.layout.tensors]
            self.anon = DenseWeights(
                self.layout, [(w.name, w.n_bytes) for w in known], self.streamer.reader
            )
            stack.callback(self.anon.close)
            for weight in known:
                ranges.append((weight.data, weight.n_bytes))
                stack.callback(tensors.set_data, weight.address, weight.data)
                tensors.set_data(weight.address, self.anon.addresses[weight.name])
        self.released_bytes = memory.release_pages(ranges)

    def _self_check(self) -> None:
        """Stream one token and compare what was chosen with what was sorted."""
        from bmoe_lab.runtime.account import RunAccount
        from bmoe_lab.runtime.self_check import ScoreCheck

        check = ScoreCheck(self.graph)
        # The check stands in for a recorder: it takes the same calls.
        run = RunAccount(None, check, "scores", 0, self.shape)  # type: ignore[arg-type]
        self.begin_run(run, warm=False)
        token = max(self.model.bos, 0)
        self.evaluate(run, np.array([token], np.int32), np.array([True]), phase=0, turn=0, batch=0)
        for layer in self.graph.layers:
            why = layer.why_not_select or check.wrong.get(layer.index, "")
            if why:
                self.not_editable[layer.index] = why
        self.clear()

    # -- running -------------------------------------------------------------------------------

    def _on_node(self, tensor: int, entry: int) -> None:
        self.dispatch(tensor, entry)

    @property
    def n_ctx(self) -> int:
        """Positions of the context."""
        assert self.settings.n_ctx is not None  # fitted to the model at opening
        return self.settings.n_ctx

    @property
    def shape(self) -> tuple[int, int]:
        """Largest (rows, slots) of one layer in one evaluation."""
        return self.settings.n_ubatch, int(self.n_used.max())

    def clear(self) -> None:
        """Empty the context; the experts stay."""
        self.context.clear()
        self.n_past = 0

    def begin_run(self, run: RunAccount, *, warm: bool) -> None:
        """Prepare for a run: an empty context, and an empty cache unless `warm`."""
        self.clear()
        if not warm:
            self.streamer.clear()
        self.streamer.take_costs()
        self.dispatch.begin_run(run)

    def resume(self) -> None:
        """Forget an earlier :meth:`stop`; called between runs."""
        self.stop_requested = False
        self.streamer.reader.resume()

    def stop(self) -> None:
        """End the running evaluation soon; may be called from any thread."""
        self.stop_requested = True
        self._filter.abort()
        self.streamer.reader.cancel()

    def evaluate(
        self,
        run: RunAccount,
        tokens: np.ndarray,
        wanted: np.ndarray,
        *,
        phase: int,
        turn: int,
        batch: int,
        policy_on: bool = True,
        logprob: np.ndarray | None = None,
    ) -> None:
        """Evaluate one micro-batch after the positions already in the context.

        Parameters
        ----------
        run : RunAccount
        tokens : ndarray
            int32 of shape (token,).
        wanted : ndarray
            bool of shape (token,): whose logits are computed.
        phase, turn, batch : int
            As recorded.
        policy_on : bool, default True
            False evaluates losslessly whatever the run's policy.
        logprob : ndarray, optional
            float32 of shape (token,): of these tokens, where known.

        Raises
        ------
        RunStopped
            If :meth:`stop` was called; the evaluation's rows are discarded.
        StreamingError
            If experts could not be read.
        Exception
            What the run's policy raised, or its ``on_step``, after the evaluation was finished and
            recorded.
        """
        positions = np.arange(self.n_past, self.n_past + len(tokens), dtype=np.int32)
        run.begin_evaluation()
        self.dispatch.begin_evaluation(
            phase=phase,
            positions=positions,
            output_rows=np.flatnonzero(wanted),
            policy_on=policy_on,
        )
        recorder = run.recorder
        if recorder is not None:
            recorder.begin(
                batch=batch,
                turn=turn,
                phase=phase,
                positions=positions,
                token_ids=tokens,
                pieces=run.pieces(tokens),
                logprob=np.full(len(tokens), np.nan, np.float32) if logprob is None else logprob,
                accepted=np.ones(len(tokens), np.uint8),
            )
        try:
            costs = self._decode(tokens, wanted)
        except BaseException:
            if recorder is not None:
                recorder.discard()
            raise
        self.n_past += len(tokens)
        run.end_evaluation(phase, len(tokens), costs)
        if recorder is not None:
            recorder.commit(costs)
        try:
            if run.steps is not None:
                run.steps.end(phase, len(tokens), batch, run.phase)
        finally:
            # The policy failed before whoever is told of the step could.
            if run.policy_failure is not None:
                raise run.policy_failure

    def _decode(self, tokens: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
        faults = memory.major_faults()
        self._filter.begin(FILTER)
        if self.stop_requested:
            raise RunStopped
        started = time.perf_counter()
        code = self.context.decode(tokens, self.n_past, wanted)
        wall = time.perf_counter() - started
        stream = self.streamer.take_costs()
        failure = self._filter.failure
        if isinstance(failure, ReadCancelled) or (failure is None and code == ABORTED):
            raise RunStopped
        if failure is not None:
            raise failure
        self.dispatch.check_complete()
        return {
            "wall_s": wall,
            "io_s": stream.io_s,
            "manage_s": stream.manage_s,
            "callback_s": self.dispatch.callback_s - stream.io_s - stream.manage_s,
            "evictions": float(stream.evictions),
            "major_faults": memory.major_faults() - faults,
            "rss_bytes": memory.rss_bytes(),
            "cache_resident_bytes": float(self.streamer.state.resident_bytes),
        }

    def piece_text(self, token: int) -> str:
        """Return how `token` is displayed in a trace."""
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = display_piece(self.model.piece(token))
        return text

    def facts(self) -> ModelFacts:
        """Return what a policy may ask of this model."""
        return ModelFacts(
            n_layer=len(self.graph.layers),
            n_expert=max(x.n_expert for x in self.graph.layers),
            n_expert_used=int(self.n_used.max()),
            cache_budget=self.cache_budget,
            token_cycle_bytes=self.token_cycle,
            scores_available=not self.why_not(select=False, weigh=False, scores=True),
            weights_available=not self.why_not(select=False, weigh=True, scores=False),
        )

    def why_not(self, *, select: bool, weigh: bool, scores: bool) -> str:
        """Return why a run with these needs is not possible on this graph; empty if it is."""
        for layer in self.graph.layers:
            why = self.not_editable.get(layer.index, "")
            if (select or scores) and why:
                return f"block {layer.block}: {why}"
            if weigh and layer.why_not_weigh:
                return f"block {layer.block}: {layer.why_not_weigh}"
        return ""
