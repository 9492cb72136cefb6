"""compare() on the demo model: exact where it must be, and nothing finished is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import bmoe_lab as bl
from bmoe_lab.errors import ComparisonError, ComparisonInterrupted
from bmoe_lab.schema import Phase, validate


@pytest.fixture(scope="module")
def session():
    # The cache holds about a third of the experts: policies that look at it have work.
    with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_ctx=256, n_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def text() -> list[str]:
    return [bl.datasets.heldout(domain)[0].text[:260] for domain in ("kjv", "python")]


@pytest.fixture(scope="module")
def tree(session, text) -> xr.DataTree:
    policies = [bl.routing.DropCold(0.75), bl.routing.CachePrior(0.15)]
    return bl.compare(session, text, policies=policies, controls=True, progress=False)


def test_compare_noise_floor_on_one_machine_is_exactly_zero(tree):
    assert float(tree["kl_max"][1]) == 0.0
    np.testing.assert_array_equal(tree["lossless"]["nll"], tree["lossless again"]["nll"])


def test_compare_losses_are_those_of_the_session(session, text, tree):
    run = session.score(text)
    nll = tree["lossless"]["nll"].values
    np.testing.assert_allclose(nll[~np.isnan(nll)], -run.logprob, rtol=1e-12)
    np.testing.assert_allclose(float(tree["perplexity"][0]), run.perplexity, rtol=1e-12)
    assert float(tree["n_scored"][0]) == len(run.tokens)


def test_compare_policies_fire_and_controls_change_as_much(tree):
    assert tree["fired"].values.tolist() == [-1, -1, 1, 1, 1, 1]
    changed = (tree["drop_rate"] + tree["substitution_rate"]).values
    np.testing.assert_allclose(changed[[3, 5]], changed[[2, 4]], rtol=0.15)
    assert (
        tree["read_bytes_per_token"].values[[2, 4]] < tree["read_bytes_per_token"].values[0]
    ).all()


def test_compare_bytes_and_hits_are_those_that_the_run_counted(session, text, tree):
    run = session.score(text, policy=bl.routing.DropCold(0.75))
    row = tree.to_dataset().isel(arm=2)
    assert float(row.read_bytes_per_token) == run.summary.read_bytes_per_token
    assert float(row.hit_rate) == pytest.approx(run.summary.decode.hit_rate, rel=1e-12)
    assert float(row.changed_rate) == run.summary.counters.rate


def test_compare_context_is_lossless_in_every_run(tree):
    for node in tree.children.values():
        trace = validate(node.to_dataset())
        context = trace.isel(token=trace.phase.values == Phase.prefill)
        assert not np.isin(context.action.values, (1, 2, 3)).any()


@pytest.mark.parametrize("ending", ["nc", "zarr"])
def test_compare_tree_comes_back_equal_from_disk(tree, ending, tmp_path):
    path = tmp_path / f"tree.{ending}"
    bl.save_trace(tree, path)
    xr.testing.assert_identical(bl.open_trace(path), tree)


def test_compare_interrupt_keeps_finished_runs_on_disk_too(session, text, tmp_path):
    path = tmp_path / "tree.nc"

    def stop(progress):
        if progress.index == 2 and progress.done == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(ComparisonInterrupted) as caught:
        bl.compare(
            session,
            text,
            policies=[bl.routing.DropCold(0.75)],
            save=path,
            progress=stop,
        )
    assert list(caught.value.tree.children) == ["lossless", "lossless again"]
    saved = bl.open_trace(path)
    assert list(saved.children) == ["lossless", "lossless again"]
    assert saved.attrs["complete"] == 0
    # The session goes on, to the last bit.
    again = session.score(text)
    nll = saved["lossless"]["nll"].values
    np.testing.assert_array_equal(nll[~np.isnan(nll)], -again.logprob)


class Raises(bl.routing.RoutingPolicy):
    """A user's policy with a mistake in it."""

    def weigh(self, routing):
        if routing.positions[0] > 40:
            raise ZeroDivisionError("the user's own words")


def test_compare_users_exception_is_the_cause(session, text):
    with pytest.raises(ComparisonError, match="the user's own words") as caught:
        bl.compare(session, text, policies=[Raises()], noise_floor=False, progress=False)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert list(caught.value.tree.children) == ["lossless"]


def test_compare_report_of_a_real_run_is_small(tree, tmp_path):
    path: Path = tree.moe.report(tmp_path / "report.html")
    assert path.stat().st_size < 6 * 10**6
