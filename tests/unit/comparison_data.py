"""A small comparison for tests of what is made from one: tables, figures, the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from bmoe_lab.comparison.tree import Arm, build_tree
from bmoe_lab.metrics import routing_agreement
from bmoe_lab.testing.traces import make_trace

__all__ = ["make_arm", "make_tree"]

POLICIES = {
    "lossless": None,
    "lossless again": None,
    "DropCold(frac=0.75)": "drop",
    "RandomDrop(rate=0.2)": "drop",
    "Idle()": None,
}


def make_arm(name: str, index: int, n_token: int) -> Arm:
    trace = make_trace(n_token, n_layer=3, n_expert=8, n_used=2, n_prefill=8, policy=POLICIES[name])
    scored = np.arange(n_token) > 8
    rng = np.random.default_rng(0)
    base = rng.gamma(2.0, 1.0, n_token)
    worse = {"DropCold(frac=0.75)": 0.1, "RandomDrop(rate=0.2)": 0.6}.get(name, 0.0)
    extra = worse * np.random.default_rng(index).normal(1.0, 0.5, n_token)
    trace["nll"] = ("token", np.where(scored, base + extra, np.nan))
    if index:
        trace["kl"] = ("token", np.where(scored, np.abs(extra), np.nan))
        trace["top1_agree"] = ("token", np.where(scored, (extra < 0.5).astype(float), np.nan))
        reference = make_trace(n_token, n_layer=3, n_expert=8, n_used=2, n_prefill=8)
        decode = np.full(n_token, np.nan)
        decode[8:] = routing_agreement(trace, reference, by="token")
        trace["routing_agreement"] = ("token", decode)
    kinds: Any = ["lossless", "noise floor", "policy", "control", "policy"]
    return Arm(
        name,
        kinds[index],
        trace,
        fired=None if index < 2 else POLICIES[name] is not None,
        changed_rate=float("nan") if index < 2 else 0.25,
        control_of=2 if kinds[index] == "control" else -1,
    )


def make_tree(n_token: int = 80, **attrs: Any) -> xr.DataTree:
    arms = [make_arm(name, index, n_token) for index, name in enumerate(POLICIES)]
    base = {"comparison": 1, "complete": 1, "n_context": 8, "n_window": 1, "seed": 0}
    return build_tree(arms, base | attrs, seed=0)
