"""Lossless means byte-identical: logits of a session against plain llama.cpp, bit for bit."""

import gc

import numpy as np
import pytest

import bmoe_lab as bl
from tests.gates.harness import assert_same_bits, open_session, plain_case, streamed

pytestmark = [
    pytest.mark.gate,
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.CacheBelowCycleWarning"),
    pytest.mark.filterwarnings("ignore::bmoe_lab.errors.PolicyNeverFiredWarning"),
]

LAYOUTS = [
    "qwen3moe",
    "fused",
    "shared",
    "leading_dense",
    "biased",
    "wide",
    "combined",
    "narrow",
]


@pytest.fixture(params=["demo", *LAYOUTS])
def case(request, demo_case, tiny_case):
    return demo_case if request.param == "demo" else tiny_case(request.param)


def small_cache(case) -> int:
    """Return a budget of about one and a half experts per layer: it evicts constantly."""
    with open_session(case, cache=0) as session:
        info = session.info()
    return sum(info["expert_bytes"]) * 3 // 2


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_logits_cache_off_equal_plain(case, lanes, direct):
    with open_session(case, cache=0, io_lanes=lanes, direct=direct) as session:
        if session.direct is not direct:
            pytest.skip("O_DIRECT is not in effect on this file system")
        actual, run = streamed(session, case)
        assert session.direct is direct
    assert_same_bits(actual, case.expected)
    assert run.summary.decode.hits == 0


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_logits_small_cache_evicting_constantly_equal_plain(case, lanes, direct):
    with open_session(case, cache=small_cache(case), io_lanes=lanes, direct=direct) as session:
        if session.direct is not direct:
            pytest.skip("O_DIRECT is not in effect on this file system")
        actual, run = streamed(session, case)
    assert_same_bits(actual, case.expected)
    assert run.summary.decode.evictions > 0


def test_logits_large_cache_equal_plain(case):
    with open_session(case, cache="1 GiB") as session:
        actual, run = streamed(session, case)
    assert_same_bits(actual, case.expected)
    assert run.summary.decode.hits > 0
    assert run.summary.decode.evictions == 0


def test_logits_dense_anon_equal_plain(case):
    with open_session(case, cache=small_cache(case), dense="anon") as session:
        actual, _ = streamed(session, case)
    assert_same_bits(actual, case.expected)


@pytest.mark.parametrize("record", ["off", "ids", "scores", "scores16"])
def test_logits_recording_equal_plain(case, record):
    with open_session(case, cache=small_cache(case)) as session:
        actual, run = streamed(session, case, record=record)
    assert_same_bits(actual, case.expected)
    assert (run.trace is None) == (record == "off")


def test_logits_second_run_warm_then_cold_equal_plain(case):
    with open_session(case, cache=2 * small_cache(case)) as session:
        first, _ = streamed(session, case)
        warm, run = streamed(session, case, start="warm", record="ids")
        cold, _ = streamed(session, case, start="cold")
    assert_same_bits(first, case.expected)
    assert_same_bits(warm, case.expected)
    assert_same_bits(cold, case.expected)
    assert run.trace.attrs["cache_start"] == "warm"


@pytest.mark.parametrize("policy", ["drop", "prior"])
@pytest.mark.parametrize("record", ["off", "scores"])
def test_logits_inert_policy_looked_and_changed_nothing(case, policy, record):
    inert = bl.routing.DropCold(1e-6) if policy == "drop" else bl.routing.CachePrior(1e-6)
    with open_session(case, cache=small_cache(case)) as session:
        actual, run = streamed(session, case, policy=inert, record=record)
    assert_same_bits(actual, case.expected)
    assert run.summary.counters.examined > 0
    assert run.summary.counters.changed == 0
    assert not run.summary.fired


def test_logits_drop_everything_with_one_expert_used_equal_plain(demo_case):
    """The only expert of a routing is its best one, and the best one always stays."""
    from tests.gates.conftest import TEXT

    case = plain_case(demo_case.path, TEXT, n_used=1)
    with open_session(case, cache=small_cache(case)) as session:
        actual, run = streamed(session, case, policy=bl.routing.DropCold(1.0, prefill=True))
    assert_same_bits(actual, case.expected)
    assert run.summary.counters.examined > 0
    assert run.summary.counters.changed == 0


def test_logits_two_compute_threads_equal_plain(demo_case):
    from tests.gates.conftest import TEXT

    case = plain_case(demo_case.path, TEXT, n_threads=2)
    with open_session(case, cache=small_cache(case), n_threads=2) as session:
        actual, _ = streamed(session, case, record="scores")
    assert_same_bits(actual, case.expected)


def test_logits_two_sessions_at_once_equal_plain(demo_case, tiny_case):
    other = tiny_case("qwen3moe")
    with (
        open_session(demo_case, cache=small_cache(demo_case)) as first,
        open_session(other, cache=small_cache(other)) as second,
    ):
        for session, case in ((first, demo_case), (second, other), (first, demo_case)):
            actual, _ = streamed(session, case)
            assert_same_bits(actual, case.expected)


def test_logits_forced_garbage_collection_equal_plain(demo_case):
    """Everything that C points to is referenced: collecting in the middle is harmless."""

    class Collecting(bl.routing.RoutingPolicy):
        def weigh(self, routing):
            gc.collect(0)
            return None

    with open_session(demo_case, cache=small_cache(demo_case)) as session:
        actual, run = streamed(session, demo_case, policy=Collecting(), record="ids")
    assert_same_bits(actual, demo_case.expected)
    assert run.summary.counters.examined > 0


def test_poison_shows_a_skipped_read(demo_case, monkeypatch):
    """Test the test: if experts are not read, the gate notices."""
    with open_session(demo_case, cache=small_cache(demo_case)) as session:
        reader = session._model.streamer.reader
        monkeypatch.setattr(reader, "read", lambda *_: None)
        actual, _ = streamed(session, demo_case)
    assert not np.array_equal(actual.view(np.uint32), demo_case.expected.view(np.uint32))
