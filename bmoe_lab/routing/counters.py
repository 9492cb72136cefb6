"""What a routing policy did over a run, counted."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass
class Counters:
    """Counts over the routings of the phases in which the policy acts.

    A policy that looked and changed nothing has ``examined > 0`` and ``changed == 0``; one that
    never looked has ``examined == 0``. The two are different findings.

    Attributes
    ----------
    routings : int
        What one layer chose for one token, counted once each.
    examined : int
        Slots of those routings.
    eligible : int
        Slots that the policy might have changed: all but those that it pins.
    changed : int
        Slots that no longer run the router's choice (dropped or substituted).
    dropped, substituted, reweighted : int
        Slots by what happened to them. A slot that was substituted and then dropped counts in
        both, but once in `changed`.
    weight_total, weight_discarded : float
        Router weights of all slots and of the dropped ones. Weights that are not known when the
        policy acts (it only selects, or the model's weight is NaN) are in neither.
    bytes_saved : int
        Bytes of the missing experts that the router's choice would have read less those that
        the policy's choice reads, distinct experts per load, at the residency before the load.
        Not the difference to a lossless run, where the spared expert would have stayed resident.
    """

    routings: int = 0
    examined: int = 0
    eligible: int = 0
    changed: int = 0
    dropped: int = 0
    substituted: int = 0
    reweighted: int = 0
    weight_total: float = 0.0
    weight_discarded: float = 0.0
    bytes_saved: int = 0

    @property
    def rate(self) -> float:
        """Changed slots per eligible slot; NaN if nothing was eligible."""
        return self.changed / self.eligible if self.eligible else math.nan

    @property
    def control_rate(self) -> float:
        """The `rate` at which a control changes as many slots; NaN if nothing was examined.

        The controls pin one slot per routing, whatever the policy under test pins, so this
        differs from `rate` where that policy pins none or several. At most 1.
        """
        free = self.examined - self.routings
        return min(self.changed / free, 1.0) if free else math.nan

    @property
    def weight_discarded_frac(self) -> float:
        """Discarded weight per weight; NaN if no weight was known."""
        return self.weight_discarded / self.weight_total if self.weight_total else math.nan

    @property
    def fired(self) -> bool:
        """Whether the policy changed anything at all."""
        return self.changed > 0 or self.reweighted > 0

    def to_dict(self) -> dict[str, int | float]:
        """Return the counts and the rates by name; what is unknown is left out, never 0 or NaN.

        Examples
        --------
        >>> counts = Counters(routings=1, examined=4, eligible=3, changed=3).to_dict()
        >>> counts["rate"], "weight_total" in counts
        (1.0, False)
        """
        counts: dict[str, int | float] = dataclasses.asdict(self)
        if not self.weight_total:
            del counts["weight_total"], counts["weight_discarded"]
        rates = {
            "rate": self.rate,
            "control_rate": self.control_rate,
            "weight_discarded_frac": self.weight_discarded_frac,
        }
        return counts | {name: rate for name, rate in rates.items() if not math.isnan(rate)}
