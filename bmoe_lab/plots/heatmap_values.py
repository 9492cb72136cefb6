"""What a cell of a token by layer map can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.plots import theme
from bmoe_lab.plots.reduce import block_firsts, block_largest, block_means
from bmoe_lab.plots.windows import Window
from bmoe_lab.schema import Action, Residency

__all__ = ["ACTIONS", "VALUES", "HeatmapValue", "Value", "heatmap_cells", "heatmap_values"]

Value = Literal[
    "misses", "hits", "speculative", "expert", "weight", "entropy", "read", "changed", "action"
]
Cells = npt.NDArray[np.float64]
Part = Mapping[str, npt.NDArray[Any]]

ACTIONS = (Action.kept, Action.reweighted, Action.substituted, Action.dropped)
"""Actions from the weakest to the strongest; a cell shows the strongest of its slots."""

ACTION_COLORS = (theme.SKY, theme.PURPLE, theme.ORANGE, theme.VERMILLION)

# At most this much of a variable is in memory at a time, so that a trace on disk stays there.
_BLOCK_BYTES = 2**24

_ASKED = (Residency.miss, Residency.hit, Residency.hit_speculative)


@dataclass(frozen=True)
class HeatmapValue:
    """One thing that a cell can show.

    Attributes
    ----------
    label : str
        What it is, for a title or a list of choices.
    unit : str
        Of the numbers drawn.
    reads : callable
        Gives the variables that it needs of this trace; nothing else is read.
    cells : callable
        Makes values (token, layer) float64, NaN where unknown, from arrays of those variables.
    reduced : {"means over", "first of", "strongest of"}
        What a cell that stands for several tokens shows.
    ends : callable
        Gives the two ends of the colours; None for an end that follows what is drawn.
    note : callable
        Gives what a reader must know, for this trace; may be empty.
    """

    label: str
    unit: str
    cells: Callable[[Part], Cells]
    reads: Callable[[xr.Dataset], tuple[str, ...]]
    reduced: Literal["means over", "first of", "strongest of"] = "means over"
    ends: Callable[[xr.Dataset], tuple[float | None, float | None]] = lambda trace: (0.0, None)
    note: Callable[[xr.Dataset], str] = lambda trace: ""


def heatmap_values(trace: xr.Dataset) -> dict[str, str]:
    """Return what :func:`bmoe_lab.plots.plot_heatmap` can show of this trace, with labels.

    What the trace lacks is left out, and so is what would be one colour: actions of a lossless
    run, speculative hits where there is none.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.

    Returns
    -------
    dict of str to str
        Name to label, in the order of :data:`VALUES`.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> list(heatmap_values(make_trace(n_token=8, n_layer=2, seed=0)))
    ['misses', 'hits', 'expert', 'weight', 'entropy', 'read']
    """
    lossless = bool(int(trace.attrs.get("lossless", 0)))
    shown = {}
    for name, value in VALUES.items():
        if not all(need in trace for need in value.reads(trace)):
            continue
        if lossless and name in ("changed", "action"):
            continue
        if name in ("misses", "hits") and not has_residency(trace, *_ASKED):
            continue
        if name == "speculative" and not has_residency(trace, Residency.hit_speculative):
            continue
        shown[name] = value.label
    return shown


def has_residency(trace: xr.Dataset, *wanted: Residency) -> bool:
    """Return whether any slot has one of the residencies; stops at the first that does."""
    return any(
        any(bool((part["residency"] == one).any()) for one in wanted)
        for part in _parts(
            trace, ("residency",), (0, trace.sizes["token"]), (0, trace.sizes["layer"]), 1
        )
    )


def heatmap_cells(
    trace: xr.Dataset,
    value: str,
    tokens: Window,
    layers: Window,
    step: int,
    rows: npt.NDArray[np.bool_] | None = None,
) -> Cells:
    """Return the values of a window, `step` neighbouring tokens to a row.

    Only the variables that the value needs are read, a block of tokens at a time.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    value : str
        A name of :data:`VALUES`.
    tokens, layers : tuple of int
        The window.
    step : int
        Tokens per row; the last row may stand for fewer.
    rows : ndarray of bool, shape (tokens of the window,), optional
        Tokens to show; the others count as unknown.

    Returns
    -------
    numpy.ndarray
        Shape (rows, layers), float64; NaN where nothing is known.

    Raises
    ------
    SchemaError
        If the trace lacks a variable.
    UnknownNameError
        If there is no such value.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> heatmap_cells(make_trace(n_token=8, n_layer=2), "misses", (0, 8), (0, 2), 4).shape
    (2, 2)
    """
    if value not in VALUES:
        raise unknown_name("value", value, VALUES)
    view = VALUES[value]
    names = view.reads(trace)
    for name in names:
        if name not in trace:
            raise SchemaError(
                f"trace must hold the variable {name!r} to show {value!r}; got none. "
                f"This one can show {sorted(heatmap_values(trace))}."
            )
    reduce = _REDUCE[view.reduced]
    shown = []
    done = 0
    for part in _parts(trace, names, tokens, layers, step):
        cells = view.cells(part)
        if rows is not None:
            cells[~rows[done : done + len(cells)]] = np.nan
        done += len(cells)
        shown.append(reduce(cells, step))
    return np.concatenate(shown)


def _parts(
    trace: xr.Dataset, names: tuple[str, ...], tokens: Window, layers: Window, step: int
) -> Iterator[Part]:
    """Yield the arrays of a window, as many whole steps of tokens at a time as fit a block."""
    variables = {name: trace.variables[name] for name in names}
    width = layers[1] - layers[0]
    row = max(
        v.dtype.itemsize * width * int(np.prod([v.sizes[d] for d in v.dims[2:]], dtype=np.int64))
        for v in variables.values()
    )
    block = step * max(1, _BLOCK_BYTES // max(1, row * step))
    for first in range(tokens[0], tokens[1], block):
        where = {"token": slice(first, min(first + block, tokens[1])), "layer": slice(*layers)}
        yield {name: np.asarray(v.isel(where).values) for name, v in variables.items()}


def _count(values: npt.NDArray[Any], *wanted: int) -> Cells:
    """Return how many slots hold one of the values; numpy sums a short last axis slowly."""
    count = np.zeros(values.shape[:2], np.uint16)
    for slot in range(values.shape[2]):
        one = values[..., slot]
        for value in wanted:
            count += one == value
    return count.astype(np.float64)


def _where_asked(part: Part, cells: Cells) -> Cells:
    """Return NaN where no expert was streamed: there is nothing to hit or miss."""
    return np.where(_count(part["residency"], *_ASKED) > 0, cells, np.nan)


def _misses(part: Part) -> Cells:
    return _where_asked(part, _count(part["residency"], Residency.miss))


def _hits(part: Part) -> Cells:
    residency = part["residency"]
    hits = _count(residency, Residency.hit, Residency.hit_speculative)
    asked = _count(residency, *_ASKED)
    return np.asarray(100 * hits / np.where(asked > 0, asked, np.nan))


def _speculative(part: Part) -> Cells:
    return _where_asked(part, _count(part["residency"], Residency.hit_speculative))


def _expert(part: Part) -> Cells:
    first = part["expert_chosen"][..., 0]
    return np.where(first >= 0, first, np.nan).astype(np.float64)


def _weights(part: Part) -> Iterator[Cells]:
    """Yield the slots' weights; a slot beyond the width of its layer weighs nothing."""
    routed = part["action"] != Action.not_routed
    for slot in range(routed.shape[2]):
        yield np.where(routed[..., slot], part["weight_chosen"][..., slot], 0.0).astype(np.float64)


def _weight(part: Part) -> Cells:
    total = np.zeros(part["action"].shape[:2])
    largest = np.full(total.shape, -np.inf)
    for weight in _weights(part):
        total += weight
        np.maximum(largest, weight, out=largest)
    return np.asarray(100 * largest / np.where(total > 0, total, np.nan))


def _entropy(part: Part) -> Cells:
    if "router_score" in part:
        score = part["router_score"].astype(np.float32, copy=False)
        logs = np.log(np.where(score > 0, score, np.float32(1)))
        return np.asarray(-np.einsum("tle,tle->tl", score, logs), np.float64)
    # With W the sum of the weights: H = ln W - (sum of w ln w) / W.
    total = np.zeros(part["action"].shape[:2])
    summed = np.zeros(total.shape)
    for weight in _weights(part):
        total += weight
        summed += weight * np.log(np.where(weight > 0, weight, 1.0))
    total = np.where(total > 0, total, np.nan)
    return np.asarray(np.maximum(np.log(total) - summed / total, 0.0))


def _read(part: Part) -> Cells:
    routed = _count(part["action"], *(action.value for action in ACTIONS)) > 0
    read = np.zeros(routed.shape)
    for slot in range(part["read_bytes"].shape[2]):
        read += part["read_bytes"][..., slot]
    return np.where(routed, read, np.nan)


