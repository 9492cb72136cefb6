"""The per-token CSV that BigMoeOnEdge writes beside a route trace, joined to its decoded tokens.

Three columns mean what costs of a trace mean: ``wall_ms``, ``mgmt_ms``, ``majflt``. The others
keep their own definition and unit under ``engine_<column>``. To put them under a cost's name would
be wrong: ``io_ms`` sums the lanes' busy time, ``stall_ms`` is a mean over threads up to engine 0.21
and a union of intervals since, ``compute_ms`` is what is left of the wall time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.lines import TextTable, read_table
from bmoe_lab.converters.number_text import number_texts, numbers, text_format
from bmoe_lab.converters.route_preamble import key_values
from bmoe_lab.errors import TraceFormatError
from bmoe_lab.schema import Phase, clean_attrs, cost_attrs

__all__ = ["LAYOUT", "Metrics", "attrs_of_part", "metrics_text", "read_metrics"]

LAYOUT = "bigmoeonedge_metrics"
"""Attribute with the comment lines and the columns of the file."""

_REQUIRED = (
    "step",
    "steps",
    "wall_ms",
    "io_ms",
    "compute_ms",
    "read_bytes",
    "cache_hit_pct",
    "stall_ms",
    "mgmt_ms",
    "majflt",
    "cpu_ms",
)

# Column to (cost of a trace, units of the column in one of the cost).
_COSTS = {"wall_ms": ("wall_s", 1000.0), "mgmt_ms": ("manage_s", 1000.0)}
_COSTS["majflt"] = ("major_faults", 1.0)

# A column of nothing but this was not measured.
_UNMEASURED = {"majflt": 0.0, "cpu_ms": 0.0}
# A cell of this was not measured, or there was nothing to measure.
_ABSENT = {"cache_hit_pct": -1.0, "dense_resident_frac": -1.0, "resident_frac": -1.0}

_MEANINGS = {
    "step": "number of the decoded token in its turn, from 1",
    "steps": "tokens asked for",
    "io_ms": "busy time of the I/O lanes, summed; may exceed the wall time",
    "compute_ms": "wall time less stall (or I/O, if serial) and management: a residual",
    "read_bytes": "bytes read, alignment included",
    "cache_hit_pct": "hit rate since the model was loaded, the prompt included",
    "stall_ms": "wait of the compute threads: their mean until engine 0.21, their union since",
    "cpu_ms": "processor time of the process",
    "dense_resident_frac": "share of the dense weights that the kernel holds",
    "loop_overhead_ms": "time between this evaluation and the one before",
}
_UNITS = {"_ms": "ms", "_mib": "MiB", "_bytes": "byte", "_pct": "percent", "_frac": "1"}
_SUMMARY = "# summary"
_NAMED = ("arch", "n_expert", "n_expert_used")


@dataclass(frozen=True)
class Metrics:
    """A per-token CSV.

    Parameters
    ----------
    table : TextTable
        The file.
    texts : dict
        Its columns, cell by cell.
    settings : dict
        The ``key=value`` tokens above its rows: settings of the run as the engine resolved them.
    summaries : list of dict
        Those of each ``# summary`` line, one per turn.
    """

    table: TextTable
    texts: dict[str, list[str]]
    settings: dict[str, str]
    summaries: list[dict[str, str]]

    @property
    def renormalised(self) -> bool | None:
        """Whether survivors of a drop were scaled up; None if the file does not say."""
        return {"1": True, "0": False}.get(self.settings.get("drop_renorm", ""))

    def attach(self, ds: xr.Dataset) -> xr.Dataset:
        """Return a trace with the columns as variables of shape (token,).

        Parameters
        ----------
        ds : xarray.Dataset
            The route trace of the same run, all its turns.

        Raises
        ------
        TraceFormatError
            If the rows are not those of its decoded tokens.
        """
        rows = np.flatnonzero(ds["phase"].values == Phase.decode)
        self._check_same_run(ds, rows)
        variables: dict[str, xr.Variable] = {}
        columns: list[dict[str, Any]] = []
        for name, texts in self.texts.items():
            variable, how = _column(name, texts, rows, ds.sizes["token"])
            columns.append(how)
            if variable is not None:
                if how["variable"] in ds.variables:
                    how["variable"] = f"engine_column_{name}"
                variables[how["variable"]] = variable
        layout = {
            "preamble": self.table.preamble,
            "columns": columns,
            "comments": self.table.comments,
            "line_end": self.table.line_end,
        }
        attrs = {LAYOUT: layout, **self._facts(ds)}
        return ds.assign(variables).assign_attrs(clean_attrs(attrs))

    def _check_same_run(self, ds: xr.Dataset, rows: npt.NDArray[np.int64]) -> None:
        table = self.table
        for name in _NAMED:
            told, has = self.settings.get(name), ds.attrs.get(name)
            has = int(ds["n_expert_used"][0]) if name == "n_expert_used" else has
            if told is not None and has is not None and told != str(has):
                table.fail(
                    f"{name} must be that of the trace, {has!r}", told, None, "Is it another run's?"
                )
        group = self.texts.get("mtp_batch", [])
        wide = next((i for i, text in enumerate(group) if (_float(text) or 0) > 1), None)
        if wide is not None:
            table.fail(
                "mtp_batch must be at most 1",
                group[wide],
                wide,
                "A route trace does not say which of its rows are drafts. Leave metrics out.",
            )
        if len(rows) != table.n_row:
            table.fail(
                f"metrics must have one row per decoded token, {len(rows)}",
                table.n_row,
                None,
                "Is it another run's?",
            )
        turn = ds["turn"].values[rows]
        begins = np.concatenate(([True], turn[1:] != turn[:-1]))
        start = np.flatnonzero(begins)
        expected = {"step": np.arange(len(rows)) - start[np.cumsum(begins) - 1] + 1}
        if "turn" in self.texts:
            expected["turn"] = turn
        for name, values in expected.items():
            for row, (text, value) in enumerate(
                zip(self.texts[name], values.tolist(), strict=True)
            ):
                if _float(text) != value:
                    table.fail(
                        f"{name} must be that of the decoded token, {value}",
                        text,
                        row,
                        "Is it another run's?",
                    )

    def _facts(self, ds: xr.Dataset) -> dict[str, Any]:
        """Return the attributes that the file proves."""
        facts: dict[str, Any] = {
            "engine_settings": self.settings or None,
            "engine_summary": self.summaries or None,
        }
        # The engine ends every run with a summary.
        ended = bool(self.table.comments) and self.table.comments[-1][0] == self.table.n_row
        facts["complete"] = int(ended and bool(self.summaries))
        lossy = {
            name: value
            for name, value in self.settings.items()
            if name in ("drop_cold_frac", "substitute_lambda", "route_ahead") and _float(value)
        }
        if lossy:
            facts["lossless"] = 0
            facts["policy"] = "BigMoeOnEdge: " + ", ".join(
                f"{name}={value}"
                for name, value in self.settings.items()
                if name in lossy or (name.startswith("drop_") and "drop_cold_frac" in lossy)
            )
        elif "drop_cold_frac" in self.settings and "lossless" not in ds.attrs:
            facts["lossless"] = 1
        last = self.summaries[-1] if self.summaries else {}
        budget = _float(last.get("cache_budget_MiB", ""))
        if budget and _float(last.get("cache_resizes", "0")) == 0:
            facts["cache_budget_bytes"] = round(budget * 2**20)
        return facts


def _float(text: str) -> float | None:
    values = numbers([text])
    return None if values is None else float(values[0])


def _column(
    name: str, texts: list[str], rows: npt.NDArray[np.int64], n_token: int
) -> tuple[xr.Variable | None, dict[str, Any]]:
    """Return a column as a variable, and how to write it."""
    how: dict[str, Any] = {"name": name}
    values = numbers(texts)
    if values is None:
        return _as_text(name, texts, rows, n_token, how)
    if name in _UNMEASURED and (values == _UNMEASURED[name]).all() and len(set(texts)) == 1:
        return None, {**how, "constant": texts[0]}
    form = text_format(texts, values)
    absent = values == _ABSENT[name] if name in _ABSENT else np.zeros(values.size, dtype=bool)
    stored = values.astype(np.float64)
    variable, per_unit = _COSTS.get(name, (f"engine_{name}", 1.0))
    stored = np.where(absent, np.nan, stored / per_unit)
    how |= {"variable": variable, "format": form, "per_unit": per_unit}
    if absent.any():
        how["absent"] = texts[int(np.argmax(absent))]
    if form is None or _texts(stored, how) != texts:
        return _as_text(name, texts, rows, n_token, how)
    array = np.full(n_token, np.nan)
    array[rows] = stored
    if name in _COSTS:
        return xr.Variable("token", array, cost_attrs(variable)), how
    ending = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "1")
    attrs = {"long_name": _MEANINGS.get(name, f"column {name!r} of the engine"), "units": ending}
    return xr.Variable("token", array, attrs), how


def _as_text(
    name: str, texts: list[str], rows: npt.NDArray[np.int64], n_token: int, how: dict[str, Any]
) -> tuple[xr.Variable, dict[str, Any]]:
    """Return a column that no format of numbers gives back as the texts that it holds."""
    array = np.full(n_token, "", dtype=f"U{max(1, max(map(len, texts)))}")
    array[rows] = texts
    attrs = {"long_name": f"column {name!r} of the engine, as text"}
    return xr.Variable("token", array, attrs), {"name": name, "variable": f"engine_{name}"}


def _texts(stored: npt.NDArray[np.float64], how: Mapping[str, Any]) -> list[str]:
    absent = np.isnan(stored) & ("absent" in how)
    values = np.where(absent, 0.0, stored) * how["per_unit"]
    texts = number_texts(values, how["format"])
    return [how["absent"] if gone else text for text, gone in zip(texts, absent, strict=True)]


def read_metrics(path: Path) -> Metrics:
    """Return a per-token CSV, with or without comment lines above it.

    Parameters
    ----------
    path : pathlib.Path
        A file that exists.

    Raises
    ------
    TraceFormatError
        If it is malformed, with its line.
    """
    table = read_table(path, comments_between=True)
    missing = [name for name in _REQUIRED if name not in table.names]
    if missing:
        raise TraceFormatError(
            f"columns must include {list(_REQUIRED)}; got none of {missing} in {table.where!r}, "
            f"line {len(table.preamble) + 1}. Is it the per-token CSV of BigMoeOnEdge?"
        )
    # Checked as numbers, kept as texts: their decimals are part of the file.
    table.columns({name: "float" if name in _REQUIRED else "text" for name in table.names})
    texts = table.columns(dict.fromkeys(table.names, "text"))
    settings: dict[str, str] = {}
    for line in table.preamble:
        settings |= key_values(line)
    summaries = [key_values(text) for _, text in table.comments if text.startswith(_SUMMARY)]
    return Metrics(table, texts, settings, summaries)


def attrs_of_part(ds: xr.Dataset, keep: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return the attributes that the metrics of some tokens in a row have.

    Parameters
    ----------
    ds : xarray.Dataset
        The whole trace, read with metrics.
    keep : numpy.ndarray
        bool of shape (token,): one turn.
    """
    layout = json.loads(ds.attrs[LAYOUT])
    kept = keep[ds["phase"].values == Phase.decode]
    first, stop = int(np.argmax(kept)), int(np.argmax(kept)) + int(kept.sum())
    comments = [(at - first, text) for at, text in layout["comments"] if first < at <= stop]
    summaries = [key_values(text) for _, text in comments if text.startswith(_SUMMARY)]
    return {
        LAYOUT: json.dumps(layout | {"comments": comments}),
        "engine_summary": json.dumps(summaries),
        "complete": int(bool(summaries) and comments[-1][0] == stop - first),
    }


