"""One self-contained HTML page about a trace or a comparison.

plotly.js is embedded once, so the page works offline and can be mailed. Everything that comes from
a trace (texts, policy reprs, model names) is escaped.
"""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from bmoe_lab import tables
from bmoe_lab._version import __version__
from bmoe_lab.comparison.tree import is_comparison, runs
from bmoe_lab.errors import SchemaError
from bmoe_lab.schema import Action, Phase, is_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from bmoe_lab.metrics._shared import PhaseName

__all__ = ["report_html", "write_report"]

_FACTS = (
    ("model_name", "model"),
    ("arch", "architecture"),
    ("model_bytes", "model size"),
    ("model_fingerprint", "fingerprint (SHA-256)"),
    ("n_expert", "experts per layer"),
    ("residency_policy", "residency policy"),
    ("cache_budget_bytes", "cache budget"),
    ("cache_start", "cache at the start"),
    ("policy", "routing policy"),
    ("source", "source"),
    ("record", "record level"),
    ("seed", "seed"),
    ("start_time", "started"),
    ("machine", "machine"),
    ("bmoe_lab_version", "bmoe_lab"),
    ("llama_cpp_python_version", "llama-cpp-python"),
    ("llama_cpp_commit", "llama.cpp commit"),
    ("session_settings", "session"),
    ("run_settings", "run"),
)

