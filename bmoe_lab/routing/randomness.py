"""Random numbers that depend on where they are used, not on when.

A control must make the same choices whether tokens come one by one or in a batch, live or in
replay. So each number is a hash of (seed, layer, position, slot, purpose) and there is no
generator whose order of calls could matter.
"""

from __future__ import annotations

import numpy as np

from bmoe_lab.kernels import compiled

__all__ = ["mix", "uniform"]

_U64 = np.uint64
_GAMMA = _U64(0x9E3779B97F4A7C15)
_M1 = _U64(0xBF58476D1CE4E5B9)
_M2 = _U64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = _U64(30), _U64(27), _U64(31), _U64(11)


@compiled
def mix(z: np.uint64) -> np.uint64:
    """Return one step of splitmix64 from state `z`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014; constants
    of its variant 13 by Stafford.
    """
    z = z + _GAMMA
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@compiled
def uniform(seed: int, layer: int, position: int, slot: int, purpose: int) -> float:
    """Return a number in [0, 1) that is a function of its arguments, with 53 random bits.

    Parameters
    ----------
    seed, layer, position, slot : int
        Where the number is used.
    purpose : int
        Tells several numbers for the same slot apart.

    Examples
    --------
    >>> uniform(0, 1, 2, 3, 0) == uniform(0, 1, 2, 3, 0)
    True
    >>> 0 <= uniform(0, 1, 2, 3, 1) < 1
    True
    """
    h = mix(_U64(seed))
    h = mix(h ^ _U64(layer))
    h = mix(h ^ _U64(position))
    h = mix(h ^ _U64(slot))
    h = mix(h ^ _U64(purpose))
    return (h >> _S11) * (1.0 / 9007199254740992.0)
