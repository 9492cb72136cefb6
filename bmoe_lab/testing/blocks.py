"""The parts that llama.cpp's architectures are made of, as lists of named tensors.

A part says names, shapes and the spread of its random values; it knows no architecture.
:mod:`bmoe_lab.testing.layouts` puts parts together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bmoe_lab.seam.quantize import quantize
from bmoe_lab.testing.gguf_file import Tensor
from bmoe_lab.testing.vocabulary import END_OF_TEXT, N_SMALLEST
from bmoe_lab.testing.weights import Bytes, RowPool, generator, normal_rows

__all__ = [
    "Shape",
    "attention",
    "dense_ffn",
    "embeddings",
    "head",
    "matrix",
    "norm",
    "routed_experts",
    "router",
    "selection_bias",
    "shared_expert",
    "vector",
]


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model.

    Attributes
    ----------
    seed : int
        Every tensor draws from its own stream, made of the seed and its name.
    n_layer, n_embd, n_head, n_head_kv, head_dim, n_vocab, n_ctx : int
    n_expert, n_used, n_ff_exp : int
        Experts of a layer, experts per token, width of an expert.
    n_ff : int
        Width of a dense feed-forward block.
    n_ff_shared : int
        Width of a shared expert.
    n_dense : int
        Leading blocks without experts.
    expert_types, down_types : tuple of str
        ggml types of the gate and up, and of the down projections, repeated over the blocks.
    dense_type : str
        ggml type of every other matrix but the router, which is F32 as in real files.
    value_types : tuple of str
        ggml types of the attention's value projections, repeated; empty = `dense_type`.
    head_type : str, optional
        ggml type of the output matrix.
    rope_base : float
    router_gain : float
        Standard deviation of the router's scores.
    router_spread : float
        Standard deviation of the logarithm of the gains of the router's rows; 0 = equal gains.
        Experts with a large gain win more often, so consecutive tokens share experts.
    pool : RowPool, optional
        Where matrices take their rows from; without one they are drawn afresh.
    """

    seed: int = 0
    n_layer: int = 4
    n_embd: int = 128
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_vocab: int = N_SMALLEST
    n_ctx: int = 1024
    n_expert: int = 8
    n_used: int = 2
    n_ff_exp: int = 128
    n_ff: int = 256
    n_ff_shared: int = 128
    n_dense: int = 0
    expert_types: tuple[str, ...] = ("F16",)
    down_types: tuple[str, ...] = ("F16",)
    dense_type: str = "F16"
    value_types: tuple[str, ...] = ()
    head_type: str | None = None
    rope_base: float = 10000.0
    router_gain: float = 2.0
    router_spread: float = 0.0
    pool: RowPool | None = None

    def gate_up_type(self, block: int) -> str:
        """Return the ggml type of the gate and up projections in `block`."""
        return self.expert_types[block % len(self.expert_types)]

    def down_type(self, block: int) -> str:
        """Return the ggml type of the down projections in `block`."""
        return self.down_types[block % len(self.down_types)]

    def value_type(self, block: int) -> str:
        """Return the ggml type of the attention's value projection in `block`."""
        types = self.value_types or (self.dense_type,)
        return types[block % len(types)]


def matrix(
    shape: Shape, name: str, sizes: tuple[int, ...], kind: str | None = None, *, gain: float = 1.0
) -> Tensor:
    """Return a normal random matrix that keeps the spread of its input, times `gain`."""
    spread = gain / math.sqrt(sizes[-1])
    kind = kind or shape.dense_type

    def contents() -> Bytes:
        if shape.pool is not None:
            return shape.pool.take(name, sizes, kind, spread)
        return normal_rows(generator(shape.seed, name), sizes, kind, spread)

    return Tensor(name, sizes, kind, contents)


def vector(shape: Shape, name: str, n: int, *, mean: float = 0.0, spread: float = 0.1) -> Tensor:
    """Return a normal random vector in float32."""

    def contents() -> Bytes:
        values = generator(shape.seed, name).standard_normal(n, np.float32)
        return quantize(np.float32(mean) + values * np.float32(spread), "F32")

    return Tensor(name, (n,), "F32", contents)


def norm(shape: Shape, name: str, n: int | None = None) -> Tensor:
    """Return the weights of a norm, all near 1."""
    return vector(shape, name, n or shape.n_embd, mean=1.0)


def embeddings(shape: Shape) -> Tensor:
    """Return token embeddings of spread 1; every token has its own, whatever the pool."""
    name, sizes, kind = "token_embd.weight", (shape.n_vocab, shape.n_embd), shape.dense_type
    return Tensor(
        name, sizes, kind, lambda: normal_rows(generator(shape.seed, name), sizes, kind, 1.0)
    )


