"""Routing policies against the lossless run, over the same text, token by token.

The module is not called ``compare``: importing it would put a module where the package has the
function.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab import divergence, metrics
from bmoe_lab.comparison.logit_store import LogitStore
from bmoe_lab.comparison.tree import Arm, Kind, build_tree
from bmoe_lab.errors import (
    BmoeLabWarning,
    ComparisonError,
    ComparisonInterrupted,
    PolicyNeverFiredWarning,
    SettingsError,
    unknown_name,
)
from bmoe_lab.schema import Phase

if TYPE_CHECKING:
    from bmoe_lab.routing import RoutingPolicy
    from bmoe_lab.run import Run

__all__ = [
    "Comparison",
    "Progress",
    "compare",
]

LOSSLESS = "lossless"
NOISE_FLOOR = "lossless again"


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    Attributes
    ----------
    arm : str
        Name of the run that is on.
    index, n_arm : int
        Its number, from 0, and the number of runs planned.
    done, total : int
        Tokens scored in this run, and to score in each run.
    """

    arm: str
    index: int
    n_arm: int
    done: int
    total: int


class Scorer(Protocol):
    """What a comparison asks of a session (:class:`bmoe_lab.Session` is one)."""

    @property
    def n_vocab(self) -> int:
        """Logits per token."""

    def check(self, policy: Any) -> None:
        """See :meth:`bmoe_lab.Session.check`."""
        ...

    def windows(self, text: Any, *, n_context: int) -> list[npt.NDArray[np.int32]]:
        """Return the windows that `score` would run."""

    def score(
        self, text: Any, *, policy: Any, n_context: int, observe: Any, record: Any, seed: int
    ) -> Run:
        """Run the windows and hand every scored token's logits to `observe`."""


def compare(
    session: Scorer,
    text: str | list[str] | npt.NDArray[np.int32] | list[npt.NDArray[np.int32]],
    *,
    policies: Sequence[RoutingPolicy],
    controls: bool = False,
    noise_floor: bool = True,
    n_context: int = 16,
    record: Literal["ids", "scores", "scores16"] = "ids",
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[Progress], None] = True,
) -> xr.DataTree:
    """Return what routing policies cost in quality and save in reads, against lossless.

    Every run reads the same text, one token per graph evaluation, from an empty cache. The lossless
    run comes first; the others are compared with its logits as they go. Times are those of a single
    run each and include recording: for speed, use the benchmark.

    Parameters
    ----------
    session : Session
        An open model; its cache and residency policy serve every run.
    text : str, ndarray of int32, or list of these
        Held-out text. It is split into windows that fit the session's context; each window starts
        with an empty context and an empty cache.
    policies : sequence of RoutingPolicy
        What to compare; may be empty. Each runs as a fresh clone.
    controls : bool, default False
        After each policy that changed something, run its control: the same number of slots dropped
        (``RandomDrop``) or substituted (``RandomSubstitute``) at random, at the rate measured. It
        tells whether the policy's choice of slots is worth anything.
    noise_floor : bool, default True
        Run lossless a second time: differences below its distance from the first mean nothing. On
        one machine with one thread count it is exactly 0.
    n_context : int, default 16
        Tokens of each window that are evaluated losslessly before the policy is on. Neither they
        nor the token after them are scored.
    record : {"ids", "scores", "scores16"}, default "ids"
        Record level of every run.
    seed : int, default 0
        Seed of the random policies and of the bootstrap.
    save : str or Path, optional
        Where the comparison is written (:func:`bmoe_lab.save_trace`), anew after every finished
        run, so that a killed process loses one run at most.
    progress : bool or callable, default True
        A bar, nothing, or a function called with a :class:`Progress` about once per token, on the
        session's thread.

    Returns
    -------
    xarray.DataTree
        Root: one row per run (dim ``arm``, variables in :data:`bmoe_lab.comparison.COLUMNS`). One
        child per run: its trace with, per token, ``nll`` and ``kl`` (float64, nat), ``top1_agree``
        and ``routing_agreement`` (float64), NaN where not scored. ``bmoe_lab.tables`` prints it,
        ``bmoe_lab.report`` makes a page of it.

    Raises
    ------
    ComparisonInterrupted
        On Ctrl-C or a notebook's stop button, once the lossless run is complete: a
        :class:`KeyboardInterrupt` whose ``tree`` holds the finished runs. In a notebook, after the
        fact: ``import sys; tree = sys.last_value.tree``.
    ComparisonError
        If a later run fails (a policy that raises): ``tree`` holds the finished runs, the cause is
        the policy's own exception. A failure of the lossless run is raised as it is.
    SettingsError
        If a parameter has an impossible value, or the disk for temporary files is too small.

    Warns
    -----
    UserWarning
        If a policy never changed anything, or the text is too short for intervals.

    Notes
    -----
    Differences are paired by token; their intervals come from a moving-block bootstrap (block 16,
    2,000 draws, seeded) whose blocks do not cross windows
    (:mod:`bmoe_lab.comparison.statistics`). KL is taken over the full vocabulary in float64
    (:mod:`bmoe_lab.divergence`). Rates, hits, bytes and times are those of the tokens decoded
    under the policy, the context left out.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> text = bl.datasets.heldout("kjv")[0].text[:400]
    >>> with bl.Session(bl.datasets.demo_model(), cache="4 MiB", n_threads=1) as session:
    ...     tree = bl.compare(
    ...         session, text, policies=[bl.routing.DropCold(0.75)], progress=False
    ...     )
    >>> list(tree.children)
    ['lossless', 'lossless again', 'DropCold(frac=0.75)']
    """
    if not isinstance(policies, list | tuple):
        raise SettingsError(
            f"policies must be a list of routing policies; got {policies!r}. Put it in a list."
        )
    # Before anything takes time: a policy that cannot run is the caller's slip.
    for policy in policies:
        session.check(policy)
    path = None if save is None else _writable(save)
    comparison = Comparison(session, text, n_context=n_context, record=record, seed=seed)
    n_arm = 1 + int(noise_floor) + len(policies) * (2 if controls else 1)
    with comparison, _reporting(progress, comparison.n_scored, n_arm) as report:
        comparison.on_progress = report
        try:
            _run_all(comparison, policies, controls, noise_floor, path)
        except KeyboardInterrupt as error:
            if not comparison.arms:
                raise
            tree = comparison.tree(failed_arm=comparison.current)
            raise ComparisonInterrupted(_stopped("interrupted", comparison, path), tree) from error
        except Exception as error:
            if not comparison.arms:
                raise
            tree = comparison.tree(failed_arm=comparison.current)
            what = f"failed ({type(error).__name__}: {error})"
            raise ComparisonError(_stopped(what, comparison, path), tree) from error
    return comparison.tree(complete=True)


