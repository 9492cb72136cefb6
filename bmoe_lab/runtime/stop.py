"""How a run that is told to stop leaves its loops."""

from __future__ import annotations

__all__ = ["RunStopped"]


class RunStopped(Exception):
    """The run was asked to stop; internal, never seen by a caller."""
