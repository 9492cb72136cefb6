"""A run of a session, watched while it goes on: its text, its speed, what its layers miss."""

from __future__ import annotations

import math
import warnings
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import traitlets

from bmoe_lab.errors import (
    BmoeLabError,
    PolicyNeverFiredWarning,
    SessionError,
    SettingsError,
)
from bmoe_lab.plots import theme
from bmoe_lab.plots.live_activity import plot_live_activity
from bmoe_lab.plots.sentence import sentence
from bmoe_lab.routing import ModelFacts
from bmoe_lab.widgets.figure_view import FigureView
from bmoe_lab.widgets.job import Job, Ticket
from bmoe_lab.widgets.policy_picker import PolicyPicker
from bmoe_lab.widgets.run_html import note_of, numbers_html, summary_html, text_html
from bmoe_lab.widgets.watched_run import WatchedRun

if TYPE_CHECKING:
    import xarray as xr

    from bmoe_lab.routing import RoutingPolicy
    from bmoe_lab.run import Run
    from bmoe_lab.runtime.step import Step
    from bmoe_lab.session import Session

__all__ = ["LiveRun"]

_IDLE = "Nothing has run yet. Press run."
_ROW = ipywidgets.Layout(flex_flow="row wrap", align_items="center")
_WIDE = {"description_width": "initial"}


