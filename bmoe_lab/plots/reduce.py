"""Make a picture small enough to draw: blocks of cells instead of cells."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_CELLS", "block_firsts", "block_largest", "block_means", "step_for"]

MAX_CELLS = 1000
"""Cells along an axis; a browser draws about a million cells of a heat map in time."""


def step_for(n: int, limit: int = MAX_CELLS) -> int:
    """Return how many neighbours share a cell so that `n` values need at most `limit` cells.

    Examples
    --------
    >>> step_for(1000), step_for(1001), step_for(0)
    (1, 2, 1)
    """
    return max(1, -(-n // limit))


def block_means(values: npt.NDArray[np.float64], step: int) -> npt.NDArray[np.float64]:
    """Return means over blocks of `step` rows; NaN is left out, a block of NaN stays NaN.

    Parameters
    ----------
    values : numpy.ndarray of float64, shape (n, ...)
    step : int
        Rows per block; the last block may be shorter.

    Examples
    --------
    >>> import numpy as np
    >>> block_means(np.array([1.0, 3.0, np.nan, np.nan, 5.0]), 2).tolist()
    [2.0, nan, 5.0]
    """
    if step == 1:
        return values
    n_block = -(-values.shape[0] // step)
    padding = np.full((n_block * step - values.shape[0], *values.shape[1:]), np.nan)
    blocks = np.concatenate([values, padding]).reshape(n_block, step, *values.shape[1:])
    known = ~np.isnan(blocks)
    count = known.sum(axis=1)
    total = np.where(known, blocks, 0.0).sum(axis=1)
    means: npt.NDArray[np.float64] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return means


def block_firsts(values: npt.NDArray[np.float64], step: int) -> npt.NDArray[np.float64]:
    """Return the first value of each block of `step` rows that is not NaN.

    Parameters
    ----------
    values : numpy.ndarray of float64, shape (n, ...)
    step : int
        Rows per block; the last block may be shorter.

    Examples
    --------
    >>> import numpy as np
    >>> block_firsts(np.array([np.nan, 3.0, np.nan, np.nan, 5.0]), 2).tolist()
    [3.0, nan, 5.0]
    """
    firsts = values[::step].copy()
    for later in range(1, step):
        other = values[later::step]
        head = firsts[: len(other)]
        np.copyto(head, other, where=np.isnan(head))
    return firsts


def block_largest(values: npt.NDArray[np.float64], step: int) -> npt.NDArray[np.float64]:
    """Return the largest value of each block of `step` rows; a block of NaN stays NaN.

    Parameters
    ----------
    values : numpy.ndarray of float64, shape (n, ...)
    step : int
        Rows per block; the last block may be shorter.

    Examples
    --------
    >>> import numpy as np
    >>> block_largest(np.array([1.0, 3.0, np.nan, np.nan, 5.0]), 2).tolist()
    [3.0, nan, 5.0]
    """
    largest = values[::step].copy()
    for later in range(1, step):
        other = values[later::step]
        head = largest[: len(other)]
        np.fmax(head, other, out=head)
    return largest
