"""Random weights in ggml types: drawn afresh, or taken from a pool of quantised rows."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError
from bmoe_lab.seam.quantize import quantize, row_bytes

__all__ = ["Bytes", "RowPool", "generator", "normal_rows"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Values held as float32 at a time (16 MiB); the result does not depend on it.
_SLAB_VALUES = 1 << 22


def generator(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of the tensor `name`, independent of all others."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def normal_rows(
    random: np.random.Generator, sizes: tuple[int, ...], kind: str, spread: float
) -> Bytes:
    """Return normal random values of mean 0 in the ggml type `kind`.

    Parameters
    ----------
    random : Generator
    sizes : tuple of int
        The last axis is the row.
    kind : str
        ggml type.
    spread : float
        Standard deviation.

    Returns
    -------
    ndarray
        uint8 of shape (..., byte).
    """
    n_row, n_per_row = int(np.prod(sizes[:-1], dtype=np.int64)), sizes[-1]
    result = np.empty((n_row, row_bytes(kind, n_per_row)), np.uint8)
    step = max(1, _SLAB_VALUES // n_per_row)
    for start in range(0, n_row, step):
        stop = min(start + step, n_row)
        values = random.standard_normal((stop - start, n_per_row), np.float32)
        values *= np.float32(spread)
        result[start:stop] = quantize(values, kind)
    return result.reshape(*sizes[:-1], -1)


@dataclass(frozen=True)
class RowPool:
    """Quantised random rows, from which large matrices are put together at the speed of a copy.

    Quantising billions of values takes many minutes. Here a few thousand rows of each type and
    length are quantised once. Every matrix (of a stack: every expert) takes rows of its own
    choice, in its own order, none twice; so no two experts are alike and a wrong expert shows in
    the output, as with weights drawn afresh.

    Attributes
    ----------
    seed : int
    n_row : int
        Rows in the pool; a power of two, not below the rows of the tallest matrix.
    """

    seed: int
    n_row: int = 8192
    _rows: dict[tuple[str, int, float], Bytes] = field(default_factory=dict)

    def take(self, name: str, sizes: tuple[int, ...], kind: str, spread: float) -> Bytes:
        """Return the matrix, or stack of matrices, called `name`; uint8 of shape (..., byte).

        Raises
        ------
        SettingsError
            If a matrix is taller than the pool.
        """
        *stack, height, n_per_row = sizes
        if height > self.n_row:
            raise SettingsError(
                f"matrix must have at most {self.n_row} rows; got {height} in {name}."
            )
        pool = self._pool(kind, n_per_row, spread)
        n_matrix = int(np.prod(stack, dtype=np.int64))
        random = generator(self.seed, name)
        # start + stride * i modulo a power of two visits each row once if the stride is odd.
        start = random.integers(self.n_row, size=(n_matrix, 1))
        stride = 2 * random.integers(self.n_row // 2, size=(n_matrix, 1)) + 1
        chosen = (start + stride * np.arange(height)) % self.n_row
        rows: Bytes = pool[chosen.reshape(*stack, height)]
        return rows

    def _pool(self, kind: str, n_per_row: int, spread: float) -> Bytes:
        key = (kind, n_per_row, spread)
        if key not in self._rows:
            random = generator(self.seed, f"pool of {key}")
            self._rows[key] = normal_rows(random, (self.n_row, n_per_row), kind, spread)
        return self._rows[key]
