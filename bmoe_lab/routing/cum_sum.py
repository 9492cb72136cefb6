"""Prefer resident experts among those that hold most of the router's probability."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import (
    ModelFacts,
    RoutingPolicy,
    require_bool,
    require_count,
    require_frac,
)
from bmoe_lab.routing.ranking import FEW, prefer, rank_first, read_scores

__all__ = ["CumSum"]


@compiled
def cum_sum(
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
    """Fill slots with residents of the likely ones; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_expert = resident.size
    keep, mass = int(parameters[0]), parameters[1]
    n_changed = 0
    if keep >= width or mass <= 0:
        return n_changed
    score = np.empty(n_expert, np.float64)
    probability = np.empty(n_expert, np.float64)
    slot_of = np.zeros(n_expert, np.int64)  # ties add the same whichever comes first
    order = np.empty(n_expert, np.int64)
    for row in range(n_row):
        if not read_scores(values, ids, row, score):
            continue
        top = -math.inf
        for expert in range(n_expert):
            if score[expert] > top:
                top = score[expert]
        total = 0.0
        for expert in range(n_expert):
            x = score[expert]
            if math.isnan(x):
                probability[expert] = 0.0
            else:
                probability[expert] = x if log_scores else math.exp(x - top)
            total += probability[expert]
        # At 1 rounding must not decide: the window is every expert that has a score.
        window = n_expert
        if mass < 1:
            window = 0
            reached = 0.0
            n_asked = min(FEW * width, n_expert)
            n_ranked = rank_first(score, slot_of, n_asked, order)
            while reached < mass * total:
                if window == n_ranked:
                    if n_ranked < n_asked or n_asked == n_expert:
                        break
                    n_asked = min(2 * n_asked, n_expert)
                    n_ranked = rank_first(score, slot_of, n_asked, order)
                    continue
                reached += probability[order[window]]
                window += 1
        if window > width:
            n_changed += prefer(score, ids, row, resident, keep, window, out)
    return n_changed


class CumSum(RoutingPolicy):
    """Keep the best experts, then take resident ones among those that hold most probability.

    As :class:`MaxRank`, but how far down the ranking a resident may be taken follows from the
    token: where the router is sure, few are in question; where it hesitates, many.

    Parameters
    ----------
    keep : int
        The router's best experts that stay whatever is resident.
    p : float
        In [0, 1]. A resident may be taken if it is among the fewest best experts that together
        hold this share of the router's probability. 0 is neutral, 1 admits every expert.
    prefill : bool, default False
        Also act on prompt tokens, where in a wide batch every expert is asked for by some token.

    Notes
    -----
    ``M = min{n : s_(1) + ... + s_(n) >= p}``, then :class:`MaxRank` with ``rank = M``. s are the
    scores that the graph sorted where they are the output of a softmax, over their sum; other
    scores are taken for logits and s is their softmax. For a router that sorts sigmoids
    (DeepSeek-V3 and its kin) that s is flatter than the router's own weights, so the same `p`
    admits more.

    Source: "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference",
    arXiv:2412.00099.

    Examples
    --------
    >>> CumSum(keep=1, p=0.6)
    CumSum(keep=1, p=0.6)
    """

    name: ClassVar[str] = "cum_sum"
    needs: ClassVar[frozenset[str]] = frozenset({"scores", "cache"})
    citation: ClassVar[str] = "arXiv:2412.00099"
    kernel = staticmethod(cum_sum)
    stage: ClassVar[Literal["select", "weigh"]] = "select"

    def __init__(self, keep: int, p: float, prefill: bool = False) -> None:
        self.keep = keep
        self.p = p
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """The `keep` best."""
        return self.keep

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_count(self, "keep", 0)
        require_frac(self, "p", "It is a share of the router's probability; 0 changes nothing.")
        require_bool(self, "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if more experts are kept than the model uses."""
        super().check(facts)
        if self.keep > facts.n_expert_used:
            raise PolicyError(
                f"keep must be at most the {facts.n_expert_used} experts that the model uses per "
                f"token; got {self.keep!r} in {self!r}."
            )

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run."""
        cautions = super().cautions(facts)
        if self.p > 0 and self.keep == facts.n_expert_used:
            cautions.append(
                f"{self!r} keeps all {facts.n_expert_used} experts of a token, so it can never "
                f"change one."
            )
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        width = facts.n_expert_used
        if self.keep >= width or self.p == 0:
            return "substitutes nothing"
        return (
            f"keeps the {self.keep} best and lets {width - self.keep} of {width} slots go to "
            f"residents among the experts that hold {self.p:.4g} of the probability"
        )

    def neutral(self) -> CumSum:
        """Return one that substitutes nothing."""
        return CumSum(self.keep, 0.0, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return how many stay, and the share."""
        return (float(self.keep), float(self.p))
