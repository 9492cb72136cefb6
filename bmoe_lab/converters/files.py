"""The doors of every converter: what may be read, how a file is replaced.

A pickle runs the code of whoever wrote it, so nothing that may hold one is ever opened as data.
Files are written aside and renamed: a reader finds the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bmoe_lab.errors import TraceFileError, TraceFormatError

__all__ = ["file_to_read", "read_bytes", "written_aside"]

_PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".joblib", ".ckpt"}
# Pickle protocols 2 and later begin so; a zip archive with a pickle in it is torch's format.
_PICKLE_BEGINS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_ZIP_BEGINS = b"PK\x03\x04"


def file_to_read(path: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """Return a path that may be read as data.

    Parameters
    ----------
    path : path-like
        What the caller passed.
    folder : bool, default False
        Whether a folder will do.

    Raises
    ------
    TraceFileError
        If there is no such file, or it cannot be read.
    TraceFormatError
        If it is empty, or may hold a pickle.

    Examples
    --------
    >>> file_to_read("routing.pt")
    Traceback (most recent call last):
    bmoe_lab.errors.TraceFormatError: path must not be a pickle; got 'routing.pt'. Loading one ...
    """
    if not isinstance(path, str | os.PathLike):
        raise TraceFileError(f"path must be a path; got {path!r}.")
    path = Path(path)
    if path.suffix.lower() in _PICKLES:
        raise _pickle(path)
    if not path.exists():
        raise TraceFileError(f"path must be a file that exists; got {str(path)!r}. Check the name.")
    if path.is_dir():
        if folder:
            return path
        raise TraceFileError(
            f"path must be a file; got the folder {str(path)!r}. Name the file in it."
        )
    try:
        with open(path, "rb") as file:
            begin = file.read(4)
            file.seek(0)
            # The archive's directory of names is at its end, in clear text.
            torch = begin == _ZIP_BEGINS and b"data.pkl" in file.read()
    except OSError as error:
        raise TraceFileError(
            f"path must be readable; got {str(path)!r} ({error.strerror}). Check its permissions."
        ) from error
    if not begin:
        raise TraceFormatError(f"file must hold a trace; got the empty file {str(path)!r}.")
    if begin.startswith(_PICKLE_BEGINS) or torch:
        raise _pickle(path)
    return path


def _pickle(path: Path) -> TraceFormatError:
    return TraceFormatError(
        f"path must not be a pickle; got {str(path)!r}. Loading one (.pkl, .pt) runs the code in "
        "it. Save the arrays with numpy.save or as Parquet where the file was made."
    )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceFileError(
            f"path must be readable; got {str(path)!r} ({error.strerror}). Check its permissions."
        ) from error


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a name beside the target to write to; it becomes the target if the block succeeds.

    Parameters
    ----------
    path : pathlib.Path
        The target; an existing file is replaced.

    Raises
    ------
    TraceFileError
        If it cannot be written; what was there before is left as it was.
    """
    if not path.parent.is_dir():
        raise TraceFileError(
            f"path must be in a folder that exists; got {str(path)!r}. Make {str(path.parent)!r}."
        )
    if path.is_dir():
        raise TraceFileError(f"path must be a file; got the folder {str(path)!r}. Name a file.")
    aside = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield aside
        _sync(aside)
        os.replace(aside, path)
    except OSError as error:
        if isinstance(error, TraceFileError):
            raise
        raise TraceFileError(
            f"trace must be written to {str(path)!r}; got {error.strerror or error}. "
            "Free space or choose another target."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
