"""Every error that the package raises on purpose.

::

    BmoeLabError
     ├─ SchemaError        (ValueError)    a dataset is not a valid trace
     │   └─ TraceFormatError               a file of another format is malformed
     ├─ TraceFileError     (OSError)       a trace file cannot be read or written
     ├─ DatasetError       (ValueError)    bundled data is missing or altered
     ├─ ModelFileError     (ValueError)    a GGUF file is missing, broken or not a MoE model
     ├─ SettingsError      (ValueError)    a parameter has an impossible value
     ├─ UnknownNameError   (LookupError)   a name that is not registered (policy, domain, ...)
     ├─ PolicyError        (ValueError)    a policy returned something that cannot be applied
     ├─ SeamError          (RuntimeError)  llama.cpp is not as the seam expects
     ├─ StreamingError     (OSError)       experts could not be read
     ├─ SessionError       (RuntimeError)  a session cannot do this now (closed, busy, context full)
     ├─ ComparisonError    (RuntimeError)  a run of a comparison failed; has what was finished
     └─ SweepError         (RuntimeError)  a policy of a sweep failed; has what was finished

    KeyboardInterrupt
     └─ ComparisonInterrupted              a comparison was interrupted; has what was finished

Each also derives from the standard exception in parentheses, so that both
``except BmoeLabError`` and the usual ``except ValueError`` work. Messages have the form
``<name> must <rule>; got <value!r>[ where]. <next step>.``
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "BeyondTrainingWarning",
    "BmoeLabError",
    "BmoeLabWarning",
    "CacheBelowCycleWarning",
    "ComparisonError",
    "ComparisonInterrupted",
    "DatasetError",
    "ModelFileError",
    "PolicyError",
    "PolicyNeverFiredWarning",
    "SchemaError",
    "SeamError",
    "SessionError",
    "SettingsError",
    "StreamingError",
    "SweepError",
    "TraceFileError",
    "TraceFormatError",
    "UnknownNameError",
    "unknown_name",
]


class BmoeLabError(Exception):
    """Base of every error raised on purpose."""


class SchemaError(BmoeLabError, ValueError):
    """A dataset is not a valid trace, or lacks a variable that was asked for."""


class TraceFormatError(SchemaError):
    """A file of another format is malformed, or cannot hold what should be written to it."""


class TraceFileError(BmoeLabError, OSError):
    """A trace file cannot be read or written."""


class DatasetError(BmoeLabError, ValueError):
    """Bundled data is missing or does not match its checksum."""


class ModelFileError(BmoeLabError, ValueError):
    """A model file is missing, damaged, or not something that can be streamed."""


class SettingsError(BmoeLabError, ValueError):
    """A parameter has a value that cannot work."""


class UnknownNameError(BmoeLabError, LookupError):
    """A name that is not among the known ones."""


class PolicyError(BmoeLabError, ValueError):
    """A policy was set up in a way that cannot work, or returned something unusable."""


class SeamError(BmoeLabError, RuntimeError):
    """The installed llama.cpp, or a graph that it builds, is not as the seam expects."""


class StreamingError(BmoeLabError, OSError):
    """Experts could not be read from the model file."""


class SessionError(BmoeLabError, RuntimeError):
    """The session cannot do this in its present state."""


class ComparisonInterrupted(KeyboardInterrupt):
    """A comparison was interrupted; the runs that finished are in :attr:`tree`.

    Attributes
    ----------
    tree : xarray.DataTree
        The comparison so far, ``complete = 0``.
    """

    def __init__(self, message: str, tree: xr.DataTree) -> None:
        super().__init__(message)
        self.tree = tree


class ComparisonError(BmoeLabError, RuntimeError):
    """A run of a comparison failed; the runs that finished before it are in :attr:`tree`.

    The failure itself is the ``__cause__``.

    Attributes
    ----------
    tree : xarray.DataTree
        The comparison so far, ``complete = 0``, with ``failed_arm`` in its attributes.
    """

    def __init__(self, message: str, tree: xr.DataTree) -> None:
        super().__init__(message)
        self.tree = tree


class SweepError(BmoeLabError, RuntimeError):
    """A policy of a sweep failed; the cells that finished are in :attr:`partial`.

    The failure itself is the ``__cause__``.

    Attributes
    ----------
    partial : xarray.Dataset
        The sweep so far, ``complete = 0``, NaN where a cell was not finished.
    """

    def __init__(self, message: str, partial: xr.Dataset) -> None:
        super().__init__(message)
        self.partial = partial


class BmoeLabWarning(UserWarning):
    """Base of the package's own warnings."""


class BeyondTrainingWarning(BmoeLabWarning):
    """The context is longer than what the model was trained for."""


class CacheBelowCycleWarning(BmoeLabWarning):
    """The cache is smaller than what one token asks for, so an LRU can hit nothing."""


class PolicyNeverFiredWarning(BmoeLabWarning):
    """A lossy policy changed nothing in the whole run."""


def unknown_name(kind: str, given: object, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not registered, with the closest known one.

    Parameters
    ----------
    kind : str
        What the name stands for, as it appears in the message (``"policy"``).
    given : object
        What the caller passed.
    known : iterable of str
        The names that would have worked.

    Examples
    --------
    >>> print(unknown_name("policy", "lru_", ["belady", "lfu", "lru"]))
    policy must be one of ['belady', 'lfu', 'lru']; got 'lru_'. Did you mean 'lru'?
    """
    names = sorted(known)
    message = f"{kind} must be one of {names}; got {given!r}."
    close = difflib.get_close_matches(str(given), names, n=1)
    if close:
        message += f" Did you mean {close[0]!r}?"
    return UnknownNameError(message)
