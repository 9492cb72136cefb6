"""Drop experts at random: the control of policies that drop."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_frac
from bmoe_lab.routing.randomness import uniform

__all__ = ["RandomDrop"]


@compiled
def random_drop(
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
    """Mark slots by chance; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_dropped = 0
    for row in range(n_row):
        best = 0
        for slot in range(1, width):
            if values[row, slot] > values[row, best]:
                best = slot
        for slot in range(width):
            if slot != best and uniform(seed, layer, positions[row], slot, 0) < parameters[0]:
                out[row, slot] = True
                n_dropped += 1
    return n_dropped


class RandomDrop(RoutingPolicy):
    """Drop each expert but the largest with the same probability, resident or not.

    Run it at the rate measured for the policy under test (``Counters.control_rate``): what the
    two differ in is the worth of the policy's choice of victims.

    Parameters
    ----------
    rate : float
        Probability in [0, 1] for each slot but the one of largest weight. 0 is neutral.
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing.
    prefill : bool, default False
        Also act on prompt tokens.

    Notes
    -----
    The draw for a slot is a hash of (seed, layer, position, slot), so batching does not matter.
    Source: our control.

    Examples
    --------
    >>> RandomDrop(0.1)
    RandomDrop(rate=0.1)
    """

    name: ClassVar[str] = "random_drop"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    citation: ClassVar[str] = "control of this package"
    kernel = staticmethod(random_drop)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"

    def __init__(self, rate: float, renormalise: bool = True, prefill: bool = False) -> None:
        self.rate = rate
        self.renormalise = renormalise
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the largest weight."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_frac(self, "rate", "It is the probability that a slot is dropped.")
        require_bool(self, "renormalise", "prefill")

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        n_free = facts.n_expert_used - 1
        return f"drops {self.rate * n_free:.3g} of {facts.n_expert_used} experts per token"

    def neutral(self) -> RandomDrop:
        """Return one that drops nothing."""
        return RandomDrop(0.0, renormalise=self.renormalise, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return the probability."""
        return (float(self.rate),)
