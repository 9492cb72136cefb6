"""The command that makes a page of traces: ``report``, thin over the library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bmoe_lab.cli_simulation import trace_label

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["add_report_command"]

_SUFFIXES = (".html", ".htm")


def add_report_command(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(report)


def report(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Traces or comparisons: .nc, .zarr, a journal, .parquet, or a route trace of "
            "BigMoeOnEdge (.csv)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the page goes: .html.")],
    title: Annotated[
        str | None, typer.Option(help="Heading; made from the model's name if left out.")
    ] = None,
) -> None:
    """Write one self-contained page about one or several traces or comparisons."""
    from bmoe_lab import cli
    from bmoe_lab.errors import TraceFileError
    from bmoe_lab.report import write_report

    _check_target(out)
    _check_distinct(traces)
    data = {trace_label(path, traces): _opened(path) for path in traces}
    try:
        write_report(data, out, title=title)
    except TraceFileError:
        raise
    except OSError as error:
        raise TraceFileError(
            f"the page must be written to {str(out)!r}; got {error.strerror or error}. "
            "Free space or choose another target."
        ) from error
    cli.console.print(f"report: {out}", markup=False, highlight=False, soft_wrap=True)


def _opened(path: Path) -> xr.Dataset | xr.DataTree:
    from bmoe_lab.cli_simulation import read_trace
    from bmoe_lab.recording import open_trace

    return read_trace(path) if path.suffix in (".csv", ".parquet") else open_trace(path)


def _check_target(out: Path) -> None:
    """Refuse, before the work, a page that could not be written or would replace a trace."""
    from bmoe_lab.errors import TraceFileError

    if out.suffix.lower() not in _SUFFIXES:
        raise TraceFileError(
            f"out must end in one of {list(_SUFFIXES)}; got {str(out)!r}. Name it 'report.html'."
        )
    if not out.parent.is_dir():
        raise TraceFileError(
            f"out must be in a folder that exists; got {str(out)!r}. Make {str(out.parent)!r}."
        )
    if out.is_dir():
        raise TraceFileError(f"out must be a file; got the folder {str(out)!r}. Choose a name.")


def _check_distinct(traces: list[Path]) -> None:
    from bmoe_lab.errors import SettingsError

    places = [path.resolve() for path in traces]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise SettingsError(
                f"traces must be different files; got {str(traces[number])!r} twice. "
                "Name each once."
            )
