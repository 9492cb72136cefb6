"""What a run has told so far."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.plots.live_activity import WINDOW

if TYPE_CHECKING:
    from bmoe_lab.runtime.step import Step

__all__ = ["WatchedRun"]


@dataclass
class WatchedRun:
    """Filled on the session's thread, read by the one that draws.

    Attributes
    ----------
    prompt, note : str
        What it continues; whether it is lossy.
    parts : list of str
        The text, in pieces.
    step : Step or None
        The last one.
    """

    prompt: str
    note: str
    parts: list[str] = field(default_factory=list)
    step: Step | None = None
    n_first: int = 0
    loads: dict[str, deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]] = field(
        default_factory=lambda: {"prefill": deque(maxlen=WINDOW), "decode": deque(maxlen=WINDOW)}
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, step: Step) -> None:
        """Keep a step, and of the last `WINDOW` of its phase what they looked up and missed."""
        with self.lock:
            if self.step is None or self.step.phase != step.phase:
                self.n_first = step.n_token
            self.step = step
            self.loads[step.phase].append((step.misses, step.lookups))

    def last(self) -> tuple[Step | None, list[Any], int]:
        """Return the last step, its phase's loads (misses, lookups), its phase's first width."""
        with self.lock:
            step = self.step
            return step, [] if step is None else list(self.loads[step.phase]), self.n_first