class LiveRun(ipywidgets.VBox):
    """Run a session's model on a prompt and watch it: text, tokens/s, hit rate, bytes, layers.

    The run goes on in a thread, so the notebook stays usable, and it goes on if the cell is run
    again; widgets of one session take turns. Everything is a trait: it can be driven, and read,
    without a browser.

    Parameters
    ----------
    session : Session
        An open one; it stays the caller's to close.
    prompt : str, default "In the beginning"
    n_predict : int, default 128
    temperature : float, default 0.0
    seed : int, default 0
    policy : RoutingPolicy, optional
        Left out, the run is lossless.

    Attributes
    ----------
    prompt, n_predict, temperature, seed, policy
        What the next run is asked for (:meth:`bmoe_lab.Session.generate`).
    state : {"idle", "running", "stopping", "done", "stopped", "failed"}
    status : str
        The state in words.
    text : str
        What was generated so far.
    note : str
        What must be known of the run before it is believed: lossy, never fired, cut off.
    error : str
        Why it failed; empty otherwise.
    run : Run or None
        The last run, also if it was cut short; :attr:`trace` is its trace.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> with bl.Session(bl.datasets.demo_model(), cache="4 MiB", n_ctx=256, n_threads=1) as session:
    ...     live = LiveRun(session, n_predict=4)
    ...     live.start()
    ...     live.wait()
    'done'
    >>> live.text == live.run.text, live.trace.sizes["token"] - len(live.run.prompt)
    (True, 3)
    """

    prompt = traitlets.Unicode("In the beginning")
    n_predict = traitlets.Int(128)
    temperature = traitlets.Float(0.0)
    seed = traitlets.Int(0)
    policy = traitlets.Any(None, allow_none=True)
    state = traitlets.Unicode("idle", read_only=True)
    status = traitlets.Unicode(_IDLE, read_only=True)
    text = traitlets.Unicode(read_only=True)
    note = traitlets.Unicode(read_only=True)
    error = traitlets.Unicode(read_only=True)
    run = traitlets.Any(None, allow_none=True, read_only=True)

    def __init__(
        self,
        session: Session,
        *,
        prompt: str = "In the beginning",
        n_predict: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        policy: RoutingPolicy | None = None,
    ) -> None:
        self._session = session
        self._job = Job()
        self._step: Step | None = None
        self._where = self._phase = ""
        self._figure = FigureView(sentence(_IDLE, title="Misses per layer"))
        super().__init__(
            prompt=prompt, n_predict=n_predict, temperature=temperature, seed=seed, policy=policy
        )
        self.children = self._controls()
        self.observe(self._say, ("status", "error", "note"))
        self._job.observe(self._on_state, "state")
        self._picker.observe(lambda change: self.set_trait("error", change.new), "error")
        self.set_trait("error", self._picker.error)
        try:
            self._n_predict.max = session.n_ctx
        except SessionError as error:
            self.set_trait("error", str(error))
        self._say()

    def _controls(self) -> list[Any]:
        def linked(widget: Any, name: str) -> Any:
            traitlets.link((self, name), (widget, "value"))
            return widget

        box = ipywidgets.Layout(width="190px")
        self._n_predict = ipywidgets.BoundedIntText(
            value=self.n_predict,
            min=1,
            max=1 << 24,
            description="tokens",
            tooltip="tokens to generate at most (n_predict)",
            layout=box,
            style=_WIDE,
        )
        controls = [
            linked(self._n_predict, "n_predict"),
            linked(
                ipywidgets.BoundedFloatText(
                    value=self.temperature,
                    min=0,
                    max=100,
                    step=0.1,
                    description="temperature",
                    tooltip="0 is greedy: always the likeliest token",
                    layout=box,
                    style=_WIDE,
                ),
                "temperature",
            ),
            linked(
                ipywidgets.BoundedIntText(
                    value=self.seed,
                    min=0,
                    max=(1 << 32) - 2,
                    description="seed",
                    tooltip="of sampling and of random policies",
                    layout=box,
                    style=_WIDE,
                ),
                "seed",
            ),
        ]
        self._picker = PolicyPicker(_facts_of(self._session), self.policy)
        traitlets.link((self, "policy"), (self._picker, "policy"))
        prompt = ipywidgets.Textarea(
            value=self.prompt,
            description="prompt",
            rows=3,
            layout=ipywidgets.Layout(width="auto"),
            style=_WIDE,
        )
        self._run_button = ipywidgets.Button(
            description="run", icon="play", button_style="primary", tooltip="start this run"
        )
        self._stop_button = ipywidgets.Button(
            description="stop", icon="stop", disabled=True, tooltip="end this run; keep its trace"
        )
        self._run_button.on_click(self._on_run)
        self._stop_button.on_click(lambda _: self.stop())
        self._bar = ipywidgets.FloatProgress(
            min=0, max=1, layout=ipywidgets.Layout(flex="1 1 200px", min_width="120px")
        )
        self._status = ipywidgets.HTML()
        self._text = ipywidgets.HTML(
            layout=ipywidgets.Layout(flex="1 1 380px", margin="2px 12px 2px 2px")
        )
        self._numbers = ipywidgets.HTML(layout=ipywidgets.Layout(flex="0 1 auto"))
        self._summary = ipywidgets.HTML()
        return [
            linked(prompt, "prompt"),
            ipywidgets.HBox(controls, layout=_ROW),
            self._picker,
            ipywidgets.HBox([self._run_button, self._stop_button, self._bar], layout=_ROW),
            self._status,
            ipywidgets.HBox(
                [self._text, self._numbers],
                layout=ipywidgets.Layout(flex_flow="row wrap", align_items="flex-start"),
            ),
            self._figure,
            self._summary,
        ]

    # -- driving -------------------------------------------------------------------------------

    @property
    def trace(self) -> xr.Dataset | None:
        """The trace of the last run; None before it ended."""
        return None if self.run is None else self.run.trace

    def start(self) -> None:
        """Begin a run with the settings as they are; returns at once.

        What does not fit (an empty prompt, a policy that cannot run here) is said in
        :attr:`error`.

        Raises
        ------
        SessionError
            If this widget's last run has not ended.
        """
        if self._job.running:
            raise SessionError("the run must have ended; got one that goes on. Stop it first.")
        policy = self.policy
        asked: dict[str, Any] = {
            "n_predict": self.n_predict,
            "temperature": self.temperature,
            "seed": self.seed,
            "policy": policy,
        }
        # Neither the policy before nor none at all is what was chosen.
        wrong = self._picker.error
        lossless = policy is None or getattr(policy, "lossless", False)
        note = "lossless" if lossless else f"lossy: {policy!r}"
        watched = WatchedRun(self.prompt, "" if wrong else note)
        self._where, self._phase = "first", ""
        self.set_trait("run", None)
        self._summary.value = ""
        self._draw(watched)
        # The widget says it. The warning names the line that called, which is here.
        warnings.filterwarnings(
            "ignore", category=PolicyNeverFiredWarning, module=r"bmoe_lab\.widgets\.live_run$"
        )
        self._job.start(
            lambda ticket: self._work(ticket, watched, asked, wrong),
            publish=lambda values: self._publish(watched, values),
            then=lambda run: self._finish(watched, run),
        )

    def stop(self) -> None:
        """End this widget's run soon, or its waiting; never another one's run."""
        self._job.stop()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the run has ended, at most `timeout` seconds, and return the state."""
        return self._job.wait(timeout)

    def _on_run(self, button: Any) -> None:
        if not self._job.running:  # a second click may be on its way when the first one acts
            self.start()

    # -- the run, in the job's thread ----------------------------------------------------------

    def _work(self, ticket: Ticket, watched: WatchedRun, asked: dict[str, Any], wrong: str) -> Run:
        if wrong:
            raise SettingsError(wrong)
        session = self._session
        with ticket.turn(session, lambda: ticket.tell(where="turn")):
            ticket.tell(where="first")

            def on_step(step: Step) -> None:
                if watched.step is None:
                    # From here on it is surely this run that a stop of the session would end.
                    ticket.while_stoppable(session.stop)
                watched.add(step)
                ticket.tell(where="run")

            def on_text(new: str) -> None:
                watched.parts.append(new)
                ticket.tell(where="run")

            try:
                return session.generate(watched.prompt, on_text=on_text, on_step=on_step, **asked)
            except BaseException:
                if watched.step is not None:
                    ticket.tell(run=session.last_run)
                raise
            finally:
                ticket.while_stoppable(None)

    def _publish(self, watched: WatchedRun, values: dict[str, Any]) -> None:
        self._where = values.get("where", self._where)
        self._draw(watched)
        if "run" in values:
            self._keep(watched, values["run"])

    def _finish(self, watched: WatchedRun, run: Run) -> None:
        self._draw(watched)
        self._keep(watched, run)

    def _draw(self, watched: WatchedRun) -> None:
        step, loads, n_first = watched.last()
        # The figure comes last: it takes longest, and the words should agree with the numbers.
        self._step = step
        self._set_status()
        self.set_trait("note", watched.note)
        self.set_trait("text", "".join(watched.parts))
        self._text.value = text_html(watched.prompt, self.text)
        if step is None:
            self._bar.value = 0
            self._numbers.value = ""
            self._figure.show(sentence("No evaluation has ended yet.", title="Misses per layer"))
        else:
            self._bar.max = max(step.n_planned, 1)
            self._bar.value = step.n_done
            self._numbers.value = numbers_html(step.prefill, step.decode)
            n_done = step.totals.n_evaluation
            self._figure.show(
                plot_live_activity(
                    np.array([misses for misses, _ in loads]),
                    np.array([lookups for _, lookups in loads]),
                    phase=step.phase,
                    first=n_done - len(loads) + 1,
                    n_planned=max(n_done, math.ceil(step.n_planned / n_first)),
                    note=watched.note,
                ),
                # What a person zoomed to in one phase is not there in the other.
                keep_view=step.phase == self._phase,
            )
            self._phase = step.phase

    def _keep(self, watched: WatchedRun, run: Run) -> None:
        self.set_trait("run", run)
        self.set_trait("note", note_of(run))
        self._numbers.value = numbers_html(run.summary.prefill, run.summary.decode)
        self._summary.value = summary_html(run)

    # -- what is said --------------------------------------------------------------------------

    def _on_state(self, change: Any) -> None:
        state = change.new
        self.set_trait("state", state)
        running = state in ("running", "stopping")
        self._run_button.disabled = running
        self._stop_button.disabled = state != "running"
        self._bar.bar_style = {"done": "success", "failed": "danger", "stopped": "warning"}.get(
            state, "info"
        )
        self.set_trait("error", self._job.error if state == "failed" else "")
        self._set_status()

    def _set_status(self) -> None:
        self.set_trait("status", self._status_of(self.state))

    def _status_of(self, state: str) -> str:
        step = self._step
        if state == "idle":
            return _IDLE
        if state == "failed":
            return "failed"
        if state in ("done", "stopped"):
            return self._end_of(state)
        if state == "stopping":
            if self._where == "first":
                return "stopping after the first evaluation"
            return "stopping"
        if self._where == "turn":
            return "waiting for the session: another run has it"
        if self._where == "first" or step is None:
            return "waiting for the session and the first evaluation"
        return f"{step.phase}: {step.n_done} of {step.n_planned} tokens"

    def _end_of(self, state: str) -> str:
        run = self.run
        if run is None:
            return "stopped before it began"
        ended = str(run.summary.ended_by)
        if ended != "stopped":
            return f"done: {len(run.tokens)} tokens, ended by {ended}"
        who = ""
        if state == "done":
            who = " from outside"
            try:
                _ = self._session.n_ctx
            except BmoeLabError:
                who = ": the session was closed"
        return f"stopped{who} after {run.summary.decode.n_token} decoded tokens"

    def _say(self, change: Any = None) -> None:
        said = [f"<b>{escape(self.status)}</b>"]
        if self.note:
            colour = "" if self.note == "lossless" else f" style='color:{theme.VERMILLION}'"
            said.append(f"<span{colour}>{escape(self.note)}</span>")
        if self.error:
            said.append(f"<span style='color:{theme.VERMILLION}'>{escape(self.error)}</span>")
        self._status.value = f"<div role='status' style='line-height:1.4'>{' · '.join(said)}</div>"

    def __repr__(self) -> str:
        return f"<LiveRun: {self.status}>"


def _facts_of(session: Session) -> ModelFacts | None:
    """Return what a policy may ask of the session's model; None once it is closed."""
    try:
        info = session.info()
    except SessionError:
        return None
    return ModelFacts(
        n_layer=info["n_layer"],
        n_expert=info["n_expert"],
        n_expert_used=info["n_expert_used"],
        cache_budget=info["cache_budget_bytes"],
        token_cycle_bytes=info["token_cycle_bytes"],
    )
