"""Routings made up for tests of policies."""

import numpy as np

from bmoe_lab.routing import Engine, ModelFacts, Routing
from bmoe_lab.routing.base import DECODE

FACTS = ModelFacts(
    n_layer=2, n_expert=8, n_expert_used=4, cache_budget=2**20, token_cycle_bytes=2**19
)


def seen(ids, *, weights=None, scores=None, resident=(), n_expert=8, kind="other", layer=0):
    """Return what one layer chose for one token, or for each row of `ids`."""
    ids = np.atleast_2d(np.array(ids, dtype=np.int32))
    mask = np.zeros(n_expert, dtype=bool)
    mask[list(resident)] = True
    as_rows = lambda values: None if values is None else np.atleast_2d(np.float32(values))  # noqa: E731
    return Routing(
        layer=layer,
        block=layer,
        phase=DECODE,
        positions=np.arange(len(ids), dtype=np.int32),
        ids=ids,
        scores=as_rows(scores),
        score_kind=kind,
        weights=as_rows(weights),
        resident=mask,
        expert_bytes=100,
        seed=3,
    )


def rough_scores(rng, kind, n_row=5, n_expert=8, n_used=4):
    """Return ids and scores of few distinct values, some of them no numbers: many ties."""
    scores = rng.integers(0 if kind == "softmax" else -3, 4, size=(n_row, n_expert))
    scores = scores.astype(np.float32)
    scores[rng.random(scores.shape) < 0.15] = rng.choice([-np.inf, np.nan])
    # Ties are broken by chance, as a router's own sort may break them in any way.
    order = np.lexsort((rng.random(scores.shape), -np.nan_to_num(scores, nan=-np.inf)), axis=1)
    return order[:, :n_used].astype(np.int32), scores


def dropped(policy, routing):
    """Return the slots that the policy drops from the first row."""
    weighing = Engine(policy, seed=3).weigh(routing)
    return [] if weighing is None else np.flatnonzero(weighing.action[0] == 1).tolist()


def select(policy, routing):
    """Return the ids that run in the first row; None if the router's choice stands."""
    selection = Engine(policy, seed=3).select(routing)
    return None if selection is None else selection.ids[0].tolist()
