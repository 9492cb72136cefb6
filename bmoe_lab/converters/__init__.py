"""Traces in the formats of others.

Every reader returns a valid trace (:mod:`bmoe_lab.schema`) or raises one clear error; nothing that
was read by half is returned, and nothing that runs code (pickle, ``.pt``) is opened. Every writer
writes aside, reads back and renames. ``docs/formats.md`` says what each format keeps.
"""

from __future__ import annotations

from bmoe_lab.converters.arrays import from_routed_experts, to_routed_experts
from bmoe_lab.converters.bigmoeonedge import from_bigmoeonedge
from bmoe_lab.converters.bigmoeonedge_writing import to_bigmoeonedge
from bmoe_lab.converters.moe_trace import from_moe_trace, to_moe_trace
from bmoe_lab.converters.parquet import from_parquet, to_parquet

__all__ = [
    "from_bigmoeonedge",
    "from_moe_trace",
    "from_parquet",
    "from_routed_experts",
    "to_bigmoeonedge",
    "to_moe_trace",
    "to_parquet",
    "to_routed_experts",
]
