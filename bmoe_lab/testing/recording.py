"""A trace fed through a recorder, as a session would.

Tests of recording, journals and kills need a run without a model: these two functions turn any
trace into one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from bmoe_lab.recording.recorder import Recorder
from bmoe_lab.recording.spec import TraceSpec
from bmoe_lab.schema import COSTS, NO_EXPERT

__all__ = ["feed", "spec_of"]

_CELLS = {
    "chosen": "expert_chosen",
    "weight_chosen": "weight_chosen",
    "applied": "expert_applied",
    "weight_applied": "weight_applied",
    "action": "action",
    "residency": "residency",
    "read_bytes": "read_bytes",
}
# The recorder sets these itself.
_OWN_ATTRS = {"schema_version", "n_expert", "record", "score_exact", "complete", "journal_note"}


def spec_of(trace: xr.Dataset, *, record_text: bool = True) -> TraceSpec:
    """Return the spec of a recording that gives this trace.

    Parameters
    ----------
    trace : xarray.Dataset
        For instance from :func:`bmoe_lab.testing.make_trace`.
    record_text : bool, default True
        Keep ``piece`` and ``token_id``.
    """
    return TraceSpec(
        n_layer=trace.sizes["layer"],
        n_slot=trace.sizes["slot"],
        n_expert=int(trace.attrs["n_expert"]),
        block=trace["block"].values.tolist(),
        group=trace["group"].values.tolist(),
        expert_bytes=trace["expert_bytes"].values,
        dense_bytes=trace["dense_bytes"].values,
        n_expert_used=trace["n_expert_used"].values,
        level=str(trace.attrs["record"]),
        record_text=record_text,
        score_is_softmax=trace["score_is_softmax"].values.tolist()
        if "score_is_softmax" in trace
        else None,
        attrs={name: value for name, value in trace.attrs.items() if name not in _OWN_ATTRS},
    )


def feed(recorder: Recorder, trace: xr.Dataset, *, first_batch: int = 0) -> None:
    """Record every evaluation of a trace.

    Parameters
    ----------
    recorder : Recorder
        Made from :func:`spec_of` of the same trace.
    trace : xarray.Dataset
        A whole trace, with text.
    first_batch : int, default 0
        Added to ``batch``, to feed a trace again and again.
    """
    data: dict[str, Any] = {str(name): v.values for name, v in trace.variables.items()}
    costs = [name for name in COSTS if name in data]
    for batch in np.unique(data["batch"]).tolist():
        tokens = np.flatnonzero(data["batch"] == batch)
        recorder.begin(
            batch=first_batch + batch,
            turn=int(data["turn"][tokens[0]]),
            phase=int(data["phase"][tokens[0]]),
            positions=data["position"][tokens],
            token_ids=data["token_id"][tokens],
            pieces=data["piece"][tokens].tolist(),
            logprob=data["logprob"][tokens],
            accepted=data["accepted"][tokens],
        )
        for layer in range(trace.sizes["layer"]):
            rows = np.flatnonzero(data["expert_chosen"][tokens, layer, 0] != NO_EXPERT)
            width = int(data["n_expert_used"][layer])
            cells = {
                argument: data[name][tokens[rows], layer, :width]
                for argument, name in _CELLS.items()
            }
            scores = data["router_score"][tokens[rows], layer] if "router_score" in data else None
            recorder.layer(layer, rows, scores=scores, **cells)
        recorder.commit({name: float(data[name][tokens[0]]) for name in costs})
