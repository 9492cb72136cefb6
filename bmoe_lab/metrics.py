"""Numbers of one routing trace.

Every function takes a trace (:mod:`bmoe_lab.schema`) and returns a labelled array. ``phase``
selects the tokens and is part of the result's name: prefill and decode never share a number by
accident. Cells that did not route are left out; a group with nothing to count is NaN, and so is a
group that holds an unknown weight.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.schema import Action, Phase, Residency

__all__ = [
    "consecutive_overlap",
    "decode_speed",
    "drop_rate",
    "expert_load",
    "first_of_load",
    "hit_rate",
    "perplexity",
    "read_bytes_per_token",
    "router_entropy",
    "routing_agreement",
    "substitution_rate",
    "token_cycle_bytes",
    "weight_discarded",
]

By = Literal["token", "layer", "slot"]
PhaseName = Literal["all", "prefill", "decode", "draft"]

_DIMS = ("token", "layer", "slot")
Bools = npt.NDArray[np.bool_]


# ---------------------------------------------------------------- what the cache saw


def hit_rate(
    trace: xr.Dataset,
    *,
    by: By | None = None,
    per: Literal["lookup", "routing"] = "lookup",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the fraction of lookups that found their expert resident.

    One lookup per distinct (layer, expert) per graph evaluation, as a cache sees it. Dropped slots
    ask for nothing: a policy that drops misses raises this ratio, so read
    :func:`read_bytes_per_token` beside it.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``residency``, ``expert_applied``, ``action`` of shape (token, layer, slot) and the
        coordinates ``turn``, ``batch``, ``phase``.
    by : {"token", "layer", "slot"}, optional
        Dimension kept. A lookup belongs to the first row that asks, in token-major order.
    per : {"lookup", "routing"}, default "lookup"
        ``"routing"`` counts every row, repeats within a prefill included.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``hit_rate_<phase>``. NaN where
        nothing was looked up.

    Raises
    ------
    SchemaError
        If ``residency`` is absent.
    UnknownNameError
        If `by`, `per` or `phase` is not one of the names above.

    Notes
    -----
    A speculative hit is a hit. Residency is judged before the evaluation loads anything, so every
    row of a cold prefill is a miss. Definition: BigMoeOnEdge's cache replay (docs/bench-data,
    2026-07-20), which this reproduces on its recorded traces.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, seed=0)
    >>> dict(hit_rate(trace, by="layer").sizes)
    {'layer': 2}
    """
    if per not in ("lookup", "routing"):
        raise unknown_name("per", per, ["lookup", "routing"])
    counted = _asked(trace) if per == "routing" else first_of_load(trace).values
    residency = _values(trace, "residency")
    hit = counted & (
        (residency == Residency.hit.value) | (residency == Residency.hit_speculative.value)
    )
    return _ratio(
        trace, hit, counted, by, phase, "hit_rate", "lookups that found their expert resident"
    )


