"""Controls come from the class alone: signature, annotations, docstring, and its own checks."""

from typing import Literal

import ipywidgets
import numpy as np
import pytest

import bmoe_lab as bl
from bmoe_lab.errors import PolicyError
from bmoe_lab.routing import ModelFacts, RoutingPolicy
from bmoe_lab.widgets.policy_controls import control_of, parameters_of, policy_choice, value_of

FACTS = ModelFacts(
    n_layer=4, n_expert=32, n_expert_used=4, cache_budget=2**20, token_cycle_bytes=2**18
)


class Undeclared(RoutingPolicy):
    """Ten lines, no validate, no annotations.

    Parameters
    ----------
    n_sure : int
        Slots that stay.
    factor : float
        Anything.
    """

    def __init__(self, n_sure=2, factor=0.5, strict=False, mode="soft"):
        self.n_sure, self.factor, self.strict, self.mode = n_sure, factor, strict, mode

    def weigh(self, routing):
        drop = ~routing.resident[routing.ids]
        drop[:, : self.n_sure] = False
        return drop


class Annotated(RoutingPolicy):
    def __init__(self, way: Literal["a", "b"], n: int | None, share: float):
        self.way, self.n, self.share = way, n, share

    def validate(self):
        if not 0 <= self.share <= 0.3:
            raise PolicyError(f"share must be in [0, 0.3]; got {self.share}.")

    def weigh(self, routing):
        return None


def by_name(policy, facts=FACTS):
    return {one.name: one for one in parameters_of(policy, facts)}


@pytest.mark.parametrize("name", bl.routing.names())
def test_every_shipped_policy_has_controls_it_accepts_or_says_why_not(name):
    try:
        choice = policy_choice(bl.routing.get(name), name, FACTS)
    except PolicyError as error:
        assert name in ("buddy", "sensitivity_skip")
        assert "needs an array" in str(error)  # noqa: PT017
        return
    choice.make({}).check(FACTS)
    for parameter in choice.parameters:
        control = control_of(parameter, parameter.start)
        assert value_of(parameter, control, parameter.start) == parameter.start
        assert parameter.help
        assert control.tooltip == parameter.help


def test_range_is_what_the_policy_accepts():
    found = by_name(bl.routing.CachePrior)
    assert (found["strength"].low, found["strength"].high) == (0.0, 1.0)
    assert (found["keep"].low, found["keep"].high) == (0, 4)
    assert found["range"].choices == ("token", "running")
    assert by_name(bl.routing.MaxRank)["rank"].high == 32


def test_start_without_default_does_something_and_draws_no_caution():
    for cls in (bl.routing.DropBelow, bl.routing.CumSum, bl.routing.RandomDrop):
        policy = policy_choice(cls, "x", FACTS).make({})
        assert policy != policy.neutral()
        assert policy.cautions(FACTS) == []


def test_class_without_annotations_gets_controls_from_its_defaults():
    found = by_name(Undeclared)
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {"n_sure": "int", "factor": "float", "strict": "bool", "mode": "literal"}
    assert found["n_sure"].help == "Slots that stay."


def test_controls_are_native_and_of_the_kind():
    kinds = {name: type(control_of(one, one.start)) for name, one in by_name(Undeclared).items()}
    assert kinds["n_sure"] is ipywidgets.IntSlider
    assert kinds["factor"] is ipywidgets.FloatSlider
    assert kinds["strict"] is ipywidgets.Checkbox
    assert kinds["mode"] is ipywidgets.Text


def test_literal_and_optional_become_lists_and_odd_ranges_are_found():
    found = by_name(Annotated)
    assert (found["way"].kind, found["way"].choices) == ("choice", ("a", "b"))
    assert found["n"].choices[:2] == (None, 0)
    assert 0 < found["share"].start <= 0.3


def test_default_beyond_the_model_is_lowered_to_what_is_accepted():
    small = ModelFacts(n_layer=2, n_expert=8, n_expert_used=2, cache_budget=2**20)
    assert by_name(bl.routing.MaxRank, small)["rank"].start == 8


def test_instance_gives_arrays_and_starting_values():
    given = bl.routing.SensitivitySkip(0.25, np.ones(4))
    choice = policy_choice(given, "mine", FACTS)
    assert {one.name: one.kind for one in choice.parameters}["sensitivity"] == "fixed"
    assert choice.make({"threshold": 0.5}) == bl.routing.SensitivitySkip(0.5, np.ones(4))


def test_policy_that_needs_an_array_says_how_to_get_one():
    with pytest.raises(PolicyError, match=r"pass an instance. Make one with Buddy.from_trace"):
        parameters_of(bl.routing.Buddy, FACTS)


def test_policy_without_scores_refuses_in_its_own_words():
    blind = ModelFacts(
        n_layer=4, n_expert=32, n_expert_used=4, cache_budget=1, scores_available=False
    )
    with pytest.raises(PolicyError, match="record='scores'"):
        parameters_of(bl.routing.CachePrior, blind)


def test_text_that_is_no_literal_is_refused():
    parameter = by_name(Undeclared)["mode"]
    control = control_of(parameter, "soft")
    control.value = "[1, 2"
    with pytest.raises(PolicyError, match="Python literal"):
        value_of(parameter, control, "soft")