# plotly.js takes 4.8 MB of the 6 MB that a page may have; hover text about 100 bytes per cell.
_HOVER_CELLS = 5000

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1240px; padding: 24px;
  background: light-dark(#fff, #14171a); color: light-dark(#1c2024, #d5d9de); }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 6px 0; } .note { color: light-dark(#5c636b, #9aa1a9); max-width: 75ch; }
.mark { display: inline-block; padding: 1px 8px; border-radius: 9px; font-size: 13px;
  border: 1px solid currentColor; margin-right: 6px; }
.lossy { color: #d55e00; } .lossless { color: light-dark(#00684a, #35b98b); }
.warning { border-left: 4px solid #d55e00; padding: 4px 12px; margin: 8px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding: 8px 0;
  color: light-dark(#5c636b, #9aa1a9); }
th, td { padding: 4px 8px; text-align: right; vertical-align: top;
  border-bottom: 1px solid light-dark(#e3e6e9, #2c3238); white-space: nowrap; }
th:first-child, .facts th, .facts td { text-align: left; white-space: normal; }
tbody th { font-weight: 500; } tr.lossless th { font-weight: 700; }
tr.control, tr.noise-floor { color: light-dark(#5c636b, #9aa1a9); }
tr.never-fired { color: #d55e00; }
.facts td { overflow-wrap: anywhere; }
""".strip()


def write_report(
    data: xr.Dataset | xr.DataTree, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Write one self-contained HTML page with interactive figures.

    Parameters
    ----------
    data : xarray.Dataset or xarray.DataTree
        A trace, or what :func:`bmoe_lab.compare` returned.
    path : str or Path
        Where the page goes; written aside, then renamed.
    title : str, optional
        Heading; made from the model's name if left out.

    Returns
    -------
    pathlib.Path
        Where the page is.

    Raises
    ------
    SchemaError
        If `data` is neither a trace nor a comparison.
    OSError
        If the page cannot be written.
    """
    page = report_html(data, title=title)
    target = Path(os.fspath(path)).expanduser()
    handle, aside = tempfile.mkstemp(dir=target.absolute().parent, suffix=".html.part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        # mkstemp makes the file private; a report is made to be shared.
        umask = os.umask(0)
        os.umask(umask)
        Path(aside).chmod(0o666 & ~umask)
        Path(aside).replace(target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    return target


def report_html(data: xr.Dataset | xr.DataTree, *, title: str | None = None) -> str:
    """Return the page of :func:`write_report` as text.

    Parameters
    ----------
    data : xarray.Dataset or xarray.DataTree
        A trace, or a comparison.
    title : str, optional
        Heading.

    Raises
    ------
    SchemaError
        If `data` is neither a trace nor a comparison.
    """
    if isinstance(data, xr.DataTree) and is_comparison(data):
        body = _comparison_body(data)
        heading = f"Routing policies against lossless: {data.attrs.get('model_name', 'model')}"
    elif isinstance(data, xr.Dataset) and is_trace(data):
        body = _trace_body(data)
        heading = f"Expert routing: {data.attrs.get('model_name', 'model')}"
    else:
        raise SchemaError(
            f"data must be a trace or a comparison; got {type(data).__name__}. Pass a Dataset "
            "from open_trace, or what compare returned."
        )
    return _page(heading if title is None else title, body)


def _comparison_body(tree: xr.DataTree) -> str:
    from bmoe_lab import plots

    named = runs(tree)
    traces = dict(named)
    base_name, base = named[0]
    complete = int(tree.attrs.get("complete", 1))
    parts = [
        "<p>",
        *(_mark(name, trace) for name, trace in traces.items()),
        "</p>",
        *(_warning(text) for text in _warnings(tree)),
    ]
    if not complete:
        parts.append(_warning(f"Not all runs finished: stopped in {tree.attrs.get('failed_arm')}."))
    figures = _Figures()
    parts += [
        "<h2>Results</h2>",
        f'<div class="scroll">{tables.comparison_html(tree)}</div>',
        *(f"<p>{html.escape(line)}</p>" for line in tables.control_lines(tree)),
        _section(
            "Quality against bytes",
            "Down and to the left is better. A control changes as many slots as its policy, but at "
            "random: the distance between them is what the policy's choice of slots is worth.",
            figures.add(lambda: plots.plot_quality_vs_bytes(tree)),
        ),
        _section(
            "Along the text",
            "Above zero the run predicts the text worse than lossless.",
            figures.add(lambda: plots.plot_nll_along_text(tree)),
        ),
        _section(
            "Hit rate per layer",
            "Dropped slots ask for nothing, so dropping misses raises this rate by itself: the "
            "bytes above are what was saved.",
            figures.add(lambda: plots.plot_hit_rate(tree)),
        ),
        "<h2>Routing</h2>",
        f'<p class="note">Of the run {html.escape(base_name)}: what it missed, and how its '
        "layers spread their routings over the experts.</p>",
        figures.add(lambda: plots.plot_heatmap(base, max_hover_cells=_HOVER_CELLS)),
        figures.add(lambda: plots.plot_expert_load(base)),
    ]
    # Each run has its own policy; the marks above name them.
    shared = {key: value for key, value in base.attrs.items() if key != "policy"}
    kinds = [str(kind) for kind in tree.to_dataset()["arm_kind"].values]
    for (name, trace), kind in zip(named, kinds, strict=True):
        if kind == "policy":
            parts.append(f'<p class="note">{html.escape(name)}: where it changed the routing.</p>')
            parts.append(
                figures.add(partial(plots.plot_heatmap, trace, value="changed", max_hover_cells=0))
            )
    parts += ["<h2>Settings</h2>", _facts(shared | tree.attrs)]
    return "\n".join(parts)


def _trace_body(trace: xr.Dataset) -> str:
    from bmoe_lab import plots

    figures = _Figures()
    # Prefill and decode do not share a number: decode if there is any.
    phase: PhaseName = "decode" if (trace["phase"].values == Phase.decode).any() else "prefill"
    changed = np.isin(trace["action"].values, (Action.dropped, Action.substituted)).any()
    parts = ["<p>", _mark(str(trace.attrs.get("policy", "trace")), trace), "</p>"]
    if not int(trace.attrs.get("complete", 1)):
        parts.append(_warning("The run is incomplete: it was interrupted, failed or killed."))
    if "residency" in trace:
        parts += [
            "<h2>What it missed</h2>",
            figures.add(lambda: plots.plot_heatmap(trace, max_hover_cells=_HOVER_CELLS)),
            "<h2>Hit rate per layer</h2>",
            figures.add(lambda: plots.plot_hit_rate(trace, phase=phase)),
        ]
    if changed:
        parts += [
            "<h2>What the policy changed</h2>",
            figures.add(partial(plots.plot_heatmap, trace, value="changed", max_hover_cells=0)),
        ]
    parts += [
        "<h2>Which experts it used</h2>",
        figures.add(lambda: plots.plot_expert_load(trace, phase=phase)),
        "<h2>Settings</h2>",
        _facts(trace.attrs),
    ]
    return "\n".join(parts)


class _Figures:
    """Turns figures into page fragments with predictable ids."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, draw: Callable[[], go.Figure]) -> str:
        import plotly.io

        self.n += 1
        fragment: str = plotly.io.to_html(
            draw(),
            full_html=False,
            include_plotlyjs=False,
            div_id=f"figure-{self.n}",
            config={"responsive": True, "displaylogo": False},
        )
        return fragment


def _page(heading: str, body: str) -> str:
    from plotly.offline import get_plotlyjs

    title = html.escape(heading)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # An empty icon: otherwise a browser asks the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
        f'<p class="note">Made by bmoe_lab {html.escape(__version__)}.</p>\n</body>\n</html>\n'
    )


def _section(heading: str, note: str, figure: str) -> str:
    return f'<h2>{heading}</h2>\n<p class="note">{note}</p>\n{figure}'


def _mark(name: str, trace: xr.Dataset) -> str:
    # Absent in what was imported: neither claimed to be lossless nor to be lossy.
    word = {1: "lossless", 0: "lossy"}.get(trace.attrs.get("lossless", -1), "policy unknown")
    text = name if name.startswith(word) else f"{word}: {name}"
    if int(trace.attrs.get("counterfactual", 0)):
        text += " (counterfactual)"
    return f'<span class="mark {word.split()[-1]}">{html.escape(text)}</span>'


def _warning(text: str) -> str:
    return f'<p class="warning">{html.escape(text)}</p>'


def _warnings(tree: xr.DataTree) -> list[str]:
    return [str(text) for text in json.loads(tree.attrs.get("warnings", "[]"))]


def _facts(attrs: dict[Any, Any]) -> str:
    rows = []
    for key, label in _FACTS:
        if key in attrs:
            rows.append(f"<tr><th>{label}</th><td>{html.escape(_fact(key, attrs[key]))}</td></tr>")
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def _fact(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        from bmoe_lab.sizes import format_size

        return f"{format_size(int(value))} ({int(value)} bytes)"
    text = str(value)
    if text.startswith("{"):
        try:
            settings = json.loads(text)
        except ValueError:
            return text
        return ", ".join(f"{name} = {item}" for name, item in settings.items())
    return text
