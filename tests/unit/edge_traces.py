"""Traces at the edges of what figures and widgets must take: each gives a picture or a sentence."""

import numpy as np

from bmoe_lab.schema import NOT_ROUTED
from bmoe_lab.testing import make_trace


def _without(trace, *names):
    return trace.drop_vars([name for name in names if name in trace.variables])


def _masked_layer():
    trace = make_trace(n_token=12, n_layer=3, scores=True, seed=3)
    for name, value in (
        ("expert_chosen", -1),
        ("expert_applied", -1),
        ("weight_chosen", np.nan),
        ("weight_applied", np.nan),
        ("action", NOT_ROUTED),
        ("residency", NOT_ROUTED),
        ("read_bytes", 0),
        ("router_score", np.nan),
    ):
        trace[name][:, 1] = value
    return trace


def _whole():
    return make_trace(n_token=24, n_layer=3, scores=True, seed=5)


EDGE_TRACES = {
    "empty": lambda: _whole().isel(token=slice(0, 0)),
    "one token": lambda: make_trace(n_token=1, n_layer=2, n_prefill=0, scores=True, seed=1),
    "one layer": lambda: make_trace(n_token=24, n_layer=1, scores=True, seed=2),
    "masked layer": _masked_layer,
    "prefill only": lambda: make_trace(n_token=10, n_layer=2, n_prefill=10, scores=True, seed=4),
    "no weights": lambda: _without(_whole(), "weight_chosen", "weight_applied"),
    "no scores": lambda: _without(_whole(), "router_score", "score_is_softmax"),
    "no text": lambda: _without(_whole(), "piece", "token_id"),
    "no residency": lambda: _without(_whole(), "residency", "read_bytes", "expert_bytes"),
    "512 experts": lambda: make_trace(
        n_token=30, n_layer=4, n_expert=512, n_used=10, scores=True, seed=6
    ),
    "lossy": lambda: make_trace(n_token=24, n_layer=3, scores=True, policy="drop", seed=7),
}
"""By name, a function that makes the trace."""
