"""Older schema versions, brought to the present one."""

from __future__ import annotations

from collections.abc import Callable

import xarray as xr

from bmoe_lab.errors import SchemaError
from bmoe_lab.schema import SCHEMA_VERSION

__all__ = ["UPGRADES", "upgrade"]

UPGRADES: dict[int, Callable[[xr.Dataset], xr.Dataset]] = {}
"""Version to the function that makes the next version of it. Version 1 is the first."""


def upgrade(ds: xr.Dataset, where: str) -> xr.Dataset:
    """Return a stored trace in the present version.

    Parameters
    ----------
    ds : xarray.Dataset
        As read; its data may be lazy.
    where : str
        The file, for messages.

    Raises
    ------
    SchemaError
        If its version is newer, or so old that no upgrade is known.
    """
    version = ds.attrs.get("schema_version")
    if not isinstance(version, int):
        raise SchemaError(
            f"trace must have a whole number as 'schema_version'; got {version!r} in {where!r}. "
            "Is it a trace of bmoe_lab?"
        )
    if version > SCHEMA_VERSION:
        raise SchemaError(
            f"schema_version must be at most {SCHEMA_VERSION}; got {version} in {where!r}. "
            "Update bmoe_lab to read it."
        )
    while version < SCHEMA_VERSION:
        if version not in UPGRADES:
            raise SchemaError(
                f"schema_version must be from {min(UPGRADES, default=SCHEMA_VERSION)} to "
                f"{SCHEMA_VERSION}; got {version} in {where!r}. No upgrade from it is known."
            )
        ds = UPGRADES[version](ds)
        version += 1
        ds.attrs["schema_version"] = version
    return ds
