"""The CSV of llama.cpp's ``moe-trace`` example: a layer and an expert per row, nothing else.

Tokens are not in it. They follow from the order: an evaluation is written layer by layer, so it
ends where the layers start again, and within a layer every `n_expert_used` rows are a token. Where
this leaves two readings the file is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.converters.building import checked_count, checked_ids, routed_only
from bmoe_lab.converters.files import file_to_read, written_aside
from bmoe_lab.converters.lines import TextTable, first_true, read_table
from bmoe_lab.errors import TraceFormatError
from bmoe_lab.schema import NO_EXPERT, Action, Phase, validate

__all__ = ["from_moe_trace", "to_moe_trace"]

_NAMES = ("layer", "expert")
_HEADED = "moe_trace_header"
_ORDER = "Is n_expert_used that of the run, and the file as the tool wrote it?"

Ints = npt.NDArray[np.int64]


def from_moe_trace(
    path: str | os.PathLike[str], *, n_expert: int, n_expert_used: int
) -> xr.Dataset:
    r"""Return a ``moe-trace`` CSV as a trace.

    Evaluations of several tokens are the prefill, those of one token the decode: a prompt's last
    evaluation counts as decode if it had one token.

    Parameters
    ----------
    path : path-like
        Rows ``layer,expert``, with or without that line above them.
    n_expert : int
        Experts per layer.
    n_expert_used : int
        Experts per token, as the run was made.

    Returns
    -------
    xarray.Dataset
        ``source="import"``, without weights, residency, sizes and positions.

    Raises
    ------
    TraceFormatError
        If the file is malformed, with its line; or if its tokens cannot be told.
    SettingsError
        If `n_expert` or `n_expert_used` is impossible.

    Notes
    -----
    The last layer may hold fewer tokens: llama.cpp routes only those there whose logits are wanted,
    in a prompt none or the last one. Refused: one single layer (nothing marks where an evaluation
    ends), and two layers of which the second holds fewer tokens (two evaluations look like one).
    Source: llama.cpp pull request 28544, ``examples/moe-trace``.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "moe_trace.csv")
    ...     _ = path.write_text("0,3\n0,1\n1,2\n1,0\n0,1\n0,2\n1,3\n1,0\n")
    ...     trace = from_moe_trace(path, n_expert=4, n_expert_used=2)
    >>> trace.expert_chosen[:, 0].values.tolist(), trace.batch.values.tolist()
    ([[3, 1], [1, 2]], [0, 1])
    """
    checked_count("n_expert", n_expert)
    checked_count("n_expert_used", n_expert_used, 1, n_expert)
    table = read_table(file_to_read(path), names=_NAMES)
    rows = table.columns({"layer": "int", "expert": "int"})
    layer, expert = rows["layer"], rows["expert"]
    for name, values, high in (("layer", layer, 2**31 - 1), ("expert", expert, n_expert - 1)):
        wrong = first_true((values < 0) | (values > high))
        if wrong >= 0:
            limit = f" to n_expert - 1 = {high}" if name == "expert" else ""
            table.fail(
                f"{name} must be from 0{limit}", int(values[wrong]), wrong, "Is n_expert right?"
            )
    token, block, at, width = _tokens(layer, table, n_expert_used)
    n_token = int(width.sum())
    ids = np.full((n_token, block.size, n_expert_used), NO_EXPERT, dtype=np.int64)
    where = np.arange(layer.size // n_expert_used)
    ids[token[where * n_expert_used], at[where * n_expert_used]] = expert.reshape(-1, n_expert_used)
    checked = checked_ids(ids, n_expert, repr(table.where), row="token")
    batch = np.repeat(np.arange(width.size), width)
    return routed_only(
        checked,
        n_expert=n_expert,
        phase=np.where(width[batch] > 1, Phase.prefill, Phase.decode),
        batch=batch,
        block=block,
        attrs={"instrumented": 1, _HEADED: int(bool(table.names))},
    )


def _tokens(layer: Ints, table: TextTable, n_used: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return token and layer index of each row, the blocks, the tokens of each evaluation."""
    block, at = np.unique(layer, return_inverse=True)
    if block.size == 1:
        table.fail(
            "file must have two layers or more",
            f"layer {int(block[0])} alone",
            None,
            "With one layer nothing says where an evaluation ends.",
        )
    run_begins = np.concatenate(([True], layer[1:] != layer[:-1]))
    start = np.flatnonzero(run_begins)
    length = np.diff(np.append(start, layer.size))
    odd = first_true(length % n_used != 0)
    if odd >= 0:
        last = odd == start.size - 1
        table.fail(
            f"a layer must have a multiple of n_expert_used = {n_used} rows in a row",
            int(length[odd]),
            int(start[odd]) + int(length[odd]) - 1,
            "The file is cut short." if last else _ORDER,
        )
    run_layer, n_cell = at[start], length // n_used
    restarts = np.concatenate(([False], run_layer[1:] < run_layer[:-1]))
    evaluation = np.cumsum(restarts)
    width = np.zeros(int(evaluation[-1]) + 1, dtype=np.int64)
    np.maximum.at(width, evaluation, n_cell)
    last = run_layer == block.size - 1
    full = n_cell == width[evaluation]
    one = last & (n_cell == 1)
    wrong = first_true(~(full | one))
    if wrong >= 0:
        table.fail(
            "the layers of an evaluation must have equally many tokens, the last one also 1",
            f"{int(n_cell[wrong])} of {int(width[evaluation[wrong]])}",
            int(start[wrong]),
            _ORDER,
        )
    n_layer = np.bincount(evaluation)
    has_last = np.zeros(width.size, dtype=bool)
    has_last[evaluation[last]] = True
    lacking = first_true(n_layer < block.size - ~has_last)
    # A prompt's evaluation may want no logits, so its last layer may be missing.
    lacking = lacking if lacking >= 0 else first_true(~has_last & (width == 1))
    if lacking >= 0:
        row = int(start[np.flatnonzero(evaluation == lacking)[-1]])
        table.fail(
            f"an evaluation must have all {block.size} layers",
            int(n_layer[lacking]),
            row,
            "The file is cut short." if lacking == width.size - 1 else _ORDER,
        )
    if block.size == 2 and not (full[last].all() and has_last.all()):
        table.fail(
            "the second of two layers must have as many tokens as the first",
            "fewer",
            int(start[first_true(~full)]) if not full.all() else None,
            "Two evaluations cannot be told from one then.",
        )
    first_token = np.concatenate(([0], np.cumsum(width)[:-1]))
    run = np.cumsum(run_begins) - 1
    within = (np.arange(layer.size) - start[run]) // n_used
    offset = np.where(full, 0, width[evaluation] - 1)  # a lone cell is the last token's
    token = first_token[evaluation[run]] + offset[run] + within
    return token, block, at, width


