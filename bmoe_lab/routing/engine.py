"""What a policy's answer becomes: checked, applied, counted, the same live and in replay.

Byte-identity rests on one rule: *nothing is written if nothing changed*. A policy that looks at
everything and changes nothing leaves every bit of the ids and weights as the graph computed them;
in a batch, so do the rows that it did not change.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.routing.applying import (
    DROPPED,
    KEPT,
    REWEIGHTED,
    SUBSTITUTED,
    Actions,
    Ids,
    Mask,
    Weights,
    align_selection,
    count_missing,
    drop_slots,
    first_bad_id,
    known_sum,
)
from bmoe_lab.routing.base import Routing, RoutingPolicy
from bmoe_lab.routing.counters import Counters
from bmoe_lab.routing.lossless import Lossless

__all__ = [
    "DROPPED",
    "KEPT",
    "REWEIGHTED",
    "SUBSTITUTED",
    "Engine",
    "Selection",
    "Weighing",
    "apply_selection",
    "apply_weights",
    "as_policy",
    "check_selected",
    "check_weighed",
    "strongest",
]

A = TypeVar("A", bound=npt.NDArray[Any])


class Selection(NamedTuple):
    """What runs after ``select``.

    Attributes
    ----------
    ids : numpy.ndarray of int32, shape (token, slot)
        Who stays keeps the router's slot; newcomers fill the vacated ones. The very array that
        was passed in if nothing changed.
    action : numpy.ndarray of uint8, shape (token, slot)
        KEPT or SUBSTITUTED.
    changed_slots : int
        Number of substituted slots. 0: write nothing.
    """

    ids: Ids
    action: Actions
    changed_slots: int


class Weighing(NamedTuple):
    """What runs after ``weigh``.

    Attributes
    ----------
    ids : numpy.ndarray of int32, shape (token, slot)
        A dropped slot names the best expert that its token keeps, so that nothing is read for it.
        The very array that was passed in if nothing was dropped.
    weights : numpy.ndarray of float32, shape (token, slot)
        0 where dropped. The very array that was passed in if nothing changed.
    action : numpy.ndarray of uint8, shape (token, slot)
        KEPT, DROPPED or REWEIGHTED. A survivor that was only scaled up is KEPT.
    dropped, reweighted : int
        Slots.
    weight_discarded : float
        Sum of the dropped slots' weights; those that are NaN are left out.
    """

    ids: Ids
    weights: Weights
    action: Actions
    dropped: int
    reweighted: int
    weight_discarded: float

    @property
    def changed(self) -> bool:
        """False: write nothing."""
        return self.dropped > 0 or self.reweighted > 0


# --- checks -------------------------------------------------------------------------------------


def _where(routing: Routing, row: int, slot: int) -> str:
    position = int(routing.positions[row])
    return f"in row {row}, slot {slot} (layer {routing.layer}, position {position})"


def _check_shape(
    policy: RoutingPolicy, method: str, result: object, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.asarray(result)
    if array.shape != shape:
        raise PolicyError(
            f"answer of {policy!r}.{method} must have shape (token, slot) = {shape}; got shape "
            f"{array.shape}. Return None to leave the routing as it is."
        )
    return array


def check_selected(
    result: object, routing: Routing, n_expert: int, policy: RoutingPolicy
) -> npt.NDArray[np.int64]:
    """Return what ``select`` returned as int64, contiguous, or say what is wrong with it.

    Raises
    ------
    PolicyError
        If the shape is not that of ``routing.ids``, the dtype is not an integer, an id is not in
        [0, n_expert), or a row names an expert twice.
    """
    ids = _check_shape(policy, "select", result, routing.ids.shape)
    # Messages are put together only when needed: a repr costs more than all the checks.
    if ids.dtype.kind not in "iu":
        raise PolicyError(f"ids from {policy!r}.select must be integers; got dtype {ids.dtype}.")
    if ids.dtype == np.uint64:
        # Beyond int64 an id would turn negative: still out of range, but with the wrong number.
        ids = np.minimum(ids, np.uint64(np.iinfo(np.int64).max))
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    kind, row, slot = first_bad_id(ids, n_expert)
    if kind == 1:
        raise PolicyError(
            f"ids from {policy!r}.select must lie in [0, {n_expert}); got {int(ids[row, slot])} "
            f"{_where(routing, row, slot)}."
        )
    if kind == 2:
        raise PolicyError(
            f"ids from {policy!r}.select must be distinct within a token; got "
            f"{int(ids[row, slot])} again {_where(routing, row, slot)}."
        )
    return ids


def check_weighed(result: object, routing: Routing, policy: RoutingPolicy) -> Mask | Weights:
    """Return what ``weigh`` returned as a bool mask or float32 weights, or say what is wrong.

    Raises
    ------
    PolicyError
        If the shape is not that of ``routing.ids``, the dtype is neither bool nor float, a
        weight is not finite, or a token is left without any weight.
    """
    array = _check_shape(policy, "weigh", result, routing.ids.shape)
    if array.dtype.kind == "b":
        mask: Mask = np.ascontiguousarray(array)
        return mask
    if array.dtype.kind != "f":
        raise PolicyError(
            f"answer of {policy!r}.weigh must be bool (True drops a slot) or float (new weights); "
            f"got dtype {array.dtype}."
        )
    with np.errstate(over="ignore"):
        weights: Weights = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(weights)
    if not finite.all():
        row, slot = np.argwhere(~finite)[0]
        raise PolicyError(
            f"weights from {policy!r}.weigh must be finite in float32; got {array[row, slot]} "
            f"{_where(routing, row, slot)}."
        )
    empty = ~(weights != 0).any(axis=1)
    if empty.any():
        row = int(np.argmax(empty))
        raise PolicyError(
            f"weights from {policy!r}.weigh must leave a token at least one that is not 0; got "
            f"{array[row]} {_where(routing, row, 0)}. To drop slots return a bool mask."
        )
    return weights


# --- application --------------------------------------------------------------------------------


def apply_selection(router_ids: Ids, new_ids: npt.NDArray[np.int64]) -> Selection:
    """Return what runs, given the router's ids and checked new ones.

    Only rows whose *set* of experts changed count as changed: a mere reordering would alter the
    order of summation, and with it low bits, for nothing.

    Parameters
    ----------
    router_ids : numpy.ndarray of int32, shape (token, slot)
        The router's choice.
    new_ids : numpy.ndarray of int64, shape (token, slot)
        From :func:`check_selected`.

    Examples
    --------
    >>> router_ids = np.array([[3, 1, 2], [4, 5, 6]], dtype=np.int32)
    >>> selection = apply_selection(router_ids, np.array([[2, 3, 1], [6, 4, 9]]))
    >>> selection.ids.tolist(), selection.changed_slots
    ([[3, 1, 2], [4, 9, 6]], 1)
    """
    action = np.zeros(router_ids.shape, dtype=np.uint8)
    ids = np.array(router_ids, dtype=np.int32, order="C")
    n_changed = align_selection(
        np.ascontiguousarray(router_ids, dtype=np.int32), new_ids, ids, action
    )
    return Selection(ids if n_changed else router_ids, action, n_changed)


def apply_weights(
    ids: Ids, weights: Weights, result: Mask | Weights, *, renormalise: bool
) -> Weighing:
    """Return what runs, given the final weights and a checked answer of ``weigh``.

    A mask that would drop a whole routing leaves its largest weight, the first on a tie.

    Parameters
    ----------
    ids : numpy.ndarray of int32, shape (token, slot)
        What is about to run.
    weights : numpy.ndarray of float32, shape (token, slot)
        Their final weights.
    result : numpy.ndarray of bool or float32, shape (token, slot)
        From :func:`check_weighed`.
    renormalise : bool
        Multiply the survivors of a drop by total / kept, in float64. Left undone where no weight
        is kept or a weight is not finite. New weights are taken as they are.

    Examples
    --------
    >>> ids = np.array([[7, 3, 5, 1]], dtype=np.int32)
    >>> weights = np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float32)
    >>> weighing = apply_weights(ids, weights, weights < 0.2, renormalise=False)
    >>> weighing.ids.tolist(), weighing.weights.tolist(), weighing.dropped
    ([[7, 3, 7, 7]], [[0.5, 0.25, 0.0, 0.0]], 2)
    """
    action = np.zeros(ids.shape, dtype=np.uint8)
    if result.dtype != np.bool_:
        differs = result != weights
        n_reweighted = int(np.count_nonzero(differs))
        if not n_reweighted:
            return Weighing(ids, weights, action, 0, 0, 0.0)
        action[differs] = REWEIGHTED
        # Equal values keep the router's bits (-0.0 equals 0.0).
        return Weighing(ids, np.where(differs, result, weights), action, 0, n_reweighted, 0.0)
    if not result.any():
        return Weighing(ids, weights, action, 0, 0, 0.0)
    new_ids = np.array(ids, dtype=np.int32, order="C")
    new_weights = np.array(weights, dtype=np.float32, order="C")
    n_dropped, discarded = drop_slots(
        result.astype(np.bool_, copy=False),
        renormalise,
        np.ascontiguousarray(ids, dtype=np.int32),
        np.ascontiguousarray(weights, dtype=np.float32),
        new_ids,
        new_weights,
        action,
    )
    if not n_dropped:
        return Weighing(ids, weights, action, 0, 0, 0.0)
    return Weighing(new_ids, new_weights, action, n_dropped, 0, discarded)


def strongest(selected: Actions, weighed: Actions) -> Actions:
    """Return one action per slot: dropped before substituted before reweighted.

    Examples
    --------
    >>> strongest(np.array([2, 2, 0], np.uint8), np.array([1, 3, 3], np.uint8)).tolist()
    [1, 2, 3]
    """
    actions: Actions = np.where(
        weighed == DROPPED, weighed, np.where(selected == SUBSTITUTED, selected, weighed)
    )
    return actions


# --- the engine ---------------------------------------------------------------------------------


def as_policy(policy: RoutingPolicy | None) -> RoutingPolicy:
    """Return a clone of `policy` to run; None stands for :class:`Lossless`.

    Raises
    ------
    PolicyError
        If `policy` is not an instance of a subclass of RoutingPolicy, or does nothing.
    """
    if policy is None:
        return Lossless()
    if isinstance(policy, type):
        raise PolicyError(
            f"policy must be an instance of a RoutingPolicy; got the class {policy.__name__}. "
            f"Call it with its parameters."
        )
    if not isinstance(policy, RoutingPolicy):
        raise PolicyError(
            f"policy must be an instance of a RoutingPolicy; got {policy!r}. Derive your class "
            f"from bmoe_lab.routing.RoutingPolicy."
        )
    acts = policy.acts_at("select") or policy.acts_at("weigh")
    if policy.lossless and acts:
        raise PolicyError(
            f"policy must not be lossless if it defines select or weigh; got {policy!r} with "
            "lossless = True. Leave that attribute out."
        )
    if not (policy.lossless or acts):
        raise PolicyError(
            f"policy must define select or weigh; got {policy!r}, which defines neither."
        )
    return policy.clone()


def _read_only(array: A) -> A:
    view = array.view()
    view.flags.writeable = False
    return view


def _guarded(routing: Routing) -> Routing:
    """Return `routing` with arrays that a policy in Python cannot write into by mistake."""
    return Routing(
        layer=routing.layer,
        block=routing.block,
        phase=routing.phase,
        positions=_read_only(routing.positions),
        ids=_read_only(routing.ids),
        scores=None if routing.scores is None else _read_only(routing.scores),
        score_kind=routing.score_kind,
        weights=None if routing.weights is None else _read_only(routing.weights),
        resident=_read_only(routing.resident),
        expert_bytes=routing.expert_bytes,
        seed=routing.seed,
    )


class Engine:
    """Runs a clone of one policy over one run.

    Parameters
    ----------
    policy : RoutingPolicy or None
        None changes nothing.
    seed : int, default 0
        The run's seed; ``Routing.seed`` must be the same.

    Attributes
    ----------
    policy : RoutingPolicy
        The clone.
    counters : Counters
        What it did so far.
    selects, weighs : bool
        Where the policy acts; elsewhere the engine need not be called.

    Notes
    -----
    An exception that the policy raises passes through unchanged, and the routing in question
    counts for nothing. It is for the caller to let the router's choice stand.
    """

    def __init__(self, policy: RoutingPolicy | None, *, seed: int = 0) -> None:
        self.policy = as_policy(policy)
        self.policy.reset(seed)
        self.counters = Counters()
        self.selects = self.policy.acts_at("select")
        self.weighs = self.policy.acts_at("weigh")
        self._phases = self.policy.phases
        self._kernel_selects = self.policy.uses_kernel("select")
        self._kernel_weighs = self.policy.uses_kernel("weigh")
        # The latest selection that changed something: (layer, action), so that a slot which is
        # substituted and then dropped is one changed slot.
        self._selected: tuple[int, Actions] | None = None

    def acts_in(self, phase: int) -> bool:
        """Return whether the policy looks at tokens of `phase` at all."""
        return (self.selects or self.weighs) and phase in self._phases

    def select(self, routing: Routing) -> Selection | None:
        """Return what runs after the top-k; None if nothing is to be written.

        Parameters
        ----------
        routing : Routing
            The router's choice.

        Raises
        ------
        PolicyError
            If the policy's answer cannot be applied.
        """
        self._selected = None
        if not self.selects or routing.phase not in self._phases:
            return None
        result = (
            self.policy.run_kernel(routing)
            if self._kernel_selects
            else self.policy.select(_guarded(routing))
        )
        selection = None
        if result is not None:
            ids = check_selected(result, routing, routing.resident.size, self.policy)
            selection = apply_selection(routing.ids, ids)
        self._count_examined(routing)
        if selection is None or not selection.changed_slots:
            return None
        counters = self.counters
        counters.substituted += selection.changed_slots
        counters.changed += selection.changed_slots
        counters.bytes_saved += self._bytes_saved(routing, selection.ids)
        self._selected = (routing.layer, selection.action)
        return selection

    def weigh(self, routing: Routing) -> Weighing | None:
        """Return what runs after the final weights; None if nothing is to be written.

        Parameters
        ----------
        routing : Routing
            What is about to run: ids after ``select``, and their weights.

        Raises
        ------
        PolicyError
            If the policy's answer cannot be applied, or the weights are not known.
        """
        if not self.weighs or routing.phase not in self._phases:
            return None
        if routing.weights is None:
            raise PolicyError(
                f"policy must see the router's weights; got {self.policy!r} where there are none."
            )
        result = (
            self.policy.run_kernel(routing)
            if self._kernel_weighs
            else self.policy.weigh(_guarded(routing))
        )
        weighing = None
        if result is not None:
            checked = check_weighed(result, routing, self.policy)
            weighing = apply_weights(
                routing.ids, routing.weights, checked, renormalise=self.policy.renormalise
            )
        counters = self.counters
        if not self.selects:
            self._count_examined(routing)
        counters.weight_total += known_sum(np.ascontiguousarray(routing.weights))
        if weighing is None or not weighing.changed:
            return None
        counters.dropped += weighing.dropped
        counters.reweighted += weighing.reweighted
        counters.weight_discarded += weighing.weight_discarded
        counters.changed += weighing.dropped
        if weighing.dropped:
            counters.bytes_saved += self._bytes_saved(routing, weighing.ids)
            if self._selected is not None and self._selected[0] == routing.layer:
                both = (self._selected[1] == SUBSTITUTED) & (weighing.action == DROPPED)
                counters.changed -= int(np.count_nonzero(both))
        return weighing

    def _count_examined(self, routing: Routing) -> None:
        n_row, width = routing.ids.shape
        self.counters.routings += n_row
        self.counters.examined += n_row * width
        self.counters.eligible += n_row * max(width - self.policy.pinned, 0)

    def _bytes_saved(self, routing: Routing, applied: Ids) -> int:
        before = count_missing(np.ascontiguousarray(routing.ids), routing.resident)
        after = count_missing(np.ascontiguousarray(applied), routing.resident)
        return (before - after) * routing.expert_bytes
