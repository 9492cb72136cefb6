"""The two ways of driving a model token by token: generating text, and scoring a given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bmoe_lab.divergence import token_loss
from bmoe_lab.schema import Phase

if TYPE_CHECKING:
    from bmoe_lab.runtime.account import RunAccount
    from bmoe_lab.runtime.live import LiveModel
    from bmoe_lab.seam.context import Sampler

__all__ = ["Observer", "Outcome", "TextStream", "generate", "score"]

#: ``observe(window, index, token_id, logits)``
Observer = Callable[[int, int, int, np.ndarray], None]


@dataclass
class Outcome:
    """What a loop has produced so far; filled as it goes, so that an interrupt keeps it."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    n_window: int = 0
    ended_by: str = "interrupted"


class TextStream:
    """Bytes of tokens to text, holding back what may be part of a character."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        import codecs

        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""

    def add(self, token: int) -> str:
        """Return the text that became certain with `token`."""
        new = self._decoder.decode(self._piece(token))
        self.text += new
        return new


def _micro_batches(tokens: np.ndarray, width: int) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), width):
        yield tokens[start : start + width]


def _prefill(
    live: LiveModel,
    run: RunAccount,
    tokens: np.ndarray,
    *,
    turn: int,
    batch: int,
    policy_on: bool,
) -> int:
    """Evaluate `tokens` in micro-batches, with logits of the last one; return the next batch."""
    done = 0
    for chunk in _micro_batches(tokens, live.settings.n_ubatch):
        done += len(chunk)
        wanted = np.zeros(len(chunk), np.bool_)
        wanted[-1] = done == len(tokens)
        live.evaluate(
            run, chunk, wanted, phase=Phase.prefill, turn=turn, batch=batch, policy_on=policy_on
        )
        batch += 1
    return batch


def generate(
    live: LiveModel,
    run: RunAccount,
    prompt: np.ndarray,
    outcome: Outcome,
    *,
    n_predict: int,
    sampler: Sampler,
    stop: tuple[str, ...],
    on_text: Callable[[str], None] | None,
) -> None:
    """Generate up to `n_predict` tokens after `prompt`."""
    outcome.prompt = prompt.tolist()
    if run.steps is not None:
        # Nothing follows the last token, so it is not evaluated.
        run.steps.plan(prefill=len(prompt), decode=n_predict - 1)
    stream = TextStream(live.model.piece)
    batch = _prefill(live, run, prompt, turn=0, batch=0, policy_on=True)
    one = np.array([True])
    while True:
        token = sampler.sample(live.context)
        logprob = -token_loss(live.context.logits(-1), token).nll
        if live.model.is_end(token):
            outcome.ended_by = "end of text"
            return
        outcome.tokens.append(token)
        outcome.logprob.append(logprob)
        new = stream.add(token)
        if on_text is not None and new:
            on_text(new)
        if any(word in stream.text for word in stop):
            outcome.ended_by = "stop word"
            return
        if len(outcome.tokens) >= n_predict:
            outcome.ended_by = "n_predict"
            return
        live.evaluate(
            run,
            np.array([token], np.int32),
            one,
            phase=Phase.decode,
            turn=0,
            batch=batch,
            logprob=np.array([logprob], np.float32),
        )
        batch += 1


def score(
    live: LiveModel,
    run: RunAccount,
    windows: list[np.ndarray],
    outcome: Outcome,
    *,
    n_context: int,
    observe: Observer | None,
    on_token: Callable[[int], None] | None,
) -> None:
    """Teacher-force each window: its context losslessly, then one token per evaluation.

    The token right after the context is predicted from lossless logits whatever the policy, so
    it is evaluated but not scored.
    """
    one = np.array([True])
    batch = 0
    if run.steps is not None:
        n_token = sum(len(window) for window in windows)
        n_prefill = n_context * len(windows)
        run.steps.plan(prefill=n_prefill, decode=n_token - n_prefill)
    for number, window in enumerate(windows):
        live.clear()
        if not run.keeps_cache:
            live.streamer.clear()
        batch = _prefill(live, run, window[:n_context], turn=number, batch=batch, policy_on=False)
        for index in range(n_context, len(window)):
            token = int(window[index])
            logprob = np.nan
            if index > n_context:
                logits = live.context.logits(-1)
                logprob = -token_loss(logits, token).nll
                outcome.tokens.append(token)
                outcome.logprob.append(logprob)
                if observe is not None:
                    observe(number, index, token, logits)
            live.evaluate(
                run,
                window[index : index + 1],
                one,
                phase=Phase.decode,
                turn=number,
                batch=batch,
                logprob=np.array([logprob], np.float32),
            )
            batch += 1
            if on_token is not None:
                on_token(1)
        outcome.n_window = number + 1
    outcome.ended_by = "end of text"
