"""A laboratory bench for policies: every change replays a trace; pinned settings meet the model."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import traitlets
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab import residency as residency_policies
from bmoe_lab import routing as routing_policies
from bmoe_lab.errors import (
    BmoeLabError,
    PolicyError,
    SchemaError,
    SessionError,
    SettingsError,
    unknown_name,
)
from bmoe_lab.plots import theme
from bmoe_lab.plots.policy_effect import EffectSeries, effect_figure
from bmoe_lab.plots.sentence import sentence
from bmoe_lab.residency import ResidencyPolicy
from bmoe_lab.routing import RoutingPolicy
from bmoe_lab.simulation.budget_grid import budgets as budget_grid
from bmoe_lab.simulation.replaying import RECORDED
from bmoe_lab.sizes import format_size, parse_size
from bmoe_lab.widgets import lab_words as words
from bmoe_lab.widgets.controls import ROW
from bmoe_lab.widgets.figure_view import FigureView
from bmoe_lab.widgets.job import Job, Ticket
from bmoe_lab.widgets.lab_code import code_of
from bmoe_lab.widgets.lab_layout import LabLayout
from bmoe_lab.widgets.lab_setting import Outcome, Replays, Setting
from bmoe_lab.widgets.live_scoring import check_live, score_settings
from bmoe_lab.widgets.policy_controls import (
    PolicyChoice,
    control_of,
    policy_choice,
    value_of,
)

if TYPE_CHECKING:
    from bmoe_lab.session import Session

__all__ = ["Pinned", "PolicyLab"]

NONE = "none"
_DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Pinned:
    """A setting that is kept as a series.

    Attributes
    ----------
    name : str
        Of the series, unique in its lab.
    setting : Setting
    outcome : Outcome
        Its replay.
    slot : int
        Place among the colours; it stays while others come and go.
    """

    name: str
    setting: Setting
    outcome: Outcome = field(repr=False)
    slot: int

    @property
    def style(self) -> tuple[str, str, str]:
        """Colour, symbol and dash."""
        # The first style is the setting's that is being moved.
        color, symbol = theme.series_style(self.slot + 1)
        return color, symbol, _DASHES[(self.slot + 1) // len(theme.CATEGORIES) % len(_DASHES)]


class PolicyLab(ipywidgets.VBox):
    """Choose residency policy, budget and routing policy; see at once what they change.

    Every change replays the trace and is shown against the lossless baseline: the same residency
    policy and budget without a routing policy. Replays of routing policies are open loop; with a
    session, pinned settings are scored by the model. All traits can be set from Python.

    Parameters
    ----------
    data : xarray.Dataset or Session
        A routing trace, or an open session: then its latest lossless run, or one recorded here.
    policies : sequence, optional
        Routing or residency policies of your own, classes or instances, listed beside those that
        ship with the package. One that needs an array is passed as an instance.
    text : str or list of str, optional
        What pinned settings are scored on; for the demo model, a held-out text.

    Attributes
    ----------
    residency : str
        A name of the list, or ``"recorded"``.
    budget : int
        Bytes; a size such as ``"2 GiB"`` may be assigned.
    routing : str
        A name of the list, or ``"none"``.
    parameters : dict
        Of the routing policy; what is left out keeps its value.
    pinned : list of Pinned
        A :class:`Setting` may be among what is assigned.
    quantity : {"misses", "hit_rate", "bytes"}
        What is drawn by layer.
    state : {"no trace", "ready", "stale", "unable"}
        ``"stale"``: what was asked for last is refused, and what is shown is what came before.
    live_state : {"idle", "waiting", "running", "stopping", "done", "stopped", "failed"}
    refused : dict of str to str
        Policies that cannot run on this trace, and why.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> lab = PolicyLab(bl.testing.make_trace(n_token=32, n_layer=2, seed=0))
    >>> lab.routing = "drop_cold"
    >>> lab.parameters = {"frac": 1.0}
    >>> lab.numbers["difference"]["read_bytes_per_token"] < 0
    True
    """

    residency = traitlets.Unicode("lru")
    budget = traitlets.Any(0)
    routing = traitlets.Unicode(NONE)
    parameters = traitlets.Dict()
    pinned: Any = traitlets.List()
    quantity: Any = traitlets.Enum(("misses", "hit_rate", "bytes"), default_value="misses")
    state = traitlets.Enum(("no trace", "ready", "stale", "unable"), default_value="no trace")
    live_state = traitlets.Enum(
        ("idle", "waiting", "running", "stopping", "done", "stopped", "failed"),
        default_value="idle",
    )
    refused = traitlets.Dict()

    def __init__(
        self,
        data: xr.Dataset | Session,
        *,
        policies: Iterable[Any] | None = None,
        text: str | list[str] | None = None,
    ) -> None:
        self._ready = False
        self._lock = threading.RLock()
        self._busy = False
        self._own = list(policies or ())
        self.session: Any = None if isinstance(data, xr.Dataset) else data
        if self.session is not None and not hasattr(self.session, "score"):
            raise SettingsError(
                f"data must be a trace (xarray.Dataset) or a Session; got {type(data).__name__}. "
                "Pass run.trace, or the session itself."
            )
        self._replays: Replays | None = None
        self._residencies: dict[str, ResidencyPolicy] = {}
        self._choices: dict[str, PolicyChoice] = {}
        self._controls: dict[str, Any] = {}
        self._drawn: Any = None
        self._shown: tuple[Outcome, Outcome | None] | None = None
        self._hot = ""
        self._tree: xr.DataTree | None = None
        self._scored: list[Setting] = []
        self.job = Job()
        self.recording = Job()
        self.view = FigureView()
        self._texts = text if isinstance(text, list) else None
        self._scored_text: Any = None
        self._grid: list[int] = []
        self._message_ready = ""
        self._pinned_shown: tuple[str, ...] = ()
        self._controls_of: PolicyChoice | None = None
        self._parameters_of_controls: Any = None
        if text is None and self.session is not None:
            text = _demo_text(self.session)
        self.ui = LabLayout(text if isinstance(text, str) else "")
        super().__init__(self.ui.rows(self.view, self.session is not None, self._texts is None))
        self._wire()
        self._ready = True
        self.observe(
            self._on_trait, ["residency", "budget", "routing", "parameters", "pinned", "quantity"]
        )
        self.job.observe(self._on_job, "state")
        self.recording.observe(self._on_recording, "state")
        trace = data if isinstance(data, xr.Dataset) else _lossless_trace(data)
        if trace is None:
            self._say("Record a trace first: the session has none of a lossless run.")
        else:
            self._take(trace)

    def __repr__(self) -> str:
        routing = self.routing if self.routing == NONE else f"{self.routing} {self.parameters}"
        return (
            f"<PolicyLab: {self.residency} {format_size(self.budget)}, routing {routing}, "
            f"{len(self.pinned)} pinned, {self.state}>"
        )

    # --- what it reads as ---------------------------------------------------------------------

    @property
    def trace(self) -> xr.Dataset | None:
        """The trace that is replayed."""
        return None if self._replays is None else self._replays.trace

    @property
    def result(self) -> xr.Dataset | None:
        """The replay that is shown, a trace; None before the first."""
        return None if self._shown is None else self._shown[0].trace

    @property
    def setting(self) -> Setting:
        """The setting that the traits describe.

        Raises
        ------
        PolicyError
            If the routing policy refuses its parameters.
        """
        routing = None
        if self.routing != NONE:
            routing = self._choices[self.routing].make(self.parameters)
            routing.validate()
        if self.residency == RECORDED:
            return Setting("recorded", None, routing)
        return Setting(self._residencies[self.residency], self.budget, routing)

    @property
    def numbers(self) -> dict[str, dict[str, float]]:
        """What the table shows: ``setting``, ``lossless`` (its baseline), ``difference``."""
        if self._shown is None:
            return {}
        outcome, baseline = self._shown
        mine = dict(outcome.numbers)
        base = dict.fromkeys(mine, float("nan")) if baseline is None else dict(baseline.numbers)
        return {
            "setting": mine,
            "lossless": base,
            "difference": {name: mine[name] - base[name] for name in mine},
        }

    @property
    def code(self) -> str:
        """Python that makes the numbers again; ``trace`` must be the recorded trace."""
        if self._shown is None:
            return "# nothing has been replayed yet\n"
        outcome, baseline = self._shown
        settings = {"this setting": outcome.setting}
        settings |= {one.name: one.setting for one in self.pinned}
        assert self._replays is not None
        return code_of(
            settings,
            baseline=None if baseline is None else baseline.setting,
            phase=outcome.effect.phase,
            weights="weight_chosen" in self._replays.trace.variables,
            live=self._scored if self._tree is not None else None,
            text=self._scored_text if self._tree is not None else None,
        )

    def tree(self) -> xr.DataTree:
        """Return what is shown as a DataTree: after a live run its comparison, before it replays.

        Raises
        ------
        SchemaError
            If nothing has been replayed yet.
        """
        if self._tree is not None:
            return self._tree
        if self._shown is None:
            raise SchemaError("a trace must have been replayed; got none. Choose a setting first.")
        outcome, baseline = self._shown
        named = [] if baseline is None else [("lossless", baseline)]
        named += [("this setting", outcome)]
        named += [(one.name, one.outcome) for one in self.pinned]
        numbers = {
            name: ("arm", np.array([one.numbers[name] for _, one in named]))
            for name in outcome.numbers
        }
        root = xr.Dataset(
            {
                "arm_name": ("arm", np.array([name for name, _ in named])),
                "setting": ("arm", np.array([one.setting.label for _, one in named])),
                **numbers,
            },
            attrs={"source": "replay", "phase": outcome.effect.phase},
        )
        nodes = {"/": root}
        for name, one in named:
            nodes["/" + name.replace("/", "_")] = one.trace
        return xr.DataTree.from_dict(nodes)

    # --- what it does -------------------------------------------------------------------------

    def pin(self) -> Pinned:
        """Keep the setting that is shown as a series.

        Raises
        ------
        SettingsError
            If nothing is shown, or the setting is pinned already.
        """
        if self._shown is None or self.state != "ready":
            raise SettingsError("a setting must be shown to be pinned; got one that is refused.")
        outcome = self._shown[0]
        if any(one.setting == outcome.setting for one in self.pinned):
            raise SettingsError(f"a setting must be pinned once; got {outcome.setting.label!r}.")
        self.pinned = [*self.pinned, outcome.setting]
        pinned: Pinned = self.pinned[-1]
        return pinned

    def unpin(self, name: str) -> None:
        """Remove a pinned setting.

        Raises
        ------
        UnknownNameError
            If none has this name.
        """
        if name not in [one.name for one in self.pinned]:
            raise unknown_name("pinned setting", name, [one.name for one in self.pinned])
        self.pinned = [one for one in self.pinned if one.name != name]

    def clear(self) -> None:
        """Remove all pinned settings."""
        self.pinned = []

    def run_live(self) -> None:
        """Score the lossless run and each pinned setting with the model, in a thread.

        Raises
        ------
        SessionError
            If there is no session, no text, or nothing pinned; if one runs already.
        PolicyError
            If a pinned setting cannot run live.
        """
        if self.session is None:
            raise SessionError("the lab must have a session to run live; got a trace only.")
        text = self.ui.text.value if self._texts is None else self._texts
        if not text or (isinstance(text, str) and not text.strip()):
            raise SessionError("text must be given to be scored; got none. Type or paste one.")
        pinned = list(self.pinned)
        settings = [one.setting for one in pinned]
        check_live(self.session, settings)
        if self.job.running:
            raise SessionError("the live run must have ended; got one that runs. Stop it first.")
        self._tree, self._scored, self._scored_text = None, settings, text
        self.ui.live_table.value = ""
        names = [one.name for one in pinned]
        self.job.start(
            lambda ticket: score_settings(self.session, text, settings, names, ticket),
            publish=self._publish,
            then=self._finished,
        )

    def stop(self) -> None:
        """Stop the live run or the recording; what is finished stays."""
        self.job.stop()
        self.recording.stop()

    def record(self) -> None:
        """Record a lossless trace of the prompt, in a thread."""
        if self.recording.running:
            return
        session, prompt, n = self.session, self.ui.prompt.value, int(self.ui.n_predict.value)

        def work(ticket: Ticket) -> xr.Dataset | None:
            def on_step(step: Any) -> None:
                ticket.while_stoppable(session.stop)
                ticket.tell(text=f"recording: {step.n_done} of {step.n_planned} ({step.phase})")

            ticket.tell(text="waiting for the session")
            try:
                run = session.generate(prompt, n_predict=n, record="scores", on_step=on_step)
            except PolicyError:
                # Its scores cannot be had: what needs none works all the same.
                run = session.generate(prompt, n_predict=n, on_step=on_step)
            finally:
                ticket.while_stoppable(None)
            trace: xr.Dataset | None = run.trace
            return trace

        def publish(values: dict[str, Any]) -> None:
            self.ui.message.value = _note(values["text"])

        def then(trace: xr.Dataset | None) -> None:
            if trace is not None:
                self._take(trace)

        self.recording.start(work, publish=publish, then=then)

    # --- the trace ----------------------------------------------------------------------------

    def _take(self, trace: xr.Dataset) -> None:
        """Begin with a trace."""
        with self._lock:
            try:
                replays = Replays(trace)
                grid = budget_grid(trace, 24).tolist()
            except BmoeLabError as error:
                self._unable(str(error))
                return
            self._replays = replays
            self._grid = sorted({int(one) for one in grid} | {replays.bank_bytes})
            self._hot = _hot_words(trace, self._grid)
            self._list_policies(replays)
            self._busy = True
            try:
                self._drawn = None
                self.budget = self._first_budget(trace)
                if self.residency not in self._residencies and self.residency != RECORDED:
                    self.residency = "lru"
                if self.routing not in (NONE, *self._choices):
                    self.routing = NONE
                self._restart_parameters()
                self._fill_controls()
            finally:
                self._busy = False
            self._refresh()

    def _first_budget(self, trace: xr.Dataset) -> int:
        assert self._replays is not None
        said = trace.attrs.get("cache_budget_bytes")
        if self.session is not None:
            said = self.session.cache_budget_bytes
            own = self.session.residency_policy
            bare = type(own)(**{**own.get_params(), "budget": None})
            name = next((n for n, p in self._residencies.items() if p == bare), None)
            if name is not None:
                self.residency = name
        if said and 0 < int(said) <= self._replays.bank_bytes:
            return int(said)
        cycle = self._replays.facts.token_cycle_bytes
        return next((one for one in self._grid if one > 1.15 * cycle), self._grid[-1])

    def _list_policies(self, replays: Replays) -> None:
        facts = replays.facts
        # A policy that looks at the cache is judged by whether there is one, not by its size.
        model = _with_budget(facts.routing, replays.bank_bytes)
        refused: dict[str, str] = {}
        self._residencies, self._choices = {}, {}
        listed: list[tuple[str, Any]] = [
            (name, residency_policies.get(name)) for name in residency_policies.names()
        ]
        listed += [
            (name, routing_policies.get(name))
            for name in routing_policies.names()
            if name != "lossless"
        ]
        listed += [(_own_label(one), one) for one in self._own]
        for label, policy in listed:
            cls = policy if isinstance(policy, type) else type(policy)
            try:
                if issubclass(cls, ResidencyPolicy):
                    made = policy() if isinstance(policy, type) else policy
                    bare = cls(**{**made.get_params(), "budget": None})
                    bare.start(facts.key_bytes, replays.bank_bytes, n_layer=facts.n_layer)
                    self._residencies[label] = bare
                elif issubclass(cls, RoutingPolicy):
                    choice = policy_choice(policy, label, model)
                    if "scores" in choice.make({}).needs and not facts.score_kind_known:
                        raise PolicyError(
                            "needs scores, and to know whether they are a softmax: record='scores'."
                        )
                    self._choices[label] = choice
                else:
                    refused[label] = "is neither a routing nor a residency policy"
            except Exception as error:
                # Of a user's own class too: it is listed with what it says.
                refused[label] = str(error) or type(error).__name__
        self.refused = refused

    # --- traits, controls, figure -------------------------------------------------------------

    @traitlets.validate("residency")
    def _check_residency(self, proposal: Any) -> str:
        known = [RECORDED, *self._residencies]
        if self._replays is not None and proposal["value"] not in known:
            raise unknown_name("residency policy", proposal["value"], known)
        return str(proposal["value"])

    @traitlets.validate("routing")
    def _check_routing(self, proposal: Any) -> str:
        known = [NONE, *self._choices]
        if self._replays is not None and proposal["value"] not in known:
            if proposal["value"] in self.refused:
                raise PolicyError(f"{proposal['value']}: {self.refused[proposal['value']]}")
            raise unknown_name("routing policy", proposal["value"], known)
        return str(proposal["value"])

    @traitlets.validate("budget")
    def _check_budget(self, proposal: Any) -> int:
        return parse_size(proposal["value"], name="budget")

    @traitlets.validate("parameters")
    def _check_parameters(self, proposal: Any) -> dict[str, Any]:
        given = dict(proposal["value"])
        choice = self._choices.get(self.routing)
        if choice is None:
            return {}
        known = [one.name for one in choice.parameters if one.kind != "fixed"]
        for name in given:
            if name not in known:
                raise unknown_name(f"parameter of {self.routing}", name, known)
        old = {name: value for name, value in self.parameters.items() if name in known}
        return {**{name: choice.starts[name] for name in known}, **old, **given}

    @traitlets.validate("pinned")
    def _check_pinned(self, proposal: Any) -> list[Pinned]:
        result: list[Pinned] = []
        kept = [one for one in proposal["value"] if isinstance(one, Pinned)]
        slots = {one.slot for one in kept}
        for one in proposal["value"]:
            if isinstance(one, Setting):
                if self._replays is None:
                    raise SettingsError("a trace must be there to pin a setting; got none.")
                slot = next(n for n in range(len(slots) + 1) if n not in slots)
                slots.add(slot)
                name = one.label.replace("/", "_")
                one = Pinned(name, one, self._replays.outcome(one), slot)
            elif not isinstance(one, Pinned):
                raise SettingsError(f"pinned must hold settings; got {type(one).__name__}.")
            if one.name not in [other.name for other in result]:
                result.append(one)
        return result

    def _on_trait(self, change: Any) -> None:
        if self._busy or not self._ready or self._replays is None:
            return
        with self._lock:
            self._busy = True
            try:
                if change.name == "routing":
                    known = {one.name for one in getattr(self._choice, "parameters", ())}
                    if change.old != change.new and not (
                        self.parameters and set(self.parameters) <= known and self._same_hold()
                    ):
                        self._restart_parameters()
                self._fill_controls()
            finally:
                self._busy = False
            self._refresh()

    @property
    def _choice(self) -> PolicyChoice | None:
        return self._choices.get(self.routing)

    def _same_hold(self) -> bool:
        """Return whether the parameters were assigned together with the routing policy."""
        return self.parameters is not self._parameters_of_controls

    def _restart_parameters(self) -> None:
        choice = self._choice
        with self.hold_trait_notifications():
            self.parameters = {}
        starts = {} if choice is None else choice.starts
        fixed = (
            set()
            if choice is None
            else {one.name for one in choice.parameters if one.kind == "fixed"}
        )
        self.set_trait("parameters", {n: v for n, v in starts.items() if n not in fixed})

    def _fill_controls(self) -> None:
        """Bring the controls to the traits; called while busy."""
        known = [RECORDED, *self._residencies]
        if "residency" not in self._replays.trace.variables:  # type: ignore[union-attr]
            known.remove(RECORDED)
        if self.residency not in known:
            known.append(self.residency)
        _options(self.ui.residency, [(self._residency_label(one), one) for one in known])
        self.ui.residency.value = self.residency
        sizes = sorted({*self._grid, self.budget})
        _options(self.ui.budget, [(format_size(one), one) for one in sizes])
        self.ui.budget.value = self.budget
        self.ui.budget.disabled = self.residency == RECORDED
        none = "none (as recorded)" if self._replays.changed else "none (lossless)"  # type: ignore[union-attr]
        _options(self.ui.routing, [(none, NONE), *((one, one) for one in self._choices)])
        self.ui.routing.value = self.routing
        self.ui.quantity.value = self.quantity
        choice = self._choice
        if self._controls_of is not choice:
            self._controls_of = choice
            self._controls = {}
            for parameter in () if choice is None else choice.parameters:
                value = self.parameters.get(parameter.name, parameter.start)
                control = control_of(parameter, value)
                control.observe(self._on_control, "value")
                self._controls[parameter.name] = control
            self.ui.parameters.children = tuple(self._controls.values())
            doc = (choice.policy.__doc__ or "").strip().split("\n\n")[0] if choice else ""
            self.ui.about.value = _note(" ".join(doc.split()))
        else:
            for parameter in () if choice is None else choice.parameters:
                control = self._controls[parameter.name]
                value = self.parameters.get(parameter.name, parameter.start)
                if parameter.kind == "literal":
                    value = repr(value)
                if parameter.kind != "fixed" and control.value != value:
                    if parameter.kind in ("int", "float"):
                        control.min, control.max = (
                            min(control.min, value),
                            max(control.max, value),
                        )
                    control.value = value
        self._parameters_of_controls = self.parameters
        items = "".join(
            f"<li><b>{escape(name)}</b>: {escape(why)}</li>" for name, why in self.refused.items()
        )
        self.ui.refusals.value = (
            f"<details><summary>{len(self.refused)} policies cannot run on this trace"
            f"</summary><ul style='line-height:1.4'>{items}</ul></details>"
            if items
            else ""
        )

    def _residency_label(self, name: str) -> str:
        if name == RECORDED:
            return "recorded (static replay)"
        policy = self._residencies.get(name)
        return name if policy is None or policy.online else f"{name} (offline bound)"

    def _on_control(self, _: Any) -> None:
        if self._busy:
            return
        with self._lock:
            choice = self._choice
            try:
                values = (
                    {}
                    if choice is None
                    else {
                        one.name: value_of(one, self._controls[one.name], one.start)
                        for one in choice.parameters
                        if one.kind != "fixed"
                    }
                )
            except BmoeLabError as error:
                self._stale(str(error))
                return
            self.parameters = values

    def _refresh(self) -> None:
        """Replay and redraw if what is shown is not what the traits say."""
        assert self._replays is not None
        try:
            setting = self.setting
            key = (setting, [(one.name, one.slot) for one in self.pinned], self.quantity)
            if key == self._drawn:
                if self.state == "stale":
                    self.state = "ready"
                    self.ui.message.value = self._message_ready
                return
            outcome = self._replays.outcome(setting)
            try:
                baseline = self._replays.baseline(setting)
            except BmoeLabError:
                # Such as substitutions whose experts' residency nobody recorded.
                baseline = None
        except BmoeLabError as error:
            self._stale(str(error))
            return
        except Exception as error:
            # A user's own policy may raise anything: it is said here, not in a log.
            self._stale(f"{type(error).__name__}: {error}")
            return
        self._shown = outcome, baseline
        self._drawn = key
        self.view.show(self._figure(outcome, baseline))
        self._write(outcome, baseline)
        self.state = "ready"

    def _figure(self, outcome: Outcome, baseline: Outcome | None) -> Any:
        series = []
        if baseline is not None and baseline is not outcome:
            label = f"lossless baseline, {baseline.setting.cache_label}"
            series.append(EffectSeries(label, baseline.effect, theme.TEXT, "x", "dash"))
        label = outcome.setting.label
        if outcome.fired is False:
            label += ", never fired"
        series.append(EffectSeries(label, outcome.effect, *theme.series_style(0)))
        for one in self.pinned:
            never = ", never fired" if one.outcome.fired is False else ""
            series.append(
                EffectSeries(f"pinned: {one.name}{never}", one.outcome.effect, *one.style)
            )
        open_loop = [outcome, *(one.outcome for one in self.pinned)]
        note = "replayed from an empty cache"
        if outcome.setting.residency == RECORDED:
            note = "recorded residency"
        if any(one.counterfactual for one in open_loop):
            note += f"; lossy: {words.OPEN_LOOP}"
        return effect_figure(series, quantity=self.quantity, note=note)

    def _write(self, outcome: Outcome, baseline: Outcome | None) -> None:
        assert self._replays is not None
        self.ui.numbers.value = words.numbers_html(outcome, baseline)
        self.ui.questions.value = words.questions_html(
            self._replays, self._hot, outcome, baseline, self._live_words()
        )
        budget = outcome.setting.budget
        self.ui.budget_words.value = (
            "" if budget is None else _note(words.budget_words(budget, self._replays))
        )
        notes = []
        routing = outcome.setting.routing
        if routing is not None and not routing.lossless:
            notes.append(f"<b>lossy, {words.OPEN_LOOP}</b>")
            if outcome.fired is False:
                notes.append("<b>never fired: it changed nothing</b>")
            facts = _with_budget(self._replays.facts.routing, budget)
            notes += [escape(one) for one in routing.cautions(facts)]
        self._message_ready = f"<div role='status'>{'; '.join(notes)}</div>" if notes else ""
        self.ui.message.value = self._message_ready
        self._list_pinned()
        if self.ui.show_code.value:
            self.ui.code.value = self.code

    def _list_pinned(self) -> None:
        rows = []
        for one in self.pinned:
            button = ipywidgets.Button(
                description="remove",
                tooltip=f"remove {one.name}",
                layout=ipywidgets.Layout(width="80px"),
            )
            button.on_click(lambda _, name=one.name: self.unpin(name))
            numbers = one.outcome.numbers
            text = (
                f"<span style='color:{one.style[0]}'>&#9632;</span> {escape(one.name)}: hit rate "
                f"{words._shown(numbers['hit_rate'], 'rate')}, "
                f"{words._shown(numbers['read_bytes_per_token'], 'size')} per token, weight "
                f"discarded {words._shown(numbers['weight_discarded_frac'], 'rate')}"
            )
            rows.append(ipywidgets.HBox([button, ipywidgets.HTML(text)], layout=ROW))
        if tuple(one.name for one in self.pinned) != self._pinned_shown:
            self._pinned_shown = tuple(one.name for one in self.pinned)
            self.ui.pinned.children = tuple(rows)

    def _stale(self, why: str) -> None:
        self.state = "stale" if self._shown is not None else "unable"
        shown = ""
        if self._shown is not None:
            label = escape(self._shown[0].setting.label)
            shown = f"<div>Stale: the numbers and the figure are those of <b>{label}</b>.</div>"
        self.ui.message.value = (
            f"<div role='alert' style='border-left:4px solid {theme.VERMILLION};padding-left:8px'>"
            f"{escape(why)}{shown}</div>"
        )
        if self._shown is None:
            self.view.show(sentence(why, title="Policy lab"))

    def _unable(self, why: str) -> None:
        self.state = "unable"
        self.ui.message.value = _note(why)
        self.view.show(sentence(why, title="Policy lab"))

    def _say(self, text: str) -> None:
        self.ui.message.value = _note(text)
        self.view.show(sentence(text, title="Policy lab"))

    # --- live ---------------------------------------------------------------------------------

    def _publish(self, values: dict[str, Any]) -> None:
        if "total" in values:
            self.ui.progress.max = max(1, values["total"])
            self.ui.progress.value = values["done"]
        if values.get("waiting"):
            self.live_state = "waiting"
            self.ui.live_message.value = _note("waiting for the session")
        elif "arm" in values or values.get("waiting") is False:
            if self.job.state == "running":
                self.live_state = "running"
            self.ui.live_message.value = _note(
                f"scoring {values.get('arm', '')}: {values.get('done', 0)} of "
                f"{values.get('total', '?')} tokens"
            )
        if "tree" in values:
            self._finished(values["tree"])

    def _finished(self, tree: xr.DataTree) -> None:
        self._tree = tree
        self.ui.live_table.value = words.live_html(tree)
        with self._lock:
            if self._shown is not None:
                self._write(*self._shown)

    def _live_words(self) -> str:
        if self._tree is None or self._shown is None:
            return ""
        table = self._tree.to_dataset()
        for index, name in enumerate(table["arm_name"].values):
            if str(name) == self._shown[0].setting.label.replace("/", "_"):
                return (
                    f"Live: NLL {float(table['delta_nll'][index]):+.4f} nat per token, KL "
                    f"{float(table['kl_mean'][index]):.4f} nat."
                )
        return ""

    def _on_job(self, change: Any) -> None:
        state = change.new
        self.live_state = state
        running = state in ("running", "stopping")
        self.ui.run.disabled, self.ui.stop.disabled = running, not running
        if state == "failed":
            self.ui.live_message.value = f"<div role='alert'>failed: {escape(self.job.error)}</div>"
        elif state != "running":
            n_done = 0 if self._tree is None else len(self._tree.children)
            kept = f"; {n_done} finished runs are kept" if state == "stopped" else ""
            self.ui.live_message.value = _note(state + kept)

    def _on_recording(self, change: Any) -> None:
        self.ui.record.disabled = change.new in ("running", "stopping")
        if change.new == "failed":
            self.ui.message.value = f"<div role='alert'>{escape(self.recording.error)}</div>"

    def _press(self, action: Any) -> None:
        """Do what a button asks for; what is refused is said beside it."""
        try:
            action()
        except BmoeLabError as error:
            place = self.ui.live_message if action == self.run_live else self.ui.message
            place.value = f"<div role='alert'>{escape(str(error))}</div>"

    def _wire(self) -> None:
        ui = self.ui
        for control, name in (
            (ui.residency, "residency"),
            (ui.budget, "budget"),
            (ui.routing, "routing"),
            (ui.quantity, "quantity"),
        ):
            control.observe(self._linked(name), "value")
        ui.show_code.observe(self._on_show_code, "value")
        ui.clear.on_click(lambda _: self.clear())
        ui.stop.on_click(lambda _: self.stop())
        for button, action in (
            (ui.pin, self.pin),
            (ui.record, self.record),
            (ui.run, self.run_live),
        ):
            button.on_click(lambda _, action=action: self._press(action))

    def _linked(self, name: str) -> Any:
        def changed(change: Any) -> None:
            if not self._busy and self._replays is not None:
                setattr(self, name, change.new)

        return changed

    def _on_show_code(self, change: Any) -> None:
        self.ui.code.layout.display = None if change.new else "none"
        self.ui.code.value = self.code if change.new else ""


def _note(text: str) -> str:
    return f"<div role='status' style='line-height:1.4'>{escape(text)}</div>" if text else ""


def _options(control: Any, options: list[tuple[str, Any]]) -> None:
    """Set a control's options if they are others: setting them moves its value."""
    if list(control.options) != options:
        control.options = options


