"""States that come from files: what is impossible is refused before a kernel sees it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab.errors import PolicyError
from bmoe_lab.residency import ARC, FIFO, S3FIFO, SIEVE, SLRU, Clock, WTinyLFU

POLICIES = [FIFO, Clock, SLRU, ARC, S3FIFO, SIEVE, WTinyLFU]
KEY_BYTES = np.arange(1, 21)
BUDGET = 60


def used_state(policy, budget=BUDGET):
    rng = np.random.default_rng(8)
    state = policy().start(KEY_BYTES, budget)
    for _ in range(150):
        state.load(rng.choice(20, 3, p=rng.dirichlet(np.full(20, 0.5))))
    return state


def queues_of(policy):
    arrays = used_state(policy).to_arrays()
    return [
        name
        for name in arrays
        if name in {"keys", "small", "main", "ghosts", "window", "probation", "protected"}
        or name.startswith(("recent", "frequent"))
    ]


QUEUES = [(policy, name) for policy in POLICIES for name in queues_of(policy)]


@pytest.mark.parametrize("policy", POLICIES)
def test_arrays_are_plain_and_independent_of_the_state(policy):
    state = used_state(policy)
    arrays = state.to_arrays()
    copies = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        assert array.ndim == 1
        assert array.dtype in (np.int64, np.float64)
    state.load(np.arange(20))
    for name, copy in copies.items():
        np.testing.assert_array_equal(arrays[name], copy)


@pytest.mark.parametrize("policy", POLICIES)
def test_missing_array_is_refused_by_name(policy):
    arrays = used_state(policy).to_arrays()
    for name in arrays:
        rest = {other: array for other, array in arrays.items() if other != name}
        with pytest.raises(
            PolicyError, match=rf"a start state of {policy.__name__} must hold '{name}'; got \["
        ):
            policy().from_arrays(rest, KEY_BYTES, BUDGET)


@pytest.mark.parametrize(("policy", "name"), QUEUES)
@pytest.mark.parametrize("key", [-1, 20, 2**62, -(2**63)])
def test_key_out_of_range_is_refused(policy, name, key):
    arrays = used_state(policy).to_arrays()
    arrays[name] = np.append(arrays[name], key)
    with pytest.raises(
        PolicyError, match=rf"{name} of a start state must be distinct and lie in \[0, 20\); got"
    ):
        policy().from_arrays(arrays, KEY_BYTES, BUDGET)


@pytest.mark.parametrize(("policy", "name"), QUEUES)
def test_key_twice_is_refused_within_and_across_queues(policy, name):
    empty = {
        other: array[:0] if array.size != 1 and other != "uses" else array
        for other, array in policy().start(KEY_BYTES, BUDGET).to_arrays().items()
    }
    with pytest.raises(PolicyError, match=rf"{name} .* must be distinct .* got 7 at entry 1\."):
        policy().from_arrays(empty | {name: np.array([7, 7])}, KEY_BYTES, BUDGET)
    for other in queues_of(policy):
        if other != name:
            both = {name: np.array([3, 7]), other: np.array([7])}
            with pytest.raises(PolicyError, match=r"must be distinct .* got 7 at entry"):
                policy().from_arrays(empty | both, KEY_BYTES, BUDGET)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "value",
    [
        np.zeros((2, 2), np.int64),
        np.array(3),
        np.array([0.5, 1.0]),
        np.array(["a"]),
        np.array([None]),
        np.array([1 + 2j]),
        np.array([2**63], np.uint64),
        None,
    ],
    ids=repr,
)
def test_array_of_another_kind_is_refused(policy, value):
    arrays = used_state(policy).to_arrays()
    for name in arrays:
        if name == "target" and np.shape(value) == (1,) and np.asarray(value).dtype.kind in "ui":
            continue  # a number of bytes
        with pytest.raises(PolicyError, match=f"{name} of a start state must"):
            policy().from_arrays(arrays | {name: value}, KEY_BYTES, BUDGET)


@pytest.mark.parametrize(
    ("policy", "name", "value", "rule"),
    [
        (Clock, "used", 2, r"must lie in \[0, 1\]"),
        (Clock, "used", -1, r"must lie in \[0, 1\]"),
        (SIEVE, "used", 2, r"must lie in \[0, 1\]"),
        (SIEVE, "hand", -2, r"must lie in \[-1, \d+\]"),
        (SIEVE, "hand", 20, r"must lie in \[-1, \d+\]"),
        (S3FIFO, "small_uses", 4, r"must lie in \[0, 3\]"),
        (S3FIFO, "main_uses", -1, r"must lie in \[0, 3\]"),
        (S3FIFO, "evicted", 2, r"must lie in \[0, 1\]"),
        (WTinyLFU, "uses", -1, r"must lie in \[0, \d+\]"),
        (WTinyLFU, "uses", 2**62, r"must lie in \[0, \d+\]"),
        (WTinyLFU, "sample", -1, r"must lie in \[0, \d+\]"),
        (ARC, "target", -1.0, "must be at least 0 and finite"),
        (ARC, "target", np.nan, "must be at least 0 and finite"),
        (ARC, "target", np.inf, "must be at least 0 and finite"),
    ],
)
def test_number_out_of_range_is_refused(policy, name, value, rule):
    arrays = used_state(policy).to_arrays()
    arrays[name] = arrays[name].copy()
    arrays[name][-1] = value
    with pytest.raises(PolicyError, match=rf"{name} of a start state {rule}; got"):
        policy().from_arrays(arrays, KEY_BYTES, BUDGET)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Clock, "used"),
        (SIEVE, "used"),
        (SIEVE, "hand"),
        (S3FIFO, "small_uses"),
        (S3FIFO, "main_uses"),
        (S3FIFO, "evicted"),
        (WTinyLFU, "uses"),
        (WTinyLFU, "sample"),
    ],
)
def test_array_of_another_length_is_refused(policy, name):
    arrays = used_state(policy).to_arrays()
    arrays[name] = np.append(arrays[name], 0)
    with pytest.raises(PolicyError, match=rf"{name} of a start state must have \d+ entries; got"):
        policy().from_arrays(arrays, KEY_BYTES, BUDGET)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [0, 10, 59, 61, 210])
def test_a_state_goes_on_under_another_budget(policy, budget):
    arrays = used_state(policy).to_arrays()
    state = policy().from_arrays(arrays, KEY_BYTES, budget)
    rng = np.random.default_rng(9)
    for _ in range(100):
        keys = rng.integers(0, 20, 3)
        state.load(keys)
        assert state.resident_bytes == KEY_BYTES[state.contains()].sum()
        assert state.resident_bytes <= max(budget, KEY_BYTES[np.unique(keys)].sum())


#: Which queue's keys an array speaks of.
ABOUT = {"used": "keys", "small_uses": "small", "main_uses": "main"}


@st.composite
def plausible_arrays(draw, policy):
    """Return arrays that may be a state that nobody ever reached, or have one array damaged."""
    arrays = policy().start(KEY_BYTES, BUDGET).to_arrays()
    queues = [name for name in arrays if name in queues_of(policy)]
    keys = draw(st.permutations(range(20)))
    edges = sorted(draw(st.lists(st.integers(0, 20), min_size=len(queues), max_size=len(queues))))
    for name, begin, end in zip(queues, [0, *edges], edges, strict=False):
        arrays[name] = np.array(keys[begin:end], dtype=np.int64)
    for name, array in arrays.items():
        if name in ABOUT:
            n = arrays[ABOUT[name]].size
            arrays[name] = np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), int)
        elif name == "uses":
            counts = st.lists(st.integers(0, 9), min_size=20, max_size=20)
            arrays[name] = np.array(draw(counts))
        elif name == "target":
            arrays[name] = np.array([draw(st.floats(0, 100))])
        elif name not in queues:
            arrays[name] = np.array([draw(st.integers(0, 1))], dtype=array.dtype)
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(arrays)))
        values = draw(st.lists(st.integers(-1, 20), max_size=4))
        arrays[name] = np.array(values, dtype=arrays[name].dtype)
    return arrays


@pytest.mark.parametrize("policy", POLICIES)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data())
def test_arrays_of_any_content_are_refused_or_make_a_sound_state(policy, data):
    """An index out of range in a kernel would end the process, not the test."""
    arrays = data.draw(plausible_arrays(policy))
    try:
        state = policy().from_arrays(arrays, KEY_BYTES, BUDGET)
    except PolicyError:
        return
    for keys in data.draw(st.lists(st.lists(st.integers(0, 19), max_size=4), max_size=12)):
        state.load(np.array(keys, dtype=np.int64))
        assert state.contains()[keys].all()
        assert state.resident_bytes == KEY_BYTES[state.contains()].sum()
        again = policy().from_arrays(state.to_arrays(), KEY_BYTES, BUDGET)
        np.testing.assert_array_equal(again.contains(), state.contains())
