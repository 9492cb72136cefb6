"""What the mouse tells of a cell: the token, its experts, what a policy did with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.plots import theme
from bmoe_lab.plots.heatmap_values import ACTIONS
from bmoe_lab.plots.windows import Window
from bmoe_lab.schema import Action, Residency

__all__ = ["action_text", "slot_text"]

Texts = npt.NDArray[np.object_]

# Weights as hundredths are below this, so that a slot's look fits one number.
_WEIGHTS = 2**24


def slot_text(trace: xr.Dataset, tokens: Window, layers: Window) -> Texts:
    """Return per layer and token: the piece, the experts with weights, what happened to them.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    tokens, layers : tuple of int
        The window.

    Returns
    -------
    numpy.ndarray
        Shape (layer, token), str, escaped.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> slot_text(make_trace(n_token=8, n_layer=2, n_used=2, seed=0), (7, 8), (0, 1))[0, 0]
    '‘ and’<br>experts 2 (0.50), 5 (0.50)'
    """
    where = {"token": slice(*tokens), "layer": slice(*layers)}

    def values(name: str) -> npt.NDArray[Any]:
        return np.asarray(trace.variables[name].isel(where).values)

    chosen = values("expert_chosen").astype(np.int64)
    applied, action = values("expert_applied").astype(np.int64), values("action")
    hundredths = np.full(chosen.shape, _WEIGHTS, np.int64)
    if "weight_chosen" in trace:
        weight = values("weight_chosen")
        known = ~np.isnan(weight)
        scaled = np.rint(100.0 * weight[known].astype(np.float64))
        hundredths[known] = np.clip(scaled, -_WEIGHTS + 1, _WEIGHTS - 1).astype(np.int64)
    residency = values("residency") if "residency" in trace else np.zeros_like(action)
    missed = (residency == Residency.miss) & ("residency" in trace)
    # Slots that look alike share a text: one number for each look, so that only the different ones
    # are put into words.
    mark = np.where(action == Action.dropped, 1, np.where(action == Action.substituted, 2, 0))
    code = ((chosen * 4 + mark) * 2 + missed) * (2 * _WEIGHTS + 1) + hundredths + _WEIGHTS
    code[mark == 2] += (applied[mark == 2] + 1) << 44
    code[chosen < 0] = -1
    codes, first, place = np.unique(code, return_index=True, return_inverse=True)
    flat = [array.ravel()[first] for array in (chosen, applied, mark, hundredths, missed)]
    looks = [
        f", {_slot(*look)}" if code >= 0 else ""
        for code, *look in zip(codes.tolist(), *(array.tolist() for array in flat), strict=True)
    ]
    n_token, n_layer, n_slot = chosen.shape
    slots = place.reshape(n_token, n_layer, n_slot).transpose(1, 0, 2).tolist()
    pieces = [""] * n_token
    if "piece" in trace.coords:
        shown = trace["piece"].variable.isel(token=slice(*tokens)).values
        pieces = [f"‘{theme.escape(piece)}’<br>" for piece in shown.tolist()]
    text = np.empty((n_layer, n_token), object)
    for layer, row in enumerate(slots):
        text[layer] = [
            f"{piece}experts {''.join([looks[slot] for slot in cell])[2:]}"
            for piece, cell in zip(pieces, row, strict=True)
        ]
    return text


def _slot(expert: int, applied: int, mark: int, hundredths: int, missed: bool) -> str:
    weight = "" if hundredths == _WEIGHTS else f" ({hundredths / 100:.2f})"
    if abs(hundredths) == _WEIGHTS - 1:
        weight = " (beyond 100,000)"
    done = ("", " dropped", f" → {applied}")[mark]
    # The residency of a substituted slot is that of the expert that ran instead.
    return f"{expert}{weight}{done}{' missed' if missed and mark != 1 else ''}"


def action_text(shown: npt.NDArray[Any]) -> Texts:
    """Return the names of actions drawn by their rank.

    Parameters
    ----------
    shown : numpy.ndarray
        Ranks in :data:`~bmoe_lab.plots.heatmap_values.ACTIONS`; NaN unknown.

    Examples
    --------
    >>> import numpy as np
    >>> action_text(np.array([[0.0, 3.0, np.nan]])).tolist()
    [['kept', 'dropped', '']]
    """
    names = np.array([*(action.name for action in ACTIONS), ""], object)
    return np.asarray(names[np.where(np.isnan(shown), len(ACTIONS), shown).astype(np.int64)])
