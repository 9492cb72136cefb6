"""Prefer resident experts among those of high rank."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_count
from bmoe_lab.routing.ranking import prefer, read_scores

__all__ = ["MaxRank"]


@compiled
def max_rank(
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    resident: npt.NDArray[np.bool_],
    positions: npt.NDArray[np.int32],
    layer: int,
    seed: int,
    log_scores: bool,
    parameters: npt.NDArray[np.float64],
    state: npt.NDArray[np.float64],
    out: npt.NDArray[np.int32],
) -> int:
    """Fill slots with residents of high rank; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    keep, window = int(parameters[0]), int(parameters[1])
    n_changed = 0
    if keep >= width or window <= width:
        return n_changed  # whoever is resident: the plain top-k
    score = np.empty(resident.size, np.float64)
    for row in range(n_row):
        if read_scores(values, ids, row, score):
            n_changed += prefer(score, ids, row, resident, keep, window, out)
    return n_changed


class MaxRank(RoutingPolicy):
    """Keep the best experts, then take resident ones of high enough rank before missing ones.

    Parameters
    ----------
    keep : int, default 2
        The router's best experts that stay whatever is resident.
    rank : int, default 12
        An expert may be taken for being resident if it is among so many best. Up to the number of
        experts used, nothing can change; 0 is neutral.
    prefill : bool, default False
        Also act on prompt tokens, where in a wide batch every expert is asked for by some token.

    Notes
    -----
    The `keep` best by score stay. The other slots go to the resident experts among the `rank` best,
    in order of score, and what then is left to the best of the rest. Score: the tensor that the
    graph sorted; a tie goes to the router's own choice, then to the lower id. Experts with a score
    that is not finite are never taken; a token with fewer finite scores than slots, or whose own
    choice is not finite, is left alone. The weights are those that the graph computes for the new
    ids. Ids are written only if the set of experts changed; experts that stay keep their slot.

    Sources: "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference",
    arXiv:2412.00099; the defaults are those of colibri.

    Examples
    --------
    >>> MaxRank(keep=1, rank=8)
    MaxRank(keep=1, rank=8)
    """

    name: ClassVar[str] = "max_rank"
    needs: ClassVar[frozenset[str]] = frozenset({"scores", "cache"})
    citation: ClassVar[str] = "arXiv:2412.00099; colibri (defaults)"
    kernel = staticmethod(max_rank)
    stage: ClassVar[Literal["select", "weigh"]] = "select"

    def __init__(self, keep: int = 2, rank: int = 12, prefill: bool = False) -> None:
        self.keep = keep
        self.rank = rank
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """The `keep` best."""
        return self.keep

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_count(self, "keep", 0)
        require_count(self, "rank", 0)
        require_bool(self, "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if more experts are kept than the model uses, or ranked than it has."""
        super().check(facts)
        if self.keep > facts.n_expert_used:
            raise PolicyError(
                f"keep must be at most the {facts.n_expert_used} experts that the model uses per "
                f"token; got {self.keep!r} in {self!r}."
            )
        if self.rank > facts.n_expert:
            raise PolicyError(
                f"rank must be at most the {facts.n_expert} experts of a layer; got "
                f"{self.rank!r} in {self!r}."
            )

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run."""
        cautions = super().cautions(facts)
        width = facts.n_expert_used
        if self.rank > 0 and (self.keep == width or self.rank <= width):
            cautions.append(
                f"{self!r} can never change a routing of {width} experts: keep must be below and "
                f"rank above {width}."
            )
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        width = facts.n_expert_used
        if self.keep >= width or self.rank <= width:
            return "substitutes nothing"
        return (
            f"keeps the {self.keep} best and lets {width - self.keep} of {width} slots go to "
            f"residents among the {self.rank} best of {facts.n_expert} experts"
        )

    def neutral(self) -> MaxRank:
        """Return one that substitutes nothing."""
        return MaxRank(self.keep, 0, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return the two ranks."""
        return (float(self.keep), float(self.rank))
