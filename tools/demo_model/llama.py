"""A model in llama.cpp, with just what the measurements need: logits and routing.

Independent of the package on purpose: the figures of the model card must not depend on the
code that the model serves to test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api

_ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
_ggml.ggml_get_name.restype = ctypes.c_char_p
_ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
_ggml.ggml_get_data.restype = ctypes.c_void_p
_ggml.ggml_get_data.argtypes = [ctypes.c_void_p]

TOP_K = b"ffn_moe_topk-"


class _TensorHead(ctypes.Structure):
    # The first members of struct ggml_tensor (ggml.h), as far as the strides.
    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


@api.llama_log_callback
def _silence(_level, _text, _data) -> None:
    """Drop the log lines."""


class Llama:
    """One model and one context, on the CPU with one thread.

    Parameters
    ----------
    path : Path
        GGUF file.
    n_ctx : int
        Longest window.
    n_expert_used : int, optional
        Experts per token, if not the file's own number.
    """

    def __init__(self, path: Path, n_ctx: int = 512, n_expert_used: int | None = None) -> None:
        api.llama_log_set(_silence, None)
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        if n_expert_used is not None:
            # The list ends at an entry with an empty key. It is read during the load only.
            overrides = (api.llama_model_kv_override * 2)()
            overrides[0].tag = api.LLAMA_KV_OVERRIDE_TYPE_INT
            overrides[0].key = b"qwen3moe.expert_used_count"
            overrides[0].value.val_i64 = n_expert_used
            parameters.kv_overrides = overrides
        self.model = api.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.vocab = api.llama_model_get_vocab(self.model)
        self.n_vocab = api.llama_vocab_n_tokens(self.vocab)

        context = api.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = n_ctx
        context.n_threads = context.n_threads_batch = 1
        self._callback = api.ggml_backend_sched_eval_callback(self._observe)
        context.cb_eval = self._callback
        self._routing: dict[int, np.ndarray] | None = None
        self.context = api.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self._batch = api.llama_batch_init(n_ctx, 0, 1)

    def close(self) -> None:
        """Free the context and the model."""
        api.llama_batch_free(self._batch)
        api.llama_free(self.context)
        api.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without the leading end-of-text id."""
        raw = text.encode()
        ids = (api.llama_token * (len(raw) + 8))()
        count = api.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), False, False)
        return list(ids[:count])

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Decode a window from an empty context and return all its logits, (length, vocab)."""
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        batch = self._batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place] = int(token)
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            # All rows: the last layer routes only the rows whose logits are wanted.
            batch.logits[place] = 1
        code = api.llama_decode(self.context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        values = api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(values, (len(ids), self.n_vocab)).copy()

    def routing(self, ids: np.ndarray) -> np.ndarray:
        """Decode a window and return the experts chosen, (layer, length, used)."""
        self._routing = {}
        try:
            self.logits(ids)
            return np.stack([self._routing[layer] for layer in sorted(self._routing)])
        finally:
            self._routing = None

    def _observe(self, tensor: int, ask: bool, _data: object) -> bool:
        """Copy the ids of the top-k nodes; ctypes prints what is raised here and goes on."""
        if self._routing is None:
            return not ask
        name = _ggml.ggml_get_name(tensor)
        wanted = name.startswith(TOP_K)
        if ask:
            return wanted
        if wanted:
            head = _TensorHead.from_address(tensor)
            used, length = head.ne[0], head.ne[1]
            # A view of the sorted row: rows are n_expert ids apart, not `used`.
            stride = head.nb[1] // 4
            buffer = (ctypes.c_int32 * (stride * (length - 1) + used)).from_address(
                _ggml.ggml_get_data(tensor)
            )
            flat = np.frombuffer(buffer, np.int32)
            rows = np.lib.stride_tricks.as_strided(flat, (length, used), (head.nb[1], 4))
            self._routing[int(name.removeprefix(TOP_K))] = rows.copy()
        return True
