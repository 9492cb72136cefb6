"""A synthetic trace that looks like a recorded one.

The residency in it comes from a plain LRU over an ordered dict, written for reading, so it doubles
as the slow reference of :class:`bmoe_lab.residency.LRU`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.schema import (
    NO_EXPERT,
    NOT_ROUTED,
    SCHEMA_VERSION,
    Action,
    Phase,
    Residency,
    cost_attrs,
    validate,
    variable_attrs,
)

__all__ = ["make_trace"]

# One piece is the first half of a two-byte character, one holds an escaped line feed.
_PIECES = ("the", " beginning", " of", " a", " word", ",", " and", "\\x0a", "\\xc3", " light")
_DROP_FRAC = 0.75


def make_trace(
    n_token: int = 64,
    *,
    n_layer: int = 4,
    n_expert: int = 16,
    n_used: int = 4,
    n_prefill: int | None = None,
    n_ubatch: int = 512,
    seed: int = 0,
    scores: bool | Literal["float16"] = False,
    policy: Literal["drop", "substitute"] | None = None,
    mask_last_layer: bool = True,
    text: bool = True,
    expert_bytes: int = 4096,
    budget_frac: float = 0.5,
) -> xr.Dataset:
    """Return a synthetic trace, valid and with the habits of a real one.

    Popular experts, slow drift from token to token, a global LRU, a wide prefill before the decode.
    Same arguments, same trace.

    Parameters
    ----------
    n_token : int, default 64
        Tokens in all.
    n_layer, n_expert, n_used : int
        Shape of the model; `n_used` experts of `n_expert` per token.
    n_prefill : int, optional
        Tokens of the prompt, decoded `n_ubatch` at a time; a quarter of `n_token` by default. The
        others are decoded one by one.
    n_ubatch : int, default 512
        Width of a prefill evaluation.
    seed : int, default 0
        Seed of everything random.
    scores : bool or "float16", default False
        Add ``router_score``, float32 of shape (token, layer, expert), or rounded to float16.
    policy : {"drop", "substitute"}, optional
        Let a lossy policy act in the decode: drop a cold slot below 0.75 of its fair share, or
        replace a cold slot by the best resident expert outside the routing. Slot 0 stays.
    mask_last_layer : bool, default True
        Route only the last prompt token in the last layer, as llama.cpp does.
    text : bool, default True
        Add ``piece`` and ``token_id``.
    expert_bytes : int, default 4096
        Bytes of one expert of an even layer; odd ones are a quarter larger.
    budget_frac : float, default 0.5
        LRU budget as a fraction of all experts. Below ``n_used / n_expert`` it evicts everything.

    Returns
    -------
    xarray.Dataset
        ``source="synthetic"``; see :mod:`bmoe_lab.schema`.

    Raises
    ------
    SettingsError
        If the shape is impossible.

    Examples
    --------
    >>> trace = make_trace(n_token=8, n_layer=2, n_expert=8, n_used=2, seed=1)
    >>> dict(trace.sizes)
    {'token': 8, 'layer': 2, 'slot': 2}
    >>> bool((trace.expert_chosen[0, -1] == -1).all())  # the last layer skips it in prefill
    True
    """
    n_prefill = n_token // 4 if n_prefill is None else n_prefill
    if not (n_token >= 1 and n_layer >= 1 and 1 <= n_used <= n_expert <= 32767):
        raise SettingsError(
            "shape must have n_token, n_layer >= 1 and 1 <= n_used <= n_expert <= 32767; "
            f"got {(n_token, n_layer, n_used, n_expert)!r}. Change one of them."
        )
    if not 0 <= n_prefill <= n_token or n_ubatch < 1:
        raise SettingsError(
            f"n_prefill must be from 0 to n_token = {n_token} and n_ubatch >= 1; "
            f"got {n_prefill!r} and {n_ubatch!r}. Change one of them."
        )
    rng = np.random.default_rng(seed)
    probability = _router(rng, n_token, n_layer, n_expert)
    batch, phase = _evaluations(n_token, n_prefill, n_ubatch)
    routed = np.ones((n_token, n_layer), dtype=bool)
    if mask_last_layer and n_prefill > 1:
        routed[: n_prefill - 1, -1] = False
    layer_bytes = np.where(np.arange(n_layer) % 2, expert_bytes * 5 // 4, expert_bytes)
    layer_bytes = layer_bytes.astype(np.int64)
    budget = int(budget_frac * layer_bytes.sum() * n_expert)

    run = _Run(probability, routed, phase, n_used, layer_bytes, budget, policy)
    for index in range(int(batch[-1]) + 1):
        run.evaluate(np.flatnonzero(batch == index))

    per_token = ("token",)
    data: dict[str, Any] = {
        name: (("token", "layer", "slot"), values) for name, values in run.cells.items()
    }
    if scores:
        kept = np.where(routed[:, :, None], probability, np.float32(np.nan))
        dtype = np.float16 if scores == "float16" else np.float32
        data["router_score"] = (("token", "layer", "expert"), kept.astype(dtype))
        data["score_is_softmax"] = ("layer", np.ones(n_layer, dtype=np.uint8))
    logprob = -rng.gamma(1.5, 1.5, n_token).astype(np.float32)
    data["logprob"] = (per_token, np.where(phase == Phase.decode, logprob, np.float32(np.nan)))
    data["expert_bytes"] = ("layer", layer_bytes)
    data["dense_bytes"] = ("layer", np.full(n_layer, 3 * expert_bytes, dtype=np.int64))
    data["n_expert_used"] = ("layer", np.full(n_layer, n_used, dtype=np.int16))
    costs = _costs(rng, batch, run)
    data.update({name: (per_token, values) for name, values in costs.items()})
    coords: dict[str, Any] = {
        "turn": (per_token, np.zeros(n_token, dtype=np.int32)),
        "phase": (per_token, phase),
        "batch": (per_token, batch),
        "position": (per_token, np.arange(n_token, dtype=np.int32)),
        "accepted": (per_token, np.ones(n_token, dtype=np.uint8)),
        "block": ("layer", np.arange(n_layer, dtype=np.int32)),
        "group": ("layer", np.zeros(n_layer, dtype=np.int16)),
    }
    if text:
        ids = rng.integers(0, len(_PIECES), n_token)
        coords["token_id"] = (per_token, ids.astype(np.int32))
        coords["piece"] = (per_token, np.array([_PIECES[i] for i in ids.tolist()]))
    trace = xr.Dataset(data, coords, _attrs(n_expert, seed, budget, scores, policy))
    for name, variable in trace.variables.items():
        variable.attrs.update(cost_attrs(str(name)) if name in costs else variable_attrs(str(name)))
    return validate(trace)


def _router(
    rng: np.random.Generator, n_token: int, n_layer: int, n_expert: int
) -> npt.NDArray[np.float32]:
    """Return softmax scores (token, layer, expert): popularity, drift, noise."""
    popularity = rng.normal(0.0, 1.0, (n_layer, n_expert))
    drift = np.zeros((n_layer, n_expert))
    logits = np.empty((n_token, n_layer, n_expert))
    for token in range(n_token):
        drift = 0.9 * drift + rng.normal(0.0, 0.45, drift.shape)
        logits[token] = popularity + drift + rng.normal(0.0, 0.4, drift.shape)
    logits -= logits.max(axis=-1, keepdims=True)
    score = np.exp(logits)
    probability: npt.NDArray[np.float32] = (score / score.sum(axis=-1, keepdims=True)).astype(
        np.float32
    )
    return probability


def _evaluations(
    n_token: int, n_prefill: int, n_ubatch: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    prefill = np.arange(n_prefill) // n_ubatch
    first = int(prefill[-1]) + 1 if n_prefill else 0
    batch = np.concatenate([prefill, first + np.arange(n_token - n_prefill)])
    phase = np.full(n_token, Phase.decode, dtype=np.uint8)
    phase[:n_prefill] = Phase.prefill
    return batch.astype(np.int32), phase


class _Run:
    """Routing, policy, LRU for one synthetic run."""

    def __init__(
        self,
        probability: npt.NDArray[np.float32],
        routed: npt.NDArray[np.bool_],
        phase: npt.NDArray[np.uint8],
        n_used: int,
        layer_bytes: npt.NDArray[np.int64],
        budget: int,
        policy: str | None,
    ) -> None:
        self.probability, self.routed, self.phase = probability, routed, phase
        self.layer_bytes, self.budget, self.policy = layer_bytes, budget, policy
        self.n_used = n_used
        n_token, n_layer, _ = probability.shape
        shape = (n_token, n_layer, n_used)
        self.cells: dict[str, npt.NDArray[Any]] = {
            "expert_chosen": np.full(shape, NO_EXPERT, dtype=np.int16),
            "weight_chosen": np.full(shape, np.nan, dtype=np.float32),
            "expert_applied": np.full(shape, NO_EXPERT, dtype=np.int16),
            "weight_applied": np.full(shape, np.nan, dtype=np.float32),
            "action": np.full(shape, NOT_ROUTED, dtype=np.uint8),
            "residency": np.full(shape, NOT_ROUTED, dtype=np.uint8),
            "read_bytes": np.zeros(shape, dtype=np.uint32),
        }
        self.resident: OrderedDict[tuple[int, int], int] = OrderedDict()  # oldest first
        self.evictions: list[int] = []
        self.resident_bytes: list[int] = []

    def evaluate(self, tokens: npt.NDArray[np.int64]) -> None:
        """Route one evaluation through every layer."""
        self.evictions.append(0)
        for layer in range(self.routed.shape[1]):
            rows = tokens[self.routed[tokens, layer]]
            if rows.size:
                self._layer(rows, layer)
        self.resident_bytes.append(sum(self.resident.values()))

    def _layer(self, rows: npt.NDArray[np.int64], layer: int) -> None:
        score = self.probability[rows, layer]
        chosen = np.argsort(-score, axis=-1, kind="stable")[:, : self.n_used]
        weight = _normalise(np.take_along_axis(score, chosen, axis=-1))
        applied, used = chosen.copy(), weight.copy()
        action = np.full(chosen.shape, Action.kept, dtype=np.uint8)
        cold = np.array([[(layer, e) not in self.resident for e in row] for row in chosen.tolist()])
        if self.phase[rows[0]] == Phase.decode:
            if self.policy == "drop":
                dropped = cold & (weight < np.float32(_DROP_FRAC / self.n_used))
                dropped[:, 0] = False
                kept = np.where(dropped, np.float32(0), weight)
                if dropped.any():
                    used = _normalise(kept)
                action[dropped] = Action.dropped
                applied = np.where(dropped, chosen[:, :1], chosen)
            elif self.policy == "substitute":
                self._substitute(layer, score, cold, applied, action)
                if (action == Action.substituted).any():
                    used = _normalise(np.take_along_axis(score, applied, axis=-1))
        first, missing = self._load(layer, applied)
        residency = np.where(missing, Residency.miss, Residency.hit).astype(np.uint8)
        residency[action == Action.dropped] = Residency.miss
        cells = {
            "expert_chosen": chosen,
            "weight_chosen": weight,
            "expert_applied": applied,
            "weight_applied": used,
            "action": action,
            "residency": residency,
            "read_bytes": first * self.layer_bytes[layer],
        }
        for name, values in cells.items():
            self.cells[name][rows, layer] = values

    def _substitute(
        self,
        layer: int,
        score: npt.NDArray[np.float32],
        cold: npt.NDArray[np.bool_],
        applied: npt.NDArray[np.int64],
        action: npt.NDArray[np.uint8],
    ) -> None:
        for row in range(applied.shape[0]):
            ranked = np.argsort(-score[row], kind="stable").tolist()
            outside = [e for e in ranked if (layer, e) in self.resident and e not in applied[row]]
            for slot in range(1, self.n_used):
                if cold[row, slot] and outside:
                    applied[row, slot] = outside.pop(0)
                    action[row, slot] = Action.substituted

    def _load(
        self, layer: int, ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Serve one load; return which rows are charged, which were missing before it."""
        keys = [(layer, e) for e in ids.ravel().tolist()]
        absent = dict.fromkeys(key for key in keys if key not in self.resident)
        missing = np.array([key in absent for key in keys])
        size = int(self.layer_bytes[layer])
        needed = set(keys)
        room = self.budget - size * len(absent)
        total = sum(self.resident.values())
        for victim in [key for key in self.resident if key not in needed]:
            if total <= room:
                break
            total -= self.resident.pop(victim)
            self.evictions[-1] += 1
        charged = np.zeros(len(keys), dtype=bool)
        for row, key in enumerate(keys):
            if key in absent and key not in self.resident:
                charged[row] = True
            self.resident[key] = size
            self.resident.move_to_end(key)
        return charged.reshape(ids.shape), missing.reshape(ids.shape)


