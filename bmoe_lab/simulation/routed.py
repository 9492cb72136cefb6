"""What both loops of a coupled replay are given, and what they return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmoe_lab.residency.loads import LoadLog
from bmoe_lab.routing.counters import Counters
from bmoe_lab.simulation.stream import LoadStream

__all__ = ["Routed", "RoutedRows", "known_weights"]


@dataclass(frozen=True)
class RoutedRows:
    """What the router said, laid out along the rows of a :class:`LoadStream`.

    Attributes
    ----------
    stream : LoadStream
        Of the router's choice.
    weights : numpy.ndarray of float32, shape (row,), or None
        The router's weights; NaN where unknown.
    scores : numpy.ndarray of float32, shape (token, layer, expert), or None
        What the graph sorted.
    log_scores : numpy.ndarray of bool, shape (layer,)
        Whether `scores` are the output of a softmax.
    position : numpy.ndarray of int32, shape (token,)
        Place in the context.
    token : numpy.ndarray of int64, shape (cell,)
        Token of each routing, in the order of the rows.
    expert_bytes : numpy.ndarray of int64, shape (layer,)
        Bytes of one expert.
    block : numpy.ndarray of int64, shape (layer,)
        Index of the model's block.
    width : numpy.ndarray of int64, shape (layer,)
        Experts per routing.
    recorded : numpy.ndarray of uint8, shape (row,), or None
        Residency that stands whatever the policy does: 1 hit, 0 miss. None: a cache is run.
    """

    stream: LoadStream
    weights: npt.NDArray[np.float32] | None
    scores: npt.NDArray[np.float32] | None
    log_scores: npt.NDArray[np.bool_]
    position: npt.NDArray[np.int32]
    token: npt.NDArray[np.int64]
    expert_bytes: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    width: npt.NDArray[np.int64]
    recorded: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Routed:
    """What ran, and what the cache did, along the rows and loads of the stream.

    Attributes
    ----------
    expert : numpy.ndarray of int32, shape (row,)
        Experts that ran.
    weight : numpy.ndarray of float32, shape (row,)
        Their weights; NaN where unknown.
    action : numpy.ndarray of uint8, shape (row,)
        What was done with each slot.
    log : LoadLog
        Residency is that of the expert that ran; for a dropped slot that of the chosen one.
    counters : Counters
        What the routing policy did.
    """

    expert: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]
    action: npt.NDArray[np.uint8]
    log: LoadLog
    counters: Counters


def known_weights(rows: RoutedRows) -> npt.NDArray[np.float32]:
    """Return the weights of the rows, NaN where none are known."""
    if rows.weights is None:
        return np.full(rows.stream.keys.size, np.nan, np.float32)
    return np.ascontiguousarray(rows.weights, np.float32)
