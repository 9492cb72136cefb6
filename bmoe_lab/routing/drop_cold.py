"""Do without a missing expert whose weight is small."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_frac

__all__ = ["DropCold"]

# Up to this width F / width is a large part of a routing: 0.75 at top-2 removes the smaller of the
# two whenever it is missing and has less than 0.375.
_NARROW = 4


@compiled
def drop_cold(
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    resident: npt.NDArray[np.bool_],
    positions: npt.NDArray[np.int32],
    layer: int,
    seed: int,
    log_scores: bool,
    parameters: npt.NDArray[np.float64],
    state: npt.NDArray[np.float64],
    out: npt.NDArray[np.bool_],
) -> int:
    """Mark the cold and light slots; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_dropped = 0
    for row in range(n_row):
        total = 0.0
        best = 0
        for slot in range(width):
            total += values[row, slot]
            if values[row, slot] > values[row, best]:
                best = slot
        threshold = parameters[0] * total / width
        for slot in range(width):
            # A NaN weight, or a NaN total, compares False: nothing is dropped on a guess.
            if slot != best and not resident[ids[row, slot]] and values[row, slot] < threshold:
                out[row, slot] = True
                n_dropped += 1
    return n_dropped


class DropCold(RoutingPolicy):
    """Drop an expert that is not resident if its weight is below a fraction of the average.

    The largest weight of a routing always stays. What is dropped is neither read nor computed;
    the survivors take over its weight.

    Parameters
    ----------
    frac : float
        In [0, 1], relative to the average weight of the routing: 0 drops nothing (neutral), 1
        drops every missing expert of less than average weight.
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing.
    prefill : bool, default False
        Also act on prompt tokens, where nearly everything is a miss.

    Notes
    -----
    Dropped if it is a miss, not the largest, and ``weight < frac * sum(weights) / width``
    (strict); width is the number of experts used as the model runs, an override included. What is
    a miss depends on the cache, so the output depends on the budget. Source: BigMoeOnEdge
    ``--drop-cold-experts`` (PR 94), whose weights sum to 1.

    Examples
    --------
    >>> facts = ModelFacts(n_layer=4, n_expert=32, n_expert_used=4, cache_budget=2**20)
    >>> DropCold(0.75).effective(facts)
    'drops a missing expert whose weight is below 0.1875 of its routing (0.75/4)'
    """

    name: ClassVar[str] = "drop_cold"
    needs: ClassVar[frozenset[str]] = frozenset({"weights", "cache"})
    citation: ClassVar[str] = "BigMoeOnEdge --drop-cold-experts (PR 94)"
    kernel = staticmethod(drop_cold)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"

    def __init__(self, frac: float, renormalise: bool = True, prefill: bool = False) -> None:
        self.frac = frac
        self.renormalise = renormalise
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the largest weight."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_frac(
            self, "frac", "0 drops nothing, 1 drops every missing expert below the average weight."
        )
        require_bool(self, "renormalise", "prefill")

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run."""
        cautions = super().cautions(facts)
        if self.frac > 0 and facts.n_expert_used <= _NARROW:
            cautions.append(
                f"{self!r} on a top-{facts.n_expert_used} model: the threshold is relative to "
                f"1/{facts.n_expert_used}, so it {self.effective(facts)}, a large share."
            )
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        width = facts.n_expert_used
        if self.frac == 0 or width == 1:
            return "drops nothing"
        return (
            f"drops a missing expert whose weight is below {self.frac / width:.4g} of its routing "
            f"({self.frac:g}/{width})"
        )

    def neutral(self) -> DropCold:
        """Return one that drops nothing."""
        return DropCold(0.0, renormalise=self.renormalise, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return the fraction."""
        return (float(self.frac),)
