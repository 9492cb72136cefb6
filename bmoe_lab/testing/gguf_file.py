"""GGUF files written tensor by tensor, so that one tensor at most is in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError
from bmoe_lab.seam.quantize import row_bytes, type_number

__all__ = ["Metadata", "Tensor", "write_gguf"]

#: Full GGUF keys. int becomes uint32, float float32; lists must hold one type.
Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file that is to be written.

    Attributes
    ----------
    name : str
        As llama.cpp looks it up (``"blk.0.ffn_up_exps.weight"``).
    shape : tuple of int
        In numpy's order: the last axis is the row, which GGUF counts first.
    kind : str
        ggml type (``"Q4_K"``).
    contents : callable
        Called once, when its turn comes; returns uint8 of shape (..., byte).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    contents: Callable[[], npt.NDArray[np.uint8]]

    @property
    def n_bytes(self) -> int:
        """Bytes in the file, without padding."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * row_bytes(self.kind, self.shape[-1])


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Metadata,
    tensors: Sequence[Tensor],
    *,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Write a model file, replacing `path` only when it is complete.

    The bytes depend on the arguments alone: there is no time stamp.

    Parameters
    ----------
    path : path-like
        Its folder must exist.
    metadata : mapping
        Full keys to values; ``general.architecture`` must be among them.
    tensors : sequence of Tensor
        In the order in which they are to lie in the file.
    progress : callable, optional
        Called with the number of bytes of each tensor after it was written.

    Returns
    -------
    Path

    Raises
    ------
    SettingsError
        If a tensor's contents are not of the size that its shape and type ask for.
    OSError
        If the file cannot be written; nothing is left behind.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.part")
    writer = gguf.GGUFWriter(aside, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, _value_type(value))
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            (*tensor.shape[:-1], row_bytes(tensor.kind, tensor.shape[-1])),
            np.dtype(np.uint8),
            tensor.n_bytes,
            raw_dtype=gguf.GGMLQuantizationType(type_number(tensor.kind)),
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            contents = tensor.contents()
            if contents.nbytes != tensor.n_bytes:
                raise SettingsError(
                    f"{tensor.name} must have {tensor.n_bytes} bytes for shape {tensor.shape} "
                    f"of {tensor.kind}; got {contents.nbytes}."
                )
            writer.write_tensor_data(contents)
            if progress is not None:
                progress(contents.nbytes)
            del contents
        writer.close()
        os.replace(aside, target)
    finally:
        writer.close()
        aside.unlink(missing_ok=True)
    return target


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)
