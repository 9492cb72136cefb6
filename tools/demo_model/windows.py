"""Cut held-out text into windows for the measurements.

The documents of a domain are joined in the order of the file, each preceded by the end-of-text
id, and cut into consecutive windows; what is left at the end is not used. A window is fed after
an end-of-text id of its own, as in training, so each of its tokens is predicted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizer import END_OF_TEXT_ID, encode_stream, read_documents
from tokenizers import Tokenizer


@dataclass(frozen=True)
class Domain:
    """The windows of one domain, (n, length), and the bytes that a token stands for on average."""

    name: str
    targets: np.ndarray
    bytes_per_token: float

    @property
    def inputs(self) -> np.ndarray:
        """Return what is fed: the targets one place later."""
        inputs = np.roll(self.targets, 1, axis=1)
        inputs[:, 0] = END_OF_TEXT_ID
        return inputs


def load(heldout: Path, tokenizer: Path, length: int, most: int | None = None) -> list[Domain]:
    """Return the windows of every domain, at most `most` per domain."""
    documents = read_documents(heldout)
    encoder = Tokenizer.from_file(str(tokenizer))
    domains = []
    for name in dict.fromkeys(each["domain"] for each in documents):
        mine = [each for each in documents if each["domain"] == name]
        ids = encode_stream(encoder, mine).astype(np.int64)
        count = min(len(ids) // length, most or len(ids))
        bytes_per_token = sum(len(each["text"].encode()) for each in mine) / len(ids)
        domains.append(Domain(name, ids[: count * length].reshape(count, length), bytes_per_token))
    return domains