def _changed(part: Part) -> Cells:
    routed = _count(part["action"], *(action.value for action in ACTIONS)) > 0
    changed = _count(part["action"], Action.dropped, Action.substituted)
    return np.where(routed, changed, np.nan)


def _action(part: Part) -> Cells:
    strongest = np.full(part["action"].shape[:2], np.nan)
    for rank, action in enumerate(ACTIONS):
        strongest[_count(part["action"], action) > 0] = rank
    return strongest


def _scored(trace: xr.Dataset) -> bool:
    """Return whether the scores of every layer are probabilities, whose entropy means something."""
    if "router_score" not in trace or "score_is_softmax" not in trace:
        return False
    return bool((trace["score_is_softmax"].values == 1).all())


def _entropy_reads(trace: xr.Dataset) -> tuple[str, ...]:
    return ("router_score",) if _scored(trace) else ("weight_chosen", "action")


def _entropy_note(trace: xr.Dataset) -> str:
    if _scored(trace):
        return "over all experts (scores)"
    return "over the chosen experts (weights)"


def _slots(trace: xr.Dataset) -> tuple[float | None, float | None]:
    return 0.0, float(trace.sizes["slot"])


def _percent(trace: xr.Dataset) -> tuple[float | None, float | None]:
    return 0.0, 100.0


def _usual(trace: xr.Dataset) -> tuple[float | None, float | None]:
    """Most cells lie in a narrow band, and a few odd ones would leave it a single colour."""
    return None, None


def _ids(trace: xr.Dataset) -> tuple[float | None, float | None]:
    n = trace.attrs.get("n_expert")
    return 0.0, None if n is None or n < 2 else float(n) - 1


def _fixed(*names: str) -> Callable[[xr.Dataset], tuple[str, ...]]:
    return lambda trace: names


_REDUCE = {"means over": block_means, "first of": block_firsts, "strongest of": block_largest}

VALUES: dict[str, HeatmapValue] = {
    "misses": HeatmapValue("experts missed", "slots", _misses, _fixed("residency"), ends=_slots),
    "hits": HeatmapValue(
        "experts found resident",
        "% of slots",
        _hits,
        _fixed("residency"),
        ends=_percent,
    ),
    "speculative": HeatmapValue(
        "experts that a prefetch had guessed",
        "slots",
        _speculative,
        _fixed("residency"),
        ends=_slots,
    ),
    "expert": HeatmapValue(
        "router's first choice",
        "expert id",
        _expert,
        _fixed("expert_chosen"),
        reduced="first of",
        ends=_ids,
    ),
    "weight": HeatmapValue(
        "share of the largest weight",
        "%",
        _weight,
        _fixed("weight_chosen", "action"),
        ends=_usual,
    ),
    "entropy": HeatmapValue(
        "entropy of the router",
        "nat",
        _entropy,
        _entropy_reads,
        ends=_usual,
        note=_entropy_note,
    ),
    "read": HeatmapValue("bytes read", "bytes", _read, _fixed("read_bytes", "action")),
    "changed": HeatmapValue(
        "slots changed by the policy", "slots", _changed, _fixed("action"), ends=_slots
    ),
    "action": HeatmapValue(
        "what the policy did",
        "",
        _action,
        _fixed("action"),
        reduced="strongest of",
    ),
}
"""What :func:`bmoe_lab.plots.plot_heatmap` can show, by name."""