def first_of_load(trace: xr.Dataset) -> xr.DataArray:
    """Return which rows are lookups: the first that names its expert in an evaluation's layer.

    Parameters
    ----------
    trace : xarray.Dataset
        As for :func:`hit_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (token, layer, slot), bool. Rows that were dropped, not routed or not streamed are
        never lookups.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> int(first_of_load(make_trace(n_token=4, n_layer=2, n_used=2, seed=0))[-1].sum())
    4
    """
    asked = _asked(trace)
    n_token, n_layer, n_slot = asked.shape
    first = asked.copy()
    start = _evaluation_starts(trace)
    size = np.diff(np.append(start, n_token))
    # An evaluation of one token names no expert twice; only the wide ones need a search.
    wide = np.repeat(size > 1, size)
    if wide.any():
        rows = np.flatnonzero(wide)
        evaluation = np.repeat(np.arange(start.size), size)[rows]
        expert = _values(trace, "expert_applied")[rows].astype(np.int64)
        n_expert = int(expert.max(initial=0)) + 1
        layer = np.arange(n_layer)[None, :, None]
        key = (evaluation[:, None, None] * n_layer + layer) * n_expert + expert
        candidate = asked[rows].ravel()
        # C order is token-major within each (evaluation, layer), and `unique` keeps the first.
        _, where = np.unique(key.ravel()[candidate], return_index=True)
        found = np.zeros(candidate.size, dtype=bool)
        found[np.flatnonzero(candidate)[where]] = True
        first[rows] = found.reshape(rows.size, n_layer, n_slot)
    return xr.DataArray(
        first,
        dims=_DIMS,
        coords=_coords(trace, _DIMS),
        name="first_of_load",
        attrs={"long_name": "row is a lookup: the first of its expert in the layer's load"},
    )


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

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> read_bytes_per_token(make_trace(n_token=4, n_layer=2, seed=0)).attrs["units"]
    'byte'
    """
    rows = _phase_rows(trace, phase)
    selected = _values(trace, "read_bytes")[rows].astype(np.float64)
    total = _sum(selected, by)
    if by != "token":
        total = total / rows.sum() if rows.any() else np.full(np.shape(total), np.nan)
    return _result(
        trace, total, rows, by, phase, "read_bytes_per_token", "expert bytes read per token", "byte"
    )


def token_cycle_bytes(trace: xr.Dataset) -> xr.DataArray:
    """Return the expert bytes that one token needs if nothing is resident.

    Below this budget a global LRU hits exactly nothing in decode: each layer's experts are evicted
    before the next token comes back to them.

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
    return xr.DataArray(
        np.int64((size * used).sum()),
        name="token_cycle_bytes",
        attrs={
            "units": "byte",
            "long_name": "expert bytes that a token needs with nothing resident",
        },
    )


# ---------------------------------------------------------------- what the policy did


