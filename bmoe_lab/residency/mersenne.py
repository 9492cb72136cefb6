"""CPython's random numbers in compiled code: the same words, so the same draws.

The state is that of ``random.Random(seed).getstate()``: 624 words of 32 bits and the index of the
next one, as int64. Generator: Matsumoto and Nishimura 1998, MT19937; the draw below a bound is
that of ``random.Random.choice`` in CPython 3.11.
"""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import numpy.typing as npt

from bmoe_lab.kernels import compiled

__all__ = ["N_WORDS", "draw_below", "seeded"]

IntArray = npt.NDArray[np.int64]

#: Length of the state.
N_WORDS: Final = 625

_N = 624
_M = 397
_INDEX = 624  # cell of the state: words used up


def seeded(seed: int) -> IntArray:
    """Return the state of ``random.Random(seed)``, int64 of shape (625,)."""
    words: tuple[int, ...] = random.Random(seed).getstate()[1]
    return np.array(words, dtype=np.int64)


@compiled
def _refill(words: IntArray) -> None:
    for i in range(_N):
        mixed = (words[i] & 0x80000000) | (words[(i + 1) % _N] & 0x7FFFFFFF)
        word = words[(i + _M) % _N] ^ (mixed >> 1)
        if mixed & 1:
            word ^= 0x9908B0DF
        words[i] = word
    words[_INDEX] = 0


@compiled
def _next_word(words: IntArray) -> int:
    if words[_INDEX] >= _N:
        _refill(words)
    word = words[words[_INDEX]]
    words[_INDEX] += 1
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    word ^= word >> 18
    return word  # type: ignore[no-any-return]


@compiled
def draw_below(words: IntArray, n: int) -> int:
    """Return a uniform integer in [0, n), for n from 1 to 2**32 - 1: as many bits as n has."""
    n_bit = 0
    while n >> n_bit:
        n_bit += 1
    drawn = _next_word(words) >> (32 - n_bit)
    while drawn >= n:
        drawn = _next_word(words) >> (32 - n_bit)
    return drawn
