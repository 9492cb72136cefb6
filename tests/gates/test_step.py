"""Being told of every evaluation changes no bit of the logits."""

import pytest

import bmoe_lab as bl
from tests.gates.harness import assert_same_bits, open_session, pieces, streamed

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("record", ["off", "ids", "scores"])
def test_logits_with_steps_equal_plain(demo_case, record):
    steps = []
    with open_session(demo_case, cache="1400 KiB") as session:
        actual, run = streamed(session, demo_case, record=record, on_step=steps.append)
    assert_same_bits(actual, demo_case.expected)
    assert [step.n_token for step in steps] == [stop - start for start, stop in pieces()]
    assert steps[-1].decode == run.summary.decode


@pytest.mark.parametrize("policy", [bl.routing.DropCold(0.75), bl.routing.CachePrior(0.3)])
def test_logits_of_a_lossy_run_with_steps_equal_those_without(demo_case, policy):
    with open_session(demo_case, cache="1400 KiB") as session:
        without, _ = streamed(session, demo_case, policy=policy)
        told, run = streamed(session, demo_case, policy=policy, on_step=lambda step: None)
    assert_same_bits(told, without)
    assert run.summary.fired
