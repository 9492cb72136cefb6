"""Do without an expert that weighs little against the best of its routing."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool
from bmoe_lab.routing.per_layer import at_layer, check_n_layer, require_per_layer
from bmoe_lab.routing.ranking import largest

__all__ = ["RatioSkip"]


@compiled
def ratio_skip(
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
    """Mark slots far below the best; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_dropped = 0
    for row in range(n_row):
        best, total = largest(values, row)
        if np.isnan(total):
            continue  # the unknown weight may be the largest: nothing is dropped on a guess
        threshold = parameters[0] * values[row, best]
        for slot in range(width):
            if slot != best and values[row, slot] < threshold:
                out[row, slot] = True
                n_dropped += 1
    return n_dropped


class RatioSkip(RoutingPolicy):
    """Drop every expert whose weight is below a fraction of the routing's largest.

    Parameters
    ----------
    ratio : float or array of float, shape (layer,)
        In [0, 1]; one number for all layers, or one for each. 0 drops nothing (neutral), 1 all
        that weigh less than the best. :meth:`from_trace` measures it.
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing.
    prefill : bool, default False
        Also act on prompt tokens.

    Notes
    -----
    Dropped if ``w_(i) < ratio_l * w_(1)`` (strict), w_(1) the largest weight. The source states it
    for top-2, where only w_(2) can be skipped; for wider routings, each slot against the largest is
    our extension. A routing with a weight that is not known is left alone.

    Source: Lu et al., "Not All Experts are Equal: Efficient Expert Pruning and Skipping for
    Mixture-of-Experts Large Language Models", arXiv:2402.14800.

    Examples
    --------
    >>> RatioSkip(0.4)
    RatioSkip(ratio=0.4)
    >>> RatioSkip(np.array([0.25, 0.5])).parameters_at(1)
    array([0.5])
    """

    name: ClassVar[str] = "ratio_skip"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    citation: ClassVar[str] = "arXiv:2402.14800"
    kernel = staticmethod(ratio_skip)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"
    array_parameters: ClassVar[frozenset[str]] = frozenset({"ratio"})

    def __init__(
        self, ratio: float | npt.ArrayLike, renormalise: bool = True, prefill: bool = False
    ) -> None:
        self.ratio = ratio
        self.renormalise = renormalise
        self.prefill = prefill

    @classmethod
    def from_trace(cls, trace: Any, renormalise: bool = True, prefill: bool = False) -> Self:
        """Return one with each layer's median of second to largest weight, as the source sets it.

        At top-2 it drops the second expert of half of the tokens of that text.

        Parameters
        ----------
        trace : xarray.Dataset
            Reads ``weight_chosen``, float32 of shape (token, layer, slot); any mapping that holds
            it will do. Cells with a weight that is not known are left out.
        renormalise, prefill : bool
            As above.

        Raises
        ------
        PolicyError
            If there are no weights, or not two in any cell of some layer.

        Examples
        --------
        >>> from bmoe_lab.testing import make_trace
        >>> policy = RatioSkip.from_trace(make_trace(n_token=8, n_layer=3, seed=0))
        >>> policy.ratio.shape
        (3,)
        """
        if "weight_chosen" not in trace:
            raise PolicyError(
                "trace must hold weight_chosen to measure ratios of weights; got one without it. "
                "Record with record='ids' or more."
            )
        weights: npt.NDArray[np.float64] = np.sort(
            np.asarray(trace["weight_chosen"].values, np.float64), axis=2
        )[..., ::-1]
        known = np.asarray(np.isfinite(weights).all(axis=2))
        if weights.shape[2] > 1:
            known &= weights[..., 0] > 0
        ratios = []
        for layer in range(weights.shape[1]):
            cells = weights[known[:, layer], layer]
            if cells.shape[1] < 2 or not len(cells):
                raise PolicyError(
                    f"trace must hold two known weights for some token of every layer; got none "
                    f"in layer {layer}, of shape {weights.shape}."
                )
            ratios.append(np.median(cells[:, 1] / cells[:, 0]))
        return cls(np.array(ratios), renormalise, prefill)

    @property
    def pinned(self) -> int:
        """One: the largest weight."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_per_layer(
            self,
            "ratio",
            "It is the least weight that stays, relative to the largest; 0 drops nothing.",
            at_most=1.0,
            array_only=False,
        )
        require_bool(self, "renormalise", "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if the ratios are those of another model."""
        super().check(facts)
        check_n_layer(self, "ratio", facts)

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        low, high = np.min(np.asarray(self.ratio)), np.max(np.asarray(self.ratio))
        if high == 0 or facts.n_expert_used == 1:
            return "drops nothing"
        shown = f"{high:.4g}" if low == high else f"{low:.4g} to {high:.4g} (by layer)"
        return f"drops an expert whose weight is below {shown} of its routing's largest"

    def neutral(self) -> RatioSkip:
        """Return one that drops nothing."""
        return RatioSkip(0.0, renormalise=self.renormalise, prefill=self.prefill)

    def parameters_at(self, layer: int) -> npt.NDArray[np.float64]:
        """Return the layer's ratio."""
        return np.array([at_layer(self, "ratio", layer)])
