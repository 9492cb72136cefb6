"""Where every tensor of a model lies on disk, over all shards of its GGUF."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmoe_lab.errors import ModelFileError
from bmoe_lab.streaming.header import Header, read_header

__all__ = ["ModelLayout", "Shard", "TensorEntry", "read_layout"]

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_FINGERPRINT_DATA_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model.

    Attributes
    ----------
    path : pathlib.Path
    file_bytes : int
    data_offset : int
        First byte of tensor data.
    fingerprint : str
        SHA-256, see :attr:`ModelLayout.fingerprint`.
    """

    path: Path
    file_bytes: int
    data_offset: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor's place.

    Attributes
    ----------
    name : str
    shard : int
        Index into :attr:`ModelLayout.shards`.
    offset : int
        First byte, counted from the start of the shard's file.
    n_bytes : int
    type : int
        ``enum ggml_type``.
    ne : tuple of int
        Four lengths, fastest first; an expert stack has its experts along ``ne[2]``.
    """

    name: str
    shard: int
    offset: int
    n_bytes: int
    type: int
    ne: tuple[int, int, int, int]

    @property
    def slice_bytes(self) -> int:
        """Bytes of one expert, ggml's ``nb[2]``."""
        return self.n_bytes // (self.ne[2] * self.ne[3])


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model on disk: files, tensors, metadata.

    Attributes
    ----------
    shards : tuple of Shard
    tensors : dict of str to TensorEntry
        By name, in file order.
    metadata : dict
        Keys of the first shard as Python values: numbers, bools, strings, and arrays of up to
        1,024 items as tuples. Vocabularies are left out.
    """

    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The first shard: the file that llama.cpp opens."""
        return self.shards[0].path

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.file_bytes for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """SHA-256 that tells models apart without reading all of them.

        Over header and tensor table, the file's size, and the first MiB of tensor data. With
        several shards: over their fingerprints in order.
        """
        if len(self.shards) == 1:
            return self.shards[0].fingerprint
        joined = "".join(shard.fingerprint for shard in self.shards)
        return hashlib.sha256(joined.encode()).hexdigest()

    @property
    def arch(self) -> str:
        """``general.architecture``, the prefix of the model's own keys."""
        return str(self.metadata["general.architecture"])

    @property
    def name(self) -> str:
        """``general.name``, or the file's stem where the model has none."""
        return str(self.metadata.get("general.name") or self.path.stem)

    def hparam(self, key: str) -> Any:
        """Return ``<arch>.<key>``, None where the model does not have it."""
        return self.metadata.get(f"{self.arch}.{key}")

    @property
    def n_expert(self) -> int | None:
        """Experts per layer; None in a model without experts."""
        return _count(self.hparam("expert_count"))

    @property
    def n_expert_used(self) -> int | None:
        """Experts per token as the model was trained, the largest where layers differ."""
        return _count(self.hparam("expert_used_count"))

    @property
    def n_block(self) -> int | None:
        """Blocks of the model (``block_count``), with or without experts."""
        return _count(self.hparam("block_count"))

    @property
    def context_length(self) -> int | None:
        """Longest context that the model was trained for."""
        return _count(self.hparam("context_length"))

    @property
    def is_moe(self) -> bool:
        """Whether the model says that it has experts."""
        return self.n_expert is not None

    def require_moe(self) -> None:
        """Refuse a dense model.

        Raises
        ------
        ModelFileError
            If the model has no experts.
        """
        if not self.is_moe:
            raise ModelFileError(
                f"model file must be a Mixture-of-Experts model; got {str(self.path)!r}, "
                f"arch {self.arch!r} without {self.arch}.expert_count. "
                "Experts of a dense model cannot be streamed: use llama.cpp directly."
            )


def _count(value: Any) -> int | None:
    """Return a positive count, the largest of a per-layer array; None for absent or zero."""
    if isinstance(value, tuple):
        value = max(value, default=0)
    return int(value) if value else None


