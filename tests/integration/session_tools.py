"""What the tests of a live session share: small sessions, and a witness that one still works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bmoe_lab as bl

TEXT = "And it came to pass in those days, that there went out a decree from the king. "
#: About one and a half token cycles of the demo model: hits, and evicts all the time.
CACHE = 1_400_000
REPOSITORY = Path(__file__).parents[2]


def open_demo(path: Path | None = None, **settings: Any) -> bl.Session:
    """Open the demo model, or `path`, with one thread, micro-batches of 16, poisoned memory."""
    defaults = {"cache": CACHE, "n_ctx": 256, "n_ubatch": 16, "n_threads": 1, "poison": 0xFF}
    return bl.Session(path or bl.datasets.demo_model(), **(defaults | settings))


def witness(session: bl.Session) -> bytes:
    """Return the bits of logits that a working session always gives."""
    rows: list[bytes] = []
    session.score(
        TEXT,
        n_context=3,
        record="off",
        observe=lambda window, index, token, logits: rows.append(logits.tobytes()),
    )
    assert len(rows) > 8
    return b"".join(rows)


def at_load(session: bl.Session, number: int, act: Callable[[], None]) -> None:
    """Call `act` before the load with this number, counted from now; once."""
    streamer = session._model.streamer
    inner = streamer.load
    count = [0]

    def load(layer: int, ids: np.ndarray) -> Any:
        count[0] += 1
        if count[0] == number:
            streamer.load = inner
            act()
        return inner(layer, ids)

    streamer.load = load


def resources() -> dict[str, Any]:
    """Return what a closed or refused session must not leave behind."""
    with open("/proc/self/maps") as maps:
        mapped = sorted(line.split()[-1] for line in maps if ".gguf" in line)
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    # Named by what they are open on; pipes and sockets are the test runner's.
    return {
        "threads": sorted(t.name for t in threading.enumerate() if "bmoe-lab" in t.name),
        "descriptors": sorted(d for d in descriptors if d.startswith("/")),
        "mapped": mapped,
    }


def run_child(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own; it may import this module."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
