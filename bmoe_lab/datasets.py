"""The demo model and the held-out texts that ship with the package.

Both files lie in ``bmoe_lab/data`` and are described in ``MODEL_CARD.md`` beside them: where
the texts come from, under which licence, and what the model can and cannot do. Nothing is
downloaded. Each file is compared with its SHA-256 the first time it is asked for, because a
damaged model does not fail: it answers with other, plausible logits.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bmoe_lab.errors import DatasetError, unknown_name

__all__ = ["DOMAINS", "Document", "demo_model", "heldout"]

DOMAINS = ("kjv", "rv1909", "shakespeare", "python", "jargon")
"""The five kinds of text that the demo model was trained on, in the order of the model card."""

_DATA = Path(__file__).parent / "data"
_SHA256 = {
    "demo-moe.gguf": "5f251f8ea5482a6177cba3639934b95288f3cf7b2430702b6e5084c2c5a24eae",
    "heldout.jsonl": "c6625e48794c62c15c46e411b70c895f7e5a941200a6617abbee1358f94ed341",
}


@dataclass(frozen=True)
class Document:
    """One held-out text, which the demo model has not been trained on.

    Parameters
    ----------
    domain : str
        One of :data:`DOMAINS`.
    id : str
        Unique within the domain. ``"bible:1:4"`` is chapter 4 of book 1 in ``kjv`` and the
        same chapter in ``rv1909``: the two domains are translations of each other.
    text : str
        The whole document.

    Examples
    --------
    >>> Document(domain="python", id="sched.py", text="import time")
    Document(domain='python', id='sched.py', 11 characters)
    """

    domain: str
    id: str
    text: str

    def __repr__(self) -> str:
        """Show the length instead of the text, so that a list of documents can be read."""
        return f"Document(domain={self.domain!r}, id={self.id!r}, {len(self.text)} characters)"


def demo_model() -> Path:
    """Return the path of the bundled demo model, a Mixture-of-Experts model of 12 MB.

    The file is checked against its SHA-256 at the first call in a process. It has 6 layers of
    32 experts, of which 4 are used per token (``qwen3moe``), and 9.3 M parameters: it imitates
    the style of five kinds of text and knows nothing.

    Returns
    -------
    pathlib.Path
        A GGUF file that llama.cpp opens. Read-only by agreement: copy it before changing it.

    Raises
    ------
    DatasetError
        If the file is missing from the installation or is not the one that was shipped.

    See Also
    --------
    heldout : Texts for measuring the model.

    Examples
    --------
    >>> demo_model().name
    'demo-moe.gguf'
    """
    return _checked(_DATA / "demo-moe.gguf", _SHA256["demo-moe.gguf"])


def heldout(domain: str | None = None) -> list[Document]:
    """Return the bundled documents that the demo model has not seen.

    Within a domain the order is fixed but arbitrary (by a hash), so the first few documents
    are a sample of it. There are 163 documents, 305 kB, about 60 kB in each domain.

    Parameters
    ----------
    domain : {"kjv", "rv1909", "shakespeare", "python", "jargon"}, optional
        The domain to return; by default all of them, one domain after the other.

    Returns
    -------
    list of Document
        A new list; the documents are shared and immutable.

    Raises
    ------
    UnknownNameError
        If `domain` is not one of :data:`DOMAINS`.
    DatasetError
        If the file is missing from the installation or is not the one that was shipped.

    See Also
    --------
    demo_model : The model that these texts are held out from.

    Notes
    -----
    ``kjv`` and ``rv1909`` hold the same chapters under the same ids, neither seen in training:
    comparing them separates the language of a text from its topic.

    Examples
    --------
    >>> sorted({document.domain for document in heldout()})
    ['jargon', 'kjv', 'python', 'rv1909', 'shakespeare']
    >>> chapter = heldout("rv1909")[0]
    >>> chapter.id == heldout("kjv")[0].id
    True
    """
    if domain is not None and domain not in DOMAINS:
        raise unknown_name("domain", domain, DOMAINS)
    path = _checked(_DATA / "heldout.jsonl", _SHA256["heldout.jsonl"])
    return [each for each in _documents(path) if domain in (None, each.domain)]


@lru_cache(maxsize=1)
def _documents(path: Path) -> tuple[Document, ...]:
    """Read the documents of a JSON Lines file."""
    with path.open(encoding="utf-8") as lines:
        return tuple(Document(**json.loads(line)) for line in lines)


@lru_cache(maxsize=8)
def _checked(path: Path, sha256: str) -> Path:
    """Return `path` once its contents are known to be those that were shipped."""
    try:
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DatasetError(
            f"{path.name} must be readable beside the package; got {error}. Reinstall bmoe_lab."
        ) from error
    if actual != sha256:
        raise DatasetError(
            f"{path} must have SHA-256 {sha256}; got {actual}. "
            "The file is damaged or was replaced: reinstall bmoe_lab."
        )
    return path
