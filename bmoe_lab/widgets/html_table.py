"""A table in a page, its text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table"]


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Return rows of text as HTML; wider than the page, the table scrolls.

    Parameters
    ----------
    head : sequence of str
        Titles of the columns.
    rows : sequence of sequence of str
        One text per column.
    left : int, default 0
        So many columns, from the first on, hold words: they begin at the left.

    Examples
    --------
    >>> "&lt;b&gt;" in html_table(["piece"], [["<b>"]])
    True
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag} style='text-align:{'left' if column < left else 'right'};padding:1px 7px;"
            f"white-space:{'pre' if tag == 'td' else 'normal'}'>{escape(text)}</{tag}>"
            for column, text in enumerate(texts)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        "<div style='overflow-x:auto;max-width:100%'><table style='line-height:1.5'>"
        f"<tr>{cells('th', head)}</tr>{body}</table></div>"
    )
