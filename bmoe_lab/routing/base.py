"""What a routing policy sees, what it may return, how it is described.

A routing policy changes which experts run, and with that the model's output. It acts at one or
both of two places in a layer:

- ``select(routing)`` when the router has picked its experts: may return other ids;
- ``weigh(routing)`` when their weights are final: may drop slots or return other weights.

``None`` means "leave it", and then nothing at all is written. Everything that must not be got
wrong (checks, repointing dropped slots, renormalising, never emptying a routing, counting) is done
by :mod:`bmoe_lab.routing.engine`, the same in a live session and in a replay.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.parameters import Parametrised
from bmoe_lab.sizes import format_size

__all__ = [
    "DECODE",
    "PREFILL",
    "ModelFacts",
    "Routing",
    "RoutingPolicy",
    "require_bool",
    "require_count",
    "require_frac",
    "require_number",
]

# Values of `Phase` in the trace; this package does not depend on the trace's schema.
PREFILL: Final = 0
DECODE: Final = 1

_NO_VALUES = np.empty((0, 0), dtype=np.float32)


@dataclass(slots=True)
class Routing:
    """What one layer chose for every token of one graph evaluation.

    A policy must not write into the arrays; to a policy without a kernel they are read-only.

    Attributes
    ----------
    layer : int
        Stack group, 0...n_layer-1, the coordinate that the trace counts.
    block : int
        Index of the model's block that the layer belongs to.
    phase : int
        0 prefill, 1 decode, 2 draft.
    positions : numpy.ndarray of int32, shape (token,)
        Place of each token in the context.
    ids : numpy.ndarray of int32, shape (token, slot)
        Experts, the router's first choice in slot 0.
    scores : numpy.ndarray of float32, shape (token, expert), or None
        What the graph sorted, bit for bit; None if not read.
    score_kind : {"softmax", "other"}
        Whether `scores` are the output of a softmax (rather than logits, sigmoids, biased scores).
    weights : numpy.ndarray of float32, shape (token, slot), or None
        Final weights of `ids`; None at ``select``, where the graph has not computed them yet.
    resident : numpy.ndarray of bool, shape (expert,)
        Which experts of this layer are in memory before the layer's load. All True where nothing
        is streamed.
    expert_bytes : int
        Bytes of one expert of this layer.
    seed : int
        The run's seed, for :func:`bmoe_lab.routing.randomness.uniform`.
    """

    layer: int
    block: int
    phase: int
    positions: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32] | None
    score_kind: Literal["softmax", "other"]
    weights: npt.NDArray[np.float32] | None
    resident: npt.NDArray[np.bool_]
    expert_bytes: int
    seed: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What a policy needs to know of a loaded model, or of a trace, to judge its own set-up.

    Attributes
    ----------
    n_layer, n_expert : int
        Layers that route; experts per layer.
    n_expert_used : int
        Experts used per token, as it runs (an override counts).
    cache_budget : int or None
        Bytes allowed for experts; None or 0 if no cache keeps experts.
    token_cycle_bytes : int or None
        Bytes that one decoded token asks for (:func:`bmoe_lab.residency.token_cycle`).
    scores_available : bool
        Whether the sorted scores can be had. False for a trace recorded without them.
    weights_available : bool
        Whether the final weights can be had.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int
    cache_budget: int | None
    token_cycle_bytes: int | None = None
    scores_available: bool = True
    weights_available: bool = True


class RoutingPolicy(Parametrised):
    """Base of all routing policies, yours included.

    A subclass has an ``__init__`` that only stores keyword parameters under their own names, and
    overrides :meth:`select`, :meth:`weigh` or both. What it learns during a run it keeps in
    attributes ending in ``_`` and forgets in :meth:`reset`. A session runs a :meth:`clone`.

    Attributes
    ----------
    name : str
        Name in the registry; only policies that ship with the package need one.
    lossless : bool
        True only if the policy can never change the output.
    needs : frozenset of {"scores", "weights", "cache"}
        What it cannot work without. ``"cache"``: it prefers resident experts, so it is refused
        where nothing is cached.
    prefill : bool
        Whether it also acts on prompt tokens. Default False: decode only.
    renormalise : bool
        Whether the survivors of a drop are scaled up to the weight of the whole routing.
    pinned : int
        Slots per routing that it never changes; what is not pinned counts as eligible.
    citation : str
        Where its rule comes from.
    kernel : callable, optional
        The rule as one compiled function, used live and in replay in place of a method:
        ``kernel(ids, values, resident, positions, layer, seed, log_scores, parameters, state, out)
        -> int``, compiled with ``numba.njit(cache=True, nogil=True)``.

        - ``ids`` int32[token, slot], ``resident`` bool[expert], ``positions`` int32[token],
          ``layer`` int, ``seed`` int: as in :class:`Routing`;
        - ``values`` float32: the scores [token, expert] if `stage` is ``"select"`` (shape
          [0, 0] if unknown), the weights [token, slot] if it is ``"weigh"``;
        - ``log_scores`` bool: the scores are the output of a softmax;
        - ``parameters`` float64: what :meth:`parameters_at` returns for this layer;
        - ``state`` float64[at least :meth:`state_size`]: what the policy remembers of this layer,
          0 at first;
        - ``out``: ``"select"`` int32[token, slot], holding ``ids``; ``"weigh"``
          bool[token, slot], all False, True drops. Returns the number of slots it changed.

        Rows must not depend on how tokens are batched: row after row, in order. It must compile
        for the types in :mod:`bmoe_lab.routing.signature` and not raise.
    stage : {"select", "weigh"}
        Which method `kernel` stands for.
    n_state : int
        Numbers that `kernel` remembers per layer; see :meth:`state_size`.
    array_parameters : frozenset of str
        Parameters that may be (or must be) arrays, which a text cannot hold.

    Examples
    --------
    Ten lines are a policy. This one drops every slot after the second that is not in memory:

    >>> class TwoThenResident(RoutingPolicy):
    ...     needs = frozenset({"cache"})
    ...     def __init__(self, n_sure=2):
    ...         self.n_sure = n_sure
    ...     def weigh(self, routing):
    ...         drop = ~routing.resident[routing.ids]
    ...         drop[:, : self.n_sure] = False
    ...         return drop
    >>> TwoThenResident(n_sure=3)
    TwoThenResident(n_sure=3)
    """

    name: ClassVar[str] = ""
    lossless: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    citation: ClassVar[str] = ""
    kernel: ClassVar[Callable[..., int] | None] = None
    stage: ClassVar[Literal["select", "weigh"]] = "weigh"
    n_state: ClassVar[int] = 0
    array_parameters: ClassVar[frozenset[str]] = frozenset()

    prefill: bool = False
    renormalise: bool = True
    _state: npt.NDArray[np.float64] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kernel = cls.__dict__.get("kernel")
        if kernel is not None and not isinstance(kernel, staticmethod):
            # A compiled function would be bound like a method and get the policy as first argument.
            cls.kernel = staticmethod(kernel)

    # --- what a policy decides -----------------------------------------------------------------

    def select(self, routing: Routing) -> npt.NDArray[Any] | None:
        """Return other ids, integers of shape (token, slot), or None to leave the router's."""
        return self.run_kernel(routing) if self.uses_kernel("select") else None

    def weigh(self, routing: Routing) -> npt.NDArray[Any] | None:
        """Return a bool mask (True drops), other weights (float), or None; shape (token, slot)."""
        return self.run_kernel(routing) if self.uses_kernel("weigh") else None

    # --- what a policy says about itself -------------------------------------------------------

    @property
    def phases(self) -> frozenset[int]:
        """Phases in which the policy acts."""
        return frozenset({PREFILL, DECODE}) if self.prefill else frozenset({DECODE})

    @property
    def pinned(self) -> int:
        """Slots per routing that the policy never changes."""
        return 0

    def acts_at(self, stage: Literal["select", "weigh"]) -> bool:
        """Return whether the policy does anything at `stage`."""
        overridden = getattr(type(self), stage) is not getattr(RoutingPolicy, stage)
        return overridden or self.uses_kernel(stage)

    def uses_kernel(self, stage: Literal["select", "weigh"]) -> bool:
        """Return whether `kernel`, rather than the method, decides at `stage`.

        The kernel does where one class defines both, so that the method can be its readable
        twin; a subclass that overrides the method replaces the kernel that it inherits.
        """
        if self.kernel is None or self.stage != stage:
            return False
        for cls in type(self).__mro__:
            if "kernel" in vars(cls):
                return True
            if stage in vars(cls):
                return False
        return False

    def validate(self) -> None:
        """Raise PolicyError if a parameter has an impossible value."""

    def check(self, facts: ModelFacts) -> None:
        """Raise PolicyError if the policy cannot mean anything on this model.

        Parameters
        ----------
        facts : ModelFacts
            The model and its cache.
        """
        self.validate()
        if not set(self.needs) <= {"scores", "weights", "cache"}:
            raise PolicyError(
                "needs must be of 'scores', 'weights', 'cache'; got "
                f"{sorted(map(str, self.needs))} in {self!r}."
            )
        if not self.phases or not set(self.phases) <= {0, 1, 2}:
            raise PolicyError(
                "phases must be of 0 (prefill), 1 (decode), 2 (draft); got "
                f"{sorted(map(str, self.phases))} in {self!r}."
            )
        if "cache" in self.needs and not facts.cache_budget:
            raise PolicyError(
                f"policy must have a cache to look at; got {self!r} where no expert is kept "
                f"(cache budget {facts.cache_budget!r}). Open the session with a cache, for "
                f"example cache='auto'."
            )
        if "scores" in self.needs and not facts.scores_available:
            raise PolicyError(self._without_scores())
        if "weights" in self.needs and not facts.weights_available:
            raise PolicyError(
                f"policy must see the router's weights; got {self!r} where there are none."
            )

    def _without_scores(self) -> str:
        return (
            f"policy must see the router's scores; got {self!r} where there are none. "
            f"Record with record='scores'."
        )

    def cautions(self, facts: ModelFacts) -> list[str]:
        """Return what a user should be warned of before a run, one sentence each."""
        budget, cycle = facts.cache_budget, facts.token_cycle_bytes
        if "cache" in self.needs and budget and cycle and budget < cycle:
            return [
                f"{self!r} looks at a cache of {format_size(budget)}, which is below one token "
                f"cycle ({format_size(cycle)}): in decode next to nothing is ever resident."
            ]
        return []

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        return repr(self)

    def neutral(self) -> Self:
        """Return an instance that looks at every routing and changes none."""
        raise NotImplementedError(f"{type(self).__name__} must implement neutral().")

    # --- state ---------------------------------------------------------------------------------

    def reset(self, seed: int = 0) -> None:
        """Forget everything learnt, as if new. Called before every run, with the run's seed."""
        self._state = None

    def extra_counts(self) -> dict[str, int]:
        """Return counts of the policy's own that belong into the run's summary."""
        return {}

    # --- the kernel ----------------------------------------------------------------------------

    def kernel_parameters(self) -> Sequence[float]:
        """Return what `kernel` gets as ``parameters`` where all layers are alike."""
        return ()

    def parameters_at(self, layer: int) -> npt.NDArray[np.float64]:
        """Return what `kernel` gets as ``parameters`` in `layer`: float64, as long in all layers.

        Override it where layers differ; the rest override :meth:`kernel_parameters`.
        """
        return np.array(self.kernel_parameters(), dtype=np.float64)

    def layer_parameters(self, n_layer: int) -> npt.NDArray[np.float64]:
        """Return :meth:`parameters_at` of all layers, float64 of shape (layer, parameter)."""
        if not n_layer:
            return np.zeros((0, 0))
        return np.stack([self.parameters_at(layer) for layer in range(n_layer)])

    def state_size(self, n_expert: int) -> int:
        """Return how many numbers `kernel` remembers of a layer with `n_expert` experts."""
        return self.n_state

    def layer_state(self, n_layer: int, n_expert: int) -> npt.NDArray[np.float64]:
        """Return what `kernel` remembers, all layers at once, to be written into.

        Parameters
        ----------
        n_layer : int
            Layers asked for; 0 remembered of those that are new.
        n_expert : int
            Experts of the largest of them.

        Returns
        -------
        numpy.ndarray of float64, shape (layer, number)
            A view of the policy's own memory, at least :meth:`state_size` wide: a row may be wider
            than its layer needs, so a kernel goes by ``resident.size``. Valid until it grows or
            :meth:`reset`.
        """
        size = self.state_size(n_expert)
        state = self._state
        if state is None or n_layer > len(state) or size > state.shape[1]:
            had = (0, 0) if state is None else state.shape
            grown = np.zeros((max(n_layer, had[0]), max(size, had[1])))
            if state is not None:
                grown[: had[0], : had[1]] = state
            self._state = state = grown
        return state[:n_layer]

    def _state_at(self, layer: int, n_expert: int) -> npt.NDArray[np.float64]:
        n_layer = 0 if self._state is None else len(self._state)
        # Grown in steps: live layers come one by one.
        wanted = n_layer if layer < n_layer else max(2 * layer, 64)
        row: npt.NDArray[np.float64] = self.layer_state(wanted, n_expert)[layer]
        return row

    def run_kernel(self, routing: Routing) -> npt.NDArray[Any] | None:
        """Return what `kernel` decides; None if it changed nothing."""
        assert self.kernel is not None
        if routing.scores is None and self.stage == "select" and "scores" in self.needs:
            raise PolicyError(self._without_scores())
        ids = np.ascontiguousarray(routing.ids, dtype=np.int32)
        out: npt.NDArray[Any]
        if self.stage == "select":
            values = _NO_VALUES if routing.scores is None else routing.scores
            out = ids.copy()
        else:
            values = _NO_VALUES if routing.weights is None else routing.weights
            out = np.zeros(ids.shape, dtype=np.bool_)
        n_changed = self.kernel(
            ids,
            np.ascontiguousarray(values, dtype=np.float32),
            np.ascontiguousarray(routing.resident, dtype=np.bool_),
            np.ascontiguousarray(routing.positions, dtype=np.int32),
            routing.layer,
            routing.seed,
            routing.score_kind == "softmax",
            self.parameters_at(routing.layer),
            self._state_at(routing.layer, routing.resident.size),
            out,
        )
        return out if n_changed else None


