"""A comparison as a table: for pandas, for a terminal, for a page."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xarray as xr

from bmoe_lab.comparison.tree import runs

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = [
    "ComparisonTable",
    "comparison_frame",
    "comparison_html",
    "comparison_table",
    "control_lines",
]

BOUND = "+.3f"
UNKNOWN = "–"
_HEADINGS = (
    "run",
    "perplexity",
    "ΔNLL (nat)",
    "KL (nat)",
    "same top token",
    "same experts",
    "changed",
    "weight lost",
    "hit rate",
    "read/token",
    "tokens/s",
)

# Columns needed for one line per run, and which headings share a column below that.
_WIDE = 150
_STACKED = [(0,), (1, 2), (3, 4, 5), (6, 7), (8, 9, 10)]


@dataclass(frozen=True)
class _Row:
    cells: tuple[str, ...]
    kind: str
    never_fired: bool


def comparison_frame(tree: xr.DataTree) -> pd.DataFrame:
    """Return the table of a comparison, one row per run, all columns.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.

    Returns
    -------
    pandas.DataFrame
        Index ``arm_name``; columns as in :data:`bmoe_lab.comparison.COLUMNS`, NaN where unknown.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    """
    import pandas as pd

    runs(tree)
    table = tree.to_dataset()
    columns = {str(name): variable.values for name, variable in table.data_vars.items()}
    return pd.DataFrame(columns).set_index("arm_name")


def comparison_table(tree: xr.DataTree) -> ComparisonTable:
    """Return the table of a comparison for a terminal.

    A policy that never fired is marked; unknown values are dashes; lossy runs are named as such.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.

    Returns
    -------
    ComparisonTable
        For ``rich.print`` or a console; it takes its form from the terminal's width.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    """
    rows = _rows(tree)
    caption = "\n".join([*control_lines(tree), _caption(tree)])
    return ComparisonTable(_title(tree), caption, rows)


@dataclass(frozen=True)
class ComparisonTable:
    """A table that a rich console draws: one line per run if wide, stacked cells if narrow."""

    title: str
    caption: str
    rows: list[_Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width at hand."""
        yield self.build(narrow=options.max_width < _WIDE)

    def build(self, *, narrow: bool) -> Table:
        """Return the rich table in one of its two forms."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            # Text, not str: reprs and intervals hold brackets that would be taken for markup.
            title=Text(self.title),
            caption=Text(self.caption),
            caption_justify="left",
            show_lines=narrow,
            # Eighty columns hold the longest name only without vertical rules.
            box=box.HORIZONTALS if narrow else box.HEAVY_HEAD,
            pad_edge=not narrow,
            collapse_padding=narrow,
        )
        groups = _STACKED if narrow else [(index,) for index in range(len(_HEADINGS))]
        for number, group in enumerate(groups):
            table.add_column(
                Text("\n".join(_HEADINGS[index] for index in group)),
                justify="left" if number == 0 else "right",
                overflow="fold",
                no_wrap=number > 0,
            )
        for row in self.rows:
            style = {"lossless": "bold", "noise floor": "dim", "control": "dim"}.get(row.kind, "")
            if row.never_fired:
                style = "yellow"
            cells = ["\n".join(row.cells[index] for index in group) for group in groups]
            table.add_row(*(Text(cell) for cell in cells), style=style)
        return table


