"""Memory of a sweep over a trace that is larger than it: on disk in Zarr, on two dask workers.

The trace is synthetic: few layers and a narrow router, so that ten million tokens are written in
minutes. What is measured does not depend on that: memory follows the rows of a chunk, not the
tokens. A trace of 48 layers, top 8, and as many tokens would be 48 times as large on disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bmoe_lab.schema import SCHEMA_VERSION
from bmoe_lab.sizes import format_size

_N_EXPERT = 64


def write_trace(path: Path, n_token: int, n_layer: int = 4, n_used: int = 2, seed: int = 0) -> int:
    """Write a synthetic trace in Zarr, block by block; return its bytes when loaded."""
    import numcodecs
    import zarr

    rng = np.random.default_rng(seed)
    popularity = np.log(rng.dirichlet(np.full(_N_EXPERT, 0.3), n_layer) + 1e-4).astype(np.float32)
    shapes: dict[str, tuple[tuple[str, ...], str]] = {
        "expert_chosen": (("token", "layer", "slot"), "i2"),
        "expert_applied": (("token", "layer", "slot"), "i2"),
        "action": (("token", "layer", "slot"), "u1"),
        "turn": (("token",), "i4"),
        "batch": (("token",), "i4"),
        "phase": (("token",), "u1"),
    }
    sizes = {"token": n_token, "layer": n_layer, "slot": n_used}
    group = zarr.open_group(path, mode="w", zarr_format=2)
    block = 50_000
    arrays: dict[str, Any] = {}
    for name, (dims, dtype) in shapes.items():
        shape = tuple(sizes[dim] for dim in dims)
        arrays[name] = group.create_array(
            name,
            shape=shape,
            dtype=dtype,
            chunks=(min(block, n_token), *shape[1:]),
            fill_value=None,  # else a reader takes zeros for missing
            compressors=(numcodecs.Zstd(level=1, checksum=True),),
            attributes={"_ARRAY_DIMENSIONS": list(dims)},
            config={"write_empty_chunks": True},
        )
    for begin in range(0, n_token, block):
        rows = slice(begin, min(begin + block, n_token))
        n = rows.stop - rows.start
        noise = rng.gumbel(size=(n, n_layer, _N_EXPERT)).astype(np.float32)
        expert = np.argpartition(-(popularity + noise), n_used, axis=2)[:, :, :n_used]
        for name in ("expert_chosen", "expert_applied"):
            arrays[name][rows] = expert.astype(np.int16)
        arrays["action"][rows] = 0
        arrays["turn"][rows] = 0
        arrays["batch"][rows] = np.arange(rows.start, rows.stop, dtype=np.int32)
        arrays["phase"][rows] = 1
    layers: dict[str, Any] = {
        "expert_bytes": 2_000_000 + 37_000 * np.arange(n_layer, dtype=np.int64),
        "n_expert_used": np.full(n_layer, n_used, np.int16),
        "block": np.arange(n_layer, dtype=np.int32),
        "group": np.zeros(n_layer, np.int16),
    }
    for name, values in layers.items():
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            fill_value=None,
            compressors=None,
            attributes={"_ARRAY_DIMENSIONS": ["layer"]},
            config={"write_empty_chunks": True},
        )
        array[:] = values
    group.attrs.update(
        {
            "schema_version": SCHEMA_VERSION,
            "n_expert": _N_EXPERT,
            "lossless": 1,
            "complete": 1,
            "source": "synthetic",
            "model_name": "synthetic",
        }
    )
    group.attrs["coordinates"] = "turn batch phase block group"
    zarr.consolidate_metadata(path, zarr_format=2)
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arrays.values())


def _peak(reset: bool = False) -> int:
    """Return the largest resident memory of this process since the last reset (Linux)."""
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def measure(
    n_token: int,
    residency: tuple[str, ...] = ("lru", "s3fifo"),
    n_budget: int = 2,
    folder: Path | None = None,
) -> dict[str, float]:
    """Sweep a synthetic trace on two workers; return sizes, peaks and seconds."""
    import dask
    import distributed

    import bmoe_lab as bl
    from bmoe_lab.simulation.plan import trace_facts
    from bmoe_lab.simulation.sweeping import sweep

    with tempfile.TemporaryDirectory(dir=folder) as where:
        path = Path(where) / "long.zarr"
        n_byte = write_trace(path, n_token)
        on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        with (
            dask.config.set(temporary_directory=where),
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            with bl.open_trace(path, memory_limit=0) as trace:
                cycle = trace_facts(trace).token_cycle_bytes
            budgets = [cycle * (i + 1) for i in range(n_budget)]
            asked = {"residency": list(residency), "budgets": budgets, "progress": False}
            # Code and kernels are in memory before the first peak is read.
            short = Path(where) / "short.zarr"
            write_trace(short, 2_000)
            sweep(short, client=client, **asked)
            client.run(_peak, reset=True)
            before = max(client.run(_peak).values())
            start = time.perf_counter()
            grid = sweep(path, client=client, **asked)
            seconds = time.perf_counter() - start
            after = max(client.run(_peak).values())
    if not grid.attrs["complete"]:
        raise RuntimeError("the sweep was interrupted")
    return {
        "n_token": n_token,
        "array_bytes": n_byte,
        "disk_bytes": on_disk,
        "peak_before_bytes": before,
        "peak_bytes": after,
        "seconds": seconds,
        "requests_per_s": float(grid["lookups_all"].sum()) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_memory", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--residency", nargs="*", default=["lru", "s3fifo"])
    parser.add_argument("--folder", type=Path, help="where the trace is written for the time")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    found = []
    for n_token in options.tokens:
        figures = measure(n_token, tuple(options.residency), folder=options.folder)
        found.append(figures)
        print(
            f"{n_token:,} tokens: arrays {format_size(figures['array_bytes'])}, on disk "
            f"{format_size(figures['disk_bytes'])}; largest worker "
            f"{format_size(figures['peak_before_bytes'])} before, "
            f"{format_size(figures['peak_bytes'])} at its peak; {figures['seconds']:.1f} s, "
            f"{figures['requests_per_s'] / 1e6:.1f} million requests per second"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
