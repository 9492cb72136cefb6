"""In place of a missing expert, run a resident one that often runs beside it."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.kernels import compiled
from bmoe_lab.parameters import parameter_repr
from bmoe_lab.routing.base import (
    ModelFacts,
    RoutingPolicy,
    require_bool,
    require_count,
    require_frac,
)
from bmoe_lab.routing.ranking import choice_shares, read_scores

__all__ = ["Buddy"]

# Parameters of a layer: these, then the buddies of each expert in order, -1 where there are no
# more.
_HEADER = 5


@compiled
def buddy(
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
    """Put buddies in the place of missing experts; signature as in `RoutingPolicy.kernel`."""
    n_row, width = ids.shape
    n_expert = resident.size
    keep, entropy, missing = int(parameters[0]), parameters[1], parameters[2]
    n_known, tries = int(parameters[3]), int(parameters[4])
    score = np.empty(n_expert, np.float64)
    shares = np.empty(width, np.float64)
    n_changed = 0
    for row in range(n_row):
        n_missing = 0
        for slot in range(width):
            if not resident[ids[row, slot]]:
                n_missing += 1
        if n_missing == 0 or n_missing / width > missing:
            continue
        if entropy > 0:
            if width == 1 or not read_scores(values, ids, row, score):
                continue
            choice_shares(score, ids, row, log_scores, shares)
            h = 0.0
            for share in shares:
                if share != 0:  # NaN goes in and fails the comparison
                    h -= share * math.log(share)
            if not (h / math.log(width) >= entropy):
                continue
        for slot in range(keep, width):
            expert = ids[row, slot]
            if resident[expert] or expert >= n_known:
                continue
            for attempt in range(tries):
                candidate = int(parameters[_HEADER + expert * tries + attempt])
                if candidate < 0:
                    break
                if candidate >= n_expert or not resident[candidate]:
                    continue
                free = True
                for other in range(width):
                    if out[row, other] == candidate:
                        free = False
                if free:
                    out[row, slot] = candidate
                    n_changed += 1
                    break
    return n_changed


@compiled
def _co_activation(
    ids: npt.NDArray[np.int64], table: npt.NDArray[np.int64]
) -> tuple[int, int, int]:
    """Count pairs of a routing into `table`; return the first id out of range as (1, place)."""
    n_token, n_layer, width = ids.shape
    n_expert = table.shape[1]
    for token in range(n_token):
        for layer in range(n_layer):
            for slot in range(width):
                one = ids[token, layer, slot]
                if one >= n_expert:
                    return 1, token, layer
                if one < 0:
                    continue  # did not route
                for other_slot in range(width):
                    other = ids[token, layer, other_slot]
                    if 0 <= other < n_expert and other != one:
                        table[layer, one, other] += 1
    return 0, 0, 0


class Buddy(RoutingPolicy):
    """Substitute a missing expert by the resident one that most often runs beside it.

    Parameters
    ----------
    table : array of int or float, shape (layer, expert, expert)
        ``table[l, i, j]``: how well j stands for i, at least 0; 0 is no buddy. Co-activation counts
        from :meth:`from_trace`, or a similarity of your own.
    tries : int, default 8
        Buddies looked at per missing expert, best first. 0 is neutral.
    entropy : float, default 0
        In [0, 1]: only tokens whose routing entropy is at least this are touched, those that do not
        care much which expert they get. 0 lets all pass; above 0 the router's scores are needed.
    missing : float, default 1
        In [0, 1]: only routings of which at most this share is missing are touched, so that a token
        is not made of substitutes. 1 lets all pass.
    keep : int, default 1
        The router's first choices that are read rather than substituted.
    prefill : bool, default False
        Also act on prompt tokens, where in a wide batch every expert is asked for by some token.

    Notes
    -----
    For a missing i the first resident j outside the routing is taken among the `tries` best by
    ``q(j|i) = table[l, i, j] / sum_j' table[l, i, j']`` (ties to the lower id); slots in the
    router's order. If there is none, i is read. The routing entropy is
    ``-sum a ln a / ln(width)`` with a the shares that the router gives its chosen experts: the
    scores over their sum where they are the output of a softmax, the softmax over the chosen ones
    else (too flat for a router that sorts sigmoids). The weights are those that the graph computes
    for the new ids.

    A table from the text under test has seen the answer: calibrate on another one. In a public
    comparison co-activation tables did worse than :class:`MaxRank`.

    Source: BuddyMoE, arXiv:2511.10054. Its gates are stated there in general terms; the
    normalisation of the entropy, and the missing share per token, are ours.

    Examples
    --------
    >>> table = np.zeros((1, 4, 4))
    >>> table[0, 2] = [5, 9, 0, 0]
    >>> Buddy(table, tries=2).parameters_at(0)[5:].astype(int).reshape(4, 2)[2].tolist()
    [1, 0]
    """

    name: ClassVar[str] = "buddy"
    citation: ClassVar[str] = "arXiv:2511.10054 (BuddyMoE)"
    kernel = staticmethod(buddy)
    stage: ClassVar[Literal["select", "weigh"]] = "select"
    array_parameters: ClassVar[frozenset[str]] = frozenset({"table"})

    _rows: dict[int, npt.NDArray[np.float64]] | None = None

    def __init__(
        self,
        table: npt.ArrayLike,
        tries: int = 8,
        entropy: float = 0.0,
        missing: float = 1.0,
        keep: int = 1,
        prefill: bool = False,
    ) -> None:
        self.table = table
        self.tries = tries
        self.entropy = entropy
        self.missing = missing
        self.keep = keep
        self.prefill = prefill

    @classmethod
    def from_trace(
        cls,
        trace: Any,
        tries: int = 8,
        entropy: float = 0.0,
        missing: float = 1.0,
        keep: int = 1,
        prefill: bool = False,
    ) -> Self:
        """Return one whose table counts which experts the router chose together.

        Parameters
        ----------
        trace : xarray.Dataset
            Reads ``expert_chosen``, integers of shape (token, layer, slot), -1 where a layer did
            not route, and the attribute ``n_expert``. All tokens count, prompt and decode.
        tries, entropy, missing, keep, prefill
            As above.

        Raises
        ------
        PolicyError
            If the trace lacks one of them, or an id is not below ``n_expert``.

        Examples
        --------
        >>> from bmoe_lab.testing import make_trace
        >>> Buddy.from_trace(make_trace(n_token=8, n_layer=3, n_expert=16, seed=0)).table.shape
        (3, 16, 16)
        """
        if "expert_chosen" not in trace or "n_expert" not in trace.attrs:
            raise PolicyError(
                "trace must hold expert_chosen and the attribute n_expert to count which experts "
                "run together; got one without."
            )
        ids = np.ascontiguousarray(trace["expert_chosen"].values, dtype=np.int64)
        n_expert = int(trace.attrs["n_expert"])
        table = np.zeros((ids.shape[1], n_expert, n_expert), dtype=np.int64)
        bad, token, layer = _co_activation(ids, table)
        if bad:
            raise PolicyError(
                f"expert_chosen must be below n_expert = {n_expert}; got "
                f"{ids[token, layer].tolist()} at token {token}, layer {layer}."
            )
        return cls(table, tries, entropy, missing, keep, prefill)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """A cache; the scores too if tokens are told apart by entropy."""
        gated = isinstance(self.entropy, int | float) and self.entropy > 0
        return frozenset({"cache", "scores"} if gated else {"cache"})

    @property
    def pinned(self) -> int:
        """The first `keep`."""
        return self.keep

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""
        table = self.table
        try:
            array = np.asarray(table)
        except ValueError:  # lists of unequal length
            array = np.empty(0)
        if array.dtype.kind not in "iuf" or array.ndim != 3 or array.shape[1] != array.shape[2]:
            raise PolicyError(
                f"table must be an array of numbers of shape (layer, expert, expert); got "
                f"{parameter_repr(table)} in {type(self).__name__}. Make one with "
                f"Buddy.from_trace(trace)."
            )
        if not (array >= 0).all() or not np.isfinite(array).all():
            raise PolicyError(
                f"table must hold finite numbers of at least 0; got {parameter_repr(table)} in "
                f"{type(self).__name__}, with others."
            )
        require_count(self, "tries", 0)
        require_frac(self, "entropy", "It is the least entropy of a routing that is touched.")
        require_frac(self, "missing", "It is the largest missing share that is substituted.")
        require_count(self, "keep", 0)
        require_bool(self, "prefill")

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if the table is another model's, or more is kept than used."""
        super().check(facts)
        shape = (facts.n_layer, facts.n_expert, facts.n_expert)
        if np.shape(self.table) != shape:
            raise PolicyError(
                f"table must have shape (layer, expert, expert) = {shape}; got "
                f"{np.shape(self.table)} in {self!r}. It was made for another model."
            )
        if self.keep > facts.n_expert_used:
            raise PolicyError(
                f"keep must be at most the {facts.n_expert_used} experts that the model uses per "
                f"token; got {self.keep!r} in {self!r}."
            )

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run."""
        cautions = super().cautions(facts)
        if self.tries > 0 and self.keep == facts.n_expert_used:
            cautions.append(
                f"{self!r} keeps all {facts.n_expert_used} experts of a token, so it can never "
                f"change one."
            )
        if self.tries > 0 and not np.any(np.asarray(self.table)):
            cautions.append(f"{self!r} has an empty table: no expert has a buddy.")
        return cautions

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        width = facts.n_expert_used
        if self.tries == 0 or self.keep >= width:
            return "substitutes nothing"
        gates = ""
        if self.entropy > 0:
            gates += f", where the routing entropy is at least {self.entropy:.4g}"
        if self.missing < 1:
            gates += f", where at most {int(self.missing * width + 1e-9)} of {width} are missing"
        return (
            f"puts one of {self.tries} resident buddies in the place of a missing expert, in "
            f"{width - self.keep} of {width} slots{gates}"
        )

    def neutral(self) -> Buddy:
        """Return one that substitutes nothing."""
        return Buddy(self.table, 0, self.entropy, self.missing, self.keep, self.prefill)

    def reset(self, seed: int = 0) -> None:
        """Forget everything learnt, and the order of buddies worked out so far."""
        super().reset(seed)
        self._rows = None

    def parameters_at(self, layer: int) -> npt.NDArray[np.float64]:
        """Return the gates, then each expert's buddies in order."""
        if self._rows is None:
            self._rows = {}
        if layer not in self._rows:
            self._rows[layer] = self._ranked(layer)
        return self._rows[layer]

    def _ranked(self, layer: int) -> npt.NDArray[np.float64]:
        table = np.array(np.asarray(self.table)[layer], dtype=np.float64)
        np.fill_diagonal(table, 0)
        tries = min(self.tries, max(len(table) - 1, 0))
        order = np.argsort(-table, axis=1, kind="stable")[:, :tries]
        order[np.take_along_axis(table, order, axis=1) == 0] = -1
        header = [self.keep, self.entropy, self.missing, len(table), tries]
        return np.concatenate([np.array(header, np.float64), order.ravel().astype(np.float64)])
