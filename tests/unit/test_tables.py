"""The comparison as a table: honest about the unknown, readable at any width."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from bmoe_lab.comparison.tree import COLUMNS
from bmoe_lab.errors import SchemaError
from bmoe_lab.tables import comparison_frame, comparison_html, comparison_table, control_lines
from tests.unit.comparison_data import make_tree


def printed(tree: xr.DataTree, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(tree))
    return capture.get()


def test_comparison_frame_has_one_row_per_run_and_every_column():
    tree = make_tree()
    frame = comparison_frame(tree)
    assert frame.index.tolist() == tree["arm_name"].values.tolist()
    assert set(frame.columns) == set(COLUMNS) - {"arm_name"}
    assert frame.loc["DropCold(frac=0.75)", "delta_nll"] == float(tree["delta_nll"][2])


@pytest.mark.parametrize("width", [80, 120, 200])
def test_comparison_table_shows_every_number_at_any_width(width):
    tree = make_tree()
    text = printed(tree, width)
    assert f"{float(tree['perplexity'][2]):.3f}" in text
    assert (
        f"{float(tree['delta_nll_low'][2]):+.3f}, {float(tree['delta_nll_high'][2]):+.3f}" in text
    )
    assert max(map(len, text.splitlines())) <= width


def test_comparison_table_names_lossy_control_and_never_fired():
    text = printed(make_tree(), 200)
    assert "lossy, control of DropCold(frac=0.75)" in text
    assert "lossy, NEVER FIRED" in text
    assert "noise floor" in text


def test_comparison_table_unknown_is_a_dash_never_zero():
    tree = make_tree()
    tree["weight_discarded_frac"].values[:] = np.nan
    row = next(line for line in printed(tree, 200).splitlines() if "DropCold(frac" in line)
    assert "–" in row
    assert "nan" not in printed(tree, 200)


def test_comparison_table_policy_repr_is_not_markup():
    tree = make_tree()
    names = tree["arm_name"].values.astype(object)
    names[2] = "Mine([red]x[/red])"
    tree["arm_name"] = xr.DataArray(names.astype(str), dims="arm")
    assert "Mine([red]x[/red])" in printed(tree, 200)


def test_comparison_table_says_single_runs_and_incomplete():
    text = " ".join(printed(make_tree(complete=0, failed_arm="Mine()"), 200).split())
    assert "Each run once" in text
    assert "INCOMPLETE: stopped in Mine()" in text
    assert "[low, high]: 95 %" in text


def test_comparison_html_escapes_names():
    tree = make_tree()
    names = tree["arm_name"].values.astype(object)
    names[2] = "<b>&"
    tree["arm_name"] = xr.DataArray(names.astype(str), dims="arm")
    page = comparison_html(tree)
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page


@pytest.mark.parametrize("make", [comparison_frame, comparison_table, comparison_html])
def test_tables_of_something_else_are_refused(make):
    with pytest.raises(SchemaError, match="tree must be a comparison"):
        make(xr.DataTree())


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.3, -0.1, "better than chance"),
        (0.1, 0.3, "worse than chance"),
        (-0.1, 0.1, "not to be told from chance"),
        (np.nan, np.nan, "too few tokens to tell"),
    ],
)
def test_control_lines_judge_by_the_interval(low, high, verdict):
    tree = make_tree()
    tree["delta_nll_control_low"].values[2] = low
    tree["delta_nll_control_high"].values[2] = high
    lines = control_lines(tree)
    assert len(lines) == 1
    assert lines[0].startswith("DropCold(frac=0.75) less its control: ")
    assert verdict in lines[0]
    assert verdict in " ".join(printed(tree, 200).split())
