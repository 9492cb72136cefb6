"""The settings of a session, checked before anything is opened."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmoe_lab.cores import physical_cores
from bmoe_lab.errors import SettingsError, unknown_name
from bmoe_lab.sizes import parse_size

__all__ = ["Settings", "boolean", "integer", "one_of"]

DENSE_POLICIES = ("mmap", "anon")
#: Positions of a context that the user leaves open, where the model was trained for as many.
DEFAULT_CONTEXT = 2048
OVERLAPS = ("off", "auto", "hook", "userfault")


@dataclass(frozen=True)
class Settings:
    """Settings as resolved: sizes in bytes, the path made absolute."""

    path: Path
    cache: Any
    cache_floor: int
    cache_ceiling: int | None
    n_ctx: int | None
    n_ubatch: int
    n_threads: int
    io_lanes: int
    direct: bool
    dense: str
    n_expert_used: int | None
    poison: int | None

    @classmethod
    def resolve(
        cls,
        path: str | os.PathLike[str],
        *,
        cache: Any,
        cache_floor: int | str,
        cache_ceiling: int | str | None,
        n_ctx: int | None,
        n_ubatch: int,
        n_threads: int | None,
        io_lanes: int,
        direct: bool,
        dense: str,
        n_expert_used: int | None,
        overlap: str,
        poison: int | None,
    ) -> Settings:
        """Check every setting that needs no model; raise SettingsError for the first wrong one."""
        from bmoe_lab.residency import ResidencyPolicy

        if isinstance(cache, ResidencyPolicy):
            if not cache.online:
                raise SettingsError(
                    f"cache must be an online residency policy; got {cache!r}, which needs to "
                    "know the future. Use it with replay."
                )
            if cache.budget is None:
                raise SettingsError(
                    f"cache must have a budget; got {cache!r}. "
                    f"Write {type(cache).__name__}('2 GiB') or pass a size."
                )
        elif cache != "auto":
            cache = parse_size(cache, name="cache")
        if overlap not in OVERLAPS:
            raise unknown_name("overlap", overlap, ("off",))
        if overlap != "off":
            raise SettingsError(
                f"overlap must be 'off' in this version; got {overlap!r}. Reading while a layer "
                "computes is not built yet."
            )
        threads = physical_cores() if n_threads is None else n_threads
        return cls(
            path=_path(path),
            cache=cache,
            cache_floor=parse_size(cache_floor, name="cache_floor"),
            cache_ceiling=None
            if cache_ceiling is None
            else parse_size(cache_ceiling, name="cache_ceiling"),
            n_ctx=None if n_ctx is None else integer("n_ctx", n_ctx, 1, 1 << 24),
            n_ubatch=integer("n_ubatch", n_ubatch, 1, 1 << 16),
            n_threads=integer("n_threads", threads, 1, 512),
            io_lanes=integer("io_lanes", io_lanes, 1, 32),
            direct=boolean("direct", direct),
            dense=one_of("dense", dense, DENSE_POLICIES),
            n_expert_used=None
            if n_expert_used is None
            else integer("n_expert_used", n_expert_used, 1, 1 << 15),
            poison=None if poison is None else integer("poison", poison, 0, 255),
        )

    def fitted(self, n_ctx_trained: int | None) -> Settings:
        """Return the settings with a context that fits the model, and evaluations that fit it."""
        n_ctx = self.n_ctx
        if n_ctx is None:
            n_ctx = min(DEFAULT_CONTEXT, n_ctx_trained or DEFAULT_CONTEXT)
        return dataclasses.replace(self, n_ctx=n_ctx, n_ubatch=min(self.n_ubatch, n_ctx))


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise SettingsError(f"path must be a path to a GGUF file; got {path!r}.")
    return Path(os.fspath(path)).expanduser().absolute()


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` if it is a whole number in [low, high].

    Examples
    --------
    >>> integer("io_lanes", 4, 1, 32)
    4
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SettingsError(f"{name} must be a whole number; got {value!r}.")
    number = int(value.__index__())
    if not low <= number <= high:
        raise SettingsError(f"{name} must be in [{low}, {high}]; got {number}.")
    return number


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise unknown_name(name, value, known)
    return value


def boolean(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise SettingsError(f"{name} must be True or False; got {value!r}.")
    return value
