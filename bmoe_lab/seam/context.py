"""A llama.cpp model with one context: load, tokenise, decode, read logits, free."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from bmoe_lab.errors import ModelFileError, SeamError, SessionError, SettingsError
from bmoe_lab.seam.library import fill_params, library

__all__ = ["Context", "Model", "Sampler"]

#: Return code of llama_decode after the abort callback said stop.
ABORTED = 2


class Model:
    """Weights and vocabulary of one GGUF file, as llama.cpp holds them.

    Parameters
    ----------
    path : str or Path
        The file, already checked (llama.cpp may abort the process on a damaged one).
    n_expert_used : int, optional
        Overrides the router's width.
    arch : str, optional
        Architecture name, which the override's key needs.
    extra_buffers : bool, default False
        llama.cpp's default of repacking weights; the seam needs them as in the file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_expert_used: int | None = None,
        arch: str | None = None,
        extra_buffers: bool = False,
    ) -> None:
        lib = library()
        api = lib.api
        self._api = api
        fields: dict[str, Any] = {
            "n_gpu_layers": 0,
            "load_mode": api.LLAMA_LOAD_MODE_MMAP,
            "use_extra_bufts": extra_buffers,
        }
        self._overrides: Any = None
        if n_expert_used is not None:
            # Two entries: the empty second one ends the list. Kept until the model is loaded.
            self._overrides = (api.llama_model_kv_override * 2)()
            self._overrides[0].tag = api.LLAMA_KV_OVERRIDE_TYPE_INT
            self._overrides[0].key = f"{arch}.expert_used_count".encode()
            self._overrides[0].value.val_i64 = n_expert_used
            fields["kv_overrides"] = self._overrides
        params = fill_params(api.llama_model_default_params(), **fields)
        lib.log.clear()  # so that a failure is told by its own lines
        self.handle: Any = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ModelFileError(
                f"model file must be one that llama.cpp can load; got {lib.last_log()!r} for "
                f"{str(path)!r}. Convert or download it again."
            )
        self.vocab = api.llama_model_get_vocab(self.handle)
        self.n_vocab = int(api.llama_vocab_n_tokens(self.vocab))
        self.n_ctx_train = int(api.llama_model_n_ctx_train(self.handle))
        self.bos = int(api.llama_vocab_bos(self.vocab))

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        if self.handle:
            self._api.llama_model_free(self.handle)
            self.handle = None

    @property
    def is_decoder(self) -> bool:
        """Whether the model generates text (encoder models cannot be run here)."""
        return bool(self._api.llama_model_has_decoder(self.handle)) and not bool(
            self._api.llama_model_has_encoder(self.handle)
        )

    def is_end(self, token: int) -> bool:
        """Whether `token` ends generation."""
        return bool(self._api.llama_vocab_is_eog(self.vocab, token))

    def tokenize(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """Return the token ids of `text`, int32 of shape (token,).

        Special tokens written in the text are not parsed.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SettingsError(
                f"text must be valid Unicode; got a lone surrogate at character {error.start}. "
                "Decode the text with errors='replace'."
            ) from error
        size = len(raw) + 8
        tokens = (self._api.llama_token * size)()
        count = self._api.llama_tokenize(
            self.vocab, raw, len(raw), tokens, size, add_special, False
        )
        if count < 0:
            raise SessionError(f"text must be tokenisable; got llama_tokenize = {count}.")
        return np.array(tokens[:count], np.int32)

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` stands for; special tokens are written out."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._api.llama_token_to_piece(self.vocab, token, buffer, size, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            size = -count


class Context:
    """One llama.cpp context over a model: the KV cache and the graph.

    Parameters
    ----------
    model : Model
    n_ctx, n_ubatch, n_threads : int
    callbacks : object, optional
        A :class:`~bmoe_lab.seam.callback.NodeFilter`, kept referenced here. Without it the
        context is plain llama.cpp: what the gates compare with.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_ubatch: int,
        n_threads: int,
        callbacks: Any = None,
    ) -> None:
        lib = library()
        api = lib.api
        self._api = api
        self.model = model
        self._callbacks = callbacks
        fields: dict[str, Any] = {
            "n_ctx": n_ctx,
            "n_batch": n_ubatch,
            "n_ubatch": n_ubatch,
            "n_threads": n_threads,
            "n_threads_batch": n_threads,
            "no_perf": True,
            # A library built with a GPU would otherwise copy wide matmuls' weights to it.
            "op_offload": False,
            "offload_kqv": False,
        }
        if callbacks is not None:
            fields |= {
                "cb_eval": ctypes.cast(
                    callbacks.callback_address, api.ggml_backend_sched_eval_callback
                ),
                "cb_eval_user_data": callbacks.user_data,
                "abort_callback": ctypes.cast(callbacks.abort_address, api.ggml_abort_callback),
                "abort_callback_data": callbacks.user_data,
            }
        params = fill_params(api.llama_context_default_params(), **fields)
        #: What the low bits of the logits depend on beside the weights, as llama.cpp was told.
        self.numerics = {
            "kv_type_k": lib.ggml.ggml_type_name(params.type_k).decode(),
            "kv_type_v": lib.ggml.ggml_type_name(params.type_v).decode(),
            "flash_attention": {-1: "auto", 0: "off", 1: "on"}.get(
                params.flash_attn_type, str(params.flash_attn_type)
            ),
        }
        lib.log.clear()
        self.handle: Any = api.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise SeamError(
                f"llama.cpp could not make a context of n_ctx={n_ctx}, n_ubatch={n_ubatch}: "
                f"{lib.last_log()}."
            )
        self.n_ctx = int(api.llama_n_ctx(self.handle))
        self.n_ubatch = n_ubatch
        self._memory = api.llama_get_memory(self.handle)
        # Arrays handed to C live as long as the context: one freed too early is a wrong token id.
        self._tokens = np.zeros(n_ubatch, np.int32)
        self._positions = np.zeros(n_ubatch, np.int32)
        self._wanted = np.zeros(n_ubatch, np.int8)
        self._n_seq = np.ones(n_ubatch, np.int32)
        self._seq = (api.llama_seq_id * 1)(0)
        self._seqs = (ctypes.POINTER(api.llama_seq_id) * n_ubatch)(
            *[ctypes.cast(self._seq, ctypes.POINTER(api.llama_seq_id))] * n_ubatch
        )
        self._batch = api.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, api.llama_token),
            embd=None,
            pos=_pointer(self._positions, api.llama_pos),
            n_seq_id=_pointer(self._n_seq, ctypes.c_int32),
            seq_id=self._seqs,
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        if self.handle:
            self._api.llama_free(self.handle)
            self.handle = None

    def decode(self, tokens: np.ndarray, start: int, wanted: np.ndarray) -> int:
        """Evaluate one micro-batch and return llama_decode's code (0 done, 2 aborted).

        Parameters
        ----------
        tokens : ndarray
            int32 of shape (token,), at most `n_ubatch`.
        start : int
            Position of the first token in the context.
        wanted : ndarray
            bool of shape (token,): whose logits are computed.

        Raises
        ------
        SessionError
            If the context is full.
        SeamError
            If llama.cpp fails for another reason.
        """
        n = len(tokens)
        if not 0 < n <= self.n_ubatch:
            raise SettingsError(f"tokens must be 1 to n_ubatch={self.n_ubatch}; got {n}.")
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(start, start + n, dtype=np.int32)
        self._wanted[:n] = wanted
        self._batch.n_tokens = n
        code = int(self._api.llama_decode(self.handle, self._batch))
        if code == 1:
            raise SessionError(
                f"context must have room for {n} more tokens; got n_ctx={self.n_ctx} with "
                f"{start} used. Open the session with a larger n_ctx."
            )
        if code not in (0, ABORTED):
            raise SeamError(f"llama_decode must return 0; got {code}: {library().last_log()}.")
        return code

    def logits(self, row: int) -> np.ndarray:
        """Return a view of the logits of batch row `row`, float32 of shape (vocabulary,).

        Valid until the next decode.
        """
        pointer = self._api.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise SeamError(f"logits must have been asked for; got none for row {row}.")
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def clear(self) -> None:
        """Forget every position."""
        self._api.llama_memory_clear(self._memory, True)

    def trim(self, length: int) -> bool:
        """Forget the positions from `length` on; False where the memory cannot do that."""
        return bool(self._api.llama_memory_seq_rm(self._memory, 0, length, -1))


class Sampler:
    """llama.cpp's own sampler chain, seeded; greedy without a temperature."""

    def __init__(
        self, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> None:
        api = library().api
        self._api = api
        self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if temperature > 0:
            stages = [
                api.llama_sampler_init_top_k(top_k),
                api.llama_sampler_init_top_p(top_p, 1),
                api.llama_sampler_init_min_p(min_p, 1),
                api.llama_sampler_init_temp(temperature),
                api.llama_sampler_init_dist(seed),
            ]
        else:
            stages = [api.llama_sampler_init_greedy()]
        for stage in stages:
            api.llama_sampler_chain_add(self._chain, stage)

    def sample(self, context: Context, row: int = -1) -> int:
        """Return the next token from the logits of batch row `row`."""
        return int(self._api.llama_sampler_sample(self._chain, context.handle, row))

    def close(self) -> None:
        """Free the chain; a second call does nothing."""
        if self._chain:
            self._api.llama_sampler_free(self._chain)
            self._chain = None


def _pointer(array: np.ndarray, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
