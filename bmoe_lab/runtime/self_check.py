"""The check at load: the experts chosen must be the best of what was sorted."""

from __future__ import annotations

from typing import Any

import numpy as np

from bmoe_lab.seam.capture import ExpertGraph

__all__ = ["ScoreCheck"]


class ScoreCheck:
    """Takes the place of a recorder for one evaluation and compares scores with choices.

    A layer whose choice cannot be explained by the scores that the capture found must not be
    edited: the scores may be another tensor's.
    """

    def __init__(self, graph: ExpertGraph) -> None:
        self._graph = graph
        self.wrong: dict[int, str] = {}

    def begin(self, **_: Any) -> None:
        """Start the evaluation."""

    def layer(
        self, layer: int, rows: np.ndarray, *, chosen: np.ndarray, scores: Any, **_: Any
    ) -> None:
        """Compare one layer."""
        if scores is None:
            return
        for row in range(len(rows)):
            picked = scores[row][chosen[row]]
            others = np.delete(scores[row], chosen[row])
            if not np.isfinite(picked).all() or (len(others) and others.max() > picked.min()):
                self.wrong[layer] = (
                    "the experts chosen are not the best of the scores that were found"
                )

    def commit(self, costs: dict[str, float]) -> None:
        """End the evaluation."""

    def discard(self) -> None:
        """Forget the evaluation."""
