"""What every kernel promises to its caller: one signature, parameters and memory per layer."""

import numpy as np
import pytest
from numba import njit, types

from bmoe_lab import routing
from bmoe_lab.errors import PolicyError
from bmoe_lab.routing import (
    Buddy,
    CachePrior,
    DropCold,
    Engine,
    RandomSubstitute,
    RatioSkip,
    ResidentOnly,
    RoutingPolicy,
    SensitivitySkip,
)
from bmoe_lab.routing.signature import SELECT_TYPE, WEIGH_TYPE
from bmoe_lab.testing.suites import RoutingPolicySuite
from tests.unit.routing_cases import seen

N_LAYER, N_EXPERT = 3, 16
TABLE = np.random.default_rng(5).integers(0, 9, size=(N_LAYER, N_EXPERT, N_EXPERT))
STRENGTH = {
    "fewer_experts": (2,),
    "drop_cold": (1.0,),
    "drop_below": (0.2,),
    "ratio_skip": ([0.3, 0.6, 0.9],),
    "sensitivity_skip": (0.05, [1.0, 2.0, 0.5]),
    "top_p": (0.8,),
    "cache_prior": (0.3, 1, "running"),
    "max_rank": (1, 10),
    "cum_sum": (1, 0.9),
    "buddy": (TABLE, 5, 0.5),
    "resident_only": (3, 0.5),
    "random_drop": (0.5,),
    "random_substitute": (0.5,),
}
POLICIES = [routing.get(name)(*args) for name, args in STRENGTH.items()]


def test_every_policy_with_a_kernel_is_among_those_tested_here():
    assert {n for n in routing.names() if routing.get(n).kernel is not None} == set(STRENGTH)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy_is_registered_and_cites_its_source(policy):
    assert routing.get(policy.name) is type(policy)
    assert policy.citation
    assert policy.array_parameters <= set(policy.get_params())


def bulk(pointer, out_type):
    """Return a compiled loop that is handed a kernel as a pointer, as a replay does it."""
    arguments = pointer.signature.args
    rows = types.float64[:, ::1]

    @njit(
        types.int64(pointer, *arguments[:4], types.int64[::1], types.boolean, rows, rows, out_type)
    )
    def walk(kernel, ids, values, resident, positions, layers, log_scores, parameters, state, out):
        n_changed = 0
        for i in range(len(layers)):
            layer = layers[i]
            n_changed += kernel(
                ids[i : i + 1],
                values[i : i + 1],
                resident,
                positions[i : i + 1],
                layer,
                7,
                log_scores,
                parameters[layer],
                state[layer],
                out[i : i + 1],
            )
        return n_changed

    return walk


@pytest.fixture(scope="module")
def walks():
    return {
        "select": bulk(SELECT_TYPE, types.int32[:, ::1]),
        "weigh": bulk(WEIGH_TYPE, types.boolean[:, ::1]),
    }


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_kernel_as_a_pointer_decides_as_in_a_session(policy, walks):
    """The types fit exactly, and parameters and memory of all layers come in one piece each."""
    suite = RoutingPolicySuite()
    batches = suite.make_batches()
    resident = batches[0].resident
    live, bulk = policy.clone(), policy.clone()
    rows, values, expected = [], [], []
    for batch in batches:
        batch.resident = resident
        batch.weights = suite.weights_of(batch, batch.ids)
        unchanged = batch.ids if policy.stage == "select" else np.zeros(batch.ids.shape, bool)
        answer = live.run_kernel(batch)
        rows.append(batch.ids[0])
        values.append((batch.scores if policy.stage == "select" else batch.weights)[0])
        expected.append(unchanged[0] if answer is None else answer[0])
    ids = np.array(rows, np.int32)
    out = ids.copy() if policy.stage == "select" else np.zeros(ids.shape, bool)
    kernel = bulk.kernel
    n_changed = walks[policy.stage](
        kernel,
        ids,
        np.array(values, np.float32),
        resident,
        np.array([batch.positions[0] for batch in batches], np.int32),
        np.array([batch.layer for batch in batches], np.int64),
        False,
        bulk.layer_parameters(N_LAYER),
        bulk.layer_state(N_LAYER, N_EXPERT),
        out,
    )
    np.testing.assert_array_equal(out, expected)
    unchanged = ids if policy.stage == "select" else np.zeros(ids.shape, bool)
    assert n_changed == np.count_nonzero(out != unchanged) > 0
    # What the loop wrote into the memory is the policy's own.
    assert bulk.extra_counts() == live.extra_counts()
    np.testing.assert_array_equal(
        bulk.layer_state(N_LAYER, N_EXPERT), live.layer_state(N_LAYER, N_EXPERT)
    )


