"""A part of a trace to draw: some tokens, some layers, by their numbers in the whole trace."""

from __future__ import annotations

import numbers

import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError

__all__ = ["Window", "window_of"]

Window = tuple[int, int]
"""First and stop, as in ``range``."""


def window_of(trace: xr.Dataset, dim: str, given: Window | None) -> Window:
    """Return the part of `dim` to draw, cut to what the trace has.

    Parameters
    ----------
    trace : xarray.Dataset
        Routing trace.
    dim : {"token", "layer"}
        Which dimension.
    given : tuple of int, optional
        First and stop; everything by default.

    Raises
    ------
    SchemaError
        If the trace holds nothing along `dim`.
    SettingsError
        If `given` is not two whole numbers, or nothing of the trace is between them.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> window_of(make_trace(n_token=8, n_layer=2), "token", (3, 100))
    (3, 8)
    """
    size = int(trace.sizes.get(dim, 0))
    if size == 0:
        raise SchemaError(f"trace must hold {dim}s; got none. Choose another trace.")
    if given is None:
        return 0, size
    name = f"{dim}s"
    whole = (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(end, numbers.Integral) for end in given)
    )
    if not whole:
        raise SettingsError(
            f"{name} must be two whole numbers (first, stop); got {given!r}. Use (0, {size})."
        )
    first, stop = max(0, int(given[0])), min(size, int(given[1]))
    if first >= stop:
        raise SettingsError(
            f"{name} must be (first, stop) with a {dim} of the trace between them; got {given!r}. "
            f"The trace has {size} {dim if size == 1 else name}: use (0, {size})."
        )
    return first, stop
