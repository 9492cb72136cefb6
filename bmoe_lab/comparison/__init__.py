"""What lossy routing policies cost and save: the same text under each, against lossless."""

from __future__ import annotations

from bmoe_lab.comparison.comparing import Comparison, Progress, compare
from bmoe_lab.comparison.first_divergence import first_divergence
from bmoe_lab.comparison.tree import COLUMNS, Arm, is_comparison, runs

__all__ = [
    "COLUMNS",
    "Arm",
    "Comparison",
    "Progress",
    "compare",
    "first_divergence",
    "is_comparison",
    "runs",
]
