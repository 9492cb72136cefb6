import pytest

from bmoe_lab import routing
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.policy_text import parse_routing


@pytest.mark.parametrize("name", routing.names())
def test_parse_routing_repr_gives_the_policy_back(name):
    values = {"drop_cold": 0.5, "cache_prior": 0.2, "fewer_experts": 2}
    args = {"lossless": ()}.get(name, (values.get(name, 0.25),))
    policy = routing.get(name)(*args)
    assert parse_routing(repr(policy)) == policy


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
