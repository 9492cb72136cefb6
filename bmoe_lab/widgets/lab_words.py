"""What a policy lab says in words and tables: five questions, numbers, live results."""

from __future__ import annotations

import math
from html import escape

import numpy as np
import xarray as xr

from bmoe_lab.plots import theme
from bmoe_lab.sizes import format_size
from bmoe_lab.widgets.html_table import html_table
from bmoe_lab.widgets.lab_setting import Outcome, Replays

__all__ = ["OPEN_LOOP", "budget_words", "live_html", "numbers_html", "questions_html"]

OPEN_LOOP = "counterfactual (open loop)"
_UNKNOWN = "unknown"

_ROWS = (
    ("hit rate", "hit_rate", "rate"),
    ("misses per token", "misses_per_token", "number"),
    ("bytes read per token", "read_bytes_per_token", "size"),
    ("slots dropped", "drop_rate", "rate"),
    ("slots substituted", "substitution_rate", "rate"),
    ("weight discarded", "weight_discarded_frac", "rate"),
)


def _shown(value: float, kind: str, *, sign: bool = False) -> str:
    if math.isnan(value):
        return _UNKNOWN
    mark = "+" if sign and value > 0 else ""
    if kind == "rate":
        return f"{mark}{100 * value:.2f} %"
    if kind == "size":
        return mark + format_size(value)
    return f"{mark}{value:.2f}"


def budget_words(budget: int, replays: Replays) -> str:
    """Return what a budget is: bytes, share of all experts, where the cliff is.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> budget_words(1000, Replays(make_trace(n_token=8, n_layer=2, seed=0)))
    '1000 B, 0.7 % of all experts: below the cliff (one token asks for 36.0 KiB)'
    """
    cycle = replays.facts.token_cycle_bytes
    share = 100 * budget / replays.bank_bytes if replays.bank_bytes else math.nan
    where = "below the cliff" if budget < cycle else f"{budget / cycle:.2f} token cycles"
    return (
        f"{format_size(budget)}, {share:.1f} % of all experts: {where} "
        f"(one token asks for {format_size(cycle)})"
    )


def numbers_html(outcome: Outcome, baseline: Outcome | None) -> str:
    """Return a table: this setting, its lossless baseline, the difference."""
    rows = []
    for words, name, kind in _ROWS:
        mine = outcome.numbers[name]
        base = math.nan if baseline is None else baseline.numbers[name]
        rows.append(
            [
                words,
                _shown(mine, kind),
                _shown(base, kind),
                _shown(mine - base, kind, sign=True),
            ]
        )
    head = [f"{outcome.effect.phase} tokens", "this setting", "lossless baseline", "difference"]
    return html_table(head, rows, left=1)


def questions_html(
    replays: Replays, hot: str, outcome: Outcome, baseline: Outcome | None, live: str
) -> str:
    """Return the five questions with their answers, a line each."""
    setting = outcome.setting
    cliff = "the recorded residency stands; choose a residency policy to move the budget"
    if setting.budget is not None:
        cliff = budget_words(setting.budget, replays)
    pairs = [
        ("Is there a hot set?", hot),
        ("Where is the cliff?", cliff),
        ("Which layers miss?", _misses(outcome)),
        ("What did the policy change?", _changed(replays, outcome)),
        ("What did it cost and save?", _price(outcome, baseline, live)),
    ]
    rows = "".join(
        f"<tr><th style='text-align:left;vertical-align:top;padding:1px 12px 1px 0;"
        f"white-space:nowrap'>{escape(question)}</th><td style='padding:1px 0'>{escape(answer)}"
        "</td></tr>"
        for question, answer in pairs
    )
    return f"<table style='line-height:1.45'>{rows}</table>"