def head(shape: Shape) -> Iterator[Tensor]:
    """Yield the last norm and the output matrix.

    The row of the end-of-text token is zero: its logit is 0, which the largest of a few hundred
    random ones always exceeds, so greedy text never ends by itself.
    """
    yield norm(shape, "output_norm.weight")
    name, sizes = "output.weight", (shape.n_vocab, shape.n_embd)
    kind = shape.head_type or shape.dense_type

    def contents() -> Bytes:
        spread = 3.0 / math.sqrt(shape.n_embd)
        rows = normal_rows(generator(shape.seed, name), sizes, kind, spread)
        rows[END_OF_TEXT] = quantize(np.zeros(shape.n_embd, np.float32), kind)
        return rows

    yield Tensor(name, sizes, kind, contents)


def attention(
    shape: Shape, block: int, *, qk_norm: bool = False, bias: bool = False, sinks: bool = False
) -> Iterator[Tensor]:
    """Yield grouped-query attention with its norm before it."""
    prefix = f"blk.{block}"
    queries, keys = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    yield norm(shape, f"{prefix}.attn_norm.weight")
    # Sharp attention: an even one averages the tokens, and then all of them route alike.
    yield matrix(shape, f"{prefix}.attn_q.weight", (queries, shape.n_embd), gain=1.5)
    yield matrix(shape, f"{prefix}.attn_k.weight", (keys, shape.n_embd), gain=1.5)
    name = f"{prefix}.attn_v.weight"
    yield matrix(shape, name, (keys, shape.n_embd), shape.value_type(block))
    if bias:
        for part, size in (("q", queries), ("k", keys), ("v", keys)):
            yield vector(shape, f"{prefix}.attn_{part}.bias", size)
    if qk_norm:
        yield norm(shape, f"{prefix}.attn_q_norm.weight", shape.head_dim)
        yield norm(shape, f"{prefix}.attn_k_norm.weight", shape.head_dim)
    if sinks:
        yield vector(shape, f"{prefix}.attn_sinks.weight", shape.n_head)
    yield matrix(shape, f"{prefix}.attn_output.weight", (shape.n_embd, queries))


def dense_ffn(shape: Shape, block: int) -> Iterator[Tensor]:
    """Yield a feed-forward block without experts."""
    prefix = f"blk.{block}"
    yield matrix(shape, f"{prefix}.ffn_gate.weight", (shape.n_ff, shape.n_embd))
    yield matrix(shape, f"{prefix}.ffn_up.weight", (shape.n_ff, shape.n_embd))
    yield matrix(shape, f"{prefix}.ffn_down.weight", (shape.n_embd, shape.n_ff))


def shared_expert(shape: Shape, block: int, *, gated: bool = False) -> Iterator[Tensor]:
    """Yield the expert that every token passes through."""
    prefix = f"blk.{block}"
    if gated:
        name = f"{prefix}.ffn_gate_inp_shexp.weight"
        yield vector(shape, name, shape.n_embd, spread=1 / math.sqrt(shape.n_embd))
    yield matrix(shape, f"{prefix}.ffn_gate_shexp.weight", (shape.n_ff_shared, shape.n_embd))
    yield matrix(shape, f"{prefix}.ffn_up_shexp.weight", (shape.n_ff_shared, shape.n_embd))
    yield matrix(shape, f"{prefix}.ffn_down_shexp.weight", (shape.n_embd, shape.n_ff_shared))


def router(shape: Shape, block: int) -> Tensor:
    """Return the router of a block, its rows with the unequal gains that `router_spread` asks."""
    name = f"blk.{block}.ffn_gate_inp.weight"
    sizes = (shape.n_expert, shape.n_embd)

    def contents() -> Bytes:
        random = generator(shape.seed, name)
        values = random.standard_normal(sizes, np.float32)
        gains = np.exp(shape.router_spread * random.standard_normal((shape.n_expert, 1)))
        # The spread of all scores together stays router_gain, whatever the rows' share of it.
        gains *= shape.router_gain / np.sqrt(shape.n_embd * np.mean(gains**2))
        return quantize(values * gains.astype(np.float32), "F32")

    return Tensor(name, sizes, "F32", contents)


def selection_bias(shape: Shape, block: int, suffix: str = ".bias") -> Tensor:
    """Return the bias that is added to the router's scores for the choice, not for the weights.

    Some architectures read it under a name without the suffix.
    """
    return vector(shape, f"blk.{block}.exp_probs_b{suffix}", shape.n_expert, spread=0.1)


def routed_experts(shape: Shape, block: int, *, fused: bool = False) -> Iterator[Tensor]:
    """Yield the expert stacks of a block, slowest axis = expert."""
    prefix, n_expert, n_ff = f"blk.{block}", shape.n_expert, shape.n_ff_exp
    wide = shape.gate_up_type(block)
    if fused:
        name = f"{prefix}.ffn_gate_up_exps.weight"
        yield matrix(shape, name, (n_expert, 2 * n_ff, shape.n_embd), wide)
    else:
        for part in ("gate", "up"):
            name = f"{prefix}.ffn_{part}_exps.weight"
            yield matrix(shape, name, (n_expert, n_ff, shape.n_embd), wide)
    name = f"{prefix}.ffn_down_exps.weight"
    yield matrix(shape, name, (n_expert, shape.n_embd, n_ff), shape.down_type(block), gain=2.0)
