from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from bmoe_lab import schema, validation
from bmoe_lab.errors import SchemaError
from bmoe_lab.schema import Action, Phase, Residency, clean_attrs, validate
from bmoe_lab.testing.traces import make_trace

DOC = Path(__file__).parents[2] / "docs" / "trace-format.md"


@pytest.fixture
def trace() -> xr.Dataset:
    return make_trace(n_token=24, n_layer=3, scores=True, policy="drop", budget_frac=0.3)


def broken(trace: xr.Dataset, name: str, where: tuple[int, ...], value: object) -> xr.Dataset:
    trace = trace.copy(deep=True)
    trace[name].values[where] = value
    return trace


@pytest.mark.parametrize("policy", [None, "drop", "substitute"])
@pytest.mark.parametrize("scores", [False, True, "float16"])
def test_validate_synthetic_trace_returns_it(policy, scores):
    trace = make_trace(n_token=20, n_layer=3, policy=policy, scores=scores)
    assert validate(trace) is trace


def test_validate_part_of_a_trace_returns_it(trace):
    part = trace.isel(token=slice(7, 15), layer=[0, 2], slot=[0, 1])
    part = part.assign(n_expert_used=part.n_expert_used.clip(max=2))
    assert validate(part) is part


@pytest.mark.parametrize("name", [n for n, spec in schema.VARIABLES.items() if spec.required])
def test_validate_required_variable_absent_says_which(trace, name):
    with pytest.raises(SchemaError, match=f"must have the variable '{name}'"):
        validate(trace.drop_vars(name))


@pytest.mark.parametrize("name", [n for n, spec in schema.VARIABLES.items() if not spec.required])
def test_validate_optional_variable_absent_is_valid(trace, name):
    validate(trace.drop_vars(name))


@pytest.mark.parametrize("name", [n for n, spec in schema.ATTRIBUTES.items() if spec.required])
def test_validate_required_attribute_absent_says_which(trace, name):
    del trace.attrs[name]
    with pytest.raises(SchemaError, match=f"must have the attribute '{name}'"):
        validate(trace)


@pytest.mark.parametrize("name", sorted(schema.VARIABLES))
def test_validate_wrong_dtype_names_both(trace, name):
    wrong = np.dtype("int8" if name != "accepted" else "float64")
    values = np.zeros(trace[name].shape, dtype=wrong)
    trace = trace.assign({name: (trace[name].dims, values)})
    with pytest.raises(SchemaError, match=rf"{name} must have the dtype .* got {wrong}"):
        validate(trace)


def test_validate_wrong_dims_says_both(trace):
    with pytest.raises(SchemaError, match=r"expert_chosen must have the dims \('token', 'layer'"):
        validate(trace.transpose("layer", ...))


def test_validate_coordinate_as_variable_is_refused(trace):
    with pytest.raises(SchemaError, match="phase must be a coordinate"):
        validate(trace.reset_coords("phase"))


def test_validate_not_a_dataset_is_refused(trace):
    with pytest.raises(SchemaError, match=r"must be an xarray\.Dataset; got DataTree"):
        validate(xr.DataTree(trace))


def test_validate_no_tokens_is_refused(trace):
    with pytest.raises(SchemaError, match="at least one token"):
        validate(trace.isel(token=slice(0, 0)))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("expert_chosen", 16, r"expert_chosen must be from -1 to n_expert - 1 = 15; got 16"),
        ("expert_applied", -2, r"expert_applied must be from -1"),
        ("action", 77, r"action must be one of \[0, 1, 2, 3, 255\]; got 77"),
        ("residency", 4, r"residency must be one of \[0, 1, 2, 3, 255\]; got 4"),
        ("expert_chosen", -1, r"expert_applied = -1 must mark the same cells"),
        ("action", 255, r"action = 255 must mark the same cells"),
        ("residency", 255, r"residency = 255 must mark the same cells"),
    ],
)
def test_validate_routed_cell_with_bad_value_is_refused(trace, name, value, rule):
    with pytest.raises(SchemaError, match=rule + ".* at {'token': 20, 'layer': 1, 'slot': 2}"):
        validate(broken(trace, name, (20, 1, 2), value))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("weight_chosen", 0.0, "weight_chosen must be NaN where nothing routed"),
        ("weight_applied", 0.5, "weight_applied must be NaN where nothing routed"),
        ("read_bytes", 8, "read_bytes must be 0 where nothing routed"),
    ],
)
def test_validate_unrouted_cell_with_value_is_refused(trace, name, value, rule):
    assert trace.expert_chosen.values[0, 2, 0] == -1
    with pytest.raises(SchemaError, match=rule):
        validate(broken(trace, name, (0, 2, 0), value))


@pytest.mark.parametrize("name", ["expert_chosen", "expert_applied"])
def test_validate_expert_twice_in_a_routing_is_refused(name):
    trace = make_trace(n_token=8, n_layer=2, policy="substitute")
    value = trace[name].values[6, 1, 0]
    with pytest.raises(SchemaError, match=f"{name} must not repeat an expert"):
        validate(broken(trace, name, (6, 1, 3), value))


def test_validate_dropped_slot_repeats_its_stand_in_is_valid(trace):
    dropped = trace.action.values == Action.dropped
    assert dropped.any()
    stand_in = np.broadcast_to(trace.expert_applied.values[..., :1], dropped.shape)
    assert (trace.expert_applied.values[dropped] == stand_in[dropped]).all()
    validate(trace)


