from __future__ import annotations

import pytest

from bmoe_lab import residency
from bmoe_lab.errors import SettingsError, UnknownNameError
from bmoe_lab.policy_text import parse_residency
from bmoe_lab.residency import LFU, LRU, PerLayer, Pin, Random

POLICIES = [
    *(residency.get(name)() for name in residency.names()),
    LRU("2 GiB"),
    LFU(keep_counts=False, ageing=True),
    Random(4096, seed=7),
    PerLayer(LFU(keep_counts=False), trim="visited", budget="1 MiB"),
    Pin(profile=[[1, 0], [0, 3]], room="4 KiB"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_parse_residency_repr_gives_the_policy_back(policy):
    assert parse_residency(repr(policy)) == policy


@pytest.mark.parametrize("name", residency.names())
def test_parse_residency_knows_the_names_of_the_registry(name):
    assert parse_residency(name) == residency.get(name)()


def test_parse_residency_knows_the_names_of_the_published_curves():
    assert parse_residency("layer") == PerLayer("lru", trim="visited")
    assert parse_residency(" layerlfu ") == PerLayer("lfu", trim="visited")


@pytest.mark.parametrize(
    "text",
    [
        "LRU(__import__('os'))",
        "os.system('x')",
        "LRU(",
        "LRU(nothing=1)",
        "LRU(*[1])",
        "PerLayer(os.LRU())",
        "1",
        "",
        "LRU() + LRU()",
    ],
)
def test_parse_residency_of_anything_but_a_plain_call_is_refused(text):
    with pytest.raises((SettingsError, UnknownNameError), match="residency"):
        parse_residency(text)


def test_parse_residency_of_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"'layerlfu', .*; got 'lfu_'. Did you mean 'lfu'"):
        parse_residency("lfu_(3)")
    with pytest.raises(UnknownNameError, match="got 'lfu_'"):
        parse_residency("PerLayer(lfu_)")
