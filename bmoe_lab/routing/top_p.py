"""As many experts as it takes to hold most of a routing's weight."""

from __future__ import annotations

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
from bmoe_lab.routing.ranking import largest

__all__ = ["TopP"]


@compiled
def top_p(
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
    """Mark what is left when the mass is reached; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    mass, at_most = parameters[0], min(int(parameters[1]), width)
    if mass >= 1 and at_most == width:
        return 0
    kept = np.empty(width, np.bool_)
    n_dropped = 0
    for row in range(n_row):
        _, total = largest(values, row)
        if not (np.isfinite(total) and total > 0):
            continue  # an unknown weight: nothing is dropped on a guess
        kept[:] = False
        held = 0.0
        for n_kept in range(at_most):
            # At 1 rounding must not decide: the mass counts as never reached.
            if n_kept > 0 and mass < 1 and held >= mass * total:
                break
            best = -1
            for slot in range(width):
                if not kept[slot] and (best < 0 or values[row, slot] > values[row, best]):
                    best = slot
            kept[best] = True
            held += values[row, best]
        for slot in range(width):
            if not kept[slot]:
                out[row, slot] = True
                n_dropped += 1
    return n_dropped


class TopP(RoutingPolicy):
    """Keep the fewest experts that together hold a given share of the routing's weight.

    It can only make a routing narrower: the graph computes ``n_expert_used`` experts per token,
    and wider than that nothing is known or run. To let hard tokens have more experts than the
    model's own number, open the session with a larger ``n_expert_used`` and set `k_max`.

    Parameters
    ----------
    p : float
        Share of the weight in [0, 1]. 1 keeps every expert, 0 the best alone.
    k_max : int, optional
        Most experts kept per token. None: as many as the graph computes. ``TopP(1.0)`` is neutral.
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing.
    prefill : bool, default False
        Also act on prompt tokens.

    Notes
    -----
    With w_(i) the i-th largest weight (the earlier slot first on a tie), the n largest stay:
    ``n = min{n : w_(1) + ... + w_(n) >= p * sum(weights)}``, at least 1, at most `k_max`. The
    source sums the softmax over all experts; here the weights of the chosen ones are taken,
    normalised to 1 over the routing, so the same `p` keeps fewer experts than in the source.
    A routing with a weight that is not known is left alone.

    Source: Huang et al., "Harder Tasks Need More Experts: Dynamic Routing in MoE Models",
    arXiv:2403.07652.

    Examples
    --------
    >>> TopP(0.8)
    TopP(p=0.8)
    """

    name: ClassVar[str] = "top_p"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    citation: ClassVar[str] = "arXiv:2403.07652"
    kernel = staticmethod(top_p)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"

    def __init__(
        self,
        p: float,
        k_max: int | None = None,
        renormalise: bool = True,
        prefill: bool = False,
    ) -> None:
        self.p = p
        self.k_max = k_max
        self.renormalise = renormalise
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the largest weight."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_frac(self, "p", "It is the share of the weight that is kept; 1 keeps all.")
        if self.k_max is not None:
            require_count(self, "k_max", 1)
        require_bool(self, "renormalise", "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if `k_max` is more than the graph computes."""
        super().check(facts)
        if self.k_max is not None and self.k_max > facts.n_expert_used:
            raise PolicyError(
                f"k_max must be at most the {facts.n_expert_used} experts that the graph computes "
                f"per token; got {self.k_max!r} in {self!r}. Open the session with a larger "
                f"n_expert_used to let a routing be wider."
            )

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        at_most = facts.n_expert_used if self.k_max is None else self.k_max
        if self.p == 1:
            return f"keeps the {at_most} best of {facts.n_expert_used} experts per token"
        return (
            f"keeps the experts that hold {self.p:.4g} of a routing's weight, 1 to {at_most} of "
            f"{facts.n_expert_used}"
        )

    def neutral(self) -> TopP:
        """Return one that keeps them all."""
        return TopP(1.0, None, renormalise=self.renormalise, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return the share, and how many slots may stay."""
        return (float(self.p), float(2**31 if self.k_max is None else self.k_max))
