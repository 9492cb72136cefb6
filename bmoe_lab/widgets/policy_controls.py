"""Controls of a policy's parameters, built from its class: nothing is declared for them."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import ipywidgets
import numpy as np

from bmoe_lab.errors import BmoeLabError, PolicyError
from bmoe_lab.parameters import is_array, parameter_repr
from bmoe_lab.routing import ModelFacts, RoutingPolicy

__all__ = ["Parameter", "PolicyChoice", "control_of", "parameters_of", "policy_choice", "value_of"]

Kind = Literal["bool", "choice", "int", "float", "literal", "fixed"]

#: Tried in this order for a fraction without a default: one that does something, none too much.
_FRACTIONS = (0.5, 0.25, 0.1, 0.05, 0.75, 1.0, 2.0, 0.0)
_MOST_CHOICES = 64
_MOST_TRIALS = 400


@dataclass(frozen=True)
class Parameter:
    """A parameter of a policy, as a control shows it.

    Attributes
    ----------
    name, kind, start, help : str, str, value, str
        ``help`` is the parameter's text in the class's docstring.
    low, high : float or None
        Range of a number, by what the policy's own checks accept.
    choices : tuple
        Values of a ``"choice"``.
    """

    name: str
    kind: Kind
    start: Any
    help: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class PolicyChoice:
    """A routing policy that can be chosen, with what its controls start from.

    Attributes
    ----------
    label : str
        As it is listed.
    policy : type
        The class.
    parameters : tuple of Parameter
    given : RoutingPolicy or None
        The instance that was passed, if it was one.
    """

    label: str
    policy: type[RoutingPolicy]
    parameters: tuple[Parameter, ...]
    given: RoutingPolicy | None = None

    def make(self, values: Mapping[str, Any]) -> RoutingPolicy:
        """Return the policy with these parameters; those left out are as at the start."""
        return self.policy(**{**self.starts, **values})

    @property
    def starts(self) -> dict[str, Any]:
        """What the parameters start from."""
        return {parameter.name: parameter.start for parameter in self.parameters}


def parameters_of(
    policy: type[RoutingPolicy] | RoutingPolicy, facts: ModelFacts
) -> tuple[Parameter, ...]:
    """Return the parameters of a policy class or instance, for a model with these facts.

    The signature gives names and defaults, annotations the kind, the docstring the help, and the
    policy's own ``check`` the range: it is asked what it accepts.

    Parameters
    ----------
    policy : type or RoutingPolicy
        A class, or an instance whose parameters are what to start from.
    facts : ModelFacts
        The trace or model, with a budget.

    Returns
    -------
    tuple of Parameter

    Raises
    ------
    PolicyError
        If no instance can be made: one that needs an array, or whose checks refuse all that was
        tried, with the words of the policy.

    Examples
    --------
    >>> from bmoe_lab.routing import DropCold
    >>> facts = ModelFacts(n_layer=4, n_expert=32, n_expert_used=4, cache_budget=2**20)
    >>> [(p.name, p.kind, p.start, p.high) for p in parameters_of(DropCold, facts)][:2]
    [('frac', 'float', 0.5, 1.0), ('renormalise', 'bool', True, None)]
    """
    given = None if isinstance(policy, type) else policy
    cls: type[RoutingPolicy] = type(policy) if given is not None else policy  # type: ignore[assignment]
    signature = inspect.signature(cls)
    hints = _hints(cls)
    helps = _helps(cls)
    known = {} if given is None else given.get_params()
    defaults = {
        name: known.get(name, parameter.default) for name, parameter in signature.parameters.items()
    }
    starts = _starts(cls, defaults, hints, facts)
    found = []
    for name in starts:
        found.append(_parameter(cls, name, starts, hints.get(name), facts, helps.get(name, "")))
    return tuple(found)


def control_of(parameter: Parameter, value: Any) -> Any:
    """Return the ipywidgets control of a parameter, at `value`.

    Examples
    --------
    >>> control_of(Parameter("keep", "int", 1, low=0, high=8), 2)
    IntSlider(value=2, description='keep', ...)
    """
    common = {
        "description": parameter.name,
        "tooltip": parameter.help,
        "style": {"description_width": "initial"},
        "layout": ipywidgets.Layout(width="300px"),
    }
    if parameter.kind == "bool":
        return ipywidgets.Checkbox(value=bool(value), indent=False, **common)
    if parameter.kind == "choice":
        choices = list(parameter.choices)
        if value not in choices:
            choices.append(value)
        options = [(getattr(one, "name", str(one)), one) for one in choices]
        return ipywidgets.Dropdown(options=options, value=value, **common)
    if parameter.kind in ("int", "float"):
        number = float if parameter.kind == "float" else int
        low = number(min(parameter.low or 0, value))
        high = number(max(parameter.high or 0, value))
        if parameter.kind == "int":
            return ipywidgets.IntSlider(value=value, min=low, max=high, **common)
        return ipywidgets.FloatSlider(
            value=value,
            min=low,
            max=high,
            step=(high - low) / 100 or 0.01,
            readout_format=".3f",
            **common,
        )
    if parameter.kind == "fixed":
        return ipywidgets.HTML(
            f"{parameter.name}: {parameter_repr(value)}", layout=ipywidgets.Layout(width="auto")
        )
    return ipywidgets.Text(value=repr(value), continuous_update=False, **common)


def value_of(parameter: Parameter, control: Any, current: Any) -> Any:
    """Return the value that a control stands for.

    Raises
    ------
    PolicyError
        If a text is not a Python literal.
    """
    if parameter.kind == "fixed":
        return current
    if parameter.kind != "literal":
        return control.value
    try:
        return ast.literal_eval(control.value)
    except (ValueError, SyntaxError):
        raise PolicyError(
            f"{parameter.name} must be a Python literal such as 3, 0.5, 'text' or None; got "
            f"{control.value!r}."
        ) from None


# --- what a class says ------------------------------------------------------------------------


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):
        # Names of a notebook or of TYPE_CHECKING blocks: the defaults then tell the kind.
        return {}


def _helps(cls: type) -> dict[str, str]:
    text = inspect.getdoc(cls) or ""
    match = re.search(r"^Parameters\n-+\n(.*?)(?=^\S[^\n]*\n-{3,}|\Z)", text, re.M | re.S)
    helps: dict[str, str] = {}
    for block in re.split(r"^(?=\S)", match[1] if match else "", flags=re.M):
        head, _, body = block.partition("\n")
        words = " ".join(body.split())
        for name in head.partition(":")[0].split(","):
            helps[name.strip()] = words
    return helps


def _kinds(hint: Any) -> list[Any]:
    """Return the members of a union, or the hint alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return list(typing.get_args(hint))
    return [hint]


