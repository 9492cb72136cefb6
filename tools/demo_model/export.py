"""Write the trained weights as a GGUF file of architecture ``qwen3moe``.

Experts become Q8_0, attention and embeddings F16, norms and routers F32. The file depends on
its inputs alone (no time stamp), so the same weights give the same SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from model import Config
from tokenizer import END_OF_TEXT_ID

ARCHITECTURE = "qwen3moe"
NAME = "bmoe_lab demo MoE 9M"
LICENCE = "apache-2.0"
DESCRIPTION = (
    "A demonstration Mixture-of-Experts model (6 layers, 32 experts, 4 used per token) trained "
    "from scratch on public-domain and PSF-licensed texts. It imitates five styles and knows "
    "nothing. Made for studying expert routing and streaming."
)
# The longest window trained on. Windows of 1024 work, at a perplexity up to 3 % higher than
# that of windows of 512: MODEL_CARD.md.
CONTEXT_LENGTH = 512

F32, F16, Q8_0 = (
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.Q8_0,
)


def add_metadata(writer: gguf.GGUFWriter, config: Config) -> None:
    """Describe the model and its shape."""
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license(LICENCE)
    writer.add_size_label("9M")
    writer.add_languages(["en", "es"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(config.embedding_length)
    writer.add_block_count(config.block_count)
    # llama.cpp wants this key, but a model without dense layers does not use it.
    writer.add_feed_forward_length(config.expert_feed_forward_length * config.expert_used_count)
    writer.add_expert_feed_forward_length(config.expert_feed_forward_length)
    writer.add_expert_count(config.expert_count)
    writer.add_expert_used_count(config.expert_used_count)
    writer.add_head_count(config.head_count)
    writer.add_head_count_kv(1)
    # The graph asserts that these three are equal; the default is width / heads.
    writer.add_key_length(config.head_length)
    writer.add_value_length(config.head_length)
    writer.add_rope_dimension_count(config.head_length)
    writer.add_rope_freq_base(config.rope_freq_base)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    """Copy the vocabulary and merges of a ``tokenizer.json``."""
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    # Without this the end-of-text token would be split like ordinary text, and printed.
    kinds[END_OF_TEXT_ID] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(END_OF_TEXT_ID)
    writer.add_eos_token_id(END_OF_TEXT_ID)
    writer.add_pad_token_id(END_OF_TEXT_ID)
    writer.add_add_bos_token(True)


def tensors(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, object]]:
    """Yield GGUF name, float32 values and stored type of every tensor."""
    yield "token_embd.weight", weights["embedding"], F16
    # Written although it might be tied: if absent, llama.cpp silently uses token_embd instead.
    yield "output.weight", weights["head"], F16
    yield "output_norm.weight", weights["norm.weight"], F32
    n_block = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    for index in range(n_block):
        part = {
            name.removeprefix(f"blocks.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{index}.")
        }
        gate, up = np.split(part["moe.gate_up"], 2, axis=1)
        block = {
            "attn_norm": (part["attention_norm.weight"], F32),
            "attn_q": (part["attention.q"], F16),
            "attn_k": (part["attention.k"], F16),
            "attn_v": (part["attention.v"], F16),
            "attn_output": (part["attention.out"], F16),
            "attn_q_norm": (part["attention.q_norm.weight"], F32),
            "attn_k_norm": (part["attention.k_norm.weight"], F32),
            "ffn_norm": (part["moe_norm.weight"], F32),
            "ffn_gate_inp": (part["moe.router"], F32),
            "ffn_gate_exps": (gate, Q8_0),
            "ffn_up_exps": (up, Q8_0),
            "ffn_down_exps": (part["moe.down"], Q8_0),
        }
        for name, (values, kind) in block.items():
            yield f"blk.{index}.{name}.weight", values, kind


def export(weights: dict[str, np.ndarray], tokenizer: dict, path: Path) -> None:
    """Write the model file."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    add_metadata(writer, Config())
    add_tokenizer(writer, tokenizer)
    for name, values, kind in tensors(weights):
        stored = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Export and print the size and checksum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="model.npz of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    options = parser.parse_args()

    tokenizer = json.loads(options.tokenizer.read_text(encoding="utf-8"))
    with np.load(options.weights) as archive:
        export(dict(archive), tokenizer, options.out)
    contents = options.out.read_bytes()
    print(f"{hashlib.sha256(contents).hexdigest()}  {options.out.name}  {len(contents)} bytes")


if __name__ == "__main__":
    main()
