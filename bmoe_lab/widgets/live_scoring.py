"""Settings of a policy lab scored with the model, each in a session of its own cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from bmoe_lab.comparison.comparing import LOSSLESS, Comparison
from bmoe_lab.errors import BmoeLabWarning, PolicyError, SessionError
from bmoe_lab.widgets.job import Stopped, Ticket
from bmoe_lab.widgets.lab_setting import Setting

if TYPE_CHECKING:
    from bmoe_lab.run import Run
    from bmoe_lab.runtime.step import Step
    from bmoe_lab.session import Session

__all__ = ["check_live", "score_settings"]

# Said of a whole comparison by its first run; untrue where the others have other caches.
_OF_THE_CACHE = ("cache_budget_bytes", "residency_policy", "session_settings")


def check_live(session: Session, settings: list[Setting]) -> None:
    """Refuse settings that the model cannot run, before anything runs.

    Raises
    ------
    SessionError
        If there is nothing to score.
    PolicyError
        If a setting needs the future, has no cache of its own, or its policy does not fit.
    """
    if not settings:
        raise SessionError("a setting must be pinned to be scored; got none. Press pin first.")
    for setting in settings:
        cache = setting.cache
        if cache is None:
            raise PolicyError(
                "a setting must have a residency policy to run live; got the recorded residency in "
                f"{setting.label!r}. Choose one, such as lru, and pin that."
            )
        if not cache.online:
            raise PolicyError(
                f"a residency policy must be online to run live; got {setting.label!r}, which "
                "needs to know the future. Remove it from the pinned settings."
            )
        if setting.routing is not None:
            session.check(setting.routing)


def score_settings(
    session: Session,
    text: Any,
    settings: list[Setting],
    names: list[str],
    ticket: Ticket,
    *,
    n_context: int = 16,
    seed: int = 0,
) -> xr.DataTree:
    """Return the comparison of the lossless run with each setting; it is also told as it grows.

    The lossless run has the first setting's cache. Runs of one cache stand together, so that at
    most one second session is open. Its logits do not depend on the cache, so they serve all.

    Parameters
    ----------
    session : Session
    text : str or list of str
    settings : list of Setting
        Checked by :func:`check_live`.
    names : list of str
        Of their runs in the comparison.
    ticket : Ticket
        Is told ``tree``, ``done``, ``total``, ``arm`` and ``waiting``.
    n_context, seed : int
        As for :func:`bmoe_lab.compare`.

    Raises
    ------
    Stopped
        If that was asked for; what was finished has been told.
    """
    order: list[str] = []
    for setting in settings:
        if setting.cache_label not in order:
            order.append(setting.cache_label)
    todo = sorted(
        zip(settings, names, strict=True), key=lambda pair: order.index(pair[0].cache_label)
    )
    with _Scorer(session, ticket) as scorer:
        comparison = _Quiet(scorer, text, n_context=n_context, seed=seed)
        with comparison:
            n_arm = 1 + len(todo)
            total = n_arm * comparison.n_scored

            def progress(name: str, index: int, done: int) -> None:
                ticket.tell(arm=name, done=index * comparison.n_scored + done, total=total)

            comparison.on_progress = progress
            scorer.use(todo[0][0])
            try:
                comparison.run(name=LOSSLESS, kind="lossless")
                ticket.tell(tree=_honest(comparison.tree()))
                for setting, name in todo:
                    ticket.check()
                    scorer.use(setting)
                    kind: Any = "lossless" if _is_lossless(setting) else "policy"
                    comparison.run(setting.routing, name=name, kind=kind)
                    ticket.tell(tree=_honest(comparison.tree()))
                    ticket.flush()
            except Exception:
                if comparison.arms:
                    ticket.tell(tree=_honest(comparison.tree(failed_arm=comparison.current)))
                if ticket.stopping:
                    # What a stopped run lacks is no failure.
                    raise Stopped from None
                raise
            return _honest(comparison.tree(complete=True))


def _is_lossless(setting: Setting) -> bool:
    return setting.routing is None or setting.routing.lossless


def _honest(tree: xr.DataTree) -> xr.DataTree:
    for name in _OF_THE_CACHE:
        said = {str(node.attrs.get(name)) for node in tree.children.values()}
        if len(said) > 1:
            tree.attrs.pop(name, None)
    return tree


class _Quiet(Comparison):
    """A comparison that keeps its warnings instead of raising them in a thread."""

    def _warn(self, message: str, category: type[Warning] = BmoeLabWarning) -> None:
        self.warnings.append(message)


class _Scorer:
    """Serves each run with a session of the right cache."""

    def __init__(self, session: Session, ticket: Ticket) -> None:
        self.own = session
        self.ticket = ticket
        self.active = session
        self._other: tuple[str, Session] | None = None

    def __enter__(self) -> _Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._drop()

    def _drop(self) -> None:
        other, self._other = self._other, None
        self.active = self.own
        if other is not None:
            other[1].close()

    def use(self, setting: Setting) -> None:
        """Have the next run served by this setting's cache."""
        cache = setting.cache
        assert cache is not None
        own = self.own.residency_policy
        bare = type(own)(**{**own.get_params(), "budget": None})
        if bare == setting.residency and self.own.cache_budget_bytes == setting.budget:
            self._drop()
            return
        if self._other is not None and self._other[0] == setting.cache_label:
            return
        self._drop()
        self._other = (setting.cache_label, self.own.with_cache(cache))
        self.active = self._other[1]

    # --- what a comparison asks for ---------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        return self.own.n_vocab

    def check(self, policy: Any) -> None:
        self.active.check(policy)

    def windows(self, text: Any, *, n_context: int) -> list[np.ndarray]:
        return self.own.windows(text, n_context=n_context)

    def score(
        self, text: Any, *, policy: Any, n_context: int, observe: Any, record: Any, seed: int
    ) -> Run:
        active = self.active
        self.ticket.tell(waiting=True)
        self.ticket.flush()
        held = False

        def on_step(step: Step) -> None:
            nonlocal held
            if not held:
                # Only now is it this run that a stop would end, not another widget's.
                held = True
                self.ticket.tell(waiting=False)
                self.ticket.while_stoppable(active.stop)

        scored: Callable[..., Run] = active.score
        try:
            return scored(
                text,
                policy=policy,
                n_context=n_context,
                observe=observe,
                record=record,
                seed=seed,
                on_step=on_step,
            )
        finally:
            self.ticket.while_stoppable(None)
