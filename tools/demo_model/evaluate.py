"""Measure perplexity per domain, in llama.cpp and in PyTorch, on the same windows.

Also checks that llama.cpp tokenizes every held-out document as the tokenizer does, and with
``--experts-used`` measures what using fewer or more experts per token costs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import windows
from llama import Llama
from model import Config, DemoModel
from tokenizer import read_documents
from tokenizers import Tokenizer


def losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the negative log probability of each target, in nats."""
    logits = logits.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_total = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return log_total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def llama_losses(model: Llama, domain: windows.Domain) -> np.ndarray:
    """Return the losses (window, position) in llama.cpp."""
    pairs = zip(domain.inputs, domain.targets, strict=True)
    return np.stack([losses(model.logits(inputs), targets) for inputs, targets in pairs])


def torch_losses(model: DemoModel, domain: windows.Domain) -> np.ndarray:
    """Return the losses (window, position) in PyTorch."""
    pairs = zip(domain.inputs, domain.targets, strict=True)
    return np.stack(
        [losses(model.logits(torch.from_numpy(i[None]))[0].numpy(), t) for i, t in pairs]
    )


def load_torch(weights: Path) -> DemoModel:
    """Return the float32 model that training saved."""
    model = DemoModel(Config())
    with np.load(weights) as archive:
        model.load_state_dict({name: torch.from_numpy(archive[name]) for name in archive})
    return model


def count_tokenizer_differences(model: Llama, tokenizer: Path, heldout: Path) -> tuple[int, int]:
    """Return how many documents llama.cpp tokenizes differently, and how many there are."""
    encoder = Tokenizer.from_file(str(tokenizer))
    texts = [each["text"] for each in read_documents(heldout)]
    return sum(model.tokenize(text) != encoder.encode(text).ids for text in texts), len(texts)


def report_perplexity(options: argparse.Namespace, domains: list[windows.Domain]) -> None:
    """Print one line per domain, and the loss by position over all domains."""
    llama = Llama(options.model, n_ctx=options.length)
    differing, total = count_tokenizer_differences(llama, options.tokenizer, options.heldout)
    print(f"tokenized differently by llama.cpp: {differing} of {total} documents\n")
    reference = load_torch(options.weights) if options.weights else None
    print("| domain | windows | bytes per token | llama.cpp | PyTorch | difference ", end="")
    print("| bits per byte |\n" + "|---" * 7 + "|")
    by_position = []
    for domain in domains:
        ours = llama_losses(llama, domain)
        by_position.append(ours.mean(0))
        perplexity = np.exp(ours.mean())
        bits = ours.mean() / np.log(2) / domain.bytes_per_token
        compared = "not measured | -"
        if reference:
            theirs = np.exp(torch_losses(reference, domain).mean())
            compared = f"{theirs:.2f} | {100 * (perplexity / theirs - 1):+.3f} %"
        print(
            f"| {domain.name} | {len(ours)} | {domain.bytes_per_token:.2f} | {perplexity:.2f} "
            f"| {compared} | {bits:.2f} |"
        )
    parts = np.mean(by_position, axis=0).reshape(8, -1).mean(1)
    print(f"\nmean loss by position, in {options.length // 8} tokens each, mean of domains:")
    print(" ".join(f"{part:.3f}" for part in parts))
    llama.close()


def report_experts_used(options: argparse.Namespace, domains: list[windows.Domain]) -> None:
    """Print the perplexity per domain for each number of experts per token."""
    print("| experts used | " + " | ".join(each.name for each in domains) + " |")
    print("|---" * (1 + len(domains)) + "|")
    for used in options.experts_used:
        llama = Llama(options.model, n_ctx=options.length, n_expert_used=used)
        values = [np.exp(llama_losses(llama, each).mean()) for each in domains]
        print(f"| {used} | " + " | ".join(f"{value:.2f}" for value in values) + " |", flush=True)
        llama.close()


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file of export.py")
    parser.add_argument("--weights", type=Path, help="model.npz of train.py, to compare with")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--heldout", type=Path, required=True, help="held-out documents")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="most windows per domain (default: all)")
    parser.add_argument("--experts-used", type=int, nargs="+", metavar="N")
    options = parser.parse_args()

    torch.set_num_threads(1)
    print("command: evaluate.py " + " ".join(sys.argv[1:]) + "\n")
    domains = windows.load(options.heldout, options.tokenizer, options.length, options.windows)
    if options.experts_used:
        report_experts_used(options, domains)
    else:
        report_perplexity(options, domains)


if __name__ == "__main__":
    main()
