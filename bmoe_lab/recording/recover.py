"""Leftover journals of runs that did not end."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import xarray as xr

from bmoe_lab.errors import BmoeLabError, TraceFileError
from bmoe_lab.recording.journal import SUFFIX, lock, state_folder
from bmoe_lab.recording.journal_reader import JournalReader
from bmoe_lab.recording.store import open_trace, save_trace

__all__ = ["Leftover", "find_leftovers", "recover"]


@dataclass(frozen=True)
class Leftover:
    """One journal that was found.

    Parameters
    ----------
    path : pathlib.Path
        Where it is.
    model : str
        The model recorded; empty if unknown.
    n_token : int
        Tokens that can be read.
    n_bytes : int
        Size of the file.
    age_s : float
        Seconds since it was last written.
    complete : bool
        Whether the run had ended; then only its final file could not be written.
    running : bool
        Whether a living process still writes it: it is not to be touched.
    note : str
        What had to be dropped, or why it cannot be read.
    """

    path: Path
    model: str
    n_token: int
    n_bytes: int
    age_s: float
    complete: bool
    running: bool
    note: str


def find_leftovers(folder: str | os.PathLike[str] | None = None) -> list[Leftover]:
    """Return the journals in a folder, newest first.

    Parameters
    ----------
    folder : path-like, optional
        Where to look; by default the state folder and the current folder, because a journal lies
        beside the target of its run if it has one.
    """
    folders = [state_folder(), Path.cwd()] if folder is None else [Path(folder)]
    paths = {path.resolve() for place in folders for path in place.glob(f"*{SUFFIX}")}
    found = [_inspect(path) for path in sorted(paths)]
    return sorted(found, key=lambda leftover: leftover.age_s)


def recover(
    path: str | os.PathLike[str] | None = None,
    *,
    save: str | os.PathLike[str] | None = None,
) -> list[Leftover] | xr.Dataset:
    """List leftover journals, or turn one into a file.

    Parameters
    ----------
    path : path-like, optional
        A journal to recover; or a folder to list; by default the state folder and the current one.
    save : path-like, optional
        File to write, ``.nc`` or ``.zarr``. The journal goes when the file is verified. Without
        it, the trace is returned and the journal stays.

    Returns
    -------
    list of Leftover or xarray.Dataset
        A list for a folder, a trace for a journal.

    Raises
    ------
    TraceFileError
        If the journal belongs to a running process, or cannot be read or saved.
    """
    if path is None or Path(path).is_dir():
        if save is not None:
            raise TraceFileError(
                f"path must be a journal to save it; got {path!r}. Call recover() to list them."
            )
        return find_leftovers(path)
    path = Path(path)
    if path.exists() and _is_running(path):
        raise TraceFileError(
            f"journal must not be in use; got {str(path)!r}, which a process still writes. "
            "Wait until that run ends."
        )
    if not path.name.endswith(SUFFIX):
        raise TraceFileError(
            f"path must be a journal (*{SUFFIX}); got {str(path)!r}. "
            "Open a finished trace with open_trace."
        )
    trace = _open(path)
    if save is None:
        return trace
    target = save_trace(trace, save)
    trace.close()
    path.unlink()
    return _open(target)


def _open(path: Path) -> xr.Dataset:
    trace = open_trace(path)
    assert isinstance(trace, xr.Dataset)  # a journal holds one run
    return trace


def _inspect(path: Path) -> Leftover:
    stat = path.stat()
    age = max(0.0, datetime.datetime.now().timestamp() - stat.st_mtime)
    running = _is_running(path)
    try:
        reader = JournalReader(path)
    except BmoeLabError as error:  # listed all the same: the reader should know that it is there
        return Leftover(path, "", 0, stat.st_size, age, False, running, str(error))
    reader.close()
    model = str(reader.spec.attrs.get("model_name", ""))
    note = "still running" if running else reader.note
    return Leftover(path, model, reader.n_token, stat.st_size, age, reader.complete, running, note)


def _is_running(path: Path) -> bool:
    """Return whether a living process holds the journal's lock."""
    with open(path, "rb") as file:
        return not lock(file.fileno())
