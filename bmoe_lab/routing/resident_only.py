"""Route only among a set of experts that changes slowly."""

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
from bmoe_lab.routing.ranking import choice_shares, prefer, read_scores
from bmoe_lab.sizes import format_size

__all__ = ["ResidentOnly"]

# State of a layer: tokens seen, times that the set was chosen, then importance and membership of
# each expert.
_HEADER = 2


@compiled
def resident_only(
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
    """Route within the layer's set, then learn from the token; signature as in `RoutingPolicy`."""
    n_row, width = ids.shape
    n_expert = resident.size
    every, keep = int(parameters[0]), int(parameters[2])
    size = max(int(parameters[1] * n_expert + 0.5), width)
    n_changed = 0
    if size >= n_expert or keep >= width:
        return n_changed
    importance = state[_HEADER : _HEADER + n_expert]
    member = state[_HEADER + n_expert : _HEADER + 2 * n_expert]
    score = np.empty(n_expert, np.float64)
    shares = np.empty(width, np.float64)
    preferred = np.empty(n_expert, np.bool_)
    for row in range(n_row):
        if not read_scores(values, ids, row, score):
            continue
        # A token is routed by what those before it told, and only then counts itself.
        if state[1] > 0:
            for expert in range(n_expert):
                preferred[expert] = member[expert] != 0
            n_changed += prefer(score, ids, row, preferred, keep, n_expert, out)
        choice_shares(score, ids, row, log_scores, shares)
        for slot in range(width):
            if not math.isnan(shares[slot]):
                importance[ids[row, slot]] += shares[slot]
        state[0] += 1
        if state[0] % every != 0:
            continue
        n_seen = 0
        for expert in range(n_expert):
            if importance[expert] > 0:
                n_seen += 1
        if n_seen < size:
            continue  # the set has room for all that were ever chosen: nobody to leave out
        state[1] += 1
        member[:] = 0
        for _ in range(size):
            best = -1
            for expert in range(n_expert):
                if member[expert] == 0 and (best < 0 or importance[expert] > importance[best]):
                    best = expert
            member[best] = 1
    return n_changed


class ResidentOnly(RoutingPolicy):
    """Let each token choose only among a slowly changing set of a layer's most important experts.

    **Importance is the sum of weights**: what the router gave to the experts that it chose, summed
    over the tokens of the run so far. The source also multiplies by the norm of the expert's
    output, which is not available here: an expert that weighs much and adds little counts as
    important.

    The set is the policy's own and is not what the cache holds: to spare reads it must fit into the
    cache, and which experts stay there remains the residency policy's decision.

    Parameters
    ----------
    every : int
        Tokens between two choices of the set, counted in each layer.
    frac : float
        Size of the set in (0, 1] of a layer's experts, at least as many as are used. 1 leaves
        nobody out and is neutral.
    keep : int, default 0
        The router's best experts that stay even outside the set. 0 is the source's rule.
    prefill : bool, default False
        Also act on, and learn from, prompt tokens.

    Notes
    -----
    S = Top-k of the scores over the set V. The choice of V is causal: a token is routed by the
    tokens before it. Until `every` tokens are seen, and as long as fewer experts than V has places
    were ever chosen, the router's choice stands. What the router wanted counts towards importance,
    whether it was let in or not, so that an expert outside V can come in.

    The weights in the sum are those of the router's choice over their sum: the scores themselves
    where they are the output of a softmax, the softmax over the chosen ones else. That is the
    model's own weight where it normalises after the top-k; of experts not chosen the weight counts
    as 0. Ties to the lower id. Tokens with scores that cannot be ranked are left alone and not
    counted. If too few members of V have a finite score, the best of the rest fill in.

    Source: SwapMoE, arXiv:2308.15030.

    Examples
    --------
    >>> facts = ModelFacts(n_layer=4, n_expert=32, n_expert_used=4, cache_budget=2**20)
    >>> ResidentOnly(every=16, frac=0.25).effective(facts)
    'routes among 8 of 32 experts per layer, chosen anew every 16 tokens'
    """

    name: ClassVar[str] = "resident_only"
    needs: ClassVar[frozenset[str]] = frozenset({"scores", "cache"})
    citation: ClassVar[str] = "arXiv:2308.15030 (SwapMoE), without the norm of the expert's output"
    kernel = staticmethod(resident_only)
    stage: ClassVar[Literal["select", "weigh"]] = "select"

    def __init__(self, every: int, frac: float, keep: int = 0, prefill: bool = False) -> None:
        self.every = every
        self.frac = frac
        self.keep = keep
        self.prefill = prefill

    @property
    def pinned(self) -> int:
        """The `keep` best."""
        return self.keep

    def _size(self, facts: ModelFacts) -> int:
        return int(self.frac * facts.n_expert + 0.5)

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        require_count(self, "every", 1)
        require_count(self, "keep", 0)
        require_frac(self, "frac", "It is the size of the set; 1 leaves nobody out.")
        require_bool(self, "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if the set has no room for a routing, or more are kept than used."""
        super().check(facts)
        if self._size(facts) < facts.n_expert_used:
            raise PolicyError(
                f"frac must leave room for the {facts.n_expert_used} experts that the model uses "
                f"per token; got {self.frac!r} of {facts.n_expert}, {self._size(facts)}, in "
                f"{self!r}."
            )
        if self.keep > facts.n_expert_used:
            raise PolicyError(
                f"keep must be at most the {facts.n_expert_used} experts that the model uses per "
                f"token; got {self.keep!r} in {self!r}."
            )

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run."""
        cautions = super().cautions(facts)
        if self.frac < 1 and self.keep == facts.n_expert_used:
            cautions.append(
                f"{self!r} keeps all {facts.n_expert_used} experts of a token, so it can never "
                f"change one."
            )
        budget, cycle = facts.cache_budget, facts.token_cycle_bytes
        if budget and cycle and self.frac < 1:
            n_bytes = cycle * self._size(facts) // facts.n_expert_used
            if n_bytes > budget:
                cautions.append(
                    f"{self!r} routes among {format_size(n_bytes)} of experts, more than the cache "
                    f"of {format_size(budget)} holds: they are read again and again."
                )
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        size = self._size(facts)
        if size >= facts.n_expert or self.keep >= facts.n_expert_used:
            return "substitutes nothing"
        return (
            f"routes among {size} of {facts.n_expert} experts per layer, chosen anew every "
            f"{self.every} tokens"
        )

    def extra_counts(self) -> dict[str, int]:
        """Return ``choices``: how often the set of a layer was chosen, all layers together."""
        return {"choices": 0 if self._state is None else int(self._state[:, 1].sum())}

    def neutral(self) -> ResidentOnly:
        """Return one that leaves nobody out."""
        return ResidentOnly(self.every, 1.0, keep=self.keep, prefill=self.prefill)

    def state_size(self, n_expert: int) -> int:
        """Return room for importance and membership of each expert."""
        return _HEADER + 2 * n_expert

    def kernel_parameters(self) -> tuple[float, ...]:
        """Return how often, how many, how many stay."""
        return (float(self.every), float(self.frac), float(self.keep))
