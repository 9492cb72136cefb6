"""The LRU curve is the LRU kernel at each budget."""

import numpy as np
import pytest

from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.simulation.curves import lru_curve
from bmoe_lab.simulation.sweeping import sweep
from bmoe_lab.testing import make_trace
from tests.unit.test_sweep_chunked import a_trace, in_turns

PHASES = ["prefill", "decode", "all"]


@pytest.mark.parametrize("make", [a_trace, lambda: in_turns(a_trace(), 170, 130, 100)])
def test_lru_curve_equals_the_kernel_at_every_budget_and_phase(make):
    trace = make()
    budgets = list(range(0, 260_000, 3_500))
    curve = lru_curve(trace, budgets, phase=PHASES)
    grid = sweep(trace, residency=["lru"], budgets=budgets, phase=PHASES, progress=False, n_jobs=1)
    assert len(curve.data_vars) == 5 * len(PHASES)
    for name, values in curve.data_vars.items():
        np.testing.assert_array_equal(values, grid[name].squeeze(), err_msg=name)
        assert values.attrs["units"] == grid[name].attrs["units"]


def test_lru_curve_by_default_spans_what_matters():
    trace = a_trace()
    curve = lru_curve(trace)
    assert curve.sizes["budget"] > 50
    assert int(curve.token_cycle_bytes) in curve.budget
    assert (curve.hit_rate_decode.diff("budget") >= 0).all()


def test_lru_curve_phase_without_tokens_is_unknown():
    curve = lru_curve(make_trace(n_token=8, n_prefill=0), phase="prefill")
    assert all(np.isnan(values).all() for values in curve.data_vars.values())


def test_lru_curve_refuses_unknown_phases_and_sizes():
    with pytest.raises(UnknownNameError, match="phase must be one of"):
        lru_curve(a_trace(), phase="decoding")
    with pytest.raises(SettingsError, match="budgets must be a size"):
        lru_curve(a_trace(), ["3 MB"])
