"""One cell, one expert: known answers, and the same numbers as the metrics over whole traces."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_lab import metrics
from bmoe_lab.errors import SchemaError, SettingsError, UnknownNameError
from bmoe_lab.metrics import cells as cells_module
from bmoe_lab.schema import Action
from bmoe_lab.testing.traces import make_trace
from tests.unit.metric_traces import ragged_traces


def small(chosen, *, turn=None, batch=None, pieces=None):
    """Return a trace of one layer with the given experts, decoded one by one."""
    chosen = np.array(chosen)
    trace = make_trace(
        len(chosen), n_layer=1, n_expert=8, n_used=chosen.shape[1], n_prefill=0, seed=0
    )
    trace["expert_chosen"].values[:, 0] = chosen
    trace["expert_applied"].values[:, 0] = chosen
    trace["turn"].values[:] = 0 if turn is None else turn
    trace["batch"].values[:] = range(len(chosen)) if batch is None else batch
    if pieces is not None:
        trace.coords["piece"] = ("token", np.array(pieces))
    return trace


# ---------------------------------------------------------------- slots


def test_cell_slots_are_the_cell_in_words():
    trace = make_trace(n_token=30, policy="substitute", seed=1)
    token, layer, slot = (int(i[0]) for i in np.nonzero(trace.action.values == Action.substituted))
    cell = metrics.cell_slots(trace, token=token, layer=layer)
    assert cell["action"].values[slot] == "substituted"
    assert cell["residency"].values[slot] in ("hit", "miss")
    assert cell["expert_chosen"].values[slot] != cell["expert_applied"].values[slot]
    for name in ("expert_chosen", "weight_chosen", "expert_applied", "read_bytes"):
        np.testing.assert_array_equal(cell[name], trace[name].values[token, layer])
        assert cell[name].dtype == trace[name].dtype
    assert cell["read_bytes"].attrs["units"] == "byte"
    assert (cell.attrs["token"], cell.attrs["layer"]) == (token, layer)
    assert list(cell.to_pandas().columns[:2]) == ["expert_chosen", "weight_chosen"]


def test_cell_slots_leave_out_what_is_unknown_and_what_did_not_route():
    trace = small([[1, 2, 3]] * 3).drop_vars(["residency", "read_bytes", "weight_applied"])
    trace["expert_chosen"].values[2, 0, 1] = -1
    cell = metrics.cell_slots(trace, token=2, layer=0)
    assert set(cell.data_vars) == {"expert_chosen", "expert_applied", "weight_chosen", "action"}
    assert cell["slot"].values.tolist() == [0, 2]
    assert cell["expert_chosen"].values.tolist() == [1, 3]


def test_cell_slots_count_places_from_the_end_too():
    trace = make_trace(n_token=9)
    last = metrics.cell_slots(trace, token=-1, layer=-1)
    xr.testing.assert_identical(last, metrics.cell_slots(trace, token=8, layer=3))


@pytest.mark.parametrize("function", [metrics.cell_slots, metrics.cell_history])
def test_cell_that_is_not_there_is_refused(function):
    trace = make_trace(n_token=8, n_layer=1, n_prefill=4)
    with pytest.raises(SettingsError, match=r"token must be a whole number from 0 to 7.*got 8"):
        function(trace, token=8, layer=0)
    with pytest.raises(SettingsError, match=r"got -2. The trace has 1 layer\."):
        function(trace, token=0, layer=-2)
    for wrong in (0.0, True, None):
        with pytest.raises(SettingsError, match="token must be a whole number"):
            function(trace, token=wrong, layer=0)
    with pytest.raises(SchemaError, match="layer 0 must have routed token 0; it did not"):
        function(trace, token=0, layer=0)
    with pytest.raises(SchemaError, match="trace must hold tokens; got none"):
        function(trace.isel(token=slice(0, 0)), token=0, layer=0)


# ---------------------------------------------------------------- history


def test_cell_history_tells_tokens_and_evaluations():
    trace = small([[1, 2], [3, 1], [4, 5], [4, 6], [1, 4], [7, 2]], batch=[0, 0, 0, 1, 2, 3])
    cell = metrics.cell_history(trace, token=4, layer=0)
    assert cell["expert"].values.tolist() == [1, 4]
    assert cell["last_token"].values.tolist() == [1, 3]
    assert cell["tokens_ago"].values.tolist() == [3, 1]
    assert cell["evaluations_ago"].values.tolist() == [2, 1]
    same = metrics.cell_history(trace, token=1, layer=0)
    assert same["evaluations_ago"].values[1] == 0  # within one prompt
    assert np.isnan(same["tokens_ago"].values[0])  # never before
    assert metrics.cell_history(trace, token=5, layer=0)["tokens_ago"].values[1] == 5


def test_cell_history_stays_within_the_turn_unless_asked():
    trace = small([[1, 2], [1, 3], [1, 2]], turn=[0, 1, 1], batch=[0, 0, 1])
    inside = metrics.cell_history(trace, token=2, layer=0)
    np.testing.assert_array_equal(inside["last_token"], [1, np.nan])
    across = metrics.cell_history(trace, token=2, layer=0, across_turns=True)
    np.testing.assert_array_equal(across["last_token"], [1, 0])
    # An evaluation number that starts again with each turn is another evaluation.
    np.testing.assert_array_equal(across["evaluations_ago"], [1, 2])


def test_cell_history_of_what_ran_skips_dropped_slots():
    trace = small([[1, 2], [3, 2], [1, 2]])
    trace["action"].values[1, 0, 1] = Action.dropped
    trace["expert_applied"].values[1, 0, 1] = 3
    chosen = metrics.cell_history(trace, token=2, layer=0)
    ran = metrics.cell_history(trace, token=2, layer=0, which="applied")
    assert chosen["last_token"].values.tolist() == [0, 1]
    assert ran["last_token"].values.tolist() == [0, 0]
    trace["action"].values[2, 0, 0] = Action.dropped
    ran = metrics.cell_history(trace, token=2, layer=0, which="applied")
    assert np.isnan(ran["last_token"].values[0])
    with pytest.raises(UnknownNameError, match="which must be one of"):
        metrics.cell_history(trace, token=2, layer=0, which="ran")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(ragged_traces(), st.booleans(), st.sampled_from(["chosen", "applied"]), st.integers(1, 4))
def test_cell_history_is_the_reuse_distance_of_the_cell(trace, across, which, step):
    """Also when it looks back only a few tokens at a time."""
    before, cells_module._STEP = cells_module._STEP, step
    distance = metrics.reuse_distance(trace, phase="all", which=which, across_turns=across)
    try:
        for token, layer in np.argwhere((trace.expert_chosen.values >= 0).any(-1)).tolist():
            cell = metrics.cell_history(
                trace, token=token, layer=layer, which=which, across_turns=across
            )
            expected = distance.values[token, layer][cell["slot"].values]
            np.testing.assert_array_equal(cell["tokens_ago"], expected)
    finally:
        cells_module._STEP = before


# ---------------------------------------------------------------- pieces


def test_expert_pieces_known_answer():
    trace = small(
        [[1, 2], [1, 3], [2, 3], [1, 3], [2, 3], [2, 3]], pieces=["a", "b", "a", "a", "c", "b"]
    )
    table = metrics.expert_pieces(trace, layer=0, expert=1)
    assert table["piece"].values.tolist() == ["a", "b"]
    assert table["expert_piece_count_decode"].values.tolist() == [2, 1]
    assert table["piece_count_decode"].values.tolist() == [3, 2]
    # (2 of its 3 tokens) over (3 of all 6); (1 of 3) over (2 of 6).
    np.testing.assert_allclose(table["expert_piece_lift_decode"], [4 / 3, 1.0])


def test_expert_pieces_with_equal_counts_put_the_rarer_piece_first():
    trace = small([[1, 2], [1, 2], [3, 2]], pieces=["a", "b", "a"])
    table = metrics.expert_pieces(trace, layer=0, expert=1)
    assert table["piece"].values.tolist() == ["b", "a"]


def test_expert_pieces_of_an_expert_that_is_never_used_are_none():
    table = metrics.expert_pieces(small([[1, 2]] * 3), layer=0, expert=7)
    assert table.sizes["piece"] == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(ragged_traces(), st.sampled_from(["chosen", "applied"]), st.sampled_from(["all", "decode"]))
def test_expert_pieces_lift_is_specialisation_over_load(trace, which, phase):
    piece = trace["piece"].values
    table = metrics.specialisation(
        trace.assign_coords(word=("token", piece)), "word", which=which, phase=phase
    )
    rows = np.ones(piece.size, bool) if phase == "all" else trace["phase"].values == 1
    routed = (trace.expert_chosen.values >= 0).any(-1)
    for layer in range(trace.sizes["layer"]):
        for expert in range(trace.attrs["n_expert"]):
            found = metrics.expert_pieces(
                trace, layer=layer, expert=expert, which=which, phase=phase
            )
            counted = rows & routed[:, layer]
            share = table.sel(word=found["piece"].values).values[:, layer, expert]
            total = float(found[f"expert_piece_count_{phase}"].sum())
            lift = share / (total / counted.sum()) if total else share
            np.testing.assert_allclose(found[f"expert_piece_lift_{phase}"], lift)
            overall = [(counted & (piece == p)).sum() for p in found["piece"].values]
            np.testing.assert_array_equal(found[f"piece_count_{phase}"], overall)


def test_expert_pieces_impossible_requests_are_refused():
    trace = make_trace(n_token=8, n_layer=2)
    with pytest.raises(SettingsError, match="expert must be a whole number from 0 to 15; got 16"):
        metrics.expert_pieces(trace, layer=0, expert=16)
    with pytest.raises(SettingsError, match="layer must be a whole number"):
        metrics.expert_pieces(trace, layer=2, expert=0)
    with pytest.raises(SchemaError, match=r"coordinate 'piece'.*record_text=True"):
        metrics.expert_pieces(trace.drop_vars("piece"), layer=0, expert=0)
