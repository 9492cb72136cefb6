"""One entry per layout of a MoE model: which architecture, which metadata, which parts.

A new architecture is a function that yields the tensors of one block and a :class:`Layout`.
Source of names and shapes: ``src/models/<arch>.cpp`` of the llama.cpp that pyproject.toml pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bmoe_lab.testing import blocks
from bmoe_lab.testing.blocks import Shape
from bmoe_lab.testing.gguf_file import Tensor
from bmoe_lab.testing.vocabulary import byte_vocabulary

__all__ = ["KNOWN", "Layout"]

# enum llama_expert_gating_func_type
_SIGMOID = 2
# A sigmoid of wide scores is 0 or 1 for most experts, and the bias alone would choose.
_SIGMOID_SIZES: Mapping[str, Any] = MappingProxyType({"router_gain": 1.0})


@dataclass(frozen=True)
class Layout:
    """How the tensors of a model lie.

    Attributes
    ----------
    description : str
        One line.
    arch : str
        ``general.architecture``.
    block : callable
        ``block(shape, index)`` yields the tensors of one block.
    metadata : callable
        ``metadata(shape)`` returns what the architecture needs beside the common keys; without
        the ``<arch>.`` prefix.
    sizes : mapping
        Fields of :class:`~bmoe_lab.testing.blocks.Shape` that differ from the defaults.
    routed : bool
        Whether there are experts at all.
    """

    description: str
    arch: str
    block: Callable[[Shape, int], Iterator[Tensor]]
    metadata: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    sizes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    routed: bool = True

    def header(self, shape: Shape) -> dict[str, Any]:
        """Return the full metadata of a model of this layout."""
        own: dict[str, Any] = {
            "block_count": shape.n_layer,
            "context_length": shape.n_ctx,
            "embedding_length": shape.n_embd,
            "feed_forward_length": shape.n_ff,
            "vocab_size": shape.n_vocab,
            "attention.head_count": shape.n_head,
            "attention.head_count_kv": shape.n_head_kv,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": shape.head_dim,
            "rope.freq_base": shape.rope_base,
        }
        if self.routed:
            own |= {
                "expert_count": shape.n_expert,
                "expert_used_count": shape.n_used,
                "expert_feed_forward_length": shape.n_ff_exp,
            }
        own |= self.metadata(shape)
        return {
            "general.architecture": self.arch,
            "general.name": f"random {self.arch}",
            "general.description": "Random weights for tests; its text means nothing.",
            "general.quantization_version": 2,
            **{f"{self.arch}.{key}": value for key, value in own.items()},
            **byte_vocabulary(shape.n_vocab),
        }

    def tensors(self, shape: Shape) -> list[Tensor]:
        """Return every tensor of a model of this layout, in file order."""
        inner = [tensor for index in range(shape.n_layer) for tensor in self.block(shape, index)]
        return [blocks.embeddings(shape), *inner, *blocks.head(shape)]


def _qwen3(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index, qk_norm=True)
    yield blocks.norm(shape, f"blk.{index}.ffn_norm.weight")
    yield from blocks.dense_ffn(shape, index)


def _qwen3moe(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index, qk_norm=True)
    yield blocks.norm(shape, f"blk.{index}.ffn_norm.weight")
    yield blocks.router(shape, index)
    yield from blocks.routed_experts(shape, index)


def _granite_swa(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index, sinks=True)
    yield blocks.norm(shape, f"blk.{index}.ffn_norm.weight")
    yield blocks.router(shape, index)
    yield from blocks.routed_experts(shape, index, fused=True)


def _granite_swa_metadata(shape: Shape) -> dict[str, Any]:
    return {
        # Here an expert's width is the common feed-forward length.
        "feed_forward_length": shape.n_ff_exp,
        "logit_scale": 1.0,
        "attention.sliding_window": 64,
        "attention.sliding_window_pattern": [index % 2 == 1 for index in range(shape.n_layer)],
    }


def _qwen2moe(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index, bias=True)
    yield blocks.norm(shape, f"blk.{index}.ffn_norm.weight")
    yield blocks.router(shape, index)
    yield from blocks.routed_experts(shape, index)
    yield from blocks.shared_expert(shape, index, gated=True)


def _deepseek(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index)
    yield blocks.norm(shape, f"blk.{index}.ffn_norm.weight")
    if index < shape.n_dense:
        yield from blocks.dense_ffn(shape, index)
        return
    yield blocks.router(shape, index)
    yield from blocks.routed_experts(shape, index)
    yield from blocks.shared_expert(shape, index)


def _deepseek_metadata(shape: Shape) -> dict[str, Any]:
    # The shared expert is as wide as `expert_shared_count` routed ones.
    return {
        "leading_dense_block_count": shape.n_dense,
        "expert_shared_count": shape.n_ff_shared // shape.n_ff_exp,
    }


def _glm4moe(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index, bias=True)
    yield blocks.norm(shape, f"blk.{index}.post_attention_norm.weight")
    if index < shape.n_dense:
        yield from blocks.dense_ffn(shape, index)
        return
    yield blocks.router(shape, index)
    yield blocks.selection_bias(shape, index)
    yield from blocks.routed_experts(shape, index)
    yield from blocks.shared_expert(shape, index)


def _glm4moe_metadata(shape: Shape) -> dict[str, Any]:
    return {
        **_deepseek_metadata(shape),
        "expert_gating_func": _SIGMOID,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    }


def _hy_v3(shape: Shape, index: int) -> Iterator[Tensor]:
    yield from blocks.attention(shape, index, qk_norm=True)
    yield blocks.norm(shape, f"blk.{index}.ffn_norm.weight")
    if index < shape.n_dense:
        yield from blocks.dense_ffn(shape, index)
        return
    yield blocks.router(shape, index)
    yield blocks.selection_bias(shape, index, suffix="")
    yield from blocks.routed_experts(shape, index, fused=True)
    yield from blocks.shared_expert(shape, index)


def _hy_v3_metadata(shape: Shape) -> dict[str, Any]:
    return {
        "expert_shared_feed_forward_length": shape.n_ff_shared,
        "expert_gating_func": _SIGMOID,
        "expert_weights_norm": True,
    }


KNOWN: Mapping[str, Layout] = MappingProxyType(
    {
        "qwen3moe": Layout("split gate, up and down stacks, nothing else", "qwen3moe", _qwen3moe),
        "fused": Layout(
            "gate and up fused in one stack; sliding windows, attention sinks (granite_swa)",
            "granite_swa",
            _granite_swa,
            _granite_swa_metadata,
        ),
        "shared": Layout(
            "a gated shared expert beside the routed ones, weights not normalised (qwen2moe)",
            "qwen2moe",
            _qwen2moe,
            lambda shape: {"expert_shared_feed_forward_length": shape.n_ff_shared},
        ),
        "leading_dense": Layout(
            "the first block has no experts (deepseek)",
            "deepseek",
            _deepseek,
            _deepseek_metadata,
            {"n_dense": 1},
        ),
        "biased": Layout(
            "sigmoid scores, a bias for the selection only, scaled weights (glm4moe)",
            "glm4moe",
            _glm4moe,
            _glm4moe_metadata,
            _SIGMOID_SIZES,
        ),
        "combined": Layout(
            "fused, biased, shared expert, leading dense block, last layer routes all (hy_v3)",
            "hy_v3",
            _hy_v3,
            _hy_v3_metadata,
            {**_SIGMOID_SIZES, "n_dense": 1},
        ),
        "wide": Layout(
            "qwen3moe with slices that end inside pages, types that differ in each block",
            "qwen3moe",
            _qwen3moe,
            sizes={
                "n_embd": 96,
                "n_head": 3,
                "n_head_kv": 1,
                "n_ff_exp": 160,
                "expert_types": ("Q8_0", "Q4_0", "F16"),
                "down_types": ("F16", "Q8_0", "Q4_0"),
            },
        ),
        "narrow": Layout(
            "qwen3moe with experts smaller than a page, so that several share one",
            "qwen3moe",
            _qwen3moe,
            sizes={
                "n_embd": 64,
                "n_head": 2,
                "n_head_kv": 1,
                "n_ff_exp": 32,
                "expert_types": ("Q8_0",),
                "down_types": ("Q4_0",),
            },
        ),
        "dense": Layout(
            "no experts at all (qwen3): what streaming must refuse", "qwen3", _qwen3, routed=False
        ),
    }
)
