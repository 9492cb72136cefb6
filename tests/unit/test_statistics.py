"""Bootstrap intervals: reproducible, honest about short series, blocks inside their windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.comparison.statistics import Interval, _blocks, mean_interval, paired_interval
from bmoe_lab.errors import SettingsError


def correlated(n: int, seed: int, phi: float = 0.8) -> np.ndarray:
    """Return an AR(1) series of mean 0."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=n + 200)
    series = np.zeros(n + 200)
    for t in range(1, n + 200):
        series[t] = phi * series[t - 1] + noise[t]
    return series[200:]


def plain_means(
    series: np.ndarray, starts: np.ndarray, lengths: np.ndarray, pick: np.ndarray
) -> list[float]:
    """Join the picked blocks one by one, as the definition reads."""
    means = []
    for row in pick:
        joined = np.concatenate([series[starts[b] : starts[b] + lengths[b]] for b in row])
        means.append(joined[: series.size].mean())
    return means


def test_mean_interval_same_seed_gives_same_bounds():
    series = correlated(300, seed=0)
    assert mean_interval(series, seed=7) == mean_interval(series, seed=7)
    assert mean_interval(series, seed=7) != mean_interval(series, seed=8)


def test_mean_interval_equals_the_definition_block_by_block():
    series = correlated(75, seed=1)
    segment = np.repeat([0, 1, 2], [40, 5, 30])
    actual = mean_interval(series, segment=segment, block=8, draws=300, seed=3)

    starts, lengths = _blocks(series.size, segment, 8)
    pick = np.random.default_rng(3).integers(0, starts.size, size=(300, 15))
    expected = np.percentile(plain_means(series, starts, lengths, pick), [2.5, 97.5])

    np.testing.assert_allclose([actual.low, actual.high], expected, rtol=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 20))
def test_blocks_never_cross_a_window_border(windows: list[int], block: int):
    segment = np.repeat(np.arange(len(windows)), windows)
    starts, lengths = _blocks(segment.size, segment, block)
    for start, length in zip(starts, lengths, strict=True):
        inside = segment[start : start + length]
        assert inside.size == length
        assert np.unique(inside).size == 1
    # Every value can be drawn.
    covered = {int(i) for s, n in zip(starts, lengths, strict=True) for i in range(s, s + n)}
    assert covered == set(range(segment.size))


def test_blocks_equal_labels_apart_are_two_windows():
    """Windows are runs of equal labels: a label that comes back later is another window."""
    starts, lengths = _blocks(6, np.array([0, 0, 0, 1, 0, 0]), 3)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == [(0, 3), (3, 1), (4, 2)]


def test_mean_interval_covers_the_true_mean_of_a_correlated_series():
    """Single-token resampling misses far more often; that is why blocks are drawn."""
    hits = {1: 0, 16: 0}
    for seed in range(200):
        series = correlated(400, seed=seed)
        for block in hits:
            interval = mean_interval(series, block=block, draws=400, seed=seed)
            hits[block] += not interval.excludes(0.0)
    assert hits[16] >= 170  # 85 % of 200; nominal 95 %, finite blocks fall a little short
    assert hits[1] <= 140


def test_mean_interval_agrees_with_the_known_error_of_independent_values():
    series = np.random.default_rng(5).normal(size=4000)
    interval = mean_interval(series, seed=0)
    half_width = (interval.high - interval.low) / 2
    assert half_width == pytest.approx(1.96 * series.std() / np.sqrt(4000), rel=0.12)


@pytest.mark.parametrize("n", [0, 1, 16, 31])
def test_mean_interval_short_series_has_no_bounds(n: int):
    interval = mean_interval(np.ones(n))
    assert not interval.known
    assert not interval.excludes(5.0)
    assert "–" in str(interval)


def test_mean_interval_very_short_windows_stay_within_memory():
    n = 20_000
    interval = mean_interval(np.arange(n) % 7, segment=np.arange(n), draws=2000)
    assert interval.low < interval.mean < interval.high


def test_paired_interval_identical_runs_is_exactly_zero():
    series = correlated(200, seed=2)
    interval = paired_interval(series, series.copy())
    assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)
    assert not interval.excludes(0.0)


def test_paired_interval_is_narrower_than_unpaired_spread():
    hard = correlated(400, seed=3) * 3
    policy = hard + 0.1 + 0.01 * np.random.default_rng(0).normal(size=400)
    paired = paired_interval(policy, hard)
    assert paired.excludes(0.0)
    assert paired.high - paired.low < 0.01
    assert mean_interval(hard).high - mean_interval(hard).low > 0.5


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"values": [1.0, np.nan]}, r"values must be finite; got nan at position 1 \(1 of 2"),
        ({"values": [[1.0]]}, r"values must be one-dimensional; got shape \(1, 1\)"),
        ({"values": [1.0], "block": 0}, "block must be at least 1; got 0"),
        ({"values": [1.0], "draws": 0}, "draws must be at least 1; got 0"),
        ({"values": [1.0], "level": 1.0}, "level must lie between 0 and 1; got 1.0"),
        ({"values": [1.0], "segment": [1, 2]}, "segment must have the shape of values"),
    ],
)
def test_mean_interval_impossible_input_says_what_and_where(kwargs, message):
    with pytest.raises(SettingsError, match=message):
        mean_interval(**kwargs)


def test_paired_interval_of_different_tokens_is_refused():
    with pytest.raises(SettingsError, match="baseline must have the shape of values"):
        paired_interval([1.0, 2.0], [1.0])


def test_interval_str_shows_mean_with_bounds():
    assert str(Interval(0.5, 0.25, 0.75, n=100)) == "0.5 [0.25, 0.75]"
