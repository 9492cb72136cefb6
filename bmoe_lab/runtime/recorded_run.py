"""One run from request to result: policy reset, recording opened, loop driven, trace closed."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe_lab import schema
from bmoe_lab._version import __version__
from bmoe_lab.errors import BmoeLabError, SchemaError, TraceFileError
from bmoe_lab.policy_settings import policy_settings
from bmoe_lab.run import Run, Summary
from bmoe_lab.runtime.account import PhaseTotals, RunAccount
from bmoe_lab.runtime.loops import Outcome, TextStream
from bmoe_lab.runtime.step import Step, StepTeller
from bmoe_lab.runtime.stop import RunStopped
from bmoe_lab.seam.library import library

if TYPE_CHECKING:
    import xarray as xr

    from bmoe_lab.recording import Recorder
    from bmoe_lab.routing import RoutingPolicy
    from bmoe_lab.runtime.live import LiveModel

__all__ = ["RunRequest", "execute"]


@dataclass(frozen=True)
class RunRequest:
    """What the caller asked for, checked."""

    policy: RoutingPolicy | None
    record: str
    record_text: bool
    save: str | None
    warm: bool
    seed: int
    asked: dict[str, Any]
    on_step: Callable[[Step], None] | None = None


def execute(
    live: LiveModel,
    request: RunRequest,
    loop: Callable[[RunAccount, Outcome], None],
    keep: Callable[[Run], None],
) -> Run:
    """Run `loop` and return what came of it; `keep` gets the run even if an exception follows."""
    # Whatever of the user's policy is asked here is asked before anything is opened.
    verdict = _verdict(live, request.policy)
    on_step = request.on_step
    run = RunAccount(
        policy=request.policy,
        recorder=None,
        level=request.record,
        seed=request.seed,
        shape=live.shape,
        keeps_cache=request.warm,
        piece=live.piece_text if request.record_text else None,
        steps=None if on_step is None else StepTeller(on_step, len(live.graph.layers)),
    )
    recorder = _recorder(live, request) if request.record != "off" else None
    run.recorder = recorder
    outcome = Outcome()
    failure: BaseException | None = None
    try:
        live.begin_run(run, warm=request.warm)
        loop(run, outcome)
    except RunStopped:
        outcome.ended_by = "stopped"
    except BaseException as error:
        outcome.ended_by = "failed"
        failure = error
    complete = outcome.ended_by not in ("stopped", "failed")
    summary = _summary(live, request, run, outcome, verdict)
    trace, lost = _finish(recorder, request, summary, complete)
    failure = failure or lost
    # Rows that do not add up make no trace; a file that could not be written leaves one.
    complete = complete and (lost is None or trace is not None)
    result = _result(live, outcome, trace, summary, complete)
    keep(result)
    if failure is not None:
        raise failure
    return result


def _recorder(live: LiveModel, request: RunRequest) -> Recorder:
    from bmoe_lab.recording import Journal, Recorder, TraceSpec

    layers = live.graph.layers
    policy = request.policy
    state = live.streamer.state.to_arrays() if request.warm else {}
    spec = TraceSpec(
        n_layer=len(layers),
        n_slot=int(live.n_used.max()),
        n_expert=max(x.n_expert for x in layers),
        block=[x.block for x in layers],
        group=[x.group for x in layers],
        expert_bytes=live.expert_bytes,
        dense_bytes=live.dense_bytes,
        n_expert_used=live.n_used,
        level=request.record,
        record_text=request.record_text,
        attrs=_attrs(live, request, policy),
        state=state,
        score_is_softmax=[int(x.score_kind == "softmax") for x in layers],
    )
    return Recorder(spec, Journal.create(spec, save=request.save))


def _attrs(live: LiveModel, request: RunRequest, policy: RoutingPolicy | None) -> dict[str, Any]:
    versions = library().versions
    settings = live.settings
    attrs: dict[str, Any] = {
        "lossless": policy is None or policy.lossless,
        "instrumented": True,
        "source": "live",
        "cache_start": "warm" if request.warm else "cold",
        # A score's windows are its turns.
        "cold_turns": request.asked["kind"] == "score" and not request.warm,
        "cache_budget_bytes": live.cache_budget,
        "policy": repr(policy) if policy is not None else "Lossless()",
        "policy_settings": policy_settings(policy),
        "residency_policy": repr(live.residency_policy),
        "session_settings": {
            **live.context.numerics,
            "n_ctx": settings.n_ctx,
            "n_ubatch": settings.n_ubatch,
            "n_threads": settings.n_threads,
            "io_lanes": settings.io_lanes,
            "direct": live.streamer.reader.direct,
            "direct_asked": settings.direct,
            "dense": settings.dense,
            "n_expert_used": settings.n_expert_used,
            "cache": str(settings.cache),
            "cache_floor": settings.cache_floor,
            "cache_ceiling": settings.cache_ceiling,
            "poison": settings.poison,
        },
        "run_settings": request.asked,
        "n_expert_used_model": live.layout.n_expert_used,
        "model_name": live.layout.name,
        "model_bytes": live.layout.file_bytes,
        "model_fingerprint": live.layout.fingerprint,
        "arch": live.layout.arch,
        "seed": request.seed,
        "machine": _machine(),
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "bmoe_lab_version": __version__,
        "llama_cpp_python_version": versions["llama_cpp_python"],
        "llama_cpp_commit": versions["ggml_commit"],
    }
    return schema.clean_attrs(attrs)


def _machine() -> dict[str, Any]:
    """Describe the computer, without its name."""
    import psutil

    return {
        "system": platform.system(),
        "release": platform.release(),
        "processor": _processor(),
        "n_core": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _verdict(live: LiveModel, policy: RoutingPolicy | None) -> tuple[str, tuple[str, ...]]:
    """Return what the policy says of itself on this model: its effective threshold, cautions."""
    if policy is None:
        return "", ()
    facts = live.facts()
    return policy.effective(facts), tuple(policy.cautions(facts))


def _summary(
    live: LiveModel,
    request: RunRequest,
    run: RunAccount,
    outcome: Outcome,
    verdict: tuple[str, tuple[str, ...]],
) -> Summary:
    policy = request.policy
    return Summary(
        kind=str(request.asked["kind"]),
        policy=repr(policy) if policy is not None else "Lossless()",
        lossless=run.lossless,
        fired=run.counters.fired,
        prefill=run.totals.get(schema.Phase.prefill, PhaseTotals()),
        decode=run.totals.get(schema.Phase.decode, PhaseTotals()),
        counters=run.counters,
        effective=verdict[0],
        cautions=verdict[1],
        ended_by=outcome.ended_by,
        n_expert_used=int(live.n_used.max()),
        n_expert_used_model=live.layout.n_expert_used,
        cache_budget_bytes=live.cache_budget,
        token_cycle_bytes=live.token_cycle,
        direct=live.streamer.reader.direct,
        instrumented=run.records,
    )


def _finish(
    recorder: Recorder | None, request: RunRequest, summary: Summary, complete: bool
) -> tuple[xr.Dataset | None, BmoeLabError | None]:
    """Close the recording; return the trace, and why its file could not be written."""
    if recorder is None:
        return None, None
    if recorder.n_token == 0 and not complete:
        # Cut off before the first evaluation was finished: there is nothing to keep.
        if recorder.journal is not None:
            recorder.journal.remove()
        return None, None
    attrs: dict[str, Any] = {"complete": complete, "ended_by": summary.ended_by}
    if not summary.lossless:
        attrs["policy_fired"] = summary.fired
        attrs["policy_counters"] = summary.counters.to_dict()
    attrs = schema.clean_attrs(attrs)
    try:
        return recorder.finish(attrs, save=request.save), None
    except TraceFileError as error:
        # The file is lost, the recording is not: it is in hand, and on disk as the journal that
        # the message names.
        return recorder.finish(attrs, keep_journal=True), error
    except SchemaError as error:
        # Rows do not add up: the journal is kept. The run's own failure must not be lost over it.
        if recorder.journal is not None:
            recorder.journal.close()
        return None, error


def _result(
    live: LiveModel,
    outcome: Outcome,
    trace: xr.Dataset | None,
    summary: Summary,
    complete: bool,
) -> Run:
    stream = TextStream(live.model.piece)
    for token in outcome.tokens:
        stream.add(token)
    return Run(
        text=stream.text,
        tokens=np.array(outcome.tokens, np.int32),
        logprob=np.array(outcome.logprob, np.float64),
        trace=trace,
        summary=summary,
        complete=complete,
        prompt=np.array(outcome.prompt, np.int32),
    )
