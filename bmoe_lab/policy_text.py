"""Policies written as text, the way their ``repr`` shows them: ``"DropCold(0.75)"``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeVar

from bmoe_lab.errors import SettingsError, UnknownNameError, unknown_name

__all__ = ["parse_residency", "parse_routing"]

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


def parse_residency(text: str) -> Any:
    """Return the residency policy that `text` describes.

    As in :func:`parse_routing`; a policy within a policy is written the same way. Names of the
    registry stand for the policy with its defaults, ``layer`` and ``layerlfu`` for the per-layer
    policies of BigMoeOnEdge's published curves.

    Parameters
    ----------
    text : str
        A class name with or without parameters, such as ``"LFU(keep_counts=False)"``, or a name
        such as ``"lru"``.

    Raises
    ------
    UnknownNameError
        If there is no such policy.
    SettingsError
        If the text is not a call with literal values, or the parameters do not fit.

    Examples
    --------
    >>> parse_residency("PerLayer(LFU(), budget='2 GiB')"), parse_residency("lru")
    (PerLayer(policy=LFU(), budget='2 GiB'), LRU())
    >>> parse_residency("layer")
    PerLayer(trim='visited')
    """
    from bmoe_lab import residency

    published = {"layer": "lru", "layerlfu": "lfu"}
    if text.strip() in published:
        return residency.PerLayer(published[text.strip()], trim="visited")
    classes = {name: residency.get(name) for name in residency.names()}
    rule = "residency must be written like LFU(keep_counts=False)"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise SettingsError(f"{rule}; got {text!r}.") from error
    if not isinstance(tree, ast.Name | ast.Call):
        raise SettingsError(f"{rule}; got {text!r}.")
    try:
        return _residency_of(tree, classes | {one.__name__: one for one in classes.values()})
    except UnknownNameError as error:
        known = [*sorted(classes), *published]
        raise unknown_name("residency policy", error.args[0], known) from None
    except (ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, TypeError) else "something in it is not plain"
        raise SettingsError(f"{rule}, with plain values; got {text!r}: {reason}.") from error


def _residency_of(node: ast.expr, classes: Mapping[str, Any]) -> Any:
    """Return the policy or the literal value that a part of the text stands for."""
    call = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return ast.literal_eval(node)
    if call.func.id not in classes:
        raise UnknownNameError(call.func.id)
    args = [_residency_of(argument, classes) for argument in call.args]
    kwargs = {word.arg: _residency_of(word.value, classes) for word in call.keywords if word.arg}
    return classes[call.func.id](*args, **kwargs)


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