def metrics_text(ds: xr.Dataset) -> bytes:
    """Return the per-token CSV that a trace was read with.

    Parameters
    ----------
    ds : xarray.Dataset
        What :func:`bmoe_lab.converters.from_bigmoeonedge` returned for a trace with metrics.

    Raises
    ------
    TraceFormatError
        If it was read without, or lacks a variable that came from it.
    """
    if LAYOUT not in ds.attrs:
        raise TraceFormatError(
            "metrics can be written only for a trace that was read with them; "
            f"got one from {ds.attrs.get('source')!r} without. Leave metrics out: the engine's "
            "columns have definitions of their own, and no other run has measured them."
        )
    layout = json.loads(ds.attrs[LAYOUT])
    rows = np.flatnonzero(ds["phase"].values == Phase.decode)
    cells: list[list[str]] = []
    for how in layout["columns"]:
        if "constant" in how:
            cells.append([how["constant"]] * rows.size)
            continue
        if how["variable"] not in ds:
            raise TraceFormatError(
                f"trace must hold {how['variable']!r} to write the column {how['name']!r}; "
                f"got {sorted(map(str, ds.data_vars))}. Write the route trace alone."
            )
        values = ds[how["variable"]].values[rows]
        cells.append(_texts(values, how) if "format" in how else list(map(str, values.tolist())))
    lines = [*layout["preamble"], ",".join(how["name"] for how in layout["columns"])]
    body = [",".join(row) for row in zip(*cells, strict=True)]
    at = 0
    for before, text in layout["comments"]:
        lines += [*body[at:before], text]
        at = max(at, before)
    end = layout["line_end"]
    return "".join(line + end for line in [*lines, *body[at:]]).encode("utf-8")
