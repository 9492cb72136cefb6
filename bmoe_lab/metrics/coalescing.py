"""How many reads could be merged because expert ids stand side by side in the file."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import unknown_name
from bmoe_lab.metrics._shared import (
    PhaseName,
    _check_by,
    _experts,
    _phase_rows,
    _ratio,
    _values,
)
from bmoe_lab.metrics.cache import first_of_load
from bmoe_lab.schema import Residency

__all__ = ["consecutive_id_rate", "merged_reads"]


def consecutive_id_rate(
    trace: xr.Dataset,
    *,
    of: Literal["routed", "read"] = "routed",
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how many experts of a routing have the next lower id in it too.

    Neighbours in id are neighbours in the file, so one read could fetch both. By chance it is about
    ``(k - 1) / E``.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or, for reads, ``expert_applied``, ``residency``, ``action`` of
        shape (token, layer, slot).
    of : {"routed", "read"}, default "routed"
        All experts that the router chose, or those that had to be read for this token.
    by : {"token", "layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted. Rows of a wide evaluation are looked at one by one.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``consecutive_id_rate_<phase>``.

    Raises
    ------
    SchemaError
        If one of the variables is absent.

    Notes
    -----
    Pairs of sorted ids that differ by one, divided by the experts (not by the pairs). Source:
    BigMoeOnEdge's coalescing figures.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_expert=4, n_used=4, seed=0)
    >>> float(consecutive_id_rate(trace))  # ids 0 to 3: three pairs for four experts
    0.75
    """
    pairs, size = _pairs(trace, of, by, phase)
    return _ratio(
        trace,
        pairs[..., None],
        size[..., None],
        by,
        phase,
        "consecutive_id_rate",
        f"experts {of} whose next lower id is in the same routing",
    )


def merged_reads(
    trace: xr.Dataset,
    *,
    of: Literal["routed", "read"] = "routed",
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the reads per routing if neighbours in id were read at once.

    An ideal merge of one tensor's slices; an expert lies in two or three tensors, each of them
    read for itself.

    Parameters
    ----------
    trace, of, by, phase
        As for :func:`consecutive_id_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", mean over routings that have any; named
        ``merged_reads_<phase>``.

    Raises
    ------
    SchemaError
        If one of the variables is absent.

    Notes
    -----
    Runs of consecutive ids: experts less pairs that differ by one. Source: BigMoeOnEdge's
    coalescing figures.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_expert=4, n_used=4, seed=0)
    >>> float(merged_reads(trace))
    1.0
    """
    pairs, size = _pairs(trace, of, by, phase)
    return _ratio(
        trace,
        (size - pairs)[..., None],
        (size > 0)[..., None],
        by,
        phase,
        "merged_reads",
        f"runs of consecutive ids among the experts {of}",
    )


def _pairs(
    trace: xr.Dataset, of: str, by: str | None, phase: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return, per routing, the pairs of neighbouring ids and the experts."""
    _check_by(by, ["token", "layer"])
    if of not in ("routed", "read"):
        raise unknown_name("of", of, ["read", "routed"])
    _phase_rows(trace, phase)
    if of == "routed":
        expert = _experts(trace, "chosen").astype(np.int32)
        counted = expert >= 0
    else:
        expert = _experts(trace, "applied").astype(np.int32)
        counted = first_of_load(trace).values & (
            _values(trace, "residency") == Residency.miss.value
        )
    # Slots that do not count are set far apart, so that no pair of them looks like neighbours.
    apart = -2 * np.arange(1, expert.shape[-1] + 1, dtype=np.int32)
    ids = np.sort(np.where(counted, expert, apart), axis=-1)
    pairs = (np.diff(ids, axis=-1) == 1).sum(axis=-1)
    return pairs, counted.sum(axis=-1)
