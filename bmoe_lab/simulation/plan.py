"""What a sweep is asked for: checked, labelled, laid out as cells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import PolicyError, SettingsError
from bmoe_lab.residency import ResidencyPolicy, token_cycle
from bmoe_lab.residency import get as residency_class
from bmoe_lab.routing import ModelFacts, RoutingPolicy
from bmoe_lab.routing.engine import as_policy
from bmoe_lab.simulation.budget_grid import Budgets, check_budgets
from bmoe_lab.simulation.stream import cache_facts

__all__ = [
    "NO_ROUTING",
    "Cell",
    "Plan",
    "Source",
    "TraceFacts",
    "Traces",
    "make_plan",
    "opened",
    "trace_facts",
]

Source: TypeAlias = xr.Dataset | str | os.PathLike[str]
Traces: TypeAlias = Source | Mapping[str, Source]

#: Label of the cells without a routing policy.
NO_ROUTING = "none"


@dataclass(frozen=True)
class Cell:
    """Position of one combination in the result.

    Attributes
    ----------
    trace, residency, budget, routing : int
    """

    trace: int
    residency: int
    budget: int
    routing: int

    @property
    def index(self) -> tuple[int, int, int, int]:
        """Place in an array over (trace, residency, budget, routing)."""
        return self.trace, self.residency, self.budget, self.routing


@dataclass(frozen=True)
class TraceFacts:
    """What a sweep knows of a trace before it reads the routing.

    Attributes
    ----------
    key_bytes : numpy.ndarray of int64, shape (key,)
        Bytes of each (layer, expert).
    n_layer, n_expert, n_token : int
        Extent.
    token_cycle_bytes : int
        Bytes that one token asks for.
    routing : ModelFacts
        What routing policies judge themselves by; its budget is to be set.
    score_kind_known : bool
        Whether the trace says which scores are the output of a softmax.
    """

    key_bytes: npt.NDArray[np.int64]
    n_layer: int
    n_expert: int
    n_token: int
    token_cycle_bytes: int
    routing: ModelFacts
    score_kind_known: bool


@dataclass(frozen=True)
class Plan:
    """A sweep, checked.

    Attributes
    ----------
    sources : dict of str to Dataset or Path
        Traces by label.
    residency : dict of str to ResidencyPolicy
        Residency policies by label, without budgets.
    routing : dict of str to RoutingPolicy or None
        Routing policies by label.
    budgets : numpy.ndarray of int64
        All budgets, ascending.
    wanted : numpy.ndarray of bool, shape (trace, budget)
        Which budgets each trace is swept over.
    """

    sources: dict[str, xr.Dataset | Path]
    residency: dict[str, ResidencyPolicy]
    routing: dict[str, RoutingPolicy | None]
    budgets: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.bool_]
    _made: dict[Cell, tuple[ResidencyPolicy, RoutingPolicy | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of (trace, residency, budget, routing)."""
        return len(self.sources), len(self.residency), self.budgets.size, len(self.routing)

    def cells(self, trace: int) -> Iterator[Cell]:
        """Yield the cells of one trace, policy by policy."""
        for routing in range(len(self.routing)):
            for residency in range(len(self.residency)):
                for budget in np.flatnonzero(self.wanted[trace]).tolist():
                    yield Cell(trace, residency, budget, routing)

    def policies(self, cell: Cell) -> tuple[ResidencyPolicy, RoutingPolicy | None]:
        """Return the policies of a cell, the residency policy as its own clone with its budget."""
        made = self._made.get(cell)
        if made is None:
            policy = list(self.residency.values())[cell.residency]
            params = {**policy.get_params(), "budget": int(self.budgets[cell.budget])}
            made = type(policy)(**params), list(self.routing.values())[cell.routing]
            self._made[cell] = made
        return made

    def label(self, cell: Cell) -> str:
        """Return the combination in words."""
        names = [list(self.sources)[cell.trace], list(self.residency)[cell.residency]]
        routing = list(self.routing)[cell.routing]
        words = f"trace {names[0]!r}, residency {names[1]!r}, budget {self.budgets[cell.budget]}"
        return words if routing == NO_ROUTING else f"{words}, routing {routing!r}"


def make_plan(
    traces: Traces,
    residency: str | ResidencyPolicy | Sequence[str | ResidencyPolicy],
    budgets: Budgets | Mapping[str, Budgets],
    routing: RoutingPolicy | Sequence[RoutingPolicy | None] | None,
) -> Plan:
    """Return what to sweep, or say what of it cannot be.

    Raises
    ------
    SettingsError
        If a list is empty or holds something twice, or a budget is set twice.
    UnknownNameError
        If a residency policy's name is not known.
    PolicyError
        If something is not a policy.
    """
    sources = _sources(traces)
    sizes, wanted = _budgets(budgets, list(sources))
    return Plan(sources, _residency(residency), _routing(routing), sizes, wanted)


