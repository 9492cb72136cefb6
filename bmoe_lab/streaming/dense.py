"""A private copy of the weights that every token needs, read once (``dense="anon"``).

In llama.cpp's own mapping these are pages of the page cache, which the kernel drops when reading
experts needs memory: the model then faults its attention weights in again, token after token.
Anonymous memory stays.

Tensors keep their neighbours: those that lie together in the file lie together here, at addresses
congruent with the file offset modulo the page, as in a mapping. So direct reads land in place, and
every tensor has the alignment that llama.cpp's mapping gives it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import numpy as np

from bmoe_lab.errors import StreamingError
from bmoe_lab.streaming.layout import ModelLayout, TensorEntry
from bmoe_lab.streaming.reader import Job, Reader

__all__ = ["DenseWeights"]


class DenseWeights:
    """Copies of some of a model's tensors in own memory.

    Parameters
    ----------
    layout : ModelLayout
    tensors : iterable of (str, int)
        Name and bytes of each tensor to copy, as llama.cpp has them. Repeats are copied once.
    reader : Reader
        Of the layout's shards.

    Attributes
    ----------
    addresses : dict of str to int
        Where each copy begins.
    n_bytes : int
        Bytes of memory taken, rounded to pages.

    Raises
    ------
    StreamingError
        If a tensor is not in the file as llama.cpp has it, or cannot be read.
    """

    def __init__(
        self, layout: ModelLayout, tensors: Iterable[tuple[str, int]], reader: Reader
    ) -> None:
        page = mmap.PAGESIZE
        self.addresses: dict[str, int] = {}
        self.n_bytes = 0
        runs = _runs(_entries(layout, tensors), page)
        length = sum(stop - start for _, start, stop, _ in runs)
        if not length:
            self._map: mmap.mmap | None = None
            return
        try:
            self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StreamingError(
                f'dense="anon" must have {length} bytes of memory; got {error.strerror}. '
                'Use dense="mmap".'
            ) from error
        self.n_bytes = length
        with memoryview(self._map) as view:
            base = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
            at = 0
            jobs = []
            for shard, start, stop, members in runs:
                place = view[at : at + stop - start]
                first = members[0].offset
                end = max(entry.offset + entry.n_bytes for entry in members)
                jobs.append(Job(shard, first, end - first, place, start))
                for entry in members:
                    self.addresses[entry.name] = base + at + entry.offset - start
                at += stop - start
            try:
                reader.read(jobs)
            except BaseException:
                for job in jobs:
                    job.view.release()
                view.release()
                self.close()
                raise
            for job in jobs:
                job.view.release()

    def close(self) -> None:
        """Unmap the copies. Nothing may use their addresses any more."""
        mapping, self._map = self._map, None
        self.addresses = {}
        if mapping is not None:
            # A traceback of a failed read may still hold a view: then the memory goes with it.
            with contextlib.suppress(BufferError):
                mapping.close()


def _entries(layout: ModelLayout, tensors: Iterable[tuple[str, int]]) -> list[TensorEntry]:
    """Return the tensors' places, checked against what llama.cpp says, in file order."""
    entries = {}
    for name, n_bytes in tensors:
        entry = layout.tensors.get(name)
        if entry is None or entry.n_bytes != n_bytes:
            known = "no such tensor" if entry is None else f"{entry.n_bytes} bytes there"
            raise StreamingError(
                f"dense tensors must be in the model file as llama.cpp has them; got {name!r} of "
                f'{n_bytes} bytes and {known}. Use dense="mmap".'
            )
        entries[name] = entry
    return sorted(entries.values(), key=lambda entry: (entry.shard, entry.offset))


def _runs(entries: list[TensorEntry], page: int) -> list[tuple[int, int, int, list[TensorEntry]]]:
    """Return (shard, first byte, end, tensors) of page-rounded file ranges.

    Tensors that lie less than a page apart share a range.
    """
    runs: list[tuple[int, int, int, list[TensorEntry]]] = []
    for entry in entries:
        start = entry.offset // page * page
        stop = -(-(entry.offset + entry.n_bytes) // page) * page
        if runs and runs[-1][0] == entry.shard and start <= runs[-1][2]:
            shard, first, end, members = runs[-1]
            runs[-1] = (shard, first, max(end, stop), [*members, entry])
        else:
            runs.append((entry.shard, start, stop, [entry]))
    return runs
