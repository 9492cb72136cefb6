"""How many cores there are to work on."""

from __future__ import annotations

import os

__all__ = ["physical_cores"]


def physical_cores() -> int:
    """Return the physical cores that this process may use, at least 1."""
    import psutil

    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))
