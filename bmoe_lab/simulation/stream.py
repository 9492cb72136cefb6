"""A trace as what a cache sees of it: loads, one per layer and graph evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.kernels import compiled
from bmoe_lab.metrics._shared import _evaluation_starts
from bmoe_lab.schema import Phase

__all__ = ["LoadStream", "cache_facts", "load_stream"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LoadStream:
    """The loads of a trace, in the order in which they were served.

    Within an evaluation layers ascend; within a load rows are token-major. The rows of a load are
    whole routings: its number of rows is a multiple of the layer's width.

    Attributes
    ----------
    keys : numpy.ndarray of int64, shape (row,)
        ``layer * n_expert + expert`` of each row.
    offsets : numpy.ndarray of int64, shape (load + 1,)
        Load i is the rows ``offsets[i]`` to ``offsets[i + 1]``.
    cells : numpy.ndarray of int64, shape (row,)
        Where each row stands in a flattened (token, layer, slot) array.
    layer : numpy.ndarray of int64, shape (load,)
        Layer of each load.
    token : numpy.ndarray of int64, shape (load,)
        First token of the evaluation that each load belongs to.
    phase : numpy.ndarray of uint8, shape (load,)
        Phase of each load (:class:`bmoe_lab.schema.Phase`).
    restarts : numpy.ndarray of int64, shape (restart,)
        Loads before which the cache was emptied; always begins with 0.
    n_layer, n_expert : int
        Extent of the keys.

    Notes
    -----
    A load is what one layer asks of the cache within one graph evaluation. Source: BigMoeOnEdge,
    docs/bench-data, cache replay of 2026-07-20, which calls it a batch.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> stream = load_stream(make_trace(n_token=4, n_layer=2, n_prefill=3))
    >>> stream.n_load, list(stream.segments())
    (4, [(0, 4)])
    """

    keys: IntArray
    offsets: IntArray
    cells: IntArray
    layer: IntArray
    token: IntArray
    phase: npt.NDArray[np.uint8]
    restarts: IntArray
    n_layer: int
    n_expert: int

    @property
    def n_load(self) -> int:
        """Number of loads."""
        return self.offsets.size - 1

    @property
    def n_key(self) -> int:
        """Number of (layer, expert) pairs of the model."""
        return self.n_layer * self.n_expert

    def segments(self) -> Iterator[tuple[int, int]]:
        """Yield (first load, end) of each stretch that begins with an empty cache."""
        ends = np.append(self.restarts[1:], self.n_load)
        yield from zip(self.restarts.tolist(), ends.tolist(), strict=True)

    def per_row(self, per_load: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of shape (load, ...) repeated over the rows of each load."""
        return np.repeat(per_load, np.diff(self.offsets), axis=0)


@compiled
def _count(expert: npt.NDArray[np.int16], starts: IntArray) -> tuple[int, int]:
    """Return the number of rows and of loads."""
    n_token, n_layer, n_slot = expert.shape
    n_row = 0
    n_load = 0
    for evaluation in range(starts.size):
        end = starts[evaluation + 1] if evaluation + 1 < starts.size else n_token
        for layer in range(n_layer):
            before = n_row
            for token in range(starts[evaluation], end):
                for slot in range(n_slot):
                    n_row += expert[token, layer, slot] >= 0
            n_load += n_row > before
    return n_row, n_load


@compiled
def _fill(
    expert: npt.NDArray[np.int16],
    starts: IntArray,
    n_expert: int,
    keys: IntArray,
    cells: IntArray,
    offsets: IntArray,
    layers: IntArray,
    tokens: IntArray,
) -> None:
    n_token, n_layer, n_slot = expert.shape
    row = 0
    load = 0
    offsets[0] = 0
    for evaluation in range(starts.size):
        end = starts[evaluation + 1] if evaluation + 1 < starts.size else n_token
        for layer in range(n_layer):
            before = row
            for token in range(starts[evaluation], end):
                cell = (token * n_layer + layer) * n_slot
                for slot in range(n_slot):
                    chosen = expert[token, layer, slot]
                    if chosen >= 0:
                        keys[row] = layer * n_expert + chosen
                        cells[row] = cell + slot
                        row += 1
            if row > before:
                layers[load] = layer
                tokens[load] = starts[evaluation]
                load += 1
                offsets[load] = row