def _normalise(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    scaled: npt.NDArray[np.float32] = weight / weight.sum(axis=-1, keepdims=True)
    return scaled


def _costs(
    rng: np.random.Generator, batch: npt.NDArray[np.int32], run: _Run
) -> dict[str, npt.NDArray[np.float64]]:
    """Return one value per evaluation, on its first token, NaN elsewhere."""
    index, first = np.unique(batch, return_index=True)
    read = np.bincount(batch, run.cells["read_bytes"].sum(axis=(1, 2), dtype=np.float64))
    io = read / 1e9
    compute = rng.gamma(50.0, 2e-5, index.size)
    per_evaluation = {
        "wall_s": io + compute + 6e-5,
        "io_s": io,
        "manage_s": np.full(index.size, 4e-5),
        "callback_s": np.full(index.size, 2e-5),
        "evictions": np.array(run.evictions, dtype=np.float64),
        "major_faults": rng.poisson(0.3, index.size).astype(np.float64),
        "rss_bytes": 1e8 + np.array(run.resident_bytes, dtype=np.float64),
        "cache_resident_bytes": np.array(run.resident_bytes, dtype=np.float64),
    }
    spread: dict[str, npt.NDArray[np.float64]] = {}
    for name, values in per_evaluation.items():
        spread[name] = np.full(batch.size, np.nan)
        spread[name][first] = values
    return spread


def _attrs(
    n_expert: int, seed: int, budget: int, scores: bool | str, policy: str | None
) -> dict[str, Any]:
    policies = {
        None: "Lossless()",
        "drop": f"DropCold({_DROP_FRAC})",
        "substitute": "SubstituteCold()",
    }
    attrs: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "source": "synthetic",
        "lossless": int(policy is None),
        "complete": 1,
        "record": {"float16": "scores16", True: "scores", False: "ids"}[scores],
        "n_expert": n_expert,
        "model_name": "synthetic",
        "arch": "synthetic",
        "policy": policies[policy],
        "residency_policy": f"LRU({budget})",
        "cache_budget_bytes": budget,
        "cache_start": "cold",
        "seed": seed,
    }
    if scores:
        attrs["score_exact"] = int(scores is True)
    return attrs
