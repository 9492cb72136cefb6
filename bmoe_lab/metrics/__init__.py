"""Numbers of one routing trace.

Every function takes a trace (:mod:`bmoe_lab.schema`) and returns a labelled array. ``phase``
selects the tokens and is part of the result's name: prefill and decode never share a number by
accident. Cells that did not route are left out; a group with nothing to count is NaN, and so is a
group that holds an unknown weight.
"""

from __future__ import annotations

from bmoe_lab.metrics.cache import first_of_load, hit_rate, read_bytes_per_token, token_cycle_bytes
from bmoe_lab.metrics.policy import (
    drop_rate,
    routing_agreement,
    substitution_rate,
    weight_discarded,
)
from bmoe_lab.metrics.router import consecutive_overlap, expert_load, router_entropy
from bmoe_lab.metrics.text import decode_speed, perplexity

__all__ = [
    "consecutive_overlap",
    "decode_speed",
    "drop_rate",
    "expert_load",
    "first_of_load",
    "hit_rate",
    "perplexity",
    "read_bytes_per_token",
    "router_entropy",
    "routing_agreement",
    "substitution_rate",
    "token_cycle_bytes",
    "weight_discarded",
]
