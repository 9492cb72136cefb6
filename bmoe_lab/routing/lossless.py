"""The router's own choice, untouched."""

from __future__ import annotations

from typing import ClassVar

from bmoe_lab.routing.base import ModelFacts, RoutingPolicy

__all__ = ["Lossless"]


class Lossless(RoutingPolicy):
    """Change nothing: what a run without a policy uses.

    Examples
    --------
    >>> Lossless().lossless
    True
    """

    name: ClassVar[str] = "lossless"
    lossless: ClassVar[bool] = True

    def neutral(self) -> Lossless:
        """Return another one."""
        return Lossless()

    def effective(self, facts: ModelFacts) -> str:
        """Return in one clause what the parameters come to on this model."""
        return "changes nothing"
