"""Parameters that may differ from layer to layer: one number, or an array of one per layer."""

from __future__ import annotations

import numpy as np

from bmoe_lab.errors import PolicyError
from bmoe_lab.parameters import parameter_repr
from bmoe_lab.routing.base import ModelFacts, RoutingPolicy

__all__ = ["at_layer", "check_n_layer", "require_per_layer"]


def at_layer(policy: RoutingPolicy, name: str, layer: int) -> float:
    """Return parameter `name` of `policy` in `layer`.

    Raises
    ------
    PolicyError
        If the array has no such layer.

    Examples
    --------
    >>> from bmoe_lab.routing import RatioSkip
    >>> at_layer(RatioSkip([0.2, 0.4]), "ratio", 1), at_layer(RatioSkip(0.3), "ratio", 1)
    (0.4, 0.3)
    """
    values = np.asarray(getattr(policy, name), dtype=np.float64)
    if not values.ndim:
        return float(values)
    if layer >= values.size:
        raise PolicyError(
            f"{name} must have a number for each layer that routes; got {values.size} of them and "
            f"layer {layer} in {policy!r}."
        )
    return float(values[layer])


def require_per_layer(
    policy: RoutingPolicy, name: str, meaning: str, *, at_most: float = np.inf, array_only: bool
) -> None:
    """Raise PolicyError unless parameter `name` holds finite numbers in [0, at_most]."""
    value = getattr(policy, name)
    kind = "an array" if array_only else "a number or an array"
    rule = f"{name} must be {kind} of one number per layer"
    got = f"got {parameter_repr(value)} in {type(policy).__name__}. {meaning}"
    try:
        values = np.asarray(value)
    except ValueError:  # lists of unequal length
        raise PolicyError(f"{rule}; {got}") from None
    if values.dtype.kind not in "iuf" or values.ndim > 1 or (array_only and not values.ndim):
        raise PolicyError(f"{rule}; {got}")
    # So written that NaN is refused.
    if not ((values >= 0) & (values <= at_most) & np.isfinite(values)).all():
        limits = "at least 0 and finite" if at_most == np.inf else f"in [0, {at_most:g}]"
        raise PolicyError(f"{name} must be {limits} in every layer; {got}")


def check_n_layer(policy: RoutingPolicy, name: str, facts: ModelFacts) -> None:
    """Raise PolicyError if parameter `name` is an array of another number of layers."""
    shape = np.shape(getattr(policy, name))
    if shape and shape[0] != facts.n_layer:
        raise PolicyError(
            f"{name} must have one entry for each of the {facts.n_layer} layers that route; got "
            f"{shape[0]} in {policy!r}. It was made for another model."
        )
