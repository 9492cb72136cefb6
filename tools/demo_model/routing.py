"""Measure how the model routes, as llama.cpp computes it on held-out text.

For each layer: how even the load is, how much it depends on the domain, and how much one token's
experts resemble those of the token before it. All domains count alike, whatever their length.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import windows
from llama import Llama


def shares(chosen: np.ndarray, n_expert: int) -> np.ndarray:
    """Return the share of each expert per layer, (layer, expert); `chosen` is (layer, token, k)."""
    counts = [np.bincount(layer.ravel(), minlength=n_expert) for layer in chosen]
    return np.array(counts) / chosen[0].size


def entropy(share: np.ndarray) -> np.ndarray:
    """Return the entropy in bits over the last axis, with 0 log 0 = 0."""
    return -(share * np.log2(np.where(share > 0, share, 1.0))).sum(-1)


def jensen_shannon(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon distance: the square root of the divergence in bits."""
    middle = entropy((first + second) / 2) - (entropy(first) + entropy(second)) / 2
    return np.sqrt(np.maximum(middle, 0.0))


def overlap(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the mean Jaccard index of the expert sets of paired tokens, per layer."""
    common = (before[..., :, None] == after[..., None, :]).sum((-2, -1))
    return (common / (2 * before.shape[-1] - common)).mean(-1)


def capture(model: Llama, domain: windows.Domain) -> np.ndarray:
    """Return the experts of all windows, (window, layer, position, k)."""
    return np.stack([model.routing(each) for each in domain.inputs])


def flatten(chosen: np.ndarray) -> np.ndarray:
    """Join the windows of a capture: (layer, token, k)."""
    return np.concatenate(list(chosen), axis=1)


def report(chosen: dict[str, np.ndarray], n_expert: int) -> None:
    """Print one line per layer, then the distance of every pair of domains."""
    load = {name: shares(flatten(each), n_expert) for name, each in chosen.items()}
    total = np.mean(list(load.values()), axis=0)
    pairs = list(itertools.combinations(chosen, 2))
    distance = np.array([jensen_shannon(load[a], load[b]) for a, b in pairs])
    halves = [
        jensen_shannon(*(shares(flatten(part), n_expert) for part in (each[::2], each[1::2])))
        for each in chosen.values()
    ]
    generator = np.random.default_rng(0)
    consecutive, shuffled = [], []
    for each in chosen.values():
        within = [overlap(window[:, :-1], window[:, 1:]) for window in each]
        consecutive.append(np.mean(within, axis=0))
        tokens = flatten(each)
        tokens = tokens[:, generator.permutation(tokens.shape[1])]
        shuffled.append(overlap(tokens[:, :-1], tokens[:, 1:]))
    means = [np.mean(each, axis=0) for each in (halves, consecutive, shuffled)]
    even = np.log2(n_expert)
    inside = entropy(np.array(list(load.values()))) / even

    print("| layer | load entropy | largest / smallest share | entropy within a domain ", end="")
    print("| distance of domains (min-max) | of halves of a domain | overlap | shuffled |")
    print("|---" * 8 + "|")
    for layer in range(len(total)):
        apart = distance[:, layer]
        cells = (
            f"{layer}",
            f"{entropy(total[layer]) / even:.3f}",
            f"{total[layer].max():.3f} / {total[layer].min():.4f}",
            f"{inside[:, layer].min():.2f}-{inside[:, layer].max():.2f}",
            f"{apart.mean():.2f} ({apart.min():.2f}-{apart.max():.2f})",
            *(f"{mean[layer]:.3f}" for mean in means),
        )
        print("| " + " | ".join(cells) + " |")
    print(f"\nmeans over layers: load entropy {entropy(total).mean() / even:.3f}, ", end="")
    print(f"distance {distance.mean():.3f}, overlap {means[1].mean():.3f}, ", end="")
    print(f"shuffled {means[2].mean():.3f}\n\ndistance of each pair, mean over layers:")
    for value, (first, second) in sorted(zip(distance.mean(1), pairs, strict=True)):
        print(f"- {first}, {second}: {value:.2f}")


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file of export.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--heldout", type=Path, required=True, help="held-out documents")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="most windows per domain (default: all)")
    parser.add_argument("--n-expert", type=int, default=32)
    options = parser.parse_args()

    print("command: routing.py " + " ".join(sys.argv[1:]) + "\n")
    domains = windows.load(options.heldout, options.tokenizer, options.length, options.windows)
    model = Llama(options.model, n_ctx=options.length)
    report({each.name: capture(model, each) for each in domains}, options.n_expert)
    model.close()


if __name__ == "__main__":
    main()
