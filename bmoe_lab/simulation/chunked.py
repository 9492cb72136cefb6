"""A trace served chunk by chunk, so that one larger than memory is replayed in bounded memory.

Chunks end where graph evaluations end, and caches carry on from one to the next: what they say is
what they would say about the whole trace at once. A trace that fits in one chunk is served whole.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.kernels import compiled
from bmoe_lab.residency import ResidencyPolicy, ResidencyState
from bmoe_lab.residency.loads import NO_FUTURE
from bmoe_lab.simulation.serving import join_logs
from bmoe_lab.simulation.stream import LoadStream, load_stream
from bmoe_lab.simulation.tally import N_PHASE, Tally, first_requests
from bmoe_lab.sizes import format_size

__all__ = [
    "CHUNK_ROWS",
    "CacheRun",
    "Chunk",
    "chunk_tokens",
    "chunks",
    "segment_counts",
    "token_windows",
]

IntArray = npt.NDArray[np.int64]

#: Rows (token, layer, slot) in one chunk: about 80 MB with all that is derived from them.
CHUNK_ROWS = 2_000_000

# What of a trace a cache must know; nothing else is read.
_READ = ("expert_applied", "turn", "batch", "phase")


def chunk_tokens(trace: xr.Dataset, chunk_rows: int | None = None) -> int:
    """Return how many tokens one chunk of a trace holds.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> chunk_tokens(make_trace(n_token=4, n_layer=5, n_used=4), 1000)
    50
    """
    rows = CHUNK_ROWS if chunk_rows is None else chunk_rows
    return max(1, rows // max(1, trace.sizes["layer"] * trace.sizes["slot"]))


def token_windows(trace: xr.Dataset, n_token: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, end) of windows of at most `n_token` tokens made of whole evaluations.

    An evaluation wider than that is a window of its own. Coordinates are read window by window.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads the coordinates ``turn`` and ``batch``.
    n_token : int
        Tokens wanted in a window.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> list(token_windows(make_trace(n_token=8, n_prefill=5), 2))
    [(0, 5), (5, 7), (7, 8)]
    """
    total = trace.sizes["token"]
    begin = 0
    while begin < total:
        width = n_token
        while True:
            end = min(begin + width, total)
            if end == total and width == n_token:
                break
            turn, batch = (
                np.asarray(trace[name].isel(token=slice(begin, end + 1)).values)
                for name in ("turn", "batch")
            )
            starts = np.flatnonzero((batch[1:] != batch[:-1]) | (turn[1:] != turn[:-1])) + 1
            if starts.size:
                end = begin + int(starts[-1 if width == n_token else 0])
                break
            if end == total:
                break
            width *= 2
        yield begin, end
        begin = end


@dataclass(frozen=True)
class Chunk:
    """A stretch of a trace as caches see it.

    Attributes
    ----------
    begin, end : int
        Tokens.
    stream : LoadStream
        Their loads.
    lookup : numpy.ndarray of bool, shape (row,)
        First row of each key in its load.
    n_token : numpy.ndarray of int64, shape (phase,)
        Tokens of each phase.
    fresh : bool
        Whether the cache is empty at the start of the chunk; else ``stream.restarts[0]`` is none.
    future : numpy.ndarray of int64, shape (row,)
        Next load that names the row's key, counted from the chunk's first load or the last one
        before which the cache was emptied; empty unless asked for.
    """

    begin: int
    end: int
    stream: LoadStream
    lookup: npt.NDArray[np.bool_]
    n_token: IntArray
    fresh: bool
    future: IntArray


def chunks(
    trace: xr.Dataset, *, chunk_rows: int | None = None, future: bool = False
) -> Iterator[Chunk]:
    """Yield a trace chunk by chunk.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`bmoe_lab.simulation.load_stream`; arrays on disk or in dask are read chunk by
        chunk.
    chunk_rows : int, optional
        Rows of a chunk; :data:`CHUNK_ROWS` by default.
    future : bool, default False
        Find the next use of every row: a pass from the end, and 4 bytes per row in a temporary
        file.

    Raises
    ------
    SettingsError
        If the temporary file does not fit on its disk.
    """
    part = trace[list(_READ)].assign_attrs(trace.attrs)
    windows = token_windows(part, chunk_tokens(trace, chunk_rows))
    if not future:
        for begin, end in windows:
            yield _chunk(part, begin, end)
        return
    with _Distances(part, list(windows)) as distances:
        for number, (begin, end) in enumerate(distances.windows):
            chunk = _chunk(part, begin, end)
            yield replace(chunk, future=distances.future(number, chunk))


def _chunk(part: xr.Dataset, begin: int, end: int) -> Chunk:
    # One token more: whether its turn goes on is what tells if a cache is emptied here.
    window = part.isel(token=slice(max(begin - 1, 0), end)).load()
    fresh = begin == 0
    if begin:
        turns = np.asarray(window["turn"].values[:2])
        fresh = bool(part.attrs.get("cold_turns")) and turns[0] != turns[1]
        window = window.isel(token=slice(1, None))
    stream = load_stream(window)
    phases = np.asarray(window["phase"].values)
    return Chunk(
        begin=begin,
        end=end,
        stream=stream,
        lookup=first_requests(stream),
        n_token=np.array([(phases == phase).sum() for phase in range(N_PHASE)], np.int64),
        fresh=fresh,
        future=NO_FUTURE,
    )


