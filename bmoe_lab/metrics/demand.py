"""How many bytes tokens ask for, and how that compares with what could be held."""

from __future__ import annotations

import numpy as np
import xarray as xr

from bmoe_lab.errors import SettingsError
from bmoe_lab.metrics._shared import (
    By,
    PhaseName,
    Which,
    _coords,
    _labelled,
    _n_expert,
    _per_token,
    _values,
)
from bmoe_lab.metrics.cache import first_of_load
from bmoe_lab.metrics.load import experts_used
from bmoe_lab.sizes import parse_size

__all__ = [
    "demand_bytes_per_token",
    "expert_bank_bytes",
    "read_bytes_per_token",
    "slots_per_demand",
    "token_cycle_bytes",
    "used_bytes",
]


def read_bytes_per_token(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the expert bytes read from disk per token.

    Sums what was charged, not the misses: a wide evaluation reads an expert once, whichever of its
    rows wanted it.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``read_bytes``, uint32 of shape (token, layer, slot).
    by : {"token", "layer", "slot"}, optional
        Dimension kept; ``"token"`` gives the bytes of each token instead of their mean.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "byte"; named ``read_bytes_per_token_<phase>``. NaN if
        the phase has no token.

    Raises
    ------
    SchemaError
        If ``read_bytes`` is absent.

    Notes
    -----
    ``sum of read_bytes / tokens of the phase``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> read_bytes_per_token(make_trace(n_token=4, n_layer=2, seed=0)).attrs["units"]
    'byte'
    """
    read = _values(trace, "read_bytes")
    return _per_token(
        trace, read, by, phase, "read_bytes_per_token", "expert bytes read per token", "byte"
    )


def demand_bytes_per_token(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the expert bytes that a token needs, resident or not.

    What would be read without a cache. In decode without drops it is :func:`token_cycle_bytes`; a
    wide evaluation needs an expert once, so its tokens share the bytes.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`hit_rate`, and ``expert_bytes`` of shape (layer,).
    by : {"token", "layer", "slot"}, optional
        Dimension kept; ``"token"`` gives the bytes of each token instead of their mean.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "byte"; named ``demand_bytes_per_token_<phase>``. NaN
        if the phase has no token.

    Raises
    ------
    SchemaError
        If ``residency`` or ``expert_bytes`` is absent.

    Notes
    -----
    Bytes of the lookups of :func:`first_of_load`; dropped slots and layers that are not streamed
    ask for nothing.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, seed=0)
    >>> int(demand_bytes_per_token(trace)) == int(token_cycle_bytes(trace))
    True
    """
    size = _values(trace, "expert_bytes").astype(np.float64)[None, :, None]
    return _per_token(
        trace,
        first_of_load(trace).values * size,
        by,
        phase,
        "demand_bytes_per_token",
        "expert bytes needed per token",
        "byte",
    )


def token_cycle_bytes(trace: xr.Dataset) -> xr.DataArray:
    """Return the expert bytes that one token needs if nothing is resident.

    Below this budget a global LRU hits exactly nothing in decode: each layer's experts are evicted
    before the next token comes back to them. (The first hit comes up to one layer's share earlier,
    since a load is judged before it reads.)

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_bytes`` and ``n_expert_used`` of shape (layer,).

    Returns
    -------
    xarray.DataArray
        Scalar, int64, unit "byte".

    Notes
    -----
    ``T = sum over layers of expert_bytes(layer) * n_expert_used(layer)``. Source: BigMoeOnEdge's
    cache replay (docs/bench-data, 2026-07-20).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_used=2, seed=0)
    >>> bool(token_cycle_bytes(trace) == 2 * int(trace.expert_bytes.sum()))
    True
    """
    size = _values(trace, "expert_bytes").astype(np.int64)
    used = _values(trace, "n_expert_used").astype(np.int64)
    return _bytes(
        int((size * used).sum()),
        "token_cycle_bytes",
        "expert bytes that a token needs with nothing resident",
    )


def expert_bank_bytes(trace: xr.Dataset) -> xr.DataArray:
    """Return the bytes of all experts of the model: what a cache that misses nothing holds.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_bytes`` of shape (layer,) and the attribute ``n_expert``.

    Returns
    -------
    xarray.DataArray
        Scalar, int64, unit "byte".

    Raises
    ------
    SchemaError
        If the sizes or the number of experts is absent.

    Notes
    -----
    ``sum over layers of expert_bytes(layer) * n_expert``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_expert=8, expert_bytes=4096, seed=0)
    >>> int(expert_bank_bytes(trace)) == 8 * (4096 + 5120)
    True
    """
    size = _values(trace, "expert_bytes").astype(np.int64)
    return _bytes(int(size.sum()) * _n_expert(trace), "expert_bank_bytes", "bytes of all experts")


def used_bytes(
    trace: xr.Dataset, *, which: Which = "chosen", phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the bytes of all distinct experts that were routed.

    A cache of this size reads each of them once and nothing twice.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`experts_used`, and ``expert_bytes`` of shape (layer,).
    which, phase
        As for :func:`experts_used`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "byte"; NaN for a layer that routed nothing. Named
        ``used_bytes_<phase>``.

    Raises
    ------
    SchemaError
        If the sizes or the number of experts is absent.

    Notes
    -----
    :func:`experts_used` times the size of an expert. BigMoeOnEdge calls its sum over layers
    "touched".

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=40, n_layer=2, seed=0)
    >>> float(used_bytes(trace, phase="all").sum()) <= int(expert_bank_bytes(trace))
    True
    """
    used = experts_used(trace, which=which, phase=phase).values
    return _labelled(
        used * _values(trace, "expert_bytes"),
        ("layer",),
        _coords(trace, ("layer",)),
        phase,
        "used_bytes",
        f"bytes of the distinct experts routed ({which})",
        "byte",
    )


def slots_per_demand(
    trace: xr.Dataset,
    budget: int | str | None = None,
    *,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the cache's room in each layer over the experts that the layer wanted.

    At 1 or more the layer fits; below, something has to go again and again. The room is an even
    split of the budget in bytes; a global cache splits by demand.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`used_bytes`.
    budget : int or str, optional
        Bytes or a size such as ``"2 GiB"``; by default the trace's ``cache_budget_bytes``.
    which, phase
        As for :func:`experts_used`.

    Returns
    -------
    xarray.DataArray
        Shape (layer,), float64, unit "1"; NaN for a layer that routed nothing or has no streamed
        experts. Named ``slots_per_demand_<phase>``.

    Raises
    ------
    SettingsError
        If there is no budget.

    Notes
    -----
    ``(budget / n_layer / expert_bytes(layer)) / distinct experts(layer)``, the places not rounded.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=1, n_prefill=0, n_layer=2, n_used=4, expert_bytes=4096, seed=0)
    >>> slots_per_demand(trace, 2 * 4 * 4096).values
    array([1. , 0.8])
    """
    if budget is None:
        if "cache_budget_bytes" not in trace.attrs:
            raise SettingsError(
                "budget must be given for a trace without the attribute 'cache_budget_bytes'; "
                f"got {budget!r}. Pass a size such as '2 GiB'."
            )
        budget = int(trace.attrs["cache_budget_bytes"])
    n_bytes = parse_size(budget, name="budget")
    wanted = used_bytes(trace, which=which, phase=phase).values
    share = n_bytes / max(1, wanted.size)
    return _labelled(
        share / np.where(wanted > 0, wanted, np.nan),
        ("layer",),
        _coords(trace, ("layer",)),
        phase,
        "slots_per_demand",
        f"places in the cache over distinct experts ({which})",
    )


def _bytes(value: int, name: str, long_name: str) -> xr.DataArray:
    return xr.DataArray(np.int64(value), name=name, attrs={"units": "byte", "long_name": long_name})
