"""Tests that any policy must pass, for policies of this package and of others.

Subclass the suite that fits, say how to make your policy, and let pytest collect it::

    from bmoe_lab.testing import RoutingPolicySuite

    class TestMyPolicy(RoutingPolicySuite):
        def make_policy(self):
            return MyPolicy(strength=0.3)

The tests are plain asserts: nothing here depends on pytest.
"""

# ruff: noqa: D102 - the name of a test says what must hold

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import PolicyError
from bmoe_lab.residency import Belady, ResidencyPolicy, ResidencyState
from bmoe_lab.residency.future import next_use
from bmoe_lab.routing.base import DECODE, PREFILL, ModelFacts, Routing, RoutingPolicy
from bmoe_lab.routing.engine import DROPPED, KEPT, Engine, strongest

__all__ = ["Ran", "ResidencyPolicySuite", "RoutingPolicySuite"]

Array = npt.NDArray[Any]


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except PolicyError:
        return True
    return False


class Ran(NamedTuple):
    """What ran in one layer of one evaluation, for a whole batch, shape (token, slot).

    Attributes
    ----------
    chosen, ids : numpy.ndarray of int32
        The router's choice, and what ran.
    plain, weights : numpy.ndarray of float32
        Final weights before and after ``weigh``.
    action : numpy.ndarray of uint8
        What was done with each slot.
    """

    chosen: Array
    ids: Array
    plain: Array
    weights: Array
    action: Array


