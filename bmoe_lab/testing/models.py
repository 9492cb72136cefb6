"""Tiny random models of every layout that the streamer must get right."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bmoe_lab.errors import SettingsError, unknown_name
from bmoe_lab.testing.blocks import Shape
from bmoe_lab.testing.gguf_file import write_gguf
from bmoe_lab.testing.layouts import KNOWN

__all__ = ["LAYOUTS", "tiny_model"]

#: Name of each layout that :func:`tiny_model` can write, with a line on what is special in it.
LAYOUTS: Mapping[str, str] = MappingProxyType(
    {name: layout.description for name, layout in KNOWN.items()}
)

_SIZES = {entry.name for entry in dataclasses.fields(Shape)} - {"seed", "pool"}


def tiny_model(
    layout: str,
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    n_expert: int = 8,
    n_used: int = 2,
    **sizes: object,
) -> Path:
    """Write a tiny random model of a given layout and return its path.

    Routing varies from token to token and no expert is idle for long. Any UTF-8 text can be
    tokenised; greedy text never ends by itself. The text means nothing.

    Parameters
    ----------
    layout : str
        A key of :data:`LAYOUTS`.
    path : path-like
        File to write (or replace); a few MB.
    seed : int, default 0
        Same arguments and same library, same bytes.
    n_expert, n_used : int, default 8, 2
        Experts per layer, experts per token.
    **sizes
        Any other field of :class:`bmoe_lab.testing.blocks.Shape`: ``n_layer``, ``n_embd``,
        ``n_ff_exp``, ``expert_types``, ...

    Returns
    -------
    Path

    Raises
    ------
    UnknownNameError
        If `layout` is not among :data:`LAYOUTS`.
    SettingsError
        If a size is not known, or not a whole number of a type's blocks.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = tiny_model("qwen3moe", pathlib.Path(folder) / "tiny.gguf", n_layer=3)
    ...     path.stat().st_size > 1_000_000
    True
    """
    if layout not in KNOWN:
        raise unknown_name("layout", layout, KNOWN)
    unknown = sorted(set(sizes) - _SIZES)
    if unknown:
        raise SettingsError(f"sizes must be among {sorted(_SIZES)}; got {unknown}.")
    if not 1 <= n_used <= n_expert:
        raise SettingsError(f"n_used must be from 1 to n_expert={n_expert}; got {n_used}.")
    entry = KNOWN[layout]
    fields = {**entry.sizes, **sizes, "seed": seed, "n_expert": n_expert, "n_used": n_used}
    shape = Shape(**fields)
    return write_gguf(path, entry.header(shape), entry.tensors(shape))
