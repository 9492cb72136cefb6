"""The hit rate of a global LRU at every budget, as a labelled curve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab._version import __version__
from bmoe_lab.residency.stack_distance import REPEAT, LRUCurve, stack_distances
from bmoe_lab.schema import Phase
from bmoe_lab.simulation.budget_grid import Budgets, check_budgets
from bmoe_lab.simulation.budget_grid import budgets as default_budgets
from bmoe_lab.simulation.plan import trace_facts
from bmoe_lab.simulation.stream import load_stream
from bmoe_lab.simulation.tally import check_phases

__all__ = ["lru_curve"]

IntArray = npt.NDArray[np.int64]


def lru_curve(
    trace: xr.Dataset,
    budgets: Budgets | None = None,
    *,
    phase: str | Sequence[str] = ("decode", "all"),
) -> xr.Dataset:
    """Return what a global LRU would have found and read at every budget, in one pass.

    Equal, budget by budget, to :func:`bmoe_lab.sweep` with ``residency=["lru"]``, whatever the
    number of budgets: a thousand cost as much as one.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace that fits in memory; reads ``expert_applied``.
    budgets : list of int or str, optional
        Sizes; by default :func:`bmoe_lab.budgets` with ``n=200``.
    phase : {"decode", "prefill", "draft", "all"} or list of these, default ("decode", "all")
        Phases counted; each figure has the phase in its name. All are served.

    Returns
    -------
    xarray.Dataset
        Dim ``budget`` (int64, byte, ascending); ``hit_rate``, ``byte_hit_rate``, ``lookups``,
        ``read_bytes``, ``read_bytes_per_token``, each with ``_<phase>``, float64, NaN where nothing
        was looked up. Coordinate ``token_cycle_bytes``; attributes as those of a sweep.

    Raises
    ------
    SettingsError
        If a budget is not a size, or there twice.
    UnknownNameError
        If a phase is not known.
    SchemaError
        If the trace lacks ``expert_bytes``.

    See Also
    --------
    sweep : Other policies, evictions, traces larger than memory.

    Notes
    -----
    Byte-weighted stack distances; see :func:`bmoe_lab.residency.stack_distance.stack_distances`.
    Source: Mattson, Gecsei, Slutz and Traiger 1970, under this package's rules of a load.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> curve = lru_curve(make_trace(n_token=64, n_layer=4, seed=0))
    >>> below = curve.budget < 0.7 * curve.token_cycle_bytes
    >>> float(curve.hit_rate_decode.where(below).max())  # the cliff
    0.0
    """
    phases = check_phases(phase)
    facts = trace_facts(trace)
    sizes = default_budgets(trace, 200) if budgets is None else check_budgets(budgets)
    stream = load_stream(trace)
    distances = stack_distances(
        stream.keys, stream.offsets, facts.key_bytes, restarts=stream.restarts
    )
    lookup = distances != REPEAT
    distances = distances[lookup]
    bytes_ = facts.key_bytes[stream.keys[lookup]]
    of_phase = stream.per_row(stream.phase)[lookup]
    number = np.asarray(trace["phase"].values)
    data = {}
    for name in phases:
        rows = slice(None) if name == "all" else of_phase == Phase[name]
        n_token = number.size if name == "all" else int((number == Phase[name]).sum())
        figures = _figures(distances[rows], bytes_[rows], sizes, n_token)
        for figure, (values, units, meaning) in figures.items():
            attrs = {"units": units, "long_name": f"{meaning} ({name})"}
            data[f"{figure}_{name}"] = ("budget", values, attrs)
    return xr.Dataset(
        data,
        {
            "budget": (
                "budget",
                sizes,
                {"units": "byte", "long_name": "bytes allowed to resident experts"},
            ),
            "token_cycle_bytes": (
                (),
                np.int64(facts.token_cycle_bytes),
                {"units": "byte", "long_name": "expert bytes that a token needs"},
            ),
        },
        {
            "source": "sweep",
            "residency": "lru",
            "complete": 1,
            "cache_start": "cold",
            "bmoe_lab_version": __version__,
        },
    )


def _figures(
    distances: IntArray, size: IntArray, budgets: IntArray, n_token: int
) -> dict[str, tuple[npt.NDArray[np.float64], str, str]]:
    """Return the figures of one phase at each budget."""
    curve = LRUCurve.from_distances(distances, size)
    n_lookup, n_bytes = curve.n_lookup, curve.n_bytes
    hits, missed = curve.n_hit(budgets), curve.read_bytes(budgets)
    found, read = n_bytes - missed, missed.astype(np.float64)
    none = np.full(budgets.size, np.nan)
    known = np.full(budgets.size, float(n_lookup))
    return {
        "hit_rate": (hits / n_lookup if n_lookup else none, "1", "lookups that hit under LRU"),
        "byte_hit_rate": (
            found / n_bytes if n_lookup else none, "1", "bytes looked up that hit under LRU"
        ),
        "lookups": (known if n_lookup else none, "1", "lookups"),
        "read_bytes": (read if n_lookup else none, "byte", "bytes read under LRU"),
        "read_bytes_per_token": (
            read / n_token if n_token else none, "byte", "bytes read per token under LRU"
        ),
    }  # fmt: skip
