"""Small GGUF files for the tests of the streaming package."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

STRING, ARRAY, U16, U32, I32 = 8, 9, 2, 4, 5


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: object) -> bytes:
    formats = {U16: "<H", U32: "<I", I32: "<i"}
    raw = text(value) if kind == STRING else struct.pack(formats[kind], value)
    return text(name) + struct.pack("<I", kind) + raw


def tensor(name: str, ne: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(ne)}Q", len(ne), *ne)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    keys: list[bytes], tensors: list[bytes], data: bytes, *, version: int = 3, alignment: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(tensors)
    padding = -len(head) % alignment if tensors else 0
    return head + b"\0" * padding + data


ARCH = key("general.architecture", STRING, "qwen3moe")


def small() -> bytes:
    """One key, two F32 tensors of 40 and 24 bytes."""
    return gguf_bytes(
        [ARCH], [tensor("a", (10,), 0), tensor("b", (2, 3), 64)], bytes(range(64)) + bytes(24)
    )


def write_moe(
    path: Path, *, n_layer: int = 3, n_expert: int = 8, row: int = 50, seed: int = 0
) -> dict[str, np.ndarray]:
    """Write a model's worth of expert stacks with the gguf package; return them by name.

    An expert's slice takes ``row * 12 * 4`` bytes: not a multiple of a page, so neighbours share.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name("streaming test")
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(2)
    writer.add_context_length(64)
    writer.add_block_count(n_layer)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(2000)])
    rng = np.random.default_rng(seed)
    arrays = {"token_embd.weight": rng.normal(size=(20, 16))}
    for block in range(n_layer):
        arrays[f"blk.{block}.attn_norm.weight"] = rng.normal(size=16)
        for part in ("gate", "up", "down"):
            shape = (n_expert, 12, row) if part != "down" else (n_expert, row, 12)
            arrays[f"blk.{block}.ffn_{part}_exps.weight"] = rng.normal(size=shape)
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays
