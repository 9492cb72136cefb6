"""The account of one run: its policy with what it did, its loads, its times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe_lab.routing import engine
from bmoe_lab.routing.counters import Counters
from bmoe_lab.schema import Phase

if TYPE_CHECKING:
    from bmoe_lab.recording import Recorder
    from bmoe_lab.routing import Routing, RoutingPolicy
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
        A clone that belongs to this run.
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
    """

    policy: RoutingPolicy | None
    recorder: Recorder | None
    level: str
    seed: int
    shape: tuple[int, int]
    keeps_cache: bool = False
    piece: Callable[[int], str] | None = None
    counters: Counters = field(default_factory=Counters)
    totals: dict[int, PhaseTotals] = field(default_factory=dict)
    policy_failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.kept = np.zeros(self.shape, np.uint8)
        self.unknown = np.full(self.shape, np.nan, np.float32)
        policy = self.policy
        self.selects = self.weighs = self.wants_scores = False
        self._phases: frozenset[int] = frozenset()
        if policy is not None and not policy.lossless:
            self.selects = policy.acts_at("select")
            self.weighs = policy.acts_at("weigh")
            self.wants_scores = "scores" in policy.needs
            self._phases = policy.phases

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
        return phase in self._phases and self.policy_failure is None

    def select(self, routing: Routing) -> tuple[np.ndarray, np.ndarray | None]:
        """Let the policy choose; returns the ids to run and the actions, None if unchanged."""
        assert self.policy is not None
        try:
            return engine.run_select(self.policy, routing, self.counters)
        except Exception as error:  # the user's; the run ends with it after this evaluation
            self._failed(error)
            return routing.ids, None

    def weigh(self, routing: Routing) -> Any:
        """Let the policy weigh; returns the engine's result, None if unchanged."""
        assert self.policy is not None
        try:
            return engine.run_weigh(self.policy, routing, self.counters)
        except Exception as error:  # the user's; the run ends with it after this evaluation
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        if self.policy_failure is None:
            self.policy_failure = error

    def phase(self, phase: int) -> PhaseTotals:
        """Return the totals of a phase, made on first use."""
        return self.totals.setdefault(int(phase), PhaseTotals())

    def count_load(
        self, phase: int, expert_bytes: int, applied: np.ndarray, load: StreamLoad
    ) -> None:
        """Add one load to the totals."""
        totals = self.phase(phase)
        missing = load.n_missing
        if len(applied) == 1 and phase != Phase.prefill:
            # Repeats in one row (stand-ins of dropped slots) are one lookup.
            distinct = len(set(applied[0].tolist()))
        else:
            distinct = len(np.unique(applied))
        totals.lookups += distinct
        totals.hits += distinct - missing
        totals.read_bytes += missing * expert_bytes

    @property
    def lossless(self) -> bool:
        """Whether nothing was allowed to change the routing."""
        return self.policy is None or bool(self.policy.lossless)
