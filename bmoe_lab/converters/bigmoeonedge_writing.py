"""A trace as the text of a BigMoeOnEdge route trace, refused where that cannot hold it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.bigmoeonedge import KINDS, LAYOUT, SLOTS, route_dataset
from bmoe_lab.converters.bigmoeonedge_metrics import metrics_text
from bmoe_lab.converters.files import written_aside
from bmoe_lab.converters.lines import parse_table
from bmoe_lab.converters.number_text import float32_texts, number_texts
from bmoe_lab.converters.route_preamble import (
    VERSION_LINE,
    Preamble,
    parse_preamble,
    preamble_lines,
)
from bmoe_lab.errors import TraceFormatError
from bmoe_lab.schema import NO_EXPERT, Action, Phase, Residency, validate

__all__ = ["to_bigmoeonedge"]


def to_bigmoeonedge(
    ds: xr.Dataset,
    path: str | os.PathLike[str],
    *,
    metrics: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a trace as a route trace of BigMoeOnEdge; return where.

    What was read by :func:`from_bigmoeonedge` comes back byte for byte. The text is parsed again
    before it becomes a file: whatever would read back differently is refused.

    Parameters
    ----------
    ds : xarray.Dataset
        A trace with ``residency``, ``read_bytes``, ``expert_bytes``.
    path : path-like
        The file; an existing one is replaced.
    metrics : path-like, optional
        Also write the per-token CSV that the trace was read with.

    Returns
    -------
    pathlib.Path
        The file of the routes.

    Raises
    ------
    TraceFormatError
        If the format cannot hold the trace.
    TraceFileError
        If a file cannot be written; what was there before is left as it was.

    Notes
    -----
    The format has no place for router scores, log-probabilities, text, token ids, costs, settings
    and the numbers of the evaluations: these are left out. Of a dropped slot it keeps that it was
    dropped, not which stand-in ran nor what the survivors were scaled to. A weight that six digits
    do not give exactly is written with nine.

    Refused: substituted and reweighted slots (the format has one id and one weight per row),
    drafts, two expert groups in a block, layers of different width or without a size, experts that
    are not streamed, and evaluations that the order of the rows cannot tell apart.

    Examples
    --------
    >>> import tempfile
    >>> from bmoe_lab.testing import make_trace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = to_bigmoeonedge(make_trace(n_token=4, n_layer=2), f"{folder}/a.route.csv")
    ...     path.read_text().splitlines()[0]
    '# route_trace v1'
    """
    validate(ds)
    layout = _layout(ds)
    _check_fits(ds)
    preamble, lines = _preamble_to_write(ds, layout)
    names = _columns_to_write(ds, layout)
    end = layout.get("line_end", "\n")
    head = "".join(line + end for line in [*lines, ",".join(names)])
    data = (head + _rows_text(ds, names, end)).encode("utf-8")
    _check_reads_back(data, ds, preamble, str(path))
    beside = None if metrics is None else metrics_text(ds)
    path = Path(path)
    with written_aside(path) as aside:
        aside.write_bytes(data)
        if beside is not None and metrics is not None:
            with written_aside(Path(metrics)) as aside_metrics:
                aside_metrics.write_bytes(beside)
    return path


def _layout(ds: xr.Dataset) -> dict[str, Any]:
    stored = ds.attrs.get(LAYOUT)
    layout: dict[str, Any] = json.loads(stored) if isinstance(stored, str) else stored or {}
    return layout


def _check_fits(ds: xr.Dataset) -> None:
    for name in ("residency", "read_bytes", "expert_bytes"):
        if name not in ds.variables:
            raise _unfit(f"{name!r}", f"a trace without it; it has {sorted(map(str, ds))}")
    if ds["group"].values.any():
        raise _unfit("one expert group per block", "two groups in a block")
    if (ds["phase"].values == Phase.draft).any():
        raise _unfit("prefill and decode only", "tokens of a draft")
    action = ds["action"].values
    for kind in (Action.substituted, Action.reweighted):
        if (action == kind).any():
            count = int((action == kind).sum())
            raise _unfit(
                "one expert and one weight per slot, chosen and applied alike",
                f"{count} {kind.name} slots",
            )
    if (ds["residency"].values == Residency.not_streamed).any():
        raise _unfit("streamed experts only", "experts that are not streamed")
    used = np.unique(ds["n_expert_used"].values)
    if used.size > 1 or used[0] != ds.sizes["slot"]:
        raise _unfit("one width for all layers", f"n_expert_used = {used.tolist()}")
    size = ds["expert_bytes"].values
    if (size <= 0).any():
        raise _unfit("the size of every layer's experts", f"expert_bytes = {size.tolist()}")
    routed = ds["expert_chosen"].values != NO_EXPERT
    if (routed.any(axis=-1) != routed.all(axis=-1)).any():
        raise _unfit("whole routings", "a token with some of its slots in a layer")


def _unfit(needs: str, got: str) -> TraceFormatError:
    return TraceFormatError(
        f"a route trace of BigMoeOnEdge must have {needs}; got {got}. "
        "Save it with bmoe_lab.save_trace or to_parquet, which keep everything."
    )


