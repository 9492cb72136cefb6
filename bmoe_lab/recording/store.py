"""Traces on disk: saved so that they can be trusted, opened whatever their form.

A file is written aside, read back, compared bit for bit, then renamed: a reader finds the old file
or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, TraceFileError
from bmoe_lab.recording.formats import FORMATS, Format, windows
from bmoe_lab.recording.frames import MAGIC
from bmoe_lab.recording.journal_reader import JournalReader
from bmoe_lab.recording.recorder import MEMORY_LIMIT
from bmoe_lab.recording.upgrades import upgrade
from bmoe_lab.schema import clean_attrs, is_trace, validate

__all__ = ["check_writable", "open_trace", "save_trace"]

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ORDER = "node_order"

# What h5py, h5netcdf, zarr and numcodecs raise for files that they cannot read or write.
_BACKEND_ERRORS = (OSError, RuntimeError, ValueError, KeyError)


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Return a target as a path if a trace can be saved there; leaves nothing behind.

    Meant for the moment before a long run.

    Parameters
    ----------
    path : path-like
        A file ``.nc`` or a folder ``.zarr``; an existing one of the same kind will be replaced.

    Raises
    ------
    TraceFileError
        If the suffix is unknown, or the folder is missing or cannot be written.

    Examples
    --------
    >>> check_writable("trace.csv")
    Traceback (most recent call last):
    bmoe_lab.errors.TraceFileError: path must end in one of ['.nc', '.zarr']; got 'trace.csv'. ...
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise TraceFileError(
            f"path must end in one of {sorted(FORMATS)}; got {str(path)!r}. "
            "The suffix chooses the format."
        )
    if not path.parent.is_dir():
        raise TraceFileError(
            f"path must be in a folder that exists; got {str(path)!r}. Make {str(path.parent)!r}."
        )
    if path.exists() and path.is_dir() is not (path.suffix == ".zarr"):
        kind = "folder" if path.is_dir() else "file"
        raise TraceFileError(
            f"path must not be a {kind} already for {path.suffix}; got {str(path)!r}. "
            "Choose another name."
        )
    if path.is_dir() and not _is_zarr(path) and any(path.iterdir()):
        raise TraceFileError(
            f"path must be a Zarr folder or a new name; got {str(path)!r}. "
            "That folder holds other files. Choose another name."
        )
    probe = _aside(path, "probe")
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        probe.unlink()
    except OSError as error:
        raise TraceFileError(
            f"path must be one that can be written; got {str(path)!r} ({error.strerror}). "
            "Choose another folder."
        ) from error
    return path


def save_trace(
    trace: xr.Dataset | xr.DataTree,
    path: str | os.PathLike[str],
    *,
    memory_limit: int = MEMORY_LIMIT,
) -> Path:
    """Save a trace or a comparison; return where.

    Plain ``xarray.open_dataset``, ``open_zarr`` and ``open_datatree`` read it back equal.

    Parameters
    ----------
    trace : xarray.Dataset or xarray.DataTree
        A trace, or a tree in which at least one node is one. It is not modified; attributes are
        stored in the form of :func:`bmoe_lab.schema.clean_attrs`.
    path : path-like
        ``.nc`` for netCDF, ``.zarr`` for Zarr format 2. An existing file of that name is replaced.
    memory_limit : int, default 256 MiB
        Bytes to hold in memory at most; a longer trace is copied window by window.

    Raises
    ------
    SchemaError
        If it is not a valid trace.
    TraceFileError
        If it cannot be written. What was there before is left as it was.

    Examples
    --------
    >>> import tempfile
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=4, n_layer=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_trace(trace, f"{folder}/trace.nc")
    ...     open_trace(path).identical(trace)
    True
    """
    nodes = _nodes_to_store(trace)
    path = check_writable(path)
    form = FORMATS[path.suffix]
    aside = _aside(path, "part")
    try:
        form.write(aside, nodes, lambda ds: _window(ds, memory_limit))
        for group, ds in nodes.items():
            _compare(form, aside, group, ds, _window(ds, memory_limit))
        _sync(aside)
        _replace(aside, path)
    except _BACKEND_ERRORS as error:
        if isinstance(error, SchemaError | TraceFileError):
            raise
        raise TraceFileError(
            f"trace must be written to {str(path)!r}; got {_one_line(error)}. "
            "Free space or choose another target."
        ) from error
    finally:
        _delete(aside)
    return path


def open_trace(
    path: str | os.PathLike[str], *, memory_limit: int = MEMORY_LIMIT
) -> xr.Dataset | xr.DataTree:
    """Open a trace, a comparison or the journal of an unfinished recording.

    The form is recognised by content. A short one is loaded and its file closed; a long one stays
    on disk and is read when it is used.

    Parameters
    ----------
    path : path-like
        What :func:`save_trace` wrote, or a journal.
    memory_limit : int, default 256 MiB
        Bytes up to which it is loaded.

    Returns
    -------
    xarray.Dataset or xarray.DataTree
        As it was saved. A journal that was cut short gives every token up to its last good frame,
        with ``complete = 0`` and ``journal_note``.

    Raises
    ------
    TraceFileError
        If there is no such file, or it is damaged, or it is none of these.
    SchemaError
        If it is not a trace, or a newer version of the schema.

    See Also
    --------
    recover : Turns a leftover journal into a file.
    """
    if not isinstance(path, str | os.PathLike):
        raise TraceFileError(f"path must be a path; got {path!r}.")
    path = Path(path)
    where = str(path)
    if not path.exists():
        raise TraceFileError(f"path must be a file that exists; got {where!r}. Check the name.")
    if path.is_dir():
        if not _is_zarr(path):
            raise TraceFileError(
                f"path must be a Zarr folder, a netCDF file or a journal; got {where!r}. "
                "The folder holds no Zarr metadata."
            )
        return _open_file(path, FORMATS[".zarr"], memory_limit)
    try:
        with open(path, "rb") as file:
            begin = file.read(8)
    except OSError as error:
        raise TraceFileError(f"path must be readable; got {where!r} ({error.strerror}).") from error
    if begin == _HDF5_MAGIC:
        return _open_file(path, FORMATS[".nc"], memory_limit)
    if begin.startswith(MAGIC):
        return _open_journal(path, memory_limit)
    raise TraceFileError(
        f"path must be a Zarr folder, a netCDF file or a journal; got {where!r}. "
        + ("It is empty." if not begin else "Its first bytes are of another format.")
    )


def _open_journal(path: Path, memory_limit: int) -> xr.Dataset:
    reader = JournalReader(path)
    lazy = reader.n_token * reader.spec.bytes_per_token > memory_limit
    try:
        ds = validate(upgrade(reader.dataset(lazy=lazy), str(path)), values=not lazy)
    except BaseException:
        reader.close()
        raise
    if lazy:
        ds.set_close(reader.close)
    else:
        reader.close()
    return ds


def _open_file(path: Path, form: Format, memory_limit: int) -> xr.Dataset | xr.DataTree:
    opened: dict[str, xr.Dataset] = {}
    try:
        groups = form.groups(path)
        for group in ["/", *groups]:
            opened[group] = form.open(path, group)
        lazy = sum(ds.nbytes for ds in opened.values()) > memory_limit
        nodes = {group: _restore(ds, lazy) for group, ds in opened.items()}
    except _BACKEND_ERRORS as error:
        for ds in opened.values():
            ds.close()
        raise TraceFileError(
            f"trace must be readable; got {_one_line(error)} in {str(path)!r}. "
            "The file is damaged or of another kind."
        ) from error
    try:
        if not any(is_trace(ds) for ds in nodes.values()):
            raise SchemaError(
                f"file must hold a trace; got {str(path)!r} with "
                f"{sorted(map(str, nodes['/'].variables))}. Is it a trace of bmoe_lab?"
            )
        for group, ds in nodes.items():
            if is_trace(ds):
                nodes[group] = validate(upgrade(ds, str(path)), values=not lazy)
    except BaseException:
        for ds in opened.values():
            ds.close()
        raise

    def close() -> None:
        for ds in opened.values():
            ds.close()

    if not lazy:
        close()
    if not groups:
        nodes["/"].set_close(close if lazy else None)
        return nodes["/"]
    order = json.loads(nodes["/"].attrs.pop(_ORDER, "null")) or groups
    tree = xr.DataTree.from_dict({name: nodes[name] for name in ["/", *order]})
    tree.set_close(close if lazy else None)
    return tree


def _restore(ds: xr.Dataset, lazy: bool) -> xr.Dataset:
    """Return a stored Dataset with the types that the formats change put right."""
    ds = (ds if lazy else ds.load()).drop_encoding()
    ds.attrs = {name: _plain(value) for name, value in ds.attrs.items()}
    for name, variable in list(ds.variables.items()):
        variable.attrs = {key: _plain(value) for key, value in variable.attrs.items()}
        if "flag_values" in variable.attrs:  # JSON keeps no dtype
            flags = np.atleast_1d(variable.attrs["flag_values"])
            variable.attrs["flag_values"] = flags.astype(variable.dtype)
        if variable.dtype.kind in "OT":  # older xarray reads text as objects
            text = np.array(variable.values, dtype=np.str_)
            ds[name] = (variable.dims, text, variable.attrs)
    return ds


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    return value.item() if isinstance(value, np.generic) else value


def _nodes_to_store(trace: Any) -> dict[str, xr.Dataset]:
    """Return the Datasets by group, root first, checked and in stored form."""
    if isinstance(trace, xr.Dataset):
        return {"/": validate(_stored(trace), values=False)}
    if not isinstance(trace, xr.DataTree):
        raise SchemaError(
            f"trace must be an xarray Dataset or DataTree; got {type(trace).__name__}. "
            "Pass run.trace to save a run."
        )
    nodes: dict[str, xr.Dataset] = {}
    for node in trace.subtree:
        ds = node.to_dataset(inherit=False)
        path = "/" if node is trace else f"/{node.relative_to(trace)}"
        stored = _stored(ds)
        nodes[path] = validate(stored, values=False) if is_trace(stored) else stored
    if not any(is_trace(ds) for ds in nodes.values()):
        raise SchemaError(
            f"tree must have a trace in at least one node; got {list(nodes)}. Add one."
        )
    # Zarr lists groups by name; the order of the arms is part of a comparison.
    nodes["/"].attrs[_ORDER] = json.dumps([name for name in nodes if name != "/"])
    return nodes


def _stored(ds: xr.Dataset) -> xr.Dataset:
    ds = ds.drop_encoding()  # a new object: the caller's stays as it is
    ds.attrs = clean_attrs(ds.attrs)
    for name, variable in list(ds.variables.items()):
        attrs = clean_attrs(variable.attrs)
        if variable.dtype.kind in "OT":
            text = np.array([str(value) for value in np.ravel(variable.values)], dtype=np.str_)
            ds[name] = (variable.dims, text.reshape(variable.shape), attrs)
        else:
            ds[name].attrs = attrs
    return ds


def _window(ds: xr.Dataset, memory_limit: int) -> int:
    """Return how many tokens to hold at once: a quarter of the limit, for copies and codecs."""
    n_token = max(1, ds.sizes.get("token", 1))
    if ds.nbytes <= memory_limit:
        return n_token
    return max(1, memory_limit // 4 // max(1, ds.nbytes // n_token))


def _compare(form: Format, path: Path, group: str, ds: xr.Dataset, window: int) -> None:
    """Raise unless the file holds exactly this Dataset."""
    with form.open(path, group) as read:
        if set(read.variables) != set(ds.variables) or dict(read.sizes) != dict(ds.sizes):
            raise TraceFileError(
                f"trace must read back as written; got {dict(read.sizes)} with "
                f"{sorted(map(str, read.variables))}. The file was not kept."
            )
        stored = {name: _plain(value) for name, value in read.attrs.items()}
        if stored != ds.attrs:
            names = sorted(k for k in ds.attrs | stored if ds.attrs.get(k) != stored.get(k))
            raise TraceFileError(
                f"attributes must read back as written; got others for {names}. "
                "The file was not kept."
            )
        for start, part in windows(ds, window):
            token = {"token": slice(start, start + window)} if "token" in ds.dims else {}
            back = read.isel(token)
            for name, variable in part.variables.items():
                if not _same(variable.values, back.variables[name].values):
                    raise TraceFileError(
                        f"{name} must read back as written; got another dtype or value from token "
                        f"{start} on. The file was not kept."
                    )


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return whether two arrays hold the same bits; text of another width is the same text."""
    if one.dtype.kind in "UOT":
        return other.dtype.kind in "UOT" and bool((one.astype(object) == other).all())
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind == "f":
        bits = f"u{one.dtype.itemsize}"
        one, other = np.ascontiguousarray(one).view(bits), np.ascontiguousarray(other).view(bits)
    return bool(np.array_equal(one, other))


def _is_zarr(path: Path) -> bool:
    return any((path / name).exists() for name in (".zgroup", ".zmetadata", "zarr.json"))


def _aside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}.{what}{path.suffix}")


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for folder, _, names in os.walk(path):
            yield from (Path(folder, name) for name in names)
    else:
        yield path


def _sync(path: Path) -> None:
    """Wait until the files are on the disk, so that the journal may go."""
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _replace(aside: Path, path: Path) -> None:
    if not path.is_dir():
        os.replace(aside, path)
        return
    # A folder cannot be replaced in one step; between the two renames both still exist.
    old = _aside(path, "old")
    os.rename(path, old)
    try:
        os.rename(aside, path)
    except OSError:
        os.rename(old, path)
        raise
    _delete(old)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {words[:300]}"
