"""The figures of a sweep as a file: netCDF with every label, or a long table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from bmoe_lab.errors import TraceFileError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SUFFIXES", "check_grid_path", "grid_frame", "save_grid"]

#: What the suffix of the file chooses.
SUFFIXES = (".csv", ".nc", ".parquet")


def grid_frame(grid: xr.Dataset) -> pd.DataFrame:
    """Return a sweep as a table, one row per combination that was asked for.

    Parameters
    ----------
    grid : xarray.Dataset
        What :func:`bmoe_lab.sweep` or :func:`bmoe_lab.lru_curve` returned.

    Returns
    -------
    pandas.DataFrame
        Columns: labels, then the other coordinates, then the figures, NaN where a combination could
        not be; ``attrs`` are the Dataset's.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> from bmoe_lab.simulation.curves import lru_curve
    >>> grid_frame(lru_curve(bl.testing.make_trace(n_token=8), ["100 KiB"])).shape[0]
    1
    """
    table = grid.to_dataframe().reset_index()
    figures = [str(name) for name in grid.data_vars]
    labels = [str(name) for name in table.columns if name not in figures]
    table = table[[*labels, *figures]]
    table.attrs = {name: _plain(value) for name, value in grid.attrs.items()}
    return table


def check_grid_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a sweep can be written to; meant for the moment before a long one.

    Raises
    ------
    TraceFileError
        If the suffix is not known, or the folder is missing or cannot be written.

    Examples
    --------
    >>> check_grid_path("grid.xlsx")
    Traceback (most recent call last):
    bmoe_lab.errors.TraceFileError: path must end in one of ['.csv', '.nc', '.parquet']; got ...
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise TraceFileError(
            f"path must end in one of {list(SUFFIXES)}; got {str(path)!r}. "
            "The suffix chooses the format."
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise TraceFileError(
            f"path must be in a folder that can be written; got {str(path)!r}. "
            f"Make {str(path.parent)!r}."
        )
    return path


def save_grid(grid: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write the figures of a sweep; return where.

    Parameters
    ----------
    grid : xarray.Dataset
        What :func:`bmoe_lab.sweep` or :func:`bmoe_lab.lru_curve` returned.
    path : path-like
        ``.nc`` keeps everything. ``.parquet`` is a long table with the attributes in its metadata;
        ``.csv`` has no place for them. An existing file is replaced when the new one is whole.

    Raises
    ------
    TraceFileError
        If it cannot be written; what was there before is left as it was.
    """
    from bmoe_lab.converters.files import written_aside

    path = check_grid_path(path)
    with written_aside(path) as aside:
        if path.suffix == ".nc":
            encoding = {name: {"_FillValue": None} for name in grid.data_vars}
            grid.to_netcdf(aside, engine="h5netcdf", encoding=encoding)
        elif path.suffix == ".parquet":
            grid_frame(grid).to_parquet(aside, index=False)
        else:
            grid_frame(grid).to_csv(aside, index=False)
    return path


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
