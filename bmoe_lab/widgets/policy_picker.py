"""A routing policy chosen from a list, its parameters set with controls of their own."""

from __future__ import annotations

from typing import Any

import ipywidgets
import traitlets

from bmoe_lab import routing
from bmoe_lab.errors import BmoeLabError
from bmoe_lab.routing import ModelFacts, RoutingPolicy
from bmoe_lab.widgets.policy_controls import PolicyChoice, control_of, policy_choice, value_of

__all__ = ["PolicyPicker"]

_LOSSLESS = "lossless"


class PolicyPicker(ipywidgets.VBox):
    """The shipped policies, and what was given, with the controls of the one that is chosen.

    Parameters
    ----------
    facts : ModelFacts or None
        The model, which decides where parameters start and end. None: it is not known, so
        there is nothing to choose.
    policy : RoutingPolicy, optional
        What is chosen first; one of the user's own too. Left out, lossless.

    Attributes
    ----------
    policy : RoutingPolicy or None
        What is chosen; None is lossless. Setting it shows it.
    error : str
        Why what was chosen makes no policy; `policy` is then still the one before.

    Examples
    --------
    >>> facts = ModelFacts(n_layer=4, n_expert=32, n_expert_used=4, cache_budget=2**20)
    >>> picker = PolicyPicker(facts)
    >>> picker.menu.value = "DropCold"
    >>> picker.controls["frac"].value = 0.75
    >>> picker.policy
    DropCold(frac=0.75)
    """

    policy = traitlets.Any(None, allow_none=True)
    error = traitlets.Unicode()

    def __init__(self, facts: ModelFacts | None, policy: RoutingPolicy | None = None) -> None:
        self._facts = facts
        self._choice: PolicyChoice | None = None
        self._showing = False
        self._classes: dict[str, type[RoutingPolicy]] = {}
        if facts is not None:
            classes = [routing.get(name) for name in routing.names()]
            self._classes = {cls.__name__: cls for cls in classes if not cls.lossless}
        self.controls: dict[str, Any] = {}
        self.menu = ipywidgets.Dropdown(
            options=[_LOSSLESS, *self._classes],
            description="policy",
            tooltip="a routing policy changes which experts run, and with that the output",
            layout=ipywidgets.Layout(width="300px"),
            style={"description_width": "initial"},
        )
        self._row = ipywidgets.HBox(
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="center")
        )
        super().__init__([self.menu, self._row])
        self.menu.observe(self._on_menu, "value")
        self.observe(self._on_policy, "policy")
        self.policy = policy

    def _on_menu(self, change: Any) -> None:
        if self._showing:
            return
        name = change.new
        if name == _LOSSLESS:
            self._show(None)
            self._set(None)
        elif name in self._classes:
            self._choose(self._classes[name], name)

    def _on_policy(self, change: Any) -> None:
        """Show a policy that was set from Python."""
        if self._showing:
            return
        policy = change.new
        if policy is None or getattr(policy, "lossless", False):
            self._show(None)
            self._say(_LOSSLESS)
            return
        name = type(policy).__name__
        self._say(name)
        if isinstance(policy, RoutingPolicy) and self._facts is not None:
            self._classes.setdefault(name, type(policy))
            self._choose(policy, name)
        else:
            self._show(None)

    def _choose(self, policy: type[RoutingPolicy] | RoutingPolicy, name: str) -> None:
        assert self._facts is not None  # nothing else is listed
        try:
            choice = policy_choice(policy, name, self._facts)
        except BmoeLabError as error:
            self._show(None)
            self.error = f"{name}: {error}"
            return
        self._show(choice)
        if isinstance(policy, type):
            self._make()

    def _show(self, choice: PolicyChoice | None) -> None:
        self.error = ""
        self._choice = choice
        parameters = () if choice is None else choice.parameters
        self.controls = {one.name: control_of(one, one.start) for one in parameters}
        for control in self.controls.values():
            control.observe(self._make, "value")
        self._row.children = tuple(self.controls.values())

    def _say(self, name: str) -> None:
        """Have the menu show a name without taking that for a choice."""
        self._showing = True
        try:
            if name not in self.menu.options:
                self.menu.options = [*self.menu.options, name]
            self.menu.value = name
        finally:
            self._showing = False

    def _make(self, change: Any = None) -> None:
        choice = self._choice
        if choice is None:
            return
        try:
            values = {
                one.name: value_of(one, self.controls[one.name], one.start)
                for one in choice.parameters
            }
            policy = choice.make(values)
        except Exception as error:  # a user's own class may refuse with anything
            self.error = f"{choice.label}: {error}"
            return
        self.error = ""
        self._set(policy)

    def _set(self, policy: RoutingPolicy | None) -> None:
        self._showing = True
        try:
            self.policy = policy
        finally:
            self._showing = False

    def __repr__(self) -> str:
        return f"<PolicyPicker: {self.error or self.policy or _LOSSLESS}>"