def comparison_html(tree: xr.DataTree) -> str:
    """Return the table of a comparison as an HTML ``<table>`` with its caption.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.

    Returns
    -------
    str
        All text is escaped.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    """
    rows = _rows(tree)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in _HEADINGS)
    body = []
    for row in rows:
        css = row.kind.replace(" ", "-") + (" never-fired" if row.never_fired else "")
        cells = "".join(
            f"<{tag}>{html.escape(cell).replace(chr(10), '<br>')}</{tag}>"
            for tag, cell in zip(["th", *["td"] * len(row.cells)], row.cells, strict=False)
        )
        body.append(f'<tr class="{css}">{cells}</tr>')
    return (
        f"<table><caption>{html.escape(_caption(tree))}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def control_lines(tree: xr.DataTree) -> list[str]:
    """Return one sentence per policy with a control: is its choice of slots worth anything.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.

    Returns
    -------
    list of str
        Plain text; empty without controls.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    """
    runs(tree)
    table = tree.to_dataset()
    lines = []
    for index in range(table.sizes["arm"]):
        values = {str(name): table[name].values[index] for name in table.data_vars}
        if math.isnan(values["delta_nll_control"]):
            continue
        low, high = values["delta_nll_control_low"], values["delta_nll_control_high"]
        if math.isnan(low) or math.isnan(high):
            verdict = "too few tokens to tell from chance"
        elif high < 0:
            verdict = "its choice of slots is better than chance"
        elif low > 0:
            verdict = "its choice of slots is worse than chance"
        else:
            verdict = "not to be told from chance on this text"
        difference = _with_bounds(values, "delta_nll_control", "+.4f").replace("\n", " ")
        lines.append(f"{values['arm_name']} less its control: {difference} nat; {verdict}.")
    return lines


def _title(tree: xr.DataTree) -> str:
    model = tree.attrs.get("model_name", "model")
    return f"Routing policies against lossless: {model}"


def _caption(tree: xr.DataTree) -> str:
    table = tree.to_dataset()
    level = 100 * float(tree.attrs["bootstrap_level"])
    parts = [
        f"{int(table['n_scored'].values[0])} tokens scored in {tree.attrs['n_window']} window(s), "
        f"the first {tree.attrs['n_context']} of each read losslessly.",
        f"[low, high]: {level:g} % moving-block bootstrap interval "
        f"(block {tree.attrs['bootstrap_block']}, {tree.attrs['bootstrap_draws']} draws), "
        "paired by token.",
        "KL: mean, full vocabulary. Each run once: times are single measurements, recording on.",
    ]
    if not int(tree.attrs.get("complete", 1)):
        failed = tree.attrs.get("failed_arm")
        parts.append(f"INCOMPLETE: stopped in {failed}." if failed else "INCOMPLETE.")
    return " ".join(parts)


def _rows(tree: xr.DataTree) -> list[_Row]:
    runs(tree)
    table = tree.to_dataset()
    rows = []
    for index in range(table.sizes["arm"]):
        values = {str(name): table[name].values[index] for name in table.data_vars}
        kind = str(values["arm_kind"])
        never = int(values["fired"]) == 0
        rows.append(_Row(_cells(values, kind, never, table), kind, never))
    return rows


def _cells(values: dict[str, Any], kind: str, never: bool, table: xr.Dataset) -> tuple[str, ...]:
    name = str(values["arm_name"])
    if kind == "policy":
        name += "\nlossy" + (", NEVER FIRED" if never else "")
    elif kind == "control":
        owner = str(table["arm_name"].values[int(values["control_of"])])
        name += f"\nlossy, control of {owner}"
    elif kind == "noise floor":
        name += "\nnoise floor"
    changed = values["drop_rate"] + values["substitution_rate"]
    return (
        name,
        _number(values["perplexity"], ".3f"),
        _with_bounds(values, "delta_nll", "+.4f"),
        _number(values["kl_mean"], ".4f"),
        _percent(values["top1_agreement"]),
        _percent(values["routing_agreement"]),
        _percent(changed),
        _percent(values["weight_discarded_frac"]),
        _percent(values["hit_rate"]),
        _bytes(values["read_bytes_per_token"]),
        _number(values["tokens_per_s"], ".1f"),
    )


def _number(value: float, form: str) -> str:
    return UNKNOWN if math.isnan(value) else format(float(value), form)


def _percent(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{100 * value:.1f} %"


def _bytes(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def _with_bounds(values: dict[str, Any], name: str, form: str) -> str:
    if math.isnan(values[name]):
        return UNKNOWN
    mean = _number(values[name], form)
    low, high = values[f"{name}_low"], values[f"{name}_high"]
    if math.isnan(low) or math.isnan(high):
        return f"{mean}\n[{UNKNOWN}]"
    # One digit less than the mean: more than the draws can settle, and it keeps the table narrow.
    return f"{mean}\n[{_number(low, BOUND)}, {_number(high, BOUND)}]"