def _own_label(policy: Any) -> str:
    return policy.__name__ if isinstance(policy, type) else repr(policy)


def _with_budget(facts: Any, budget: int | None) -> Any:
    return replace(facts, cache_budget=budget)


def _lossless_trace(session: Any) -> xr.Dataset | None:
    run = session.last_run
    trace: xr.Dataset | None = None if run is None else run.trace
    if trace is None or not int(trace.attrs.get("lossless", 0)) or not trace.sizes["token"]:
        return None
    return trace


def _demo_text(session: Any) -> str:
    from bmoe_lab import datasets

    # Its own held-out text; of another model nobody knows what it was trained on.
    if session.info()["path"] != str(datasets.demo_model()):
        return ""
    return datasets.heldout("kjv")[0].text[:1200]


def _hot_words(trace: xr.Dataset, grid: list[int]) -> str:
    phase: Any = "decode" if (np.asarray(trace["phase"].values) == 1).any() else "all"
    n_expert = int(trace.attrs["n_expert"])
    half = metrics.experts_to_cover(trace, 0.5, phase=phase).values
    if not np.isfinite(half).any():
        return "unknown: nothing was routed"
    mean = float(np.nanmean(half))
    verdict = "yes" if mean < n_expert / 4 else "weak" if mean < 0.4 * n_expert else "no"
    return (
        f"{verdict}: half of a layer's routings go to {mean:.1f} of {n_expert} experts "
        f"(even use: {n_expert // 2}); all that was asked for is {format_size(grid[-2])}"
        if len(grid) > 1
        else verdict
    )