def opened(source: xr.Dataset | Path) -> xr.Dataset:
    """Return a trace whose arrays stay where they are until they are read."""
    if isinstance(source, xr.Dataset):
        return source
    from bmoe_lab.recording import open_trace

    trace = open_trace(source, memory_limit=0)
    if isinstance(trace, xr.DataTree):
        raise SettingsError(
            f"traces must be single traces; got the comparison {str(source)!r}. "
            "Pass its runs: {name: node.to_dataset() for name, node in tree.children.items()}."
        )
    return trace


def trace_facts(trace: xr.Dataset) -> TraceFacts:
    """Return what is known of a trace before its routing is read."""
    key_bytes, n_layer, n_expert = cache_facts(trace)
    used = np.asarray(trace["n_expert_used"].values)
    cycle = token_cycle(np.asarray(trace["expert_bytes"].values), used)
    return TraceFacts(
        key_bytes=key_bytes,
        n_layer=n_layer,
        n_expert=n_expert,
        n_token=trace.sizes["token"],
        token_cycle_bytes=cycle,
        routing=ModelFacts(
            n_layer=n_layer,
            n_expert=n_expert,
            n_expert_used=int(used.max()),
            cache_budget=None,
            token_cycle_bytes=cycle,
            scores_available="router_score" in trace.variables,
            weights_available="weight_chosen" in trace.variables,
        ),
        score_kind_known="score_is_softmax" in trace.variables,
    )


def _sources(traces: Traces) -> dict[str, xr.Dataset | Path]:
    if isinstance(traces, xr.DataTree):
        raise SettingsError(
            "traces must be a trace or a dict of them; got a DataTree. Pass "
            "{name: node.to_dataset() for name, node in tree.children.items()}."
        )
    # A Dataset is a mapping of its variables.
    if isinstance(traces, Mapping) and not isinstance(traces, xr.Dataset):
        if not traces:
            raise SettingsError("traces must hold at least one trace; got an empty dict.")
        return {str(name): _source(source) for name, source in traces.items()}
    one = _source(traces)
    if isinstance(one, Path):
        return {one.stem: one}
    return {str(one.attrs.get("model_name", "trace")): one}


def _source(source: Any) -> xr.Dataset | Path:
    if isinstance(source, xr.Dataset):
        return source
    if isinstance(source, str | os.PathLike):
        return Path(source)
    raise SettingsError(
        "traces must be a trace, the path of one, or a dict of these by name; got "
        f"{type(source).__name__}."
    )


def _listed(value: Any, what: str) -> list[Any]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not items:
        raise SettingsError(f"{what} must hold at least one policy; got an empty list.")
    return items


def _once(labels: list[str], what: str) -> None:
    for label in labels:
        if labels.count(label) > 1:
            raise SettingsError(f"{what} must name each policy once; got {label!r} twice.")


def _residency(asked: Any) -> dict[str, ResidencyPolicy]:
    labels, policies = [], []
    for item in _listed(asked, "residency"):
        policy = residency_class(item)() if isinstance(item, str) else item
        if not isinstance(policy, ResidencyPolicy):
            raise PolicyError(
                f"residency must hold residency policies or their names; got {item!r}. "
                "For example bmoe_lab.residency.LRU()."
            )
        if "budget" not in policy.get_params():
            raise PolicyError(
                f"a residency policy must have the parameter 'budget' to be swept; got {policy!r}. "
                "Add it to its __init__."
            )
        if policy.budget is not None:
            raise SettingsError(
                f"budget must be left to the sweep; got {policy!r}. Give sizes as budgets=[...]."
            )
        labels.append(item if isinstance(item, str) else repr(policy))
        policies.append(policy.clone())
    _once(labels, "residency")
    return dict(zip(labels, policies, strict=True))


def _routing(asked: Any) -> dict[str, RoutingPolicy | None]:
    items = _listed(asked, "routing")
    for item in items:
        if item is not None:
            as_policy(item).validate()
    labels = [NO_ROUTING if item is None else repr(item) for item in items]
    _once(labels, "routing")
    return dict(zip(labels, items, strict=True))


def _budgets(asked: Any, names: list[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    if isinstance(asked, Mapping):
        if set(asked) != set(names):
            raise SettingsError(
                f"budgets must have one entry per trace, {names}; got {sorted(map(str, asked))}."
            )
        each = [check_budgets(asked[name]) for name in names]
    else:
        each = [check_budgets(asked)] * len(names)
    union = np.unique(np.concatenate(each))
    return union, np.stack([np.isin(union, one) for one in each])