@pytest.mark.parametrize(
    ("name", "value"), [("expert_applied", 15), ("weight_applied", 0.25), ("action", 1)]
)
def test_validate_lossless_with_a_change_is_refused(name, value):
    trace = make_trace(n_token=8, n_layer=2, n_expert=16, n_used=2)
    assert 15 not in trace.expert_applied.values[6, 1]
    with pytest.raises(SchemaError, match=f"{name} must .* if lossless"):
        validate(broken(trace, name, (6, 1, 1), value))


def test_validate_lossless_with_unknown_weights_is_valid():
    trace = make_trace(n_token=8, n_layer=2)
    for name in ("weight_chosen", "weight_applied"):
        trace[name].values[:] = np.nan
    validate(trace)


def test_validate_falling_batch_is_refused(trace):
    with pytest.raises(SchemaError, match=r"batch must not fall along token; got 0 at .*20"):
        validate(broken(trace, "batch", (20,), 0))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("phase", 3, "phase must be one of"),
        ("accepted", 2, "accepted must be 0 or 1"),
        ("logprob", 0.5, "logprob must not be positive"),
    ],
)
def test_validate_bad_token_value_is_refused(trace, name, value, rule):
    with pytest.raises(SchemaError, match=rule):
        validate(broken(trace, name, (5,), value))


def test_validate_width_beyond_slots_is_refused(trace):
    with pytest.raises(SchemaError, match="n_expert_used must be from 1 to the 4 slots; got 5"):
        validate(broken(trace, "n_expert_used", (1,), 5))


def test_validate_rounded_scores_without_the_flag_are_refused():
    trace = make_trace(n_token=8, n_layer=2, scores="float16")
    trace.attrs["score_exact"] = 1
    with pytest.raises(SchemaError, match="score_exact must be 0 for float16"):
        validate(trace)


def test_validate_scores_of_some_experts_are_refused(trace):
    with pytest.raises(SchemaError, match="'expert' must have the size n_expert = 16; got 8"):
        validate(trace.isel(expert=slice(0, 8)))


@pytest.mark.parametrize("value", [True, None, 2, "yes", 1.0])
def test_validate_flag_attribute_not_0_or_1_is_refused(trace, value):
    trace.attrs["complete"] = value
    with pytest.raises(SchemaError, match="attribute 'complete' must be of kind flag"):
        validate(trace)


def test_validate_cost_of_another_dtype_is_refused(trace):
    trace["wall_s"] = trace.wall_s.astype(np.float32)
    with pytest.raises(SchemaError, match="wall_s must be float64"):
        validate(trace)


def test_validate_newer_version_is_refused_by_number(trace):
    trace.attrs["schema_version"] = 2
    with pytest.raises(SchemaError, match=r"must be 1; got 2\. Update bmoe_lab"):
        validate(trace)


def test_validate_in_windows_reports_the_token_of_the_whole(trace, monkeypatch):
    monkeypatch.setattr(validation, "_CHECK_CELLS", 5 * 3 * 4)
    validate(trace)
    with pytest.raises(SchemaError, match="'token': 22"):
        validate(broken(trace, "action", (22, 0, 0), 9))


def test_validate_structure_only_leaves_values_unread(trace):
    validate(broken(trace, "action", (22, 0, 0), 9), values=False)


def test_clean_attrs_keeps_only_what_files_can_hold():
    attrs = {"a": True, "b": None, "c": np.int64(4), "d": {"x": [1]}, "e": 0.5, "f": Phase.decode}
    assert clean_attrs(attrs) == {"a": 1, "c": 4, "d": '{"x": [1]}', "e": 0.5, "f": 1}


def test_clean_attrs_value_without_a_form_is_refused():
    with pytest.raises(SchemaError, match="attribute 'policy' must be a number, a text"):
        clean_attrs({"policy": object()})


def test_clean_attrs_nan_in_a_structure_is_refused():
    with pytest.raises(SchemaError, match="attribute 'counts' must be a structure that JSON can"):
        clean_attrs({"counts": {"rate": float("nan")}})


def test_flags_have_cf_attributes_of_their_dtype(trace):
    for name, flags in (("action", Action), ("residency", Residency), ("phase", Phase)):
        attrs = trace[name].attrs
        assert attrs["flag_values"].dtype == np.uint8
        assert attrs["flag_values"].tolist() == [flag.value for flag in flags]
        assert attrs["flag_meanings"].split() == [flag.name for flag in flags]


def _doc_rows() -> dict[str, list[str]]:
    rows = {}
    for line in DOC.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `"):
            for name in re.findall(r"`([a-z0-9_]+)`", cells[0]):
                rows[name] = cells[1:]
    return rows


def test_documentation_names_every_variable_with_dims_and_dtype():
    rows = _doc_rows()
    for name, spec in schema.VARIABLES.items():
        assert name in rows, name
        dims, dtype = rows[name][:2]
        assert dims == ", ".join(spec.dims), name
        assert dtype.split(" or ") == [d.replace("str", "text") for d in spec.dtypes], name


def test_documentation_names_every_cost_attribute_and_flag():
    rows = _doc_rows()
    for name, (units, _) in schema.COSTS.items():
        assert rows[name][0] == units, name
    for name, spec in schema.ATTRIBUTES.items():
        assert rows[name][0] == spec.kind, name
        assert rows[name][1] == ("yes" if spec.required else ""), name
    text = DOC.read_text(encoding="utf-8")
    for flags in (Action, Residency, Phase):
        for flag in flags:
            assert f"{flag.value} {flag.name}" in text, flag
    assert f"`schema_version` = {schema.SCHEMA_VERSION}" in text
