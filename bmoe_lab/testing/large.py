"""Random models too large to be drawn value by value, for measurements of speed and memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tqdm import tqdm

from bmoe_lab.errors import SettingsError
from bmoe_lab.testing.blocks import Shape
from bmoe_lab.testing.gguf_file import write_gguf
from bmoe_lab.testing.layouts import KNOWN
from bmoe_lab.testing.weights import RowPool

__all__ = ["memory_model", "write_large_model"]


def write_large_model(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    n_layer: int = 16,
    n_embd: int = 2048,
    n_head: int = 32,
    n_head_kv: int = 4,
    head_dim: int = 128,
    n_expert: int = 128,
    n_used: int = 8,
    n_ff: int = 768,
    n_vocab: int = 32768,
    n_ctx: int = 40960,
    expert_types: tuple[str, ...] = ("Q4_K",),
    down_types: tuple[str, ...] = ("Q4_K", "Q6_K"),
    dense_type: str = "Q4_K",
    value_types: tuple[str, ...] = ("Q4_K", "Q6_K"),
    head_type: str = "Q6_K",
    router_gain: float = 1.0,
    router_spread: float = 0.7,
    progress: bool = False,
) -> Path:
    """Write a large random model with the shape of Qwen3-30B-A3B's layers.

    The defaults take 6 GB: 16 of the 48 layers, and a vocabulary of 32,768 in place of 151,936 so
    that the output matrix keeps its share of the work beside a third of the layers. Speed and
    bytes are those of a real model of that shape; the text means nothing.

    Parameters
    ----------
    path : path-like
        File to write (or replace). One stack is in memory at a time (165 MB by default).
    seed : int, default 0
        Same arguments and same library, same bytes.
    n_layer, n_embd, n_head, n_head_kv, head_dim, n_expert, n_used, n_ff : int
        Sizes as in the model's ``config.json``; `n_ff` is an expert's width.
    n_vocab, n_ctx : int
        Tokens (256 bytes, some merges, fillers); longest context.
    expert_types, down_types, dense_type, value_types, head_type
        ggml types of gate and up, of down, of attention and embeddings, of the attention's values,
        of the output matrix. Tuples are repeated over the layers. The defaults are close to
        llama.cpp's Q4_K_M.
    router_gain : float, default 1.0
        Standard deviation of the router's scores.
    router_spread : float, default 0.7
        Standard deviation of the logarithm of the gains of the router's rows. An expert whose row
        has a large gain wins more often, whatever the token. Measured with 64 uniformly drawn
        tokens: consecutive ones share 0.19 (first layer) to 0.35 (last) of their experts, against
        0.06 with equal gains, and a layer uses 55 to 72 of its 128 experts.
    progress : bool, default False
        Show a progress bar.

    Returns
    -------
    Path

    Raises
    ------
    SettingsError
        If the file system has no room for the file, or a size is not a whole number of a type's
        blocks.
    """
    # The rows of a pool are distinct within a matrix, so it must cover the tallest one.
    tallest = max(n_head * head_dim, n_embd, n_ff)
    shape = Shape(
        seed=seed,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_vocab=n_vocab,
        n_ctx=n_ctx,
        n_expert=n_expert,
        n_used=n_used,
        n_ff_exp=n_ff,
        n_ff=n_ff * n_used,
        expert_types=expert_types,
        down_types=down_types,
        dense_type=dense_type,
        value_types=value_types,
        head_type=head_type,
        rope_base=1e6,
        router_gain=router_gain,
        router_spread=router_spread,
        pool=RowPool(seed, 1 << max(10, (tallest - 1).bit_length())),
    )
    layout = KNOWN["qwen3moe"]
    tensors = layout.tensors(shape)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    free = shutil.disk_usage(Path(path).parent).free
    if free < n_bytes + (1 << 20):
        raise SettingsError(
            f"path must have room for {n_bytes:,} bytes; got {free:,} free at "
            f"{os.fspath(path)!r}. Choose another folder or fewer layers."
        )
    with tqdm(
        total=n_bytes, unit="B", unit_scale=True, desc=Path(path).name, disable=not progress
    ) as bar:
        return write_gguf(path, layout.header(shape), tensors, progress=bar.update)


def memory_model(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    n_layer: int = 4,
    n_expert: int = 64,
    n_used: int = 4,
) -> Path:
    """Write a model that is nearly all experts, 2 MiB each, in seconds.

    By default 536 MiB of experts beside 10 MiB of other weights, so that what a stream keeps in
    memory stands out.

    Parameters
    ----------
    path : path-like
        File to write (or replace).
    seed : int, default 0
        Same arguments and same library, same bytes.
    n_layer, n_expert, n_used : int
        Sizes; each expert of each layer takes 2,193,408 bytes.

    Returns
    -------
    Path

    Raises
    ------
    SettingsError
        If the file system has no room for the file.
    """
    return write_large_model(
        path,
        seed=seed,
        n_layer=n_layer,
        n_embd=512,
        n_head=8,
        n_head_kv=2,
        head_dim=64,
        n_expert=n_expert,
        n_used=n_used,
        n_ff=1344,
        n_vocab=512,
        n_ctx=1024,
        expert_types=("Q8_0",),
        down_types=("Q8_0",),
        dense_type="Q8_0",
        value_types=("Q8_0",),
        head_type="Q8_0",
        router_spread=0.0,
    )
