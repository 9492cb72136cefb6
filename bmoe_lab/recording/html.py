"""A trace in a few lines of HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import xarray as xr

from bmoe_lab.schema import Action, Residency

__all__ = ["describe_html"]

# Above this many cells the hit rate is left out: a repr must not read a long trace from disk.
_CELLS = 20_000_000


def describe_html(trace: xr.Dataset, *, title: str = "Trace", calls: Sequence[str] = ()) -> str:
    """Return HTML that says what a trace is, what to doubt, what to do next.

    Everything that comes from the file is escaped: a model's name is not ours.

    Parameters
    ----------
    trace : xarray.Dataset
        A trace, or a part of one.
    title : str, default "Trace"
        Heading.
    calls : sequence of str, optional
        Calls to suggest.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> "lossless" in describe_html(make_trace(n_token=4, n_layer=2))
    True
    """
    attrs = trace.attrs
    used = np.unique(trace["n_expert_used"].values).tolist()
    mark = {1: "lossless", 0: "LOSSY"}.get(attrs.get("lossless", -1), "policy unknown")
    n_evaluation = np.unique(trace["batch"].values).size
    rows = {
        "model": f"{attrs.get('model_name', 'unknown')} ({attrs.get('arch', 'unknown')})",
        "tokens": f"{trace.sizes['token']:,} in {n_evaluation:,} evaluations",
        "layers": f"{trace.sizes['layer']}, {attrs.get('n_expert', '?')} experts each, "
        f"{' or '.join(map(str, used))} used",
        "policy": mark + (f": {attrs['policy']}" if "policy" in attrs else ""),
        "hit rate": _hit_rate(trace),
        "recorded": f"{attrs.get('source', 'unknown')}, level {attrs.get('record', 'unknown')}",
    }
    body = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    warnings = "".join(f"<li>{html.escape(warning)}</li>" for warning in _warnings(trace))
    hints = "".join(f"<code>{html.escape(call)}</code><br>" for call in calls)
    return (
        f"<div><strong>{html.escape(title)}</strong><table>{body}</table>"
        + (f"<ul>{warnings}</ul>" if warnings else "")
        + hints
        + "</div>"
    )


def _hit_rate(trace: xr.Dataset) -> str:
    """Return hits over lookups where a token is its own evaluation: each slot is one lookup."""
    if "residency" not in trace:
        return "unknown: residency was not recorded"
    if trace["residency"].size > _CELLS:
        return "not computed for a trace of this size"
    batch = trace["batch"].values
    _, inverse, width = np.unique(batch, return_inverse=True, return_counts=True)
    single = width[inverse] == 1
    residency = trace["residency"].values[single]
    action = trace["action"].values[single]
    ran = (residency != Residency.not_routed) & (action != Action.dropped)
    looked_up = ran & (residency != Residency.not_streamed)
    if not looked_up.any():
        return "not streamed" if ran.any() else "unknown: no single-token evaluations"
    hit = (residency == Residency.hit) | (residency == Residency.hit_speculative)
    rate = float(hit[looked_up].mean())
    return f"{rate:.1%} of {int(looked_up.sum()):,} lookups in single-token evaluations"


def _warnings(trace: xr.Dataset) -> list[str]:
    attrs = trace.attrs
    warnings = []
    if attrs.get("complete") == 0:
        note = attrs.get("journal_note", "it was interrupted, failed or was killed")
        warnings.append(f"Incomplete: {note}.")
    if attrs.get("lossless") == 0:
        warnings.append("Lossy: the policy changed what ran, so the text is not the model's own.")
    if attrs.get("counterfactual") == 1:
        warnings.append("Counterfactual: a replay cannot know how later layers would have routed.")
    if attrs.get("instrumented") == 1:
        warnings.append("Instrumented: recording took part of the time; not a benchmark.")
    if attrs.get("source") == "synthetic":
        warnings.append("Synthetic: no model made this.")
    return warnings
