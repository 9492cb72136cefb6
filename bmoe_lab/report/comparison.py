"""The part of a page that is about one comparison of routing policies."""

from __future__ import annotations

import html
import json
from functools import partial

import xarray as xr

from bmoe_lab import tables
from bmoe_lab.comparison.tree import runs
from bmoe_lab.report.facts import facts_table, mark, note, warning
from bmoe_lab.report.figures import Figures
from bmoe_lab.report.trace import routing_sections

__all__ = ["comparison_body"]


def comparison_body(tree: xr.DataTree, figures: Figures) -> str:
    """Return the table of a comparison, its figures, and the routing of its lossless run."""
    from bmoe_lab import plots

    named = runs(tree)
    base_name, base = named[0]
    parts = [
        "<p>",
        *(mark(name, trace) for name, trace in named),
        "</p>",
        *(warning(str(text)) for text in json.loads(tree.attrs.get("warnings", "[]"))),
    ]
    if not int(tree.attrs.get("complete", 1)):
        parts.append(warning(f"Not all runs finished: stopped in {tree.attrs.get('failed_arm')}."))
    parts += [
        figures.heading("Results"),
        f'<div class="scroll">{tables.comparison_html(tree)}</div>',
        *(f"<p>{html.escape(line)}</p>" for line in tables.control_lines(tree)),
        figures.section(
            "Quality against bytes",
            "Down and to the left is better. A control changes as many slots as its policy, but at "
            "random: the distance between them is what the policy's choice of slots is worth.",
            partial(plots.plot_quality_vs_bytes, tree),
        ),
        figures.section(
            "Along the text",
            "Above zero the run predicts the text worse than lossless.",
            partial(plots.plot_nll_along_text, tree),
        ),
        figures.section(
            "Hit rate per layer",
            "Dropped slots ask for nothing, so dropping misses raises this rate by itself: the "
            "bytes above are what was saved.",
            partial(plots.plot_hit_rate, tree),
        ),
        figures.section(
            "Routing",
            f"What the run {base_name} missed; the sections below are about it too.",
            partial(plots.plot_heatmap, base, max_hover_cells=figures.hover_cells),
        ),
    ]
    # Each run has its own policy; the marks above name them.
    shared = {key: value for key, value in base.attrs.items() if key != "policy"}
    kinds = [str(kind) for kind in tree.to_dataset()["arm_kind"].values]
    for (name, trace), kind in zip(named, kinds, strict=True):
        if kind == "policy":
            parts.append(note(f"{name}: where it changed the routing."))
            parts.append(
                figures.add(partial(plots.plot_heatmap, trace, value="changed", max_hover_cells=0))
            )
    parts += [
        *routing_sections(base, figures),
        figures.heading("Settings"),
        facts_table(shared | tree.attrs),
    ]
    return "\n".join(parts)
