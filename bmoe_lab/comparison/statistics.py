"""Intervals for the mean of a series whose neighbours depend on each other.

Losses of consecutive tokens are correlated, so resampling single tokens gives intervals that are
too narrow. The moving-block bootstrap resamples runs of consecutive tokens instead.

Source: Künsch, "The jackknife and the bootstrap for general stationary observations",
Annals of Statistics 17 (1989) 1217-1241; percentile intervals: Efron and Tibshirani,
*An Introduction to the Bootstrap* (1993), chapter 13.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError

__all__ = ["BLOCK", "DRAWS", "LEVEL", "Interval", "mean_interval", "paired_interval"]

BLOCK = 16
"""Tokens per block: longer than the reach of the correlation seen in per-token losses."""
DRAWS = 2000
"""Resamples: the percentiles of a 95 % interval then rest on about 50 draws in each tail."""
LEVEL = 0.95

# Numbers drawn at a time (draws x blocks): bounds the memory whatever the length of the series.
_CHUNK = 1 << 21


@dataclass(frozen=True)
class Interval:
    """A mean with its interval.

    Attributes
    ----------
    mean : float
        Mean of the series.
    low, high : float
        Bounds of the percentile interval; NaN where the series is too short to say.
    n : int
        Length of the series.
    level : float
        Share of the resampled means inside the bounds.
    block, draws, seed : int
        How the bounds were made.
    """

    mean: float
    low: float
    high: float
    n: int
    level: float = LEVEL
    block: int = BLOCK
    draws: int = DRAWS
    seed: int = 0

    @property
    def known(self) -> bool:
        """Whether the series was long enough for bounds."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def excludes(self, value: float) -> bool:
        """Return whether `value` is known to lie outside the bounds."""
        return self.known and not self.low <= value <= self.high

    def __str__(self) -> str:
        if not self.known:
            return f"{self.mean:.4g} [–]"
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_interval(
    values: npt.ArrayLike,
    *,
    segment: npt.ArrayLike | None = None,
    block: int = BLOCK,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Return the mean of a series with its moving-block bootstrap interval.

    A series shorter than two blocks gets no bounds (NaN) rather than bounds that are too narrow.

    Parameters
    ----------
    values : array_like of float, shape (n,)
        The series, in order. Must be finite: select the scored tokens first.
    segment : array_like of int, shape (n,), optional
        Label of the text window of each value. No block crosses a change of label; a window shorter
        than a block is drawn whole.
    block : int, default 16
        Consecutive values per block.
    draws : int, default 2000
        Number of resampled means.
    level : float, default 0.95
        Share of the resampled means inside the bounds.
    seed : int, default 0
        Same seed, same bounds.

    Returns
    -------
    Interval

    Raises
    ------
    SettingsError
        If a value is not finite, or a setting is impossible.

    Notes
    -----
    Every start of a block that stays inside its window is equally likely; blocks are joined until
    they reach the length of the series, the last one cut to fit (Künsch 1989, section 2.3).

    Examples
    --------
    >>> import numpy as np
    >>> series = np.sin(np.arange(200.0))
    >>> interval = mean_interval(series, seed=1)
    >>> interval.low < interval.mean < interval.high
    True
    >>> mean_interval([1.0, 2.0, 3.0]).known
    False
    """
    series = np.ascontiguousarray(values, dtype=np.float64)
    _check(series, block, draws, level)
    n = int(series.size)
    labels = None if segment is None else np.asarray(segment)
    if labels is not None and labels.shape != series.shape:
        raise SettingsError(
            f"segment must have the shape of values, {series.shape}; got {labels.shape}. "
            "Give one window label per value."
        )
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0, level, block, draws, seed)
    mean = float(series.mean())
    if n < 2 * block:
        return Interval(mean, math.nan, math.nan, n, level, block, draws, seed)
    starts, lengths = _blocks(n, labels, block)
    means = _resampled_means(series, starts, lengths, draws, np.random.default_rng(seed))
    tail = 100.0 * (1.0 - level) / 2.0
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return Interval(mean, float(low), float(high), n, level, block, draws, seed)


def paired_interval(
    values: npt.ArrayLike,
    baseline: npt.ArrayLike,
    *,
    segment: npt.ArrayLike | None = None,
    block: int = BLOCK,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Return the mean difference ``values - baseline`` of two runs over the same tokens.

    The difference is taken token by token before resampling, so what the two runs share (some
    tokens are hard for any policy) cancels out.

    Parameters
    ----------
    values, baseline : array_like of float, shape (n,)
        The same quantity of the same tokens in two runs.
    segment, block, draws, level, seed
        As in :func:`mean_interval`.

    Returns
    -------
    Interval

    Raises
    ------
    SettingsError
        If the shapes differ, a value is not finite, or a setting is impossible.

    Examples
    --------
    >>> import numpy as np
    >>> base = np.cos(np.arange(100.0))
    >>> print(paired_interval(base, base))
    0 [0, 0]
    """
    first = np.asarray(values, dtype=np.float64)
    second = np.asarray(baseline, dtype=np.float64)
    if first.shape != second.shape:
        raise SettingsError(
            f"baseline must have the shape of values, {first.shape}; got {second.shape}. "
            "Compare runs over the same tokens."
        )
    return mean_interval(
        first - second, segment=segment, block=block, draws=draws, level=level, seed=seed
    )


def _check(series: npt.NDArray[np.float64], block: int, draws: int, level: float) -> None:
    if series.ndim != 1:
        raise SettingsError(
            f"values must be one-dimensional; got shape {series.shape}. Select one series first."
        )
    bad = np.flatnonzero(~np.isfinite(series))
    if bad.size:
        raise SettingsError(
            f"values must be finite; got {float(series[bad[0]])!r} at position {int(bad[0])} "
            f"({bad.size} of {series.size} are not). Select the scored tokens first."
        )
    if block < 1:
        raise SettingsError(f"block must be at least 1; got {block!r}. Use {BLOCK}.")
    if draws < 1:
        raise SettingsError(f"draws must be at least 1; got {draws!r}. Use {DRAWS}.")
    if not 0.0 < level < 1.0:
        raise SettingsError(f"level must lie between 0 and 1; got {level!r}. Use {LEVEL}.")


def _blocks(
    n: int, labels: npt.NDArray[np.generic] | None, block: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return start and length of every admissible block."""
    if labels is None:
        borders = np.array([0, n])
    else:
        changes = np.flatnonzero(labels[1:] != labels[:-1]) + 1
        borders = np.concatenate(([0], changes, [n]))
    starts: list[npt.NDArray[np.int64]] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for begin, end in itertools.pairwise(borders):
        length = min(block, int(end - begin))
        inside = np.arange(begin, end - length + 1, dtype=np.int64)
        starts.append(inside)
        lengths.append(np.full(inside.size, length, dtype=np.int64))
    return np.concatenate(starts), np.concatenate(lengths)


def _resampled_means(
    series: npt.NDArray[np.float64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    draws: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.float64]:
    """Return the means of `draws` resampled series, each as long as the original."""
    n = series.size
    # A block's sum is a difference of prefix sums: the cost does not grow with the block.
    prefix = np.concatenate(([0.0], np.cumsum(series)))
    per_draw = -(-n // int(lengths.min()))
    chunk = max(1, _CHUNK // per_draw)
    means = np.empty(draws)
    for begin in range(0, draws, chunk):
        end = min(begin + chunk, draws)
        pick = rng.integers(0, starts.size, size=(end - begin, per_draw))
        length = lengths[pick]
        reached = np.cumsum(length, axis=1)
        used = np.clip(n - (reached - length), 0, length)
        first = starts[pick]
        means[begin:end] = (prefix[first + used] - prefix[first]).sum(axis=1) / n
    return means
