"""How fast recorded routings pass through policies, beside a plain Python LRU and libCacheSim."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from bmoe_lab import residency, routing
from bmoe_lab.errors import PolicyNeverFiredWarning
from bmoe_lab.residency.future import next_use
from bmoe_lab.residency.loads import NO_FUTURE
from bmoe_lab.simulation import replay
from bmoe_lab.testing import make_trace

__all__ = ["curve_and_grid", "kernels", "replays", "stream"]

N_TOKEN, N_LAYER, N_EXPERT, N_USED = 1000, 48, 128, 8
#: Budgets as shares of all experts: below the token cycle, and useful ones.
SHARES = (0.05, 0.15, 0.3, 0.5)


def stream(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return keys, offsets and bytes of keys of a decode with a hot set and unequal layers."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(N_EXPERT, 0.3), size=N_LAYER) + 1e-5
    ranked = np.log(popularity)[None] + rng.gumbel(size=(N_TOKEN, N_LAYER, N_EXPERT))
    ids = np.argpartition(-ranked, N_USED, axis=2)[:, :, :N_USED]
    keys = (ids + np.arange(N_LAYER)[None, :, None] * N_EXPERT).reshape(-1).astype(np.int64)
    offsets = np.arange(0, keys.size + 1, N_USED, dtype=np.int64)
    sizes = np.repeat(2_000_000 + 37_000 * (np.arange(N_LAYER) % 7), N_EXPERT).astype(np.int64)
    return keys, offsets, sizes


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _ordered_dict_lru(keys: list[int], offsets: list[int], sizes: list[int], budget: int) -> None:
    held: OrderedDict[int, int] = OrderedDict()
    total = 0
    for load in range(len(offsets) - 1):
        for key in keys[offsets[load] : offsets[load + 1]]:
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = sizes[key]
                total += sizes[key]
        while total > budget:
            total -= held.popitem(last=False)[1]


def _libcachesim(path: Path, name: str, budget: int) -> Callable[[], Any]:
    import libcachesim

    reader = libcachesim.TraceReader(
        str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE
    )
    cache = getattr(libcachesim, name)(cache_size=budget, hashpower=14)
    return lambda: cache.process_trace(reader)


def _write_oracle_general(path: Path, keys: np.ndarray, sizes: np.ndarray) -> None:
    """Write requests in libCacheSim's binary form, which it maps into memory."""
    record = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
    requests = np.zeros(keys.size, record)
    requests["time"] = np.arange(keys.size)
    requests["key"] = keys + 1
    requests["size"] = sizes[keys]
    requests["next"] = -1
    requests.tofile(path)


def kernels(rounds: int) -> dict[str, list[float]]:
    """Return million requests per second of every policy at each share, medians over rounds.

    One request per row; our own rules of a load, libCacheSim's of single requests, the same keys
    and sizes. Interleaved: each round runs all of them once.
    """
    keys, offsets, sizes = stream()
    total = int(sizes.sum())
    plain = (keys.tolist(), offsets.tolist(), sizes.tolist())
    times: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.oracleGeneral.bin"
        _write_oracle_general(path, keys, sizes)
        for _ in range(rounds + 1):  # the first round compiles
            for place, share in enumerate(SHARES):
                budget = int(total * share)
                for name in residency.names():
                    work = _policy_work(name, keys, offsets, sizes, budget)
                    if work is not None:
                        _note(times, name, place, _seconds(work))
                _note(
                    times,
                    "OrderedDict LRU in Python",
                    place,
                    _seconds(lambda budget=budget: _ordered_dict_lru(*plain, budget)),
                )
                for theirs in ("LRU", "FIFO", "Clock", "Sieve", "S3FIFO", "LFU"):
                    work = _libcachesim(path, theirs, budget)
                    _note(times, f"libCacheSim {theirs}", place, _seconds(work))
    million = keys.size / 1e6
    return {
        name: [million / statistics.median(found[1:]) for found in places]
        for name, places in times.items()
    }


