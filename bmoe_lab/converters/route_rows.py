"""Rows of a route trace, one per routed expert, put into cells of tokens, layers and slots.

The engine writes an evaluation layer by layer when it is done, so the order of the rows tells where
one ends: the layers start again. A file whose rows were put into another order says less: there,
the prompt of a turn counts as one evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bmoe_lab.converters.lines import TextTable, first_true
from bmoe_lab.converters.route_preamble import Preamble
from bmoe_lab.errors import SettingsError
from bmoe_lab.schema import Phase

__all__ = ["Cells", "cells_of"]

Ints = npt.NDArray[np.int64]

_INT32 = 2**31 - 1
_DAMAGED = "The file is damaged or of another kind."


@dataclass(frozen=True)
class Cells:
    """Where each row belongs.

    Parameters
    ----------
    row_token, row_layer : numpy.ndarray
        int64 of shape (row,): index along ``token`` and along ``layer``.
    turn, phase, position, batch : numpy.ndarray
        int64 of shape (token,); position -1 is unknown.
    block : numpy.ndarray
        int64 of shape (layer,).
    """

    row_token: Ints
    row_layer: Ints
    turn: Ints
    phase: Ints
    position: Ints
    batch: Ints
    block: Ints


def cells_of(
    rows: Mapping[str, Any], table: TextTable, preamble: Preamble, n_ubatch: int | None
) -> Cells:
    """Return where each row belongs, after checking every value and that nothing is missing.

    Parameters
    ----------
    rows : mapping
        The columns of the file, of shape (row,).
    table : TextTable
        The file, for line numbers.
    preamble : Preamble
        Its comment lines.
    n_ubatch : int, optional
        Width of a prompt's evaluations, where the caller knows it.

    Raises
    ------
    TraceFormatError
        With the first line that is at fault.
    """
    if n_ubatch is not None and (not isinstance(n_ubatch, int) or n_ubatch < 1):
        raise SettingsError(
            f"n_ubatch must be a whole number from 1; got {n_ubatch!r}. "
            "Leave it out to take the evaluations from the order of the rows."
        )
    _check_ranges(rows, table, preamble)
    block = np.array(
        [block for block, size in sorted(preamble.expert_bytes.items()) if size > 0], dtype=np.int64
    )
    row_layer = _layer_of(rows["layer"], block, table)
    evaluation = _evaluations(rows)
    unknown = rows["step"] < 0
    step = rows["step"]
    if unknown.any():
        step = np.where(unknown, step.max() + 1 + _ordinals(rows, evaluation, table), step)
    first, row_token = _tokens(evaluation, step)
    if _repeats_a_token(rows, first):
        _check_known_steps(rows, table)
        evaluation = _evaluations_by_step(rows)
        first, row_token = _tokens(evaluation, step)
    turn, phase = rows["turn"][first], rows["phase"][first]
    fallen = first_true(np.diff(turn, prepend=turn[:1]) < 0)
    if fallen >= 0:
        table.fail(
            "turn must not fall", int(turn[fallen]), int(first[fallen]), "Were files joined?"
        )
    batch = _batches(evaluation[first], turn, phase, n_ubatch)
    cells = Cells(row_token, row_layer, turn, phase, rows["step"][first], batch, block)
    _check_whole(cells, rows, table, preamble.n_expert_used)
    return cells


def _check_ranges(rows: Mapping[str, Any], table: TextTable, preamble: Preamble) -> None:
    n_expert, n_used = preamble.n_expert, preamble.n_expert_used
    for name, low, high, rule in (
        ("turn", 0, _INT32, "turn must be from 0"),
        ("phase", 0, 1, "phase must be 0 (prefill) or 1 (decode)"),
        ("step", -1, _INT32, "step must be from -1"),
        ("layer", 0, _INT32, "layer must be from 0"),
        ("slot", 0, n_used - 1, f"slot must be from 0 to n_expert_used - 1 = {n_used - 1}"),
        ("expert", 0, n_expert - 1, f"expert must be from 0 to n_expert - 1 = {n_expert - 1}"),
        ("residency", 0, 2, "residency must be 0, 1 or 2"),
        ("expert_bytes", 0, 2**32 - 1, "expert_bytes must be from 0 to 4294967295"),
        ("dropped", 0, 1, "dropped must be 0 or 1"),
    ):
        values = rows[name]
        wrong = first_true((values < low) | (values > high))
        if wrong >= 0:
            table.fail(rule, int(values[wrong]), wrong, _DAMAGED)
    weight = rows["weight"]
    with np.errstate(over="ignore"):
        wrong = first_true(np.isinf(weight.astype(np.float32)))
    if wrong >= 0:
        table.fail("weight must fit float32", float(weight[wrong]), wrong, _DAMAGED)


def _layer_of(layer: Ints, block: Ints, table: TextTable) -> Ints:
    """Return the index along ``layer`` of each row; a layer without a size is an error."""
    at = np.searchsorted(block, layer)
    known = at < block.size
    known[known] = block[at[known]] == layer[known]
    wrong = first_true(~known)
    if wrong >= 0:
        table.fail(
            "layers that route must have a comment line with their expert_bytes",
            f"layer={int(layer[wrong])} without one",
            wrong,
            "A size of 0 would make every byte count wrong. Add '# layer=... expert_bytes=...'.",
        )
    return at.astype(np.int64)


def _evaluations(rows: Mapping[str, Any]) -> Ints:
    """Return the evaluation of each row as the order of the rows tells it."""
    turn, phase, step = rows["turn"], rows["phase"], rows["step"]
    layer, slot = rows["layer"], rows["slot"]

    def change(values: Ints) -> npt.NDArray[np.bool_]:
        return np.asarray(values[1:] != values[:-1])

    same_layer = layer[1:] == layer[:-1]
    begins = change(turn) | change(phase) | (layer[1:] < layer[:-1])
    decode = phase[1:] == Phase.decode
    # A decode evaluation has one token; a repeated slot is the next one's.
    begins |= decode & (change(step) | (same_layer & (slot[1:] <= slot[:-1])))
    begins |= ~decode & same_layer & (step[1:] < step[:-1])
    evaluation: Ints = np.concatenate(([0], np.cumsum(begins))).astype(np.int64)
    return evaluation


def _evaluations_by_step(rows: Mapping[str, Any]) -> Ints:
    """Return the evaluation of each row: the prompt of a turn, or one step of its decode."""
    turn = np.unique(rows["turn"], return_inverse=True)[1]  # small numbers: no overflow
    phase, step = rows["phase"], rows["step"]
    within = np.where(phase == Phase.decode, step + 1, 0)
    key = (turn * 2 + phase) * (int(step.max()) + 2) + within
    index: Ints = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return index


def _ordinals(rows: Mapping[str, Any], evaluation: Ints, table: TextTable) -> Ints:
    """Return the number of each row's token within its evaluation, told by the order alone."""
    layer, step, slot = rows["layer"], rows["step"], rows["slot"]
    group = np.ones(layer.size, dtype=bool)
    group[1:] = (evaluation[1:] != evaluation[:-1]) | (layer[1:] != layer[:-1])
    cell = group.copy()
    cell[1:] |= (step[1:] != step[:-1]) | (slot[1:] <= slot[:-1])
    number = np.cumsum(cell) - 1
    start, which = np.flatnonzero(group), np.cumsum(group) - 1
    n_cell = np.diff(np.append(number[start], number[-1] + 1))
    widest = np.zeros(int(evaluation[-1]) + 1, dtype=np.int64)
    np.maximum.at(widest, evaluation[start], n_cell)
    unclear = first_true((n_cell != widest[evaluation[start]])[which] & (step < 0))
    if unclear >= 0:
        table.fail(
            "step must be known where a layer routes some tokens of its evaluation only",
            -1,
            unclear,
            "Nothing says which tokens these are.",
        )
    ordinal: Ints = number - number[start][which]
    return ordinal


