"""Byte sizes as people write them: ``"4 MiB"`` to 4194304 and back."""

from __future__ import annotations

import re

import numpy as np

from bmoe_lab.errors import SettingsError

__all__ = ["format_size", "parse_size"]

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


#: Sizes are summed in signed 64-bit numbers.
_LARGEST = 2**63 - 1


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Return `value` in bytes.

    Only binary units are accepted: "MB" means 10^6 to some and 2^20 to others, and a cache that
    is 5 % smaller than its label makes every hit rate wrong.

    Parameters
    ----------
    value : int or str
        Bytes, or a number with one of the units B, KiB, MiB, GiB, TiB.
    name : str, default "size"
        The parameter's name, for the message.

    Returns
    -------
    int
        Bytes, at least 0.

    Raises
    ------
    SettingsError
        If `value` is negative, 8 EiB or more, not a whole number of bytes, or has an unknown unit.

    Examples
    --------
    >>> parse_size("1.5 KiB"), parse_size(4096)
    (1536, 4096)
    """
    rule = f"{name} must be a size such as '4 MiB', '2 GiB' or a number of bytes"
    # numpy's integers are no `int`, and what `budgets` returns is made of them.
    given: object = value
    if isinstance(given, bool) or not isinstance(given, (int, np.integer, str)):
        raise SettingsError(f"{rule}; got {given!r}.")
    if not isinstance(given, str):
        return _bounded(int(given), given, rule)
    value = given
    match = _PATTERN.fullmatch(value)
    if match is None or match[2] not in _UNITS:
        raise SettingsError(f"{rule}; got {value!r}. Known units: {', '.join(_UNITS)}.")
    whole, point, fraction = match[1].partition(".")
    numerator = int(whole + fraction) * _UNITS[match[2]]
    n_bytes, rest = divmod(numerator, 10 ** len(fraction) if point else 1)
    if rest:
        raise SettingsError(f"{rule}; got {value!r}, which is not a whole number of bytes.")
    return _bounded(n_bytes, value, rule)


def _bounded(n_bytes: int, given: object, rule: str) -> int:
    if n_bytes < 0:
        raise SettingsError(f"{rule}, at least 0; got {given!r}.")
    if n_bytes > _LARGEST:
        raise SettingsError(f"{rule}, less than 8 EiB; got {given!r}.")
    return n_bytes


def format_size(n_bytes: int | float) -> str:
    """Return `n_bytes` with the largest binary unit that leaves a number of at least 1.

    Examples
    --------
    >>> format_size(12_135_488)
    '11.6 MiB'
    >>> format_size(512)
    '512 B'
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(n_bytes) >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.1f} {unit}"
    return f"{n_bytes:.0f} B"
