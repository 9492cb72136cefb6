"""Do without an expert whose weight is small, resident or not."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_frac
from bmoe_lab.routing.ranking import largest

__all__ = ["DropBelow"]


@compiled
def drop_below(
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
    """Mark the light slots; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_dropped = 0
    for row in range(n_row):
        best, total = largest(values, row)
        threshold = parameters[0] * total
        for slot in range(width):
            # A NaN weight, or a NaN total, compares False: nothing is dropped on a guess.
            if slot != best and values[row, slot] < threshold:
                out[row, slot] = True
                n_dropped += 1
    return n_dropped


class DropBelow(RoutingPolicy):
    """Drop every expert whose share of the routing's weight is below a threshold.

    The control of :class:`DropCold` that does not look at the cache: ``DropBelow(F / width)`` is
    ``DropCold(F)`` where nothing is ever resident. The largest weight always stays.

    Parameters
    ----------
    threshold : float
        In [0, 1], a share of the routing's weight: 0 drops nothing (neutral), 1 all but the best.
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing.
    prefill : bool, default False
        Also act on prompt tokens.

    Notes
    -----
    Dropped if it is not the largest and ``weight < threshold * sum(weights)`` (strict). Weights
    that sum to 1, as in most models, are compared as they are; a threshold then means the same for
    a model that scales them.

    Sources: the fixed threshold that AdapMoE compares itself with (``routing_weights[0][1] <
    threshold`` of normalised weights, PKU-SEC-Lab/AdapMoE ``src/custom_layers.py``,
    arXiv:2408.10284), for any number of experts.

    Examples
    --------
    >>> facts = ModelFacts(n_layer=4, n_expert=32, n_expert_used=4, cache_budget=None)
    >>> DropBelow(0.1).effective(facts)
    'drops an expert whose weight is below 0.1 of its routing'
    """

    name: ClassVar[str] = "drop_below"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    citation: ClassVar[str] = "arXiv:2408.10284 (AdapMoE, its fixed threshold)"
    kernel = staticmethod(drop_below)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"

    def __init__(self, threshold: float, renormalise: bool = True, prefill: bool = False) -> None:
        self.threshold = threshold
        self.renormalise = renormalise
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the largest weight."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_frac(self, "threshold", "It is a share of the routing's weight; 0 drops nothing.")
        require_bool(self, "renormalise", "prefill")

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run."""
        cautions = super().cautions(facts)
        width = facts.n_expert_used
        if self.threshold * width >= 1 and width > 1:
            cautions.append(
                f"{self!r} is not below the average share of a top-{width} model, "
                f"1/{width}: it drops most experts, and all but one where the weights are even."
            )
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        if self.threshold == 0 or facts.n_expert_used == 1:
            return "drops nothing"
        return f"drops an expert whose weight is below {self.threshold:.4g} of its routing"

    def neutral(self) -> DropBelow:
        """Return one that drops nothing."""
        return DropBelow(0.0, renormalise=self.renormalise, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return the threshold."""
        return (float(self.threshold),)
