"""Recorded routings through policies, without a model: replay, sweeps, bounds."""

from __future__ import annotations

from bmoe_lab.simulation.budget_grid import budgets
from bmoe_lab.simulation.curves import lru_curve
from bmoe_lab.simulation.diagnosis import diagnose
from bmoe_lab.simulation.replaying import replay
from bmoe_lab.simulation.stream import LoadStream, cache_facts, load_stream
from bmoe_lab.simulation.sweeping import sweep

__all__ = [
    "LoadStream",
    "budgets",
    "cache_facts",
    "diagnose",
    "load_stream",
    "lru_curve",
    "replay",
    "sweep",
]
