"""The serial load of one layer: look up, free the victims' pages, read what is missing.

The order is the law of the budget: memory of victims goes back before the misses are read, so
residency never rises above the larger of the budget and what this one load needs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import StreamingError
from bmoe_lab.kernels import compiled
from bmoe_lab.seam.pages import free_pages
from bmoe_lab.streaming.arena import Arena
from bmoe_lab.streaming.layout import ModelLayout
from bmoe_lab.streaming.reader import Job, Reader

if TYPE_CHECKING:
    from bmoe_lab.residency.base import ResidencyPolicy
    from bmoe_lab.residency.state import ResidencyState

__all__ = ["Costs", "StackGroup", "StreamLoad", "Streamer"]


class StackGroup(NamedTuple):
    """The expert stacks that one router's ids index: a trace's ``layer``.

    Attributes
    ----------
    block : int
        Block of the model.
    group : int
        0, or 1 for a second group in the same block.
    tensors : tuple of str
        Names of the stacks, e.g. gate, up and down projection.
    """

    block: int
    group: int
    tensors: tuple[str, ...]


@dataclass(slots=True)
class Costs:
    """What loads cost since the last :meth:`Streamer.take_costs`.

    Attributes
    ----------
    io_s : float
        Seconds spent waiting for reads.
    manage_s : float
        Seconds spent on lookup, eviction and bookkeeping.
    free_s : float
        Seconds in which lanes freed victims' memory, summed over lanes; they pass within `io_s`,
        mostly while other lanes read.
    bytes_read : int
        Bytes that the reader fetched, blocks rounded out; the trace charges exact expert bytes.
    evictions : int
    """

    io_s: float = 0.0
    manage_s: float = 0.0
    free_s: float = 0.0
    bytes_read: int = 0
    evictions: int = 0


class StreamLoad(NamedTuple):
    """What one load found, row for row of the ids given.

    Attributes
    ----------
    residency : numpy.ndarray of uint8, shape (row,)
        0 miss, 1 hit, judged before the load.
    read_bytes : numpy.ndarray of uint32, shape (row,)
        An expert's bytes on the first row that asked for it, else 0.
    n_missing : int
        Distinct experts read.
    """

    residency: npt.NDArray[np.uint8]
    read_bytes: npt.NDArray[np.uint32]
    n_missing: int


@compiled
def _keys_of(
    ids: npt.NDArray[np.int32], offset: int, n_expert: int, out: npt.NDArray[np.int64]
) -> int:
    """Turn ids of a layer into keys; return the row of the first that is out of range, or -1."""
    for row in range(ids.size):
        if ids[row] < 0 or ids[row] >= n_expert:
            return row
        out[row] = offset + ids[row]
    return -1


class _Stack:
    """One tensor's arena and where its file bytes are."""

    __slots__ = ("arena", "offset", "shard", "slice_bytes")

    def __init__(self, arena: Arena, shard: int) -> None:
        self.arena = arena
        self.shard = shard
        self.offset = arena.file_offset
        self.slice_bytes = arena.slice_bytes

    def job(self, expert: int) -> Job:
        """Return the read that fills one expert's slice."""
        size, arena = self.slice_bytes, self.arena
        return Job(self.shard, self.offset + expert * size, size, arena.view, arena.origin)


