"""What a cache did, counted by phase, without laying out a trace.

All counts are integers, so that chunks of a trace add up to the whole bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import unknown_name
from bmoe_lab.kernels import compiled
from bmoe_lab.residency.loads import HIT, LoadLog
from bmoe_lab.schema import Phase
from bmoe_lab.simulation.stream import LoadStream

__all__ = ["N_PHASE", "PHASES", "Tally", "check_phases", "first_requests"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Names that `phase` may take, "all" last.
PHASES = (*(phase.name for phase in Phase), "all")
N_PHASE = len(Phase)

_EVALUATIONS, _LOOKUPS, _HITS, _LOOKUP_BYTES, _HIT_BYTES, _EVICTIONS, _HELD_MAX = range(7)
# The sum of resident bytes over evaluations outgrows 64 bits on long traces: it is in two parts.
_HELD_HIGH, _HELD_LOW = 7, 8
_N_COUNT = 9
_LOW_BITS = 20


def check_phases(phase: str | Sequence[str]) -> tuple[str, ...]:
    """Return the phases asked for, each once.

    Raises
    ------
    UnknownNameError
        If one is not a phase.

    Examples
    --------
    >>> check_phases("decode"), check_phases(["all", "decode", "all"])
    (('decode',), ('all', 'decode'))
    """
    asked = (phase,) if isinstance(phase, str) else tuple(phase)
    for name in asked:
        if name not in PHASES:
            raise unknown_name("phase", name, PHASES)
    return tuple(dict.fromkeys(asked))


@compiled
def _first_requests(keys: IntArray, offsets: IntArray, seen: IntArray) -> BoolArray:
    first = np.empty(keys.size, np.bool_)
    for load in range(offsets.size - 1):
        for row in range(offsets[load], offsets[load + 1]):
            key = keys[row]
            first[row] = seen[key] != load
            seen[key] = load
    return first


def first_requests(stream: LoadStream) -> BoolArray:
    """Return which rows are lookups: the first of their key in their load, bool of shape (row,).

    The same for every policy, so it is found once for a whole grid.

    Examples
    --------
    >>> from bmoe_lab.simulation.stream import load_stream
    >>> from bmoe_lab.testing import make_trace
    >>> stream = load_stream(make_trace(n_token=4, n_layer=2, n_used=2, n_prefill=3, seed=0))
    >>> bool(first_requests(stream)[-4:].all())  # one token asks for nothing twice
    True
    """
    return _first_requests(stream.keys, stream.offsets, np.full(stream.n_key, -1, np.int64))


@compiled
def _count(
    offsets: IntArray,
    lookup: BoolArray,
    token: IntArray,
    phase: npt.NDArray[np.uint8],
    size: IntArray,
    residency: npt.NDArray[np.uint8],
    evictions: IntArray,
    resident_bytes: IntArray,
    counts: IntArray,
) -> None:
    low_mask = (1 << _LOW_BITS) - 1
    for load in range(offsets.size - 1):
        n_lookup = 0
        n_hit = 0
        for row in range(offsets[load], offsets[load + 1]):
            n_lookup += lookup[row]
            n_hit += lookup[row] & (residency[row] == HIT)
        to = counts[phase[load]]
        to[_LOOKUPS] += n_lookup
        to[_HITS] += n_hit
        to[_LOOKUP_BYTES] += n_lookup * size[load]
        to[_HIT_BYTES] += n_hit * size[load]
        to[_EVICTIONS] += evictions[load]
        if load + 2 < offsets.size and token[load + 1] == token[load]:
            continue
        # The last load of its evaluation: what is held between evaluations is what counts.
        to[_EVALUATIONS] += 1
        to[_HELD_MAX] = max(to[_HELD_MAX], resident_bytes[load])
        to[_HELD_HIGH] += resident_bytes[load] >> _LOW_BITS
        to[_HELD_LOW] += resident_bytes[load] & low_mask


class Tally:
    """Counts of one policy at one budget, over as many chunks as are added.

    Attributes
    ----------
    counts : numpy.ndarray of int64, shape (phase, count)
        By :class:`bmoe_lab.schema.Phase`.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> from bmoe_lab.simulation.stream import cache_facts, load_stream
    >>> trace = bl.testing.make_trace(n_token=8, n_layer=2, seed=0)
    >>> stream, (key_bytes, n_layer, n_expert) = load_stream(trace), cache_facts(trace)
    >>> state = bl.residency.LRU().start(key_bytes, 2**30, n_layer=n_layer)
    >>> tally = Tally()
    >>> tally.add(
    ...     stream, first_requests(stream), key_bytes[::n_expert],
    ...     state.load_many(stream.keys, stream.offsets),
    ... )
    >>> tally.values(("decode",), np.array([2, 6, 0]))["evictions_decode"]
    0.0
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: IntArray = np.zeros((N_PHASE, _N_COUNT), np.int64)

    def add(
        self, stream: LoadStream, lookup: BoolArray, expert_bytes: IntArray, log: LoadLog
    ) -> None:
        """Count one chunk.

        Parameters
        ----------
        stream : LoadStream
            The loads.
        lookup : numpy.ndarray of bool, shape (row,)
            From :func:`first_requests`.
        expert_bytes : numpy.ndarray of int64, shape (layer,)
            Bytes of one expert.
        log : LoadLog
            What the cache did with them.
        """
        _count(
            stream.offsets,
            lookup,
            stream.token,
            stream.phase,
            expert_bytes[stream.layer],
            log.residency,
            np.ascontiguousarray(log.evictions),
            np.ascontiguousarray(log.resident_bytes),
            self.counts,
        )

    def values(self, phases: Sequence[str], n_token: IntArray) -> dict[str, float]:
        """Return the figures by name, the phase in it; NaN where there was nothing to count.

        Parameters
        ----------
        phases : sequence of str
            Phases wanted.
        n_token : numpy.ndarray of int64, shape (phase,)
            Tokens of each phase.
        """
        found: dict[str, float] = {}
        for name in phases:
            rows = slice(None) if name == "all" else slice(Phase[name], Phase[name] + 1)
            part = self.counts[rows]
            total = [int(number) for number in part.sum(axis=0)]
            lookups, n = total[_LOOKUPS], total[_EVALUATIONS]
            read = total[_LOOKUP_BYTES] - total[_HIT_BYTES]
            tokens = int(n_token[rows].sum())
            held = (total[_HELD_HIGH] << _LOW_BITS) + total[_HELD_LOW]
            found |= {
                f"hit_rate_{name}": total[_HITS] / lookups if lookups else np.nan,
                f"byte_hit_rate_{name}": (
                    total[_HIT_BYTES] / total[_LOOKUP_BYTES] if lookups else np.nan
                ),
                f"lookups_{name}": float(lookups) if n else np.nan,
                f"read_bytes_{name}": float(read) if n else np.nan,
                f"read_bytes_per_token_{name}": read / tokens if tokens else np.nan,
                f"evictions_{name}": float(total[_EVICTIONS]) if n else np.nan,
                f"resident_bytes_max_{name}": (float(part[:, _HELD_MAX].max()) if n else np.nan),
                f"resident_bytes_mean_{name}": held / n if n else np.nan,
            }
        return found
