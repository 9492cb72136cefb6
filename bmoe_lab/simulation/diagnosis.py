"""Whether a cache can help with a trace: is there a hot set, does the budget hold one token."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.errors import SettingsError
from bmoe_lab.metrics._shared import PhaseName
from bmoe_lab.schema import Residency
from bmoe_lab.simulation.plan import trace_facts
from bmoe_lab.simulation.sweeping import sweep
from bmoe_lab.sizes import format_size, parse_size

__all__ = ["Diagnosis", "chance_hit_rate", "diagnose"]

Verdict = Literal["below the cliff", "everything fits", "hot set", "no hot set"]

# A hot set answers at least this part of the lookups that chance leaves over. Recorded traces of
# three models give 0.2 to 0.4 at one token cycle, even use gives 0.
_HOT = 0.2

_ADVICE: dict[str, str] = {
    "below the cliff": (
        "A global LRU hits nothing: every expert is gone before its next token. Allow at least one "
        "token cycle, or take a policy that keeps the most used ones."
    ),
    "everything fits": (
        "All experts that were asked for fit at once: each is read once, whatever the policy."
    ),
    "hot set": (
        "Some experts are used far more than others and fit: a cache pays, and the distance from "
        "LRU to the oracle is what a better policy can gain."
    ),
    "no hot set": (
        "Experts are used almost evenly: no policy gets far above the share of experts that fit. "
        "More memory or fewer reads help, another policy does not."
    ),
}

# The order of the rows, with words and how the number is shown.
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("budget_bytes", "budget", "size"),
    ("token_cycle_bytes", "token cycle T", "size"),
    ("budget_per_token_cycle", "budget / T", "ratio"),
    ("hit_rate_realised", "hit rate recorded", "rate"),
    ("hit_rate_lru", "LRU", "rate"),
    ("hit_rate_oracle", "stationary oracle", "rate"),
    ("hit_rate_belady", "Belady", "rate"),
    ("hit_rate_chance", "oracle if use were even", "rate"),
    ("hot_set_strength", "hot set beyond chance", "rate"),
    ("slots_per_demand", "budget / experts asked for", "ratio"),
    ("experts_used_frac", "share of experts asked for", "rate"),
    ("top8_share", "share of the top 8 per layer", "rate"),
    ("top8_share_even", "the same if use were even", "rate"),
)


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found.

    Attributes
    ----------
    verdict : {"below the cliff", "everything fits", "hot set", "no hot set"}
        In two words.
    advice : str
        What it means.
    phase : str
        Phase that the numbers count.
    numbers : dict of str to float
        See :func:`diagnose`; NaN where unknown.
    """

    verdict: Verdict
    advice: str
    phase: str
    numbers: dict[str, float]

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers in words, for tables."""
        return [(words, _shown(self.numbers[name], kind)) for name, words, kind in _ROWS]

    def __repr__(self) -> str:
        shown = dict(self.rows())
        return (
            f"<{self.verdict}: {shown['budget']} of experts, token cycle {shown['token cycle T']}; "
            f"{self.phase} hit rate: recorded {shown['hit rate recorded']}, LRU {shown['LRU']}, "
            f"oracle {shown['stationary oracle']}, Belady {shown['Belady']}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(words)}</td><td style='text-align:right'>{html.escape(value)}"
            "</td></tr>"
            for words, value in self.rows()
        )
        return (
            f"<div><b>{html.escape(self.verdict)}</b> ({html.escape(self.phase)}). "
            f"{html.escape(self.advice)}<table>{rows}</table></div>"
        )


def diagnose(
    trace: xr.Dataset, budget: int | str | None = None, *, phase: PhaseName = "decode"
) -> Diagnosis:
    """Return whether a cache of this size can do much for a trace, with the numbers.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace; reads ``expert_applied``, ``expert_bytes``, and, where they are known,
        ``residency`` and the attribute ``cache_budget_bytes``.
    budget : int or str, optional
        Bytes or a size such as ``"2 GiB"``; by default the recorded one.
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Phase that the numbers count; all are served.

    Returns
    -------
    Diagnosis
        ``verdict``, ``advice`` and ``numbers``: ``budget_bytes``, ``token_cycle_bytes``,
        ``budget_per_token_cycle``; the hit rates ``hit_rate_realised`` (as recorded; NaN if the
        trace does not tell, or tells of another budget), ``hit_rate_lru``, ``hit_rate_oracle``
        (the best fixed set, in hindsight), ``hit_rate_belady`` (exact only for experts of equal
        size), ``hit_rate_chance`` (the oracle if every expert were as likely);
        ``hot_set_strength`` = (oracle - chance) / (1 - chance); ``slots_per_demand`` = budget /
        bytes of all experts asked for in the phase; ``experts_used_frac``, ``top8_share``,
        ``top8_share_even`` = 8 / experts.

    Raises
    ------
    SettingsError
        If there is no budget, or the phase asks for no expert.
    SchemaError
        If the trace lacks ``expert_bytes``.

    See Also
    --------
    lru_curve : LRU at every budget.
    sweep : Other policies.

    Notes
    -----
    *Below the cliff*: budget < token cycle (:func:`bmoe_lab.metrics.token_cycle_bytes`).
    *Everything fits*: budget >= bytes of all experts asked for. *Hot set*: strength of at least
    0.2; recorded traces of 26B to 120B models give 0.2 to 0.4 at one token cycle. A short trace
    looks concentrated by chance alone, which is why the oracle is held against
    :func:`chance_hit_rate` rather than against the share of experts that fit.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> diagnose(make_trace(n_token=64, n_layer=4, seed=0), "40 KiB").verdict
    'below the cliff'
    """
    size, recorded = _budget(trace, budget)
    facts = trace_facts(trace)
    grid = sweep(
        trace,
        residency=["lru", "stationary_oracle", "belady"],
        budgets=size,
        phase=phase,
        progress=False,
    )
    rates = grid[f"hit_rate_{phase}"].isel(trace=0, budget=0, routing=0)
    oracle = float(rates.sel(residency="stationary_oracle"))
    used = metrics.used_bytes(trace, which="applied", phase=phase).values
    wanted = float(np.nansum(used))
    bank = float(facts.key_bytes.sum())
    lookups = float(grid[f"lookups_{phase}"].isel(trace=0, residency=0, budget=0, routing=0))
    if not lookups > 0:
        raise SettingsError(
            f"phase must be one in which the trace asks for experts; got {phase!r}, in which it "
            "asks for none. Pass another phase, such as 'all'."
        )
    chance = chance_hit_rate(lookups / facts.key_bytes.size, size / bank)
    numbers = {
        "budget_bytes": float(size),
        "token_cycle_bytes": float(facts.token_cycle_bytes),
        "budget_per_token_cycle": size / facts.token_cycle_bytes,
        "hit_rate_realised": _realised(trace, phase) if recorded else math.nan,
        "hit_rate_lru": float(rates.sel(residency="lru")),
        "hit_rate_oracle": oracle,
        "hit_rate_belady": float(rates.sel(residency="belady")),
        "hit_rate_chance": chance,
        "hot_set_strength": (oracle - chance) / (1 - chance) if chance < 1 else math.nan,
        "slots_per_demand": size / wanted if wanted else math.nan,
        "experts_used_frac": float(metrics.experts_used(trace, which="applied", phase=phase).sum())
        / facts.key_bytes.size,
        "top8_share": float(metrics.top_share(trace, 8, which="applied", phase=phase).mean()),
        "top8_share_even": min(1.0, 8 / facts.n_expert),
    }
    verdict = _verdict(numbers)
    return Diagnosis(verdict, _ADVICE[verdict], phase, numbers)


def chance_hit_rate(n_per_expert: float, share: float) -> float:
    """Return the hit rate of the best fixed set if every expert were equally likely.

    In hindsight even use is not even: some experts happen to be drawn more often.

    Parameters
    ----------
    n_per_expert : float
        Lookups over experts.
    share : float
        Part of the experts that the set holds, in [0, 1].

    Returns
    -------
    float
        In [share, 1]; NaN without lookups.

    Notes
    -----
    Uses per expert are taken as Poisson with mean m = `n_per_expert`; the set holds the upper tail
    of weight `share`: sum of x P(x) over that tail / m. Long traces give `share` itself.

    Examples
    --------
    >>> round(chance_hit_rate(1.0, 0.1), 3), round(chance_hit_rate(1e6, 0.1), 3)
    (0.304, 0.1)
    """
    if not n_per_expert > 0:
        return math.nan
    share = min(max(share, 0.0), 1.0)
    spread = 12 * math.sqrt(n_per_expert) + 12
    uses = np.arange(max(0, int(n_per_expert - spread)), int(n_per_expert + spread) + 1)
    log_factorial = np.array([math.lgamma(x + 1) for x in uses.tolist()])
    probability = np.exp(uses * math.log(n_per_expert) - n_per_expert - log_factorial)
    uses, probability = uses[::-1], probability[::-1]
    held = np.clip(share - (np.cumsum(probability) - probability), 0.0, probability)
    return float(min(1.0, (held * uses).sum() / n_per_expert))


def _verdict(numbers: dict[str, float]) -> Verdict:
    if numbers["slots_per_demand"] >= 1:
        return "everything fits"
    if numbers["budget_per_token_cycle"] < 1:
        return "below the cliff"
    return "hot set" if numbers["hot_set_strength"] >= _HOT else "no hot set"


def _budget(trace: xr.Dataset, budget: int | str | None) -> tuple[int, bool]:
    """Return the budget, and whether the recorded hits are known to be those under it."""
    told = trace.attrs.get("cache_budget_bytes")
    if budget is not None:
        size = parse_size(budget, name="budget")
        return size, told is not None and int(told) == size
    if told is None:
        raise SettingsError(
            "budget must be given for a trace that does not record one; got None. "
            "Pass a size such as '2 GiB'."
        )
    return int(told), True


def _realised(trace: xr.Dataset, phase: PhaseName) -> float:
    if "residency" not in trace.variables:
        return math.nan
    known = np.isin(
        np.asarray(trace["residency"].values),
        [Residency.miss.value, Residency.hit.value, Residency.hit_speculative.value],
    )
    return float(metrics.hit_rate(trace, phase=phase)) if known.any() else math.nan


def _shown(value: float, kind: str) -> str:
    if math.isnan(value):
        return "unknown"
    if kind == "size":
        return format_size(value)
    return f"{100 * value:.1f} %" if kind == "rate" else f"{value:.2f}"
