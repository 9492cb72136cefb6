"""Wrong models, settings and runs, tried one after another in a process that may crash.

``python -m tests.integration.bad_input FOLDER`` prints one JSON line per case: before it, its name,
so that a crash can be told from the others; after it, the error and what was left behind.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bmoe_lab as bl
from bmoe_lab.residency import LRU
from tests.integration.session_tools import TEXT, open_demo, resources, witness
from tests.unit.tiny_gguf import STRING, U16, U32, gguf_bytes, key, tensor

DEMO = bl.datasets.demo_model()


def _u32_at(content: bytes, name: str) -> int:
    """Return where the value of a uint32 key lies."""
    return content.index(name.encode()) + len(name) + 4


def with_u32(name: str, value: int) -> bytes:
    content = bytearray(DEMO.read_bytes())
    struct.pack_into("<I", content, _u32_at(bytes(content), name), value)
    return bytes(content)


def renamed(old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return DEMO.read_bytes().replace(old, new, 1)


def a_split(number: int) -> bytes:
    keys = [
        key("general.architecture", STRING, "qwen3moe"),
        key("split.no", U16, number),
        key("split.count", U16, 3),
        key("split.tensors.count", 5, 3),
    ]
    return gguf_bytes(keys, [tensor("a", (8,), 0)], bytes(32))


def model_files(folder: Path) -> dict[str, Path]:
    """Write the wrong model files; return them by name."""
    whole = DEMO.read_bytes()
    dense = [key("general.architecture", STRING, "llama"), key("llama.block_count", U32, 2)]
    contents: dict[str, bytes] = {
        "not a GGUF": b"PK\x03\x04" + bytes(4096),
        "text": b"hello\n" * 100,
        "empty": b"",
        "magic only": b"GGUF",
        "big-endian": b"FUGG" + whole[4:],
        "old version": whole[:4] + struct.pack("<I", 1) + whole[8:],
        "cut in header": whole[:3000],
        "cut in tensor table": whole[: whole.index(b"blk.3.")],
        "cut in tensor data": whole[: len(whole) // 2],
        "cut by one byte": whole[:-1],
        "dense": gguf_bytes(dense, [tensor("a", (8,), 0)], bytes(32)),
        "no architecture": gguf_bytes([], [tensor("a", (8,), 0)], bytes(32)),
        "unknown architecture": renamed(
            b"\x08\0\0\0\0\0\0\0qwen3moe", b"\x08\0\0\0\0\0\0\0qwen9moe"
        ),
        "huge string": whole[:24] + struct.pack("<Q", 2**62) + whole[32:],
        "huge tensor count": whole[:8] + struct.pack("<Q", 2**60) + whole[16:],
        "no expert used": with_u32("qwen3moe.expert_used_count", 0),
        "too many experts used": with_u32("qwen3moe.expert_used_count", 33),
        "absurd experts used": with_u32("qwen3moe.expert_used_count", 2**31),
        "other expert count": with_u32("qwen3moe.expert_count", 31),
        "too many blocks": with_u32("qwen3moe.block_count", 9),
        "no heads": with_u32("qwen3moe.attention.head_count", 0),
        "tensor missing": renamed(b"blk.2.ffn_gate_exps", b"blk.2.ffn_gone_exps"),
        "router missing": renamed(b"blk.2.ffn_gate_inp", b"blk.2.ffn_gone_inp"),
    }
    paths = {}
    for name, content in contents.items():
        paths[name] = folder / f"{name.replace(' ', '-')}.gguf"
        paths[name].write_bytes(content)
    (folder / "folder.gguf").mkdir()
    paths["folder"] = folder / "folder.gguf"
    paths["missing"] = folder / "missing.gguf"
    paths["below a file"] = paths["text"] / "x.gguf"
    paths["device"] = Path("/dev/null")
    for number in (0, 1):
        shard = folder / f"split-{number + 1:05d}-of-00003.gguf"
        shard.write_bytes(a_split(number))
        paths["later shards missing" if number == 0 else "second shard"] = shard
    (folder / "alone").mkdir()
    lonely = folder / "alone" / "split-00002-of-00003.gguf"
    lonely.write_bytes(a_split(1))
    paths["first shard missing"] = lonely
    return paths


SETTINGS: dict[str, dict[str, Any]] = {
    "unknown keyword": {"n_lanes": 4},
    "cache of unknown unit": {"cache": "12 XB"},
    "cache in decimal unit": {"cache": "12 MB"},
    "cache negative": {"cache": -1},
    "cache true": {"cache": True},
    "cache false": {"cache": False},
    "cache NaN": {"cache": float("nan")},
    "cache fraction": {"cache": 0.5},
    "cache none": {"cache": None},
    "cache empty": {"cache": ""},
    "cache class": {"cache": LRU},
    "cache policy without budget": {"cache": LRU()},
    "cache policy with a bad budget": {"cache": LRU("2 XB")},
    "overlap hook": {"overlap": "hook"},
    "overlap auto": {"overlap": "auto"},
    "overlap bogus": {"overlap": "bogus"},
    "dense warm": {"dense": "warm"},
    "direct as text": {"direct": "yes"},
    "no lanes": {"io_lanes": 0},
    "lanes as float": {"io_lanes": 4.0},
    "no threads": {"n_threads": 0},
    "no context": {"n_ctx": 0},
    "no micro-batch": {"n_ubatch": 0},
    "more used than experts": {"n_expert_used": 33},
    "none used": {"n_expert_used": 0},
    "floor of unknown unit": {"cache_floor": "1 XB"},
    "ceiling negative": {"cache": "auto", "cache_ceiling": -5},
    "path none": {"path": None},
    "path number": {"path": 3.5},
    "path with NUL": {"path": "model\0.gguf"},
}

D = bl.routing.DropCold
RUNS: dict[str, Callable[[bl.Session], object]] = {
    "prompt empty": lambda s: s.generate(""),
    "prompt without ids": lambda s: s.generate(np.zeros(0, np.int32)),
    "prompt none": lambda s: s.generate(None),
    "prompt bytes": lambda s: s.generate(b"hello"),
    "prompt of floats": lambda s: s.generate(np.ones(3)),
    "prompt of two dims": lambda s: s.generate(np.ones((2, 2), np.int32)),
    "prompt id too large": lambda s: s.generate(np.array([1, 10**6])),
    "prompt id negative": lambda s: s.generate(np.array([-1])),
    "prompt longer than the context": lambda s: s.generate(TEXT * 40),
    "prompt as long as the context": lambda s: s.generate(np.ones(256, np.int32), n_predict=1),
    "n_predict too large": lambda s: s.generate("x", n_predict=256),
    "n_predict zero": lambda s: s.generate("x", n_predict=0),
    "n_predict true": lambda s: s.generate("x", n_predict=True),
    "n_predict float": lambda s: s.generate("x", n_predict=2.5),
    "unknown run keyword": lambda s: s.generate("x", n_predit=3),
    "temperature NaN": lambda s: s.generate("x", temperature=float("nan")),
    "temperature negative": lambda s: s.generate("x", temperature=-0.1),
    "temperature infinite": lambda s: s.generate("x", temperature=float("inf")),
    "temperature text": lambda s: s.generate("x", temperature="hot"),
    "top_p zero": lambda s: s.generate("x", top_p=0),
    "top_p NaN": lambda s: s.generate("x", top_p=float("nan")),
    "min_p above one": lambda s: s.generate("x", min_p=1.5),
    "top_k negative": lambda s: s.generate("x", top_k=-1),
    "seed negative": lambda s: s.generate("x", seed=-1),
    "seed float": lambda s: s.generate("x", seed=1.0),
    "stop empty": lambda s: s.generate("x", stop=""),
    "stop of numbers": lambda s: s.generate("x", stop=[1]),
    "record bogus": lambda s: s.generate("x", record="everything"),
    "record none": lambda s: s.generate("x", record=None),
    "record an array": lambda s: s.generate("x", record=np.zeros(3)),
    "start hot": lambda s: s.generate("x", start="hot"),
    "save without a trace": lambda s: s.generate("x", record="off", save="x.nc"),
    "policy class": lambda s: s.generate("x", policy=D),
    "policy text": lambda s: s.generate("x", policy="DropCold(0.75)"),
    "policy that does nothing": lambda s: s.generate("x", policy=bl.routing.RoutingPolicy()),
    "policy out of range": lambda s: s.generate("x", policy=D(1.5)),
    "policy NaN": lambda s: s.generate("x", policy=D(float("nan"))),
    "policy keeps too many": lambda s: s.generate("x", policy=bl.routing.CachePrior(1, keep=5)),
    "policy uses too many": lambda s: s.generate("x", policy=bl.routing.FewerExperts(5)),
    "residency policy as routing": lambda s: s.generate("x", policy=LRU("1 MiB")),
    "score text too short": lambda s: s.score("x"),
    "score nothing": lambda s: s.score([]),
    "score empty text": lambda s: s.score(["", TEXT]),
    "score none": lambda s: s.score(None),
    "n_context zero": lambda s: s.score(TEXT, n_context=0),
    "n_context too large": lambda s: s.score(TEXT, n_context=10**6),
}
WITHOUT_CACHE: dict[str, Callable[[bl.Session], object]] = {
    "drop cold without a cache": lambda s: s.generate("x", policy=D(0.5)),
    "cache prior without a cache": lambda s: s.generate("x", policy=bl.routing.CachePrior(0.5)),
}
CLOSED: dict[str, Callable[[bl.Session], object]] = {
    "closed generate": lambda s: s.generate("x"),
    "closed score": lambda s: s.score(TEXT),
    "closed tokenize": lambda s: s.tokenize("x"),
    "closed info": lambda s: s.info(),
}


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def attempt(name: str, call: Callable[[], object]) -> None:
    say(begins=name)
    before = resources()
    error: BaseException | None = None
    try:
        call()
    except Exception as raised:
        # Kept without its traceback, whose frames would keep everything alive.
        error = raised.with_traceback(None)
        error.__context__ = error.__cause__ = None
    say(
        name=name,
        kinds=[kind.__name__ for kind in type(error).__mro__],
        message=str(error),
        left=None if resources() == before else [before, resources()],
    )


def opened(path: Any = DEMO, **settings: Any) -> None:
    bl.Session(path, **({"cache": 2**21, "n_ctx": 256, "n_threads": 1} | settings)).close()


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    with open_demo() as session:  # what imports open stays open
        expected = witness(session)
        session.generate("x", n_predict=1)
    for name, path in model_files(folder.absolute()).items():
        attempt(f"model: {name}", lambda path=path: opened(path))
    for name, settings in SETTINGS.items():
        attempt(f"setting: {name}", lambda settings=settings: opened(**settings))
    with open_demo() as session:
        for name, run in RUNS.items():
            attempt(f"run: {name}", lambda run=run: run(session))
        say(usable=witness(session) == expected)
    with open_demo(cache=0) as session:
        for name, run in WITHOUT_CACHE.items():
            attempt(f"run: {name}", lambda run=run: run(session))
        say(usable=witness(session) == expected)
    for name, run in CLOSED.items():
        attempt(f"run: {name}", lambda run=run: run(session))
    say(written=sorted(str(p) for p in folder.rglob("*") if p.suffix in (".nc", ".journal")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