def to_moe_trace(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write the chosen experts of a trace as a ``moe-trace`` CSV; return where.

    The text is read again before it becomes a file: a trace whose tokens it cannot tell is refused.

    Parameters
    ----------
    ds : xarray.Dataset
        A trace. Only ``expert_chosen`` and the evaluations are written: the format has no more.
    path : path-like
        The file; an existing one is replaced.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    TraceFormatError
        If the format cannot hold the trace.
    TraceFileError
        If the file cannot be written.

    Notes
    -----
    A heading, then one line per routed slot, evaluation by evaluation, layer by layer. Source:
    llama.cpp pull request 28544, ``examples/moe-trace``.

    Examples
    --------
    >>> import tempfile
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=2, n_layer=2, n_used=2, n_prefill=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(to_moe_trace(trace, f"{folder}/moe_trace.csv").read_text().splitlines())
    9
    """
    validate(ds)
    expert, batch = ds["expert_chosen"].values, ds["batch"].values
    routed = expert != NO_EXPERT
    if ds["group"].values.any():
        raise _unfit("one expert group per block", "two groups in a block")
    if (routed.any(axis=-1) != routed.all(axis=-1)).any():
        raise _unfit("one width for all layers", "layers of different width")
    changed = int((~np.isin(ds["action"].values, (Action.kept, Action.not_routed))).sum())
    if changed:
        raise _unfit("the router's own choice only", f"{changed} slots that a policy changed")
    token, layer = np.nonzero(routed[..., 0])
    order = np.lexsort((token, layer, batch[token]))
    token, layer = token[order], layer[order]
    n_used = ds.sizes["slot"]
    block = np.repeat(ds["block"].values[layer], n_used).tolist()
    ids = expert[token, layer].ravel().tolist()
    head = "layer,expert\n" if ds.attrs.get(_HEADED, 1) else ""
    text = head + "".join(f"{b},{e}\n" for b, e in zip(block, ids, strict=True))
    path = Path(path)
    with written_aside(path) as aside:
        aside.write_bytes(text.encode("ascii"))
        try:
            back = from_moe_trace(aside, n_expert=int(ds.attrs["n_expert"]), n_expert_used=n_used)
        except TraceFormatError as error:
            raise _unfit("what its reader accepts", f"a trace that it refuses: {error}") from error
        same = np.array_equal(back["expert_chosen"].values, expert) and np.array_equal(
            np.diff(back["batch"].values) != 0, np.diff(batch) != 0
        )
        if not same:
            raise _unfit("tokens that its order tells", "others")
    return path


def _unfit(needs: str, got: str) -> TraceFormatError:
    return TraceFormatError(
        f"a moe-trace CSV must have {needs}; got {got}. "
        "Save it with bmoe_lab.save_trace or to_parquet, which keep everything."
    )
