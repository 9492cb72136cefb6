"""What every gate does: the same evaluations by plain llama.cpp and by a session, compared.

Logits are compared as bits. Greedy text would be a weak witness: two runs can differ in every
logit and still pick the same tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bmoe_lab as bl
from bmoe_lab.runtime import loops
from bmoe_lab.schema import Phase
from bmoe_lab.seam.context import Context, Model

N_UBATCH = 32
N_PREFILL = 80  # two full micro-batches and a narrow one
N_DECODE = 48
#: NaN in every float format that weights come in, so a wrong read cannot go unnoticed.
POISON = 0xFF


@dataclass(frozen=True)
class Case:
    """A model, the tokens it is fed, and the logits that plain llama.cpp gives."""

    path: Path
    tokens: np.ndarray
    expected: np.ndarray
    n_used: int | None = None


def plain_case(path: Path, text: str, *, n_threads: int = 1, n_used: int | None = None) -> Case:
    """Evaluate with plain llama.cpp: same library, same parameters, no callback."""
    from bmoe_lab.streaming.layout import read_layout

    model = Model(path, n_expert_used=n_used, arch=read_layout(path).arch)
    try:
        tokens = model.tokenize(text)[: N_PREFILL + N_DECODE]
        assert len(tokens) == N_PREFILL + N_DECODE, "the text of a gate is too short"
        context = Context(model, n_ctx=256, n_ubatch=N_UBATCH, n_threads=n_threads)
        try:
            rows = []
            for start, stop in pieces():
                wanted = np.zeros(stop - start, np.bool_)
                wanted[-1] = stop >= N_PREFILL
                assert context.decode(tokens[start:stop], start, wanted) == 0
                if wanted[-1]:
                    rows.append(context.logits(-1).copy())
            return Case(path, tokens, np.array(rows), n_used)
        finally:
            context.close()
    finally:
        model.close()


def pieces() -> list[tuple[int, int]]:
    """Return the (start, stop) of every evaluation: micro-batches, then single tokens."""
    edges = [*range(0, N_PREFILL, N_UBATCH), *range(N_PREFILL, N_PREFILL + N_DECODE + 1)]
    return list(itertools.pairwise(edges))


def open_session(case: Case, **settings: Any) -> bl.Session:
    """Open the case's model as the plain run was, with poisoned memory."""
    return bl.Session(
        case.path,
        n_ctx=256,
        n_ubatch=N_UBATCH,
        n_expert_used=case.n_used,
        **({"n_threads": 1, "poison": POISON} | settings),
    )


def streamed(session: bl.Session, case: Case, **run: Any) -> tuple[np.ndarray, bl.Run]:
    """Feed the case's tokens through a session; return its logits and the run."""
    rows: list[np.ndarray] = []

    def loop(account: Any, outcome: loops.Outcome) -> None:
        live = session._model
        for batch, (start, stop) in enumerate(pieces()):
            wanted = np.zeros(stop - start, np.bool_)
            wanted[-1] = stop >= N_PREFILL
            live.evaluate(
                account,
                case.tokens[start:stop],
                wanted,
                phase=Phase.prefill if start < N_PREFILL else Phase.decode,
                turn=0,
                batch=batch,
            )
            if wanted[-1]:
                rows.append(live.context.logits(-1).copy())
        outcome.ended_by = "end of text"

    request: dict[str, Any] = {
        "policy": None,
        "record": "off",
        "record_text": True,
        "save": None,
        "start": "cold",
        "seed": 0,
    }
    result = session._run(loop, {"kind": "gate"}, **(request | run))
    return np.array(rows), result


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare logits bit for bit; say where they first differ."""
    assert actual.shape == expected.shape
    differs = actual.view(np.uint32) != expected.view(np.uint32)
    assert not differs.any(), (
        f"{differs.any(axis=1).sum()} of {len(actual)} evaluations differ, first "
        f"{int(differs.any(axis=1).argmax())}; largest difference "
        f"{np.nanmax(np.abs(actual - expected))}, NaN {int(np.isnan(actual).sum())}"
    )
