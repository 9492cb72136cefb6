"""How fast a run could have been with the same reads, drive and cores."""

from __future__ import annotations

import math
import numbers

import numpy as np
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError
from bmoe_lab.metrics._shared import (
    Bools,
    PhaseName,
    _evaluation_starts,
    _phase_rows,
)
from bmoe_lab.metrics.demand import read_bytes_per_token
from bmoe_lab.metrics.text import decode_speed
from bmoe_lab.metrics.timing import _PARTS, _seconds, read_bandwidth, time_split
from bmoe_lab.sizes import parse_size

__all__ = ["roofline"]

_READ = ("io_s", "engine_io_ms")
_GIVEN = "given"
_UNKNOWN = "unknown"

# Name to unit and meaning, in the order of the result.
_MEANINGS = {
    "compute_s": ("s", "time per token that is neither reading nor management"),
    "bandwidth": ("byte s-1", "bandwidth of reads"),
    "read_bytes_per_token": ("byte", "expert bytes read per token"),
    "limit_overlap": ("s-1", "most tokens per second if reads overlap computing"),
    "limit_serial": ("s-1", "most tokens per second if reads and computing take turns"),
    "speed": ("s-1", "tokens per second measured"),
    "limit_frac": ("1", "measured speed over the limit with overlap"),
}


def roofline(
    trace: xr.Dataset,
    *,
    compute_s: float | None = None,
    bandwidth: float | str | None = None,
    phase: PhaseName = "decode",
) -> xr.Dataset:
    """Return how fast the run could at most have been, with what it read.

    What keeps a run below its limit is reading while the cores wait, and managing the cache. A
    higher limit takes fewer bytes (cache, policy, smaller experts) or faster computing: the
    attribute ``binding`` says which of the two.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``read_bytes``, uint32 of shape (token, layer, slot), and the times of
        :func:`time_split`, float64 of shape (token,): per evaluation, on its first token.
    compute_s : float, optional
        Seconds of computing per token, such as that of a run without a miss. By default from the
        trace: ``compute`` of :func:`time_split`, or its ``rest`` where computing was not recorded.
    bandwidth : float or str, optional
        Bytes per second of the drive, or their size such as ``"2460 MiB"``. By default
        :func:`read_bandwidth`: what this run got, which a drive may exceed with larger requests or
        more lanes (:func:`bmoe_lab.streaming.probe_bandwidth`).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Evaluations counted: those whose times are known.

    Returns
    -------
    xarray.Dataset
        Scalars, float64: ``compute_s_<phase>``, ``bandwidth_<phase>``,
        ``read_bytes_per_token_<phase>``, ``limit_overlap_<phase>``, ``limit_serial_<phase>``,
        ``speed_<phase>``, ``limit_frac_<phase>``; NaN where unknown. Attributes ``binding``
        (``"reads"``, ``"computing"`` or ``"unknown"``), ``compute_from`` and ``bandwidth_from``
        (what they were derived from, or ``"given"``).

    Raises
    ------
    SchemaError
        If the bytes are absent, or the times of a number that was not given.
    SettingsError
        If `compute_s` is not a positive number of seconds or `bandwidth` not a positive size; if
        reads overlapped computing and `bandwidth` was not given, since the recorded time of reads
        is then that of single lanes.

    See Also
    --------
    time_split : Where the time went.

    Notes
    -----
    ``1 / max(t, B / W)`` with full overlap, ``1 / (t + B / W)`` without; t seconds of computing per
    token, B expert bytes read per token, W bandwidth. ``binding`` is the larger of t and B / W. The
    roofline of Williams and others 2009 (doi 10.1145/1498765.1498785) with tokens for operations.
    Bytes that are no expert's, such as dense weights that the system pages in, are not in B: their
    time looks like computing.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> made = make_trace(n_token=40, n_layer=2, seed=0)
    >>> limits = roofline(made, compute_s=0.004, bandwidth=1e9)
    >>> limits.attrs["binding"], float(limits["limit_overlap_decode"])
    ('computing', 250.0)
    """
    rows = _phase_rows(trace, phase)
    compute = None if compute_s is None else _positive_seconds(compute_s)
    speed_of_reads = None if bandwidth is None else _positive_rate(bandwidth)
    if compute is None or speed_of_reads is None:
        _check_times(trace)
    timed = trace
    speed = np.nan
    if "wall_s" in trace.variables:
        known = _timed_rows(trace, rows)
        if known.any():
            timed = trace.isel(token=np.flatnonzero(known))
        speed = float(decode_speed(timed, phase=phase))
    read = float(read_bytes_per_token(timed, phase=phase))
    measured = _seconds(timed, _PARTS["read"], _phase_rows(timed, phase)) is not None
    split: dict[str, float] | None = None
    if not np.isnan(speed) and measured:
        shares = time_split(timed, phase=phase)
        split = dict(zip(shares["part"].values.tolist(), shares.values.tolist(), strict=True))
    compute_from = bandwidth_from = _GIVEN
    if compute is None:
        compute, compute_from = _compute(split, speed)
    if speed_of_reads is None:
        speed_of_reads, bandwidth_from = _bandwidth(timed, split, phase)
    seconds = 0.0 if read == 0 else read / speed_of_reads
    values = {
        "compute_s": compute,
        "bandwidth": speed_of_reads,
        "read_bytes_per_token": read,
        "limit_overlap": 1 / max(compute, seconds) if compute + seconds > 0 else np.nan,
        "limit_serial": 1 / (compute + seconds) if compute + seconds > 0 else np.nan,
        "speed": speed,
    }
    values["limit_frac"] = speed / values["limit_overlap"]
    return xr.Dataset(
        {
            f"{name}_{phase}": (
                (),
                np.float64(values[name]),
                {"units": units, "long_name": f"{long_name} ({phase})"},
            )
            for name, (units, long_name) in _MEANINGS.items()
        },
        attrs={
            "binding": _binding(compute, seconds),
            "compute_from": compute_from,
            "bandwidth_from": bandwidth_from,
        },
    )