def _tokens(evaluation: Ints, step: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each token, and the token of each row."""
    key = evaluation * (int(step.max()) + 1) + step
    _, first, row_token = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), row_token.astype(np.int64)


def _repeats_a_token(rows: Mapping[str, Any], first: Ints) -> bool:
    """Return whether a token appears in two evaluations, which the engine's order rules out."""
    step = rows["step"][first]
    turn = np.unique(rows["turn"][first], return_inverse=True)[1]  # small numbers: no overflow
    key = (turn * 2 + rows["phase"][first]) * (int(step.max()) + 2) + step
    key = key[step >= 0]
    return bool(np.unique(key).size < key.size)


def _check_known_steps(rows: Mapping[str, Any], table: TextTable) -> None:
    unknown = first_true(rows["step"] < 0)
    if unknown >= 0:
        table.fail(
            "step must be known where the rows are not in the engine's order",
            -1,
            unknown,
            "Without it nothing says which rows are one token. Restore the order of the rows.",
        )


def _batches(evaluation: Ints, turn: Ints, phase: Ints, n_ubatch: int | None) -> Ints:
    """Return the evaluation of each token, counted from 0."""
    if n_ubatch is not None:
        begins = np.ones(turn.size, dtype=bool)
        begins[1:] = (turn[1:] != turn[:-1]) | (phase[1:] != phase[:-1])
        start = np.flatnonzero(begins)
        within = np.arange(turn.size) - start[np.cumsum(begins) - 1]
        prompt = phase == Phase.prefill
        parts = np.where(prompt, within // n_ubatch, evaluation)
    else:
        begins = np.zeros(turn.size, dtype=bool)
        parts = evaluation
    begins[0] = False
    begins[1:] |= parts[1:] != parts[:-1]
    batch: Ints = np.cumsum(begins).astype(np.int64)
    return batch


def _check_whole(cells: Cells, rows: Mapping[str, Any], table: TextTable, n_used: int) -> None:
    """Raise if a slot is there twice, or one that must be there is not."""
    n_layer = cells.block.size
    cell = cells.row_token * n_layer + cells.row_layer
    slot = cell * n_used + rows["slot"]
    count = np.bincount(cell, minlength=cells.turn.size * n_layer)
    # Sizes come from the file: a slot table is made only when they are known to fit its rows.
    if count.max() > n_used or ((count[cell] == n_used).all() and np.bincount(slot).max() > 1):
        row = _first_repeat(slot)
        table.fail(
            "rows must differ in (turn, phase, step, layer, slot)",
            {name: int(rows[name][row]) for name in ("turn", "phase", "step", "layer", "slot")},
            row,
            "The same cell was there before. Were two files joined?",
        )
    short = first_true(count[cell] != n_used)
    if short >= 0:
        table.fail(
            f"a token must have n_expert_used = {n_used} rows in a layer",
            int(count[cell[short]]),
            short,
            "The file is cut short or damaged.",
        )
    # Every cell is whole now, so sorted by slot the rows are cell after cell.
    ids = rows["expert"][np.argsort(slot, kind="stable")].reshape(-1, n_used)
    ids = np.sort(ids, axis=-1)
    if (ids[:, 1:] == ids[:, :-1]).any():
        row = _first_repeat(cell * (int(rows["expert"].max()) + 1) + rows["expert"])
        table.fail(
            "an expert must appear once in a token's layer", int(rows["expert"][row]), row, _DAMAGED
        )
    routed = count.reshape(-1, n_layer) > 0
    # llama.cpp routes only the rows whose logits are wanted in the last layer of a prompt.
    must = np.ones(routed.shape, dtype=bool)
    must[cells.phase == Phase.prefill, -1] = False
    token, layer = np.nonzero(must & ~routed)
    if token.size:
        row = int(np.flatnonzero(cells.row_token == token[0])[-1])
        table.fail(
            "a token must have rows in every layer that routes",
            f"none in layer {int(cells.block[layer[0]])} for step {int(cells.position[token[0]])}",
            row,
            "The file is cut short or damaged: a trace holds whole evaluations.",
        )


def _first_repeat(key: Ints) -> int:
    """Return the first row whose key was there before."""
    order = np.argsort(key, kind="stable")
    return int(order[1:][key[order][1:] == key[order][:-1]].min())
