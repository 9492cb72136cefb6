"""Prefer a resident expert to one that scored a little better."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError, unknown_name
from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_count, require_frac

__all__ = ["CachePrior"]

_RANGES = ("token", "running")


@compiled
def cache_prior(
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
    """Take the top-k again with a bonus for residents; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_expert = resident.size
    strength, keep, running = parameters[0], min(int(parameters[1]), width), parameters[2] != 0
    score = np.empty(n_expert, np.float64)  # NaN: can never be taken
    taken = np.empty(n_expert, np.bool_)
    n_changed = 0
    for row in range(n_row):
        low, high = np.inf, -np.inf
        n_finite = 0
        for expert in range(n_expert):
            x = float(values[row, expert])
            if log_scores:
                x = math.log(x) if x > 0 else math.nan
            if math.isfinite(x):
                n_finite += 1
                low = min(low, x)
                high = max(high, x)
            else:
                x = math.nan
            score[expert] = x
        if n_finite == 0:
            continue
        spread = high - low
        if running:
            state[0] += 1
            state[1] += (spread - state[1]) / state[0]
            spread = state[1]
        if strength == 0 or n_finite < width:
            continue
        sound = True
        for slot in range(width):
            if math.isnan(score[ids[row, slot]]):
                sound = False
        if not sound:
            continue

        taken[:] = False
        for _ in range(keep):
            best = -1
            for slot in range(width):
                expert = ids[row, slot]
                if not taken[expert] and (best < 0 or score[expert] > score[best]):
                    best = expert
            taken[best] = True
        bonus = strength * spread
        n_new = 0
        new = np.empty(width, np.int32)
        for _ in range(width - keep):
            best = -1
            best_score = -np.inf
            for expert in range(n_expert):
                if taken[expert] or math.isnan(score[expert]):
                    continue
                x = score[expert] + bonus if resident[expert] else score[expert]
                if best < 0 or x > best_score:  # ascending ids: a tie goes to the lower one
                    best, best_score = expert, x
            taken[best] = True
            chosen = False
            for slot in range(width):
                if ids[row, slot] == best:
                    chosen = True
            if not chosen:
                new[n_new] = best
                n_new += 1
        # Who stays keeps its slot; the newcomers, best first, fill the vacated ones.
        n_filled = 0
        for slot in range(width):
            if not taken[ids[row, slot]]:
                out[row, slot] = new[n_filled]
                n_filled += 1
        n_changed += n_filled
    return n_changed


class CachePrior(RoutingPolicy):
    """Add a bonus to the scores of resident experts and take the top-k again.

    Decode only: in a wide batch every expert is asked for by some token, and the policy would
    hardly ever fire.

    Parameters
    ----------
    strength : float
        In [0, 1], the bonus as a fraction of the score range. 0 is neutral; at 1 any resident
        expert beats any missing one.
    keep : int, default 1
        The router's best experts that stay whatever is resident.
    range : {"token", "running"}, default "token"
        The score range: this token's own, or the running mean over the layer's tokens of the
        run so far, this one included.

    Notes
    -----
    ``r'_e = r_e + strength * (max r - min r) * resident_e``; range over finite scores; ties to the
    lower id; the `keep` best by r stay. r is the tensor that the graph sorted, in logarithms if
    it is the output of a softmax. Experts with a score that is not finite (masked groups) are
    never taken; a token with fewer finite scores than slots, or whose own choice is not finite,
    is left alone. The weights are those that the graph computes for the new ids. Ids are written
    only if the set of experts changed; experts that stay keep their slot.

    Sources: "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference",
    arXiv:2412.00099 (`range` = "running"); BigMoeOnEdge ``--expert-substitute`` (PR 171), which is
    ``keep=0, range="token"``.

    Examples
    --------
    >>> CachePrior(0.15)
    CachePrior(strength=0.15)
    """

    name: ClassVar[str] = "cache_prior"
    needs: ClassVar[frozenset[str]] = frozenset({"scores", "cache"})
    citation: ClassVar[str] = "arXiv:2412.00099; BigMoeOnEdge --expert-substitute (PR 171)"
    kernel = staticmethod(cache_prior)
    stage: ClassVar[Literal["select", "weigh"]] = "select"
    n_state: ClassVar[int] = 2  # tokens seen, mean range

    def __init__(
        self, strength: float, keep: int = 1, range: Literal["token", "running"] = "token"
    ) -> None:
        self.strength = strength
        self.keep = keep
        self.range = range

    @property
    def pinned(self) -> int:
        """The `keep` best."""
        return self.keep

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_frac(self, "strength", "It is the bonus as a fraction of the score range.")
        require_count(self, "keep", 0)
        if self.range not in _RANGES:
            raise PolicyError(str(unknown_name("range", self.range, _RANGES)))

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
        if self.strength > 0 and self.keep == facts.n_expert_used:
            cautions.append(
                f"{self!r} keeps all {facts.n_expert_used} experts of a token, so it can never "
                f"change one."
            )
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        if self.strength == 0 or self.keep >= facts.n_expert_used:
            return "substitutes nothing"
        whose = "the token's" if self.range == "token" else "the layer's mean"
        return (
            f"lifts a resident expert by {self.strength:g} of {whose} score range; "
            f"{facts.n_expert_used - self.keep} of {facts.n_expert_used} slots may change"
        )

    def neutral(self) -> CachePrior:
        """Return one that substitutes nothing."""
        return CachePrior(0.0, keep=self.keep, range=self.range)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return strength, keep, and whether the range is the running mean."""
        return (float(self.strength), float(self.keep), float(self.range == "running"))
