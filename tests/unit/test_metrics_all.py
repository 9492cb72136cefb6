"""What every metric keeps: labels, masks, nothing made up, traces that stay on disk."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, UnknownNameError
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import ragged

ARGUMENTS = {
    "router_saturation": lambda trace: {"reference": trace},
    "routing_agreement": lambda trace: {"reference": trace},
    "near_ties": lambda _: {"eps": 0.1},
    "working_set": lambda _: {"window": 2},
    "specialisation": lambda _: {"domain": "turn"},
    "drop_savings": lambda _: {"frac": 0.5},
    "keep_savings": lambda _: {"n_keep": 1},
    "slots_per_demand": lambda _: {"budget": 1000},
    "cell_slots": lambda _: {"token": -1, "layer": 0},
    "cell_history": lambda _: {"token": -1, "layer": -1},
    "expert_pieces": lambda _: {"layer": -1, "expert": 2},
}
# Where these have nothing to divide by, they hold a count or a size of the model.
COUNTS = {"load_count", "first_of_load", "token_cycle_bytes", "expert_bank_bytes"}


def result(name: str, trace: xr.Dataset, **more: object) -> xr.DataArray | xr.Dataset:
    arguments = ARGUMENTS.get(name, lambda _: {})(trace)
    return getattr(metrics, name)(trace, **arguments, **more)


def arrays(value: xr.DataArray | xr.Dataset) -> list[xr.DataArray]:
    return [value] if isinstance(value, xr.DataArray) else list(value.data_vars.values())


def takes_phase(name: str) -> bool:
    return "phase" in inspect.signature(getattr(metrics, name)).parameters


@pytest.mark.parametrize("name", metrics.__all__)
def test_metric_says_its_phase_unit_and_meaning(name):
    for array in arrays(result(name, ragged())):
        assert array.attrs["long_name"]
        if array.dtype == bool:
            continue
        assert array.attrs["units"]
        if takes_phase(name):
            assert array.name.endswith("_decode")
            assert "decode" in array.attrs["long_name"]
            assert array.dtype == np.float64


@pytest.mark.parametrize("name", [n for n in metrics.__all__ if takes_phase(n)])
def test_metric_of_a_phase_without_tokens_is_unknown(name):
    for array in arrays(result(name, ragged(), phase="draft")):
        if name in COUNTS:
            assert float(array) == 0
        else:
            assert np.isnan(array.values).all()


@pytest.mark.parametrize("name", [n for n in metrics.__all__ if takes_phase(n)])
def test_metric_of_an_unknown_phase_names_the_known_ones(name):
    with pytest.raises(UnknownNameError, match=r"phase must be one of \['all', 'decode'"):
        result(name, ragged(), phase="decoding")


@pytest.mark.parametrize("name", metrics.__all__)
def test_metric_of_a_trace_on_disk_is_the_same(name, tmp_path):
    trace = ragged()
    path = tmp_path / "trace.nc"
    trace.to_netcdf(path, engine="h5netcdf")
    with xr.open_dataset(path, engine="h5netcdf", decode_times=False) as lazy:
        assert not lazy["expert_chosen"].variable._in_memory
        on_disk = result(name, lazy)
        for array, expected in zip(arrays(on_disk), arrays(result(name, trace)), strict=True):
            np.testing.assert_array_equal(array.values, expected.values)


@pytest.mark.parametrize("name", metrics.__all__)
def test_metric_leaves_the_trace_alone(name):
    trace = ragged()
    before = trace.copy(deep=True)
    result(name, trace)
    xr.testing.assert_identical(trace, before)


@pytest.mark.parametrize(
    "name",
    [n for n in metrics.__all__ if "by" in inspect.signature(getattr(metrics, n)).parameters],
)
def test_metric_by_an_unknown_dimension_lists_the_known_ones(name):
    with pytest.raises(UnknownNameError, match="by must be one of"):
        result(name, ragged(), by="expert")


@pytest.mark.parametrize(
    "name",
    [n for n in metrics.__all__ if "which" in inspect.signature(getattr(metrics, n)).parameters],
)
def test_metric_of_applied_experts_differs_where_slots_were_dropped(name):
    trace = ragged(1, turns=((0, 4),), n_expert=9, widths=(6, 5, 6))
    chosen = arrays(result(name, trace, which="chosen"))[0].values
    applied = arrays(result(name, trace, which="applied"))[0].values
    assert not np.array_equal(chosen, applied, equal_nan=True)
    with pytest.raises(UnknownNameError, match="which must be one of"):
        result(name, trace, which="wanted")


@pytest.mark.parametrize("name", ["load_balance", "score_entropy", "router_margin", "near_ties"])
def test_metric_without_scores_says_how_to_record_them(name):
    with pytest.raises(SchemaError, match=r"'router_score'; got \['action'.*record='scores'"):
        result(name, make_trace(n_token=8))
