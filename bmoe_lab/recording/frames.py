"""The byte layout of a journal: frames that carry their own checksums.

A frame is a 24-byte head, the payload, zeros up to a multiple of 8. All numbers are little-endian::

    offset  size  content
    0       4     magic, the bytes 42 4D 4A 01 ("BMJ", 1)
    4       4     kind, four ASCII letters: HEAD, SCHM, ROWS, DONE
    8       8     length of the payload, without the zeros behind it
    16      4     CRC-32 of the payload and the zeros behind it
    20      4     CRC-32 of the 20 bytes before
    24            payload

The head has its own CRC so that a length is believed only if it is right: a file that ends before
its last frame does was cut by a kill, a CRC that differs is damage. Nothing parses a payload whose
CRC was not checked. CRC-32 is that of zlib (IEEE 802.3).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["DONE", "HEAD", "MAGIC", "ROWS", "SCHEMA", "Frame", "pack_frame", "read_frame"]

MAGIC = b"BMJ\x01"
HEAD = b"HEAD"
SCHEMA = b"SCHM"
ROWS = b"ROWS"
DONE = b"DONE"

_HEAD = struct.Struct("<4s4sQI")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CRC.size


@dataclass(frozen=True)
class Frame:
    """A frame whose checksums were right.

    Parameters
    ----------
    kind : bytes
        Four letters.
    payload : bytes
        What it carries.
    end : int
        Where the next frame starts.
    """

    kind: bytes
    payload: bytes
    end: int


def pack_frame(kind: bytes, payload: bytes) -> bytes:
    """Return a frame as bytes.

    Parameters
    ----------
    kind : bytes
        Four letters.
    payload : bytes
        What it carries.

    Examples
    --------
    >>> len(pack_frame(DONE, b"{}"))
    32
    """
    padded = payload + bytes(-len(payload) % 8)
    head = _HEAD.pack(MAGIC, kind, len(payload), zlib.crc32(padded))
    return head + _CRC.pack(zlib.crc32(head)) + padded


def read_frame(file: BinaryIO, offset: int, size: int) -> Frame | str:
    """Return the frame at an offset, or in words why there is none.

    Parameters
    ----------
    file : binary file
        The journal.
    offset : int
        Where the frame starts.
    size : int
        Bytes of the file.
    """
    torn = "the file ends inside a frame"
    file.seek(offset)
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return torn
    magic, kind, length, crc = _HEAD.unpack_from(head)
    (head_crc,) = _CRC.unpack_from(head, _HEAD.size)
    if zlib.crc32(head[: _HEAD.size]) != head_crc:
        return "a checksum failed in a frame's head"
    if magic != MAGIC:
        return "a frame has another magic number"
    end = offset + _HEAD_BYTES + length + -length % 8
    if end > size:
        return torn
    padded = file.read(end - offset - _HEAD_BYTES)
    if len(padded) < end - offset - _HEAD_BYTES:
        return torn
    if zlib.crc32(padded) != crc:
        return "a checksum failed in a frame's payload"
    return Frame(kind, padded[:length], end)
