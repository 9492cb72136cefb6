import numpy as np
import pytest

from bmoe_lab import routing
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.policy_text import parse_routing


@pytest.mark.parametrize("name", routing.names())
def test_parse_routing_repr_gives_the_policy_back(name):
    args = {
        "lossless": (),
        "fewer_experts": (2,),
        "top_p": (0.9, 3),
        "max_rank": (1, 8),
        "cum_sum": (1, 0.75),
        "resident_only": (16, 0.5),
        "sensitivity_skip": (0.01, [1.0, 0.5]),
        "buddy": ([[[0, 1], [1, 0]]], 2),
    }.get(name, (0.25,))
    policy = routing.get(name)(*args)
    assert parse_routing(repr(policy)) == policy


@pytest.mark.parametrize(
    "policy",
    [
        routing.RatioSkip(np.array([0.5, 0.25])),
        routing.SensitivitySkip(0.1, np.ones(3)),
        routing.Buddy(np.ones((1, 4, 4))),
    ],
    ids=repr,
)
def test_parse_routing_of_an_array_is_refused_with_the_way_out(policy):
    """Its repr shows a digest, from which nobody could make the array again."""
    with pytest.raises(SettingsError, match=r"An array \(\w+\) cannot be written as text: make"):
        parse_routing(repr(policy))


@pytest.mark.parametrize("text", ["Buddy", "Buddy()", "SensitivitySkip(0.1)"])
def test_parse_routing_without_the_array_that_it_takes_is_refused_with_the_way_out(text):
    with pytest.raises(SettingsError, match=r"missing .* cannot be written as text: make this"):
        parse_routing(text)


def test_parse_routing_does_not_speak_of_arrays_where_there_are_none():
    with pytest.raises(SettingsError) as refusal:
        parse_routing("TopP(p=x)")
    assert "array" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "DropCold(__import__('os'))",
        "os.system('x')",
        "DropCold(",
        "DropCold(a=1)",
        "DropCold()",
        "1+1",
        "",
    ],
)
def test_parse_routing_anything_else_is_refused(text):
    with pytest.raises((SettingsError, UnknownNameError), match="policy must be"):
        parse_routing(text)


def test_parse_routing_misspelt_name_suggests():
    with pytest.raises(UnknownNameError, match="Did you mean 'DropCold'"):
        parse_routing("DropCol(0.5)")
