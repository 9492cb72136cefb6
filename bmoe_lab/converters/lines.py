"""A text table with its comments, parsed whole, with the line number of every fault.

The numbers are parsed in bulk. Only where that fails, or where something stands in the file that no
engine prints, is it read again line by line, to find the first line that is at fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from bmoe_lab.converters.files import read_bytes
from bmoe_lab.converters.number_text import FLOAT, INT
from bmoe_lab.errors import TraceFormatError

__all__ = ["TextTable", "first_true", "parse_table", "read_table"]

Kind = Literal["int", "float", "text"]

# What the engines print in a table of numbers; anything else is looked at line by line.
_NUMERIC = b"0123456789,.-+eEnNaA\r\n"
_HEX = re.compile(rb"0[xX]")
_RULES = {"int": "a whole number", "float": "a number or nan", "text": "a text"}


@dataclass(frozen=True)
class TextTable:
    """A table of comma-separated columns below comments.

    Parameters
    ----------
    where : str
        The file, for messages.
    preamble : list of str
        Comment lines above the column names, without line ends.
    names : list of str
        The column names, as in the file; empty if it has none.
    body : bytes
        The rows, comments taken out.
    line_end : str
        Line feed, or carriage return and line feed.
    comments : list of tuple of int and str
        Comment lines below the column names, each with the number of rows before it.
    """

    where: str
    preamble: list[str]
    names: list[str]
    body: bytes
    line_end: str
    comments: list[tuple[int, str]] = field(default_factory=list)

    @property
    def n_row(self) -> int:
        """Rows of the table."""
        return self.body.count(b"\n")

    def line(self, row: int) -> int:
        """Return the line of the file on which a row stands, from 1."""
        above = sum(1 for before, _ in self.comments if before <= row)
        return len(self.preamble) + bool(self.names) + above + row + 1

    def fail(self, rule: str, got: object, row: int | None, step: str) -> NoReturn:
        """Raise the error for a value of a row."""
        place = "" if row is None else f", line {self.line(row)}"
        raise TraceFormatError(f"{rule}; got {got!r} in {self.where!r}{place}. {step}")

    def columns(self, kinds: dict[str, Kind]) -> dict[str, Any]:
        """Return columns as arrays.

        Parameters
        ----------
        kinds : dict
            Every column name, in the file's order, with what it holds.

        Returns
        -------
        dict
            int64 and float64 arrays of shape (row,); texts as a list of str.

        Raises
        ------
        TraceFormatError
            With the first line that does not fit.
        """
        import pyarrow as pa
        from pyarrow import csv

        types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
        if "text" in kinds.values():
            doubtful = bool(_HEX.search(self.body)) or b" " in self.body or b"\t" in self.body
        else:
            doubtful = bool(self.body.translate(None, _NUMERIC))
        if doubtful:
            self._check_lines(kinds)
        try:
            table = csv.read_csv(
                pa.BufferReader(self.body),
                # Arrow takes column names, not places, so two of one name need others.
                read_options=csv.ReadOptions(
                    column_names=list(kinds), block_size=max(1 << 20, len(self.body) // 8)
                ),
                parse_options=csv.ParseOptions(
                    quote_char=False,
                    double_quote=False,
                    escape_char=False,
                    newlines_in_values=False,
                    ignore_empty_lines=False,
                ),
                convert_options=csv.ConvertOptions(
                    column_types={name: types[kind] for name, kind in kinds.items()},
                    null_values=[],
                    strings_can_be_null=False,
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            self._check_lines(kinds)
            raise TraceFormatError(
                f"rows must be numbers under {list(kinds)}; got a table that cannot be parsed in "
                f"{self.where!r} ({str(error).splitlines()[0]}). The file is damaged."
            ) from error
        out: dict[str, Any] = {}
        for name, kind in kinds.items():
            column = table.column(name)
            out[name] = column.to_pylist() if kind == "text" else column.to_numpy()
        return out

    def _check_lines(self, kinds: dict[str, Kind]) -> None:
        """Raise for the first line that does not fit, read line by line."""
        names = list(kinds)
        for row, raw in enumerate(self.body.split(b"\n")[:-1]):
            try:
                cells = raw.removesuffix(b"\r").decode("utf-8").split(",")
            except UnicodeDecodeError:
                self.fail("rows must be UTF-8 text", raw, row, "The file is damaged.")
            if len(cells) != len(names):
                self.fail(
                    f"rows must have {len(names)} cells", ",".join(cells), row, _step(row, self)
                )
            for name, cell in zip(names, cells, strict=True):
                kind = kinds[name]
                if kind != "text" and not (_is_int(cell) if kind == "int" else _is_float(cell)):
                    self.fail(f"{name} must be {_RULES[kind]}", cell, row, _step(row, self))


def _step(row: int, table: TextTable) -> str:
    if row == table.n_row - 1:
        return "The last line is cut short. Copy the file again, or delete that line's evaluation."
    return "The file is damaged or of another kind."


def _is_int(cell: str) -> bool:
    return bool(INT.fullmatch(cell)) and -(2**63) <= int(cell) < 2**63


def _is_float(cell: str) -> bool:
    return bool(FLOAT.fullmatch(cell)) and abs(float(cell)) != float("inf")


def read_table(
    path: Path,
    *,
    comments_between: bool = False,
    names: tuple[str, ...] | None = None,
    first: str | None = None,
) -> TextTable:
    """Return a text file as a table whose cells are not parsed yet.

    Parameters
    ----------
    path : pathlib.Path
        A file that exists and is not empty.
    comments_between : bool, default False
        Whether lines that begin with ``#`` may stand between the rows.
    names : tuple of str, optional
        The column names of a format whose files need not have a line of names.
    first : str, optional
        What the first line must be.

    Raises
    ------
    TraceFormatError
        If its line ends are mixed, its last line is cut short, it has no column names, or no rows.
    """
    return parse_table(
        read_bytes(path), str(path), comments_between=comments_between, names=names, first=first
    )


def parse_table(
    data: bytes,
    where: str,
    *,
    comments_between: bool = False,
    names: tuple[str, ...] | None = None,
    first: str | None = None,
) -> TextTable:
    """Return the bytes of a text file as a table; see :func:`read_table`."""
    line_end = _line_end(data, where)
    preamble: list[str] = []
    at = 0
    while data[at : at + 1] == b"#":
        stop = data.index(b"\n", at)
        preamble.append(_text(data[at:stop], where, len(preamble) + 1))
        at = stop + 1
    if first is not None and (not preamble or preamble[0].rstrip() != first):
        got = preamble[0] if preamble else data[: data.index(b"\n")][:80]
        raise TraceFormatError(
            f"first line must be {first!r}; got {got!r} in {where!r}, line 1. "
            "The file is of another kind, or its first lines were cut off."
        )
    found: list[str] = []
    if at < len(data):
        stop = data.index(b"\n", at)
        found = _text(data[at:stop], where, len(preamble) + 1).split(",")
        if names is not None and found != list(names):
            found = []
        else:
            at = stop + 1
    elif names is None:
        raise TraceFormatError(
            f"file must have a line of column names; got {len(preamble)} lines of comments in "
            f"{where!r}. The file is cut short."
        )
    repeated = sorted({name for name in found if found.count(name) > 1})
    if repeated:
        raise TraceFormatError(
            f"column names must differ; got {repeated} twice in {where!r}, "
            f"line {len(preamble) + 1}. The file is damaged."
        )
    table = TextTable(where, preamble, found, data[at:], line_end)
    if b"\n#" in table.body or table.body.startswith(b"#"):
        table = _without_comments(table)
        if not comments_between:
            row, text = table.comments[0]
            raise TraceFormatError(
                f"comments must stand above the column names; got {text!r} in {where!r}, "
                f"line {table.line(row) - 1}. Were two files joined?"
            )
    if not table.n_row:
        raise TraceFormatError(
            f"file must have rows; got none below the column names in {where!r}. "
            "Nothing was recorded in it."
        )
    return table


def _without_comments(table: TextTable) -> TextTable:
    rows: list[bytes] = []
    comments: list[tuple[int, str]] = []
    above = len(table.preamble) + bool(table.names)
    for number, line in enumerate(table.body.split(b"\n")[:-1]):
        if line.startswith(b"#"):
            comments.append((len(rows), _text(line, table.where, above + number + 1)))
        else:
            rows.append(line)
    body = b"".join(row + b"\n" for row in rows)
    return TextTable(table.where, table.preamble, table.names, body, table.line_end, comments)


def _line_end(data: bytes, where: str) -> str:
    """Return the one line end of a file."""
    if not data:
        raise TraceFormatError(f"file must hold a trace; got the empty file {where!r}.")
    n_lf, n_both, n_cr = data.count(b"\n"), data.count(b"\r\n"), data.count(b"\r")
    if n_cr != n_both or 0 < n_both < n_lf:
        first = re.search(rb"\r?\n|\r", data)
        assert first is not None
        other = next(
            m for m in re.finditer(rb"\r\n|\n|\r", data) if m[0] != first[0] or m[0] == b"\r"
        )
        line = len(re.findall(rb"\r\n|\n|\r", data[: other.start()])) + 1
        raise TraceFormatError(
            f"line ends must be all of one kind; got {other[0].decode()!r} in {where!r}, "
            f"line {line}. Was the file edited on another system? Convert its line ends."
        )
    if not data.endswith(b"\n"):
        last = data[data.rfind(b"\n") + 1 :]
        raise TraceFormatError(
            f"last line must end with a line end; got {last[-80:]!r} in {where!r}, "
            f"line {n_lf + 1}. It is cut short. Copy the file again, or delete that line's "
            "evaluation."
        )
    return "\r\n" if n_both else "\n"


def _text(line: bytes, where: str, number: int) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceFormatError(
            f"text must be UTF-8; got {line[:80]!r} in {where!r}, line {number}. "
            "The file is damaged or of another kind."
        ) from error


def first_true(mask: npt.NDArray[np.bool_]) -> int:
    """Return the first place where a mask holds, or -1."""
    return int(np.argmax(mask)) if mask.any() else -1
