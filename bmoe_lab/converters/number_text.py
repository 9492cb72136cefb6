"""How a column of numbers was written, so that it can be written the same way again.

A number keeps its value but not its text: 1.50 and 1.5 are one float. A reader therefore notes a
format that gives back every text of a column; where none does, the texts themselves are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["FLOAT", "INT", "float32_texts", "number_texts", "numbers", "text_format"]

INT = re.compile(r"-?[0-9]+")
"""A whole number as the engines print one."""

FLOAT = re.compile(r"[-+]?(nan|([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?)", re.IGNORECASE)
"""A decimal number, or nan. No inf: no quantity of a trace is infinite."""


def numbers(texts: Sequence[str]) -> npt.NDArray[np.int64] | npt.NDArray[np.float64] | None:
    """Return a column's numbers, whole ones as int64; None if a text is not a number.

    Parameters
    ----------
    texts : sequence of str
        A column, cell by cell.

    Examples
    --------
    >>> numbers(["1", "-2"]), numbers(["0.5", "nan"]), numbers(["1", "x"])
    (array([ 1, -2]), array([0.5, nan]), None)
    """
    if all(INT.fullmatch(text) and len(text) <= 18 for text in texts):
        return np.array([int(text) for text in texts], dtype=np.int64)
    if all(FLOAT.fullmatch(text) for text in texts):
        return np.array([float(text) for text in texts], dtype=np.float64)
    return None


def text_format(
    texts: Sequence[str], values: npt.NDArray[np.int64] | npt.NDArray[np.float64]
) -> str | None:
    """Return a format that gives back every text from its number; None if there is none.

    Parameters
    ----------
    texts : sequence of str
        As they stand in the file.
    values : numpy.ndarray
        Their numbers.

    Examples
    --------
    >>> text_format(["1.50", "20.00"], np.array([1.5, 20.0]))
    '.2f'
    >>> text_format(["1.50", "2.5"], np.array([1.5, 2.5])) is None
    True
    """
    if not len(texts):
        return None
    decimals = len(texts[0].partition(".")[2])
    for candidate in ("d", f".{decimals}f", ".6g", "r"):
        if number_texts(values, candidate) == list(texts):
            return candidate
    return None


def number_texts(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], form: str) -> list[str]:
    """Return numbers as texts.

    Parameters
    ----------
    values : numpy.ndarray
        Whole or floating numbers.
    form : str
        What :func:`text_format` returned.

    Examples
    --------
    >>> number_texts(np.array([1.5]), ".2f"), number_texts(np.array([3.0]), "d")
    (['1.50'], ['3'])
    """
    items = values.tolist()
    if form == "d":
        return [str(int(v)) if v == v and float(v).is_integer() else repr(v) for v in items]
    if form == "r":
        return [repr(value) for value in items]
    return [format(value, form) for value in items]


def float32_texts(values: npt.NDArray[np.float32]) -> list[str]:
    """Return float32 numbers with six significant digits, or nine where six lose something.

    Parameters
    ----------
    values : numpy.ndarray
        float32 of shape (row,); NaN becomes ``nan``.

    Examples
    --------
    >>> float32_texts(np.array([0.25, 1 / 3, np.nan], dtype=np.float32))
    ['0.25', '0.333333343', 'nan']
    """
    # Router weights repeat little, but masks and ties do: each value is formatted once.
    distinct, where = np.unique(values.view(np.uint32), return_inverse=True)
    exact = distinct.view(np.float32)
    texts = [f"{value:.6g}" for value in exact.tolist()]
    with np.errstate(over="ignore"):
        back = np.array(texts, dtype=np.str_).astype(np.float64).astype(np.float32)
    lost = np.flatnonzero((back != exact) & ~np.isnan(exact))
    for index in lost.tolist():
        texts[index] = f"{exact[index].item():.9g}"
    texts = ["nan" if text == "-nan" else text for text in texts]
    return [texts[index] for index in where.tolist()]
