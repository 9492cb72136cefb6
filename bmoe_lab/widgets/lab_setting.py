"""One setting of the policy lab: both policies and a budget; its replay in numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from bmoe_lab.errors import PolicyNeverFiredWarning, SchemaError
from bmoe_lab.plots.policy_effect import Effect, effect_of
from bmoe_lab.residency import ResidencyPolicy
from bmoe_lab.routing import Lossless, RoutingPolicy
from bmoe_lab.schema import Action
from bmoe_lab.simulation.plan import TraceFacts, trace_facts
from bmoe_lab.simulation.replaying import RECORDED, replay
from bmoe_lab.sizes import format_size

__all__ = ["Outcome", "Replays", "Setting", "outcome_of"]


_KEPT = 64


@dataclass(frozen=True)
class Setting:
    """What is replayed.

    Attributes
    ----------
    residency : ResidencyPolicy or "recorded"
        Without a budget.
    budget : int or None
        Bytes; None where the recorded residency stands.
    routing : RoutingPolicy or None
        None: what ran stands.

    Examples
    --------
    >>> from bmoe_lab.residency import LRU
    >>> Setting(LRU(), 2**20, None).label
    'LRU() 1.0 MiB'
    """

    residency: ResidencyPolicy | Literal["recorded"]
    budget: int | None
    routing: RoutingPolicy | None

    @property
    def cache(self) -> ResidencyPolicy | None:
        """The residency policy with its budget; None where the recorded residency stands."""
        if isinstance(self.residency, str):
            return None
        return type(self.residency)(**{**self.residency.get_params(), "budget": self.budget})

    @property
    def cache_label(self) -> str:
        """The cache in words."""
        if isinstance(self.residency, str):
            return "recorded residency"
        return f"{self.residency!r} {format_size(self.budget or 0)}"

    @property
    def label(self) -> str:
        """The whole setting in words."""
        return self.cache_label if self.routing is None else f"{self.routing!r}, {self.cache_label}"


@dataclass(frozen=True)
class Outcome:
    """What a replay came to.

    Attributes
    ----------
    setting : Setting
    trace : xarray.Dataset
        The replayed trace.
    effect : Effect
        Its numbers.
    fired : bool or None
        Whether the routing policy changed anything; None without one.
    counterfactual : bool
        Whether a routing policy was replayed, open loop.
    """

    setting: Setting
    trace: xr.Dataset = field(repr=False)
    effect: Effect = field(repr=False)
    fired: bool | None
    counterfactual: bool

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of :class:`bmoe_lab.plots.policy_effect.Effect`."""
        return self.effect.numbers


def outcome_of(setting: Setting, trace: xr.Dataset) -> Outcome:
    """Return what a replayed trace came to.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=16, n_layer=2, seed=0)
    >>> outcome_of(Setting("recorded", None, None), trace).counterfactual
    False
    """
    fired = None
    if setting.routing is not None and not setting.routing.lossless:
        fired = bool(trace.attrs.get("policy_fired"))
    counterfactual = bool(trace.attrs.get("counterfactual"))
    return Outcome(setting, trace, effect_of(trace), fired, counterfactual)


class Replays:
    """Replays of one trace; those made last are kept, so that what did not change costs nothing.

    Parameters
    ----------
    trace : xarray.Dataset

    Raises
    ------
    SchemaError
        If the trace cannot be replayed.

    Examples
    --------
    >>> from bmoe_lab.residency import LRU
    >>> from bmoe_lab.routing import DropCold
    >>> from bmoe_lab.testing import make_trace
    >>> replays = Replays(make_trace(n_token=32, n_layer=2, seed=0))
    >>> setting = Setting(LRU(), 100_000, DropCold(0.75))
    >>> outcome, baseline = replays.outcome(setting), replays.baseline(setting)
    >>> outcome.numbers["read_bytes_per_token"] < baseline.numbers["read_bytes_per_token"]
    True
    """

    def __init__(self, trace: xr.Dataset) -> None:
        if not trace.sizes.get("token"):
            raise SchemaError("trace must hold at least one token to be replayed; got none.")
        self.trace = trace
        self.facts: TraceFacts = trace_facts(trace)
        action = np.asarray(trace["action"].values)
        #: Whether what ran is not what the router chose: then "no routing policy" is no baseline.
        self.changed = bool(np.isin(action, [Action.dropped, Action.substituted]).any())
        self.bank_bytes = int(self.facts.key_bytes.sum())
        self._kept: list[tuple[Setting, Outcome]] = []

    def outcome(self, setting: Setting) -> Outcome:
        """Return the replay of a setting.

        Raises
        ------
        BmoeLabError
            As :func:`bmoe_lab.replay`.
        """
        for index, (known, outcome) in enumerate(self._kept):
            if known == setting:
                self._kept.append(self._kept.pop(index))
                return outcome
        outcome = outcome_of(setting, self._replayed(setting))
        self._kept = [*self._kept[-_KEPT + 1 :], (setting, outcome)]
        return outcome

    def baseline(self, setting: Setting) -> Outcome:
        """Return the router's own choice under the same residency policy and budget."""
        routing = Lossless() if self.changed else None
        return self.outcome(replace(setting, routing=routing))

    def _replayed(self, setting: Setting) -> xr.Dataset:
        if setting.residency == RECORDED and setting.routing is None:
            if "residency" not in self.trace.variables:
                raise SchemaError(
                    "trace must hold 'residency' for the recorded one to stand; got none. Choose "
                    "a residency policy."
                )
            return self.trace
        asked: dict[str, Any] = {"residency": setting.residency, "routing": setting.routing}
        if setting.residency != RECORDED:
            # Each live run and each cell of a sweep begins with an empty cache.
            asked |= {"budget": setting.budget, "start": "cold"}
        with warnings.catch_warnings():
            # Said in the widget.
            warnings.simplefilter("ignore", PolicyNeverFiredWarning)
            return replay(self.trace, **asked)
