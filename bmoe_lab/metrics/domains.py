"""Which experts a kind of text, or one token id, calls for."""

from __future__ import annotations

import numpy as np
import xarray as xr

from bmoe_lab.errors import SchemaError, SettingsError
from bmoe_lab.metrics._shared import (
    PhaseName,
    Which,
    _coords,
    _experts,
    _labelled,
    _n_expert,
    _phase_rows,
)

__all__ = ["specialisation"]

# A table of every token id by every expert can be larger than memory.
_LARGEST = 2**27


def specialisation(
    trace: xr.Dataset,
    domain: str,
    *,
    which: Which = "chosen",
    phase: PhaseName = "decode",
) -> xr.DataArray:
    """Return the share of each domain's tokens that each expert takes part in.

    By chance it is k/E. A domain of few tokens looks specialised whatever the router does.

    Parameters
    ----------
    trace : xarray.Dataset
        Reads ``expert_chosen`` or ``expert_applied`` of shape (token, layer, slot), ``action``, the
        attribute ``n_expert`` and the variable named by `domain`.
    domain : str
        A variable of shape (token,): ``"turn"``, ``"token_id"`` for specialisation by vocabulary,
        or your own, as in ``trace.assign_coords(domain=("token", names))``.
    which : {"chosen", "applied"}, default "chosen"
        What the router wanted, or what ran (dropped slots left out).
    phase : {"decode", "prefill", "draft", "all"}, default "decode"
        Tokens counted.

    Returns
    -------
    xarray.DataArray
        Shape (<domain>, layer, expert), float64, unit "1"; the values of the domain are its
        coordinate, in sorted order. NaN where a layer routed no token of the domain. Named
        ``specialisation_<phase>``.

    Raises
    ------
    SchemaError
        If there is no such variable over token.
    SettingsError
        If the table would be larger than 1 GiB.

    Notes
    -----
    ``N_(e,D) / N_D``, N_D the tokens of domain D, N_(e,D) those with e among their k; with
    ``"token_id"`` the vocabulary specialisation ``N_(e,x) / N_x``, x the token that is routed, not
    the one that follows. Definition: OLMoE (arXiv 2409.02060).

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> trace = make_trace(n_token=8, n_prefill=0, n_layer=2, n_expert=8, n_used=2, seed=0)
    >>> table = specialisation(trace.assign_coords(domain=("token", list("aaaabbbb"))), "domain")
    >>> dict(table.sizes), table.sum("expert").values.round(9)[0]
    ({'domain': 2, 'layer': 2, 'expert': 8}, array([2., 2.]))
    """
    if domain not in trace.variables or trace[domain].dims != ("token",):
        known = sorted(str(name) for name, v in trace.variables.items() if v.dims == ("token",))
        raise SchemaError(
            f"domain must name a variable of shape (token,); got {domain!r}. Known: {known}. "
            "Add one with trace.assign_coords(domain=('token', values))."
        )
    rows = _phase_rows(trace, phase)
    names, index = np.unique(trace[domain].values[rows], return_inverse=True)
    expert = _experts(trace, which)[rows]
    n_layer, n_expert = expert.shape[1], _n_expert(trace)
    cells = names.size * n_layer * n_expert
    if cells > _LARGEST:
        raise SettingsError(
            f"domain must give a table of at most 1 GiB; got {names.size} values of {domain!r}, "
            f"{cells * 8 / 2**30:.1f} GiB. Cut the trace to the tokens or layers of interest."
        )
    group = index[:, None] * n_layer + np.arange(n_layer)
    routed = (expert >= 0).any(axis=-1)
    tokens = np.bincount(group[routed], minlength=names.size * n_layer)
    key = group[..., None] * n_expert + expert
    count = np.bincount(key[expert >= 0], minlength=cells).reshape(-1, n_expert)
    share = count / np.where(tokens > 0, tokens, np.nan)[:, None]
    return _labelled(
        share.reshape(names.size, n_layer, n_expert),
        (domain, "layer", "expert"),
        {domain: names, **_coords(trace, ("layer",))},
        phase,
        "specialisation",
        f"share of the tokens of each {domain} that the expert takes part in ({which})",
    )
