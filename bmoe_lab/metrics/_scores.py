"""Router scores, window by window: they are the largest variable of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.metrics._shared import Bools

Gate = Literal["recorded", "softmax", "normalised"]

# At most this many scores are in memory at a time, so that a trace on disk stays there.
_WINDOW_CELLS = 4_000_000

# Sums of float16 probabilities are off by at most 2^-11.
_SUM_TOLERANCE = 1e-3


def _score_windows(
    trace: xr.Dataset, rows: Bools
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """Yield token indices of `rows` with their scores (token, layer, expert), float64."""
    if "router_score" not in trace.variables:
        present = sorted(str(key) for key in trace.data_vars)
        raise SchemaError(
            f"trace must hold the variable 'router_score'; got {present}. "
            "The scores of experts that were not chosen cannot be made up: record them with "
            "record='scores' (or 'scores16'), as in session.generate(prompt, record='scores')."
        )
    scores = trace["router_score"].transpose("token", "layer", "expert")
    _, n_layer, n_expert = scores.shape
    step = max(1, _WINDOW_CELLS // max(1, n_layer * n_expert))
    index = np.flatnonzero(rows)
    for begin in range(0, index.size, step):
        where = index[begin : begin + step]
        low, high = int(where[0]), int(where[-1]) + 1
        # A slice, where it can be one, costs a lazy backend less than a list of tokens.
        part: Any = slice(low, high) if high - low == where.size else where
        yield where, np.asarray(scores.isel(token=part).values, dtype=np.float64)


def _probabilities(
    score: npt.NDArray[np.float64], routed: Bools, gate: str
) -> npt.NDArray[np.float64]:
    """Return the scores as probabilities over all experts; NaN where the cell did not route."""
    if gate not in ("recorded", "softmax", "normalised"):
        raise unknown_name("gate", gate, ["normalised", "recorded", "softmax"])
    if gate == "softmax":
        top = score.max(axis=-1, keepdims=True)
        raised = np.exp(score - np.where(np.isfinite(top), top, 0.0))
        mass = raised.sum(axis=-1, keepdims=True)
        return np.asarray(raised / np.where(mass > 0, mass, np.nan))
    total = score.sum(axis=-1)
    known = routed & ~np.isnan(total)
    lowest = float(score[known].min(initial=np.inf))
    if gate == "normalised":
        if lowest < 0:
            raise SettingsError(
                f"router_score must not be negative for gate='normalised'; got {lowest:.6g}. "
                "Use gate='softmax' if the graph sorts logits; a biased score is no probability."
            )
        return np.asarray(score / np.where(total > 0, total, np.nan)[..., None])
    off = np.abs(total[known] - 1)
    if lowest < 0 or (off > _SUM_TOLERANCE).any():
        worst = float(total[known][off.argmax()]) if off.size else np.nan
        raise SettingsError(
            "router_score must be probabilities that sum to one for gate='recorded'; "
            f"got a smallest score of {lowest:.6g} and a sum of {worst:.6g}. "
            "Use gate='softmax' if the graph sorts logits, gate='normalised' if it sorts a sigmoid."
        )
    return score
