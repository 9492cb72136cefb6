"""Datasets in netCDF or Zarr, window by window, so that a long one never has to fit in memory.

Both formats are written so that a plain ``xarray`` reads equal values of equal dtypes: no fill
values (they would make integers floats), no scaling, Zarr in format 2 (format 3 warns on text).
Blocks of numbers carry checksums (netCDF: Fletcher-32, Zarr: the one of Zstandard frames), so
damage to them is an error; HDF5's own structures, its text and Zarr's JSON have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xarray as xr

from bmoe_lab.errors import TraceFileError
from bmoe_lab.recording.careful_file import CarefulFile

__all__ = ["FORMATS", "Format", "NetCDF", "Window", "Zarr", "windows"]

# Bytes of the widest variable in one chunk, before compression.
_CHUNK_BYTES = 4 * 2**20


Window = Callable[[xr.Dataset], int]
"""Gives the tokens of a Dataset to hold at once."""


class Format(Protocol):
    """What the store needs of a file format. Groups are paths such as ``"/"`` or ``"/base"``."""

    def write(self, path: Path, nodes: Mapping[str, xr.Dataset], windows_of: Window) -> None:
        """Write a new file of Datasets by group, root first."""

    def groups(self, path: Path) -> list[str]:
        """Return the groups below the root, in stored order."""

    def open(self, path: Path, group: str) -> xr.Dataset:
        """Return a group, lazily."""


def windows(ds: xr.Dataset, window: int) -> Iterator[tuple[int, xr.Dataset]]:
    """Yield the first token and the Dataset of each window of tokens.

    Parameters
    ----------
    ds : xarray.Dataset
        Any; without a dim ``token`` it is one window.
    window : int
        Tokens in each.
    """
    n_token = ds.sizes.get("token", 0)
    if n_token <= window:
        yield 0, ds
        return
    for start in range(0, n_token, window):
        yield start, ds.isel(token=slice(start, start + window))


def _chunk_tokens(ds: xr.Dataset) -> int:
    """Return the tokens in one chunk, the same for every variable."""
    n_token = max(1, ds.sizes.get("token", 1))
    widest = max(
        (v.nbytes // n_token for v in ds.variables.values() if "token" in v.dims), default=1
    )
    return int(np.clip(_CHUNK_BYTES // max(1, widest), 1, n_token))


def _chunks(ds: xr.Dataset, name: str, tokens: int) -> tuple[int, ...]:
    sizes = ds.variables[name].sizes
    return tuple(tokens if dim == "token" else max(1, size) for dim, size in sizes.items())


def _is_text(variable: xr.Variable) -> bool:
    return variable.dtype.kind in "UOT"


class NetCDF:
    """netCDF-4 through h5netcdf."""

    def write(self, path: Path, nodes: Mapping[str, xr.Dataset], windows_of: Window) -> None:
        """Write groups, window by window."""
        import h5netcdf

        careful = CarefulFile(path)
        try:
            with h5netcdf.File(careful, "w") as file:
                for group, ds in nodes.items():
                    node = file if group == "/" else file.create_group(group)
                    for start, part in windows(ds, windows_of(ds)):
                        if start == 0:
                            self._begin(node, ds, part)
                        else:
                            self._append(node, part, start)
                        careful.check()
        finally:
            careful.close()
        careful.check()

    def _begin(self, node: Any, ds: xr.Dataset, part: xr.Dataset) -> None:
        from xarray.backends import H5NetCDFStore

        tokens = _chunk_tokens(ds)
        encoding: dict[str, dict[str, Any]] = {}
        for name, variable in ds.variables.items():
            one = encoding[str(name)] = {} if _is_text(variable) else {"_FillValue": None}
            if variable.ndim and variable.size:
                one["chunksizes"] = _chunks(ds, str(name), tokens)
            if variable.ndim and variable.size and not _is_text(variable):
                one |= {"zlib": True, "complevel": 1, "shuffle": True, "fletcher32": True}
        long = part.sizes.get("token", 0) < ds.sizes.get("token", 0)
        part.dump_to_store(
            H5NetCDFStore(node), encoding=encoding, unlimited_dims=["token"] if long else None
        )

    def _append(self, node: Any, part: xr.Dataset, start: int) -> None:
        stop = start + part.sizes["token"]
        node.resize_dimension("token", stop)
        for name, variable in part.variables.items():
            if "token" in variable.dims:
                values = variable.values
                where = tuple(
                    slice(start, stop) if dim == "token" else slice(None) for dim in variable.dims
                )
                node[str(name)][where] = values.astype(object) if _is_text(variable) else values

    def groups(self, path: Path) -> list[str]:
        """Return the groups below the root, in stored order."""
        import h5netcdf

        def walk(node: Any, prefix: str) -> Iterator[str]:
            for name, child in node.groups.items():
                yield f"{prefix}/{name}"
                yield from walk(child, f"{prefix}/{name}")

        with h5netcdf.File(path, "r") as file:
            return list(walk(file, ""))

    def open(self, path: Path, group: str) -> xr.Dataset:
        """Return a group, lazily."""
        return xr.open_dataset(path, group=group, engine="h5netcdf", cache=False)


class Zarr:
    """Zarr format 2, a folder."""

    def write(self, path: Path, nodes: Mapping[str, xr.Dataset], windows_of: Window) -> None:
        """Write groups, window by window."""
        import zarr

        for group, ds in nodes.items():
            self._write(path, group, ds, windows_of(ds))
        # All metadata in one file opens faster, and without a warning.
        zarr.consolidate_metadata(path, zarr_format=2)

    def _write(self, path: Path, group: str, ds: xr.Dataset, window: int) -> None:
        import numcodecs  # type: ignore[import-untyped]  # it publishes no types

        tokens = _chunk_tokens(ds)
        window = max(tokens, window // tokens * tokens)  # appends begin at a chunk
        encoding: dict[str, dict[str, Any]] = {}
        for name, variable in ds.variables.items():
            one = encoding[str(name)] = {} if _is_text(variable) else {"_FillValue": None}
            if variable.ndim and variable.size:
                one["chunks"] = _chunks(ds, str(name), tokens)
            one["compressors"] = (numcodecs.Zstd(level=1, checksum=True),)
        where: dict[str, Any] = {
            "zarr_format": 2,
            "consolidated": False,
            "group": group,
            # A chunk that is absent reads as zeros: so none may be, and `open` counts them.
            "write_empty_chunks": True,
        }
        fixed = [name for name, v in ds.variables.items() if "token" not in v.dims]
        for start, part in windows(ds, window):
            if start == 0:
                mode: Any = "w" if group == "/" else "a"
                part.to_zarr(path, mode=mode, encoding=encoding, **where)
            else:
                part.drop_vars(fixed).to_zarr(path, append_dim="token", **where)

    def groups(self, path: Path) -> list[str]:
        """Return the groups below the root; Zarr keeps no order."""
        found = path.rglob(".zgroup")
        names = (file.parent.relative_to(path).as_posix() for file in found)
        return sorted(f"/{name}" for name in names if name != ".")

    def open(self, path: Path, group: str) -> xr.Dataset:
        """Return a group, lazily."""
        import zarr

        node = zarr.open_group(path, path=group.strip("/"), mode="r")
        for name, array in node.arrays():
            missing = array.nchunks - array.nchunks_initialized
            if missing:
                raise TraceFileError(
                    f"trace must have all its chunks; got {array.nchunks_initialized} of "
                    f"{array.nchunks} of {name!r} in {str(path)!r}. Copy the folder again."
                )
        return xr.open_dataset(
            path, group=group, engine="zarr", chunks=None, consolidated=True, cache=False
        )


FORMATS: dict[str, Format] = {".nc": NetCDF(), ".zarr": Zarr()}
"""The known formats, by the suffix of the file."""
