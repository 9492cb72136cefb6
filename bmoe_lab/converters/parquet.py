"""A trace in long form as Parquet: one row per token and layer, readable by any data-frame library.

Columns over slots are lists. ``indices`` and ``scores`` are the chosen experts and their weights,
named as in the FLAME-MoE captures. What belongs to a token is repeated in each of its rows if it
is a label, and stands in its first row only if it is a quantity, so that a sum stays right.
Whatever has no place in a row is in the file's metadata: the round trip is exact.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.files import file_to_read, written_aside
from bmoe_lab.converters.flame import from_flame
from bmoe_lab.errors import BmoeLabError, TraceFormatError
from bmoe_lab.recording.upgrades import upgrade
from bmoe_lab.schema import clean_attrs, validate

__all__ = ["from_parquet", "to_parquet"]

_KEY = b"bmoe_lab"
# Pages have checksums, the metadata has none of its own.
_CRC = b"bmoe_lab_crc32"
_VERSION = 1
_FLAME = {"expert_chosen": "indices", "weight_chosen": "scores"}
_ROW_GROUP = 1 << 18


@dataclass(frozen=True)
class _Column:
    """How a variable stands in the file."""

    variable: str
    column: str
    dims: list[str]
    dtype: str
    coord: bool
    attrs: dict[str, Any]

    @property
    def once(self) -> bool:
        """Whether it stands in a token's first row only."""
        return self.dims == ["token"] and not self.coord


