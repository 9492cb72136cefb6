r"""The display text of a token.

A token is bytes, often not a whole character. The text shown for it keeps what is readable and
writes everything else as ``\xNN``, so that no file format, terminal or page chokes on it. It is
for eyes: a token whose bytes are a backslash, an x and two digits looks the same as an escaped
byte, and ``token_id`` is the exact record.
"""

from __future__ import annotations

import re

__all__ = ["CONTROL", "display_piece"]

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
"""What a piece never contains: C0 and C1 control characters, delete."""


def display_piece(raw: bytes) -> str:
    r"""Return the display text of a token's bytes.

    Parameters
    ----------
    raw : bytes
        The token's bytes as the model's vocabulary has them.

    Examples
    --------
    >>> print(display_piece(" né".encode()))
     né
    >>> print(display_piece(b"\xe2\x82"), display_piece(b"a\x00\n"))
    \xe2\x82 a\x00\x0a
    """
    text = raw.decode("utf-8", errors="backslashreplace")
    return CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in match.group().encode())
