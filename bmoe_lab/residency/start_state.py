"""The arrays of a warm start, checked before a kernel sees them.

They come from files. A kernel trusts its links, so a key out of range there would not be an error
but a crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.residency.loads import N_RESIDENT, RESIDENT_BYTES
from bmoe_lab.residency.state import KernelState

__all__ = ["make_resident", "read_integers", "read_queues", "read_real"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


def read_queues(
    state: KernelState, arrays: Mapping[str, Array], names: Sequence[str]
) -> list[IntArray]:
    """Return the queues called `names`, int64, no key out of range or named twice.

    Raises
    ------
    PolicyError
    """
    n_key = state.key_bytes.size
    taken = np.zeros(n_key, dtype=np.bool_)
    queues = []
    for name in names:
        keys = _integers(state, arrays, name)
        outside = (keys < 0) | (keys >= n_key)
        bad = outside.copy()
        bad[~outside] = taken[keys[~outside]]
        bad[~outside] |= _repeats(keys[~outside])
        for entry in np.flatnonzero(bad)[:1]:
            raise PolicyError(
                f"{name} of a start state must be distinct and lie in [0, {n_key}); "
                f"got {int(keys[entry])} at entry {entry}."
            )
        taken[keys] = True
        queues.append(keys)
    return queues


def _repeats(keys: IntArray) -> npt.NDArray[np.bool_]:
    repeat = np.ones(keys.size, dtype=np.bool_)
    repeat[np.unique(keys, return_index=True)[1]] = False
    return repeat


def read_integers(
    state: KernelState,
    arrays: Mapping[str, Array],
    name: str,
    *,
    size: int,
    least: int,
    most: int,
) -> IntArray:
    """Return `size` integers from `least` to `most`, int64.

    Raises
    ------
    PolicyError
    """
    values = _integers(state, arrays, name)
    if values.size != size:
        raise PolicyError(f"{name} of a start state must have {size} entries; got {values.size}.")
    for entry in np.flatnonzero((values < least) | (values > most))[:1]:
        raise PolicyError(
            f"{name} of a start state must lie in [{least}, {most}]; "
            f"got {int(values[entry])} at entry {entry}."
        )
    return values


def read_real(state: KernelState, arrays: Mapping[str, Array], name: str) -> float:
    """Return one finite number of at least 0.

    Raises
    ------
    PolicyError
    """
    values = _present(state, arrays, name)
    if values.dtype.kind not in "iuf" or values.shape != (1,):
        raise PolicyError(
            f"{name} of a start state must be one number; got {values.dtype} of shape "
            f"{values.shape}."
        )
    value = float(values[0])
    if not 0.0 <= value < float("inf"):
        raise PolicyError(f"{name} of a start state must be at least 0 and finite; got {value!r}.")
    return value


def make_resident(state: KernelState, keys: IntArray) -> None:
    """Count `keys`, none of which is resident, in."""
    state.resident[keys] = True
    state.header[RESIDENT_BYTES] += state.key_bytes[keys].sum()
    state.header[N_RESIDENT] += keys.size


def _integers(state: KernelState, arrays: Mapping[str, Array], name: str) -> IntArray:
    values = _present(state, arrays, name)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iub"):
        raise PolicyError(
            f"{name} of a start state must be a list of integers; got {values.dtype} of shape "
            f"{values.shape}."
        )
    return np.ascontiguousarray(values, dtype=np.int64)


def _present(state: KernelState, arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        raise PolicyError(
            f"a start state of {type(state.policy).__name__} must hold {name!r}; "
            f"got {sorted(arrays)}."
        )
    return np.asarray(arrays[name])
