"""Decoding a 6 GB model: plain llama.cpp against ours in memory, and ours from disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bmoe_lab as bl
from bmoe_lab.runtime.loops import Outcome
from bmoe_lab.schema import Phase
from bmoe_lab.seam.context import Context, Model
from bmoe_lab.streaming.probe import probe_bandwidth

__all__ = ["Arm", "in_memory", "repacked", "streamed"]

N_CTX, N_UBATCH = 640, 512
_ONE = np.array([True])


@dataclass
class Arm:
    """One way of decoding, and the seconds of each token in each round."""

    name: str
    run: Callable[[np.ndarray], list[float]]
    rounds: list[list[float]]

    @property
    def medians(self) -> list[float]:
        """Return the median seconds of a token, one number per round."""
        return [statistics.median(times) for times in self.rounds]


def tokens(n: int, n_vocab: int, seed: int) -> np.ndarray:
    """Return token ids drawn uniformly: routing varies, and no text is involved."""
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def _plain(context: Context) -> Callable[[np.ndarray], list[float]]:
    def run(ids: np.ndarray) -> list[float]:
        context.clear()
        times = []
        for position in range(len(ids)):
            started = time.perf_counter()
            context.decode(ids[position : position + 1], position, _ONE)
            times.append(time.perf_counter() - started)
        return times

    return run


def drive(session: bl.Session, ids: np.ndarray, **settings: Any) -> tuple[list[float], bl.Run]:
    """Decode `ids` one by one through a session; return the seconds of each, and the run."""
    times: list[float] = []

    def loop(account: Any, outcome: Outcome) -> None:
        live = session._model
        for batch in range(len(ids)):
            started = time.perf_counter()
            live.evaluate(
                account, ids[batch : batch + 1], _ONE, phase=Phase.decode, turn=0, batch=batch
            )
            times.append(time.perf_counter() - started)
        outcome.ended_by = "end of text"

    request: dict[str, Any] = {
        "policy": None,
        "record": "off",
        "record_text": True,
        "save": None,
        "start": "warm",
        "seed": 0,
    }
    run = session._run(loop, {"kind": "benchmark"}, **(request | settings))
    return times, run


def _ours(session: bl.Session, record: str) -> Callable[[np.ndarray], list[float]]:
    return lambda ids: drive(session, ids, record=record)[0]


def interleave(arms: list[Arm], n_token: int, n_vocab: int, rounds: int) -> None:
    """Run every arm once per round, in turning order; the round before the first is thrown away."""
    for number in range(rounds + 1):
        ids = tokens(n_token, n_vocab, seed=number)
        order = arms if number % 2 else arms[::-1]
        for arm in order:
            times = arm.run(ids)
            if number:
                arm.rounds.append(times)


def repacked(path: Path, n_token: int, rounds: int, n_threads: int) -> list[Arm]:
    """Measure plain llama.cpp with the file's weights, and with its default of repacking them."""
    models = [Model(path), Model(path, extra_buffers=True)]
    contexts = [Context(m, n_ctx=N_CTX, n_ubatch=64, n_threads=n_threads) for m in models]
    arms = [
        Arm(name, _plain(context), [])
        for name, context in zip(
            ("plain llama.cpp", "llama.cpp defaults (repacked)"), contexts, strict=True
        )
    ]
    try:
        interleave(arms, n_token, models[0].n_vocab, rounds)
    finally:
        for context in contexts:
            context.close()
        for model in models:
            model.close()
    return arms


def in_memory(path: Path, n_token: int, rounds: int, n_threads: int) -> list[Arm]:
    """Measure plain llama.cpp and a session whose cache holds every expert."""
    model = Model(path)
    context = Context(model, n_ctx=N_CTX, n_ubatch=64, n_threads=n_threads)
    try:
        with bl.Session(
            path, cache="64 GiB", n_ctx=N_CTX, n_ubatch=N_UBATCH, n_threads=n_threads
        ) as session:
            _fill(session)
            arms = [
                Arm("plain llama.cpp", _plain(context), []),
                Arm("session, record off", _ours(session, "off"), []),
                Arm("session, record ids", _ours(session, "ids"), []),
                Arm("session, record scores", _ours(session, "scores"), []),
            ]
            interleave(arms, n_token, model.n_vocab, rounds)
            return arms
    finally:
        context.close()
        model.close()


def _fill(session: bl.Session) -> None:
    """Make every expert resident, so that no arm reads anything."""
    live = session._model

    def load() -> None:
        for layer in live.graph.layers:
            live.streamer.load(layer.index, np.arange(layer.n_expert, dtype=np.int32))

    session._worker.call(load)


def streamed(
    path: Path,
    budget: str,
    n_token: int,
    rounds: int,
    n_threads: int,
    lanes: int,
    compute_s: float,
) -> dict[str, float]:
    """Measure decoding from disk and the arithmetic limit of doing one thing after the other.

    The limit is ``1 / (compute_s + bytes / bandwidth)``: `compute_s` from the in-memory session,
    bandwidth from probes of the same file at the size of an expert's slice. Probes and decoding
    take turns, since the disk's rate drifts.
    """
    with bl.Session(
        path,
        cache=budget,
        n_ctx=N_CTX,
        n_ubatch=N_UBATCH,
        n_threads=n_threads,
        io_lanes=lanes,
    ) as session:
        info = session.info()
        request = max(4096, info["expert_bytes"][0] // 3 // 4096 * 4096)
        drive(session, tokens(2 * n_token, session.n_vocab, seed=77))
        shares, totals = [], []
        probes: list[float] = []
        for number in range(rounds + 1):
            probe = probe_bandwidth(
                path,
                request_bytes=request,
                lanes=lanes,
                n_bytes=96 * 2**20,
                offset=info["file_bytes"] // (rounds + 1) * number,
            )
            probes.append(probe.bytes_per_s)
            if number == rounds:
                break
            _, run = drive(session, tokens(n_token, session.n_vocab, seed=100 + number))
            totals.append(run.summary.decode)
        for number, total in enumerate(totals):
            bandwidth = (probes[number] + probes[number + 1]) / 2
            limit_s = compute_s + total.read_bytes / total.n_token / bandwidth
            shares.append(limit_s / (total.wall_s / total.n_token))
        direct = session.direct

    def median(value: Callable[[Any], float]) -> float:
        return statistics.median(value(total) for total in totals)

    per_token = median(lambda total: total.wall_s / total.n_token)
    return {
        "tokens_per_s": 1 / per_token,
        "hit_rate": median(lambda total: total.hit_rate),
        "read_bytes_per_token": median(lambda total: total.read_bytes / total.n_token),
        "bandwidth": statistics.median(probes),
        "compute_s": compute_s,
        "limit_tokens_per_s": 1 / (per_token * statistics.median(shares)),
        "of_limit": statistics.median(shares),
        "of_limit_low": min(shares),
        "of_limit_high": max(shares),
        "io_frac": median(lambda total: total.io_s / total.wall_s),
        "manage_frac": median(lambda total: total.manage_s / total.wall_s),
        "callback_frac": median(lambda total: total.callback_s / total.wall_s),
        "direct": float(direct),
    }
