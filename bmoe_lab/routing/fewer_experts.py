"""Fewer experts per token than the model was trained with."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy, require_bool, require_count

__all__ = ["FewerExperts"]


@compiled
def keep_first(
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
    """Drop every slot from the n-th on; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_kept = int(parameters[0])
    if n_kept >= width:
        return 0
    for row in range(n_row):
        for slot in range(n_kept, width):
            out[row, slot] = True
    n_dropped: int = n_row * (width - n_kept)
    return n_dropped


class FewerExperts(RoutingPolicy):
    """Keep the router's `n_used` best experts of each token, whatever is resident.

    The usual way to make a MoE model cheaper, and the yardstick for policies that look at the
    cache. Dropped slots still cost a multiplication (with weight 0), but no read.

    Parameters
    ----------
    n_used : int or None
        Experts kept per token, by the router's order. None keeps them all (neutral).
    renormalise : bool, default True
        Scale the survivors up to the weight of the whole routing. That is what the graph does by
        itself, under a smaller ``n_expert_used``, in models that normalise the weights after the
        top-k (Qwen3-MoE, Mixtral, gpt-oss). For models that do not (OLMoE, Qwen2-MoE) False is
        the same as the override.
    prefill : bool, default False
        Also act on prompt tokens, as the override does.

    Notes
    -----
    S = Top-k'(r). Source: llama.cpp's ``expert_used_count`` override; BigMoeOnEdge
    ``--n-expert-used``.

    Examples
    --------
    >>> FewerExperts(2)
    FewerExperts(n_used=2)
    """

    name: ClassVar[str] = "fewer_experts"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    citation: ClassVar[str] = (
        "llama.cpp expert_used_count override (PR 18029); BigMoeOnEdge --n-expert-used"
    )
    kernel = staticmethod(keep_first)
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"

    def __init__(self, n_used: int | None, renormalise: bool = True, prefill: bool = False) -> None:
        self.n_used = n_used
        self.renormalise = renormalise
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """One: the router's first choice."""
        return 1

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        if self.n_used is not None:
            require_count(self, "n_used", 1)
        require_bool(self, "renormalise", "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if `n_used` is more than the model uses."""
        super().check(facts)
        if self.n_used is not None and self.n_used > facts.n_expert_used:
            raise PolicyError(
                f"n_used must be at most the {facts.n_expert_used} experts that the model uses "
                f"per token; got {self.n_used!r} in {self!r}."
            )

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        kept = facts.n_expert_used if self.n_used is None else self.n_used
        return f"keeps the {kept} best of {facts.n_expert_used} experts per token"

    def neutral(self) -> FewerExperts:
        """Return one that keeps them all."""
        return FewerExperts(None, renormalise=self.renormalise, prefill=self.prefill)

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return how many slots stay."""
        return (float(2**31 if self.n_used is None else self.n_used),)
