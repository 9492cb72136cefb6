"""Policies written as text, the way their ``repr`` shows them: ``"DropCold(0.75)"``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeVar

from bmoe_lab.errors import SettingsError, unknown_name

__all__ = ["parse_routing"]

T = TypeVar("T")


def parse_routing(text: str) -> Any:
    """Return the routing policy that `text` describes.

    Only a class that ships with the package, called with literal values, is accepted: the text
    may come from a shell or a file, so nothing in it is evaluated.

    Parameters
    ----------
    text : str
        A class name with or without parameters, such as ``"DropCold(frac=0.75)"``.

    Raises
    ------
    UnknownNameError
        If there is no such policy.
    SettingsError
        If the text is not a call with literal values, the parameters do not fit, or one of them is
        an array.

    Examples
    --------
    >>> parse_routing("CachePrior(0.15, keep=2)")
    CachePrior(strength=0.15, keep=2)
    """
    from bmoe_lab import routing

    classes = {type_.__name__: type_ for type_ in map(routing.get, routing.names())}
    return _parse(text, classes, "policy")


def _parse(text: str, classes: Mapping[str, type[T]], kind: str) -> T:
    rule = f"{kind} must be written like DropCold(0.75)"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise SettingsError(f"{rule}; got {text!r}.") from error
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    if not isinstance(call.func, ast.Name):
        raise SettingsError(f"{rule}; got {text!r}.")
    if call.func.id not in classes:
        raise unknown_name(kind, call.func.id, classes)
    try:
        args = [ast.literal_eval(argument) for argument in call.args]
        kwargs = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        return classes[call.func.id](*args, **kwargs)
    except (ValueError, TypeError) as error:
        # literal_eval names its own parse tree, which tells a reader nothing.
        reason = str(error) if isinstance(error, TypeError) else "something in it is not plain"
        arrays = sorted(getattr(classes[call.func.id], "array_parameters", ()))
        hint = (
            f" An array ({', '.join(arrays)}) cannot be written as text: make this "
            f"{call.func.id} in Python."
            if arrays
            else ""
        )
        raise SettingsError(f"{rule}, with plain values; got {text!r}: {reason}.{hint}") from error
