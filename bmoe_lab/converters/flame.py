"""Captures in the form of FLAME-MoE: one Parquet file per layer, one row per token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.building import checked_count, checked_ids, routed_only
from bmoe_lab.converters.files import file_to_read
from bmoe_lab.errors import SettingsError, TraceFormatError
from bmoe_lab.schema import Phase

__all__ = ["from_flame"]


def from_flame(path: Path, n_expert: int | None) -> xr.Dataset:
    """Return a capture as a trace; all its tokens are one evaluation of a prompt.

    Parameters
    ----------
    path : pathlib.Path
        One file, or a folder of files that name their layer.
    n_expert : int or None
        Experts per layer.

    Raises
    ------
    TraceFormatError
        If the files do not fit together, or a row is at fault.
    SettingsError
        If `n_expert` is not given.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise TraceFormatError(
            f"folder must hold Parquet files; got none in {str(path)!r}. Name the folder of one "
            "checkpoint."
        )
    by_block: dict[int, Path] = {}
    for file in files:
        block = _block(file, alone=path.is_file())
        if block in by_block:
            raise TraceFormatError(
                f"files must name different layers; got {by_block[block].name!r} and "
                f"{file.name!r} for layer {block}. Read one checkpoint at a time."
            )
        by_block[block] = file
    ids: list[npt.NDArray[Any]] = []
    weights: list[npt.NDArray[np.float32] | None] = []
    for block in sorted(by_block):
        one, weight = _layer(by_block[block])
        if ids and one.shape != ids[0].shape:
            raise TraceFormatError(
                f"layers must have equally many tokens and experts, {ids[0].shape}; got "
                f"{one.shape} in {str(by_block[block])!r}. Are they of one capture?"
            )
        ids.append(one)
        weights.append(weight)
    if n_expert is None:
        raise SettingsError(
            "n_expert must be given for a capture, which does not say it; got None. "
            "Take it from the model's configuration."
        )
    checked_count("n_expert", n_expert)
    chosen = checked_ids(np.stack(ids, axis=1), n_expert, repr(str(path)))
    known = [weight for weight in weights if weight is not None]
    if known and len(known) < len(weights):
        raise TraceFormatError(
            f"files must all have scores or none; got {len(known)} of {len(weights)} in "
            f"{str(path)!r}. Are they of one capture?"
        )
    n_token = chosen.shape[0]
    return routed_only(
        chosen,
        n_expert=n_expert,
        phase=np.full(n_token, Phase.prefill),
        batch=np.zeros(n_token),
        block=np.array(sorted(by_block)),
        weight=np.stack(known, axis=1) if known else None,
    )


def _block(file: Path, *, alone: bool) -> int:
    """Return the layer that a file's name gives."""
    named = re.findall(r"layer[^0-9]*([0-9]+)", file.stem, re.IGNORECASE)
    named = named or re.findall(r"[0-9]+", file.stem)
    if len(named) == 1:
        return int(named[0])
    if alone:
        return 0
    raise TraceFormatError(
        f"files must name their layer, as 'layer_3.parquet'; got {file.name!r}. Rename it."
    )


def _layer(file: Path) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]:
    """Return ids of shape (token, slot) and, if there are any, weights."""
    import pyarrow as pa
    from pyarrow import parquet

    where = repr(str(file_to_read(file)))
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if "indices" not in names:
                raise TraceFormatError(
                    f"columns must include 'indices'; got {names} in {where}. Is it a capture, or "
                    "a trace that to_parquet wrote?"
                )
            table = opened.read([name for name in ("indices", "scores") if name in names])
    except (pa.ArrowException, OSError) as error:
        words = " ".join(str(error).split())[:200]
        raise TraceFormatError(
            f"file must be Parquet; got {words} in {where}. It is damaged or of another kind."
        ) from error
    if not table.num_rows:
        raise TraceFormatError(f"file must have rows; got none in {where}.")
    ids = _lists(table, "indices", where)
    if "scores" not in table.column_names:
        return ids, None
    weight = _lists(table, "scores", where)
    if weight.shape != ids.shape or weight.dtype.kind != "f":
        raise TraceFormatError(
            f"scores must be floats, as many as indices, {ids.shape}; got {weight.dtype} of "
            f"{weight.shape} in {where}. The file is damaged."
        )
    return ids, weight.astype(np.float32)


def _lists(table: Any, name: str, where: str) -> npt.NDArray[Any]:
    """Return a column of equally long lists as an array of shape (row, slot)."""
    import pyarrow as pa

    data = table.column(name).combine_chunks()
    kind = data.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or _fixed(kind)):
        raise TraceFormatError(
            f"{name} must be lists; got {kind} in {where}. Is it a capture of FLAME-MoE?"
        )
    lengths = data.value_lengths().to_numpy(zero_copy_only=False)
    odd = np.flatnonzero(~(lengths == lengths[0]))
    flat = data.flatten()
    if odd.size or data.null_count or flat.null_count or not lengths[0] > 0:
        row = int(odd[0]) if odd.size else 0
        raise TraceFormatError(
            f"{name} must be lists of one length without nulls; got others in {where}, row {row}. "
            "The file is damaged."
        )
    values: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(lengths), -1)


def _fixed(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind))
