"""Traces with everything that makes a metric wrong, for tests of the metrics."""

from __future__ import annotations

import numpy as np
import xarray as xr
from hypothesis import strategies as st

from bmoe_lab.schema import Action, validate
from bmoe_lab.testing.traces import make_trace


def hand_made() -> xr.Dataset:
    """Return one prefill of two tokens, then two decoded tokens; one layer, two slots."""
    trace = make_trace(n_token=4, n_layer=1, n_expert=8, n_used=2, n_prefill=2)
    trace = trace.copy(deep=True)
    for name in ("expert_chosen", "expert_applied"):
        trace[name].values[:, 0] = [[1, 2], [2, 1], [1, 3], [3, 4]]
    trace["weight_chosen"].values[:, 0] = [[0.6, 0.4], [0.7, 0.3], [0.9, 0.1], [0.5, 0.5]]
    trace["residency"].values[:, 0] = [[0, 0], [0, 0], [1, 0], [2, 0]]
    trace["read_bytes"].values[:, 0] = [[10, 10], [0, 0], [0, 10], [0, 10]]
    trace["action"].values[:, 0] = 0
    return trace


def decoded(experts: list[list[int]] | list[list[list[int]]], n_expert: int = 8) -> xr.Dataset:
    """Return a decode of these choices, (token, slot) or (token, layer, slot)."""
    ids = np.asarray(experts, dtype=np.int16)
    ids = ids[:, None] if ids.ndim == 2 else ids
    n_token, n_layer, n_slot = ids.shape
    trace = make_trace(
        n_token, n_layer=n_layer, n_expert=n_expert, n_used=n_slot, n_prefill=0
    ).copy(deep=True)
    trace["expert_chosen"].values[:] = ids
    trace["expert_applied"].values[:] = ids
    return trace


def uniform(n_token: int, n_layer: int, n_expert: int, n_used: int, seed: int) -> xr.Dataset:
    """Return a decode in which every routing draws its experts anew, all alike."""
    rng = np.random.default_rng(seed)
    score = rng.random((n_token, n_layer, n_expert))
    order = np.argsort(-score, axis=-1)[..., :n_used]
    trace = decoded(order, n_expert)
    scores = (score / score.sum(axis=-1, keepdims=True)).astype(np.float32)
    return trace.assign(router_score=(("token", "layer", "expert"), scores))


def ragged(
    seed: int = 0,
    *,
    turns: tuple[tuple[int, int], ...] = ((5, 7), (3, 6)),
    widths: tuple[int, ...] = (3, 1, 2),
    n_expert: int = 6,
    n_ubatch: int = 4,
) -> xr.Dataset:
    """Return a trace of several turns, each (prompt, decoded) tokens.

    Layers of different width, a last layer that skips most of the prompt, dropped slots, an expert
    size per layer.
    """
    rng = np.random.default_rng(seed)
    turn, phase, batch = [], [], []
    number = 0
    for index, (n_prompt, n_decode) in enumerate(turns):
        for at in range(n_prompt):
            number += at > 0 and at % n_ubatch == 0
            turn.append(index), phase.append(0), batch.append(number)
        number += n_prompt > 0
        for _ in range(n_decode):
            turn.append(index), phase.append(1), batch.append(number)
            number += 1
    n_token, n_layer, n_slot = len(turn), len(widths), max(widths)
    base = make_trace(
        n_token, n_layer=n_layer, n_expert=n_expert, n_used=n_slot, n_prefill=0, scores=True
    ).copy(deep=True)
    chosen = base["expert_chosen"].values
    routed = np.zeros(chosen.shape, dtype=bool)
    for layer, width in enumerate(widths):
        routed[:, layer, :width] = True
    ends = np.append(np.diff(phase) != 0, True)
    routed[(np.array(phase) == 0) & ~ends, -1] = False
    weight = -np.sort(-rng.random(chosen.shape), axis=-1)
    dropped = routed & (rng.random(chosen.shape) < 0.2)
    dropped[..., 0] = False
    residency = rng.choice([0, 1, 2], chosen.shape)
    values = {
        "expert_chosen": np.where(routed, chosen, -1),
        "expert_applied": np.where(routed, np.where(dropped, chosen[..., :1], chosen), -1),
        "weight_chosen": np.where(routed, weight, np.nan),
        "weight_applied": np.where(routed, np.where(dropped, 0, weight), np.nan),
        "action": np.where(routed, np.where(dropped, Action.dropped, Action.kept), 255),
        "residency": np.where(routed, np.where(dropped, 0, residency), 255),
        "read_bytes": np.zeros(chosen.shape),
        "n_expert_used": np.array(widths),
        "expert_bytes": 100 + 7 * np.arange(n_layer),
    }
    for name, array in values.items():
        base[name].values[:] = array
    base["router_score"].values[~routed.any(axis=-1)] = np.nan
    for name, array in (("turn", turn), ("phase", phase), ("batch", batch)):
        base[name].values[:] = array
    base.attrs |= {"lossless": 0, "policy": "test"}
    return validate(base)


def ragged_traces() -> st.SearchStrategy[xr.Dataset]:
    """Return traces of any turns, widths and evaluation size."""
    turn = st.tuples(st.integers(0, 6), st.integers(0, 8)).filter(lambda pair: sum(pair) > 0)
    return st.builds(
        ragged,
        st.integers(0, 1000),
        turns=st.lists(turn, min_size=1, max_size=3).map(tuple),
        widths=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
        n_expert=st.integers(4, 7),
        n_ubatch=st.integers(1, 5),
    )


def cells(trace: xr.Dataset, which: str, phase: str = "all") -> list[tuple[int, int, list[int]]]:
    """Return (token, layer, experts in slot order) of every routing, row by row."""
    number = {"prefill": 0, "decode": 1}
    found = []
    for token in range(trace.sizes["token"]):
        if phase != "all" and int(trace["phase"].values[token]) != number[phase]:
            continue
        for layer in range(trace.sizes["layer"]):
            experts = []
            for slot in range(trace.sizes["slot"]):
                expert = int(trace["expert_chosen"].values[token, layer, slot])
                gone = int(trace["action"].values[token, layer, slot]) == Action.dropped
                if expert >= 0 and not (which == "applied" and gone):
                    experts.append(int(trace[f"expert_{which}"].values[token, layer, slot]))
            if experts:
                found.append((token, layer, experts))
    return found


def lookups(trace: xr.Dataset) -> dict[tuple[int, int, int, int], tuple[int, int, int]]:
    """Return the first row of every distinct expert of a load, row by row."""
    found: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}
    n_token, n_layer, n_slot = trace.residency.shape
    for layer in range(n_layer):
        for token in range(n_token):
            for slot in range(n_slot):
                where = (token, layer, slot)
                if int(trace.residency[where]) not in (0, 1, 2):
                    continue
                if int(trace.action[where]) == Action.dropped:
                    continue
                key = (
                    int(trace.turn[token]),
                    int(trace.batch[token]),
                    layer,
                    int(trace.expert_applied[where]),
                )
                found.setdefault(key, where)
    return found
