"""The table of a comparison: one row per run, every difference paired token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.comparison import statistics
from bmoe_lab.comparison.statistics import Interval
from bmoe_lab.errors import SchemaError

__all__ = ["COLUMNS", "KINDS", "Arm", "build_tree", "is_comparison", "node_name", "runs"]

Kind = Literal["lossless", "noise floor", "policy", "control"]
KINDS: tuple[Kind, ...] = ("lossless", "noise floor", "policy", "control")

COLUMNS: dict[str, tuple[str, str]] = {
    "arm_name": ("", "name of the run"),
    "arm_kind": ("", "what the run is for: lossless, noise floor, policy or control"),
    "is_lossless": ("1", "1 if what ran is exactly what the router chose"),
    "fired": ("1", "1 if the policy changed anything, 0 if it never did, -1 without a policy"),
    "control_of": ("1", "row that this control belongs to, -1 if it is no control"),
    "n_scored": ("1", "tokens scored"),
    "nll": ("nat", "mean negative log-probability per token"),
    "perplexity": ("1", "perplexity: exp of the mean negative log-probability"),
    "perplexity_low": ("1", "lower bound: lossless perplexity x exp(delta_nll_low)"),
    "perplexity_high": ("1", "upper bound: lossless perplexity x exp(delta_nll_high)"),
    "delta_nll": ("nat", "mean paired difference to lossless"),
    "delta_nll_low": ("nat", "lower bound of delta_nll"),
    "delta_nll_high": ("nat", "upper bound of delta_nll"),
    "delta_nll_control": ("nat", "mean paired difference to the run's own control"),
    "delta_nll_control_low": ("nat", "lower bound of delta_nll_control"),
    "delta_nll_control_high": ("nat", "upper bound of delta_nll_control"),
    "kl_mean": ("nat", "mean KL(lossless || run) over the full vocabulary"),
    "kl_median": ("nat", "median of KL"),
    "kl_p99": ("nat", "99th percentile of KL"),
    "kl_max": ("nat", "largest KL"),
    "top1_agreement": ("1", "share of tokens whose most likely next token is the lossless one"),
    "routing_agreement": ("1", "share of the lossless choice of experts that also ran"),
    "drop_rate": ("1", "share of routed slots dropped"),
    "substitution_rate": ("1", "share of routed slots given to another expert"),
    "changed_rate": ("1", "slots changed per slot that the policy might have changed"),
    "weight_discarded_frac": ("1", "share of the router's weight whose expert did not run"),
    "hit_rate": ("1", "lookups that found their expert resident"),
    "read_bytes_per_token": ("byte", "expert bytes read per token"),
    "read_bytes_per_token_low": ("byte", "lower bound of read_bytes_per_token"),
    "read_bytes_per_token_high": ("byte", "upper bound of read_bytes_per_token"),
    "wall_s": ("s", "wall time of the decode"),
    "tokens_per_s": ("s-1", "decoded tokens per second, recording included"),
}
"""Variables of the root, each of shape (arm,): name to (units, long name)."""

_INTEGERS = {"is_lossless": np.int8, "fired": np.int8, "control_of": np.int16, "n_scored": np.int64}

# Attributes of the lossless run that hold for the whole comparison.
_SHARED = (
    "arch",
    "bmoe_lab_version",
    "cache_budget_bytes",
    "cache_start",
    "llama_cpp_commit",
    "llama_cpp_python_version",
    "machine",
    "model_bytes",
    "model_fingerprint",
    "model_name",
    "n_expert",
    "residency_policy",
    "session_settings",
    "start_time",
)


@dataclass
class Arm:
    """One finished run of a comparison.

    Attributes
    ----------
    name : str
        As shown: the policy's repr, or what the run is for.
    kind : {"lossless", "noise floor", "policy", "control"}
    trace : xarray.Dataset
        Its trace with the variables ``nll``, ``kl``, ``top1_agree``, ``routing_agreement``
        (token), NaN where not scored.
    fired : bool or None
        Whether the policy changed anything; None without a policy.
    changed_rate : float
        Slots changed per slot that the policy might have changed; NaN if unknown.
    control_of : int
        Row of the run whose rate this control copies, else -1.
    """

    name: str
    kind: Kind
    trace: xr.Dataset
    fired: bool | None = None
    changed_rate: float = math.nan
    control_of: int = -1


def node_name(name: str, taken: set[str]) -> str:
    """Return a name for a tree's node: no slash, not taken.

    Examples
    --------
    >>> node_name("DropCold(frac=0.75)", {"lossless"})
    'DropCold(frac=0.75)'
    >>> node_name("a/b", {"a_b"})
    'a_b (2)'
    """
    # Group names of file formats: a slash separates, a lone dot means "here".
    base = name.replace("/", "_").strip(". ") or "run"
    candidate, n = base, 1
    while candidate in taken:
        n += 1
        candidate = f"{base} ({n})"
    return candidate


def build_tree(arms: list[Arm], attrs: dict[str, Any], *, seed: int) -> xr.DataTree:
    """Return the comparison of finished runs, the lossless one first.

    Parameters
    ----------
    arms : list of Arm
        Runs over the same tokens, in the order they ran.
    attrs : dict
        Attributes of the root, beside those that the runs share.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    xarray.DataTree
        Root: the variables of :data:`COLUMNS`, shape (arm,). One child per run, in order.
    """
    rows = [_row(arm, arms, seed) for arm in arms]
    table = {name: ("arm", _column(name, [row[name] for row in rows])) for name in COLUMNS}
    root = xr.Dataset(table)
    for name, (units, long_name) in COLUMNS.items():
        root[name].attrs["long_name"] = long_name
        if units:
            root[name].attrs["units"] = units
    shared = {key: arms[0].trace.attrs[key] for key in _SHARED if key in arms[0].trace.attrs}
    root.attrs = {
        "title": "comparison of routing policies with the lossless run",
        **shared,
        "bootstrap_block": statistics.BLOCK,
        "bootstrap_draws": statistics.DRAWS,
        "bootstrap_level": statistics.LEVEL,
        "bootstrap_seed": seed,
        **attrs,
    }
    nodes: dict[str, xr.Dataset] = {"/": root}
    # Variables and children of a node share one namespace.
    taken = set(COLUMNS)
    for arm in arms:
        name = node_name(arm.name, taken)
        taken.add(name)
        nodes[f"/{name}"] = arm.trace
    return xr.DataTree.from_dict(nodes)


def is_comparison(tree: object) -> bool:
    """Return whether a tree is what :func:`bmoe_lab.compare` returns."""
    return isinstance(tree, xr.DataTree) and {"arm_name", "delta_nll"} <= set(tree.data_vars)


def runs(tree: xr.DataTree) -> list[tuple[str, xr.Dataset]]:
    """Return name and trace of every run of a comparison, in the order they ran.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    """
    if not is_comparison(tree):
        given = type(tree).__name__
        raise SchemaError(
            f"tree must be a comparison with the variable 'arm_name'; got {given}. "
            "Pass what bmoe_lab.compare returned."
        )
    names = [str(name) for name in tree.to_dataset()["arm_name"].values]
    nodes = [node.to_dataset() for node in tree.children.values()]
    return list(zip(names, nodes, strict=True))


def _column(name: str, values: list[Any]) -> npt.NDArray[Any]:
    if name in ("arm_name", "arm_kind"):
        return np.array(values, dtype=str)
    return np.array(values, dtype=_INTEGERS.get(name, np.float64))


def _row(arm: Arm, arms: list[Arm], seed: int) -> dict[str, Any]:
    trace, base = arm.trace, arms[0].trace
    nll, base_nll = trace["nll"].values, base["nll"].values
    scored = ~np.isnan(nll) & ~np.isnan(base_nll)
    window = trace["turn"].values[scored]
    nll, base_nll = nll[scored], base_nll[scored]
    delta = _interval(nll - base_nll, window, seed)
    perplexity = _exp(_mean(nll))
    row: dict[str, Any] = {
        "arm_name": arm.name,
        "arm_kind": arm.kind,
        "is_lossless": int(trace.attrs["lossless"]),
        "fired": -1 if arm.fired is None else int(arm.fired),
        "control_of": arm.control_of,
        "n_scored": nll.size,
        "nll": _mean(nll),
        "perplexity": perplexity,
        "changed_rate": arm.changed_rate,
    }
    if arm.kind == "lossless":
        # Its distance to itself is not a measurement; the noise floor is.
        delta = Interval(math.nan, math.nan, math.nan, delta.n)
    _put(row, "delta_nll", delta)
    base_perplexity = _exp(_mean(base_nll))
    row["perplexity_low"] = base_perplexity * _exp(delta.low)
    row["perplexity_high"] = base_perplexity * _exp(delta.high)
    _put(row, "delta_nll_control", _control_interval(arm, arms, seed))
    row.update(_divergence(trace, scored))
    row.update(_streaming(trace, seed))
    return row


def _divergence(trace: xr.Dataset, scored: npt.NDArray[np.bool_]) -> dict[str, float]:
    names = ("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement", "routing_agreement")
    row = dict.fromkeys(names, math.nan)
    if "kl" in trace and scored.any():
        kl = trace["kl"].values[scored]
        row["kl_mean"] = _mean(kl)
        row["kl_median"] = float(np.median(kl))
        row["kl_p99"] = float(np.percentile(kl, 99, method="higher"))
        row["kl_max"] = float(kl.max())
        row["top1_agreement"] = _mean(trace["top1_agree"].values[scored])
    if "routing_agreement" in trace:
        agreement = trace["routing_agreement"].values
        row["routing_agreement"] = _mean(agreement[~np.isnan(agreement)])
    return row


def _streaming(trace: xr.Dataset, seed: int) -> dict[str, float]:
    """Return the numbers of the decode; NaN for what the trace does not know."""
    row = {
        "drop_rate": float(metrics.drop_rate(trace)),
        "substitution_rate": float(metrics.substitution_rate(trace)),
        "weight_discarded_frac": _known(trace, "weight_chosen", metrics.weight_discarded_frac),
        "hit_rate": _known(trace, "residency", metrics.hit_rate),
        "tokens_per_s": _known(trace, "wall_s", metrics.decode_speed),
        "wall_s": math.nan,
    }
    decode = trace["phase"].values == 1
    if "wall_s" in trace:
        seconds = trace["wall_s"].values[decode]
        row["wall_s"] = float(np.nansum(seconds)) if np.isfinite(seconds).any() else math.nan
    read = Interval(math.nan, math.nan, math.nan, 0)
    if "read_bytes" in trace:
        per_token = metrics.read_bytes_per_token(trace, by="token").values
        read = _interval(per_token, trace["turn"].values[decode], seed)
    _put(row, "read_bytes_per_token", read)
    return row


def _known(trace: xr.Dataset, variable: str, metric: Any) -> float:
    return float(metric(trace)) if variable in trace else math.nan


def _control_interval(arm: Arm, arms: list[Arm], seed: int) -> Interval:
    """Return the paired difference of a policy to its control."""
    unknown = Interval(math.nan, math.nan, math.nan, 0)
    here = next((i for i, other in enumerate(arms) if other is arm), -1)
    control = next((other for other in arms if other.control_of == here), None)
    if control is None:
        return unknown
    difference = arm.trace["nll"].values - control.trace["nll"].values
    scored = ~np.isnan(difference)
    return _interval(difference[scored], arm.trace["turn"].values[scored], seed)


def _interval(values: npt.NDArray[Any], window: npt.NDArray[Any], seed: int) -> Interval:
    """Return the interval; unknown bounds where a token is infinitely unlikely."""
    if not np.isfinite(values).all():
        return Interval(_mean(values), math.nan, math.nan, values.size)
    return statistics.mean_interval(values, segment=window, seed=seed)


def _put(row: dict[str, Any], name: str, interval: Interval) -> None:
    row[name] = interval.mean
    row[f"{name}_low"] = interval.low
    row[f"{name}_high"] = interval.high


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if values.size else math.nan


def _exp(value: float) -> float:
    # A perplexity beyond the range of a float is infinite, not an error.
    return math.exp(value) if value < 700 else math.inf if value > 0 else math.nan
