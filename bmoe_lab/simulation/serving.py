"""A stream of loads served by one cache, stretch by stretch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.residency import ResidencyPolicy, ResidencyState, StationaryOracle
from bmoe_lab.residency.frequency import count_lookups
from bmoe_lab.residency.future import next_use
from bmoe_lab.residency.loads import NO_FUTURE, LoadLog
from bmoe_lab.simulation.stream import LoadStream

__all__ = ["counts_stream", "join_logs", "serve_around_dropped", "serve_stream"]

IntArray = npt.NDArray[np.int64]


def join_logs(logs: Sequence[LoadLog]) -> LoadLog:
    """Return logs that follow one another as one."""
    if len(logs) == 1:
        return logs[0]
    return LoadLog(
        *(
            np.concatenate([getattr(log, name) for log in logs])
            for name in ("residency", "first", "evictions", "resident_bytes")
        )
    )


def counts_stream(policy: ResidencyPolicy) -> bool:
    """Return whether a policy must be given the whole stream at once, or a profile of it."""
    return isinstance(policy, StationaryOracle) and policy.profile is None


def serve_stream(stream: LoadStream, policy: ResidencyPolicy, state: ResidencyState) -> LoadLog:
    """Return what a cache finds and does over a whole stream.

    Parameters
    ----------
    stream : LoadStream
        The loads.
    policy : ResidencyPolicy
        Whose `state` it is.
    state : ResidencyState
        The cache in its start state; it is used.
    """
    logs = []
    for number, (begin, end) in enumerate(stream.segments()):
        if number:
            state.clear()
        policy.begin_stream(state, end - begin)
        keys, offsets = _stretch(stream, begin, end)
        logs.append(state.load_many(keys, offsets, _future(policy, keys, offsets, stream.n_key)))
    return join_logs(logs)


def serve_around_dropped(
    stream: LoadStream,
    policy: ResidencyPolicy,
    state: ResidencyState,
    chosen: IntArray,
    dropped: npt.NDArray[np.bool_],
) -> LoadLog:
    """Serve a stream in which slots were dropped: they show where the dropped expert was.

    Load by load, since that is known only just before the load.

    Parameters
    ----------
    stream, policy, state
        As for :func:`serve_stream`.
    chosen : numpy.ndarray of int64, shape (row,)
        Keys of what the router chose.
    dropped : numpy.ndarray of bool, shape (row,)
        Rows whose expert did not run.
    """
    logs = []
    for number, (begin, end) in enumerate(stream.segments()):
        if number:
            state.clear()
        keys, offsets = _stretch(stream, begin, end)
        if counts_stream(policy):
            state = _counted(policy, state, stream, keys, offsets)
        policy.begin_stream(state, end - begin)
        future = _future(policy, keys, offsets, stream.n_key)
        low, bounds = int(stream.offsets[begin]), offsets.tolist()
        for load in range(end - begin):
            rows = slice(bounds[load], bounds[load + 1])
            here = slice(low + rows.start, low + rows.stop)
            before = state.contains()[chosen[here]]
            # Loads ahead are counted from this one, which is a call of its own.
            log = state.load_many(
                keys[rows], np.array([0, rows.stop - rows.start]), future[rows] - load
            )
            log.residency[:] = np.where(dropped[here], before, log.residency)
            logs.append(log)
    return join_logs(logs)


def _stretch(stream: LoadStream, begin: int, end: int) -> tuple[IntArray, IntArray]:
    low, high = int(stream.offsets[begin]), int(stream.offsets[end])
    return stream.keys[low:high], stream.offsets[begin : end + 1] - low


def _future(policy: ResidencyPolicy, keys: IntArray, offsets: IntArray, n_key: int) -> IntArray:
    return next_use(keys, offsets, n_key) if policy.needs_future else NO_FUTURE


def _counted(
    policy: ResidencyPolicy, state: Any, stream: LoadStream, keys: IntArray, offsets: IntArray
) -> ResidencyState:
    """Return a cache that was told how often each key is asked for."""
    counts = count_lookups(keys, offsets, stream.n_key)
    params = {**policy.get_params(), "profile": counts.reshape(stream.n_layer, -1)}
    told = type(policy)(**params)
    return told.start(state.key_bytes, state.budget_bytes, n_layer=stream.n_layer)
