"""A byte-level vocabulary: every text can be tokenised, every token printed.

The tokenizer is llama.cpp's byte pair encoding with a handful of merges, so that some pieces are
longer than a character. There is no unknown token: what no merge covers stays bytes.
"""

from __future__ import annotations

from typing import Any

from bmoe_lab.errors import SettingsError

__all__ = ["END_OF_TEXT", "N_SMALLEST", "byte_vocabulary"]

#: Id of the only control token; begins and ends a text.
END_OF_TEXT = 0

# Built from left to right: "the" needs the merges "t h" and "th e". A leading blank is joined last.
_WORDS = ("the", "in", "and", "of", "to", "it", "was", "er", "on", "es", "th")


def _byte_symbols() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE vocabulary.

    Printable Latin-1 stands for itself, the others for U+0100 and on, in order: the convention of
    GPT-2's encoder (Radford et al. 2019), which llama.cpp's ``unicode_byte_to_utf8`` inverts.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, n_other = [], 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(0x100 + n_other))
            n_other += 1
    return symbols


def _merges(blank: str) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    for word in _WORDS:
        merges[blank, word] = None
    return list(merges)


_SYMBOLS = _byte_symbols()
_MERGES = _merges(_SYMBOLS[0x20])
#: Tokens that the vocabulary has at least: end of text, 256 bytes, one for each merge.
N_SMALLEST = 1 + len(_SYMBOLS) + len(_MERGES)


def byte_vocabulary(n_vocab: int = N_SMALLEST) -> dict[str, Any]:
    """Return the metadata of the tokenizer, filled up to `n_vocab` tokens.

    Parameters
    ----------
    n_vocab : int
        Tokens in all. The fillers print as `` w<number>``; no text becomes one, but a token id
        drawn at random may be one.

    Returns
    -------
    dict
        ``tokenizer.*`` keys of a GGUF file.

    Raises
    ------
    SettingsError
        If `n_vocab` is too small for the bytes.

    Examples
    --------
    >>> len(byte_vocabulary(512)["tokenizer.ggml.tokens"])
    512
    """
    if n_vocab < N_SMALLEST:
        raise SettingsError(f"n_vocab must be at least {N_SMALLEST}; got {n_vocab}.")
    tokens = ["<|endoftext|>", *_SYMBOLS, *(left + right for left, right in _MERGES)]
    blank = _SYMBOLS[0x20]
    tokens += [f"{blank}w{index}" for index in range(len(tokens), n_vocab)]
    normal, control = 1, 3  # enum llama_token_type
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [control] + [normal] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in _MERGES],
        "tokenizer.ggml.bos_token_id": END_OF_TEXT,
        "tokenizer.ggml.eos_token_id": END_OF_TEXT,
        "tokenizer.ggml.padding_token_id": END_OF_TEXT,
        "tokenizer.ggml.add_bos_token": True,
    }
