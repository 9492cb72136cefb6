"""The figure of what a policy changes: the numbers drawn are those of the metrics."""

import numpy as np
import pytest
import xarray as xr

import bmoe_lab as bl
from bmoe_lab import metrics
from bmoe_lab.errors import BmoeLabError, UnknownNameError
from bmoe_lab.plots import plot_policy_effect
from bmoe_lab.plots.policy_effect import effect_of
from tests.unit.edge_traces import EDGE_TRACES


@pytest.fixture
def pair():
    trace = bl.testing.make_trace(n_token=48, n_layer=3, seed=0)
    cache = {"residency": "lru", "budget": "150 KiB", "start": "cold"}
    return {
        "lossless": bl.replay(trace, **cache),
        "dropped": bl.replay(trace, routing=bl.routing.DropCold(1.0), **cache),
    }


def test_effect_numbers_are_those_of_the_metrics(pair):
    effect = effect_of(pair["dropped"])
    for name in ("hit_rate", "read_bytes_per_token", "drop_rate", "weight_discarded_frac"):
        assert effect.numbers[name] == float(getattr(metrics, name)(pair["dropped"])), name
    np.testing.assert_array_equal(
        effect.layers["hit_rate"], metrics.hit_rate(pair["dropped"], by="layer").values
    )


def test_effect_misses_times_expert_bytes_are_the_bytes_read(pair):
    effect = effect_of(pair["lossless"])
    np.testing.assert_allclose(
        effect.layers["misses_per_token"] * pair["lossless"]["expert_bytes"].values,
        effect.layers["read_bytes_per_token"],
    )


def test_plot_policy_effect_draws_a_line_and_a_point_per_run(pair):
    tree = xr.DataTree.from_dict({f"/{name}": run for name, run in pair.items()})
    figure = plot_policy_effect(tree, quantity="bytes")
    assert [one.name for one in figure.data] == ["lossless", "dropped"] * 2
    assert figure.layout.xaxis2.title.text == "router weight discarded (%)"
    assert figure.data[3].x[0] == 100 * float(metrics.weight_discarded_frac(pair["dropped"]))
    assert "counterfactual (open loop)" in figure.layout.title.subtitle.text


def test_plot_policy_effect_without_weights_counts_slots_instead(pair):
    run = pair["dropped"].drop_vars(["weight_chosen", "weight_applied"])
    figure = plot_policy_effect(run)
    assert figure.layout.xaxis2.title.text == "slots changed (%), weights unknown"
    assert figure.data[1].x[0] == 100 * float(metrics.drop_rate(run))


def test_plot_policy_effect_names_quantities(pair):
    with pytest.raises(UnknownNameError, match="hit_rate"):
        plot_policy_effect(pair["dropped"], quantity="hits")


@pytest.mark.parametrize("edge", EDGE_TRACES)
@pytest.mark.parametrize("quantity", ["misses", "hit_rate", "bytes"])
def test_plot_policy_effect_of_an_edge_is_a_picture_or_a_sentence(edge, quantity):
    trace = EDGE_TRACES[edge]()
    if edge == "no residency":
        with pytest.raises(BmoeLabError, match="must hold a run with 'residency'"):
            plot_policy_effect(trace, quantity=quantity)
        return
    figure = plot_policy_effect(trace, quantity=quantity)
    assert len(figure.data) == 2
    figure.to_json()
