"""What a run gives back: its text, its trace, the sums of what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe_lab.sizes import format_size

if TYPE_CHECKING:
    import xarray as xr

    from bmoe_lab.routing.counters import Counters
    from bmoe_lab.runtime.account import PhaseTotals

__all__ = ["Run", "Summary"]


@dataclass(frozen=True)
class Summary:
    """The sums of one run.

    Attributes
    ----------
    kind : {"generate", "score"}
    policy : str
        Repr of the routing policy.
    lossless : bool
        Whether nothing was allowed to change the routing.
    fired : bool
        Whether the policy changed anything; a lossy run that did not fire equals a lossless one.
    prefill, decode : PhaseTotals
        Never added up: a prefill evaluation serves many tokens with one read of an expert.
    counters : Counters
        What the policy looked at and changed.
    effective : str
        The policy's threshold for this model, in words.
    cautions : tuple of str
        Why the policy may not do what its user means.
    ended_by : str
        ``n_predict``, ``end of text``, ``stop word``, ``stopped`` or ``failed``.
    n_expert_used, n_expert_used_model : int
        Experts per token that ran, and that the model file asks for.
    cache_budget_bytes, token_cycle_bytes : int
    direct : bool
        Whether reads really bypassed the page cache.
    instrumented : bool
        Whether recording slowed the run down.
    """

    kind: str
    policy: str
    lossless: bool
    fired: bool
    prefill: PhaseTotals
    decode: PhaseTotals
    counters: Counters
    effective: str
    cautions: tuple[str, ...]
    ended_by: str
    n_expert_used: int
    n_expert_used_model: int | None
    cache_budget_bytes: int
    token_cycle_bytes: int
    direct: bool
    instrumented: bool

    @property
    def width_changed(self) -> bool:
        """Whether the session overrides the router's width: llama.cpp's own lossy setting."""
        return self.n_expert_used_model not in (None, self.n_expert_used)

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second of evaluation; NaN if nothing was decoded."""
        return self.decode.n_token / self.decode.wall_s if self.decode.wall_s else float("nan")

    @property
    def read_bytes_per_token(self) -> float:
        """Expert bytes read per decoded token; NaN if nothing was decoded."""
        n = self.decode.n_token
        return self.decode.read_bytes / n if n else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self) | {
            "tokens_per_s": self.tokens_per_s,
            "read_bytes_per_token": self.read_bytes_per_token,
            "decode_hit_rate": self.decode.hit_rate,
            "prefill_hit_rate": self.prefill.hit_rate,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs for people."""
        decode = self.decode
        mark = "lossless" if self.lossless else "LOSSY"
        rows = [
            ("routing", f"{self.policy} ({mark})"),
            ("prefill", f"{self.prefill.n_token} tokens in {self.prefill.wall_s:.3f} s"),
        ]
        if decode.n_token:
            rows += [
                ("decode", f"{decode.n_token} tokens, {self.tokens_per_s:.1f} tokens/s"),
                ("decode hit rate", f"{100 * decode.hit_rate:.1f} % of lookups"),
                ("decode reads", f"{format_size(self.read_bytes_per_token)} per token"),
                (
                    "decode time",
                    f"{100 * decode.io_s / decode.wall_s:.1f} % reading, "
                    f"{100 * decode.manage_s / decode.wall_s:.1f} % cache, "
                    f"{100 * decode.callback_s / decode.wall_s:.1f} % callback, "
                    f"{100 * decode.rest_s / decode.wall_s:.1f} % rest (mostly computing)",
                ),
            ]
        if self.width_changed:
            rows.append(
                (
                    "width",
                    f"{self.n_expert_used} experts per token; the model file asks for "
                    f"{self.n_expert_used_model}, so this is another model's output",
                )
            )
        rows.append(
            (
                "cache",
                f"{format_size(self.cache_budget_bytes)} budget, one token asks for "
                f"{format_size(self.token_cycle_bytes)}; "
                f"reads {'direct' if self.direct else 'through the page cache'}",
            )
        )
        if not self.lossless:
            counts = self.counters
            rows.append(
                (
                    "policy",
                    f"changed {counts.changed} of {counts.eligible} eligible slots "
                    f"({100 * counts.rate:.1f} %)"
                    if self.fired
                    else f"never fired: looked at {counts.examined} slots, changed none",
                )
            )
            if self.effective:
                rows.append(("threshold", self.effective))
            rows += [("caution", caution) for caution in self.cautions]
        rows.append(("ended by", self.ended_by))
        if self.instrumented:
            rows.append(("note", "recording was on; not a benchmark run"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


@dataclass(frozen=True)
class Run:
    """One finished, or cut short, run of a session.

    Attributes
    ----------
    text : str
        What was generated; the scored text for a score.
    tokens : ndarray
        int32 of shape (token,): generated or scored token ids.
    logprob : ndarray
        float64 of shape (token,): natural-log probability of each of `tokens`.
    trace : xarray.Dataset or None
        The recorded routing (:mod:`bmoe_lab.schema`); None with ``record="off"``.
    summary : Summary
    complete : bool
        False if the run was interrupted, stopped, or failed.
    """

    text: str
    tokens: np.ndarray
    logprob: np.ndarray
    trace: xr.Dataset | None
    summary: Summary
    complete: bool = True
    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood per token in nats; NaN without tokens."""
        return float(-self.logprob.mean()) if len(self.logprob) else float("nan")

    @property
    def perplexity(self) -> float:
        """``exp`` of :attr:`nll`."""
        return float(np.exp(self.nll))

    def __repr__(self) -> str:
        mark = "lossless" if self.summary.lossless else f"lossy: {self.summary.policy}"
        if self.summary.width_changed:
            mark += f" at n_expert_used={self.summary.n_expert_used}"
        cut = "" if self.complete else ", cut short"
        return f"<Run {self.summary.kind}, {len(self.tokens)} tokens, {mark}{cut}>"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(label)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for label, value in self.summary.rows()
        )
        text = escape(self.text if len(self.text) <= 2000 else self.text[:2000] + " …")
        return (
            f"<div><b>{escape(repr(self)[1:-1])}</b><table>{rows}</table>"
            f"<pre style='white-space:pre-wrap'>{text}</pre>"
            "<small>Next: <code>run.trace</code>, <code>run.trace.moe.hit_rate()</code>, "
            "<code>run.trace.moe.plot.heatmap()</code></small></div>"
        )
