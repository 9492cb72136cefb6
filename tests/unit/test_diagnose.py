"""A diagnosis names what the numbers show, and shows the numbers."""

import math

import numpy as np
import pytest

from bmoe_lab import metrics
from bmoe_lab.converters import from_bigmoeonedge
from bmoe_lab.errors import SettingsError
from bmoe_lab.simulation import replay
from bmoe_lab.simulation.diagnosis import chance_hit_rate, diagnose
from bmoe_lab.testing import make_trace


def a_trace(**changes):
    shape = {"n_token": 200, "n_layer": 4, "n_expert": 32, "n_prefill": 0, "seed": 2}
    return make_trace(**{**shape, **changes})


def evenly_used(n_token=400):
    """Return a trace whose router draws every expert with the same probability."""
    trace = a_trace(n_token=n_token)
    rng = np.random.default_rng(0)
    shape = (*trace.expert_chosen.shape[:2], trace.attrs["n_expert"])
    drawn = np.argsort(rng.random(shape), axis=2)[:, :, : trace.sizes["slot"]].astype(np.int16)
    return trace.assign(
        expert_chosen=trace.expert_chosen.copy(data=drawn),
        expert_applied=trace.expert_applied.copy(data=drawn),
    )


def test_diagnose_budget_below_one_token_is_below_the_cliff():
    trace = a_trace()
    cycle = int(metrics.token_cycle_bytes(trace))
    found = diagnose(trace, cycle - trace.sizes["slot"] * int(trace.expert_bytes.max()))
    assert found.verdict == "below the cliff"
    assert found.numbers["hit_rate_lru"] == 0.0
    assert found.numbers["hit_rate_belady"] > 0.0


def test_diagnose_skewed_use_is_a_hot_set():
    trace = a_trace()
    found = diagnose(trace, 2 * int(metrics.token_cycle_bytes(trace)))
    assert found.verdict == "hot set"
    assert found.numbers["hot_set_strength"] > 0.3


def test_diagnose_even_use_is_no_hot_set_though_it_is_short():
    for n_token in (40, 400):
        trace = evenly_used(n_token)
        found = diagnose(trace, 2 * int(metrics.token_cycle_bytes(trace)))
        assert found.verdict == "no hot set"
        assert abs(found.numbers["hot_set_strength"]) < 0.1


def test_diagnose_room_for_everything_is_said():
    trace = a_trace()
    found = diagnose(trace, int(metrics.expert_bank_bytes(trace)))
    assert found.verdict == "everything fits"
    assert found.numbers["slots_per_demand"] >= 1


def test_diagnose_numbers_are_those_of_the_metrics_and_of_replays():
    trace = a_trace(n_prefill=40)
    size = 2 * int(metrics.token_cycle_bytes(trace))
    found = diagnose(trace, size).numbers
    for name, policy in (
        ("lru", "lru"), ("belady", "belady"), ("oracle", "stationary_oracle")
    ):  # fmt: skip
        again = replay(trace, residency=policy, budget=size)
        assert found[f"hit_rate_{name}"] == float(metrics.hit_rate(again))
    assert found["token_cycle_bytes"] == int(metrics.token_cycle_bytes(trace))
    assert found["slots_per_demand"] == size / float(metrics.used_bytes(trace).sum())
    assert found["top8_share"] == float(metrics.top_share(trace, 8).mean())


def test_diagnose_by_default_takes_the_recorded_budget_and_its_hits():
    trace = a_trace()
    found = diagnose(trace).numbers
    assert found["budget_bytes"] == trace.attrs["cache_budget_bytes"]
    assert found["hit_rate_realised"] == float(metrics.hit_rate(trace))
    assert found["hit_rate_realised"] == found["hit_rate_lru"]


def test_diagnose_under_another_budget_the_recorded_hits_are_unknown():
    assert math.isnan(diagnose(a_trace(), "100 KiB").numbers["hit_rate_realised"])


def test_diagnose_without_recorded_residency_the_hits_are_unknown():
    trace = a_trace()
    bare = trace.drop_vars(["residency", "read_bytes"])
    assert math.isnan(diagnose(bare).numbers["hit_rate_realised"])
    assert "recorded unknown" in repr(diagnose(bare))


def test_diagnose_without_any_budget_is_refused():
    trace = a_trace()
    del trace.attrs["cache_budget_bytes"]
    with pytest.raises(SettingsError, match="budget must be given for a trace that does not"):
        diagnose(trace)


def test_diagnose_is_short_in_text_and_whole_in_a_notebook():
    found = a_trace().moe.diagnose()
    assert repr(found).startswith(f"<{found.verdict}: ")
    assert len(repr(found)) < 200
    page = found._repr_html_()
    assert found.advice in page
    assert all(words in page for words, _ in found.rows())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("mean", [0.3, 2.0, 50.0])
def test_chance_hit_rate_is_what_even_draws_give(mean, share):
    n_expert = 20_000
    uses = np.sort(np.random.default_rng(1).poisson(mean, n_expert))[::-1]
    expected = uses[: int(share * n_expert)].sum() / uses.sum()
    assert chance_hit_rate(mean, share) == pytest.approx(expected, abs=0.02)


def test_diagnose_of_a_phase_that_asks_for_nothing_is_refused():
    """It said "no hot set" of numbers that were all unknown."""
    trace = a_trace(n_token=5, n_prefill=5)
    with pytest.raises(SettingsError, match=r"phase must be one in which .*; got 'decode'"):
        diagnose(trace, "100 KiB")
    assert diagnose(trace, "100 KiB", phase="prefill").verdict


def test_chance_hit_rate_without_lookups_is_unknown():
    assert math.isnan(chance_hit_rate(0.0, 0.5))


@pytest.mark.reference_data
@pytest.mark.parametrize(
    ("name", "mib", "lru", "belady", "used", "top8"),
    [
        ("qwen", 4000, 80.3, 92.7, 50, 44.5),
        ("gemma", 4000, 81.9, 92.9, 53, None),
        ("gptoss", 3000, 44.8, None, 28, None),
    ],
)
def test_diagnose_of_recorded_traces_gives_the_published_figures(
    reference_data, name, mib, lru, belady, used, top8
):
    folder = reference_data / "bigmoeonedge" / "2026-07-15-route-trace"
    trace = from_bigmoeonedge(folder / f"{name}.route.csv")
    # The files do not tell the size of the cache: their hits are at an unknown one.
    assert math.isnan(diagnose(trace, f"{mib} MiB").numbers["hit_rate_realised"])
    trace.attrs["cache_budget_bytes"] = mib * 2**20
    found = diagnose(trace).numbers
    assert round(100 * found["hit_rate_lru"], 1) == lru
    assert found["hit_rate_realised"] == found["hit_rate_lru"]
    if belady:
        assert round(100 * found["hit_rate_belady"], 1) == belady
    if top8:
        assert round(100 * found["top8_share"], 1) == top8
    assert 100 * found["experts_used_frac"] == pytest.approx(used, abs=1)
