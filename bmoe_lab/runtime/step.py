"""What a run tells of itself after each graph evaluation, while it is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from bmoe_lab.schema import Phase

if TYPE_CHECKING:
    from bmoe_lab.runtime.account import PhaseTotals

__all__ = ["Step", "StepTeller"]


@dataclass(frozen=True, eq=False)
class Step:
    """One finished graph evaluation of a run, and the run's sums up to it.

    ``on_step`` of :meth:`bmoe_lab.Session.generate` and :meth:`bmoe_lab.Session.score` is called
    with one after every evaluation. An evaluation that was stopped half-way has no step, as it has
    no rows in the trace.

    Attributes
    ----------
    batch : int
        Index of the evaluation in its run: the trace's ``batch``.
    phase : {"prefill", "decode"}
    n_token : int
        Tokens of this evaluation: one in decode, up to a micro-batch in prefill.
    n_done, n_planned : int
        Tokens of this phase that were evaluated so far, and that will be if nothing ends the run
        early. A run of `n_predict` tokens plans one less in decode: nothing follows its last token,
        so that is not evaluated. A score counts the tokens of all its windows.
    prefill, decode : PhaseTotals
        Running sums per phase, as :class:`bmoe_lab.run.Summary` has them at the end: ``n_token``,
        ``lookups``, ``hits``, ``read_bytes``, ``wall_s``, ``hit_rate`` and more. They are never
        added up: a prefill evaluation serves many tokens with one read of an expert.
    lookups, misses : ndarray
        int64 of shape (layer,): of this evaluation, one lookup per distinct expert of a layer.
    read_bytes : ndarray
        int64 of shape (layer,), bytes: what this evaluation read.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> steps = []
    >>> with bl.Session(bl.datasets.demo_model(), cache="4 MiB", n_ctx=256, n_threads=1) as session:
    ...     run = session.generate("In the beginning", n_predict=4, on_step=steps.append)
    >>> [(step.phase, step.n_token, step.n_done, step.n_planned) for step in steps[1:]]
    [('decode', 1, 1, 3), ('decode', 1, 2, 3), ('decode', 1, 3, 3)]
    >>> steps[-1].decode == run.summary.decode
    True
    """

    batch: int
    phase: Literal["prefill", "decode"]
    n_token: int
    n_done: int
    n_planned: int
    prefill: PhaseTotals
    decode: PhaseTotals
    lookups: npt.NDArray[np.int64]
    misses: npt.NDArray[np.int64]
    read_bytes: npt.NDArray[np.int64]

    @property
    def totals(self) -> PhaseTotals:
        """The running sums of this step's own phase."""
        return self.prefill if self.phase == "prefill" else self.decode


class StepTeller:
    """Collects what the layers of an evaluation did, and calls the user's function with it.

    Parameters
    ----------
    on_step : callable
        Takes a :class:`Step`.
    n_layer : int
    """

    def __init__(self, on_step: Callable[[Step], None], n_layer: int) -> None:
        self._on_step = on_step
        self._n_layer = n_layer
        self._planned: dict[int, int] = {}
        self.begin()

    def plan(self, *, prefill: int, decode: int) -> None:
        """Say how many tokens the run will evaluate in each phase."""
        self._planned = {Phase.prefill: prefill, Phase.decode: decode}

    def begin(self) -> None:
        """Forget the loads of an evaluation that did not end."""
        # New for every evaluation: the last ones belong to the step that was given away.
        self._loads = np.zeros((3, self._n_layer), np.int64)

    def load(self, layer: int, lookups: int, misses: int, read_bytes: int) -> None:
        """Count one layer's load."""
        self._loads[:, layer] = lookups, misses, read_bytes

    def end(
        self, phase: int, n_token: int, batch: int, totals: Callable[[int], PhaseTotals]
    ) -> None:
        """Tell of the evaluation that ended."""
        self._loads.flags.writeable = False
        lookups, misses, read_bytes = self._loads
        # Copies: the run goes on counting in its own.
        sums = {p: replace(totals(p)) for p in (Phase.prefill, Phase.decode)}
        self._on_step(
            Step(
                batch=batch,
                phase="prefill" if phase == Phase.prefill else "decode",
                n_token=n_token,
                n_done=sums[Phase(phase)].n_token,
                n_planned=self._planned.get(phase, sums[Phase(phase)].n_token),
                prefill=sums[Phase.prefill],
                decode=sums[Phase.decode],
                lookups=lookups,
                misses=misses,
                read_bytes=read_bytes,
            )
        )
