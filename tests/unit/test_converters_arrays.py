"""Routed experts as arrays, as servers hand them out."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings

from bmoe_lab.converters import from_routed_experts, to_routed_experts
from bmoe_lab.errors import SettingsError, TraceFormatError, UnknownNameError
from bmoe_lab.testing import make_trace
from tests.unit.converter_traces import traces

ARRAY = np.array([[[3, 1], [0, 2]], [[2, 0], [-1, -1]], [[1, 3], [2, 1]]], dtype=np.int32)


def test_from_routed_experts_splits_prompt_and_decode():
    ds = from_routed_experts(ARRAY, n_expert=4, n_prompt=2)
    assert ds.phase.values.tolist() == [0, 0, 1]
    assert ds.batch.values.tolist() == [0, 0, 1]
    assert ds.position.values.tolist() == [0, 1, 2]
    assert ds.expert_chosen.values[1].tolist() == [[2, 0], [-1, -1]]
    assert ds.action.values[1, 1].tolist() == [255, 255]
    assert "weight_chosen" not in ds
    assert "residency" not in ds
    assert "lossless" not in ds.attrs


def test_from_routed_experts_n_ubatch_splits_the_prompt():
    array = np.zeros((5, 1, 1), dtype=np.int16)
    ds = from_routed_experts(array, n_expert=4, n_prompt=4, n_ubatch=3)
    assert ds.batch.values.tolist() == [0, 0, 0, 1, 2]


def test_from_routed_experts_layers_leaves_dense_ones_out():
    """vLLM's array has zeros for dense layers, which are no routing."""
    dense = np.concatenate([np.zeros((3, 1, 2), dtype=np.int32), ARRAY], axis=1)
    with pytest.raises(TraceFormatError, match=r"must appear once in a row; got \[0, 0\].*leave"):
        from_routed_experts(dense, n_expert=4, n_prompt=2)
    ds = from_routed_experts(dense, n_expert=4, n_prompt=2, layers=[1, 2])
    assert ds.block.values.tolist() == [1, 2]
    np.testing.assert_array_equal(ds.expert_chosen, ARRAY)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_from_routed_experts_reads_files(tmp_path, name):
    path = tmp_path / name
    if name.endswith("y"):
        np.save(path, ARRAY)
    else:
        np.savez(path, routed_experts=ARRAY, other=np.arange(3))
    ds = from_routed_experts(path, n_expert=4, n_prompt=2)
    np.testing.assert_array_equal(ds.expert_chosen, ARRAY)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(ds=traces(dropped=False, n_turn=1))
def test_routed_experts_round_trip_is_exact(ds):
    array = to_routed_experts(ds)
    n_prompt = int((ds.phase == 0).sum())
    back = from_routed_experts(array, n_expert=ds.attrs["n_expert"], n_prompt=n_prompt)
    for name in ("expert_chosen", "expert_applied", "action", "phase"):
        np.testing.assert_array_equal(back[name], ds[name])
    np.testing.assert_array_equal(to_routed_experts(back, which="applied"), array)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ARRAY[0], r"shape \(token, layer, slot\).*got int32 of shape \(2, 2\)"),
        (ARRAY[:0], "none of them 0 long"),
        (ARRAY.astype(float), "must be whole numbers"),
        (ARRAY + 1, r"from 0 to n_expert - 1 = 3, or -1; got \[4, 2\] in array, row 0, layer 0"),
        (ARRAY - 2, r"or -1; got \[-2, 0\] in array, row 0, layer 1"),
        (np.where(ARRAY == 2, -1, ARRAY), r"only -1; got \[0, -1\] in array, row 0, layer 1"),
        (np.array([[["1", "2"]]]), "must be whole numbers"),
    ],
)
def test_from_routed_experts_malformed_array_is_one_clear_error(array, message):
    with pytest.raises(TraceFormatError, match=message):
        from_routed_experts(array, n_expert=4, n_prompt=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_expert": 0}, "n_expert must be a whole number from 1 to 32767; got 0"),
        ({"n_expert": 4.0}, r"n_expert must be a whole number from 1 to 32767; got 4\.0"),
        ({"n_expert": 40000}, "n_expert must be a whole number from 1 to 32767; got 40000"),
        ({"n_prompt": 4}, "n_prompt must be a whole number from 0 to 3; got 4"),
        ({"n_ubatch": 0}, "n_ubatch must be a whole number from 1"),
        ({"layers": [2]}, r"layers must be ascending and from 0 to 1; got \[2\]"),
        ({"layers": [1, 0]}, r"layers must be ascending and from 0 to 1; got \[1, 0\]"),
        ({"layers": []}, r"layers must be ascending and from 0 to 1; got \[\]"),
    ],
)
def test_from_routed_experts_impossible_argument_is_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        from_routed_experts(ARRAY, **{"n_expert": 4, "n_prompt": 2} | arguments)


def test_from_routed_experts_object_array_is_refused_unloaded(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceFormatError, match="pickles, which run code"):
        from_routed_experts(path, n_expert=4, n_prompt=1)
    np.savez(tmp_path / "a.npz", x=ARRAY, y=ARRAY)
    with pytest.raises(TraceFormatError, match=r"one called 'routed_experts'; got \['x', 'y'\]"):
        from_routed_experts(tmp_path / "a.npz", n_expert=4, n_prompt=1)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(ARRAY))
    with pytest.raises(TraceFormatError, match="must not be a pickle"):
        from_routed_experts(tmp_path / "b.npy", n_expert=4, n_prompt=1)


def test_to_routed_experts_applied_of_dropped_slots_is_refused():
    trace = make_trace(policy="drop", budget_frac=0.3)
    assert to_routed_experts(trace).dtype == np.int16
    with pytest.raises(TraceFormatError, match=r"no dropped slots for which='applied'; got \d+"):
        to_routed_experts(trace, which="applied")
    with pytest.raises(UnknownNameError, match="which must be one of"):
        to_routed_experts(trace, which="ran")
