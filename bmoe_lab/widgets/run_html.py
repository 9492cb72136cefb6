"""What widgets say of a run in HTML: its text, the sums of its phases."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from bmoe_lab.sizes import format_size

if TYPE_CHECKING:
    from bmoe_lab.run import Run
    from bmoe_lab.runtime.account import PhaseTotals

__all__ = ["note_of", "numbers_html", "summary_html", "text_html"]


def text_html(prompt: str, text: str) -> str:
    """Return the prompt, dimmed, and what follows it; the end stays in sight."""
    return (
        "<div style='display:flex;flex-direction:column-reverse;max-height:15em;overflow:auto;"
        "line-height:1.45'><div style='white-space:pre-wrap;overflow-wrap:anywhere'>"
        f"<span style='opacity:0.6'>{escape(prompt)}</span>{escape(text)}</div></div>"
    )


def summary_html(run: Run) -> str:
    """Return what a run says of itself, in lines as close as those of a page."""
    return (
        "<details open style='line-height:1.4'><summary>the run</summary>"
        f"{run._repr_html_()}</details>"
    )


def numbers_html(prefill: PhaseTotals, decode: PhaseTotals) -> str:
    """Return the sums of both phases as a table; what is unknown is a dash."""
    head = ("", "tokens", "tokens/s", "hit rate", "MiB per token", "read")
    rows = [_numbers("prefill", prefill), _numbers("decode", decode)]
    style = "style='text-align:right;padding:1px 7px'"
    top = "".join(f"<th {style}>{word}</th>" for word in head)
    body = "".join(
        f"<tr><th {style}>{row[0]}</th>"
        + "".join(f"<td {style}>{value}</td>" for value in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table style='line-height:1.4'><tr>{top}</tr>{body}</table>"


def _numbers(name: str, totals: PhaseTotals) -> tuple[str, ...]:
    n = totals.n_token
    return (
        name,
        f"{n}",
        f"{n / totals.wall_s:.1f}" if totals.wall_s else "–",
        f"{100 * totals.hit_rate:.1f} %" if totals.lookups else "–",
        f"{totals.read_bytes / n / 2**20:.2f}" if n else "–",
        format_size(totals.read_bytes) if n else "–",
    )


def note_of(run: Run) -> str:
    """Return what must be known of a run before it is believed; plain text."""
    summary = run.summary
    notes = ["lossless"] if summary.lossless else [f"lossy: {summary.policy}"]
    if summary.width_changed:
        model = summary.n_expert_used_model
        notes.append(f"n_expert_used={summary.n_expert_used} of the model's {model}")
    if not summary.lossless and not summary.fired:
        notes.append(
            f"the policy never fired: it looked at {summary.counters.examined} slots and "
            "changed none, so this run equals the lossless one"
        )
    if not run.complete:
        notes.append("cut short")
    return "; ".join(notes)