def _run_all(
    comparison: Comparison,
    policies: Sequence[Any],
    controls: bool,
    noise_floor: bool,
    path: Path | None,
) -> None:
    """Make every run, and write the comparison after each."""

    def keep(complete: bool = False) -> None:
        if path is not None:
            # Imported here: a comparison that is not saved needs no file formats.
            from bmoe_lab.recording import save_trace

            save_trace(comparison.tree(complete=complete), path)

    comparison.run(name=LOSSLESS, kind="lossless")
    if noise_floor:
        keep()
        comparison.run(name=NOISE_FLOOR, kind="noise floor")
    for policy in policies:
        keep()
        arm = comparison.run(policy, name=repr(policy), kind="policy")
        if controls and _control(policy, comparison.counters_of(arm)) is not None:
            keep()
            comparison.run_control(arm)
    keep(complete=True)


class Comparison:
    """A comparison under way: runs are added one by one, the tree can be had at any time.

    :func:`compare` is this in one call. Use the class to add runs as results come in.

    Parameters
    ----------
    session, text, n_context, record, seed
        As for :func:`compare`.

    Attributes
    ----------
    arms : list of Arm
        The finished runs.
    n_scored : int
        Tokens scored in each run.
    warnings : list of str
        What a reader of the result should know.
    """

    def __init__(
        self,
        session: Scorer,
        text: Any,
        *,
        n_context: int = 16,
        record: str = "ids",
        seed: int = 0,
    ) -> None:
        if record not in ("ids", "scores", "scores16"):
            raise unknown_name("record", record, ["ids", "scores", "scores16"])
        self.session = session
        self.n_context = n_context
        self.record = record
        self.seed = seed
        self.windows = session.windows(text, n_context=n_context)
        self.n_scored = sum(max(0, len(window) - n_context - 1) for window in self.windows)
        self.arms: list[Arm] = []
        self.warnings: list[str] = []
        self.current = ""
        self.on_progress: Callable[[str, int, int], None] = lambda name, index, done: None
        self._counters: list[Any] = []
        self._policies: list[Any] = []
        self._store = LogitStore(self.n_scored, session.n_vocab)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the lossless logits; no more runs can be added. Calling it again does nothing."""
        self._store.close()

    def run(self, policy: Any = None, *, name: str, kind: Kind, control_of: int = -1) -> Arm:
        """Run one policy (None: lossless) over the text and add it; the first must be lossless.

        Returns
        -------
        Arm
        """
        self.current = name
        first = not self.arms
        if first and kind != "lossless":
            raise SettingsError(
                f"the first run must be lossless; got {name!r}. Run it with policy=None first."
            )
        observer = _Baseline(self._store) if first else _Against(self._store, self.n_scored)
        index = len(self.arms)
        self.on_progress(name, index, 0)

        def observe(
            window: int, position: int, token: int, logits: npt.NDArray[np.float32]
        ) -> None:
            observer.add(window, position, token, logits)
            self.on_progress(name, index, len(observer.where))

        with warnings.catch_warnings():
            # Said once, by the comparison, with its own words.
            warnings.simplefilter("ignore", PolicyNeverFiredWarning)
            run = self.session.score(
                self.windows,
                policy=policy,
                n_context=self.n_context,
                observe=observe,
                record=self.record,
                seed=self.seed,
            )
        trace = self._annotate(run, observer)
        counters = None if policy is None else run.summary.counters
        arm = Arm(
            name=name,
            kind=kind,
            trace=trace,
            fired=None if counters is None else bool(counters.fired),
            changed_rate=float("nan") if counters is None else float(counters.rate),
            control_of=control_of,
        )
        self.arms.append(arm)
        self._counters.append(counters)
        self._policies.append(policy)
        self._caution(arm, counters)
        return arm

    def run_control(self, arm: Arm) -> Arm | None:
        """Run the control of a finished policy: as many slots, chosen at random.

        Returns
        -------
        Arm or None
            None if there is nothing to control: the policy never fired, or it did not drop or
            substitute (or did both).
        """
        index = self._index(arm)
        policy = _control(self._policies[index], self._counters[index])
        if policy is None:
            return None
        return self.run(policy, name=repr(policy), kind="control", control_of=index)

    def counters_of(self, arm: Arm) -> Any:
        """Return what the policy of a finished run counted; None without a policy."""
        return self._counters[self._index(arm)]

    def _index(self, arm: Arm) -> int:
        return next(i for i, other in enumerate(self.arms) if other is arm)

    def tree(self, *, complete: bool = False, failed_arm: str = "") -> xr.DataTree:
        """Return the comparison of the runs finished so far.

        Parameters
        ----------
        complete : bool, default False
            Whether these are all the runs that were planned.
        failed_arm : str, optional
            The run that did not finish.
        """
        if not self.arms:
            raise SettingsError(
                "a comparison must hold the lossless run; got no finished run. Run it first."
            )
        attrs: dict[str, Any] = {
            "comparison": 1,
            "complete": int(complete),
            "n_context": self.n_context,
            "n_window": len(self.windows),
            "record": self.record,
            "seed": self.seed,
            "repeats": 1,
            "repeats_note": "each policy ran once: quality is deterministic, times are not",
        }
        if self.warnings:
            attrs["warnings"] = json.dumps(self.warnings)
        if failed_arm:
            attrs["failed_arm"] = failed_arm
        return build_tree(self.arms, attrs, seed=self.seed)

    def _annotate(self, run: Run, observer: _Baseline | _Against) -> xr.Dataset:
        """Return the run's trace with what was measured for each token."""
        assert run.trace is not None  # the record level is never "off" here
        trace = run.trace.copy()
        if len(observer.where) != self.n_scored:
            raise SettingsError(
                f"every run must score the same {self.n_scored} tokens; got "
                f"{len(observer.where)}. Do not stop a session while it compares."
            )
        rows = _rows(trace, observer.where)
        scored = {
            name: _spread(values, rows, trace.sizes["token"])
            for name, values in observer.columns().items()
        }
        for name, values in scored.items():
            trace[name] = ("token", values, dict(_TOKEN_ATTRS[name]))
        if self.arms:
            agreement = metrics.routing_agreement(trace, self.arms[0].trace, by="token")
            decode = np.flatnonzero(trace["phase"].values == Phase.decode)
            trace["routing_agreement"] = (
                "token",
                _spread(agreement.values, decode, trace.sizes["token"]),
                dict(_TOKEN_ATTRS["routing_agreement"]),
            )
        return trace

    def _caution(self, arm: Arm, counters: Any) -> None:
        if arm.kind == "lossless" and self.n_scored < 32:
            self._warn(
                f"only {self.n_scored} tokens are scored, too few for intervals: use a longer text"
            )
        if arm.kind == "noise floor":
            base = self.arms[0].trace
            largest = float(np.nanmax(arm.trace["kl"].values))
            if largest > 0 or not np.array_equal(
                arm.trace["nll"].values, base["nll"].values, equal_nan=True
            ):
                self._warn(
                    f"two lossless runs differ (KL up to {largest:.3g} nat): smaller differences "
                    "mean nothing here"
                )
        if arm.fired is False and not int(arm.trace.attrs["lossless"]):
            self._warn(
                f"{arm.name} never fired: it looked at {counters.examined} slots and changed "
                "none, so its run equals the lossless one",
                PolicyNeverFiredWarning,
            )

    def _warn(self, message: str, category: type[Warning] = BmoeLabWarning) -> None:
        self.warnings.append(message)
        warnings.warn(message, category, stacklevel=4)


