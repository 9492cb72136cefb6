"""Budgets of a trace: both ends, the token cycle itself, dense where the curve jumps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import SettingsError
from bmoe_lab.metrics import token_cycle_bytes
from bmoe_lab.simulation import chunked, replay
from bmoe_lab.simulation.budget_grid import _grid, budgets, check_budgets, touched_bytes
from bmoe_lab.testing import make_trace


def a_trace(**changes):
    shape = {"n_token": 100, "n_layer": 4, "n_expert": 64, "expert_bytes": 2**20, "seed": 1}
    return make_trace(**{**shape, **changes})


def test_budgets_hold_the_token_cycle_and_end_where_everything_fits():
    trace = a_trace()
    sizes = budgets(trace)
    assert sizes.dtype == np.int64
    assert sizes.size == 20
    assert int(token_cycle_bytes(trace)) in sizes
    assert sizes[-1] == touched_bytes(trace)
    assert sizes[0] <= 0.3 * int(token_cycle_bytes(trace))


def test_budgets_at_the_last_one_nothing_is_evicted():
    trace = a_trace()
    *_, below, top = budgets(trace).tolist()
    assert replay(trace, residency="lru", budget=top)["evictions"].sum() == 0
    assert replay(trace, residency="lru", budget=below)["evictions"].sum() > 0


def test_budgets_are_denser_around_the_cliff():
    trace = a_trace(n_token=400)
    cycle = int(token_cycle_bytes(trace))
    ratio = np.diff(np.log2(budgets(trace).astype(float)))
    near = np.abs(np.log2(budgets(trace)[1:] / cycle)) < 0.4
    assert ratio[near].mean() < 0.5 * ratio[~near].mean()


def test_budgets_are_round_but_for_the_exact_ones():
    trace = a_trace()
    exact = {int(token_cycle_bytes(trace)), touched_bytes(trace)}
    others = [size for size in budgets(trace).tolist() if size not in exact]
    hundredths = np.array(others) / 2**20 * 100
    np.testing.assert_allclose(hundredths, hundredths.round(), atol=1e-3)


def test_budgets_of_several_traces_hold_every_token_cycle():
    traces = {"a": a_trace(), "b": a_trace(n_used=2, seed=2)}
    sizes = budgets(traces, 12)
    assert {int(token_cycle_bytes(trace)) for trace in traces.values()} <= set(sizes.tolist())
    assert sizes[-1] == max(map(touched_bytes, traces.values()))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(cycle=st.integers(1, 2**40), spread=st.floats(1, 1000), n=st.integers(4, 60))
def test_budgets_ascend_within_their_ends(cycle, spread, n):
    top = int(cycle * spread)
    sizes = _grid([cycle], top, n)
    assert (np.diff(sizes) > 0).all()
    assert 1 <= sizes.size <= n
    assert sizes[-1] == top
    assert cycle in sizes


def test_touched_bytes_are_found_in_chunks(monkeypatch):
    trace = a_trace()
    expected = touched_bytes(trace)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 64)
    assert touched_bytes(trace) == expected


@pytest.mark.parametrize(("n", "given_n"), [(3, "3"), (True, "True"), (2.5, "2.5")])
def test_budgets_refuse_too_few(n, given_n):
    with pytest.raises(SettingsError, match=f"n must be a whole number of at least 4.*{given_n}"):
        budgets(a_trace(), n)


def test_budgets_refuse_what_is_no_trace():
    with pytest.raises(SettingsError, match="must be a trace or a dict"):
        budgets({"a": 3})


def test_check_budgets_reads_every_form():
    assert check_budgets("2 KiB").tolist() == [2048]
    assert check_budgets(np.int64(5)).tolist() == [5]
    assert check_budgets(np.array([5, 3], np.uint32)).tolist() == [3, 5]
    assert check_budgets(["2 KiB", np.int64(1), 0]).tolist() == [0, 1, 2048]


@pytest.mark.parametrize("asked", [[-1], ["-1 B"], [1.5], [None], np.zeros((2, 2), int)])
def test_check_budgets_refuses_what_is_no_size(asked):
    with pytest.raises(SettingsError, match="budgets must be"):
        check_budgets(asked)
