"""The table that compares the traces of a page, one row per run."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping

import xarray as xr

from bmoe_lab import metrics
from bmoe_lab.comparison.tree import runs
from bmoe_lab.errors import SchemaError, SettingsError
from bmoe_lab.plots import theme
from bmoe_lab.schema import Phase
from bmoe_lab.sizes import format_size

__all__ = ["overview_html"]

_UNKNOWN = "–"
_HEADINGS = (
    "trace",
    "run",
    "tokens",
    "layers",
    "experts",
    "cache",
    "token cycle",
    "hit rate",
    "read/token",
    "shared",
    "weight lost",
)


def overview_html(data: Mapping[str, xr.Dataset | xr.DataTree]) -> str:
    """Return one row per run of every trace and comparison, and what to mind in reading them.

    Parameters
    ----------
    data : mapping
        Traces and comparisons by the names shown.

    Returns
    -------
    str
        An HTML table, all texts escaped. Figures are of the decode; unknown ones are dashes.
    """
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    body = []
    models = set()
    for number, (name, one) in enumerate(data.items(), start=1):
        model = ""
        for label, trace in _runs(one):
            models.add(str(trace.attrs.get("model_fingerprint", trace.attrs.get("model_name", ""))))
            shown = name if label is None else f"{name}: {label}"
            above, model = model, str(trace.attrs.get("model_name", _UNKNOWN))
            below = "" if model == above else f'<br><span class="note">{html.escape(model)}</span>'
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(trace))
            link = f'<a href="#part-{number}">{html.escape(shown)}</a>'
            body.append(f"<tr><th>{link}{below}</th>{cells}</tr>")
    caption = (
        "Of the decode. Shared: experts that the token before used too. A dash is what a trace "
        "does not say."
    )
    if len(models) > 1:
        caption += " The models differ: their bytes and rates answer different questions."
    return (
        f'<div class="scroll"><table class="overview"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _runs(one: xr.Dataset | xr.DataTree) -> Iterator[tuple[str | None, xr.Dataset]]:
    if isinstance(one, xr.Dataset):
        yield None, one
    else:
        yield from runs(one)


def _cells(trace: xr.Dataset) -> list[str]:
    decoded = int((trace["phase"].values == Phase.decode).sum())
    budget = trace.attrs.get("cache_budget_bytes")
    return [
        theme.run_note(trace.attrs) or _UNKNOWN,
        f"{decoded:,}",
        str(trace.sizes["layer"]),
        f"{trace.sizes['slot']} of {trace.attrs['n_expert']}",
        _UNKNOWN if budget is None else format_size(int(budget)),
        _size(_metric(trace, "token_cycle_bytes")),
        _percent(_metric(trace, "hit_rate")),
        _size(_metric(trace, "read_bytes_per_token")),
        _percent(_metric(trace, "consecutive_overlap")),
        _percent(_metric(trace, "weight_discarded_frac")),
    ]


def _metric(trace: xr.Dataset, name: str) -> float:
    """Return a number of the decode, NaN where the trace cannot tell."""
    try:
        return float(getattr(metrics, name)(trace))
    except (SchemaError, SettingsError):
        return math.nan


def _percent(value: float) -> str:
    return _UNKNOWN if math.isnan(value) else f"{100 * value:.1f} %"


def _size(value: float) -> str:
    return _UNKNOWN if math.isnan(value) else format_size(round(value))
