"""The part of a page that is about one trace."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import xarray as xr

from bmoe_lab.report.facts import facts_table, mark, warning
from bmoe_lab.report.figures import Figures
from bmoe_lab.schema import Action, Phase

if TYPE_CHECKING:
    from bmoe_lab.metrics._shared import PhaseName

__all__ = ["routing_sections", "trace_body"]


def trace_body(trace: xr.Dataset, figures: Figures) -> str:
    """Return what there is to see of a trace, and its settings."""
    from bmoe_lab import plots

    phase = _phase(trace)
    changed = np.isin(trace["action"].values, (Action.dropped, Action.substituted)).any()
    parts = ["<p>", mark(str(trace.attrs.get("policy", "trace")), trace), "</p>"]
    if not int(trace.attrs.get("complete", 1)):
        parts.append(warning("The run is incomplete: it was interrupted, failed or killed."))
    parts += [
        figures.section(
            "What it missed",
            "Experts that were not in memory when a layer asked for them, token by token.",
            partial(plots.plot_heatmap, trace, max_hover_cells=figures.hover_cells),
        ),
        figures.section(
            "Hit rate per layer",
            "Share of lookups that found their expert in memory: where it is low, the drive works.",
            partial(plots.plot_hit_rate, trace, phase=phase),
        ),
    ]
    if changed:
        parts.append(
            figures.section(
                "What the policy changed",
                "Slots whose expert was dropped or replaced.",
                partial(plots.plot_heatmap, trace, value="changed", max_hover_cells=0),
            )
        )
    parts += [
        *routing_sections(trace, figures),
        figures.heading("Settings"),
        facts_table(trace.attrs),
    ]
    return "\n".join(parts)


def routing_sections(trace: xr.Dataset, figures: Figures) -> list[str]:
    """Return the sections about what a router chose, and what that means for a cache."""
    from bmoe_lab import plots

    phase = _phase(trace)
    layer = _middle(trace)
    wanted: Literal["read", "misses"] = "read" if "read_bytes" in trace else "misses"
    return [
        figures.section(
            "Which experts it used",
            "How each layer spreads its routings over its experts: the steeper, the more a small "
            "set of experts serves.",
            partial(plots.plot_expert_load, trace, phase=phase),
        ),
        figures.section(
            "Which experts go together",
            f"Pairs of experts of layer {layer} that one token uses: above 1 more often than "
            "chance, which is what storing them side by side could use.",
            partial(plots.plot_coactivation, trace, layer=layer, phase=phase),
        ),
        figures.section(
            "What consecutive tokens share",
            "Experts of a token that the token before it used too, against what random choice "
            "would share: the distance is what recency can earn.",
            partial(plots.plot_overlap, trace, phase=phase),
        ),
        figures.section(
            "How sure the router is",
            "Entropy of its choice per layer: where it is high its experts are nearly equal in its "
            "eyes.",
            partial(plots.plot_entropy, trace, phase=phase),
        ),
        figures.section(
            "How many experts a window of text needs",
            "Distinct experts of so many consecutive tokens: the memory that keeps all of them.",
            partial(plots.plot_working_set, trace, phase=phase),
        ),
        figures.section(
            "How long ago an expert was last used",
            "Read as a curve of cache sizes: the share of lookups that an LRU cache of this size "
            "finds.",
            partial(plots.plot_reuse_distance, trace, phase=phase),
        ),
        figures.section(
            "Speed against the limit",
            "Tokens per second that computing and drive allow at most over the bytes read per "
            "token, and where the run was.",
            partial(plots.plot_roofline, trace, phase=phase),
        ),
        figures.section(
            "Along the text",
            "The text, coloured by the bytes that each token made the cache read."
            if wanted == "read"
            else "The text, coloured by the experts that each token missed.",
            partial(plots.plot_token_text, trace, value=wanted),
        ),
    ]


def _phase(trace: xr.Dataset) -> PhaseName:
    # Prefill and decode do not share a number: decode if there is any.
    return "decode" if (trace["phase"].values == Phase.decode).any() else "prefill"


def _middle(trace: xr.Dataset) -> int:
    return trace.sizes["layer"] // 2