@compiled
def _distances(
    keys: IntArray,
    offsets: IntArray,
    empties: npt.NDArray[np.bool_],
    upcoming: IntArray,
    n_behind: int,
    out: npt.NDArray[np.int32],
) -> int:
    """Write how many loads ahead each row's key is asked for again, from the end of the trace.

    `upcoming` holds loads by their number from the end of the stretch that begins with an empty
    cache, 0 for the end itself; `n_behind` loads of that stretch lie behind this chunk.
    """
    for load in range(offsets.size - 2, -1, -1):
        n_behind += 1
        for row in range(offsets[load], offsets[load + 1]):
            out[row] = n_behind - upcoming[keys[row]]
        # Only now, so that a repeat within the load sees what lies beyond it.
        for row in range(offsets[load], offsets[load + 1]):
            upcoming[keys[row]] = n_behind
        if empties[load]:
            upcoming[:] = 0
            n_behind = 0
    return n_behind


class _Distances:
    """How many loads ahead each row's key comes again, in a file where one chunk is not all."""

    def __init__(self, part: xr.Dataset, windows: list[tuple[int, int]]) -> None:
        self.windows = windows
        self._rows = part.sizes["layer"] * part.sizes["slot"]
        n_byte = 4 * self._rows * part.sizes["token"] if len(windows) > 1 else 0
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if n_byte > free:
            raise SettingsError(
                f"a policy that knows the future must have room for {format_size(n_byte)} in a "
                f"temporary file; got {format_size(free)} in {folder!r}. Set TMPDIR to a larger "
                "disk, or sweep part of the trace: trace.isel(token=slice(...))."
            )
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        try:
            self._write(part)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> _Distances:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _write(self, part: xr.Dataset) -> None:
        upcoming, n_behind = np.zeros(0, np.int64), 0
        for begin, end in reversed(self.windows):
            chunk = _chunk(part, begin, end)
            stream = chunk.stream
            if not upcoming.size:
                upcoming = np.zeros(stream.n_key, np.int64)
            empties = np.zeros(stream.n_load, np.bool_)
            empties[stream.restarts[0 if chunk.fresh else 1 :]] = True
            out = np.empty(stream.keys.size, np.int32)
            n_behind = _distances(stream.keys, stream.offsets, empties, upcoming, n_behind, out)
            self._file.seek(4 * self._rows * begin)
            self._file.write(out.data)

    def future(self, number: int, chunk: Chunk) -> IntArray:
        """Return the next load of every row, counted within the chunk and beyond."""
        self._file.seek(4 * self._rows * self.windows[number][0])
        stream = chunk.stream
        packed = self._file.read(4 * stream.keys.size)
        loads = np.arange(stream.n_load)
        for begin, end in stream.segments():
            loads[begin:end] -= begin
        future: IntArray = np.frombuffer(packed, np.int32) + stream.per_row(loads)
        return future


def segment_counts(trace: xr.Dataset, *, chunk_rows: int | None = None) -> list[IntArray]:
    """Return how many loads ask for each key, one array per stretch that begins with no cache.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> counts = segment_counts(make_trace(n_token=9, n_prefill=0, n_layer=2, n_used=4, seed=0))
    >>> [int(part.sum()) for part in counts]
    [72]
    """
    counts: list[IntArray] = []
    for chunk in chunks(trace, chunk_rows=chunk_rows):
        stream = chunk.stream
        for number, (begin, end) in enumerate(stream.segments()):
            if number or chunk.fresh:
                counts.append(np.zeros(stream.n_key, np.int64))
            low, high = int(stream.offsets[begin]), int(stream.offsets[end])
            counts[-1] += np.bincount(
                stream.keys[low:high][chunk.lookup[low:high]], minlength=stream.n_key
            )
    return counts


class CacheRun:
    """One residency policy at one budget on its way through a trace.

    Parameters
    ----------
    policy : ResidencyPolicy
        With a budget.
    key_bytes : numpy.ndarray of int64, shape (key,)
        Bytes of each key.
    n_layer : int
        Layers that the keys are divided into.
    n_load : int
        Loads of the whole trace, or more.
    profiles : list of numpy.ndarray, optional
        What a policy with the parameter `profile` is given for each stretch that begins with an
        empty cache (:func:`segment_counts`).
    """

    def __init__(
        self,
        policy: ResidencyPolicy,
        key_bytes: IntArray,
        n_layer: int,
        n_load: int,
        profiles: list[IntArray] | None = None,
    ) -> None:
        self.tally = Tally()
        self._key_bytes, self._n_layer, self._n_load = key_bytes, n_layer, n_load
        self._expert_bytes = np.ascontiguousarray(key_bytes[:: key_bytes.size // n_layer])
        self._policy, self._profiles = policy, iter(profiles or ())
        self._state: ResidencyState | None = None

    def feed(self, chunk: Chunk) -> None:
        """Serve the next chunk and count what the cache did."""
        stream = chunk.stream
        logs = []
        for number, (begin, end) in enumerate(stream.segments()):
            if number or chunk.fresh:
                self._begin()
            assert self._state is not None
            low, high = int(stream.offsets[begin]), int(stream.offsets[end])
            offsets = stream.offsets[begin : end + 1] - low
            logs.append(
                self._state.load_many(stream.keys[low:high], offsets, chunk.future[low:high])
            )
        self.tally.add(stream, chunk.lookup, self._expert_bytes, join_logs(logs))

    def _begin(self) -> None:
        """Empty the cache."""
        policy = self._policy
        profile = next(self._profiles, None)
        if profile is not None:
            params = {**policy.get_params(), "profile": profile.reshape(self._n_layer, -1)}
            policy = type(policy)(**params)
        if self._state is None or profile is not None:
            assert policy.budget_bytes is not None
            self._state = policy.start(self._key_bytes, policy.budget_bytes, n_layer=self._n_layer)
        else:
            self._state.clear()
        policy.begin_stream(self._state, self._n_load)
