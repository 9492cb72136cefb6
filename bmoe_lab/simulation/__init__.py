"""Recorded routings through policies, without a model: replay, sweeps, bounds."""

from __future__ import annotations

from bmoe_lab.simulation.replaying import replay
from bmoe_lab.simulation.stream import LoadStream, cache_facts, load_stream

__all__ = ["LoadStream", "cache_facts", "load_stream", "replay"]
