"""Substitute experts at random: the control of policies that prefer resident ones."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_frac
from bmoe_lab.routing.randomness import uniform

__all__ = ["RandomSubstitute"]


@compiled
def random_substitute(
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
    """Replace slots by chance; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_expert = resident.size
    free = np.empty(n_expert, np.int32)
    n_changed = 0
    for row in range(n_row):
        # Resident experts outside the routing, ascending.
        n_free = 0
        for expert in range(n_expert):
            if resident[expert]:
                taken = False
                for slot in range(width):
                    if ids[row, slot] == expert:
                        taken = True
                if not taken:
                    free[n_free] = expert
                    n_free += 1
        for slot in range(1, width):
            if uniform(seed, layer, positions[row], slot, 0) >= parameters[0]:
                continue
            if n_free == 0:
                state[0] += 1
                continue
            pick = int(uniform(seed, layer, positions[row], slot, 1) * n_free)
            out[row, slot] = free[pick]
            n_changed += 1
            n_free -= 1
            for later in range(pick, n_free):
                free[later] = free[later + 1]
    return n_changed


class RandomSubstitute(RoutingPolicy):
    """Replace each expert but the first with the same probability by a random resident one.

    Run it at the rate measured for the policy under test (``Counters.control_rate``): what the
    two differ in is the worth of the policy's choice.

    Parameters
    ----------
    rate : float
        Probability in [0, 1] for each slot but slot 0, the router's first choice. 0 is neutral.
    prefill : bool, default False
        Also act on prompt tokens.

    Notes
    -----
    The substitute is drawn uniformly from the layer's resident experts that are neither in the
    router's choice nor already a substitute of the same token. If there is none the slot stays;
    such slots are counted as ``without_candidate``. The draws are hashes of (seed, layer,
    position, slot), so batching does not matter. Source: our control.

    Examples
    --------
    >>> RandomSubstitute(0.25)
    RandomSubstitute(rate=0.25)
    """

    name: ClassVar[str] = "random_substitute"
    needs: ClassVar[frozenset[str]] = frozenset({"cache"})
    citation: ClassVar[str] = "control of this package"
    kernel = staticmethod(random_substitute)
    stage: ClassVar[Literal["select", "weigh"]] = "select"
    n_state: ClassVar[int] = 1

    def __init__(self, rate: float, prefill: bool = False) -> None:
        self.rate = rate
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the router's first choice."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_frac(self, "rate", "It is the probability that a slot is replaced.")
        require_bool(self, "prefill")

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        n_free = facts.n_expert_used - 1
        return (
            f"replaces up to {self.rate * n_free:.3g} of {facts.n_expert_used} experts per token "
            f"by resident ones"
        )

    def extra_counts(self) -> dict[str, int]:
        """Return ``without_candidate``: draws that found no resident expert to take."""
        return {"without_candidate": 0 if self._state is None else int(self._state.sum())}

    def neutral(self) -> RandomSubstitute:
        """Return one that replaces nothing."""
        return RandomSubstitute(0.0, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return the probability."""
        return (float(self.rate),)
