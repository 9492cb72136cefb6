"""Predictors against loops that guess with a counter, as the study that defined them did."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import cells, decoded, ragged_traces, uniform


def follows(trace, token, lag=1):
    turn, position = trace["turn"].values, trace["position"].values
    return token >= lag and all(
        turn[t] == turn[t - 1] and position[t] == position[t - 1] + 1
        for t in range(token - lag + 1, token + 1)
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    trace=ragged_traces(),
    predictor=st.sampled_from(["previous", "decode", "prompt", "random"]),
    n_guess=st.sampled_from([None, 1, 3]),
    lag=st.integers(1, 3),
)
def test_recall_and_precision_equal_guesses_made_one_by_one(trace, predictor, n_guess, lag):
    n_guess = None if predictor == "previous" else n_guess
    lag = lag if predictor == "previous" else 1
    decode = {(t, layer): e for t, layer, e in cells(trace, "chosen", "decode")}
    prompt = cells(trace, "chosen", "prefill")
    turn = trace["turn"].values
    right, wanted, guesses = 0.0, 0, 0
    for (token, layer), experts in decode.items():
        n = n_guess or int(trace["n_expert_used"][layer])
        if predictor == "random":
            right += len(experts) * n / trace.attrs["n_expert"]
            wanted, guesses = wanted + len(experts), guesses + n
            continue
        if predictor == "previous":
            before = decode.get((token - lag, layer))
            if before is None or not follows(trace, token, lag):
                continue
            guess = set(before)
        else:
            if predictor == "decode":
                if (token - 1, layer) not in decode or not follows(trace, token):
                    continue
                seen = [e for (_, one), es in decode.items() if one == layer for e in es]
            else:
                seen = [
                    e
                    for t, one, es in prompt
                    if one == layer and turn[t] == turn[token]
                    for e in es
                ]
            # `most_common` keeps the order in which equal counts were first met.
            guess = {expert for expert, _ in Counter(seen).most_common(n)}
            if not guess:
                continue
        right += len(guess & set(experts))
        wanted += len(experts)
        guesses += len(guess)
    arguments = {"n_guess": n_guess, "lag": lag}
    recall = metrics.predictor_recall(trace, predictor, **arguments)
    precision = metrics.predictor_precision(trace, predictor, **arguments)
    np.testing.assert_allclose(recall, right / wanted if wanted else np.nan)
    np.testing.assert_allclose(precision, right / guesses if guesses else np.nan)


def test_prompt_predictor_guesses_the_first_seen_of_equals():
    # Prompt: 5, 2, 3, 2, 5, 3 in order; each twice. With one guess the first seen is guessed.
    trace = decoded([[5], [2], [3], [2], [5], [3], [5], [2]])
    trace["phase"].values[:6] = 0
    assert metrics.predictor_recall(trace, "prompt", by="token").values.tolist() == [1.0, 0.0]
    assert float(metrics.predictor_recall(trace, "prompt", n_guess=2)) == 1.0
    assert float(metrics.predictor_precision(trace, "prompt", n_guess=2)) == 0.5


def test_decode_predictor_is_scored_on_tokens_that_follow_another():
    trace = decoded([[1], [0], [0], [1], [0]])
    # 0 is used three times of five; the first token is not scored.
    assert float(metrics.predictor_recall(trace, "decode")) == 0.75
    assert np.isnan(metrics.predictor_recall(trace, "decode", by="token")[0])


def test_predictor_of_a_turn_without_a_prompt_is_unknown():
    assert np.isnan(float(metrics.predictor_recall(decoded([[1], [0]]), "prompt")))
    assert np.isnan(float(metrics.predictor_precision(decoded([[1], [0]]), "prompt")))


def test_random_predictor_of_an_independent_uniform_router_is_chance():
    trace = uniform(3000, 2, 16, 4, seed=9)
    chance = float(metrics.predictor_recall(trace, "random"))
    assert chance == 0.25
    error = np.sqrt(chance * (1 - chance) / (3000 * 2 * 4))
    assert abs(float(metrics.predictor_recall(trace, "previous")) - chance) < 3 * error
    assert float(metrics.predictor_recall(trace, "random", n_guess=8)) == 0.5
    assert float(metrics.predictor_precision(trace, "random", n_guess=8)) == 0.25


def test_predictor_refuses_what_would_do_nothing():
    trace = make_trace(n_token=12)
    with pytest.raises(SettingsError, match="lag must be left out for the predictor 'prompt'; got"):
        metrics.predictor_recall(trace, "prompt", lag=2)
    with pytest.raises(SettingsError, match=r"n_guess must be left out for .* 'previous'; got 4"):
        metrics.predictor_recall(trace, "previous", n_guess=4)
    with pytest.raises(SettingsError, match="n_guess must be at most the experts of a layer, 16"):
        metrics.predictor_recall(trace, "decode", n_guess=17)
    with pytest.raises(SettingsError, match="n_guess must be at least 1; got 0"):
        metrics.predictor_recall(trace, "decode", n_guess=0)
    with pytest.raises(UnknownNameError, match=r"predictor must be one of \['decode', 'previous'"):
        metrics.predictor_recall(trace, "prefill")
