"""Keyword parameters stored as given: what policies know about themselves.

A policy is its class plus its parameters, so it can be shown, compared, copied for a run and
written into a trace. As in scikit-learn, ``__init__`` only stores its keyword arguments under
their own names; work and checks happen later.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from typing import Any, Self

import numpy as np

from bmoe_lab.errors import PolicyError

__all__ = ["Parametrised", "array_digest", "is_array", "parameter_repr"]

_DIGEST_SHOWN = 8


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


def is_array(value: object) -> bool:
    """Return whether `value` is an array, of NumPy or of a kin such as xarray; scalars are not.

    Examples
    --------
    >>> is_array(np.zeros(3)), is_array(np.float64(3)), is_array([1, 2, 3])
    (True, False, False)
    """
    return hasattr(value, "__array__") and not isinstance(value, np.generic | type)


def array_digest(value: Any) -> str:
    """Return the SHA-256 of an array's bytes in C order, by which a trace names it.

    Examples
    --------
    >>> array_digest(np.zeros(3, np.uint8))[:8]
    '709e80c8'
    """
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def parameter_repr(value: Any) -> str:
    """Return the repr of a parameter; an array's is short, whatever its size.

    Examples
    --------
    >>> parameter_repr(np.float64(0.5)), parameter_repr(np.zeros(3, np.uint8))
    ('0.5', "array(shape=(3,), sha256='709e80c8')")
    """
    if not is_array(value):
        # numpy's numbers are shown, and written into traces, as the numbers that they are.
        return repr(value.item() if isinstance(value, np.generic) else value)
    return f"array(shape={np.shape(value)}, sha256={array_digest(value)[:_DIGEST_SHOWN]!r})"


def _equal(left: Any, right: Any) -> bool:
    if is_array(left) or is_array(right):
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

    Arrays are compared by what they hold, and shown by shape and the start of their SHA-256:

    >>> Threshold(np.zeros((48, 128)))
    Threshold(value=array(shape=(48, 128), sha256='2aae7dc8'))
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
                    f"{parameter_repr(value)} for {parameter_repr(params[name])}. Change it where "
                    f"it is used instead."
                )
        return twin

    def __repr__(self) -> str:
        shown = [
            f"{parameter.name}={parameter_repr(value)}"
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