def _binding(compute: float, seconds: float) -> str:
    if np.isnan(compute) or np.isnan(seconds):
        return _UNKNOWN
    return "reads" if seconds > compute else "computing"


def _compute(split: dict[str, float] | None, speed: float) -> tuple[float, str]:
    """Return seconds of computing per token, and what they were derived from."""
    if split is None:
        return np.nan, _UNKNOWN
    if not np.isnan(split["compute"]):
        return split["compute"] / speed, "recorded computing time"
    # The time of reads that overlapped computing is no part of the wall time, and NaN here.
    words = {"read": "reads", "wait": "waiting", "manage": "management", "callback": "callback"}
    parts = ", ".join(word for part, word in words.items() if not np.isnan(split[part]))
    return split["rest"] / speed, f"wall time less {parts}" if parts else "wall time"


def _bandwidth(
    timed: xr.Dataset, split: dict[str, float] | None, phase: PhaseName
) -> tuple[float, str]:
    """Return bytes per second, and what they were derived from."""
    if split is None:
        return np.nan, _UNKNOWN
    if np.isnan(split["read"]) and not np.isnan(split["rest"]):
        raise SettingsError(
            "bandwidth must be given where reads overlapped computing: the recorded time of reads "
            "is then the busy time of single lanes; got None. Pass what a probe of the drive "
            "found, such as bandwidth='2460 MiB'."
        )
    return float(read_bandwidth(timed, phase=phase)), "bytes read over time of reads"


def _timed_rows(trace: xr.Dataset, rows: Bools) -> Bools:
    """Return the rows whose evaluation knows its wall time and all parts that others know."""
    start = _evaluation_starts(trace)
    if not start.size:
        return rows
    known = ~np.isnan(np.asarray(trace["wall_s"].values, dtype=np.float64)[start])
    for names in _PARTS.values():
        for name, _ in names:
            # An engine's column that no number format gives back is kept as text.
            if name not in trace.variables or trace[name].dtype.kind != "f":
                continue
            values = np.asarray(trace[name].values)[start]
            if not np.isnan(values[rows[start]]).all():
                known &= ~np.isnan(values)
                break
    size = np.diff(np.append(start, rows.size))
    return np.asarray(np.repeat(known, size) & rows)


def _check_times(trace: xr.Dataset) -> None:
    """Refuse a trace that cannot tell reading from computing."""
    needs = [("wall_s",), _READ]
    missing = [names[0] for names in needs if not any(name in trace.variables for name in names)]
    if missing:
        raise SchemaError(
            f"trace must hold the times 'wall_s' and 'io_s'; got none of {missing}. An imported or "
            "replayed trace has no times of its own: pass both compute_s= (seconds of computing "
            "per token) and bandwidth= (bytes per second), or record a streamed run."
        )


def _positive_seconds(given: object) -> float:
    if (
        isinstance(given, bool)
        or not isinstance(given, numbers.Real)
        or not math.isfinite(given)
        or given <= 0
    ):
        raise SettingsError(
            f"compute_s must be a positive number of seconds per token; got {given!r}. "
            "A run without a miss takes its computing time: 1 / tokens per second."
        )
    return float(given)


def _positive_rate(given: object) -> float:
    if isinstance(given, str):
        given = parse_size(given, name="bandwidth")
    if (
        isinstance(given, bool)
        or not isinstance(given, numbers.Real)
        or not math.isfinite(given)
        or given <= 0
    ):
        raise SettingsError(
            f"bandwidth must be a positive number of bytes per second, or their size such as "
            f"'2460 MiB'; got {given!r}. A probe of the drive tells it."
        )
    return float(given)