class RoutingPolicySuite:
    """Base class of the tests of one routing policy.

    Override :meth:`make_policy`; the rest where your policy needs it.

    Attributes
    ----------
    n_layer, n_expert, n_used : int
        Shape of the made-up model.
    n_token : int
        Tokens of the stream.
    has_neutral : bool
        False if the policy has no setting that changes nothing.
    rows_are_independent : bool
        False if what happens to a token may depend on the others in its batch.
    """

    n_layer: ClassVar[int] = 3
    n_expert: ClassVar[int] = 16
    n_used: ClassVar[int] = 4
    n_token: ClassVar[int] = 40
    has_neutral: ClassVar[bool] = True
    rows_are_independent: ClassVar[bool] = True

    # --- what a subclass says ------------------------------------------------------------------

    def make_policy(self) -> RoutingPolicy:
        """Return a new policy at an ordinary setting, the same one each time."""
        raise NotImplementedError("make_policy() must return your policy.")

    def make_full_strength(self) -> RoutingPolicy:
        """Return a new policy at a setting that must change something."""
        return self.make_policy()

    def reference(self, policy: RoutingPolicy, routing: Routing) -> Array | None:
        """Return in plain Python what the policy's kernel must return.

        By default the policy's own method, where its class defines one beside the kernel.
        """
        method = getattr(policy, policy.stage)
        answer: Array | None = method(routing)
        return answer

    def make_batches(self, *, phase: int = DECODE, n_row: int = 1) -> list[Routing]:
        """Return the made-up stream, all layers of each evaluation of `n_row` tokens.

        Scores are Gaussian, half of the experts are resident, and one expert per layer is masked
        with a score of -inf. The same tokens come whatever `n_row` is.
        """
        rng = np.random.default_rng(20260817)
        scores = rng.normal(size=(self.n_token, self.n_layer, self.n_expert)).astype(np.float32)
        resident = rng.random((self.n_layer, self.n_expert)) < 0.5
        masked = rng.integers(self.n_expert, size=self.n_layer)
        scores[:, np.arange(self.n_layer), masked] = -np.inf
        batches = []
        for start in range(0, self.n_token, n_row):
            for layer in range(self.n_layer):
                rows = scores[start : start + n_row, layer]
                order = np.argsort(-rows, axis=1, kind="stable")
                batches.append(
                    Routing(
                        layer=layer,
                        block=layer + 1,
                        phase=phase,
                        positions=np.arange(start, start + len(rows), dtype=np.int32),
                        ids=np.ascontiguousarray(order[:, : self.n_used], dtype=np.int32),
                        scores=np.ascontiguousarray(rows),
                        score_kind="other",
                        weights=None,
                        resident=resident[layer].copy(),
                        expert_bytes=1000 + layer,
                        seed=7,
                    )
                )
        return batches

    @property
    def facts(self) -> ModelFacts:
        """The made-up model, with a cache that holds half of it."""
        return ModelFacts(
            n_layer=self.n_layer,
            n_expert=self.n_expert,
            n_expert_used=self.n_used,
            cache_budget=self.n_layer * self.n_expert * 500,
            token_cycle_bytes=self.n_layer * self.n_used * 1000,
        )

    # --- how it runs ---------------------------------------------------------------------------

    @staticmethod
    def weights_of(routing: Routing, ids: Array) -> Array:
        """Return the weights that the made-up graph gives `ids`: a softmax over the chosen."""
        assert routing.scores is not None
        chosen = np.take_along_axis(routing.scores, ids.astype(np.int64), axis=1)
        weights = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        normalised: Array = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
        return normalised

    def run(self, engine: Engine, batches: Iterable[Routing]) -> list[Ran]:
        """Pass the stream through the policy as a session does."""
        ran = []
        for routing in batches:
            selection = engine.select(routing)
            ids = routing.ids if selection is None else selection.ids
            action = np.full(ids.shape, KEPT, np.uint8) if selection is None else selection.action
            plain = self.weights_of(routing, ids)
            weighing = engine.weigh(dataclasses.replace(routing, ids=ids, weights=plain))
            weights = plain
            if weighing is not None:
                ids, weights = weighing.ids, weighing.weights
                action = strongest(action, weighing.action)
            ran.append(Ran(routing.ids, ids, plain, weights, action))
        return ran

    def _rows(self, ran: Sequence[Ran]) -> list[Array]:
        """Return the tokens' rows in (token, layer) order, whatever the batches were."""
        per_layer = [ran[layer :: self.n_layer] for layer in range(self.n_layer)]
        return [
            np.stack([np.concatenate([getattr(r, name) for r in rows]) for rows in per_layer])
            for name in ("ids", "weights", "action")
        ]

    def _assert_same(self, left: Sequence[Ran], right: Sequence[Ran]) -> None:
        for one, other in zip(self._rows(left), self._rows(right), strict=True):
            np.testing.assert_array_equal(one, other)

    # --- the tests -----------------------------------------------------------------------------

    def test_parameters_make_an_equal_policy(self) -> None:
        policy = self.make_policy()
        assert type(policy)(**policy.get_params()) == policy
        assert policy.clone() == policy
        assert policy.clone() is not policy
        assert repr(policy.clone()) == repr(policy)
        assert repr(policy).startswith(type(policy).__name__ + "(")

    def test_check_accepts_an_ordinary_set_up(self) -> None:
        policy = self.make_policy()
        policy.check(self.facts)
        assert policy.effective(self.facts)
        assert all(isinstance(text, str) for text in policy.cautions(self.facts))

    def test_check_refuses_to_go_without_what_the_policy_needs(self) -> None:
        policy = self.make_policy()
        for need, lacking in (
            ("cache", {"cache_budget": None}),
            ("cache", {"cache_budget": 0}),
            ("scores", {"scores_available": False}),
            ("weights", {"weights_available": False}),
        ):
            facts = dataclasses.replace(self.facts, **lacking)
            assert _refused(lambda facts=facts: policy.check(facts)) == (need in policy.needs), need  # type: ignore[misc]

    def test_neutral_setting_looks_at_everything_and_changes_nothing(self) -> None:
        if not self.has_neutral:
            return
        policy = self.make_policy().neutral()
        policy.check(self.facts)
        engine = Engine(policy, seed=7)
        for routing in self.make_batches():
            assert engine.select(routing) is None
            weights = self.weights_of(routing, routing.ids)
            assert engine.weigh(dataclasses.replace(routing, weights=weights)) is None
        acts = engine.selects or engine.weighs
        n_slots = self.n_token * self.n_layer * self.n_used
        assert engine.counters.examined == (n_slots if acts else 0)
        assert not engine.counters.fired

    def test_full_strength_fires(self) -> None:
        policy = self.make_full_strength()
        if policy.lossless:
            return
        policy.check(self.facts)
        engine = Engine(policy, seed=7)
        ran = self.run(engine, self.make_batches())
        assert engine.counters.fired
        assert any((one.action != KEPT).any() for one in ran)

    def test_counters_agree_with_the_actions(self) -> None:
        engine = Engine(self.make_full_strength(), seed=7)
        ran = self.run(engine, self.make_batches(n_row=3))
        action = np.concatenate([one.action.ravel() for one in ran])
        assert engine.counters.dropped == np.count_nonzero(action == DROPPED)
        assert engine.counters.changed <= engine.counters.eligible
        assert engine.counters.eligible <= engine.counters.examined

    def test_ids_stay_in_range_and_distinct(self) -> None:
        for policy in (self.make_policy(), self.make_full_strength()):
            for one in self.run(Engine(policy, seed=7), self.make_batches(n_row=3)):
                assert one.ids.min() >= 0
                assert one.ids.max() < self.n_expert
                for ids, action in zip(one.ids, one.action, strict=True):
                    running = ids[action != DROPPED]
                    assert len(set(running.tolist())) == len(running)

    def test_no_routing_is_emptied(self) -> None:
        for one in self.run(Engine(self.make_full_strength(), seed=7), self.make_batches()):
            assert (one.action != DROPPED).any(axis=1).all()
            assert (one.weights != 0).any(axis=1).all()
            assert np.isfinite(one.weights).all()

    def test_dropped_slots_name_an_expert_that_runs_and_weigh_nothing(self) -> None:
        for one in self.run(Engine(self.make_full_strength(), seed=7), self.make_batches(n_row=3)):
            for ids, weights, action in zip(one.ids, one.weights, one.action, strict=True):
                assert set(ids[action == DROPPED]) <= set(ids[action != DROPPED])
                assert (weights[action == DROPPED] == 0).all()

    def test_rows_without_a_change_keep_their_bits(self) -> None:
        for one in self.run(Engine(self.make_full_strength(), seed=7), self.make_batches(n_row=3)):
            kept = (one.action == KEPT).all(axis=1)
            assert one.ids[kept].tobytes() == one.chosen[kept].tobytes()
            assert one.weights[kept].tobytes() == one.plain[kept].tobytes()

    def test_renormalised_rows_keep_their_weight(self) -> None:
        policy = self.make_full_strength()
        for one in self.run(Engine(policy, seed=7), self.make_batches()):
            dropped = (one.action == DROPPED).any(axis=1)
            if policy.renormalise and dropped.any():
                np.testing.assert_allclose(
                    one.weights[dropped].sum(axis=1), one.plain[dropped].sum(axis=1), rtol=1e-6
                )

    def test_same_seed_gives_the_same_result(self) -> None:
        first = self.run(Engine(self.make_policy(), seed=7), self.make_batches())
        again = self.run(Engine(self.make_policy(), seed=7), self.make_batches())
        self._assert_same(first, again)

    def test_reset_equals_new(self) -> None:
        engine = Engine(self.make_policy(), seed=7)
        first = self.run(engine, self.make_batches())
        engine.policy.reset(7)
        again = self.run(engine, self.make_batches())
        self._assert_same(first, again)

    def test_clone_of_a_used_policy_equals_new(self) -> None:
        used = Engine(self.make_policy(), seed=7)
        first = self.run(used, self.make_batches())
        again = self.run(Engine(used.policy, seed=7), self.make_batches())
        self._assert_same(first, again)

    def test_the_way_tokens_are_batched_does_not_matter(self) -> None:
        if not self.rows_are_independent:
            return
        for policy in (self.make_policy(), self.make_full_strength()):
            one_by_one = self.run(Engine(policy, seed=7), self.make_batches(n_row=1))
            in_batches = self.run(Engine(policy, seed=7), self.make_batches(n_row=9))
            self._assert_same(one_by_one, in_batches)

    def test_prompt_tokens_are_left_alone_unless_asked_for(self) -> None:
        policy = self.make_full_strength()
        engine = Engine(policy, seed=7)
        ran = self.run(engine, self.make_batches(phase=PREFILL, n_row=9))
        if PREFILL not in policy.phases:
            assert engine.counters.examined == 0
            assert all((one.action == KEPT).all() for one in ran)
        elif not policy.lossless and (engine.selects or engine.weighs):
            assert engine.counters.examined > 0

    def test_arrays_of_the_routing_are_not_modified(self) -> None:
        policy = self.make_full_strength().clone()
        policy.reset(7)
        for routing in self.make_batches(n_row=3):
            weights = self.weights_of(routing, routing.ids)
            for seen, act in (
                (routing, policy.select),
                (dataclasses.replace(routing, weights=weights), policy.weigh),
            ):
                arrays = [
                    value
                    for value in (getattr(seen, field.name) for field in dataclasses.fields(seen))
                    if isinstance(value, np.ndarray)
                ]
                before = [array.tobytes() for array in arrays]
                act(seen)
                assert [array.tobytes() for array in arrays] == before

    def test_kernel_equals_the_plain_version(self) -> None:
        policy = self.make_policy()
        if policy.kernel is None:
            return
        for n_row in (1, 9):
            for make in (self.make_policy, self.make_full_strength):
                compiled, plain = make(), make()
                compiled.reset(7)
                plain.reset(7)
                for routing in self.make_batches(n_row=n_row):
                    seen = dataclasses.replace(
                        routing,
                        weights=None
                        if policy.stage == "select"
                        else self.weights_of(routing, routing.ids),
                    )
                    unchanged = seen.ids if policy.stage == "select" else np.zeros(seen.ids.shape)
                    actual = compiled.run_kernel(seen)
                    expected = self.reference(plain, seen)
                    np.testing.assert_array_equal(
                        unchanged if actual is None else actual,
                        unchanged if expected is None else expected,
                    )


