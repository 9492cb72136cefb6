"""The account of one run: its policy with what it did, its loads, its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bmoe_lab.routing import Engine

if TYPE_CHECKING:
    from bmoe_lab.recording import Recorder
    from bmoe_lab.routing import Counters, Routing, RoutingPolicy
    from bmoe_lab.routing.engine import Selection, Weighing
    from bmoe_lab.runtime.step import StepTeller
    from bmoe_lab.streaming.streamer import StreamLoad

__all__ = ["PhaseTotals", "RunAccount"]


@dataclass
class PhaseTotals:
    """Sums over the evaluations of one phase.

    Times are seconds, ``hits`` and ``lookups`` count one lookup per distinct expert of a layer
    and evaluation.
    """

    n_token: int = 0
    n_evaluation: int = 0
    lookups: int = 0
    hits: int = 0
    read_bytes: int = 0
    evictions: int = 0
    wall_s: float = 0.0
    io_s: float = 0.0
    manage_s: float = 0.0
    callback_s: float = 0.0
    major_faults: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; NaN without a lookup."""
        return self.hits / self.lookups if self.lookups else float("nan")

    @property
    def rest_s(self) -> float:
        """Wall time less reading, management and callback: computing, as a residual."""
        return self.wall_s - self.io_s - self.manage_s - self.callback_s


@dataclass
class RunAccount:
    """What one run was asked to do, and what has happened in it so far.

    Parameters
    ----------
    policy : RoutingPolicy or None
        The run works with a clone.
    recorder : Recorder or None
        None for ``record="off"``.
    level : {"off", "ids", "scores", "scores16"}
    seed : int
    shape : tuple of int
        Largest (row, slot) of an evaluation.
    keeps_cache : bool
        Whether experts stay resident from before the run and between its windows.
    piece : callable, optional
        Display text of a token id; left out, text is not recorded.
    steps : StepTeller, optional
        Whom to tell of every evaluation.
    """

    policy: RoutingPolicy | None
    recorder: Recorder | None
    level: str
    seed: int
    shape: tuple[int, int]
    keeps_cache: bool = False
    piece: Callable[[int], str] | None = None
    steps: StepTeller | None = None
    totals: dict[int, PhaseTotals] = field(default_factory=dict)
    policy_failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.kept = np.zeros(self.shape, np.uint8)
        self.unknown = np.full(self.shape, np.nan, np.float32)
        self.engine = Engine(self.policy, seed=self.seed)
        self.selects = self.engine.selects
        self.weighs = self.engine.weighs
        # A policy in Python gets the scores whether it says that it needs them or not.
        self.wants_scores = self.selects or "scores" in self.engine.policy.needs
        self.begin_evaluation()

    @property
    def counters(self) -> Counters:
        """What the policy did so far."""
        return self.engine.counters

    @property
    def lossless(self) -> bool:
        """Whether nothing is allowed to change the routing."""
        return self.engine.policy.lossless

    def pieces(self, tokens: np.ndarray) -> list[str] | None:
        """Return the display text of each token, None if text is not recorded."""
        return None if self.piece is None else [self.piece(int(token)) for token in tokens]

    @property
    def records(self) -> bool:
        """Whether routing is recorded."""
        return self.recorder is not None

    @property
    def records_scores(self) -> bool:
        """Whether router scores are recorded."""
        return self.level in ("scores", "scores16")

    def policy_active(self, phase: int) -> bool:
        """Whether the policy may act in `phase`; after it failed it may not."""
        return self.policy_failure is None and self.engine.acts_in(phase)

    def select(self, routing: Routing) -> Selection | None:
        """Let the policy choose; None if the router's choice stands."""
        if self.policy_failure is not None:
            return None
        try:
            return self.engine.select(routing)
        except Exception as error:  # the user's; the run ends with it after this evaluation
            self.policy_failure = error
            return None

    def weigh(self, routing: Routing) -> Weighing | None:
        """Let the policy weigh; None if the weights stand."""
        if self.policy_failure is not None:
            return None
        try:
            return self.engine.weigh(routing)
        except Exception as error:  # the user's; the run ends with it after this evaluation
            self.policy_failure = error
            return None

    def phase(self, phase: int) -> PhaseTotals:
        """Return the totals of a phase, made on first use."""
        if phase not in self.totals:
            self.totals[int(phase)] = PhaseTotals()
        return self.totals[phase]

    def begin_evaluation(self) -> None:
        """Count loads from zero: those of an evaluation that did not end are forgotten."""
        self._lookups = self._hits = self._read_bytes = 0
        if self.steps is not None:
            self.steps.begin()

    def count_load(
        self,
        layer: int,
        expert_bytes: int,
        applied: np.ndarray,
        load: StreamLoad,
        *,
        repeats: bool,
    ) -> None:
        """Count one layer's load; `repeats` says whether a row may name an expert twice."""
        missing = load.n_missing
        if len(applied) == 1:
            # Experts of one routing are distinct, but for the stand-ins of dropped slots.
            distinct = len(set(applied[0].tolist())) if repeats else applied.shape[1]
        else:
            distinct = len(np.unique(applied))
        self._lookups += distinct
        self._hits += distinct - missing
        self._read_bytes += missing * expert_bytes
        if self.steps is not None:
            self.steps.load(layer, distinct, missing, missing * expert_bytes)

    def end_evaluation(self, phase: int, n_token: int, costs: Mapping[str, float]) -> None:
        """Add the evaluation that ended to the totals of its phase."""
        totals = self.phase(phase)
        totals.n_token += n_token
        totals.n_evaluation += 1
        totals.lookups += self._lookups
        totals.hits += self._hits
        totals.read_bytes += self._read_bytes
        totals.evictions += int(costs["evictions"])
        totals.wall_s += costs["wall_s"]
        totals.io_s += costs["io_s"]
        totals.manage_s += costs["manage_s"]
        totals.callback_s += costs["callback_s"]
        totals.major_faults += costs["major_faults"]
