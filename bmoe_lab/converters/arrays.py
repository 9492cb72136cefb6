"""Routed experts as one array per sequence, as vLLM and SGLang hand them out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.building import checked_count, checked_ids, routed_only
from bmoe_lab.converters.files import file_to_read
from bmoe_lab.errors import SettingsError, TraceFormatError, unknown_name
from bmoe_lab.schema import Action, Phase, validate

__all__ = ["from_routed_experts", "to_routed_experts"]

_NPZ_NAME = "routed_experts"


def from_routed_experts(
    array: npt.ArrayLike | str | os.PathLike[str],
    *,
    n_expert: int,
    n_prompt: int,
    layers: Sequence[int] | None = None,
    n_ubatch: int | None = None,
) -> xr.Dataset:
    """Return the routed experts of one sequence as a trace.

    The array has no weights, no residency and no sizes: what needs them says so. A server computes
    several sequences at once; here the sequence counts as alone.

    Parameters
    ----------
    array : array-like or path-like
        Integers of shape (token, layer, slot), slot 0 first; -1 in rows that did not route. Or a
        ``.npy`` file, or a ``.npz`` with one array or one called ``routed_experts``.
    n_expert : int
        Experts per layer.
    n_prompt : int
        Tokens of the prompt, which are the prefill; the others were decoded one by one.
    layers : sequence of int, optional
        The rows along ``layer`` that are expert layers, all of them if left out. Dense layers are
        zeros in vLLM's array.
    n_ubatch : int, optional
        Width of the prompt's evaluations; the whole prompt if left out.

    Returns
    -------
    xarray.Dataset
        ``source="import"``; ``block`` is the row along ``layer``, ``position`` the row along
        ``token``.

    Raises
    ------
    TraceFormatError
        If the array is not of this form, with the first row at fault; or is a pickle.
    SettingsError
        If a number does not fit the array.

    Notes
    -----
    Source: vLLM pull request 28284 and SGLang pull request 12162 (``routed_experts``).

    Examples
    --------
    >>> array = np.array([[[3, 1]], [[0, 2]]])
    >>> trace = from_routed_experts(array, n_expert=4, n_prompt=1)
    >>> dict(trace.sizes), trace.phase.values.tolist()
    ({'token': 2, 'layer': 1, 'slot': 2}, [0, 1])
    """
    where = "array"
    if isinstance(array, str | os.PathLike):
        where = repr(os.fspath(array))
        array = _load(array)
    values = np.asarray(array)
    if values.ndim == 3 and layers is not None:
        wrong = [at for at in layers if not 0 <= at < values.shape[1]]
        if wrong or not len(layers) or sorted(set(layers)) != list(layers):
            raise SettingsError(
                f"layers must be ascending and from 0 to {values.shape[1] - 1}; got "
                f"{list(layers)!r}. Name the expert layers of the array."
            )
        values = values[:, list(layers)]
    ids = checked_ids(values, n_expert, where)
    n_token, n_layer = ids.shape[:2]
    checked_count("n_prompt", n_prompt, 0, n_token)
    width = checked_count("n_ubatch", n_prompt or 1 if n_ubatch is None else n_ubatch, 1, 2**31 - 1)
    token = np.arange(n_token)
    first_decode = -(-n_prompt // width)
    batch = np.where(token < n_prompt, token // width, first_decode + token - n_prompt)
    return routed_only(
        ids,
        n_expert=n_expert,
        phase=np.where(token < n_prompt, Phase.prefill, Phase.decode),
        batch=batch,
        block=np.arange(n_layer) if layers is None else np.asarray(layers),
        position=token,
    )


def _load(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    file = file_to_read(path)
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            names = list(loaded)
            name = names[0] if len(names) == 1 else _NPZ_NAME
            if name not in names:
                raise TraceFormatError(
                    f"file must hold one array, or one called {_NPZ_NAME!r}; got {names} in "
                    f"{str(file)!r}. Load it and pass the array."
                )
            array: npt.NDArray[Any] = loaded[name]
            return array
    except (ValueError, OSError, EOFError, KeyError) as error:
        if isinstance(error, TraceFormatError):
            raise
        raise TraceFormatError(
            f"file must be a .npy or .npz of numbers; got {str(file)!r} ({error}). Arrays of "
            "objects are pickles, which run code when they are loaded: save plain numbers."
        ) from error


def to_routed_experts(
    ds: xr.Dataset, *, which: Literal["chosen", "applied"] = "chosen"
) -> npt.NDArray[np.int16]:
    """Return the experts of a trace as one array.

    Parameters
    ----------
    ds : xarray.Dataset
        A trace.
    which : {"chosen", "applied"}, default "chosen"
        What the router chose, or what ran. A dropped slot ran nothing of its own: it is not told
        from the others under ``"applied"``, so a trace with dropped slots is refused there.

    Returns
    -------
    numpy.ndarray
        int16 of shape (token, layer, slot); -1 did not route.

    Raises
    ------
    UnknownNameError
        If `which` is neither.
    TraceFormatError
        If slots were dropped and `which` is ``"applied"``.

    Notes
    -----
    The form in which vLLM and SGLang hand out the experts of a request, (sequence, layer, top-k).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_layer=2, n_expert=16, n_prefill=4)
    >>> array = to_routed_experts(trace)
    >>> back = from_routed_experts(array, n_expert=16, n_prompt=4)
    >>> bool((back.expert_chosen == trace.expert_chosen).all())
    True
    """
    if which not in ("chosen", "applied"):
        raise unknown_name("which", which, ["chosen", "applied"])
    validate(ds)
    dropped = int((ds["action"].values == Action.dropped).sum())
    if which == "applied" and dropped:
        raise TraceFormatError(
            f"trace must have no dropped slots for which='applied'; got {dropped}. The array has "
            "no mark for them. Use which='chosen'."
        )
    return np.array(ds[f"expert_{which}"].values, dtype=np.int16)