def cache_facts(trace: xr.Dataset) -> tuple[IntArray, int, int]:
    """Return what a cache must know of the model: bytes of each key, layers, experts.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_bytes`` of shape (layer,) and the attribute ``n_expert``.

    Returns
    -------
    key_bytes : numpy.ndarray of int64, shape (key,)
        ``key = layer * n_expert + expert``.
    n_layer, n_expert : int
        Extent of the keys.

    Raises
    ------
    SchemaError
        If ``expert_bytes`` is absent or not positive: a size that is not known is never taken to
        be 0.

    Notes
    -----
    An expert is as large as its layer says: ``key_bytes[layer * n_expert + expert] =
    expert_bytes[layer]``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> key_bytes, n_layer, n_expert = cache_facts(make_trace(n_token=2, n_layer=3, n_expert=8))
    >>> key_bytes.size, n_layer, n_expert
    (24, 3, 8)
    """
    if "expert_bytes" not in trace.variables:
        raise SchemaError(
            "trace must hold 'expert_bytes' to be replayed; got "
            f"{sorted(map(str, trace.data_vars))}. Without the size of an expert neither a budget "
            "nor a read means anything: add trace['expert_bytes'] = ('layer', [...]) in bytes."
        )
    n_expert = int(trace.attrs["n_expert"])
    expert_bytes = np.asarray(trace["expert_bytes"].values, dtype=np.int64)
    if (expert_bytes <= 0).any():
        layer = int(np.argmax(expert_bytes <= 0))
        raise SchemaError(
            f"expert_bytes must be positive to be replayed; got {int(expert_bytes[layer])} in "
            f"layer {layer}. A miss that costs nothing would make every policy look perfect."
        )
    return np.repeat(expert_bytes, n_expert), expert_bytes.size, n_expert


def load_stream(
    trace: xr.Dataset, *, which: Literal["applied", "chosen"] = "applied"
) -> LoadStream:
    """Return the loads of a trace.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_applied`` or ``expert_chosen``, int16 of shape (token, layer, slot), the
        coordinates ``batch``, ``turn``, ``phase``, and the attributes ``n_expert``,
        ``cold_turns``.
    which : {"applied", "chosen"}, default "applied"
        What ran (a dropped slot names the expert that stood in for it), or what the router chose.

    Returns
    -------
    LoadStream
        Cells that did not route are in no load.

    Raises
    ------
    SchemaError
        If an expert is out of range.

    Notes
    -----
    Evaluations are told by ``batch`` and ``turn``; the cache is emptied where a turn begins if the
    trace says ``cold_turns``, and nowhere else.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> stream = load_stream(make_trace(n_token=4, n_layer=2, n_used=2, n_prefill=3, seed=0))
    >>> stream.n_load, stream.offsets.tolist()
    (4, [0, 6, 8, 10, 12])
    """
    if which not in ("applied", "chosen"):
        raise unknown_name("which", which, ["applied", "chosen"])
    expert = np.ascontiguousarray(trace[f"expert_{which}"].values, dtype=np.int16)
    n_expert = int(trace.attrs["n_expert"])
    if expert.size and int(expert.max()) >= n_expert:
        raise SchemaError(
            f"expert_{which} must be less than n_expert = {n_expert}; got {int(expert.max())}. "
            "Pass the trace through bmoe_lab.validation.validate to find the place."
        )
    starts = _evaluation_starts(trace)
    n_row, n_load = _count(expert, starts)
    keys, cells = np.empty(n_row, np.int64), np.empty(n_row, np.int64)
    offsets = np.empty(n_load + 1, np.int64)
    layer, token = np.empty(n_load, np.int64), np.empty(n_load, np.int64)
    _fill(expert, starts, n_expert, keys, cells, offsets, layer, token)
    restarts = np.zeros(1, np.int64)
    if trace.attrs.get("cold_turns"):
        turn = np.asarray(trace["turn"].values)[token]
        restarts = np.append(restarts, np.flatnonzero(np.diff(turn)) + 1).astype(np.int64)
    return LoadStream(
        keys=keys,
        offsets=offsets,
        cells=cells,
        layer=layer,
        token=token,
        phase=np.asarray(trace["phase"].values).astype(np.uint8)[token],
        restarts=restarts,
        n_layer=expert.shape[1],
        n_expert=n_expert,
    )


#: Names of the phases by number, as totals are labelled.
PHASE_NAMES: dict[int, str] = {phase.value: phase.name for phase in Phase}
