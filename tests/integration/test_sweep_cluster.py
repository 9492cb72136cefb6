"""A sweep on a dask cluster of two processes says, bit for bit, what it says in this one."""

import sys

import dask
import distributed
import numpy as np
import pytest
import xarray as xr

import bmoe_lab as bl
from bmoe_lab import residency, routing
from bmoe_lab.errors import SettingsError, SweepError
from bmoe_lab.simulation.sweeping import sweep
from bmoe_lab.testing import make_trace

# One process runs them all, so that one cluster is started.
pytestmark = pytest.mark.xdist_group("cluster")

BUDGETS = [40_000, 90_000, 160_000]
ASKED = {
    "residency": ["lru", "s3fifo", "belady", "stationary_oracle", "random"],
    "budgets": BUDGETS,
    "phase": ["prefill", "decode", "all"],
    "progress": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with (
        # By default scheduler and workers leave a folder behind in the system's own.
        dask.config.set(temporary_directory=str(tmp_path_factory.mktemp("dask"))),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as connected,
    ):
        yield connected


def a_trace(**changes):
    shape = {"n_token": 300, "n_layer": 3, "n_expert": 16, "n_prefill": 50, "n_ubatch": 16}
    return make_trace(**{**shape, "seed": 5, "text": False, "scores": True, **changes})


def small_chunks(rows):
    from bmoe_lab.simulation import chunked

    chunked.CHUNK_ROWS = rows


def test_sweep_on_a_cluster_equals_the_one_in_process(client):
    traces = {"a": a_trace(), "b": a_trace(n_token=80, seed=6)}
    expected = sweep(traces, **ASKED)
    xr.testing.assert_identical(sweep(traces, client=client, **ASKED), expected)


def test_sweep_on_a_cluster_with_routing_equals_the_one_in_process(client):
    asked = {**ASKED, "residency": ["lru", "lfu"]}
    asked["routing"] = [None, routing.DropCold(0.75), routing.CachePrior(0.3)]
    expected = sweep(a_trace(), **asked)
    xr.testing.assert_identical(sweep(a_trace(), client=client, **asked), expected)


def test_sweep_on_a_cluster_reads_zarr_in_chunks(client, tmp_path):
    trace = a_trace()
    path = bl.save_trace(trace, tmp_path / "synthetic.zarr")
    expected = sweep(trace, **ASKED)
    client.run(small_chunks, 500)
    try:
        xr.testing.assert_identical(sweep(path, client=client, **ASKED), expected)
        with bl.open_trace(path, memory_limit=0) as lazy:
            xr.testing.assert_identical(sweep(lazy, client=client, **ASKED), expected)
        with xr.open_zarr(path, consolidated=True) as backed:
            assert backed.chunks
            xr.testing.assert_identical(sweep(backed, client=client, **ASKED), expected)
    finally:
        client.run(small_chunks, 2_000_000)


def users_policies():
    """Return policies that no worker can import: they travel by value."""

    class Lowest(residency.PlainPolicy):
        def __init__(self, fails=False, budget=None):
            self.fails = fails
            self.budget = budget

        def victim(self, evictable):
            if self.fails:
                raise ZeroDivisionError("a slip of the user's")
            return int(evictable[0])

    return Lowest(), Lowest(fails=True)


def test_sweep_on_a_cluster_takes_a_users_policy(client):
    plain, _ = users_policies()
    asked = {**ASKED, "residency": [plain]}
    expected = sweep(a_trace(), **asked)
    xr.testing.assert_identical(sweep(a_trace(), client=client, **asked), expected)


def test_sweep_on_a_cluster_failing_policy_keeps_what_was_finished(client):
    _, faulty = users_policies()
    with pytest.raises(SweepError, match=r"ZeroDivisionError: a slip.*fails=True") as caught:
        sweep(a_trace(), client=client, **{**ASKED, "residency": ["lru", faulty]})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.partial.attrs["complete"] == 0
    assert np.isnan(caught.value.partial.hit_rate_all.isel(residency=1)).all()


def test_sweep_on_a_cluster_interrupted_returns_what_was_finished(client, monkeypatch):
    inner = distributed.as_completed

    def interrupted(futures):
        first = next(iter(inner(futures)))
        yield first
        raise KeyboardInterrupt

    monkeypatch.setattr(distributed, "as_completed", interrupted)
    with pytest.warns(bl.errors.BmoeLabWarning, match="interrupted: .* of 15 cells"):
        grid = sweep(a_trace(), client=client, **ASKED)
    assert grid.attrs["complete"] == 0
    done = ~np.isnan(grid.hit_rate_all.values)
    assert done.any()
    np.testing.assert_array_equal(
        grid.hit_rate_all.values[done], sweep(a_trace(), **ASKED).hit_rate_all.values[done]
    )


def test_sweep_refuses_what_is_no_client():
    with pytest.raises(SettingsError, match=r"must be a dask.distributed.Client; got 'tcp://x'"):
        sweep(a_trace(), client="tcp://x", **ASKED)


def test_sweep_on_a_cluster_refuses_threads_of_its_own():
    with pytest.raises(SettingsError, match="n_jobs must be left out with a client; got 2"):
        sweep(a_trace(), client=object(), n_jobs=2, **ASKED)


def test_sweep_without_dask_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(SettingsError, match=r"pip install 'bmoe-lab\[dask\]'"):
        sweep(a_trace(), client=object(), **ASKED)
