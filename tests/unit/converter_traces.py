"""Traces that Hypothesis makes up: every value that the formats promise to hold, no habits."""

from __future__ import annotations

import numpy as np
import xarray as xr
from hypothesis import strategies as st

from bmoe_lab.schema import SCHEMA_VERSION, Action, Phase, validate, variable_attrs

WEIGHTS = st.floats(width=32, allow_nan=True, allow_infinity=False)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1).filter(
    lambda name: name == name.strip(" ")
)


@st.composite
def damaged(draw, raw: bytes) -> bytes:
    """Return a file to which something happened: cut, changed, lost or doubled bytes."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(["cut", "set", "delete", "double"]))
        if kind == "cut":
            del data[max(1, at) :]
        elif kind == "set":
            data[at] = draw(st.sampled_from(b"0123456789,.-+en\n\r#= \xff"))
        elif kind == "delete" and len(data) > 1:
            del data[at]
        else:
            data[at:at] = data[at : at + 20]
    return bytes(data)


@st.composite
def traces(draw, *, dropped: bool = True, n_turn: int = 2, mask: bool = True) -> xr.Dataset:
    """Return a trace of prompts in wide evaluations and of single decoded tokens."""
    n_layer = draw(st.integers(2, 4))
    n_expert = draw(st.integers(2, 9))
    n_used = draw(st.integers(1, n_expert))
    widths, phases, turns = [], [], []
    for turn in range(draw(st.integers(1, n_turn))):
        prompt = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
        decode = [1] * draw(st.integers(0, 3))
        widths += prompt + decode
        phases += [Phase.prefill] * len(prompt) + [Phase.decode] * len(decode)
        turns += [turn * 3] * (len(prompt) + len(decode))
    batch = np.repeat(np.arange(len(widths), dtype=np.int32), widths)
    phase = np.array(phases, dtype=np.uint8)[batch]
    shape = (batch.size, n_layer, n_used)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    expert = rng.permuted(np.broadcast_to(np.arange(n_expert), (*shape[:2], n_expert)), axis=-1)
    expert = expert[..., :n_used].astype(np.int16)
    weight = rng.choice(
        np.array(draw(st.lists(WEIGHTS, min_size=1, max_size=8)), dtype=np.float32), shape
    )
    residency = rng.integers(0, 3, shape).astype(np.uint8)
    read = rng.choice(np.array([0, 1, 4096, 2**32 - 1], dtype=np.uint32), shape)
    action = np.zeros(shape, dtype=np.uint8)
    if dropped and draw(st.booleans()):
        action[rng.random(shape) < 0.3] = Action.dropped
        action[..., 0] = Action.kept
    if mask and n_layer > 2 and draw(st.booleans()):
        # Only the last token of a prompt's evaluation wants logits, if any does.
        last = np.append(batch[1:] != batch[:-1], True)
        gone = (phase == Phase.prefill) & ~(last & (rng.random(batch.size) < 0.7))
        expert[gone, -1], weight[gone, -1], read[gone, -1] = -1, np.nan, 0
        residency[gone, -1] = action[gone, -1] = 255
    block = np.sort(rng.choice(9, n_layer, replace=False)).astype(np.int32)
    position = np.arange(batch.size, dtype=np.int32) + draw(st.integers(0, 1000))
    layer_bytes = rng.integers(1, 2**40, n_layer)
    slots, tokens = ("token", "layer", "slot"), ("token",)
    applied_weight = np.where(action == Action.dropped, np.float32(0), weight)
    data = {
        "expert_chosen": (slots, expert),
        "expert_applied": (slots, np.where(action == Action.dropped, expert[..., :1], expert)),
        "action": (slots, action),
        "residency": (slots, residency),
        "read_bytes": (slots, read),
        "weight_chosen": (slots, weight),
        "weight_applied": (slots, applied_weight.astype(np.float32)),
        "expert_bytes": ("layer", layer_bytes),
        "n_expert_used": ("layer", np.full(n_layer, n_used, dtype=np.int16)),
    }
    if draw(st.booleans()):
        data["dense_bytes"] = ("layer", rng.integers(0, 2**40, n_layer))
    coords = {
        "turn": (tokens, np.array(turns, dtype=np.int32)[batch]),
        "phase": (tokens, phase),
        "batch": (tokens, batch),
        "position": (tokens, position),
        "block": ("layer", block),
        "group": ("layer", np.zeros(n_layer, dtype=np.int16)),
    }
    attrs = {"schema_version": SCHEMA_VERSION, "source": "synthetic", "complete": 1}
    attrs |= {"n_expert": n_expert, "lossless": int(not (action == Action.dropped).any())}
    if draw(st.booleans()):
        attrs["model_name"] = draw(NAMES)
    ds = xr.Dataset(data, coords, attrs)
    for name, variable in ds.variables.items():
        variable.attrs.update(variable_attrs(str(name)))
    return validate(ds)
