"""Figures of traces and comparisons: every ``plot_<x>()`` returns a plotly Figure, shows nothing.

A trace gives its own figures as ``trace.moe.plot.<x>()``, a comparison as ``tree.moe.plot.<x>()``.
"""

from __future__ import annotations

from bmoe_lab.plots.budget_curve import plot_budget_curve
from bmoe_lab.plots.cell_scores import plot_cell_scores
from bmoe_lab.plots.coactivation import plot_coactivation
from bmoe_lab.plots.divergence_along_text import plot_divergence_along_text
from bmoe_lab.plots.entropy import plot_entropy
from bmoe_lab.plots.expert_load import plot_expert_load
from bmoe_lab.plots.expert_use import plot_expert_use
from bmoe_lab.plots.heatmap import plot_heatmap
from bmoe_lab.plots.hit_rate import plot_hit_rate
from bmoe_lab.plots.nll_along_text import plot_nll_along_text
from bmoe_lab.plots.overlap import plot_overlap
from bmoe_lab.plots.policy_effect import plot_policy_effect
from bmoe_lab.plots.quality_vs_bytes import plot_quality_vs_bytes
from bmoe_lab.plots.reuse_distance import plot_reuse_distance
from bmoe_lab.plots.roofline import plot_roofline
from bmoe_lab.plots.token_text import plot_token_text
from bmoe_lab.plots.working_set import plot_working_set

__all__ = [
    "plot_budget_curve",
    "plot_cell_scores",
    "plot_coactivation",
    "plot_divergence_along_text",
    "plot_entropy",
    "plot_expert_load",
    "plot_expert_use",
    "plot_heatmap",
    "plot_hit_rate",
    "plot_nll_along_text",
    "plot_overlap",
    "plot_policy_effect",
    "plot_quality_vs_bytes",
    "plot_reuse_distance",
    "plot_roofline",
    "plot_token_text",
    "plot_working_set",
]
