"""Where each run of a comparison first would have said something else than the lossless one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from bmoe_lab.comparison.tree import runs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["first_divergence"]


def first_divergence(tree: xr.DataTree) -> pd.DataFrame:
    """Return the first token of each run whose most likely token is not the lossless one.

    The scored tokens are taken in the order decoded, text window after text window. A run diverges
    at the first one where the most likely token under its distribution, the one that predicts this
    token, differs from the most likely token under the lossless distribution (``top1_agree`` is 0;
    ties go to the lower id). Both runs read the same text, so they go on from there alike: greedy
    generation would not.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned; reads ``top1_agree`` and ``kl`` of the runs.

    Returns
    -------
    pandas.DataFrame
        One row per run, in the order they ran; index ``arm_name``. ``token`` (place along the
        trace), ``n_before`` (scored tokens before it), ``window`` and ``position`` (Int64),
        ``piece`` (string), ``kl`` (float64, nat): missing if the run never diverges, or was not
        compared. ``n_compared`` (int64) tells these apart: 0 for the lossless run.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.

    See Also
    --------
    bmoe_lab.plots.plot_divergence_along_text : Marks these tokens.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> text = bl.datasets.heldout("kjv")[0].text[:200]
    >>> with bl.Session(bl.datasets.demo_model(), cache="4 MiB", n_threads=1) as session:
    ...     tree = bl.compare(session, text, policies=[], progress=False)
    >>> first_divergence(tree)["token"].isna().tolist()
    [True, True]
    """
    import pandas as pd

    named = runs(tree)
    rows = [_row(trace) for _, trace in named]
    index = pd.Index([name for name, _ in named], name="arm_name")
    frame = pd.DataFrame(rows, index=index, columns=["n_compared", *_TYPES])
    return frame.astype({"n_compared": "int64", **_TYPES})


_TYPES = {
    "token": "Int64",
    "n_before": "Int64",
    "window": "Int64",
    "position": "Int64",
    "piece": "string",
    "kl": "float64",
}


def _row(trace: xr.Dataset) -> dict[str, Any]:
    if "top1_agree" not in trace:
        return {"n_compared": 0}
    agrees = trace["top1_agree"].values
    scored = np.flatnonzero(~np.isnan(agrees))
    row: dict[str, Any] = {"n_compared": scored.size}
    differs = np.flatnonzero(agrees[scored] == 0)
    if not differs.size:
        return row
    n_before = int(differs[0])
    token = int(scored[n_before])
    row |= {"token": token, "n_before": n_before}
    row |= {
        name: int(trace[source].values[token])
        for name, source in (("window", "turn"), ("position", "position"))
        if source in trace.coords
    }
    if "piece" in trace.coords:
        row["piece"] = str(trace["piece"].values[token])
    if "kl" in trace:
        row["kl"] = float(trace["kl"].values[token])
    return row