def _misses(outcome: Outcome) -> str:
    misses = outcome.effect.layers["misses_per_token"]
    if not np.isfinite(misses).any() or not np.nansum(misses):
        return "none"
    order = np.argsort(-misses, kind="stable")
    most = ", ".join(f"{int(layer)} ({misses[layer]:.2f})" for layer in order[:3])
    least = int(order[-1])
    return (
        f"most misses per token in layer {most}; fewest in {least} ({misses[least]:.2f}); "
        f"{outcome.numbers['misses_per_token']:.1f} over all {misses.size} layers"
    )


def _changed(replays: Replays, outcome: Outcome) -> str:
    routing = outcome.setting.routing
    numbers = outcome.numbers
    slots = numbers["drop_rate"] + numbers["substitution_rate"]
    if routing is None:
        if replays.changed:
            return f"the run was recorded under one: {_shown(slots, 'rate')} of the slots changed"
        return "no routing policy is on: every expert runs as the router chose"
    if routing.lossless:
        return "nothing: this policy is lossless"
    facts = replays.facts.routing
    said = routing.effective(facts)
    if outcome.fired is False:
        return (
            f"NOTHING: it never fired. It {said}."
            if said != repr(routing)
            else ("NOTHING: it never fired.")
        )
    clause = "" if said == repr(routing) else f" (it {said})"
    return f"{_shown(slots, 'rate')} of the slots{clause}; {OPEN_LOOP}"


def _price(outcome: Outcome, baseline: Outcome | None, live: str) -> str:
    if outcome.setting.routing is None:
        return "nothing: this is the baseline"
    if baseline is None:
        return "unknown: there is no lossless baseline for this setting"
    mine, base = (one.numbers["read_bytes_per_token"] for one in (outcome, baseline))
    share = f" ({100 * (mine - base) / base:+.1f} %)" if base else ""
    change = "saved" if mine <= base else "ADDED"
    words = (
        f"{change} {format_size(abs(base - mine))} of reads per token{share}; cost "
        f"{_shown(outcome.numbers['weight_discarded_frac'], 'rate')} of the router's weight. "
    )
    return words + (live or "What that costs in quality only the model can tell: run live.")


def live_html(tree: xr.DataTree) -> str:
    """Return the table of a live comparison, as far as it is.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> text = bl.datasets.heldout("kjv")[0].text[:300]
    >>> with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
    ...     tree = bl.compare(session, text, policies=[], noise_floor=False, progress=False)
    >>> "perplexity" in live_html(tree)
    True
    """
    table = tree.to_dataset()
    rows = []
    for index in range(table.sizes["arm"]):
        values = {str(name): table[name].values[index] for name in table.data_vars}
        delta = values["delta_nll"]
        bounds = values["delta_nll_low"], values["delta_nll_high"]
        interval = "" if np.isnan(bounds).any() else f" [{bounds[0]:+.3f}, {bounds[1]:+.3f}]"
        never = ", NEVER FIRED" if int(values["fired"]) == 0 else ""
        lossy = "" if int(values["is_lossless"]) else ", lossy"
        rows.append(
            [
                f"{values['arm_name']}{lossy}{never}",
                f"{values['perplexity']:.3f}",
                "—" if math.isnan(delta) else f"{delta:+.4f}{interval}",
                "—" if math.isnan(values["kl_mean"]) else f"{values['kl_mean']:.4f}",
                _shown(float(values["top1_agreement"]), "rate")
                if not math.isnan(values["top1_agreement"])
                else "—",
                _shown(float(values["hit_rate"]), "rate"),
                _shown(float(values["read_bytes_per_token"]), "size"),
            ]
        )
    head = ["with the model", "perplexity", "NLL difference (nat)", "KL (nat)", "top-1 agreement",
            "hit rate", "read per token"]  # fmt: skip
    notes = f"{int(table['n_scored'].values[0])} tokens scored"
    if not int(tree.attrs.get("complete", 1)):
        notes += "; not complete"
    note = f"<div style='color:{theme.TEXT}'>{escape(notes)}</div>"
    return html_table(head, rows, left=1) + note