def read_layout(path: str | os.PathLike[str]) -> ModelLayout:
    """Return the layout of a model, checked before any C code may stumble over it.

    Parameters
    ----------
    path : path-like
        The GGUF file; of a split model, its first shard.

    Returns
    -------
    ModelLayout

    Raises
    ------
    ModelFileError
        If a file is missing or damaged, or `path` names another shard than the first.

    Examples
    --------
    >>> from bmoe_lab.datasets import demo_model
    >>> layout = read_layout(demo_model())
    >>> layout.arch, layout.n_expert, layout.n_expert_used
    ('qwen3moe', 32, 4)
    >>> layout.tensors["blk.0.ffn_gate_exps.weight"].slice_bytes
    13056
    """
    from bmoe_lab.seam.gguf import read_gguf

    first = read_header(path)
    # Before the architecture is asked for: only the first shard need have it.
    headers = [first, *_other_shards(first)]
    if not isinstance(first.scalars.get("general.architecture"), str):
        raise ModelFileError(
            f"model file must name its architecture; got no 'general.architecture' in "
            f"{str(first.path)!r}. It is no language model: name another file."
        )
    shards = []
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, Any] = {}
    for index, header in enumerate(headers):
        parsed = read_gguf(header.path)
        if index == 0:
            metadata = parsed.metadata
        for ours, theirs in zip(header.tensors, parsed.tensors, strict=True):
            if (ours.name, ours.offset, ours.n_bytes) != (
                theirs.name,
                theirs.offset,
                theirs.n_bytes,
            ):
                raise ModelFileError(
                    f"model file must be read alike by ggml and by the check before it; got "
                    f"{theirs} and {ours} in {str(header.path)!r}. Convert the file again."
                )
            if theirs.name in tensors:
                raise ModelFileError(
                    f"model file must have every tensor name once; got {theirs.name!r} again in "
                    f"{str(header.path)!r}. Split the model again."
                )
            tensors[theirs.name] = TensorEntry(
                theirs.name, index, theirs.offset, theirs.n_bytes, theirs.type, theirs.ne
            )
        shards.append(
            Shard(header.path, header.file_bytes, header.data_offset, _fingerprint(header))
        )
    expected = first.scalars.get("split.tensors.count")
    if len(headers) > 1 and expected != len(tensors):
        raise ModelFileError(
            f"model file must have all {expected} tensors of the split model; got {len(tensors)} "
            f"in {len(headers)} shards of {str(first.path)!r}. Download every shard again."
        )
    return ModelLayout(tuple(shards), tensors, metadata)


def _other_shards(first: Header) -> list[Header]:
    """Return the checked headers of shards 2 to n; nothing for an unsplit model."""
    count = int(first.scalars.get("split.count", 0))
    number = int(first.scalars.get("split.no", 0))
    match = _SHARD_NAME.fullmatch(first.path.name)
    if count <= 1:
        return []
    if number != 0:
        raise ModelFileError(
            f"model file must be the first shard of a split model; got shard {number + 1} of "
            f"{count}, {str(first.path)!r}. {_first_shard_hint(first.path, match, count)}"
        )
    if match is None or int(match["number"]) != 1 or int(match["count"]) != count:
        raise ModelFileError(
            f"model file must be named '<name>-00001-of-{count:05d}.gguf', as llama.cpp finds the "
            f"other shards by name; got {str(first.path)!r}. Rename it back."
        )
    paths = [
        first.path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(2, count + 1)
    ]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelFileError(
            f"model file must have all {count} shards in one folder; got {len(missing)} missing "
            f"({shown}) beside {str(first.path)!r}. Download them too."
        )
    headers = []
    for index, path in enumerate(paths, start=1):
        header = read_header(path)
        if header.scalars.get("split.no") != index:
            raise ModelFileError(
                f"model file must be shard {index + 1} of {count}; got split.no "
                f"{header.scalars.get('split.no')!r} in {str(path)!r}. Download it again."
            )
        headers.append(header)
    return headers


def _first_shard_hint(path: Path, match: re.Match[str] | None, count: int) -> str:
    """Say which file to open instead, and whether it is there."""
    if match is None:
        return "Name the first shard instead."
    first = path.with_name(f"{match['stem']}-00001-of-{count:05d}.gguf")
    if first.exists():
        return f"Name {first.name!r} instead."
    return f"The first shard {first.name!r} is missing: download it and name that."


def _fingerprint(header: Header) -> str:
    digest = hashlib.sha256()
    with header.path.open("rb") as file:
        remaining = header.data_offset + _FINGERPRINT_DATA_BYTES
        while remaining > 0:
            chunk = file.read(min(remaining, 2**20))
            if not chunk:
                break
            digest.update(chunk)
            remaining -= len(chunk)
    digest.update(header.file_bytes.to_bytes(8, "little"))
    return digest.hexdigest()
