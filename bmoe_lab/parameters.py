"""Keyword parameters stored as given: what policies know about themselves.

A policy is its class plus its parameters, so it can be shown, compared, copied for a run and
written into a trace. As in scikit-learn, ``__init__`` only stores its keyword arguments under
their own names; work and checks happen later.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Self

import numpy as np

from bmoe_lab.errors import PolicyError

__all__ = ["Parametrised"]


def _signature(cls: type) -> tuple[inspect.Parameter, ...]:
    """Return the constructor's parameters; refuse those that cannot be listed by name."""
    parameters = tuple(inspect.signature(cls).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PolicyError(
                f"{cls.__name__}.__init__ must name each of its parameters; got "
                f"{str(parameter)!r}. Write every parameter out, as in __init__(self, strength)."
            )
    return parameters


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        left, right = np.asarray(left), np.asarray(right)
        floats = left.dtype.kind in "fc" and right.dtype.kind in "fc"
        return np.array_equal(left, right, equal_nan=floats)
    return bool(left == right)


class Parametrised:
    """Base of objects that are their class plus their constructor's parameters.

    Examples
    --------
    >>> class Threshold(Parametrised):
    ...     def __init__(self, value, strict=True):
    ...         self.value = value
    ...         self.strict = strict
    >>> Threshold(0.5)
    Threshold(value=0.5)
    >>> Threshold(0.5, strict=False).get_params()
    {'value': 0.5, 'strict': False}
    >>> Threshold(0.5).clone() == Threshold(value=0.5)
    True
    """

    def get_params(self) -> dict[str, Any]:
        """Return the constructor's parameters with their values, in the order of the signature.

        Raises
        ------
        PolicyError
            If a parameter was not stored under its own name.
        """
        params = {}
        for parameter in _signature(type(self)):
            if not hasattr(self, parameter.name):
                raise PolicyError(
                    f"{type(self).__name__}.__init__ must store {parameter.name!r} under its own "
                    f"name; got an object without it. Add self.{parameter.name} = "
                    f"{parameter.name}."
                )
            params[parameter.name] = getattr(self, parameter.name)
        return params

    def clone(self) -> Self:
        """Return a new object of the same class with copies of the same parameters.

        Nothing that the original has learnt while running is carried over.
        """
        params = copy.deepcopy(self.get_params())
        twin = type(self)(**params)
        for name, value in twin.get_params().items():
            if value is not params[name] and not _equal(value, params[name]):
                raise PolicyError(
                    f"{type(self).__name__}.__init__ must store {name!r} as given; got "
                    f"{value!r} for {params[name]!r}. Change it where it is used instead."
                )
        return twin

    def __repr__(self) -> str:
        shown = [
            f"{parameter.name}={value!r}"
            for parameter, value in zip(
                _signature(type(self)), self.get_params().values(), strict=True
            )
            if parameter.default is parameter.empty or not _equal(value, parameter.default)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Parametrised):
            return NotImplemented
        mine, theirs = self.get_params(), other.get_params()
        return all(_equal(value, theirs[name]) for name, value in mine.items())

    def __hash__(self) -> int:
        # Equal parameters may print differently (1 and 1.0), so only the class is hashed.
        return hash(type(self))
