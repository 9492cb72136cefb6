"""KL, NLL and agreement against arithmetic with 50 digits."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest

from bmoe_lab.divergence import divergence, token_loss
from bmoe_lab.errors import SettingsError

getcontext().prec = 50


def exact_log_probabilities(logits: np.ndarray) -> list[Decimal]:
    values = [Decimal(float(x)) for x in logits]
    log_sum = sum((v.exp() for v in values), Decimal(0)).ln()
    return [v - log_sum for v in values]


def exact_kl(baseline: np.ndarray, logits: np.ndarray) -> float:
    p, q = exact_log_probabilities(baseline), exact_log_probabilities(logits)
    return float(sum((a.exp() * (a - b) for a, b in zip(p, q, strict=True)), Decimal(0)))


@pytest.mark.parametrize("scale", [10.0, 1.0, 1e-2, 1e-4, 1e-6])
def test_divergence_equals_exact_arithmetic_down_to_tiny_differences(scale: float):
    rng = np.random.default_rng(0)
    baseline = rng.normal(scale=4, size=300).astype(np.float32)
    logits = (baseline + scale * rng.normal(size=300)).astype(np.float32)
    actual = divergence(baseline, logits, token=17)
    assert actual.kl == pytest.approx(exact_kl(baseline, logits), rel=1e-6, abs=1e-22)
    assert actual.kl > 0
    assert actual.nll == pytest.approx(float(-exact_log_probabilities(logits)[17]), rel=1e-14)


def test_divergence_equal_logits_is_exactly_zero():
    logits = np.random.default_rng(1).normal(scale=8, size=50_000).astype(np.float32)
    actual = divergence(logits, logits.copy(), token=3)
    assert actual.kl == 0.0
    assert actual.agrees


def test_divergence_never_negative_for_neighbours_in_float32():
    baseline = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    logits = baseline.copy()
    logits[10] = np.nextafter(logits[10], np.float32(9))
    assert 0.0 < divergence(baseline, logits, token=0).kl < 1e-12


def test_divergence_tokens_excluded_by_both_count_nothing():
    baseline = np.array([0, 1, -np.inf, -np.inf], dtype=np.float32)
    logits = np.array([1, 0, -np.inf, -np.inf], dtype=np.float32)
    short = divergence(baseline[:2].copy(), logits[:2].copy(), token=0)
    full = divergence(baseline, logits, token=0)
    assert full == short


def test_divergence_token_excluded_by_the_policy_only_is_infinite():
    baseline = np.array([0, 1, 2], dtype=np.float32)
    logits = np.array([0, 1, -np.inf], dtype=np.float32)
    actual = divergence(baseline, logits, token=2)
    assert actual.kl == math.inf
    assert actual.nll == math.inf


def test_divergence_token_excluded_by_the_baseline_only_is_finite():
    baseline = np.array([0, 1, -np.inf], dtype=np.float32)
    logits = np.array([0, 1, 2], dtype=np.float32)
    kept = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    other = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    expected = float((kept * np.log(kept / other[:2])).sum())
    assert divergence(baseline, logits, token=0).kl == pytest.approx(expected, rel=1e-12)


def test_divergence_far_logits_do_not_overflow():
    baseline = np.array([0, 3000, -3000, 700], dtype=np.float32)
    logits = np.array([3000, 0, 3000, -700], dtype=np.float32)
    assert divergence(baseline, logits, token=1).kl == pytest.approx(3000 + math.log(2), rel=1e-12)


def test_divergence_top_token_tie_goes_to_the_lower_id():
    baseline = np.array([1, 5, 5], dtype=np.float32)
    logits = np.array([1, 5, 4], dtype=np.float32)
    actual = divergence(baseline, logits, token=0)
    assert (actual.top, actual.agrees) == (1, True)
    assert not divergence(baseline, logits[[0, 2, 1]].copy(), token=0).agrees


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_divergence_broken_logits_stop_the_run(bad: float):
    logits = np.array([0, bad, 1], dtype=np.float32)
    with pytest.raises(SettingsError, match="finite log-sum-exp"):
        divergence(np.zeros(3, dtype=np.float32), logits, token=0)
    with pytest.raises(SettingsError, match="finite log-sum-exp"):
        token_loss(logits, token=0)
    with pytest.raises(SettingsError, match="nothing but -inf"):
        token_loss(np.full(3, -np.inf, dtype=np.float32), token=0)


def test_divergence_of_two_models_is_refused():
    with pytest.raises(SettingsError, match=r"shape of baseline, \(3,\); got \(4,\)"):
        divergence(np.zeros(3, np.float32), np.zeros(4, np.float32), token=0)


@pytest.mark.parametrize("token", [-1, 3])
def test_token_loss_of_a_token_outside_the_vocabulary_is_refused(token: int):
    with pytest.raises(SettingsError, match="token must be an index"):
        token_loss(np.zeros(3, np.float32), token=token)


def test_token_loss_equals_exact_arithmetic():
    logits = np.random.default_rng(3).normal(scale=5, size=200).astype(np.float32)
    expected = float(-exact_log_probabilities(logits)[9])
    actual = token_loss(logits, token=9)
    assert actual.nll == pytest.approx(expected, rel=1e-14)
    assert actual.top == int(np.argmax(logits))
