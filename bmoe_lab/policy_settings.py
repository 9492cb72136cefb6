"""How a policy's parameters are written into attributes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bmoe_lab.parameters import Parametrised, array_digest, is_array

__all__ = ["policy_settings"]


def policy_settings(policy: Parametrised | None) -> dict[str, Any]:
    """Return a policy's class and parameters as JSON holds them.

    Arrays are named by shape, dtype and SHA-256; what JSON cannot hold, by its repr.

    Parameters
    ----------
    policy : Parametrised or None
        None stands for the lossless policy.

    Examples
    --------
    >>> from bmoe_lab.routing import DropCold
    >>> policy_settings(DropCold(0.5))["params"]["frac"]
    0.5
    """
    if policy is None:
        return {"name": "Lossless", "params": {}}
    return {
        "name": type(policy).__name__,
        "params": {name: _plain(value) for name, value in policy.get_params().items()},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if is_array(value):
        array = np.asarray(value)
        return {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "sha256": array_digest(array),
        }
    if isinstance(value, Parametrised):
        return policy_settings(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value
