"""Where in the text a policy costs quality."""

from __future__ import annotations

import plotly.graph_objects as go
import xarray as xr

from bmoe_lab.plots.divergence_along_text import plot_divergence_along_text

__all__ = ["plot_nll_along_text"]


def plot_nll_along_text(tree: xr.DataTree, *, window: int = 16) -> go.Figure:
    """Return the loss of each run less that of the lossless one, along the text.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned.
    window : int, default 16
        Tokens of the moving average; 1 shows every token. Averages do not cross text windows.

    Returns
    -------
    plotly.graph_objects.Figure
        Above zero the policy is worse. One line per run, with gaps between text windows.

    Raises
    ------
    SchemaError
        If the tree is not a comparison.
    SettingsError
        If `window` is less than 1.

    See Also
    --------
    plot_divergence_along_text : The same for KL and agreement; this is ``value="delta_nll"``.
    """
    return plot_divergence_along_text(tree, value="delta_nll", window=window)