def _preamble_to_write(ds: xr.Dataset, layout: Mapping[str, Any]) -> tuple[Preamble, list[str]]:
    """Return the comment lines that were read if they still hold, else new ones."""
    block = ds["block"].values.tolist()
    expert_bytes = dict(zip(block, ds["expert_bytes"].values.tolist(), strict=True))
    dense_bytes = {}
    if "dense_bytes" in ds:
        dense_bytes = dict(zip(block, ds["dense_bytes"].values.tolist(), strict=True))
    fresh = Preamble(
        n_expert=int(ds.attrs["n_expert"]),
        n_expert_used=int(ds.sizes["slot"]),
        model=ds.attrs.get("model_name"),
        arch=ds.attrs.get("arch"),
        n_layer=max(block) + 1,
        expert_bytes=expert_bytes,
        dense_bytes=dense_bytes,
    )
    lines = layout.get("preamble")
    if lines:
        old = parse_preamble(lines, "the attribute 'bigmoeonedge'")
        streamed = {b: size for b, size in old.expert_bytes.items() if size > 0}
        same = streamed == expert_bytes and dense_bytes == {
            b: size for b, size in old.dense_bytes.items() if b in dense_bytes
        }
        if same and (old.n_expert, old.n_expert_used) == (fresh.n_expert, fresh.n_expert_used):
            return old, list(lines)
    for name in ("model", "arch"):
        value = getattr(fresh, name)
        if value is not None and any(ord(char) < 32 for char in value):
            raise _unfit(f"a {name} on one line", repr(value))
    return fresh, preamble_lines(fresh)


def _columns_to_write(ds: xr.Dataset, layout: Mapping[str, Any]) -> list[str]:
    unknown = _unknown_columns(ds)
    names = [n for n in layout.get("columns", KINDS) if n in KINDS or n in unknown]
    if "dropped" not in names and (ds["action"].values == Action.dropped).any():
        names.append("dropped")
    return names + [name for name in unknown if name not in names]


def _unknown_columns(ds: xr.Dataset) -> dict[str, str]:
    """Return the variable of each column that has no meaning here."""
    return {
        str(variable.attrs["csv_column"]): str(name)
        for name, variable in ds.data_vars.items()
        if "csv_column" in variable.attrs and variable.dims == SLOTS
    }


def _rows_text(ds: xr.Dataset, names: list[str], end: str) -> str:
    batch = ds["batch"].values
    token, layer = np.nonzero(ds["expert_chosen"].values[..., 0] != NO_EXPERT)
    order = np.lexsort((token, layer, batch[token]))
    token, layer = token[order], layer[order]
    if not token.size:
        raise _unfit("rows", "a trace in which nothing routed")
    n_used = ds.sizes["slot"]
    unknown = _unknown_columns(ds)
    parts = []
    step = max(1, 200_000 // n_used)
    for start in range(0, token.size, step):  # texts of a part at a time, not of all rows
        cells = (token[start : start + step], layer[start : start + step])
        columns = [_column_texts(ds, name, cells, n_used, unknown) for name in names]
        parts.append("".join(",".join(row) + end for row in zip(*columns, strict=True)))
    return "".join(parts)


def _column_texts(
    ds: xr.Dataset,
    name: str,
    cells: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    n_used: int,
    unknown: Mapping[str, str],
) -> list[str]:
    token, layer = cells
    per_cell: npt.NDArray[Any]
    if name in ("turn", "phase"):
        per_cell = ds[name].values[token]
    elif name == "step":
        known = "position" in ds.variables
        per_cell = ds["position"].values[token] if known else np.full(token.size, -1)
    elif name == "layer":
        per_cell = ds["block"].values[layer]
    elif name == "slot":
        return list(map(str, range(n_used))) * token.size
    else:
        return _slot_texts(ds, name, cells, unknown)
    return list(map(str, np.repeat(per_cell, n_used).tolist()))


def _slot_texts(
    ds: xr.Dataset,
    name: str,
    cells: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    unknown: Mapping[str, str],
) -> list[str]:
    if name == "weight":
        if "weight_chosen" not in ds:
            return ["nan"] * (cells[0].size * ds.sizes["slot"])
        return float32_texts(ds["weight_chosen"].values[cells].ravel())
    if name in unknown:
        variable = ds[unknown[name]]
        values = variable.values[cells].ravel()
        if "csv_format" in variable.attrs:
            return number_texts(values, variable.attrs["csv_format"])
        return [str(value) for value in values.tolist()]
    if name == "dropped":
        values = (ds["action"].values[cells] == Action.dropped).astype(np.int64)
    else:
        source = {"expert": "expert_chosen", "expert_bytes": "read_bytes"}.get(name, name)
        values = ds[source].values[cells]
    return list(map(str, values.ravel().tolist()))


def _check_reads_back(data: bytes, ds: xr.Dataset, preamble: Preamble, where: str) -> None:
    """Raise unless the text gives back what the format promises to hold."""
    try:
        back = route_dataset(parse_table(data, where, first=VERSION_LINE), None, None)
    except TraceFormatError as error:
        raise _unfit("what its reader accepts", f"a trace that it refuses: {error}") from error
    told = parse_preamble(json.loads(back.attrs[LAYOUT])["preamble"], where)
    if told != preamble:
        raise _unfit("a model's name that can be told from what follows it", repr(preamble.model))
    if back.sizes["token"] != ds.sizes["token"]:
        raise _unfit("tokens that route somewhere", "tokens without any routing")
    if not np.array_equal(np.diff(back["batch"]) != 0, np.diff(ds["batch"]) != 0):
        raise _unfit(
            "evaluations that begin where the layers start again",
            "evaluations that the order of the rows cannot tell apart",
        )
    names = ["turn", "phase", "block", "expert_chosen", "residency", "read_bytes", "action"]
    names += [n for n in ("position", "weight_chosen", "expert_bytes", "dense_bytes") if n in ds]
    for name in names:
        if name in back and np.array_equal(
            back[name].values, ds[name].values, equal_nan=back[name].dtype.kind == "f"
        ):
            continue
        if name == "position" and name not in back and (ds[name].values == -1).all():
            continue
        if name == "weight_chosen" and name not in back and np.isnan(ds[name].values).all():
            continue
        raise _unfit(f"a {name} that reads back as it was", "one that does not")
