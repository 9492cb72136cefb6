"""One token of a run beside the lossless one: what it cost, what was changed, what ran instead."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from bmoe_lab.comparison.tree import runs
from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.schema import Action

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TokenDetail", "token_detail"]

_RAN_AS_CHOSEN = (Action.kept, Action.not_routed)


@dataclass(frozen=True)
class TokenDetail:
    """What a run did at one token.

    The routing at a token acts on what is predicted after it: ``kl`` of this token comes from what
    ran before.

    Attributes
    ----------
    arm : str
        The run's name in the tree.
    token : int
        Place along the trace.
    window, position : int
        Text window; place in the context.
    piece : str or None
        Text of the token; None if it was not recorded.
    kl, nll, nll_lossless, delta_nll : float
        In nat; NaN where not scored, or unknown.
    top1_agree : bool or None
        Whether the most likely token is the lossless one; None where not scored.
    routing_agreement : float
        Share of the lossless experts that also ran; NaN if unknown.
    read_bytes, read_bytes_lossless : int or None
        Expert bytes that this token read, in the run and in the lossless one; None if unknown.
    changes : pandas.DataFrame
        One row per slot that the policy changed: ``layer``, ``slot``, ``action`` (in words),
        ``expert_chosen``, ``weight_chosen``, ``expert_applied``, ``weight_applied``,
        ``read_bytes``; what the trace does not know is absent.
    routing : pandas.DataFrame
        One row per layer that routed in both runs: ``layer``, ``agreement`` (share of the lossless
        experts that ran), ``lost`` and ``gained`` (tuples of expert ids: only lossless, only here).
    """

    arm: str
    token: int
    window: int
    position: int
    piece: str | None
    kl: float
    nll: float
    nll_lossless: float
    delta_nll: float
    top1_agree: bool | None
    routing_agreement: float
    read_bytes: int | None
    read_bytes_lossless: int | None
    changes: pd.DataFrame
    routing: pd.DataFrame

    @property
    def scored(self) -> bool:
        """Whether the token was scored in both runs."""
        return not (math.isnan(self.nll) or math.isnan(self.nll_lossless))


def token_detail(tree: xr.DataTree, arm: str, token: Any) -> TokenDetail:
    """Return what a run of a comparison did at one token, beside the lossless run.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.
    arm : str
        The run's name in the tree (``tree.children``).
    token : int
        Place along the trace; negative from the end.

    Returns
    -------
    TokenDetail

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    SettingsError
        If there is no such token.
    UnknownNameError
        If there is no such run.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> text = bl.datasets.heldout("kjv")[0].text[:200]
    >>> with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
    ...     tree = bl.compare(
    ...         session, text, policies=[bl.routing.DropCold(0.75)], progress=False
    ...     )
    >>> detail = token_detail(tree, "DropCold(frac=0.75)", 30)
    >>> set(detail.changes["action"])
    {'dropped'}
    """
    named = runs(tree)
    nodes = list(tree.children)
    if arm not in nodes:
        raise unknown_name("arm", arm, nodes)
    trace, base = named[nodes.index(arm)][1], named[0][1]
    size = trace.sizes["token"]
    if isinstance(token, bool) or not isinstance(token, numbers.Integral):
        raise SettingsError(f"token must be a whole number; got {token!r}. Use 0 to {size - 1}.")
    if not -size <= int(token) < size:
        raise SettingsError(
            f"token must be a place along the trace, 0 to {size - 1}; got {token!r}. "
            "See tree.children for the runs and their sizes."
        )
    at = int(token) % size
    here = trace.isel(token=at).load()
    there = base.isel(token=at).load()
    if "token_id" in here.coords and int(here["token_id"]) != int(there["token_id"]):
        raise SchemaError(
            "runs of a comparison must read the same tokens; got token ids "
            f"{int(there['token_id'])} and {int(here['token_id'])} at token {at}. Compare again."
        )
    nll, nll_lossless = _number(here, "nll"), _number(there, "nll")
    unknown = math.isinf(nll) and math.isinf(nll_lossless)
    agrees = _number(here, "top1_agree")
    return TokenDetail(
        arm=arm,
        token=at,
        window=int(here["turn"]),
        position=int(here["position"]),
        piece=str(here["piece"].values) if "piece" in here.coords else None,
        kl=_number(here, "kl"),
        nll=nll,
        nll_lossless=nll_lossless,
        delta_nll=math.nan if unknown else nll - nll_lossless,
        top1_agree=None if math.isnan(agrees) else bool(agrees),
        routing_agreement=_number(here, "routing_agreement"),
        read_bytes=_bytes(here),
        read_bytes_lossless=_bytes(there),
        changes=_changes(here),
        routing=_routing(here, there),
    )


def _number(cell: xr.Dataset, name: str) -> float:
    return float(cell[name]) if name in cell else math.nan


def _bytes(cell: xr.Dataset) -> int | None:
    return int(cell["read_bytes"].values.sum(dtype=np.int64)) if "read_bytes" in cell else None


def _changes(cell: xr.Dataset) -> pd.DataFrame:
    import pandas as pd

    action = cell["action"].values
    layer, slot = np.nonzero(~np.isin(action, _RAN_AS_CHOSEN))
    columns: dict[str, Any] = {
        "layer": layer,
        "slot": slot,
        "action": [Action(code).name for code in action[layer, slot].tolist()],
    }
    for name in (
        "expert_chosen",
        "weight_chosen",
        "expert_applied",
        "weight_applied",
        "read_bytes",
    ):
        if name in cell:
            columns[name] = cell[name].values[layer, slot]
    return pd.DataFrame(columns)


def _routing(here: xr.Dataset, there: xr.Dataset) -> pd.DataFrame:
    import pandas as pd

    chosen, ran = there["expert_chosen"].values, here["expert_applied"].values
    wanted = chosen >= 0
    runs_here = (ran >= 0) & (here["action"].values != Action.dropped)
    rows = []
    for layer in np.flatnonzero(wanted.any(axis=1) & (ran >= 0).any(axis=1)).tolist():
        lossless = set(chosen[layer][wanted[layer]].tolist())
        now = set(ran[layer][runs_here[layer]].tolist())
        rows.append(
            {
                "layer": layer,
                "agreement": len(lossless & now) / len(lossless),
                "lost": tuple(sorted(lossless - now)),
                "gained": tuple(sorted(now - lossless)),
            }
        )
    return pd.DataFrame(rows, columns=["layer", "agreement", "lost", "gained"])