_TOKEN_ATTRS = {
    "nll": {
        "units": "nat",
        "long_name": "negative log-probability of this token given those before; NaN: not scored",
    },
    "kl": {
        "units": "nat",
        "long_name": "KL(lossless || run) of the distribution that predicts this token",
    },
    "top1_agree": {
        "units": "1",
        "long_name": "1 if the most likely token is the lossless one, 0 if not",
    },
    "routing_agreement": {
        "units": "1",
        "long_name": "share of the lossless choice of experts that also ran for this token",
    },
}


class _Baseline:
    """Takes the lossless logits down."""

    def __init__(self, store: LogitStore) -> None:
        self.store = store
        self.where: list[tuple[int, int]] = []
        self.nll: list[float] = []

    def add(self, window: int, position: int, token: int, logits: npt.NDArray[np.float32]) -> None:
        self.store.append(logits)
        self.nll.append(divergence.token_loss(logits, token).nll)
        self.where.append((window, position))

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        return {"nll": np.array(self.nll)}


class _Against:
    """Compares logits with the lossless ones as they come."""

    def __init__(self, store: LogitStore, n_row: int) -> None:
        self.store = store
        self.where: list[tuple[int, int]] = []
        self.values = np.full((3, n_row), np.nan)

    def add(self, window: int, position: int, token: int, logits: npt.NDArray[np.float32]) -> None:
        row = len(self.where)
        result = divergence.divergence(self.store.row(row), logits, token)
        self.values[:, row] = result.nll, result.kl, result.agrees
        self.where.append((window, position))

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        return dict(zip(("nll", "kl", "top1_agree"), self.values, strict=True))