class Streamer:
    """Makes the experts that a layer's router picked resident, just in time.

    Parameters
    ----------
    layout : ModelLayout
    groups : sequence of StackGroup
        By layer.
    policy : ResidencyPolicy
        Which experts stay.
    budget_bytes : int
        0 keeps nothing beyond the load being served.
    lanes : int, default 4
    direct : bool, default True
        See :class:`~bmoe_lab.streaming.reader.Reader`.
    poison : int, optional
        Tests only, see :class:`~bmoe_lab.streaming.arena.Arena`.

    Attributes
    ----------
    addresses : dict of str to int
        Where each stack's ``data`` must point.
    expert_bytes : numpy.ndarray of int64, shape (layer,)
        Bytes of one expert: the sum of ``nb[2]`` over the group's tensors.
    n_expert : int
        Experts per layer, the largest where layers differ; ``key = layer * n_expert + expert``.
    state : ResidencyState
    reader : Reader

    Raises
    ------
    StreamingError
        If the platform cannot stream, or memory or a file cannot be had.
    """

    def __init__(
        self,
        layout: ModelLayout,
        groups: Sequence[StackGroup],
        policy: ResidencyPolicy,
        budget_bytes: int,
        *,
        lanes: int = 4,
        direct: bool = True,
        poison: int | None = None,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise StreamingError(
                f"streaming must run on Linux; got {sys.platform!r}. Run models there; opening, "
                "replaying and plotting traces works on any system."
            )
        self.groups = tuple(groups)
        self.budget_bytes = budget_bytes
        self.addresses: dict[str, int] = {}
        self._stacks: list[list[_Stack]] = []
        self._costs = Costs()
        self._reserve(64)
        self.closed = False
        self.reader = Reader([shard.path for shard in layout.shards], lanes, direct)
        total = sum(layout.tensors[name].n_bytes for group in groups for name in group.tensors)
        # Nothing is ever evicted from a cache that holds everything.
        huge = budget_bytes >= total
        try:
            for group in self.groups:
                self._stacks.append(self._make_stacks(layout, group, poison, huge))
            counts = [stacks[0].arena.n_expert for stacks in self._stacks]
            self.n_expert = max(counts)
            self.expert_bytes = np.array(
                [sum(stack.slice_bytes for stack in stacks) for stacks in self._stacks], np.int64
            )
            self._n_expert = counts
            key_bytes = np.repeat(self.expert_bytes, self.n_expert)
            self.state: ResidencyState = policy.start(
                key_bytes, budget_bytes, n_layer=len(self.groups)
            )
        except BaseException:
            self.close()
            raise

    def _make_stacks(
        self, layout: ModelLayout, group: StackGroup, poison: int | None, huge: bool
    ) -> list[_Stack]:
        stacks: list[_Stack] = []
        for name in group.tensors:
            entry = layout.tensors[name]
            if name in self.addresses or (stacks and stacks[0].arena.n_expert != entry.ne[2]):
                raise StreamingError(
                    f"stacks of a layer must be its own and have equally many experts; got "
                    f"{group.tensors} of block {group.block}. This layout is not supported."
                )
            arena = Arena(
                entry.n_bytes,
                entry.offset,
                entry.slice_bytes,
                entry.ne[2],
                poison=poison,
                huge=huge,
            )
            stacks.append(_Stack(arena, entry.shard))
            self.addresses[name] = arena.address
        return stacks

    @property
    def n_layer(self) -> int:
        """Stack groups."""
        return len(self.groups)

    @property
    def arenas(self) -> list[list[Arena]]:
        """The arenas by layer and tensor."""
        return [[stack.arena for stack in stacks] for stacks in self._stacks]

    def load(self, layer: int, ids: npt.NDArray[np.int32]) -> StreamLoad:
        """Make every expert in `ids` resident.

        Parameters
        ----------
        layer : int
        ids : numpy.ndarray of int32
            What the router picked: raw, token-major, repeats included.

        Returns
        -------
        StreamLoad
            Its arrays are the caller's until the next load.

        Raises
        ------
        StreamingError
            If a read failed. The experts of this load that were not resident before have then
            left the cache; the next load starts afresh.
        """
        began = time.perf_counter()
        flat = ids.ravel()
        if flat.size > self._keys.size:
            self._reserve(flat.size)
        keys = self._keys[: flat.size]
        bad = _keys_of(flat, layer * self.n_expert, self._n_expert[layer], keys)
        if bad >= 0:
            raise StreamingError(
                f"expert ids must be from 0 to {self._n_expert[layer] - 1}; got {int(flat[bad])} "
                f"in layer {layer}. The router's output is damaged: report this."
            )
        found = self.state.load(keys)
        missing, victims = found.missing, found.victims
        costs = self._costs
        costs.evictions += victims.size
        if missing.size or victims.size:
            jobs = self._admit(layer, (missing - layer * self.n_expert).tolist())
            # After the admission: a page that a victim shares with a neighbour that is about to
            # be read is not freed, as a lane might free it after the read.
            frees = self._vacate(victims)
            started = time.perf_counter()
            reader = self.reader
            bytes_before, free_before = reader.bytes_read, reader.free_s
            try:
                reader.read(jobs, frees)
            except BaseException:
                # Whether some of it arrived is not worth knowing.
                keys = missing.copy()
                self.state.forget(keys)
                self._evict(keys)
                raise
            finally:
                ended = time.perf_counter()
                costs.io_s += ended - started
                costs.manage_s -= ended - started
                costs.bytes_read += reader.bytes_read - bytes_before
                costs.free_s += reader.free_s - free_before
        n_missing = int(missing.size)
        if n_missing:
            read_bytes = found.first.astype(np.uint32) * np.uint32(self.expert_bytes[layer])
        else:
            # The usual case where the cache is large; it must cost next to nothing.
            read_bytes = self._no_bytes[: flat.size]
        costs.manage_s += time.perf_counter() - began
        return StreamLoad(found.residency, read_bytes, n_missing)

    def _reserve(self, n_row: int) -> None:
        self._keys: npt.NDArray[np.int64] = np.empty(n_row, np.int64)
        self._no_bytes: npt.NDArray[np.uint32] = np.zeros(n_row, np.uint32)
        self._no_bytes.flags.writeable = False

    def _admit(self, layer: int, experts: list[int]) -> list[Job]:
        """Count `experts` in; return the reads that fill them, one expert after the other."""
        jobs = []
        for expert in sorted(experts):
            for stack in self._stacks[layer]:
                stack.arena.admit(expert)
                jobs.append(stack.job(expert))
        return jobs

    def _vacate(self, keys: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Count `keys` out; return the memory to free."""
        frees = []
        for key in keys.tolist():
            layer, expert = divmod(key, self.n_expert)
            for stack in self._stacks[layer]:
                free = stack.arena.vacate(expert)
                if free[1]:
                    frees.append(free)
        return frees

    def _evict(self, keys: npt.NDArray[np.int64]) -> None:
        for address, n_bytes in self._vacate(keys):
            free_pages(address, n_bytes)

    def resident(self, layer: int) -> npt.NDArray[np.bool_]:
        """Return which experts of `layer` are in memory, shape (expert,): a live view."""
        start = layer * self.n_expert
        return self.state.contains()[start : start + self._n_expert[layer]]

    def take_costs(self) -> Costs:
        """Return what was spent since the last call, and count from zero again."""
        costs, self._costs = self._costs, Costs()
        return costs

    def clear(self) -> None:
        """Empty the cache and give its memory back: a cold start."""
        keys = np.flatnonzero(self.state.contains())
        self._evict(keys)
        self.state.clear()

    def close(self) -> None:
        """Unmap every arena, close the files, stop the lanes. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self.reader.close()
        for stacks in self._stacks:
            for stack in stacks:
                stack.arena.close()