def to_parquet(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a trace as Parquet in long form; return where.

    Rows are in order of ``token``, then ``layer``. The file is read back and compared before it
    gets its name.

    Parameters
    ----------
    ds : xarray.Dataset
        A trace; on disk it is read in windows.
    path : path-like
        The file; an existing one is replaced.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    SchemaError
        If it is not a valid trace.
    TraceFileError
        If it cannot be written; what was there before is left as it was.

    Notes
    -----
    The names ``indices`` and ``scores`` of the lists are those of FLAME-MoE routing traces; the
    columns are in docs/formats.md.

    Examples
    --------
    >>> import tempfile
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = to_parquet(trace, f"{folder}/trace.parquet")
    ...     from_parquet(path).identical(trace)
    True
    """
    import pyarrow as pa
    from pyarrow import parquet

    validate(ds, values=False)
    path = Path(path)
    columns, others = _split(ds)
    n_layer = ds.sizes["layer"]
    step = max(1, _ROW_GROUP // n_layer)
    head = {
        "version": _VERSION,
        "sizes": {str(dim): size for dim, size in ds.sizes.items()},
        "columns": [vars(column) for column in columns],
        "others": others,
        "attrs": _plain_attrs(ds.attrs),
    }
    text = json.dumps(head).encode("utf-8")
    metadata = {_KEY: text, _CRC: str(zlib.crc32(text)).encode()}
    with written_aside(path) as aside:
        writer = None
        try:
            for start in range(0, ds.sizes["token"], step):
                part = ds.isel(token=slice(start, start + step))
                table = _table(part, columns, start).replace_schema_metadata(metadata)
                if writer is None:
                    writer = parquet.ParquetWriter(
                        aside, table.schema, compression="zstd", write_page_checksum=True
                    )
                writer.write_table(table, row_group_size=table.num_rows)
        except pa.ArrowException as error:
            raise TraceFormatError(
                f"trace must fit Parquet; got {str(error).splitlines()[0]}. Drop that variable."
            ) from error
        finally:
            if writer is not None:
                writer.close()
        _compare(aside, ds)
    return path


def from_parquet(path: str | os.PathLike[str], *, n_expert: int | None = None) -> xr.Dataset:
    """Return a trace from Parquet: what :func:`to_parquet` wrote, or a FLAME-MoE capture.

    A capture has one file per layer, with the columns ``indices`` (list of int, the experts of a
    token) and, if wanted, ``scores`` (their weights). Its tokens count as one evaluation of a
    prompt.

    Parameters
    ----------
    path : path-like
        A file; or the folder of a capture, whose files name their layer, as ``layer_3.parquet``.
    n_expert : int, optional
        Experts per layer; needed for a capture, which does not say.

    Returns
    -------
    xarray.Dataset
        As it was written; ``source="import"`` for a capture.

    Raises
    ------
    TraceFormatError
        If the file is damaged, or neither of the two.
    SettingsError
        If `n_expert` is needed or impossible.
    TraceFileError
        If it cannot be read.

    Notes
    -----
    Source of the capture's form: FLAME-MoE routing traces (``scores`` list<float16>[k], ``indices``
    list<int16>[k]).

    Examples
    --------
    >>> import tempfile
    >>> import pandas as pd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pd.DataFrame({"indices": [[2, 0], [1, 3]]}).to_parquet(f"{folder}/layer_0.parquet")
    ...     trace = from_parquet(folder, n_expert=4)
    >>> trace.expert_chosen[:, 0].values.tolist(), trace.attrs["source"]
    ([[2, 0], [1, 3]], 'import')
    """
    import pyarrow as pa
    from pyarrow import parquet

    file = file_to_read(path, folder=True)
    if file.is_dir():
        return from_flame(file, n_expert)
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as opened:
            metadata = opened.schema_arrow.metadata or {}
            if _KEY not in metadata:
                return from_flame(file, n_expert)
            ds = _read(opened, _head(metadata, str(file)), str(file))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, BmoeLabError):
            raise
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise TraceFormatError(
            f"file must be Parquet; got {words} in {str(file)!r}. It is damaged or of another kind."
        ) from error
    return validate(upgrade(ds, str(file)))


def _split(ds: xr.Dataset) -> tuple[list[_Column], list[dict[str, Any]]]:
    """Return what goes into columns, and what into the metadata."""
    columns: list[_Column] = []
    others: list[dict[str, Any]] = []
    taken = {"token", "layer", *_FLAME.values()}
    for key, variable in ds.variables.items():
        name, coord = str(key), key in ds.coords
        dims = [str(dim) for dim in variable.dims]
        dtype = variable.dtype
        text = dtype.kind in "UOT"
        about: dict[str, Any] = {
            "dims": dims,
            "dtype": "str" if text else dtype.str,
            "coord": coord,
        }
        about["attrs"] = _plain_attrs(variable.attrs)
        fits = dims in (["token"], ["layer"]) or (dims[:2] == ["token", "layer"] and len(dims) < 4)
        if fits and (text or dtype.kind in "iuf"):
            column = _FLAME.get(name, name)
            while column in taken and name not in _FLAME:
                column += "_"
            taken.add(column)
            columns.append(_Column(name, column, **about))
            continue
        values = variable.values
        if text:
            values = np.array([str(v) for v in np.ravel(values)]).reshape(values.shape)
            about["values"] = values.tolist()
        elif dtype.kind in "iufb":
            about["base64"] = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
            about["shape"] = list(values.shape)
        else:
            raise TraceFormatError(
                f"variables must be numbers or text; got {name!r} of {dtype}. Drop it first."
            )
        others.append({"variable": name, **about})
    return columns, others


def _table(part: xr.Dataset, columns: list[_Column], start: int) -> Any:
    """Return a window of tokens as an Arrow table."""
    import pyarrow as pa

    n_token, n_layer = part.sizes["token"], part.sizes["layer"]
    first = np.zeros(n_token * n_layer, dtype=bool)
    first[::n_layer] = True
    arrays: dict[str, Any] = {
        "token": pa.array(np.repeat(np.arange(start, start + n_token, dtype=np.int64), n_layer)),
        "layer": pa.array(np.tile(np.arange(n_layer, dtype=np.int32), n_token)),
    }
    for column in columns:
        values = part.variables[column.variable].values
        if column.dtype == "str":
            values = np.array([str(v) for v in np.ravel(values)], dtype=object).reshape(
                values.shape
            )
        if column.dims == ["token"]:
            values = np.repeat(values, n_layer)
        elif column.dims == ["layer"]:
            values = np.tile(values, n_token)
        flat = np.ascontiguousarray(values).reshape(-1)
        array = pa.array(flat, mask=~first) if column.once else pa.array(flat)
        if len(column.dims) == 3:
            array = pa.FixedSizeListArray.from_arrays(array, values.shape[-1])
        arrays[column.column] = array
    return pa.table(arrays)


def _windows(
    opened: Any, columns: list[_Column], sizes: dict[str, int], where: str
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]]]]:
    """Yield the first token and the variables of each row group."""
    n_layer = sizes["layer"]
    start = 0
    for index in range(opened.num_row_groups):
        table = opened.read_row_group(index)
        n_token, rest = divmod(table.num_rows, n_layer)
        token = np.repeat(np.arange(start, start + n_token), n_layer)
        layer = np.tile(np.arange(n_layer), n_token)
        ordered = not rest and (
            np.array_equal(table.column("token").to_numpy(), token)
            and np.array_equal(table.column("layer").to_numpy(), layer)
        )
        if not ordered:
            raise TraceFormatError(
                "rows must be those of every token and layer, in order; got others in "
                f"{where!r}, row group {index}. The file was cut or sorted after it was written."
            )
        yield start, {c.variable: _values(table, c, sizes, n_token, where) for c in columns}
        start += n_token
    if start != sizes["token"]:
        raise TraceFormatError(
            f"file must hold {sizes['token']} tokens; got {start} in {where!r}. It is damaged."
        )


def _values(
    table: Any, column: _Column, sizes: dict[str, int], n_token: int, where: str
) -> npt.NDArray[Any]:
    """Return one variable of a window of tokens; one over layers is whole."""
    data = table.column(column.column).combine_chunks()
    n_layer = sizes["layer"]
    shape = tuple(n_token if dim == "token" else sizes[dim] for dim in column.dims)
    if len(column.dims) == 3:
        lengths = data.value_lengths().to_numpy(zero_copy_only=False)
        if data.null_count or (lengths != shape[-1]).any():
            raise TraceFormatError(
                f"{column.column} must be lists of {shape[-1]}; got others in {where!r}. "
                "The file is damaged."
            )
        data = data.flatten()
    if column.dims == ["token"]:
        data = data.take(np.arange(n_token) * n_layer)
    elif column.dims == ["layer"]:
        data = data.slice(0, n_layer)
    if data.null_count:
        raise TraceFormatError(
            f"{column.column} must have no nulls; got {data.null_count} in {where!r}. "
            "The file is damaged."
        )
    if column.dtype == "str":
        values = np.array(data.to_pylist(), dtype=np.str_)
    else:
        values = data.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    return values.reshape(shape)


def _head(metadata: Mapping[bytes, bytes], where: str) -> dict[str, Any]:
    """Return what the file says of its columns."""
    if str(zlib.crc32(metadata[_KEY])).encode() != metadata.get(_CRC):
        raise TraceFormatError(
            f"metadata must fit their checksum; got others in {where!r}. The file is damaged."
        )
    head: dict[str, Any] = json.loads(metadata[_KEY])
    return head


def _read(opened: Any, head: dict[str, Any], where: str) -> xr.Dataset:
    if head["version"] > _VERSION:
        raise TraceFormatError(
            f"version of the long form must be at most {_VERSION}; got {head['version']} in "
            f"{where!r}. Update bmoe_lab to read it."
        )
    columns = [_Column(**column) for column in head["columns"]]
    sizes: dict[str, int] = head["sizes"]
    parts: dict[str, Any] = {}
    for start, window in _windows(opened, columns, sizes, where):
        for column in columns:
            name, values = column.variable, window[column.variable]
            if "token" not in column.dims:
                parts.setdefault(name, values)
            elif column.dtype == "str":
                parts.setdefault(name, []).append(values)
            else:
                if name not in parts:
                    parts[name] = np.empty((sizes["token"], *values.shape[1:]), column.dtype)
                parts[name][start : start + len(values)] = values
    variables, coords = {}, []
    for column in columns:
        values = parts[column.variable]
        if isinstance(values, list):
            values = np.concatenate(values)
        variables[column.variable] = (column.dims, values, _attrs_back(column.attrs))
        coords += [column.variable] * column.coord
    for other in head["others"]:
        if "base64" in other:
            raw = np.frombuffer(base64.b64decode(other["base64"]), dtype=other["dtype"])
            values = raw.reshape(other["shape"]).copy()
        else:
            values = np.array(other["values"], dtype=np.str_)
        variables[other["variable"]] = (other["dims"], values, _attrs_back(other["attrs"]))
        coords += [other["variable"]] * other["coord"]
    ds = xr.Dataset(variables, attrs=_attrs_back(head["attrs"]))
    return ds.set_coords(coords)


def _compare(path: Path, ds: xr.Dataset) -> None:
    """Raise unless the file gives back what was to be written."""
    from pyarrow import parquet

    with parquet.ParquetFile(path, page_checksum_verification=True) as opened:
        head = _head(opened.schema_arrow.metadata, str(path))
        columns = [_Column(**column) for column in head["columns"]]
        for start, window in _windows(opened, columns, head["sizes"], str(path)):
            for column in columns:
                variable = ds.variables[column.variable]
                stop = start + len(window[column.variable])
                part = (
                    variable.isel(token=slice(start, stop)) if "token" in column.dims else variable
                )
                if not _same(part.values, window[column.variable]):
                    raise TraceFormatError(
                        f"{column.variable} must read back as written; got other values from token "
                        f"{start} on. The file was not kept."
                    )


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if one.dtype.kind in "UOT":
        return bool((one.astype(object) == other.astype(object)).all())
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _plain_attrs(attrs: Any) -> dict[str, Any]:
    """Return attributes as JSON can hold them; an array keeps its dtype."""
    return {
        name: {"dtype": value.dtype.str, "values": value.tolist()}
        if isinstance(value, np.ndarray)
        else value
        for name, value in clean_attrs(attrs).items()
    }


def _attrs_back(attrs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.array(value["values"], dtype=value["dtype"]) if isinstance(value, dict) else value
        for name, value in attrs.items()
    }
