"""What the text cost: perplexity, speed of decoding."""

from __future__ import annotations

import numpy as np
import xarray as xr

from bmoe_lab.metrics._shared import (
    PhaseName,
    _evaluation_costs,
    _phase_rows,
    _result,
    _values,
)

__all__ = [
    "decode_speed",
    "perplexity",
]


def perplexity(trace: xr.Dataset, *, phase: PhaseName = "decode") -> xr.DataArray:
    """Return the perplexity of the tokens whose probability is known.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``logprob``, float32 of shape (token,), natural logarithm, NaN where not computed.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Scalar, float64, unit "1"; named ``perplexity_<phase>``. NaN if no probability is known.

    Notes
    -----
    ``exp(-mean of ln p)``. Tokens that the model generated itself are likely by construction: only
    a scored text says something about quality.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(perplexity(make_trace(n_token=4, n_layer=2, seed=0), phase="all")) > 1.0
    True
    """
    rows = _phase_rows(trace, phase)
    logprob = _values(trace, "logprob").astype(np.float64)[rows]
    known = logprob[~np.isnan(logprob)]
    value = float(np.exp(-known.mean())) if known.size else np.nan
    return _result(
        trace, np.float64(value), rows, None, phase, "perplexity", "perplexity of known tokens", "1"
    )


def decode_speed(trace: xr.Dataset, *, phase: PhaseName = "decode") -> xr.DataArray:
    """Return tokens per second of graph evaluation.

    Time between evaluations (sampling, callers) is not included; recording is. One run on one
    machine: a statement about that run only.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``wall_s``, float64 of shape (token,): per evaluation, on its first token.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted: those of evaluations whose time is known.

    Returns
    -------
    xarray.DataArray
        Scalar, float64, unit "s-1"; named ``decode_speed_<phase>``. NaN if no time is known.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> decode_speed(make_trace(n_token=4, n_layer=2, seed=0)).attrs["units"]
    's-1'
    """
    rows = _phase_rows(trace, phase)
    seconds, size = _evaluation_costs(trace, "wall_s", rows)
    known = ~np.isnan(seconds)
    total = float(seconds[known].sum())
    value = float(size[known].sum()) / total if total > 0 else np.nan
    return _result(
        trace, np.float64(value), rows, None, phase, "decode_speed", "tokens per second", "s-1"
    )
