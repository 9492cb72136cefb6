"""What importing the package and opening a session cost."""

from __future__ import annotations

import statistics
import subprocess
import sys

__all__ = ["import_times", "open_times"]

_IMPORT = "import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
_OPEN = (
    "import bmoe_lab as bl, time; path = bl.datasets.demo_model(); t = time.perf_counter(); "
    "s = bl.Session(path, cache='2 MiB', n_threads=1); print(time.perf_counter() - t); s.close()"
)


def _run(code: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    return float(done.stdout)


def import_times(rounds: int) -> tuple[float, float]:
    """Return the median seconds of ``import xarray`` and of ``import bmoe_lab``, interleaved."""
    plain, ours = [], []
    for _ in range(rounds + 1):
        plain.append(_run(_IMPORT.format(name="xarray")))
        ours.append(_run(_IMPORT.format(name="bmoe_lab")))
    # The first pair fills the page cache and the bytecode cache.
    return statistics.median(plain[1:]), statistics.median(ours[1:])


def open_times(rounds: int) -> float:
    """Return the median seconds of opening the demo session in a new process, after the first."""
    return statistics.median([_run(_OPEN) for _ in range(rounds + 1)][1:])
