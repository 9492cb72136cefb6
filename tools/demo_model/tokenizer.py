"""Train the byte-level BPE tokenizer, in the form that llama.cpp calls ``qwen2``.

The pre-tokenizer is the part that has to agree: llama.cpp cuts text by a regular expression
that it knows by name and ignores what a tokenizer file says. The expression below is the one
it uses for ``tokenizer.ggml.pre = "qwen2"``; ``evaluate.py`` checks that both tokenize every
held-out document alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCAB_SIZE = 4096

QWEN2_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The smallest domain would otherwise get hardly any merges of its own.
REPEATS = {"jargon": 3}


def read_documents(path: Path) -> list[dict[str, str]]:
    """Read a JSON Lines file of documents."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def train_tokenizer(documents: list[dict[str, str]]) -> Tokenizer:
    """Return a tokenizer of `VOCAB_SIZE` entries: one control token, 256 bytes, merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_weighted(documents), trainer)
    return tokenizer


def encode_stream(tokenizer: Tokenizer, documents: list[dict[str, str]]) -> np.ndarray:
    """Return all documents as one array of ids, each document preceded by the end-of-text id."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([each["text"] for each in documents]):
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    return np.array(ids, dtype=np.uint16)


def _weighted(documents: list[dict[str, str]]) -> Iterator[str]:
    for each in documents:
        for _ in range(REPEATS.get(each["domain"], 1)):
            yield each["text"]


def main() -> None:
    """Train on ``train.jsonl``; write the tokenizer and the training ids beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory of corpus.py")
    options = parser.parse_args()

    documents = read_documents(options.corpus / "train.jsonl")
    tokenizer = train_tokenizer(documents)
    tokenizer.save(str(options.corpus / "tokenizer.json"))
    ids = encode_stream(tokenizer, documents)
    np.save(options.corpus / "train.npy", ids)
    print(f"{tokenizer.get_vocab_size()} entries, {len(ids)} training tokens")


if __name__ == "__main__":
    main()
