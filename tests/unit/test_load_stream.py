"""A trace as the loads of a cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import SchemaError, UnknownNameError
from bmoe_lab.schema import NO_EXPERT
from bmoe_lab.simulation import cache_facts, load_stream
from bmoe_lab.testing import make_trace


def loads_of(trace, which="applied"):
    """Return [(layer, first token, [(key, flat cell), ...]), ...] in the most literal way."""
    expert = trace[f"expert_{which}"].values
    n_layer, n_expert = expert.shape[1], trace.attrs["n_expert"]
    evaluations = {}
    for token, batch in enumerate(trace.batch.values.tolist()):
        evaluations.setdefault((int(trace.turn[token]), batch), []).append(token)
    loads = []
    for tokens in evaluations.values():
        for layer in range(n_layer):
            rows = [
                (layer * n_expert + int(expert[t, layer, s]),
                 int(np.ravel_multi_index((t, layer, s), expert.shape)))
                for t in tokens
                for s in range(expert.shape[2])
                if expert[t, layer, s] != NO_EXPERT
            ]  # fmt: skip
            if rows:
                loads.append((layer, tokens[0], rows))
    return loads


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.integers(1, 20), st.integers(1, 4), st.integers(0, 12), st.integers(1, 5), st.booleans(),
    st.integers(0, 3),
)  # fmt: skip
def test_load_stream_of_any_trace_equals_literal_walk(
    n_token, n_layer, n_prefill, n_ubatch, mask, seed
):
    trace = make_trace(
        n_token,
        n_layer=n_layer,
        n_expert=8,
        n_used=2,
        n_prefill=min(n_prefill, n_token),
        n_ubatch=n_ubatch,
        mask_last_layer=mask,
        seed=seed,
        policy="drop",
    )
    for which in ("applied", "chosen"):
        stream = load_stream(trace, which=which)
        expected = loads_of(trace, which)
        assert stream.n_load == len(expected)
        for load, (layer, token, rows) in enumerate(expected):
            span = slice(stream.offsets[load], stream.offsets[load + 1])
            assert stream.layer[load] == layer
            assert stream.token[load] == token
            assert stream.phase[load] == trace.phase.values[token]
            pairs = zip(stream.keys[span].tolist(), stream.cells[span].tolist(), strict=True)
            assert list(pairs) == rows


def test_load_stream_of_cold_turns_restarts_at_each_turn():
    trace = make_trace(12, n_layer=2, n_prefill=4)
    trace["turn"].values[:] = [0] * 5 + [1] * 7
    assert load_stream(trace).restarts.tolist() == [0]
    trace.attrs["cold_turns"] = 1
    stream = load_stream(trace)
    assert stream.restarts.tolist() == [0, int(np.searchsorted(stream.token, 5))]
    assert list(stream.segments())[-1][1] == stream.n_load


def test_load_stream_with_equal_batch_in_two_turns_keeps_them_apart():
    trace = make_trace(4, n_layer=1, n_prefill=4, mask_last_layer=False)
    assert load_stream(trace).n_load == 1
    trace["turn"].values[:] = [0, 0, 1, 1]
    assert load_stream(trace).n_load == 2


def test_load_stream_with_expert_out_of_range_is_refused():
    trace = make_trace(4, n_layer=2)
    trace["expert_applied"].values[1, 1, 0] = 99
    with pytest.raises(
        SchemaError, match=r"expert_applied must be less than n_expert = 16; got 99"
    ):
        load_stream(trace)
    with pytest.raises(UnknownNameError, match="which must be one of"):
        load_stream(trace, which="ran")


def test_cache_facts_without_sizes_are_refused_never_zero():
    trace = make_trace(4, n_layer=2)
    with pytest.raises(SchemaError, match="must hold 'expert_bytes'"):
        cache_facts(trace.drop_vars("expert_bytes"))
    trace["expert_bytes"].values[1] = 0
    with pytest.raises(SchemaError, match=r"expert_bytes must be positive .* got 0 in layer 1"):
        cache_facts(trace)
