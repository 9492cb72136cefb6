"""An independent oracle: libCacheSim (C), with keys of one size and one key per load.

The package ``libcachesim`` is GPL and used here only. Its LRU, FIFO, LFU, CLOCK, SIEVE, S3-FIFO and
ARC and ours hit and miss alike, request by request, at every capacity tried. Two it has are not
compared, because they are other algorithms of the same name: its SLRU has four segments of equal
share where ours has two, its W-TinyLFU counts in a sketch.
"""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab import residency

lcs = pytest.importorskip("libcachesim", reason="libcachesim (GPL, C) is not installed")

N_KEY = 200
#: A tenth of 45 and of 77 is no whole number of keys: both sides round the shares alike.
CAPACITIES = (20, 45, 77, 100, 150)

#: Our name and parameters, theirs.
PAIRS = [
    ("lru", {}, "LRU"),
    ("fifo", {}, "FIFO"),
    ("lfu", {"keep_counts": False}, "LFU"),
    ("clock", {}, "Clock"),
    ("sieve", {}, "Sieve"),
    ("s3fifo", {}, "S3FIFO"),
    ("arc", {}, "ARC"),
]


def zipf(rng, n):
    weight = 1 / np.arange(1, N_KEY + 1)
    return rng.choice(N_KEY, n, p=weight / weight.sum())


def uniform_stream(rng):
    return rng.integers(0, N_KEY, 8000)


def zipf_stream(rng):
    return zipf(rng, 8000)


def loops_and_scans(rng):
    """Return cycles shorter and longer than any capacity, popular keys between them."""
    parts = []
    for _ in range(20):
        parts += [np.tile(np.arange(rng.integers(5, N_KEY)), 3), zipf(rng, 200)]
    return np.concatenate(parts)


def phases(rng):
    """Return a stream whose popular keys are others every 400 requests."""
    return np.concatenate([(zipf(rng, 400) + rng.integers(N_KEY)) % N_KEY for _ in range(20)])


STREAMS = [uniform_stream, zipf_stream, loops_and_scans, phases]


def oracle_hits(name, capacity, keys):
    # The default hash table of 2**24 buckets would be most of the time.
    cache = getattr(lcs, name)(cache_size=capacity, hashpower=10)
    request = lcs.Request()
    request.obj_size = 1
    hits = np.empty(keys.size, np.uint8)
    for i, key in enumerate(keys.tolist()):
        request.obj_id = key + 1
        hits[i] = cache.get(request)
    return hits


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.__name__)
@pytest.mark.parametrize(("name", "parameters", "oracle"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_hits_equal_those_of_libcachesim(name, parameters, oracle, stream):
    keys = stream(np.random.default_rng(20260817))
    for capacity in CAPACITIES:
        state = residency.get(name)(**parameters).start(np.ones(N_KEY), capacity)
        actual = state.load_many(keys, np.arange(keys.size + 1)).residency
        expected = oracle_hits(oracle, capacity, keys)
        assert 0 < expected.sum() < keys.size
        differing = np.flatnonzero(actual != expected)
        assert differing.size == 0, f"capacity {capacity}: first at request {differing[0]}"