def _rows(trace: xr.Dataset, where: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return the trace's row of each scored (window, position)."""
    decode = np.flatnonzero(trace["phase"].values == Phase.decode)
    turn, position = trace["turn"].values[decode], trace["position"].values[decode]
    row_of = {(int(t), int(p)): int(row) for t, p, row in zip(turn, position, decode, strict=True)}
    missing = [key for key in where if key not in row_of]
    if missing:
        raise SettingsError(
            f"trace must hold every scored token; got none for window {missing[0][0]}, position "
            f"{missing[0][1]}. Compare with a session of this package."
        )
    return np.array([row_of[key] for key in where], dtype=np.int64)


def _spread(
    values: npt.NDArray[np.float64], rows: npt.NDArray[np.int64], n_token: int
) -> npt.NDArray[np.float64]:
    spread = np.full(n_token, np.nan)
    spread[rows] = values
    return spread


def _control(policy: Any, counters: Any) -> Any:
    """Return the control of what a policy did, None if it has none."""
    from bmoe_lab.routing import RandomDrop, RandomSubstitute

    if counters is None or not counters.changed:
        return None
    # Six digits: the name stays readable, and the rate off by less than one slot in a million.
    rate = float(f"{counters.control_rate:.4g}")
    if counters.dropped and not counters.substituted:
        return RandomDrop(rate, renormalise=bool(policy.renormalise))
    if counters.substituted and not counters.dropped:
        return RandomSubstitute(rate)
    return None


def _stopped(what: str, comparison: Comparison, path: Path | None) -> str:
    kept = f"saved to {str(path)!r} and in .tree" if path is not None else "in .tree"
    n = len(comparison.arms)
    return (
        f"comparison {what} in the run {comparison.current!r}; "
        f"{n} finished run{'s are' if n > 1 else ' is'} {kept} of this exception."
    )


def _writable(save: str | os.PathLike[str]) -> Path:
    path = Path(os.fspath(save)).expanduser()
    folder = path.absolute().parent
    # Hours of work end in this file: find out now, not after the first run.
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(
            f"save must lie in a folder that can be written; got {str(save)!r}. "
            "Make the folder first, or save elsewhere."
        )
    return path


@contextlib.contextmanager
def _reporting(
    progress: bool | Callable[[Progress], None], total: int, n_arm: int
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (run, index, tokens done) that shows or forwards the progress."""
    if callable(progress):
        call = progress
        yield lambda name, index, done: call(Progress(name, index, n_arm, done, total))
        return
    if not progress:
        yield lambda name, index, done: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total * n_arm, unit="token", leave=False) as bar:

        def show(name: str, index: int, done: int) -> None:
            if done == 0:
                bar.set_description_str(f"{index + 1}/{n_arm} {name}"[:60])
            bar.update(index * total + done - bar.n)

        yield show