def _accepts(cls: type[RoutingPolicy], values: Mapping[str, Any], facts: ModelFacts) -> str | None:
    """Return why a policy refuses these parameters; None if it accepts them."""
    try:
        cls(**values).check(facts)
    except Exception as error:
        # A user's own class may stumble over a value with any exception: also an answer.
        return str(error) or type(error).__name__
    return None


def _n_caution(cls: type[RoutingPolicy], values: Mapping[str, Any], facts: ModelFacts) -> int:
    try:
        return len(cls(**values).cautions(facts))
    except Exception:  # of a user's class; not what is asked here
        return 0


def _candidates(hint: Any, name: str, cls: type, facts: ModelFacts) -> list[Any]:
    width = facts.n_expert_used
    members = _kinds(hint)
    for member in members:
        if typing.get_origin(member) is Literal:
            return list(typing.get_args(member))
        if isinstance(member, type) and issubclass(member, Enum):
            return list(member)
        if member is bool:
            return [False, True]
        if member is int:
            return list(dict.fromkeys([max(1, width // 2), 1, 2, 16, width, 0]))
        if member is float or name in getattr(cls, "array_parameters", ()):
            return list(_FRACTIONS)
        if member is str:
            return [""]
    return [*_FRACTIONS, max(1, width // 2), 1, None, ""]


def _starts(
    cls: type[RoutingPolicy], defaults: dict[str, Any], hints: Mapping[str, Any], facts: ModelFacts
) -> dict[str, Any]:
    empty = inspect.Parameter.empty
    open_ = [name for name, value in defaults.items() if value is empty]
    options = [_candidates(hints.get(name), name, cls, facts) for name in open_]
    best: tuple[int, dict[str, Any]] | None = None
    refusal = ""
    for trial in itertools.islice(itertools.product(*options), _MOST_TRIALS):
        values = {**defaults, **dict(zip(open_, trial, strict=True))}
        why = _accepts(cls, values, facts)
        if why is not None:
            refusal = refusal or why
            continue
        # Nought is where most policies do nothing.
        cautions = _n_caution(cls, values, facts) + 10 * sum(
            one == 0 and not isinstance(one, bool) for one in trial
        )
        if best is None or cautions < best[0]:
            best = cautions, values
        if not cautions:
            break
    if best is not None:
        return best[1]
    first = {name: option[0] for name, option in zip(open_, options, strict=True)}
    adjusted = _adjusted(cls, {**defaults, **first}, facts)
    if adjusted is not None:
        return adjusted
    arrays = [name for name in open_ if name in getattr(cls, "array_parameters", ())]
    if arrays:
        make = (
            " Make one with " + f"{cls.__name__}.from_trace(trace)."
            if hasattr(cls, "from_trace")
            else ""
        )
        raise PolicyError(f"needs an array ({', '.join(arrays)}): pass an instance.{make}")
    raise PolicyError(refusal)


def _adjusted(
    cls: type[RoutingPolicy], values: dict[str, Any], facts: ModelFacts
) -> dict[str, Any] | None:
    """Return the values with one whole number lowered until the policy accepts it."""
    for name, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            for lower in range(value - 1, -1, -1):
                trial = {**values, name: lower}
                if _accepts(cls, trial, facts) is None:
                    return trial
    return None


def _parameter(
    cls: type[RoutingPolicy],
    name: str,
    starts: dict[str, Any],
    hint: Any,
    facts: ModelFacts,
    help_: str,
) -> Parameter:
    start = starts[name]
    members = _kinds(hint)

    def accepted(value: Any) -> bool:
        return _accepts(cls, {**starts, name: value}, facts) is None

    if is_array(start) or (isinstance(start, list | tuple) and name in cls.array_parameters):
        return Parameter(name, "fixed", start, help_)
    if isinstance(start, bool | np.bool_) or bool in members:
        return Parameter(name, "bool", bool(start), help_)
    for member in members:
        if typing.get_origin(member) is Literal:
            choices = (*typing.get_args(member), *([None] if type(None) in members else []))
            return Parameter(name, "choice", start, help_, choices=choices)
        if isinstance(member, type) and issubclass(member, Enum):
            return Parameter(name, "choice", start, help_, choices=tuple(member))
    whole = isinstance(start, int | np.integer) and float not in members
    if whole or (start is None and int in members):
        low, high = _whole_range(accepted, 1 if start is None else int(start), facts)
        if type(None) in members and high - low < _MOST_CHOICES:
            choices = (None, *range(low, high + 1))
            return Parameter(name, "choice", start, help_, choices=choices)
        if start is not None:
            return Parameter(name, "int", int(start), help_, low, high)
    if isinstance(start, int | float | np.number) and not isinstance(start, bool):
        low_, high_ = _range(accepted, float(start))
        return Parameter(name, "float", float(start), help_, low_, high_)
    return Parameter(name, "literal", start, help_)


def _whole_range(accepted: Callable[[Any], bool], start: int, facts: ModelFacts) -> tuple[int, int]:
    most = max(facts.n_expert, 4 * abs(start), 8)
    low = start
    while low > min(0, 4 * start) and accepted(low - 1):
        low -= 1
    high = start
    step = 1
    # In growing steps, then back: a range of thousands takes a few dozen trials.
    while high < most and accepted(min(high + step, most)):
        high = min(high + step, most)
        step *= 2
    while step > 1:
        step //= 2
        if high + step <= most and accepted(high + step):
            high += step
    return low, high


def _range(accepted: Callable[[Any], bool], start: float) -> tuple[float, float]:
    below = min(0.0, 4 * start)
    low = below if start < 0 or accepted(below) else start if start > 0 else 0.0
    if low == start > 0:
        low = next((v for v in (start / 100, start / 10) if accepted(v)), start)
    if accepted(1.0) and not accepted(1.01):
        return low, 1.0
    high = max(1.0, 4 * start)
    while high > start and not accepted(high):
        high = start + (high - start) / 2
        if high - start < 1e-3:
            return low, start
    return low, high


def policy_choice(
    policy: type[RoutingPolicy] | RoutingPolicy, label: str, facts: ModelFacts
) -> PolicyChoice:
    """Return what choosing a policy means here.

    Raises
    ------
    PolicyError
        If it cannot work here, in the policy's own words.
    """
    try:
        parameters = parameters_of(policy, facts)
    except BmoeLabError:
        raise
    except TypeError as error:
        raise PolicyError(f"{label} must name its parameters; got {error}.") from error
    if isinstance(policy, type):
        return PolicyChoice(label, policy, parameters)
    return PolicyChoice(label, type(policy), parameters, policy)
