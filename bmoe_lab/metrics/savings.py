"""What dropping experts would save and lose, with the recorded residency left as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.metrics._shared import (
    Bools,
    PhaseName,
    _acted,
    _check_by,
    _coords,
    _phase_rows,
    _routed,
    _sum,
    _values,
)
from bmoe_lab.schema import Action, Residency

__all__ = ["drop_savings", "keep_savings"]


def drop_savings(
    trace: xr.Dataset,
    frac: float | Sequence[float],
    *,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.Dataset:
    """Return what dropping cold, light experts would have saved and lost.

    Static: the recorded residency stands, though fewer reads would have changed what the cache
    holds, and changed hidden states the routing itself. ``bl.replay`` simulates the cache again;
    only the model tells what happens to the text.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``weight_chosen``, ``residency``, ``read_bytes``, ``expert_chosen``, ``action`` of
        shape (token, layer, slot) and ``n_expert_used``.
    frac : float or sequence of float
        Threshold in fair shares of a routing's weight, from 0 to 1. Several give a leading dim
        ``frac``.
    by : {"token", "layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.Dataset
        ``reads_avoided_frac_<phase>``: bytes of the dropped misses over those of all misses;
        ``weight_discarded_frac_<phase>``: weight of the dropped slots over all weight, hits
        included; ``slots_dropped_frac_<phase>``: dropped slots over all. Each ([frac], [by]),
        float64, unit "1"; NaN where there is nothing to divide by.

    Raises
    ------
    SchemaError
        If one of the variables is absent.
    SettingsError
        If `frac` is not from 0 to 1.

    Notes
    -----
    A slot is dropped if it is a miss, not the routing's largest weight (the first of equals), and
    ``w < frac * sum of w / k``, k the width of the layer; the rule of
    :class:`bmoe_lab.routing.DropCold` and, with weights that sum to one, of BigMoeOnEdge's static
    drop replay. Slots of unknown weight, and slots that a policy dropped when the trace was
    recorded, are left out. In a wide prefill only an expert's first row carries its bytes.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> table = drop_savings(make_trace(n_token=60, n_layer=2, seed=0), [0.0, 0.5, 1.0])
    >>> table.sizes["frac"], float(table.reads_avoided_frac_decode[0])
    (3, 0.0)
    """
    values = _several(frac)
    for one in values:
        if isinstance(one, bool) or not 0 <= one <= 1:
            raise SettingsError(
                f"frac must be from 0 to 1; got {one!r}. 1 drops all below a fair share."
            )
    counted, weight = _counted(trace)
    total = weight.sum(axis=-1, keepdims=True)
    width = _values(trace, "n_expert_used").astype(np.float64)[None, :, None]
    fair = total / np.maximum(width, 1)
    # The first of equals stays, as the router's order has it.
    best = np.where(counted, weight, -np.inf).argmax(axis=-1)
    able = counted & _missed(trace)
    able &= np.arange(weight.shape[-1]) != best[..., None]

    def dropped(one: float) -> Bools:
        return np.asarray(able & (weight < one * fair))

    return _table(trace, "frac", frac, values, dropped, counted, weight, by, phase)


def keep_savings(
    trace: xr.Dataset,
    n_keep: int | Sequence[int],
    *,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.Dataset:
    """Return what a narrower routing would have saved and lost.

    The plain alternative to :func:`drop_savings`: the first `n_keep` slots stay whatever the cache
    holds. Static in the same way.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`drop_savings`.
    n_keep : int or sequence of int
        Experts kept per token, from 1 to the width of the widest layer. Several give a leading dim
        ``n_keep``.
    by, phase
        As for :func:`drop_savings`.

    Returns
    -------
    xarray.Dataset
        As for :func:`drop_savings`, ([n_keep], [by]).

    Raises
    ------
    SchemaError
        If one of the variables is absent.
    SettingsError
        If `n_keep` is less than 1 or more than the width.

    Notes
    -----
    Drops every slot from rank `n_keep` on. Source: BigMoeOnEdge's static drop replay, its kept-k
    table. For :class:`bmoe_lab.routing.FewerExperts` live.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=60, n_layer=2, n_used=4, seed=0)
    >>> float(keep_savings(trace, 4).reads_avoided_frac_decode)
    0.0
    """
    values = _several(n_keep)
    counted, weight = _counted(trace)
    n_slot = weight.shape[-1]
    for one in values:
        if isinstance(one, bool) or one != int(one) or not 1 <= one <= n_slot:
            raise SettingsError(
                f"n_keep must be a whole number from 1 to the width, {n_slot}; got {one!r}."
            )

    def dropped(one: float) -> Bools:
        return np.asarray(counted & (np.arange(n_slot) >= one))

    return _table(trace, "n_keep", n_keep, values, dropped, counted, weight, by, phase)


def _several(given: float | Sequence[float]) -> list[float]:
    return list(given) if isinstance(given, (Sequence, np.ndarray)) else [given]


def _counted(trace: xr.Dataset) -> tuple[Bools, npt.NDArray[np.float64]]:
    """Return the slots that count, and their weights with 0 elsewhere."""
    weight = _values(trace, "weight_chosen").astype(np.float64)
    counted = _routed(trace) & ~_acted(trace, Action.dropped) & ~np.isnan(weight)
    return counted, np.where(counted, weight, 0.0)


def _missed(trace: xr.Dataset) -> Bools:
    return np.asarray(_values(trace, "residency") == Residency.miss.value)


def _table(
    trace: xr.Dataset,
    dim: str,
    given: Any,
    values: list[float],
    dropped: Callable[[float], Bools],
    counted: Bools,
    weight: npt.NDArray[np.float64],
    by: str | None,
    phase: str,
) -> xr.Dataset:
    """Return the three shares for every setting."""
    _check_by(by, ["token", "layer"])
    rows = _phase_rows(trace, phase)
    read = np.where(counted & _missed(trace), _values(trace, "read_bytes"), 0).astype(np.float64)
    amounts = {
        "reads_avoided_frac": (read, "bytes of dropped misses over those of all misses"),
        "weight_discarded_frac": (weight, "weight of dropped slots over all weight"),
        "slots_dropped_frac": (counted.astype(np.float64), "dropped slots over all slots"),
    }
    shares: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in amounts}
    for one in values:
        gone = dropped(one)[rows]
        for name, (amount, _) in amounts.items():
            top, bottom = _sum(np.where(gone, amount[rows], 0.0), by), _sum(amount[rows], by)
            empty = bottom == 0
            shares[name].append(np.where(empty, np.nan, top / np.where(empty, 1.0, bottom)))
    kept = () if by is None else (by,)
    several = isinstance(given, (Sequence, np.ndarray))
    dims = (dim, *kept) if several else kept
    source = trace.isel(token=np.flatnonzero(rows)) if by == "token" else trace
    coords: dict[str, Any] = dict(_coords(source, kept))
    if several:
        coords[dim] = (dim, values, {"units": "1"})
    data = {
        f"{name}_{phase}": (
            dims,
            np.stack(parts) if several else parts[0],
            {"units": "1", "long_name": f"{amounts[name][1]} ({phase})"},
        )
        for name, parts in shares.items()
    }
    return xr.Dataset(data, coords)
