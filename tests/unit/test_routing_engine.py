"""What must not be got wrong when a policy's answer is applied, whoever wrote the policy."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bmoe_lab.errors import PolicyError
from bmoe_lab.routing import Counters, DropCold, Engine, Lossless, Routing, RoutingPolicy
from bmoe_lab.routing.engine import (
    DROPPED,
    KEPT,
    REWEIGHTED,
    SUBSTITUTED,
    apply_selection,
    apply_weights,
    as_policy,
    strongest,
)


class Selects(RoutingPolicy):
    """Return what it is told to, at the top-k."""

    def __init__(self, answer=None):
        self.answer = answer

    def select(self, routing):
        return self.answer


class Weighs(RoutingPolicy):
    """Return what it is told to, at the weights."""

    def __init__(self, answer=None, renormalise=True, prefill=False):
        self.answer = answer
        self.renormalise = renormalise
        self.prefill = prefill

    def weigh(self, routing):
        return self.answer


def make_routing(ids=((0, 1, 2, 3), (4, 5, 6, 7)), weights=None, resident=(), phase=1):
    ids = np.array(ids, dtype=np.int32)
    mask = np.zeros(8, dtype=bool)
    mask[list(resident)] = True
    if weights is None:
        weights = np.tile([0.4, 0.3, 0.2, 0.1], (len(ids), 1))[:, : ids.shape[1]]
    return Routing(
        layer=5,
        block=6,
        phase=phase,
        positions=np.arange(100, 100 + len(ids), dtype=np.int32),
        ids=ids,
        scores=None,
        score_kind="other",
        weights=np.array(weights, dtype=np.float32),
        resident=mask,
        expert_bytes=1000,
    )


def mask_of(*rows):
    return np.array(rows, dtype=bool)


# --- selection ------------------------------------------------------------------------------------


def test_select_of_the_same_set_in_another_order_writes_nothing():
    routing = make_routing()
    assert Engine(Selects(routing.ids[:, ::-1])).select(routing) is None


def test_select_changes_only_rows_whose_set_changed():
    routing = make_routing()
    selection = Engine(Selects(np.array([[3, 2, 1, 0], [5, 4, 0, 7]]))).select(routing)
    assert selection.ids.tolist() == [[0, 1, 2, 3], [4, 5, 0, 7]]
    assert selection.action.tolist() == [[KEPT] * 4, [KEPT, KEPT, SUBSTITUTED, KEPT]]
    assert selection.changed_slots == 1
    assert selection.ids.dtype == np.int32


def test_apply_selection_without_a_change_returns_the_routers_array():
    ids = make_routing().ids
    assert apply_selection(ids, ids.astype(np.int64)[:, ::-1].copy()).ids is ids


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_apply_selection_runs_the_asked_set_and_moves_nobody_who_stays(seed, width):
    rng = np.random.default_rng(seed)
    router = np.stack([rng.permutation(8)[:width] for _ in range(4)]).astype(np.int32)
    asked = np.stack([rng.permutation(8)[:width] for _ in range(4)])
    selection = apply_selection(router, asked)
    for chosen, new, applied, action in zip(
        router, asked, selection.ids, selection.action, strict=True
    ):
        assert sorted(applied) == sorted(new)
        assert ((applied == chosen) == (action == KEPT)).all()
        newcomers = [e for e in new.tolist() if e not in chosen]
        assert applied[action == SUBSTITUTED].tolist() == newcomers


# --- what a policy of one's own may get wrong -----------------------------------------------------

GOOD = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (GOOD[:, :3], r"must have shape \(token, slot\) = \(2, 4\); got shape \(2, 3\)"),
        (GOOD[0], r"got shape \(4,\)"),
        (7, r"got shape \(\)"),
        (GOOD.astype(float), "must be integers; got dtype float64"),
        (np.full((2, 4), np.nan), "must be integers; got dtype float64"),
        (GOOD > 2, "must be integers; got dtype bool"),
        (GOOD.astype(str), "must be integers; got dtype <U"),
        ([[0, 1, 2, 8], [4, 5, 6, 7]], r"must lie in \[0, 8\); got 8 in row 0, slot 3"),
        ([[0, 1, 2, 3], [-1, 5, 6, 7]], "got -1 in row 1, slot 0"),
        (np.array([[0, 1, 2, 2**63], [4, 5, 6, 7]], dtype=np.uint64), r"must lie in \[0, 8\)"),
        (
            [[0, 1, 2, 3], [4, 5, 4, 7]],
            "must be distinct within a token; got 4 again in row 1, slot 2",
        ),
    ],
)
def test_select_refuses_what_cannot_be_applied(answer, message):
    engine = Engine(Selects(answer))
    with pytest.raises(PolicyError, match=message) as caught:
        engine.select(make_routing())
    assert "Selects(answer=" in str(caught.value)
    assert engine.counters == Counters()


def test_select_error_says_layer_and_position():
    with pytest.raises(PolicyError, match=r"\(layer 5, position 101\)"):
        Engine(Selects([[0, 1, 2, 3], [4, 5, 6, 99]])).select(make_routing())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((2, 3), bool), r"must have shape \(token, slot\) = \(2, 4\); got shape \(2, 3\)"),
        (np.zeros(4, bool), r"got shape \(4,\)"),
        (np.zeros((2, 4), np.int64), "must be bool .* or float .*; got dtype int64"),
        (np.zeros((2, 4), complex), "got dtype complex128"),
        (np.array([[None] * 4] * 2), "got dtype object"),
        (
            [[0.4, 0.3, math.nan, 0.1], [0.4, 0.3, 0.2, 0.1]],
            "must be finite in float32; got nan in row 0, slot 2",
        ),
        ([[0.4, 0.3, 0.2, 0.1], [math.inf, 0.3, 0.2, 0.1]], "got inf in row 1, slot 0"),
        ([[0.4, 0.3, 0.2, 1e300], [0.4, 0.3, 0.2, 0.1]], r"got 1e\+300 in row 0, slot 3"),
        ([[0.4, 0.3, 0.2, 0.1], [0.0] * 4], "must leave a token at least one that is not 0"),
    ],
)
def test_weigh_refuses_what_cannot_be_applied(answer, message):
    engine = Engine(Weighs(answer))
    with pytest.raises(PolicyError, match=message) as caught:
        engine.weigh(make_routing())
    assert "Weighs(answer=" in str(caught.value)
    assert engine.counters == Counters()


class Oops(Exception):
    pass


def test_exception_of_the_policy_passes_through_unchanged_and_counts_nothing():
    class Raises(RoutingPolicy):
        def select(self, routing):
            raise Oops("mine")

        def weigh(self, routing):
            raise Oops("mine too")

    engine = Engine(Raises())
    with pytest.raises(Oops, match=r"^mine$"):
        engine.select(make_routing())
    with pytest.raises(Oops, match=r"^mine too$"):
        engine.weigh(make_routing())
    assert engine.counters == Counters()


def test_policy_that_writes_into_the_routing_is_stopped_before_it_does():
    class Scribbles(RoutingPolicy):
        def select(self, routing):
            routing.ids[0, 0] = 7

    routing = make_routing()
    before = routing.ids.copy()
    with pytest.raises(ValueError, match="read-only"):
        Engine(Scribbles()).select(routing)
    np.testing.assert_array_equal(routing.ids, before)
    routing.ids[0, 0] = 5  # the session's own arrays stay writable


def test_as_policy_refuses_what_is_no_policy():
    for wrong, message in (
        (DropCold, "got the class DropCold. Call it"),
        ("drop_cold", "got 'drop_cold'. Derive your class"),
        (object(), "Derive your class from bmoe_lab.routing.RoutingPolicy"),
        (RoutingPolicy(), "must define select or weigh"),
    ):
        with pytest.raises(PolicyError, match=message):
            as_policy(wrong)
    assert as_policy(None) == Lossless()


def test_engine_runs_a_clone():
    policy = DropCold(0.5)
    assert Engine(policy).policy == policy
    assert Engine(policy).policy is not policy


def test_constructor_that_hides_its_parameters_is_refused():
    class Hides(Weighs):
        def __init__(self, **options):
            pass

    class Forgets(Weighs):
        def __init__(self, level):
            pass

    with pytest.raises(PolicyError, match=r"must name each of its parameters; got '\*\*options'"):
        Engine(Hides())
    with pytest.raises(PolicyError, match=r"must store 'level' under its own name"):
        Engine(Forgets(1))


# --- drops ----------------------------------------------------------------------------------------


def test_weigh_of_an_empty_mask_writes_nothing():
    engine = Engine(Weighs(np.zeros((2, 4), bool)))
    assert engine.weigh(make_routing()) is None
    assert engine.counters.examined == 8


def test_drop_repoints_renormalises_and_leaves_the_other_rows_bits():
    routing = make_routing(weights=[[0.1, 0.2, 0.4, 0.3], [0.7, 0.1, 0.1, 0.1]])
    mask = mask_of([False, True, False, True], [False] * 4)
    weighing = Engine(Weighs(mask)).weigh(routing)
    assert weighing.ids.tolist() == [[0, 2, 2, 2], [4, 5, 6, 7]]
    assert weighing.action.tolist() == [[KEPT, DROPPED, KEPT, DROPPED], [KEPT] * 4]
    np.testing.assert_allclose(weighing.weights[0], [0.2, 0, 0.8, 0], rtol=1e-6)
    assert weighing.weights[1].tobytes() == routing.weights[1].tobytes()


def test_drop_of_a_whole_routing_leaves_its_largest_weight_first_on_a_tie():
    routing = make_routing(weights=[[0.1, 0.4, 0.4, 0.1], [0.1, 0.2, 0.3, 0.4]])
    weighing = Engine(Weighs(np.ones((2, 4), bool))).weigh(routing)
    assert weighing.ids.tolist() == [[1] * 4, [7] * 4]
    np.testing.assert_allclose(weighing.weights, [[0, 1, 0, 0], [0, 0, 0, 1]], rtol=1e-6)
    assert weighing.dropped == 6


def test_drop_of_the_only_expert_writes_nothing():
    routing = make_routing(ids=[[3], [5]], weights=[[1.0], [0.5]])
    assert Engine(Weighs(np.ones((2, 1), bool))).weigh(routing) is None


def test_drop_where_nothing_is_left_to_scale_does_not_divide_by_zero():
    routing = make_routing(ids=[[0, 1, 2, 3]], weights=[[0.0, 0.0, 0.0, 0.0]])
    weighing = Engine(Weighs(mask_of([False, False, True, True]))).weigh(routing)
    assert weighing.weights.tolist() == [[0, 0, 0, 0]]
    routing = make_routing(ids=[[0, 1, 2, 3]], weights=[[math.nan, 0.5, 0.25, 0.25]])
    weighing = Engine(Weighs(mask_of([False, False, True, True]))).weigh(routing)
    assert weighing.ids.tolist() == [[0, 1, 1, 1]]  # NaN is nobody's best
    np.testing.assert_array_equal(weighing.weights, [[math.nan, 0.5, 0, 0]])


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 2, width=32)),
    hnp.arrays(np.bool_, (3, 4)),
    st.booleans(),
)
def test_drop_equals_plain_version(weights, mask, renormalise):
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    weighing = apply_weights(ids, weights, mask, renormalise=renormalise)
    n_dropped, discarded = 0, 0.0
    for row in range(3):
        values = weights[row].astype(np.float64)
        kept = [slot for slot in range(4) if not mask[row, slot]] or [int(np.argmax(values))]
        best = max(kept, key=lambda slot: (values[slot], -slot))
        scale = 1.0
        if renormalise and len(kept) < 4 and sum(values[kept]) > 0:
            scale = sum(values) / sum(values[slot] for slot in kept)
        for slot in range(4):
            if slot in kept:
                assert weighing.ids[row, slot] == ids[row, slot]
                expected = np.float32(values[slot] * scale) if len(kept) < 4 else weights[row, slot]
                assert weighing.weights[row, slot] == expected
                assert weighing.action[row, slot] == KEPT
            else:
                assert weighing.ids[row, slot] == ids[row, best]
                assert weighing.weights[row, slot] == 0
                assert weighing.action[row, slot] == DROPPED
                n_dropped += 1
                discarded += values[slot]
    assert weighing.dropped == n_dropped
    assert weighing.weight_discarded == pytest.approx(discarded)
    if not n_dropped:
        assert weighing.ids is ids
        assert weighing.weights is weights


# --- other weights --------------------------------------------------------------------------------


def test_equal_weights_write_nothing():
    routing = make_routing()
    assert Engine(Weighs(routing.weights.astype(np.float64))).weigh(routing) is None


def test_other_weights_are_taken_as_they_are_and_zero_still_runs():
    routing = make_routing()
    new = routing.weights.copy()
    new[1] = [0.5, 0.3, 0.0, 0.1]
    engine = Engine(Weighs(new))
    weighing = engine.weigh(routing)
    assert weighing.action.tolist() == [[KEPT] * 4, [REWEIGHTED, KEPT, REWEIGHTED, KEPT]]
    assert weighing.ids is routing.ids
    assert weighing.weights.tobytes() == new.tobytes()
    assert (engine.counters.reweighted, engine.counters.changed) == (2, 0)
    assert engine.counters.fired


def test_negative_zero_counts_as_equal_and_keeps_the_bits():
    routing = make_routing(weights=[[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    assert Engine(Weighs(-routing.weights * [-1, -1, 1, 1])).weigh(routing) is None


def test_renormalise_of_the_policy_decides():
    mask = mask_of([False, False, False, True], [False] * 4)
    kept = Engine(Weighs(mask, renormalise=False)).weigh(make_routing()).weights
    np.testing.assert_array_equal(kept[0], np.float32([0.4, 0.3, 0.2, 0]))


# --- phases, counters -----------------------------------------------------------------------------


def test_prompt_tokens_are_looked_at_only_if_asked_for():
    mask = np.ones((2, 4), bool)
    prompt = make_routing(phase=0)
    assert Engine(Weighs(mask)).weigh(prompt) is None
    assert not Engine(Weighs(mask)).acts_in(0)
    assert Engine(Weighs(mask)).acts_in(1)
    assert Engine(Weighs(mask, prefill=True)).weigh(prompt).dropped == 6
    assert not Engine(None).acts_in(1)


def test_weigh_without_weights_is_an_error():
    with pytest.raises(PolicyError, match="must see the router's weights"):
        Engine(DropCold(0.5)).weigh(dataclasses.replace(make_routing(), weights=None))


def test_counters_of_drops():
    engine = Engine(Weighs(mask_of([False, False, True, True], [False, False, True, False])))
    engine.weigh(make_routing(resident=[2, 6]))
    counters = engine.counters
    assert (counters.routings, counters.examined, counters.eligible) == (2, 8, 8)
    assert (counters.dropped, counters.substituted, counters.changed) == (3, 0, 3)
    assert counters.weight_total == pytest.approx(2.0)
    assert counters.weight_discarded == pytest.approx(0.2 + 0.1 + 0.2)
    assert counters.bytes_saved == 1000  # expert 3; 2 and 6 were resident
    assert counters.rate == 3 / 8
    assert counters.control_rate == 3 / 6
    assert counters.weight_discarded_frac == pytest.approx(0.25)


def test_bytes_saved_counts_an_expert_that_another_row_still_reads_as_read():
    routing = make_routing(ids=[[0, 1, 2, 3], [0, 1, 2, 4]])
    engine = Engine(Weighs(mask_of([False, False, True, True], [False] * 4)))
    engine.weigh(routing)
    assert engine.counters.bytes_saved == 1000  # only expert 3


def test_bytes_saved_of_a_selection_may_be_negative():
    engine = Engine(Selects([[0, 1, 2, 6], [4, 5, 6, 7]]))
    engine.select(make_routing(resident=[3, 4, 5, 7]))
    assert engine.counters.bytes_saved == 0  # 6 is read for the other row anyway
    engine = Engine(Selects([[0, 1, 2, 3], [4, 5, 3, 2]]))
    engine.select(make_routing(resident=[2, 3]))
    assert engine.counters.bytes_saved == 2000
    engine = Engine(Selects([[4, 1, 2, 3]]))
    engine.select(make_routing(ids=[[0, 1, 2, 3]], resident=[0]))
    assert engine.counters.bytes_saved == -1000


def test_slot_substituted_and_then_dropped_is_one_changed_slot():
    class Both(RoutingPolicy):
        def select(self, routing):
            return [[0, 1, 6, 7]]

        def weigh(self, routing):
            return np.array([[False, True, False, True]])

    engine = Engine(Both())
    routing = make_routing(ids=[[0, 1, 2, 3]])
    selection = engine.select(routing)
    weighing = engine.weigh(dataclasses.replace(routing, ids=selection.ids))
    counters = engine.counters
    assert (counters.routings, counters.examined) == (1, 4)
    assert (counters.substituted, counters.dropped, counters.changed) == (2, 2, 3)
    assert strongest(selection.action, weighing.action).tolist() == [
        [KEPT, DROPPED, SUBSTITUTED, DROPPED]
    ]


def test_rates_of_a_policy_that_never_looked_are_unknown():
    counters = Counters()
    assert math.isnan(counters.rate)
    assert math.isnan(counters.control_rate)
    assert math.isnan(counters.weight_discarded_frac)
    assert not counters.fired


def test_counters_to_dict_leaves_out_what_is_unknown():
    """A policy that only selects once stored a weight of 0.0, and NaN, which is no JSON."""
    actual = Counters(routings=1, examined=4, eligible=3, changed=1, substituted=1).to_dict()
    assert actual.keys() & {"weight_total", "weight_discarded", "weight_discarded_frac"} == set()
    json.dumps(actual, allow_nan=False)
    assert {"rate", "control_rate"} & Counters().to_dict().keys() == set()


def test_control_rate_is_one_at_most():
    assert Counters(routings=1, examined=2, eligible=2, changed=2).control_rate == 1.0


def test_unknown_weights_are_in_no_sum():
    routing = make_routing(ids=[[0, 1, 2, 3]], weights=[[0.5, math.nan, 0.25, 0.25]])
    engine = Engine(Weighs(mask_of([False, True, True, False])))
    engine.weigh(routing)
    assert engine.counters.weight_total == 1.0
    assert engine.counters.weight_discarded == 0.25


# --- kernels of one's own -------------------------------------------------------------------------


def drop_last(ids, values, resident, positions, layer, seed, log_scores, parameters, state, out):
    out[:, int(parameters[0]) :] = True
    state[0] += 1
    return out.sum()


def test_kernel_stands_for_the_method_and_remembers_per_layer():
    class WithKernel(RoutingPolicy):
        kernel = drop_last  # found by class lookup; must not be bound like a method
        n_state = 1

        def __init__(self, n_kept=2):
            self.n_kept = n_kept

        def kernel_parameters(self):
            return (self.n_kept,)

    engine = Engine(WithKernel(3))
    for layer in (5, 5, 200):
        weighing = engine.weigh(dataclasses.replace(make_routing(), layer=layer))
        assert weighing.dropped == 2
    assert engine.policy._state[[5, 200], 0].tolist() == [2, 1]
    engine.policy.reset()
    assert engine.policy._state is None


def test_kernel_and_method_in_one_class_the_kernel_runs():
    class Twins(RoutingPolicy):
        kernel = drop_last
        n_state = 1

        def kernel_parameters(self):
            return (2,)

        def weigh(self, routing):
            raise AssertionError("the kernel stands for me")

    assert Engine(Twins()).weigh(make_routing()).dropped == 4


def test_subclass_that_overrides_the_method_replaces_the_inherited_kernel():
    class Mine(DropCold):
        def weigh(self, routing):
            assert not routing.ids.flags.writeable
            return mask_of([True, False, False, False], [False] * 4)

    weighing = Engine(Mine(1.0)).weigh(make_routing())
    assert weighing.action.tolist() == [[DROPPED, KEPT, KEPT, KEPT], [KEPT] * 4]


def test_subclass_that_only_changes_parameters_keeps_the_kernel():
    class Harder(DropCold):
        def kernel_parameters(self):
            return (1.0,)

    assert Engine(Harder(0.0)).weigh(make_routing()).dropped == 4


# --- how a session calls it -----------------------------------------------------------------------


def test_views_into_larger_buffers_are_read_as_any_array():
    """A session passes cut-outs of its buffers, whose rows do not follow one another in memory."""
    routing = make_routing(resident=[0, 5])
    buffers = {"ids": np.full((9, 7), -1, np.int32), "weights": np.full((9, 7), 9, np.float32)}
    cut = {}
    for name, buffer in buffers.items():
        cut[name] = buffer[:2, :4]
        cut[name][:] = getattr(routing, name)
    for policy in (DropCold(1.0), Weighs(mask_of([False, False, True, True], [False] * 4))):
        plain = Engine(policy)
        expected = plain.weigh(routing)
        from_buffers = Engine(policy)
        actual = from_buffers.weigh(dataclasses.replace(routing, **cut))
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert from_buffers.counters == plain.counters
        assert from_buffers.counters.fired
