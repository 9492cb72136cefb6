"""Do without an expert whose absence a layer hardly feels."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_number
from bmoe_lab.routing.per_layer import at_layer, check_n_layer, require_per_layer
from bmoe_lab.routing.ranking import largest

__all__ = ["SensitivitySkip"]


@compiled
def sensitivity_skip(
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
    """Mark slots of little consequence; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    threshold, sensitivity = parameters[0], parameters[1]
    n_dropped = 0
    for row in range(n_row):
        best, total = largest(values, row)
        if not (np.isfinite(total) and total > 0):
            continue  # an unknown weight: nothing is dropped on a guess
        for slot in range(width):
            share = values[row, slot] / total
            if slot != best and share * share * sensitivity < threshold:
                out[row, slot] = True
                n_dropped += 1
    return n_dropped


class SensitivitySkip(RoutingPolicy):
    """Drop every expert whose squared share of the weight, times the layer's sensitivity, is small.

    Layers differ in how much the output suffers when an expert is left out: the same threshold
    drops more in those that matter less.

    Parameters
    ----------
    threshold : float
        At least 0, in the unit of `sensitivity`. 0 drops nothing (neutral).
    sensitivity : array of float, shape (layer,)
        How much each layer matters, at least 0: in the source a Hessian trace, estimated by the
        Fisher information. It is given, not measured here: that takes gradients, which llama.cpp
        does not compute.
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing.
    prefill : bool, default False
        Also act on prompt tokens.

    Notes
    -----
    With a_i the share of slot i in the routing's weight and H_l the sensitivity, dropped if it is
    not the largest and ``a_i**2 * H_l < threshold``, that is ``a_i < sqrt(threshold / H_l)``. The
    source states it for top-2, where only the second expert can be skipped; each slot on its own
    is our extension to wider routings. A routing with a weight that is not known is left alone.

    Source: AdapMoE, arXiv:2408.10284; code PKU-SEC-Lab/AdapMoE
    ``benchmarks/run_acc_benchmark.py``, which also lists the sensitivities of Mixtral-8x7B and
    8x22B (thresholds there: 0.001 to 0.007).

    Examples
    --------
    >>> SensitivitySkip(0.005, sensitivity=np.array([46.7, 17.3, 13.0]))
    SensitivitySkip(threshold=0.005, sensitivity=array(shape=(3,), sha256='59c4b231'))
    """

    name: ClassVar[str] = "sensitivity_skip"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    citation: ClassVar[str] = "arXiv:2408.10284 (AdapMoE)"
    kernel = staticmethod(sensitivity_skip)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"
    array_parameters: ClassVar[frozenset[str]] = frozenset({"sensitivity"})

    def __init__(
        self,
        threshold: float,
        sensitivity: npt.ArrayLike,
        renormalise: bool = True,
        prefill: bool = False,
    ) -> None:
        self.threshold = threshold
        self.sensitivity = sensitivity
        self.renormalise = renormalise
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the largest weight."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_number(self, "threshold", "It is in the unit of the sensitivity; 0 drops nothing.")
        require_per_layer(
            self, "sensitivity", "It is how much each layer matters.", array_only=True
        )
        require_bool(self, "renormalise", "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if the sensitivities are those of another model."""
        super().check(facts)
        check_n_layer(self, "sensitivity", facts)

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        if self.threshold == 0 or facts.n_expert_used == 1:
            return "drops nothing"
        with np.errstate(divide="ignore"):
            shares = np.sqrt(self.threshold / np.asarray(self.sensitivity, np.float64))
        low, high = np.minimum(1.0, [shares.min(), shares.max()])
        shown = f"{high:.4g}" if low == high else f"{low:.4g} to {high:.4g} (by layer)"
        return f"drops an expert whose weight is below {shown} of its routing"

    def neutral(self) -> SensitivitySkip:
        """Return one that drops nothing."""
        return SensitivitySkip(
            0.0, self.sensitivity, renormalise=self.renormalise, prefill=self.prefill
        )

    def parameters_at(self, layer: int) -> npt.NDArray[np.float64]:
        """Return the threshold and the layer's sensitivity."""
        return np.array([float(self.threshold), at_layer(self, "sensitivity", layer)])
