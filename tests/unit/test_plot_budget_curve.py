"""The central figure: hit rate over cache size."""

import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.plots import plot_budget_curve

NAMES = ["lru", "lfu", "fifo", "belady", "stationary_oracle"]


@pytest.fixture(scope="module")
def grid():
    made = {f"t{seed}": bl.testing.make_trace(60, n_layer=3, seed=seed) for seed in range(2)}
    with pytest.warns(bl.errors.BmoeLabWarning, match="combinations cannot be"):
        return bl.sweep(
            made,
            residency=NAMES,
            budgets=bl.budgets(made, n=6),
            routing=[None, bl.routing.FewerExperts(2)],
            progress=False,
        )


@pytest.fixture(scope="module")
def figure(grid):
    return plot_budget_curve(grid, trace="t1")


def line(figure, start):
    (found,) = (drawn for drawn in figure.data if drawn.name.startswith(start))
    return found


def test_figure_draws_the_numbers_of_the_sweep(grid, figure):
    rates = 100 * grid.hit_rate_decode.sel(trace="t1", routing="none")
    for start, name in (("LRU", "lru"), ("Belady", "belady"), ("stationary", "stationary_oracle")):
        np.testing.assert_array_equal(line(figure, start).y, rates.sel(residency=name))
    size = np.asarray(line(figure, "LRU").x)
    np.testing.assert_allclose(size * 2**10, grid.budget)
    assert figure.layout.xaxis.title.text == "cache (KiB)"


def test_best_online_policy_is_the_highest_of_the_online_ones_and_names_itself(grid, figure):
    rates = 100 * grid.hit_rate_decode.sel(trace="t1", routing="none")
    online = rates.sel(residency=["lru", "lfu", "fifo"])
    best = line(figure, "best online")
    np.testing.assert_array_equal(best.y, online.max("residency"))
    for place, name in enumerate(best.customdata):
        assert float(online.sel(residency=name)[place]) == best.y[place]


def test_figure_draws_policies_that_were_given_as_objects():
    """The bounds were left out and LRU was one of the others: only names were looked for."""
    trace = bl.testing.make_trace(60, n_layer=3, seed=0)
    profile = np.ones((3, trace.attrs["n_expert"]))
    grid = bl.sweep(
        trace,
        residency=[
            bl.residency.LRU(),
            bl.residency.Belady(),
            bl.residency.StationaryOracle(),
            bl.residency.StationaryOracle(profile=profile),
        ],
        budgets=bl.budgets(trace, n=4),
        progress=False,
    )
    names = [drawn.name for drawn in plot_budget_curve(grid).data]
    starts = ["LRU", "Belady", "stationary oracle", "StationaryOracle(profile="]
    assert len(names) == 4
    assert all(name.startswith(start) for name, start in zip(names, starts, strict=True))


def test_best_online_policy_keeps_its_budget():
    trace = bl.testing.make_trace(200, n_layer=4, seed=0)
    cycle = int(bl.metrics.token_cycle_bytes(trace))
    over = bl.residency.PerLayer("lfu", trim="visited")
    grid = bl.sweep(
        trace, residency=["lru", "fifo", over], budgets=[cycle // 2, cycle], progress=False
    )
    rates = grid.hit_rate_decode.squeeze()
    assert float(rates.sel(residency=repr(over))[0]) > float(rates.max("residency")[0]) - 1e-12
    best = line(plot_budget_curve(grid), "best online")
    np.testing.assert_array_equal(
        best.y, 100 * rates.sel(residency=["lru", "fifo"]).max("residency")
    )


def test_figure_marks_the_token_cycle(grid, figure):
    cycle = float(grid.token_cycle_bytes.sel(trace="t1")) / 2**10
    (mark,) = figure.layout.shapes
    assert mark.x0 == mark.x1 == cycle
    (note,) = figure.layout.annotations
    assert 10**note.x == pytest.approx(cycle)
    assert "token cycle" in note.text


def test_figure_of_several_traces_wants_one_chosen(grid):
    with pytest.raises(SettingsError, match=r"trace must be chosen.*\['t0', 't1'\]"):
        plot_budget_curve(grid)
    with pytest.raises(UnknownNameError, match="trace must be one of"):
        plot_budget_curve(grid, trace="t9")


def test_figure_of_a_routing_policy_says_open_loop(grid):
    figure = plot_budget_curve(grid, trace="t0", routing="FewerExperts(n_used=2)")
    assert "counterfactual" in figure.layout.title.subtitle.text
    # Bounds that do not exist are not drawn.
    assert [drawn.name for drawn in figure.data] == [
        "other online policies", "other online policies", "best online policy", "LRU",
    ]  # fmt: skip


def test_figure_of_something_else_is_refused(grid):
    with pytest.raises(SchemaError, match=r"must be what bmoe_lab\.sweep returned"):
        plot_budget_curve(bl.testing.make_trace(8))
    with pytest.raises(SchemaError, match="Sweep with phase='prefill'"):
        plot_budget_curve(grid, trace="t0", phase="prefill")


def test_figure_is_found_by_the_accessor(grid):
    assert grid.moe.plot.budget_curve(trace="t0").data
