"""Collects the routing of a run while it decodes.

The hot path is :meth:`Recorder.layer`: it is called inside llama.cpp's evaluation callback, once
per layer, so it only copies into arrays that :meth:`Recorder.begin` made large enough. Everything
that may take long, grow, or fail is done in :meth:`Recorder.commit`, after the decode.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, SessionError, TraceFileError
from bmoe_lab.recording.journal import Journal
from bmoe_lab.recording.journal_reader import JournalReader
from bmoe_lab.recording.spec import Column, TraceSpec, build_trace
from bmoe_lab.schema import NO_EXPERT, clean_attrs, validate

__all__ = ["FLUSH_SECONDS", "FLUSH_TOKENS", "MEMORY_LIMIT", "Recorder"]

MEMORY_LIMIT = 256 * 2**20
"""Bytes of trace that are held in memory; a longer one stays in its journal."""

FLUSH_TOKENS = 64
FLUSH_SECONDS = 1.0

_FIRST_CAPACITY = 64


class Recorder:
    """Collects one run, token by token, evaluation by evaluation.

    Per evaluation: :meth:`begin`, :meth:`layer` once per layer that routes, then :meth:`commit` or
    :meth:`discard`. At the end: :meth:`finish`.

    Parameters
    ----------
    spec : TraceSpec
        What is recorded.
    journal : Journal or None
        Where it is kept against a kill. Without one, the trace is held in memory however long.
    memory_limit : int, default 256 MiB
        Bytes above which the trace is no longer held in memory but in the journal alone.

    Notes
    -----
    One thread at a time. The journal is written by :meth:`commit` when 64 tokens or one second have
    passed since the last write.
    """

    def __init__(
        self, spec: TraceSpec, journal: Journal | None, *, memory_limit: int = MEMORY_LIMIT
    ) -> None:
        self.spec = spec
        self.journal = journal
        self.memory_limit = memory_limit
        self._columns: list[Column] = [c for c in spec.columns if c.dtype != "str"]
        self._cost_names: list[str] | None = None
        self._pieces: list[str] = []
        self._slots = [slice(0, int(width)) for width in spec.n_expert_used]
        self._token_bytes = spec.bytes_per_token  # asked for at every commit
        self._capacity = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._grow(_FIRST_CAPACITY)

        self._committed = 0  # rows in memory
        self._spilled = 0  # tokens before them, in the journal alone
        self._flushed = 0  # rows in memory that are in the journal too
        self._last_flush = time.monotonic()
        self._open = False
        self._width = 0  # rows of the open evaluation
        self._seen = [0] * spec.n_layer  # per layer: rows given for the open evaluation
        self._routed = np.zeros(spec.n_layer, dtype=np.int64)
        self._finished = False
        self._reader: JournalReader | None = None

    @property
    def n_token(self) -> int:
        """Tokens that are part of the trace."""
        return self._spilled + self._committed

    def begin(
        self,
        *,
        batch: int,
        turn: int,
        phase: int,
        positions: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        pieces: Sequence[str] | None,
        logprob: npt.NDArray[np.float32],
        accepted: npt.NDArray[np.uint8],
    ) -> None:
        """Open an evaluation.

        Parameters
        ----------
        batch : int
            Index of the evaluation; it never falls.
        turn, phase : int
            Chat turn; a value of :class:`bmoe_lab.schema.Phase`.
        positions, token_ids : int32 arrays of shape (token,)
            Of the tokens decoded.
        pieces : sequence of str or None
            Their display text (:func:`bmoe_lab.recording.display_piece`); needed if text is kept.
        logprob : float32 array of shape (token,)
            NaN where not computed.
        accepted : uint8 array of shape (token,)
            1 unless it is a draft that may be rejected.

        Raises
        ------
        SessionError
            If an evaluation is open, or the recording is finished.
        SchemaError
            If the parts differ in length.
        """
        if self._open or self._finished:
            state = "finished" if self._finished else "in an evaluation"
            raise SessionError(f"recorder must be between evaluations to begin one; got {state}.")
        width = len(positions)
        lengths = {len(token_ids), len(logprob), len(accepted), width}
        if pieces is not None:
            lengths.add(len(pieces))
        if len(lengths) != 1 or width == 0:
            raise SchemaError(
                f"tokens of an evaluation must have one value each; got lengths {sorted(lengths)}."
            )
        if self.spec.record_text and pieces is None:
            raise SchemaError("pieces must be given if text is kept; got None.")
        start, stop = self._committed, self._committed + width
        if stop > self._capacity:
            self._grow(max(stop, 2 * self._capacity))
        arrays = self._arrays
        for column in self._columns:
            arrays[column.name][start:stop] = column.missing
        arrays["batch"][start:stop] = batch
        arrays["turn"][start:stop] = turn
        arrays["phase"][start:stop] = phase
        arrays["position"][start:stop] = positions
        arrays["logprob"][start:stop] = logprob
        arrays["accepted"][start:stop] = accepted
        if self.spec.record_text and pieces is not None:
            arrays["token_id"][start:stop] = token_ids
            self._pieces.extend(pieces)
        self._width = width
        self._seen = [0] * self.spec.n_layer
        self._open = True

    def layer(
        self,
        layer: int,
        rows: npt.NDArray[np.int64],
        *,
        chosen: npt.NDArray[Any],
        weight_chosen: npt.NDArray[Any],
        applied: npt.NDArray[Any],
        weight_applied: npt.NDArray[Any],
        action: npt.NDArray[Any],
        residency: npt.NDArray[Any],
        read_bytes: npt.NDArray[Any],
        scores: npt.NDArray[Any] | None = None,
    ) -> None:
        """Copy what one layer routed; called inside the evaluation callback.

        Parameters
        ----------
        layer : int
            Index along ``layer``.
        rows : int64 array of shape (row,)
            Tokens of this evaluation that the layer routes, ascending.
        chosen, applied : int array of shape (row, slot)
            Experts before and after the policy; as many slots as the layer uses.
        weight_chosen, weight_applied : float32 array of shape (row, slot)
            Their weights.
        action, residency : uint8 array of shape (row, slot)
            Flags of :class:`bmoe_lab.schema.Action` and :class:`bmoe_lab.schema.Residency`.
        read_bytes : uint32 array of shape (row, slot)
            Bytes that each slot caused to be read.
        scores : float32 array of shape (row, expert), optional
            What the graph sorted; kept at the levels with scores.
        """
        n_row = len(rows)
        if n_row == 0:
            return
        self._seen[layer] += n_row
        start = self._committed
        at: Any
        if n_row == 1:
            at = start + int(rows[0])
        elif n_row == self._width:  # ascending, so it is all of them
            at = slice(start, start + n_row)
        else:
            at = start + rows
        cell = (at, layer, self._slots[layer])
        self._chosen[cell] = chosen
        self._weight_chosen[cell] = weight_chosen
        self._applied[cell] = applied
        self._weight_applied[cell] = weight_applied
        self._action[cell] = action
        self._residency[cell] = residency
        self._read_bytes[cell] = read_bytes
        if scores is not None and self._scores is not None:
            self._scores[at, layer] = scores

    def commit(self, costs: Mapping[str, float]) -> None:
        """Make the open evaluation part of the trace.

        Parameters
        ----------
        costs : mapping of str to float
            What the evaluation cost. The names of the first commit become variables; one that is
            absent later is NaN there.

        Raises
        ------
        TraceFileError
            If the journal cannot be written. The evaluation is part of the trace in memory all the
            same, and the journal stays readable up to its last write.
        SchemaError
            If a layer was given a row twice, or a cost is new.
        """
        self._require_open()
        start, stop = self._committed, self._committed + self._width
        routed = (self._chosen[start:stop, :, 0] != NO_EXPERT).sum(axis=0)
        if routed.tolist() != self._seen:
            layer = int(np.flatnonzero(routed != self._seen)[0])
            batch = int(self._arrays["batch"][start])
            self.discard()
            raise SchemaError(
                f"layer {layer} must route each row of an evaluation once; got "
                f"{self._seen[layer]} rows for {int(routed[layer])} tokens in batch {batch}."
            )
        self._set_costs(costs, start)
        self._routed += routed
        self._committed = stop
        self._open = False
        if self.journal is None or self.journal.failed:
            return
        pending = self._committed - self._flushed
        if pending >= FLUSH_TOKENS or time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            self.flush()
        if self._committed * self._token_bytes > self.memory_limit:
            self.flush()
            self._spill()

    def discard(self) -> None:
        """Forget the open evaluation; no-op if none is open."""
        if self._open and self.spec.record_text:
            del self._pieces[-self._width :]
        self._open = False

    def flush(self) -> None:
        """Write the evaluations that the journal does not have yet."""
        if self.journal is None or self.journal.failed:
            return
        if self._committed > self._flushed:
            self.journal.append(self._rows(self._flushed, self._committed))
            self._flushed = self._committed
        self._last_flush = time.monotonic()

    def finish(
        self,
        attrs: Mapping[str, Any] | None = None,
        *,
        save: str | os.PathLike[str] | None = None,
        keep_journal: bool = False,
    ) -> xr.Dataset:
        """Return the trace; write its final file.

        The journal goes when the final file is verified, or, without `save`, when the trace is in
        memory. A trace too long for memory stays on disk and is read when used: from the final
        file, or from the journal, which then goes with the Dataset.

        Parameters
        ----------
        attrs : mapping, optional
            Attributes that the run's end adds; ``complete`` is 1 unless given.
        save : path-like, optional
            Final file, ``.nc`` or ``.zarr``.
        keep_journal : bool, default False
            Leave the journal where it is, as a leftover: what a file could not be written from.

        Returns
        -------
        xarray.Dataset
            Valid by :func:`bmoe_lab.schema.validate`.

        Raises
        ------
        SchemaError
            If nothing was recorded, or the rows do not add up.
        TraceFileError
            If the journal or the final file cannot be written. The journal is kept; the call may be
            repeated with another target, or without one.
        """
        self.discard()
        attrs = {"complete": 1} | dict(attrs or {})
        if self.n_token == 0:
            if self.journal is not None:
                self.journal.remove()
            raise SchemaError(
                "trace must hold at least one token; got none: no evaluation was finished. "
                "Check that the run decoded something."
            )
        trace = self._assemble(attrs)
        self._check_rows(trace)
        validate(trace)
        if save is not None:
            # Imported here: the store needs xarray's backends, a run without `save` does not.
            from bmoe_lab.recording.store import open_trace, save_trace

            try:
                save_trace(trace, save, memory_limit=self.memory_limit)
            except TraceFileError as error:
                if self.journal is None or self.journal.failed:
                    raise
                raise TraceFileError(
                    f"{error} The recording is kept in {str(self.journal.path)!r}."
                ) from error
            if self._spilled:
                opened = open_trace(save, memory_limit=self.memory_limit)
                assert isinstance(opened, xr.Dataset)  # that is what was saved
                trace = opened
        if self.journal is not None:
            if keep_journal and not self.journal.failed:
                self.journal.close()
            elif self._reader is not None and save is None:
                # The trace is read from the journal, which goes when the last array of it goes.
                weakref.finalize(self._reader, self.journal.remove)
            else:
                self.journal.remove()
        self._reader = None
        return trace

    def _assemble(self, attrs: Mapping[str, Any]) -> xr.Dataset:
        if self.journal is not None and not self.journal.failed and not self._finished:
            self.flush()
            self.journal.finish(attrs)
        self._finished = True
        if not self._spilled:
            return build_trace(self.spec, self._rows(0, self._committed), attrs)
        assert self.journal is not None  # only a journal lets rows leave memory
        self._reader = JournalReader(self.journal.path)
        if not self._reader.complete:  # the disk was full: what is there ends at the last flush
            self._reader.end_attrs = clean_attrs(attrs)
        return self._reader.dataset(lazy=True)

    def _check_rows(self, trace: xr.Dataset) -> None:
        """Compare the cells of the trace with what the layers reported."""
        last = max(self.spec.block)
        cut_short = not trace.attrs["complete"]
        for layer, block in enumerate(self.spec.block):
            rows = int(self._routed[layer])
            # llama.cpp routes only the rows whose logits are wanted in the last block.
            # A run cut short in its prompt has not wanted any yet.
            if (rows == 0 and not (cut_short and block == last)) or (
                rows < self.n_token and block != last
            ):
                raise SchemaError(
                    f"layer {layer} must route every token ({self.n_token}); got {rows}. "
                    "The recording is not whole; its journal is kept."
                )
        if self._spilled and self.journal is not None and self.journal.failed:
            return  # the rows in memory could not follow the others to disk
        used = np.asarray(self.spec.n_expert_used, dtype=np.int64)
        expected = int((self._routed * used).sum())
        step = max(1, self.memory_limit // self._token_bytes)
        actual = sum(
            int((trace.expert_chosen[at : at + step].values != NO_EXPERT).sum())
            for at in range(0, trace.sizes["token"], step)
        )
        if actual != expected:
            raise SchemaError(
                f"trace must hold tokens x layers x slots = {expected} routed slots; got {actual}. "
                "The recording is not whole; its journal is kept."
            )

    def _require_open(self) -> None:
        if not self._open:
            raise SessionError(
                "recorder must be in an evaluation to commit it; got none. Begin one."
            )

    def _set_costs(self, costs: Mapping[str, float], row: int) -> None:
        if self._cost_names is None:
            self._cost_names = list(costs)
            for name in self._cost_names:
                self._columns.append(Column(name, "float64", missing=np.nan))
                self._arrays[name] = np.full(self._capacity, np.nan)
        for name, value in costs.items():
            if name not in self._cost_names:
                raise SchemaError(
                    f"costs must have the names of the first commit {self._cost_names}; "
                    f"got {name!r}. Give NaN there if it was unknown."
                )
            self._arrays[name][row] = value

    def _rows(self, start: int, stop: int) -> dict[str, Any]:
        rows: dict[str, Any] = {c.name: self._arrays[c.name][start:stop] for c in self._columns}
        if self.spec.record_text:
            rows["piece"] = np.array(self._pieces[start:stop], dtype=np.str_)
        return rows

    def _spill(self) -> None:
        """Forget rows that the journal has."""
        self._spilled += self._committed
        self._committed = self._flushed = 0
        self._pieces.clear()
        self._arrays.clear()
        self._capacity = 0
        self._grow(_FIRST_CAPACITY)

    def _grow(self, capacity: int) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for column in self._columns:
            arrays[column.name] = np.empty((capacity, *column.shape), dtype=column.dtype)
            if column.name in self._arrays:
                arrays[column.name][: self._committed] = self._arrays[column.name][
                    : self._committed
                ]
        self._arrays, self._capacity = arrays, capacity
        # Attributes, because a dict lookup per copy would be a tenth of the hot path.
        self._chosen = arrays["expert_chosen"]
        self._weight_chosen = arrays["weight_chosen"]
        self._applied = arrays["expert_applied"]
        self._weight_applied = arrays["weight_applied"]
        self._action = arrays["action"]
        self._residency = arrays["residency"]
        self._read_bytes = arrays["read_bytes"]
        self._scores = arrays.get("router_score")
