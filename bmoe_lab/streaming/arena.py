"""The address range of one expert stack, of which only resident experts take memory.

llama.cpp finds expert ``e`` of a stack at ``data + e * nb[2]`` and nowhere else, so the range has
the stack's full size and every expert keeps its place. It is an anonymous mapping without
reserved memory: a page costs nothing until something is read into it, and gives its memory back
when it is released.

The range starts at an address that is congruent with the tensor's file offset modulo the page, so
that a read of whole file blocks (``O_DIRECT``) lands in place. Experts need not be a multiple of a
page: a page that two experts share is counted, and released when neither is resident. Only the
first and the last page of an expert can be shared, all between belong to it alone.
"""

from __future__ import annotations

import mmap

import numpy as np

from bmoe_lab.errors import StreamingError
from bmoe_lab.seam.pages import free_pages

__all__ = ["Arena"]

# Not among the constants of mmap before Python 3.13; the value is Linux's, on every machine
# that the package supports.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Arena:
    """Address range of the size of one expert stack.

    Parameters
    ----------
    n_bytes : int
        Bytes of the whole stack, ``n_expert * slice_bytes``.
    file_offset : int
        Where the stack begins in its file.
    slice_bytes : int
        Bytes of one expert, ggml's ``nb[2]``.
    n_expert : int
    page_size : int, optional
        Tests only: a multiple of the system's page.
    poison : int, optional
        Tests only: a byte value that memory without resident experts is filled with, so that a
        read of the wrong expert gives NaN instead of plausible zeros or stale weights. Memory is
        then never given back.
    huge : bool, default False
        Ask for huge pages: right where every expert may stay, since nothing is given back then and
        the compute threads miss the TLB less.

    Attributes
    ----------
    address : int
        Of the stack's first byte: what ``tensor->data`` becomes.
    view : memoryview
        The mapping; ``view[i]`` is the place of file byte ``origin + i``.
    origin : int
        File offset of ``view[0]``, a multiple of the page.

    Raises
    ------
    StreamingError
        If the address space cannot be had.
    """

    def __init__(
        self,
        n_bytes: int,
        file_offset: int,
        slice_bytes: int,
        n_expert: int,
        page_size: int | None = None,
        *,
        poison: int | None = None,
        huge: bool = False,
    ) -> None:
        if n_bytes != slice_bytes * n_expert or n_bytes < 1:
            raise StreamingError(
                f"an expert stack must be n_expert slices; got {n_bytes} bytes for {n_expert} x "
                f"{slice_bytes}. This layout of experts is not supported."
            )
        page = mmap.PAGESIZE if page_size is None else page_size
        self.page_size = page
        self.n_bytes = n_bytes
        self.file_offset = file_offset
        self.slice_bytes = slice_bytes
        self.n_expert = n_expert
        self.poison = poison
        skew = file_offset % page
        self.origin = file_offset - skew
        length = -(-(skew + n_bytes) // page) * page
        self._map = _anonymous(length, huge)
        self.view = memoryview(self._map)
        # numpy tells the address of a buffer without ctypes.
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.base = int(self._bytes.__array_interface__["data"][0])
        self.address = self.base + skew
        self.closed = False

        first = [(skew + e * slice_bytes) // page for e in range(n_expert)]
        last = [(skew + (e + 1) * slice_bytes - 1) // page for e in range(n_expert)]
        self._first, self._last = first, last
        self._covers = dict.fromkeys([*first, *last], 0)
        self._resident = bytearray(n_expert)
        if poison is not None:
            self._bytes[:] = poison

    def admit(self, expert: int) -> None:
        """Count `expert` in. Its pages come with the first byte that is read into them."""
        if self._resident[expert]:
            return
        self._resident[expert] = 1
        first, last = self._first[expert], self._last[expert]
        self._covers[first] += 1
        if last != first:
            self._covers[last] += 1

    def vacate(self, expert: int) -> tuple[int, int]:
        """Count `expert` out; return the (address, bytes) of memory that nothing covers any more.

        The caller frees it; until then the pages hold what they held.
        """
        if not self._resident[expert]:
            return 0, 0
        self._resident[expert] = 0
        if self.poison is not None:
            start = self.file_offset - self.origin + expert * self.slice_bytes
            self._bytes[start : start + self.slice_bytes] = self.poison
        covers, start, last = self._covers, self._first[expert], self._last[expert]
        left = covers[start] - 1
        covers[start] = left
        stop = last + 1
        if last != start:
            remaining = covers[last] - 1
            covers[last] = remaining
            if remaining:
                stop = last
        if left:
            start += 1
        if stop <= start or self.poison is not None:
            return 0, 0
        return self.base + start * self.page_size, (stop - start) * self.page_size

    def evict(self, expert: int) -> None:
        """Count `expert` out and give back the memory that nothing covers any more."""
        address, n_bytes = self.vacate(expert)
        if n_bytes:
            free_pages(address, n_bytes)

    def is_resident(self, expert: int) -> bool:
        """Whether `expert` is counted in."""
        return bool(self._resident[expert])

    def window(self, expert: int) -> tuple[memoryview, int, int]:
        """Return where the whole pages around `expert` go and lie: (place, file offset, bytes).

        The last window may reach past the end of the stack, and of the file, to the page's end.
        """
        page = self.page_size
        start, stop = self._first[expert] * page, (self._last[expert] + 1) * page
        return self.view[start:stop], self.origin + start, stop - start

    def slice(self, expert: int) -> memoryview:
        """Return the bytes of one expert, resident or not."""
        start = self.file_offset - self.origin + expert * self.slice_bytes
        return self.view[start : start + self.slice_bytes]

    def close(self) -> None:
        """Unmap the range. Nothing may use :attr:`address` any more."""
        if self.closed:
            return
        self.closed = True
        del self._bytes
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            # A caller still holds a view: the mapping goes with the last of them.
            del self._map


def _anonymous(length: int, huge: bool) -> mmap.mmap:
    """Return a private anonymous mapping that reserves no memory, of small pages unless `huge`."""
    try:
        mapping = mmap.mmap(
            -1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
    except OSError as error:
        raise StreamingError(
            f"address space for experts must be available; got {error.strerror} for {length} "
            "bytes. Raise `ulimit -v`, or set vm.overcommit_memory to 0 or 1."
        ) from error
    # Where experts come and go, huge pages would make memory of neighbours that were never read.
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        # Kernels built without huge pages refuse the advice, and need none.
        try:
            mapping.madvise(advice)
        except OSError:
            return mapping
    return mapping