def test_layer_parameters_repeat_what_all_layers_share():
    assert DropCold(0.5).layer_parameters(3).tolist() == [[0.5]] * 3
    assert DropCold(0.5).layer_parameters(0).size == 0
    assert SensitivitySkip(0.5, [1, 2, 3]).layer_parameters(3).tolist() == [
        [0.5, 1.0],
        [0.5, 2.0],
        [0.5, 3.0],
    ]
    for policy in (DropCold(0.5), RatioSkip([0.1, 0.2]), Buddy(TABLE)):
        array = policy.layer_parameters(2)
        assert array.dtype == np.float64
        assert array.flags.c_contiguous


def test_buddy_works_out_its_lists_once_and_again_after_reset():
    policy = Buddy(TABLE.copy())
    first = policy.parameters_at(1)
    assert policy.parameters_at(1) is first
    policy.table[1] = 0
    policy.reset()
    assert (policy.parameters_at(1)[5:] == -1).all()
    assert (first[5:] >= 0).any()


def test_state_grows_with_layers_and_experts_and_keeps_what_it_holds():
    policy = ResidentOnly(every=1, frac=0.5)
    assert policy.state_size(16) == 34
    small = policy.layer_state(2, 8)
    small[1, :3] = [4, 1, 0.5]
    grown = policy.layer_state(5, 16)
    assert grown.shape == (5, 34)
    assert grown[1, :3].tolist() == [4, 1, 0.5]
    assert grown.sum() == 5.5
    grown[4, 0] = 2
    assert policy.layer_state(5, 8)[4, 0] == 2
    policy.reset()
    assert policy.layer_state(5, 8).sum() == 0


def test_layers_with_different_numbers_of_experts_do_not_mix():
    """A layer's memory is as wide as the largest layer's; each kernel goes by its own width."""
    mixed, alone = Engine(ResidentOnly(1, 0.25)), Engine(ResidentOnly(1, 0.25))
    rng = np.random.default_rng(2)
    for step in range(30):
        for layer, n_expert in enumerate((8, 16)):
            scores = rng.normal(size=n_expert)
            ids = np.argsort(-scores)[:2]
            looked_at = seen(ids, scores=scores, n_expert=n_expert, layer=layer)
            one = mixed.select(looked_at)
            if layer == 0:
                other = alone.select(looked_at)
                assert (one is None) == (other is None), step
                assert one is None or one.ids.tolist() == other.ids.tolist()
    assert alone.counters.changed > 0


@pytest.mark.parametrize("policy", [CachePrior(0.5), CachePrior(0.5, range="running")], ids=repr)
def test_kernel_that_needs_scores_is_not_run_without(policy):
    """It would read beyond an empty array."""
    with pytest.raises(PolicyError, match=r"must see the router's scores.*record='scores'"):
        policy.run_kernel(seen([0, 1, 2, 3], resident=[5]))
    assert RandomSubstitute(1.0).run_kernel(seen([0, 1, 2, 3], resident=[5])) is not None


def test_policy_of_ones_own_may_have_parameters_per_layer():
    class Thresholds(RoutingPolicy):
        kernel = DropCold.kernel

        def __init__(self, fracs):
            self.fracs = fracs

        def parameters_at(self, layer):
            return np.array([self.fracs[layer]])

    engine = Engine(Thresholds(np.array([0.0, 1.0])))
    weights = [0.6, 0.2, 0.1, 0.1]
    assert engine.weigh(seen([0, 1, 2, 3], weights=weights)) is None
    assert engine.weigh(seen([0, 1, 2, 3], weights=weights, layer=1)).dropped == 3