class _Asked(NamedTuple):
    """What one load found and did, as lists."""

    residency: list[int]
    first: list[bool]
    missing: list[int]
    victims: list[int]


class ResidencyPolicySuite:
    """Base class of the tests of one residency policy, a kernel or in plain Python.

    Override :meth:`make_policy`; the rest where your policy needs it.

    Attributes
    ----------
    n_layer, n_expert, n_used : int
        Shape of the made-up model, whose layers differ in expert size.
    n_step : int
        Evaluations in the stream; the first is a wide one with repeats.
    warm_start : bool
        False if the policy refuses to be stored and restored.
    """

    n_layer: ClassVar[int] = 4
    n_expert: ClassVar[int] = 12
    n_used: ClassVar[int] = 3
    n_step: ClassVar[int] = 60
    warm_start: ClassVar[bool] = True

    def make_policy(self) -> ResidencyPolicy:
        """Return a new policy, the same one each time."""
        raise NotImplementedError("make_policy() must return your policy.")

    # --- the streams ---------------------------------------------------------------------------

    @property
    def key_bytes(self) -> Array:
        """Bytes of each key, int64: layer after layer."""
        return np.repeat(100 + 37 * np.arange(self.n_layer, dtype=np.int64), self.n_expert)

    @property
    def budgets(self) -> list[int]:
        """Nothing, less than a load, less than a token cycle, some, everything."""
        total = int(self.key_bytes.sum())
        return [0, int(self.key_bytes.max()), total // 6, total // 2, total]

    def make_loads(self) -> list[Array]:
        """Return the stream of loads, token-major keys of one layer each, int64."""
        rng = np.random.default_rng(20260817)
        popularity = rng.dirichlet(np.full(self.n_expert, 0.5), size=self.n_layer) + 1e-6
        popularity /= popularity.sum(axis=1, keepdims=True)
        loads = []
        for step in range(self.n_step):
            for layer in range(self.n_layer):
                rows = [
                    rng.choice(self.n_expert, self.n_used, replace=False, p=popularity[layer])
                    for _ in range(7 if step == 0 else 1)
                ]
                loads.append(np.concatenate(rows).astype(np.int64) + layer * self.n_expert)
        return loads

    def make_random_loads(self, seed: int) -> list[Array]:
        """Return loads of any length, empty ones and repeats included, layers in any order."""
        rng = np.random.default_rng(seed)
        loads = []
        for _ in range(40):
            layer = rng.integers(self.n_layer)
            rows = rng.integers(self.n_expert, size=rng.integers(9))
            loads.append(rows.astype(np.int64) + layer * self.n_expert)
        return loads

    def start(self, budget: int, key_bytes: Array | None = None) -> ResidencyState:
        """Return an empty cache of `budget` bytes."""
        sizes = self.key_bytes if key_bytes is None else key_bytes
        return self.make_policy().start(sizes, budget, n_layer=self.n_layer)

    # --- how they are served -------------------------------------------------------------------

    @cached_property
    def policy(self) -> ResidencyPolicy:
        """One of them, to be asked what it is."""
        return self.make_policy()

    def ask(self, state: ResidencyState, keys: Array, future: Array | None = None) -> _Asked:
        """Serve one load; with its future, as numbers of loads from it on, where it is needed."""
        if not self.policy.needs_future:
            load = state.load(keys)
            found = (load.residency, load.first, load.missing, load.victims)
            return _Asked(*(array.tolist() for array in found))
        before = state.contains().copy()
        offsets = np.array([0, keys.size], dtype=np.int64)
        log = state.load_many(keys, offsets, np.zeros(0, np.int64) if future is None else future)
        return _Asked(
            log.residency.tolist(),
            log.first.tolist(),
            keys[log.first].tolist(),
            np.flatnonzero(before & ~state.contains()).tolist(),
        )

    def serve(
        self, state: ResidencyState, loads: Sequence[Array], begin: int = 0, end: int | None = None
    ) -> list[_Asked]:
        """Serve the loads `begin` to `end` of a stream."""
        numbers = range(len(loads))[begin:end]
        if not self.policy.needs_future:
            return [self.ask(state, loads[number]) for number in numbers]
        keys, offsets = _flat(loads)
        future = np.split(next_use(keys, offsets, self.key_bytes.size), offsets[1:-1])
        return [self.ask(state, loads[number], future[number] - number) for number in numbers]

    def streams(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield the budgets and streams on which every rule must hold."""
        for budget in self.budgets:
            yield budget, self.make_loads()
            yield budget, self.make_random_loads(budget)

    # --- the tests -----------------------------------------------------------------------------

    def test_parameters_make_an_equal_policy(self) -> None:
        policy = self.make_policy()
        assert type(policy)(**policy.get_params()) == policy
        assert policy.clone() == policy
        assert repr(policy.clone()) == repr(policy)

    def test_a_load_reports_what_was_resident_before_it(self) -> None:
        for budget, loads in self.streams():
            state = self.start(budget)
            for number, keys in enumerate(loads):
                before = state.contains().copy()
                load = self.serve(state, loads, number, number + 1)[0]
                assert load.residency == before[keys].astype(int).tolist()
                distinct = list(dict.fromkeys(int(key) for key in keys if not before[key]))
                assert load.missing == distinct
                assert keys[load.first].tolist() == distinct
                firsts = [keys.tolist().index(key) for key in distinct]
                assert np.flatnonzero(load.first).tolist() == sorted(firsts)

    def test_what_a_load_asks_for_is_resident_after_it(self) -> None:
        for budget, loads in self.streams():
            state = self.start(budget)
            for number, keys in enumerate(loads):
                load = self.serve(state, loads, number, number + 1)[0]
                assert self.policy.bypasses or state.contains()[keys].all()
                assert not set(load.victims) & set(keys.tolist())

    def test_victims_and_missing_account_for_every_change(self) -> None:
        for budget, loads in self.streams():
            state = self.start(budget)
            n_victims = 0
            for number in range(len(loads)):
                expected = state.contains().copy()
                load = self.serve(state, loads, number, number + 1)[0]
                assert expected[load.victims].all()
                assert len(set(load.victims)) == len(load.victims)
                expected[load.victims] = False
                expected[load.missing] = not self.policy.bypasses
                np.testing.assert_array_equal(state.contains(), expected)
                n_victims += len(load.victims)
                assert state.evictions == n_victims

    def test_resident_bytes_are_those_of_the_resident_keys(self) -> None:
        for budget, loads in self.streams():
            state = self.start(budget)
            for number in range(len(loads)):
                self.serve(state, loads, number, number + 1)
                assert state.resident_bytes == self.key_bytes[state.contains()].sum()

    def test_budget_holds_after_a_load_unless_the_load_alone_is_larger(self) -> None:
        if not self.policy.keeps_budget:
            return
        for budget, loads in self.streams():
            state = self.start(budget)
            for number, keys in enumerate(loads):
                self.serve(state, loads, number, number + 1)
                alone = int(self.key_bytes[np.unique(keys)].sum())
                assert state.resident_bytes <= max(budget, alone)

    def test_nothing_is_evicted_while_everything_fits(self) -> None:
        # Also for a policy that gives each layer the same share.
        largest_layer = self.key_bytes.reshape(self.n_layer, -1).sum(axis=1).max()
        state = self.start(self.n_layer * int(largest_layer))
        self.serve(state, self.make_loads())
        assert state.evictions == 0

    def test_same_loads_give_the_same_result(self) -> None:
        for budget, loads in self.streams():
            first = self.serve(self.start(budget), loads)
            assert self.serve(self.start(budget), loads) == first

    def test_many_loads_in_one_call_equal_load_by_load(self) -> None:
        for budget, loads in self.streams():
            keys, offsets = _flat(loads)
            future = next_use(keys, offsets, self.key_bytes.size)
            one_by_one = self.start(budget)
            expected = []
            for number in range(len(loads)):
                asked = self.serve(one_by_one, loads, number, number + 1)[0]
                expected.append((asked, one_by_one.resident_bytes))
            for cuts in ([], [1, len(loads) // 2, len(loads) // 2]):
                state = self.start(budget)
                bounds = [0, *cuts, len(loads)]
                logs = []
                for begin, end in pairwise(bounds):
                    low, high = offsets[begin], offsets[end]
                    part = offsets[begin : end + 1] - low
                    logs.append(state.load_many(keys[low:high], part, future[low:high] - begin))
                for name, values in (
                    ("residency", [row for asked, _ in expected for row in asked.residency]),
                    ("first", [row for asked, _ in expected for row in asked.first]),
                    ("evictions", [len(asked.victims) for asked, _ in expected]),
                    ("resident_bytes", [held for _, held in expected]),
                ):
                    actual = np.concatenate([getattr(log, name) for log in logs])
                    assert actual.tolist() == values, name
                np.testing.assert_array_equal(state.contains(), one_by_one.contains())
                assert state.evictions == one_by_one.evictions

    def test_clear_equals_new(self) -> None:
        for budget, loads in self.streams():
            new, state = self.start(budget), self.start(budget)
            first = self.serve(state, loads)
            state.clear()
            assert state.resident_bytes == new.resident_bytes
            assert state.evictions == 0
            np.testing.assert_array_equal(state.contains(), new.contains())
            assert self.serve(state, loads) == first

    def test_a_state_restored_from_arrays_goes_on_as_if_it_had_never_stopped(self) -> None:
        if not self.warm_start:
            assert _refused(lambda: self.start(self.budgets[3]).to_arrays())
            return
        for budget, loads in self.streams():
            half = len(loads) // 2 + 1
            state = self.start(budget)
            self.serve(state, loads, 0, half)
            arrays = {name: array.copy() for name, array in state.to_arrays().items()}
            restored = self.make_policy().from_arrays(
                arrays, self.key_bytes, budget, n_layer=self.n_layer
            )
            np.testing.assert_array_equal(restored.contains(), state.contains())
            assert restored.resident_bytes == state.resident_bytes
            assert restored.evictions == 0
            expected = self.serve(state, loads, half)
            assert self.serve(restored, loads, half) == expected
            for name, array in state.to_arrays().items():
                np.testing.assert_array_equal(restored.to_arrays()[name], array)

    def test_forgotten_keys_are_gone_and_are_no_evictions(self) -> None:
        state = self.start(int(self.key_bytes.sum()))
        loads = self.make_loads()
        self.serve(state, loads, 0, 10)
        load = self.serve(state, loads, 10, 11)[0]
        held = [key for key in load.missing if state.contains()[key]]
        failed = np.array(held[:1]) if held else loads[10][:1]
        before, evictions = state.resident_bytes, state.evictions
        state.forget(failed)
        assert not state.contains()[failed].any()
        assert state.resident_bytes == before - self.key_bytes[failed].sum()
        assert state.evictions == evictions
        assert failed[0] in self.serve(state, loads, 10, 11)[0].missing
        state.forget(failed)
        state.forget(failed)
        self.serve(state, loads, 11)
        assert state.resident_bytes == self.key_bytes[state.contains()].sum()

    def test_a_key_out_of_range_is_refused_and_changes_nothing(self) -> None:
        state = self.start(self.budgets[3])
        loads = self.make_loads()
        self.serve(state, loads, 0, 20)
        before = state.contains().copy()
        for bad in (-1, self.key_bytes.size):
            keys = np.append(loads[20], bad)
            future = np.ones(keys.size, dtype=np.int64)
            assert _refused(lambda keys=keys, future=future: self.ask(state, keys, future))  # type: ignore[misc]
            assert _refused(lambda keys=keys: state.forget(keys))  # type: ignore[misc]
        np.testing.assert_array_equal(state.contains(), before)

    def test_no_online_policy_beats_belady_with_experts_of_equal_size(self) -> None:
        if not (self.policy.online and self.policy.keeps_budget):
            return
        sizes = np.full(self.key_bytes.size, 100, dtype=np.int64)
        for budget, loads in self.streams():
            keys, offsets = _flat(loads)
            best = Belady().start(sizes, budget, n_layer=self.n_layer)
            bound = best.load_many(keys, offsets, next_use(keys, offsets, sizes.size))
            log = self.start(budget, sizes).load_many(keys, offsets)
            assert log.first.sum() >= bound.first.sum()


def _flat(loads: Sequence[Array]) -> tuple[Array, Array]:
    """Return loads as keys one load after the other, and where each begins."""
    offsets = np.concatenate(([0], np.cumsum([load.size for load in loads]))).astype(np.int64)
    return np.concatenate(loads).astype(np.int64), offsets
