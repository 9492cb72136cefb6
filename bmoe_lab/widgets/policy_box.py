"""A routing policy as text, the way its ``repr`` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from bmoe_lab.errors import BmoeLabError
from bmoe_lab.policy_text import parse_routing

if TYPE_CHECKING:
    from bmoe_lab.routing import RoutingPolicy

__all__ = ["PolicyBox"]

_LOSSLESS = "Lossless()"
#: One setting of each policy that needs no array: a start, to be edited.
_EXAMPLES = (
    _LOSSLESS,
    "DropCold(frac=0.75)",
    "CachePrior(strength=0.15)",
    "TopP(p=0.9)",
    "DropBelow(threshold=0.05)",
    "RatioSkip(ratio=0.25)",
    "FewerExperts(n_used=2)",
    "MaxRank(keep=1, rank=8)",
    "CumSum(keep=1, p=0.9)",
    "ResidentOnly(every=4, frac=0.5)",
    "RandomDrop(rate=0.1)",
    "RandomSubstitute(rate=0.1)",
)


class PolicyBox(ipywidgets.Combobox):
    """A text field for a routing policy, with one setting of each as a suggestion.

    Parameters
    ----------
    policy : RoutingPolicy, optional
        Left out, lossless. One of the user's own classes is shown by its ``repr``, and stays until
        the text is changed to something else.

    Attributes
    ----------
    policy : RoutingPolicy or None
        What the text says, if it says a policy.
    error : str
        Why it does not; empty otherwise.

    Examples
    --------
    >>> box = PolicyBox()
    >>> box.value = "DropCold(0.5)"
    >>> box.policy
    DropCold(frac=0.5)
    >>> box.value = "DropCold("
    >>> box.error.startswith("policy must be")
    True
    """

    value: Any  # the text; ipywidgets' own trait
    policy = traitlets.Any(None, allow_none=True)
    error = traitlets.Unicode()

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        super().__init__(
            value=_text_of(policy),
            policy=policy,
            options=_EXAMPLES,
            continuous_update=False,
            description="policy",
            tooltip="a routing policy with its parameters, as in DropCold(0.75)",
            layout=ipywidgets.Layout(flex="1 1 260px", max_width="460px"),
            style={"description_width": "initial"},
        )
        self.observe(self._on_text, "value")
        self.observe(self._on_policy, "policy")

    def _on_text(self, change: Any) -> None:
        text = change.new.strip()
        if text == _text_of(self.policy):
            self.error = ""
            return
        try:
            policy = parse_routing(text) if text not in ("", _LOSSLESS) else None
        except BmoeLabError as error:
            self.error = str(error)
            return
        self.error = ""
        self.policy = policy

    def _on_policy(self, change: Any) -> None:
        # The person's own spelling stays, if it means the same.
        if change.new is None and self.value.strip() in ("", _LOSSLESS):
            return
        try:
            same = parse_routing(self.value) == change.new
        except BmoeLabError:
            same = False
        if not same:
            self.value = _text_of(change.new)


def _text_of(policy: object) -> str:
    return _LOSSLESS if policy is None else repr(policy)