def require_number(policy: RoutingPolicy, name: str, meaning: str) -> None:
    """Raise PolicyError unless parameter `name` is a finite number of at least 0."""
    value = getattr(policy, name)
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        # Written so that NaN, which fails every comparison, is refused.
        or not (0.0 <= float(value) < float("inf"))
    ):
        raise PolicyError(
            f"{name} must be a finite number of at least 0; got {value!r} in "
            f"{type(policy).__name__}. {meaning}"
        )


def require_frac(policy: RoutingPolicy, name: str, meaning: str) -> None:
    """Raise PolicyError unless parameter `name` is a number in [0, 1] (NaN is not)."""
    value = getattr(policy, name)
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        # Written so that NaN, which fails every comparison, is refused.
        or not (0.0 <= float(value) <= 1.0)
    ):
        raise PolicyError(
            f"{name} must be a number in [0, 1]; got {value!r} in "
            f"{type(policy).__name__}. {meaning}"
        )


def require_bool(policy: RoutingPolicy, *names: str) -> None:
    """Raise PolicyError unless the parameters `names` are True or False."""
    for name in names:
        value = getattr(policy, name)
        if not isinstance(value, bool | np.bool_):
            raise PolicyError(
                f"{name} must be True or False; got {value!r} in {type(policy).__name__}."
            )


def require_count(policy: RoutingPolicy, name: str, at_least: int) -> None:
    """Raise PolicyError unless parameter `name` is a whole number of at least `at_least`."""
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < at_least:
        raise PolicyError(
            f"{name} must be a whole number of at least {at_least}; got {value!r} in "
            f"{type(policy).__name__}."
        )
