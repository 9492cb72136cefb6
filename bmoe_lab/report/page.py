"""The page itself: what goes on it, in which order, and how it reaches the disk."""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import xarray as xr

from bmoe_lab._version import __version__
from bmoe_lab.comparison.tree import is_comparison
from bmoe_lab.errors import SchemaError
from bmoe_lab.report.comparison import comparison_body
from bmoe_lab.report.figures import Figures
from bmoe_lab.report.overview import overview_html
from bmoe_lab.report.trace import trace_body
from bmoe_lab.schema import is_trace

__all__ = ["report_html", "write_report"]

Reported: TypeAlias = xr.Dataset | xr.DataTree

# Hover text takes about 100 bytes per cell; a page has so many such cells, however many traces.
_HOVER_CELLS = 5000

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1240px; padding: 24px;
  background: light-dark(#fff, #14171a); color: light-dark(#1c2024, #d5d9de); }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
h3 { font-size: 16px; margin: 28px 0 4px; }
h2.part { font-size: 21px; margin-top: 56px; padding-top: 16px;
  border-top: 2px solid light-dark(#c9ced3, #3a4148); }
p { margin: 6px 0; } .note { color: light-dark(#5c636b, #9aa1a9); max-width: 75ch; }
.mark { display: inline-block; padding: 1px 8px; border-radius: 9px; font-size: 13px;
  border: 1px solid currentColor; margin-right: 6px; }
.lossy { color: #d55e00; } .lossless { color: light-dark(#00684a, #35b98b); }
.warning { border-left: 4px solid #d55e00; padding: 4px 12px; margin: 8px 0; }
.instead { border: 1px dashed light-dark(#c9ced3, #3a4148); padding: 10px 14px; max-width: 75ch;
  color: light-dark(#5c636b, #9aa1a9); overflow-wrap: anywhere; }
a { color: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding: 8px 0;
  color: light-dark(#5c636b, #9aa1a9); }
th, td { padding: 4px 8px; text-align: right; vertical-align: top;
  border-bottom: 1px solid light-dark(#e3e6e9, #2c3238); white-space: nowrap; }
th:first-child, .facts th, .facts td { text-align: left; white-space: normal; }
.overview td:nth-child(2), .overview th:nth-child(2) { text-align: left; white-space: normal; }
tbody th { font-weight: 500; } tr.lossless th { font-weight: 700; }
tr.control, tr.noise-floor { color: light-dark(#5c636b, #9aa1a9); }
tr.never-fired { color: #d55e00; }
.facts th { white-space: nowrap; } .facts td { overflow-wrap: anywhere; }
""".strip()


def write_report(
    data: Reported | Sequence[Reported] | Mapping[str, Reported],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Write one self-contained HTML page with interactive figures.

    Parameters
    ----------
    data : xarray.Dataset or xarray.DataTree, or a sequence or mapping of them
        A trace, or what :func:`bmoe_lab.compare` returned. Of several a table compares them first;
        the keys of a mapping are their names.
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
        If something of `data` is neither a trace nor a comparison, or there is nothing.
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


def report_html(
    data: Reported | Sequence[Reported] | Mapping[str, Reported], *, title: str | None = None
) -> str:
    """Return the page of :func:`write_report` as text.

    Parameters
    ----------
    data : xarray.Dataset or xarray.DataTree, or a sequence or mapping of them
        Traces and comparisons.
    title : str, optional
        Heading.

    Raises
    ------
    SchemaError
        If something of `data` is neither a trace nor a comparison, or there is nothing.

    Examples
    --------
    >>> from bmoe_lab.testing import make_trace
    >>> pair = {"one": make_trace(20, seed=0), "two": make_trace(20, seed=1)}
    >>> page = report_html(pair)
    >>> page.count('<h2 class="part"')
    2
    """
    if isinstance(data, xr.Dataset | xr.DataTree):
        figures = Figures(hover_cells=_HOVER_CELLS)
        return _page(title or _heading(data, "data"), _body(data, figures))
    named = _named(data)
    if not named:
        raise SchemaError("data must hold at least one trace or comparison; got none.")
    headings = [_heading(one, f"data[{name!r}]") for name, one in named.items()]
    if len(named) == 1:
        return report_html(next(iter(named.values())), title=title)
    figures = Figures(level=3, hover_cells=_HOVER_CELLS // len(named))
    parts = [overview_html(named)]
    for number, ((name, one), heading) in enumerate(
        zip(named.items(), headings, strict=True), start=1
    ):
        parts += [
            f'<h2 class="part" id="part-{number}">{html.escape(name)}</h2>',
            f'<p class="note">{html.escape(heading)}</p>',
            _body(one, figures),
        ]
    return _page(title or f"Expert routing: {len(named)} traces", "\n".join(parts))


def _named(data: Sequence[Reported] | Mapping[str, Reported]) -> dict[str, Reported]:
    if isinstance(data, Mapping):
        return {str(name): one for name, one in data.items()}
    if not isinstance(data, list | tuple):
        raise _not_reported(data, "data")
    return {f"trace {number}": one for number, one in enumerate(data, start=1)}


def _heading(one: Reported, what: str) -> str:
    if isinstance(one, xr.DataTree) and is_comparison(one):
        return f"Routing policies against lossless: {one.attrs.get('model_name', 'model')}"
    if isinstance(one, xr.Dataset) and is_trace(one):
        return f"Expert routing: {one.attrs.get('model_name', 'model')}"
    raise _not_reported(one, what)


def _not_reported(given: object, what: str) -> SchemaError:
    return SchemaError(
        f"{what} must be a trace or a comparison; got {type(given).__name__}. Pass a Dataset "
        "from open_trace, or what compare returned."
    )


def _body(one: Reported, figures: Figures) -> str:
    return (
        comparison_body(one, figures) if isinstance(one, xr.DataTree) else trace_body(one, figures)
    )


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
