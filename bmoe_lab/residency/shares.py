"""Part of a budget for one queue of a policy, in whole bytes."""

from __future__ import annotations

import numbers
from fractions import Fraction

from bmoe_lab.errors import PolicyError
from bmoe_lab.residency.base import ResidencyPolicy

__all__ = ["share_of"]


def share_of(n_bytes: int, policy: ResidencyPolicy, name: str, *, rest: bool = False) -> int:
    """Return the share of `n_bytes` that the policy's parameter `name` gives, rounded down.

    The fraction is taken as it is written, so 0.57 of 100 bytes is 57 and not the 56 that the
    product of floats would leave.

    Parameters
    ----------
    n_bytes : int
    policy : ResidencyPolicy
    name : str
        A parameter that must be a fraction in [0, 1].
    rest : bool, default False
        Return the share of what the parameter leaves, ``1 - fraction``, instead.

    Returns
    -------
    int
        Bytes, in [0, `n_bytes`].

    Raises
    ------
    PolicyError
        If the parameter is no such fraction.
    """
    frac = getattr(policy, name)
    if (
        isinstance(frac, bool)
        or not isinstance(frac, numbers.Real)
        # Written so that NaN, which fails every comparison, is refused.
        or not (0.0 <= float(frac) <= 1.0)
    ):
        raise PolicyError(
            f"{name} must be a number in [0, 1]; got {frac!r} in {type(policy).__name__}. "
            "It is a share of the budget's bytes."
        )
    exact = Fraction(repr(float(frac)))
    return int((1 - exact if rest else exact) * n_bytes)
