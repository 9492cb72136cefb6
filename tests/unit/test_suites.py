"""The public suites must catch policies that are wrong: each wrong policy fails the test named."""

from __future__ import annotations

import numpy as np
import pytest

from bmoe_lab.residency import LRU, KernelState
from bmoe_lab.routing import DropCold, RoutingPolicy
from bmoe_lab.testing.suites import ResidencyPolicySuite, RoutingPolicySuite


def failing(suite):
    """Return the names of the suite's tests that fail."""
    failed = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:
                failed.add(name)
    return failed


def routing_suite(policy_class, **attributes):
    """Return a suite whose ordinary and full strength setting is the class's default."""
    attributes["make_policy"] = lambda self: policy_class()
    return type("Suite", (RoutingPolicySuite,), attributes)()


def test_suite_without_a_policy_says_so():
    with pytest.raises(NotImplementedError, match=r"make_policy\(\) must return your policy"):
        RoutingPolicySuite().make_policy()
    with pytest.raises(NotImplementedError, match=r"make_policy\(\) must return your policy"):
        ResidencyPolicySuite().make_policy()


# --- routing --------------------------------------------------------------------------------------


class Honest(RoutingPolicy):
    """Drop every missing expert from slot `first` on."""

    needs = frozenset({"cache"})

    def __init__(self, first=1):
        self.first = first

    def neutral(self):
        return type(self)(first=99)

    def weigh(self, routing):
        drop = ~routing.resident[routing.ids]
        drop[:, : self.first] = False
        return drop


def test_suite_passes_a_plain_ten_line_policy():
    assert failing(routing_suite(Honest)) == set()


def test_suite_passes_a_policy_without_a_neutral_setting_if_told():
    class NoNeutral(Honest):
        neutral = RoutingPolicy.neutral

    assert failing(routing_suite(NoNeutral)) == {
        "test_neutral_setting_looks_at_everything_and_changes_nothing"
    }
    assert failing(routing_suite(NoNeutral, has_neutral=False)) == set()


class NeverFires(Honest):
    def weigh(self, routing):
        return None


class NeutralFires(Honest):
    def neutral(self):
        return type(self)()


class Scribbles(Honest):
    def weigh(self, routing):
        routing.weights[:, -1] = 0


class RemembersAfterReset(Honest):
    n_seen = 0

    def weigh(self, routing):
        self.n_seen += 1
        return super().weigh(routing) if self.n_seen > 10 else None


class DependsOnTheCalendar(Honest):
    calls = 0

    def weigh(self, routing):
        type(self).calls += 1
        return super().weigh(routing) if type(self).calls % 7 else None


class LooksAtTheWholeBatch(Honest):
    def weigh(self, routing):
        drop = super().weigh(routing)
        drop[1:] = False
        return drop


class ChangesItsParameter(Honest):
    def __init__(self, first=1):
        self.first = first + 1


class DoesNotSayWhatItNeeds(Honest):
    def check(self, facts):
        self.validate()


class OutOfRange(Honest):
    def select(self, routing):
        return routing.ids + 1000


@pytest.mark.parametrize(
    ("policy_class", "caught_by"),
    [
        (NeverFires, "test_full_strength_fires"),
        (NeutralFires, "test_neutral_setting_looks_at_everything_and_changes_nothing"),
        (Scribbles, "test_arrays_of_the_routing_are_not_modified"),
        (RemembersAfterReset, "test_reset_equals_new"),
        (DependsOnTheCalendar, "test_same_seed_gives_the_same_result"),
        (LooksAtTheWholeBatch, "test_the_way_tokens_are_batched_does_not_matter"),
        (ChangesItsParameter, "test_parameters_make_an_equal_policy"),
        (DoesNotSayWhatItNeeds, "test_check_refuses_to_go_without_what_the_policy_needs"),
        (OutOfRange, "test_ids_stay_in_range_and_distinct"),
    ],
)
def test_suite_catches_a_wrong_routing_policy(policy_class, caught_by):
    assert caught_by in failing(routing_suite(policy_class))


def test_suite_catches_a_kernel_that_differs_from_its_plain_twin():
    class Differs(DropCold):
        kernel = DropCold.kernel

        def __init__(self, frac=0.9, renormalise=True, prefill=False):
            super().__init__(frac, renormalise, prefill)

        def neutral(self):
            return type(self)(0.0)

        def weigh(self, routing):
            drop = np.zeros(routing.ids.shape, dtype=bool)
            drop[:, -1] = True
            return drop

    assert "test_kernel_equals_the_plain_version" in failing(routing_suite(Differs))


def test_suite_catches_a_kernel_that_acts_in_prefill_unasked():
    class Always(Honest):
        phases = frozenset({0, 1})

    # Saying that one acts in prefill is being asked.
    assert failing(routing_suite(Always)) == set()


# --- residency ------------------------------------------------------------------------------------


class WrongState(KernelState):
    """An LRU state in which one thing is wrong."""

    __slots__ = ("fault",)

    def load(self, keys):
        before = self.contains().copy()
        load = super().load(keys)
        if self.fault == "repeats are hits":
            load.residency[:] = ~load.first
        elif self.fault == "bytes charged twice":
            load.first[:] = ~before[keys]
            load.first[-1] = True
        elif self.fault == "victims not reported":
            load.victims = load.victims[:0]
        elif self.fault == "budget ignored":
            self._resident[load.victims] = True
        elif self.fault == "evicts what it serves":
            load.victims = np.append(load.victims, keys[0])
        return load

    def clear(self):
        if getattr(self, "fault", "") != "clear does nothing":
            super().clear()

    def forget(self, keys):
        if self.fault != "forget does nothing":
            super().forget(keys)
        if self.fault == "forgets as evictions":
            self._header[2] += 1

    def to_arrays(self):
        arrays = super().to_arrays()
        if self.fault == "order lost":
            arrays["keys"] = np.sort(arrays["keys"])
        return arrays


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("", None),
        ("repeats are hits", "test_a_load_reports_what_was_resident_before_it"),
        ("bytes charged twice", "test_a_load_reports_what_was_resident_before_it"),
        ("victims not reported", "test_victims_and_missing_account_for_every_change"),
        ("budget ignored", "test_resident_bytes_are_those_of_the_resident_keys"),
        ("evicts what it serves", "test_what_a_load_asks_for_is_resident_after_it"),
        ("clear does nothing", "test_clear_equals_new"),
        ("forget does nothing", "test_forgotten_keys_are_gone_and_are_no_evictions"),
        ("forgets as evictions", "test_forgotten_keys_are_gone_and_are_no_evictions"),
        ("order lost", "test_a_state_restored_from_arrays_goes_on_as_if_it_had_never_stopped"),
    ],
)
def test_suite_catches_a_wrong_residency_policy(fault, caught_by):
    class Wrong(LRU):
        def start(self, key_bytes, budget_bytes, *, n_layer=1):
            state = WrongState(self, key_bytes, budget_bytes, n_layer)
            state.fault = fault
            return state

    class Suite(ResidencyPolicySuite):
        def make_policy(self):
            return Wrong()

    failed = failing(Suite())
    assert caught_by in failed if caught_by else not failed
