"""``.moe`` offers the functions of metrics and plots, and says what there is."""

from __future__ import annotations

import subprocess
import sys

import plotly.graph_objects as go
import pytest
import xarray as xr

import bmoe_lab.accessor  # noqa: F401  (registers the accessors)
from bmoe_lab import metrics, plots
from bmoe_lab.simulation import replay
from bmoe_lab.testing.traces import make_trace
from tests.unit.comparison_data import make_tree


@pytest.mark.parametrize("name", metrics.__all__)
def test_accessor_offers_every_metric_with_its_docstring(name):
    method = getattr(make_trace(n_token=8).moe, name)
    assert method.__doc__ == getattr(metrics, name).__doc__


def test_accessor_metric_equals_the_function():
    trace = make_trace(n_token=20)
    xr.testing.assert_identical(trace.moe.hit_rate(by="layer"), metrics.hit_rate(trace, by="layer"))


@pytest.mark.parametrize("name", ["replay", "lru_curve", "diagnose"])
def test_accessor_offers_what_simulates(name):
    trace = make_trace(n_token=8)
    assert name in dir(trace.moe)
    assert name in repr(trace.moe)
    method = getattr(trace.moe, name)
    assert method.__self__ is trace
    assert method.__name__ == name


def test_accessor_replay_equals_the_function():
    trace = make_trace(n_token=20)
    again = trace.moe.replay(residency="lru", budget="100 KiB")
    xr.testing.assert_identical(again, replay(trace, residency="lru", budget="100 KiB"))


def test_accessor_plots_are_the_functions_of_plots():
    trace = make_trace(n_token=20)
    assert isinstance(trace.moe.plot.heatmap(value="weight"), go.Figure)
    assert {f"plot_{name}" for name in trace.moe.plot._names()} == set(plots.__all__)
    assert "heatmap" in dir(trace.moe.plot)
    assert "hit_rate" in dir(trace.moe)


def test_accessor_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"\.moe has no 'hitrate'; it has \['byte_hit_rate'"):
        make_trace(n_token=8).moe.hitrate  # noqa: B018
    with pytest.raises(AttributeError, match=r"\.moe\.plot has no 'map'; it has \['budget_curve'"):
        make_trace(n_token=8).moe.plot.map  # noqa: B018


def test_accessor_reprs_tell_what_there_is():
    assert "hit_rate" in repr(make_trace(n_token=8).moe)
    assert "heatmap" in repr(make_trace(n_token=8).moe.plot)
    assert "table()" in repr(make_tree().moe)


def test_accessor_of_a_comparison_gives_table_figures_report(tmp_path):
    tree = make_tree()
    assert tree.moe.table().shape[0] == 5
    assert isinstance(tree.moe.plot.quality_vs_bytes(), go.Figure)
    assert tree.moe.report(tmp_path / "report.html").exists()


def test_accessor_import_loads_xarray_only():
    code = (
        "import sys; import bmoe_lab.accessor; "
        "print([m for m in ('plotly', 'numba', 'rich', 'llama_cpp', 'ipywidgets') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
