"""A comparison to walk through: where along the text a policy differs, and what it did there."""

from __future__ import annotations

import json
import math
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import traitlets
import xarray as xr

from bmoe_lab import tables
from bmoe_lab.comparison.first_divergence import first_divergence
from bmoe_lab.comparison.token_detail import TokenDetail, token_detail
from bmoe_lab.comparison.tree import is_comparison, runs
from bmoe_lab.errors import SchemaError, unknown_name
from bmoe_lab.plots.divergence_along_text import VALUES, plot_divergence_along_text
from bmoe_lab.plots.quality_vs_bytes import plot_quality_vs_bytes
from bmoe_lab.plots.token_text import plot_token_text
from bmoe_lab.plots.windows import window_of
from bmoe_lab.widgets.controls import ROW
from bmoe_lab.widgets.drawing import Drawing
from bmoe_lab.widgets.html_table import html_table

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["CompareView"]

_STATE = ["arm", "value", "window", "tokens", "token"]
_WIDE = {"description_width": "initial"}

#: Tokens of the coloured text; more would push what follows out of sight.
_MAX_TEXT = 240


class CompareView(ipywidgets.VBox):
    """Walk through a comparison: what a policy cost, where, and what it changed there.

    The divergence along the text, the text coloured by it, quality against bytes, the table of all
    runs. Zooming into the line shows that part of the text; a click on either selects a token.
    Everything is a trait: it can be driven, and read, without a browser.

    Parameters
    ----------
    tree : xarray.DataTree
        What :func:`bmoe_lab.compare` returned, or :func:`bmoe_lab.open_trace` read of it.

    Attributes
    ----------
    arm : str or None
        The run looked at, by its name in ``tree.children``; None if lossless ran alone.
    value : {"kl", "delta_nll", "top1_agree", "routing_agreement"}
    window : int
        Tokens of the moving average of the line.
    tokens : tuple of int
        Part of the text as (first, stop).
    token : int or None
        The token of the panel.

    Raises
    ------
    SchemaError
        If `tree` is no comparison: replays have no quality, only the model tells it.
    UnknownNameError
        If `arm` or `value` is set to what there is not.

    Examples
    --------
    >>> import bmoe_lab as bl
    >>> text = bl.datasets.heldout("kjv")[0].text[:200]
    >>> with bl.Session(bl.datasets.demo_model(), cache="2 MiB", n_threads=1) as session:
    ...     tree = bl.compare(
    ...         session, text, policies=[bl.routing.DropCold(0.75)], progress=False
    ...     )
    >>> view = CompareView(tree)
    >>> view.token = 30
    >>> view.arm, set(view.detail.changes["action"])
    ('DropCold(frac=0.75)', {'dropped'})
    """

    arm = traitlets.Unicode(None, allow_none=True)
    value = traitlets.Unicode("kl")
    window = traitlets.Int(16, min=1)
    tokens = traitlets.Any((0, 0))
    token = traitlets.Int(None, allow_none=True)

    def __init__(self, tree: xr.DataTree) -> None:
        if not is_comparison(tree):
            raise SchemaError(
                f"tree must be a comparison, with the loss of every run; got "
                f"{type(tree).__name__}. Replays know no loss: run the settings live, or pass what "
                "bmoe_lab.compare returned."
            )
        self._tree = tree
        self._runs = {
            node: trace for node, (_, trace) in zip(tree.children, runs(tree), strict=True)
        }
        self._base = next(iter(self._runs.values()))
        kinds = [str(kind) for kind in tree.to_dataset()["arm_kind"].values]
        self._arms = [
            node
            for node, kind in zip(self._runs, kinds, strict=True)
            if kind in ("policy", "control")
        ]
        self.line, self.text, self.quality = Drawing(), Drawing(), Drawing()
        self._panel = ipywidgets.HTML()
        self._ready = False
        super().__init__()
        self.arm = next(iter(self._arms), None)
        self.tokens = (0, int(self._base.sizes["token"]))
        self.children = [
            ipywidgets.HTML(self._heading()),
            *self._controls(),
            self.line.view,
            self.text.view,
            self._panel,
            self.quality.view,
            ipywidgets.HTML(self._table_html()),
        ]
        self.line.view.observe(self._zoomed, "view")
        self.line.view.observe(self._pointed, "clicked")
        self.text.view.observe(self._read, "clicked")
        self._ready = True
        self.observe(lambda change: self._refresh(), _STATE)
        self._refresh()

    # -- what can be read ----------------------------------------------------------------------

    @property
    def table(self) -> pd.DataFrame:
        """One row per run (:func:`bmoe_lab.tables.comparison_frame`)."""
        return tables.comparison_frame(self._tree)

    @property
    def first_divergence(self) -> pd.DataFrame:
        """Where each run first differs (:func:`bmoe_lab.comparison.first_divergence`)."""
        return first_divergence(self._tree)

    @property
    def detail(self) -> TokenDetail | None:
        """What the run did at :attr:`token`; None without a token or a run."""
        if self.arm is None or self.token is None:
            return None
        return token_detail(self._tree, self.arm, self.token)

    # -- layout --------------------------------------------------------------------------------

    def _controls(self) -> list[Any]:
        arm = ipywidgets.Dropdown(
            options=self._arms, description="run", style=_WIDE, disabled=not self._arms
        )
        value = ipywidgets.Dropdown(
            options=[(view.label, name) for name, view in VALUES.items()],
            description="difference",
            style=_WIDE,
        )
        window = ipywidgets.IntSlider(
            min=1, max=64, value=self.window, description="average over", style=_WIDE,
            tooltip="tokens of the moving average; 1 shows every token",
        )  # fmt: skip
        last = max(0, int(self._base.sizes["token"]) - 1)
        tokens = ipywidgets.IntRangeSlider(
            min=0, max=last, value=(0, last), description="tokens", style=_WIDE, disabled=last < 1,
            tooltip="first and last token of the text; arrow keys move one end",
            layout=ipywidgets.Layout(width="430px"),
        )  # fmt: skip
        if self._arms:
            traitlets.link((self, "arm"), (arm, "value"))
        traitlets.link((self, "value"), (value, "value"))
        window.observe(lambda change: self.set_trait("window", change.new), "value")
        # Not a link: code may ask for more than the slider's 64.
        self.observe(lambda change: window.set_trait("value", min(change.new, 64)), "window")
        tokens.observe(
            lambda change: setattr(self, "tokens", (change.new[0], change.new[1] + 1)), "value"
        )
        self.observe(
            lambda change: tokens.set_trait("value", (change.new[0], change.new[1] - 1)), "tokens"
        )
        return [
            ipywidgets.HBox([arm, value], layout=ROW),
            ipywidgets.HBox([window, tokens], layout=ROW),
        ]

    def _heading(self) -> str:
        attrs = self._tree.attrs
        lines = [
            f"<b>Comparison: {escape(str(attrs.get('model_name', 'model')))}</b>, "
            f"{len(self._runs)} runs of {self._base.sizes['token']} tokens"
        ]
        if not int(attrs.get("complete", 1)):
            lines.append(f"Not all runs finished: {escape(str(attrs.get('failed_arm', '')))}")
        if not self._arms:
            lines.append("No policy was compared: there is only the lossless run.")
        lines += [escape(str(text)) for text in json.loads(attrs.get("warnings", "[]"))]
        return "<br>".join(lines)

    def _table_html(self) -> str:
        lines = "".join(f"<p>{escape(line)}</p>" for line in tables.control_lines(self._tree))
        table = tables.comparison_html(self._tree)
        return f"<div style='overflow-x:auto;max-width:100%'>{table}</div>{lines}"

    # -- what may be set -----------------------------------------------------------------------

    @traitlets.validate("arm")
    def _check_arm(self, proposal: Any) -> Any:
        if proposal["value"] is not None and proposal["value"] not in self._arms:
            raise unknown_name("arm", proposal["value"], self._arms)
        return proposal["value"] if self._arms else None

    @traitlets.validate("value")
    def _check_value(self, proposal: Any) -> Any:
        if proposal["value"] not in VALUES:
            raise unknown_name("value", proposal["value"], VALUES)
        return proposal["value"]

    @traitlets.validate("tokens")
    def _check_tokens(self, proposal: Any) -> Any:
        return window_of(self._base, "token", proposal["value"])

    @traitlets.validate("token")
    def _check_token(self, proposal: Any) -> Any:
        token, size = proposal["value"], int(self._base.sizes["token"])
        if token is not None and not 0 <= token < size:
            raise traitlets.TraitError(f"token must be from 0 to {size - 1}; got {token}.")
        return token

    # -- what a person does --------------------------------------------------------------------

    def _zoomed(self, change: Any) -> None:
        if "xaxis" not in change.new:
            return
        ends = change.new["xaxis"]
        # A page repeats the axes zoomed before; once read, they must not come again.
        self.line.view.view = {}
        size = int(self._base.sizes["token"])
        if ends is None:
            self.tokens = (0, size)
            return
        first = min(max(0, math.ceil(min(ends))), size - 1)
        self.tokens = (first, min(max(first + 1, math.floor(max(ends)) + 1), size))

    def _pointed(self, change: Any) -> None:
        x = change.new.get("x")
        if x is not None and self.line.figure is not None:
            self.token = min(max(0, round(x)), int(self._base.sizes["token"]) - 1)

    def _read(self, change: Any) -> None:
        token = change.new.get("data")
        if token is not None and self.text.figure is not None:
            self.token = int(token)

    # -- what is shown -------------------------------------------------------------------------

    def _refresh(self) -> None:
        if not self._ready:
            return
        self.line.update((self.arm, self.value, self.window, self.tokens), self._line)
        self.text.update((self.arm, self.value, self.tokens), self._text)
        self.quality.update("all", lambda: plot_quality_vs_bytes(self._tree))
        self._panel.value = self._detail_html()

    def _line(self) -> go.Figure:
        figure = plot_divergence_along_text(
            self._tree,
            value=self.value,  # type: ignore[arg-type]  # checked where it was set
            window=self.window,
            arm=self.arm,
        )
        first, stop = self.tokens
        return figure.update_xaxes(range=[first - 0.5, stop - 0.5])

    def _text(self) -> go.Figure:
        trace = self._base if self.arm is None else self._runs[self.arm]
        value = "nll" if self.arm is None else self.value
        if value == "delta_nll":
            trace = trace.assign(delta_nll=trace["nll"] - self._base["nll"])
        return plot_token_text(trace, value=value, tokens=self.tokens, max_tokens=_MAX_TEXT)

    def _detail_html(self) -> str:
        detail = self.detail
        if detail is None:
            return (
                "<span style='opacity:0.75'>Click the line or a token of the text: what the run "
                "changed there is shown here.</span>"
            )
        piece = "" if detail.piece is None else f" ‘{escape(detail.piece)}’"
        facts = [
            ("KL from lossless", _nat(detail.kl)),
            ("loss, lossless", _nat(detail.nll_lossless)),
            ("loss, this run", _nat(detail.nll)),
            ("difference", _nat(detail.delta_nll, sign=True)),
            (
                "same most likely token",
                "–" if detail.top1_agree is None else "yes" if detail.top1_agree else "no",
            ),
            ("bytes read, lossless", _whole(detail.read_bytes_lossless)),
            ("bytes read, this run", _whole(detail.read_bytes)),
        ]
        parts = [
            f"<b>token {detail.token}{piece}</b>, position {detail.position}, text window "
            f"{detail.window}" + ("" if detail.scored else ", not scored"),
            html_table([name for name, _ in facts], [[shown for _, shown in facts]]),
        ]
        if len(detail.changes):
            parts += [
                f"{len(detail.changes)} slots changed by the policy:",
                html_table(
                    [str(name).replace("_", " ") for name in detail.changes.columns],
                    [[_cell(value) for value in row] for row in detail.changes.values.tolist()],
                ),
            ]
        else:
            parts.append("The policy changed nothing at this token.")
        rows = detail.routing.to_dict("records")
        moved = [row for row in rows if row["agreement"] < 1]
        if moved:
            parts += [
                f"{len(moved)} of {len(rows)} layers ran other experts than lossless:",
                html_table(
                    ["layer", "shared", "only lossless", "only here"],
                    [
                        [
                            str(row["layer"]),
                            f"{100 * row['agreement']:.0f} %",
                            _ids(row["lost"]),
                            _ids(row["gained"]),
                        ]
                        for row in moved
                    ],
                ),
            ]
        return "<br>".join(parts)

    def __repr__(self) -> str:
        return f"<CompareView: {len(self._runs)} runs x {self._base.sizes['token']} tokens>"


def _nat(value: float, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:+.4f} nat" if sign else f"{value:.4f} nat"


def _whole(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def _ids(experts: Any) -> str:
    return ", ".join(map(str, experts)) or "none"
