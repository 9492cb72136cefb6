"""One expert of one layer: on which pieces of text it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError, unknown_name
from bmoe_lab.metrics._shared import PhaseName, Which, _n_expert, _phase_rows
from bmoe_lab.metrics.cells import _place, _row

__all__ = ["expert_pieces"]


def expert_pieces(
    trace: xr.Dataset,
    *,
    layer: int,
    expert: int,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.Dataset:
    """Return the pieces of text that an expert is used on, the most frequent first.

    The piece is the one that is routed, not the one that follows. Frequent pieces lead the counts
    of every expert: what is special about this one tells the lift.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads one layer of ``expert_chosen`` or ``expert_applied``, ``action``, the coordinates
        ``piece``, ``phase``, the attribute ``n_expert``.
    layer : int
        Its number; negative from the end.
    expert : int
        Its id in that layer.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.Dataset
        Shape (piece,), float64, unit "1": ``expert_piece_count_<phase>`` (tokens with that piece
        that used the expert), ``piece_count_<phase>`` (all that the layer routed),
        ``expert_piece_lift_<phase>``. Pieces that never used it are left out.

    Raises
    ------
    SchemaError
        If the trace holds no text.
    SettingsError
        If there is no such layer or expert.
    UnknownNameError
        If `which` or `phase` is not one of the names above.

    Notes
    -----
    ``lift(p) = (N_(e,p) / N_e) / (N_p / N)``: N tokens that the layer routed, N_p those with piece
    p, N_e those that used expert e, N_(e,p) both. 1 is chance; of a piece seen once or twice it
    says little. It equals the piece's specialisation ``N_(e,p) / N_p`` (OLMoE, arXiv 2409.02060)
    over the expert's load ``N_e / N``.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=6, n_prefill=0, n_layer=1, n_expert=4, n_used=2, seed=0)
    >>> trace = trace.assign_coords(piece=("token", list("aabbbb")))
    >>> trace["expert_chosen"].values[:, 0, 0] = [3, 3, 3, 0, 0, 0]
    >>> trace["expert_chosen"].values[:, 0, 1] = 1
    >>> table = expert_pieces(trace, layer=0, expert=3)
    >>> table["piece"].values.tolist(), table["expert_piece_lift_decode"].values.tolist()
    (['a', 'b'], [2.0, 0.5])
    """
    if which not in ("chosen", "applied"):
        raise unknown_name("which", which, ["applied", "chosen"])
    layer, expert = _place(trace, "layer", layer), _expert_of(trace, expert)
    if "piece" not in trace.coords:
        raise SchemaError(
            f"trace must hold the coordinate 'piece'; got {sorted(map(str, trace.coords))}. "
            "Record the text too (record_text=True, the default)."
        )
    rows = _phase_rows(trace, phase)
    routed = (_row(trace, "chosen", layer, 0, rows.size) >= 0).any(axis=-1) & rows
    used = (_row(trace, which, layer, 0, rows.size) == expert).any(axis=-1) & routed
    pieces, place = np.unique(trace["piece"].values[routed], return_inverse=True)
    overall = np.bincount(place, minlength=pieces.size)
    count = np.bincount(place[used[routed]], minlength=pieces.size)
    # Sorted by count; equal counts by lift, which is by the rarer piece, then by the text.
    order = np.lexsort((overall, -count))
    order = order[count[order] > 0]
    count, overall = count[order], overall[order]
    return _table(
        pieces[order],
        {
            "expert_piece_count": (count, f"tokens with the piece that used expert {expert}"),
            "piece_count": (overall, "tokens with the piece"),
            "expert_piece_lift": (
                (count / max(1, int(used.sum()))) / (overall / max(1, int(routed.sum()))),
                f"share of the piece among the tokens of expert {expert} over that among all",
            ),
        },
        f"layer {layer}, {which}, {phase}",
        phase,
    )


def _expert_of(trace: xr.Dataset, given: Any) -> int:
    n_expert = _n_expert(trace)
    if not isinstance(given, int | np.integer) or not 0 <= int(given) < n_expert:
        raise SettingsError(
            f"expert must be a whole number from 0 to {n_expert - 1}; got {given!r}. "
            "An id means something only within its layer."
        )
    return int(given)


def _table(
    pieces: npt.NDArray[Any],
    columns: dict[str, tuple[npt.NDArray[Any], str]],
    where: str,
    phase: str,
) -> xr.Dataset:
    return xr.Dataset(
        {
            f"{name}_{phase}": (
                "piece",
                np.asarray(values, np.float64),
                {"units": "1", "long_name": f"{meaning} ({where})"},
            )
            for name, (values, meaning) in columns.items()
        },
        {"piece": pieces},
    )