def _note(times: dict[str, list[list[float]]], name: str, place: int, seconds: float) -> None:
    times.setdefault(name, [[] for _ in SHARES])[place].append(seconds)


def _policy_work(
    name: str, keys: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, budget: int
) -> Callable[[], Any] | None:
    cls = residency.get(name)
    made = _made(cls, keys)
    if made is None:
        return None
    state = made.start(sizes, budget, n_layer=N_LAYER)
    made.begin_stream(state, offsets.size - 1)
    if not made.needs_future:
        return lambda: state.load_many(keys, offsets, NO_FUTURE)
    # Looking ahead is part of what such a policy costs.
    return lambda: state.load_many(keys, offsets, next_use(keys, offsets, sizes.size))


def _made(cls: type[residency.ResidencyPolicy], keys: np.ndarray) -> Any:
    if cls.__name__ == "Pin":
        return cls(profile=np.bincount(keys, minlength=N_LAYER * N_EXPERT))
    return cls()


def _trace() -> xr.Dataset:
    """Return a synthetic trace of the shape of the kernels' stream."""
    return make_trace(
        N_TOKEN,
        n_layer=N_LAYER,
        n_expert=N_EXPERT,
        n_used=N_USED,
        n_prefill=0,
        expert_bytes=2_000_000,
        budget_frac=0.3,
        text=False,
    )


def curve_and_grid(rounds: int) -> dict[str, float]:
    """Return seconds of the LRU curve (all budgets) and of a grid of 8 policies x 20 budgets."""
    from bmoe_lab.simulation import budgets, lru_curve, sweep

    trace = _trace()
    grid = budgets(trace, n=20)
    names = ["lru", "fifo", "clock", "sieve", "s3fifo", "slru", "lfu", "belady"]

    def run_grid(n_jobs: int) -> Callable[[], Any]:
        return lambda: sweep(trace, residency=names, budgets=grid, n_jobs=n_jobs, progress=False)

    work = {
        "LRU curve, all budgets": lambda: lru_curve(trace, budgets=grid),
        "grid 8 policies x 20 budgets, one thread": run_grid(1),
        "grid 8 policies x 20 budgets, two threads": run_grid(2),
    }
    return _medians(work, rounds)


class _InNumpy(routing.RoutingPolicy):
    """DropCold as a user writes it."""

    needs = frozenset({"cache", "weights"})

    def __init__(self, frac: float = 0.75) -> None:
        self.frac = frac

    def weigh(self, routing: routing.Routing) -> np.ndarray:
        weights = routing.weights
        assert weights is not None
        share = self.frac * weights.sum(axis=1, keepdims=True) / weights.shape[1]
        drop = ~routing.resident[routing.ids] & (weights < share)
        drop[np.arange(len(weights)), weights.argmax(axis=1)] = False
        return drop


def replays(rounds: int, csv: Path | None) -> dict[str, float]:
    """Return seconds of single replays of 156 tokens x 48 layers: what a slider waits for."""
    if csv is not None:
        from bmoe_lab.converters import from_bigmoeonedge

        trace, budget = from_bigmoeonedge(csv), "4000 MiB"
    else:
        trace = make_trace(
            156, n_layer=48, n_expert=128, n_used=6, n_prefill=28, expert_bytes=2_850_000
        )
        budget = "4000 MiB"
    lru = residency.LRU(budget)
    work = {
        "replay LRU": lambda: replay(trace, residency=lru),
        "replay LRU + DropCold": lambda: replay(
            trace, residency=lru, routing=routing.DropCold(0.75)
        ),
        "replay recorded + DropCold": lambda: replay(
            trace, residency="recorded", routing=routing.DropCold(0.75)
        ),
        "replay LRU + a policy in numpy": lambda: replay(trace, residency=lru, routing=_InNumpy()),
    }
    return _medians(work, rounds)


def _medians(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in work}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyNeverFiredWarning)
        for _ in range(rounds + 1):
            for name, run in work.items():
                times[name].append(_seconds(run))
    return {name: statistics.median(found[1:]) for name, found in times.items()}