def drop_rate(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the fraction of routed slots that a policy dropped.

    The denominator is every routed slot, the best one of each routing included.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``action``, uint8 flags of shape (token, layer, slot).
    by : {"token", "layer", "slot"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``drop_rate_<phase>``.

    Raises
    ------
    SchemaError
        If ``action`` is absent.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(drop_rate(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    return _ratio(
        trace,
        _acted(trace, Action.dropped),
        _routed(trace),
        by,
        phase,
        "drop_rate",
        "routed slots that a policy dropped",
    )


def substitution_rate(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the fraction of routed slots that a policy gave to another expert.

    The denominator is every routed slot, the best one of each routing included.

    Parameters
    ----------
    trace, by, phase
        As for :func:`drop_rate`.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``substitution_rate_<phase>``.

    Raises
    ------
    SchemaError
        If ``action`` is absent.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(substitution_rate(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    return _ratio(
        trace,
        _acted(trace, Action.substituted),
        _routed(trace),
        by,
        phase,
        "substitution_rate",
        "routed slots that a policy gave to another expert",
    )


def weight_discarded(
    trace: xr.Dataset, *, by: By | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the share of the router's weight whose expert did not run.

    Counts dropped and substituted slots. Where a policy replaced the choice before the graph
    computed weights, the weight of what the router wanted is unknown, and so is the share.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``weight_chosen`` and ``action`` of shape (token, layer, slot).
    by : {"token", "layer", "slot"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``weight_discarded_<phase>``. NaN for a
        group that holds an unknown weight.

    Raises
    ------
    SchemaError
        If ``weight_chosen`` or ``action`` is absent.

    Notes
    -----
    ``sum of w over slots that did not run / sum of w over all slots``; the discarded mass of
    BigMoeOnEdge (pull request 94) and colibri.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> float(weight_discarded(make_trace(n_token=4, n_layer=2, seed=0)))
    0.0
    """
    weight = _values(trace, "weight_chosen").astype(np.float64)
    routed = _routed(trace)
    lost = _acted(trace, Action.dropped) | _acted(trace, Action.substituted)
    return _ratio(
        trace,
        np.where(lost, weight, 0.0),
        np.where(routed, weight, 0.0),
        by,
        phase,
        "weight_discarded",
        "router weight whose expert did not run",
    )


def routing_agreement(
    trace: xr.Dataset,
    reference: xr.Dataset,
    *,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how much of what the reference's router chose also ran here.

    Compares sets: order does not count, a dropped slot runs nothing. A policy changes the hidden
    states, so later layers differ even in slots that it did not touch.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_applied`` and ``action``.
    reference : xarray.Dataset
        The lossless run over the same tokens; reads ``expert_chosen``.
    by : {"token", "layer"}, optional
        Dimension kept.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1", in [0, 1]; named ``routing_agreement_<phase>``.

    Raises
    ------
    SettingsError
        If the two traces do not hold the same tokens and layers.

    Notes
    -----
    ``|S and S'| / k``, S what the reference chose, S' what ran, k the size of S, averaged over
    routings (colibri's routing agreement).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, seed=0)
    >>> float(routing_agreement(trace, trace))
    1.0
    """
    if by not in (None, "token", "layer"):
        raise unknown_name("by", by, ["token", "layer"])
    _check_same_tokens(trace, reference)
    wanted = np.where(_routed(reference), _values(reference, "expert_chosen"), -1)
    ran = _routed(trace) & ~_acted(trace, Action.dropped)
    actual = np.where(ran, _values(trace, "expert_applied"), -2)
    shared = _isin_last(wanted, actual)
    both = _routed(reference) & _any_slot(trace)[..., None]
    return _ratio(
        trace,
        shared & both,
        both,
        by,
        phase,
        "routing_agreement",
        "experts of the reference's choice that ran here",
    )


# ---------------------------------------------------------------- what the router does


def expert_load(
    trace: xr.Dataset,
    *,
    which: Literal["chosen", "applied"] = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how the routings of each layer spread over its experts.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or ``expert_applied`` of shape (token, layer, slot), ``action``, and
        the attribute ``n_expert``.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (layer, expert), float64, unit "1"; each layer sums to one, or is NaN if it routed
        nothing. Named ``expert_load_<phase>``.

    Raises
    ------
    SchemaError
        If the variable or the number of experts is absent.

    Notes
    -----
    ``f_e = n_e / (T k)``: the load of the Switch Transformer (arXiv 2101.03961, equation 5).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> load = expert_load(make_trace(n_token=4, n_layer=2, n_expert=8, seed=0))
    >>> dict(load.sizes), bool((load.sum("expert").round(12) == 1).all())
    ({'layer': 2, 'expert': 8}, True)
    """
    if which not in ("chosen", "applied"):
        raise unknown_name("which", which, ["applied", "chosen"])
    rows = _phase_rows(trace, phase)
    counted = _routed(trace)
    if which == "applied":
        counted = counted & ~_acted(trace, Action.dropped)
    expert = _values(trace, f"expert_{which}")
    n_expert = _n_expert(trace)
    n_layer = expert.shape[1]
    counted = counted[rows]
    key = expert[rows].astype(np.int64) + np.arange(n_layer)[None, :, None] * n_expert
    count = np.bincount(key[counted], minlength=n_layer * n_expert).reshape(n_layer, n_expert)
    total = count.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        load = np.where(total > 0, count / np.where(total > 0, total, 1), np.nan)
    return xr.DataArray(
        load,
        dims=("layer", "expert"),
        coords=_coords(trace, ("layer",)),
        name=f"expert_load_{phase}",
        attrs={"units": "1", "long_name": f"share of the layer's routings ({which}, {phase})"},
    )


def consecutive_overlap(
    trace: xr.Dataset,
    *,
    lag: int = 1,
    by: Literal["token", "layer"] | None = None,
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return how much of a token's choice was also the choice `lag` tokens before.

    The locality that a cache lives on; by chance it would be k/E.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` of shape (token, layer, slot) and the coordinates ``turn``,
        ``position``.
    lag : int, default 1
        Distance in positions. Pairs across turns or gaps are not counted.
    by : {"token", "layer"}, optional
        Dimension kept. With ``"token"`` the first `lag` tokens are NaN.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Both tokens of a pair are of this phase.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "1"; named ``consecutive_overlap_<phase>``.

    Raises
    ------
    SettingsError
        If `lag` is less than 1.

    Notes
    -----
    ``|S_t and S_(t-lag)| / k``, averaged over pairs. Source: Mixtral (arXiv 2401.04088, section
    5), which reports repeated choices by layer; lags as in BigMoeOnEdge's predictor study.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=6, n_layer=2, seed=0)
    >>> 0.0 <= float(consecutive_overlap(trace, phase="all")) <= 1.0
    True
    """
    if by not in (None, "token", "layer"):
        raise unknown_name("by", by, ["token", "layer"])
    if lag < 1:
        raise SettingsError(f"lag must be at least 1; got {lag!r}. Use 1 for the token before.")
    rows = _phase_rows(trace, phase)
    routed = _routed(trace)
    expert = np.where(routed, _values(trace, "expert_chosen"), -1)
    shared = np.zeros(expert.shape, dtype=bool)
    pair = np.zeros(expert.shape, dtype=bool)
    if expert.shape[0] > lag:
        turn, position = _values(trace, "turn"), _values(trace, "position").astype(np.int64)
        follows = (turn[lag:] == turn[:-lag]) & (position[lag:] == position[:-lag] + lag)
        follows &= rows[lag:] & rows[:-lag]
        before = np.where(routed, expert, -2)[:-lag]
        shared[lag:] = _isin_last(expert[lag:], before)
        pair[lag:] = follows[:, None, None] & routed[lag:] & _any_slot(trace)[:-lag, :, None]
    return _ratio(
        trace,
        shared & pair,
        pair,
        by,
        phase,
        "consecutive_overlap",
        f"choice shared with the token {lag} before",
    )


def router_entropy(
    trace: xr.Dataset, *, by: Literal["token", "layer"] | None = None, phase: PhaseName = "decode"
) -> xr.DataArray:
    """Return the entropy of the weights that the router gave to its choice.

    Near ln k the slots matter alike; near 0 the first one decides and the others are cheap to
    lose.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``weight_chosen``, float32 of shape (token, layer, slot). The weights are normalised
        over the slots first, since some models scale them.
    by : {"token", "layer"}, optional
        Dimension kept; routings are averaged.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (by,) or scalar, float64, unit "nat"; named ``router_entropy_<phase>``.

    Notes
    -----
    ``H = -sum of w ln w`` over the chosen slots (not over all experts: that needs the scores).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2, n_used=2, seed=0)
    >>> 0.0 <= float(router_entropy(trace)) <= 0.6932
    True
    """
    if by not in (None, "token", "layer"):
        raise unknown_name("by", by, ["token", "layer"])
    routed = _routed(trace)
    weight = np.where(routed, _values(trace, "weight_chosen").astype(np.float64), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    share = weight / np.where(total > 0, total, 1.0)
    plogp = share * np.log(np.where(share > 0, share, 1.0))
    entropy = np.where(np.isnan(total[..., 0]), np.nan, -plogp.sum(axis=-1))
    cell = _any_slot(trace)
    result = _ratio(
        trace,
        np.where(cell, entropy, 0.0)[..., None],
        cell[..., None],
        by,
        phase,
        "router_entropy",
        "entropy of the weights over the chosen slots",
    )
    result.attrs["units"] = "nat"
    return result


# ---------------------------------------------------------------- text and time


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
        Tokens counted.

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
    seconds = np.nansum(_values(trace, "wall_s")[rows])
    value = rows.sum() / seconds if seconds > 0 else np.nan
    return _result(
        trace, np.float64(value), rows, None, phase, "decode_speed", "tokens per second", "s-1"
    )


# ---------------------------------------------------------------- shared pieces


def _values(trace: xr.Dataset, name: str) -> npt.NDArray[Any]:
    if name not in trace.variables:
        present = sorted(str(key) for key in trace.data_vars)
        raise SchemaError(
            f"trace must hold the variable {name!r}; got {present}. "
            "Record it, or choose a metric that does not need it."
        )
    return np.asarray(trace[name].values)


def _n_expert(trace: xr.Dataset) -> int:
    if "n_expert" in trace.attrs:
        return int(trace.attrs["n_expert"])
    if "expert" in trace.sizes:
        return int(trace.sizes["expert"])
    raise SchemaError(
        f"trace must hold the attribute 'n_expert'; got {sorted(map(str, trace.attrs))}. "
        "Set trace.attrs['n_expert'] to the experts per layer."
    )


def _phase_rows(trace: xr.Dataset, phase: str) -> Bools:
    names = {member.name: member.value for member in Phase}
    if phase == "all":
        return np.ones(trace.sizes["token"], dtype=bool)
    if phase not in names:
        raise unknown_name("phase", phase, ["all", *names])
    return np.asarray(_values(trace, "phase") == names[phase])


def _routed(trace: xr.Dataset) -> Bools:
    return np.asarray(_values(trace, "expert_chosen") >= 0)


def _any_slot(trace: xr.Dataset) -> Bools:
    """Return the (token, layer) cells that routed."""
    return np.asarray(_routed(trace).any(axis=-1))


def _acted(trace: xr.Dataset, action: Action) -> Bools:
    """Return the routed slots to which `action` was done."""
    return np.asarray(_values(trace, "action") == action.value)


def _asked(trace: xr.Dataset) -> Bools:
    """Return the rows that asked the cache: routed, streamed and not dropped."""
    residency = _values(trace, "residency")
    asked = np.isin(
        residency,
        [Residency.miss.value, Residency.hit.value, Residency.hit_speculative.value],
    )
    return np.asarray(asked & ~_acted(trace, Action.dropped))


def _evaluation_starts(trace: xr.Dataset) -> npt.NDArray[np.int64]:
    """Return the first token of every graph evaluation."""
    turn, batch = _values(trace, "turn"), _values(trace, "batch")
    if batch.size == 0:
        return np.zeros(0, dtype=np.int64)
    change = (batch[1:] != batch[:-1]) | (turn[1:] != turn[:-1])
    return np.concatenate(([0], np.flatnonzero(change) + 1)).astype(np.int64)


def _isin_last(needle: npt.NDArray[Any], hay: npt.NDArray[Any]) -> Bools:
    """Return, slot by slot, whether the value occurs in the other routing of that cell."""
    found = np.zeros(needle.shape, dtype=bool)
    for slot in range(hay.shape[-1]):
        found |= needle == hay[..., slot, None]
    return found


def _check_same_tokens(trace: xr.Dataset, reference: xr.Dataset) -> None:
    for dim in ("token", "layer"):
        if trace.sizes[dim] != reference.sizes[dim]:
            raise SettingsError(
                f"reference must hold the same {dim}s, {trace.sizes[dim]}; got "
                f"{reference.sizes[dim]}. Compare runs over the same text."
            )
    for name in ("turn", "position", "token_id"):
        if name in trace.variables and name in reference.variables:
            differs = np.flatnonzero(_values(trace, name) != _values(reference, name))
            if differs.size:
                raise SettingsError(
                    f"reference must hold the same tokens; got another {name} at token "
                    f"{int(differs[0])}. Compare runs over the same text."
                )


def _sum(values: npt.NDArray[np.float64], by: str | None) -> npt.NDArray[np.float64]:
    if by is not None and by not in _DIMS:
        raise unknown_name("by", by, list(_DIMS))
    axes = tuple(axis for axis, dim in enumerate(_DIMS) if dim != by)
    return np.asarray(values.sum(axis=axes))


def _ratio(
    trace: xr.Dataset,
    numerator: npt.NDArray[Any],
    denominator: npt.NDArray[Any],
    by: str | None,
    phase: str,
    name: str,
    long_name: str,
) -> xr.DataArray:
    """Return sum over sum; NaN where there is nothing to divide by."""
    rows = _phase_rows(trace, phase)
    top = _sum(numerator[rows].astype(np.float64), by)
    bottom = _sum(denominator[rows].astype(np.float64), by)
    safe = np.where(bottom == 0, 1.0, bottom)
    values = np.where(bottom == 0, np.nan, top / safe)
    return _result(trace, values, rows, by, phase, name, long_name, "1")


def _coords(trace: xr.Dataset, dims: tuple[str, ...]) -> dict[str, xr.Variable]:
    return {
        str(name): coord.variable
        for name, coord in trace.coords.items()
        if coord.dims and set(coord.dims) <= set(dims)
    }


def _result(
    trace: xr.Dataset,
    values: npt.NDArray[np.float64] | np.float64,
    rows: Bools,
    by: str | None,
    phase: str,
    name: str,
    long_name: str,
    units: str,
) -> xr.DataArray:
    dims = () if by is None else (by,)
    source = trace.isel(token=np.flatnonzero(rows)) if by == "token" else trace
    return xr.DataArray(
        np.asarray(values, dtype=np.float64),
        dims=dims,
        coords=_coords(source, dims),
        name=f"{name}_{phase}",
        attrs={"units": units, "long_name": f"{long_name} ({phase})"},
    )
