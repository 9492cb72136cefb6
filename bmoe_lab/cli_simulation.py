"""The commands that need no model: ``replay`` and ``sweep``, thin over the library."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bmoe_lab.sizes import format_size

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["add_commands", "read_trace", "trace_label"]

TraceFile = Annotated[
    Path,
    typer.Argument(
        help="Trace: .nc, .zarr, a journal, .parquet, or a route trace of BigMoeOnEdge (.csv)."
    ),
]
Metrics = Annotated[
    Path | None, typer.Option(help="The per-token CSV beside a route trace of BigMoeOnEdge.")
]
Seed = Annotated[int, typer.Option(help="Of routing policies with random parts.")]

_RESIDENCY = ("lru", "lfu", "s3fifo", "belady")
_ROUTING = "Routing policy, such as 'DropCold(0.5)'"


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(replay)
    app.command()(sweep)


def read_trace(path: Path, metrics: Path | None = None) -> xr.Dataset:
    """Return the trace of a file of any format, told by its suffix.

    Raises
    ------
    SettingsError
        If it is a comparison, or `metrics` is given for another format.
    """
    from bmoe_lab.errors import SettingsError

    if metrics is not None and path.suffix != ".csv":
        raise SettingsError(
            f"metrics must go with a route trace of BigMoeOnEdge (.csv); got {str(path)!r}."
        )
    if path.suffix == ".csv":
        from bmoe_lab.converters import from_bigmoeonedge

        return from_bigmoeonedge(path, metrics=metrics)
    if path.suffix == ".parquet":
        from bmoe_lab.converters import from_parquet

        return from_parquet(path)
    from bmoe_lab.simulation.plan import opened

    return opened(path)


def replay(
    trace: TraceFile,
    residency: Annotated[
        str, typer.Option(help="Residency policy, such as 'lru' or 'LFU(keep_counts=False)'.")
    ] = "lru",
    budget: Annotated[
        str | None, typer.Option(help="Bytes for resident experts, such as '2 GiB'.")
    ] = None,
    routing: Annotated[str | None, typer.Option(help=f"{_ROUTING}.")] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin with an empty cache, however the run began.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Where the replayed trace goes: .nc, .zarr, .parquet, or .csv."),
    ] = None,
    metrics: Metrics = None,
    seed: Seed = 0,
) -> None:
    """Replay a trace under another cache or routing policy; print what it finds and reads."""
    from bmoe_lab import cli
    from bmoe_lab.policy_text import parse_residency, parse_routing
    from bmoe_lab.simulation.replaying import RECORDED
    from bmoe_lab.simulation.replaying import replay as run_replay

    write = None if save is None else _trace_writer(save)
    cache = residency if residency == RECORDED else parse_residency(residency)
    policy = None if routing is None else parse_routing(routing)
    with _warnings_as_lines():
        result = run_replay(
            read_trace(trace, metrics),
            residency=cache,
            routing=policy,
            budget=_size(budget),
            start="cold" if cold else "recorded",
            seed=seed,
        )
    cli.console.print(_replayed(result), markup=False, highlight=False)
    cli.console.print(_totals_table(result))
    if result.attrs.get("counterfactual"):
        cli.console.print(
            "counterfactual: what later layers would have chosen is not known", highlight=False
        )
    if write is not None:
        write(result)
        cli.console.print(f"saved to {save}", highlight=False)


def sweep(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces, as for replay; their names are the labels.")
    ],
    residency: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Residency policy; repeat for several. Left out: {', '.join(_RESIDENCY)}."
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Bytes for resident experts; repeat for several. Left out: chosen."),
    ] = None,
    n_budget: Annotated[
        int | None, typer.Option(help="How many budgets to choose; 12 if left out.")
    ] = None,
    routing: Annotated[
        list[str] | None,
        typer.Option(help=f"{_ROUTING}; repeat for several, 'none' for the recorded one."),
    ] = None,
    phase: Annotated[str, typer.Option(help="'decode', 'prefill', 'draft' or 'all'.")] = "decode",
    save: Annotated[
        Path | None, typer.Option(help="Where the figures go: .nc, .parquet or .csv.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Threads; physical cores if left out.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    seed: Seed = 0,
) -> None:
    """Replay traces under many caches, budgets and routing policies; print hit rates."""
    from bmoe_lab import cli
    from bmoe_lab.errors import SettingsError
    from bmoe_lab.policy_text import parse_residency, parse_routing
    from bmoe_lab.residency import names
    from bmoe_lab.simulation.budget_grid import budgets as choose
    from bmoe_lab.simulation.files import check_grid_path, save_grid
    from bmoe_lab.simulation.plan import NO_ROUTING
    from bmoe_lab.simulation.sweeping import sweep as run_sweep

    if save is not None:
        check_grid_path(save)
    sources: dict[str, Any] = {trace_label(path, traces): read_trace(path) for path in traces}
    sizes: Any = [_size(size) for size in budget or ()]
    if sizes and n_budget is not None:
        raise SettingsError(
            f"n_budget must be left out where budgets are given; got {n_budget}. Give one of both."
        )
    if not sizes:
        count = 12 if n_budget is None else n_budget
        sizes = {name: choose(source, count) for name, source in sources.items()}
    with _warnings_as_lines():
        grid = run_sweep(
            sources,
            residency=[
                text if text in names() else parse_residency(text)
                for text in residency or _RESIDENCY
            ],
            budgets=sizes,
            routing=[
                None if text == NO_ROUTING else parse_routing(text)
                for text in routing or [NO_ROUTING]
            ],
            phase=phase,
            progress=not quiet,
            n_jobs=jobs,
            seed=seed,
        )
    for title, table in _grid_tables(grid, phase):
        cli.console.print(title, markup=False, highlight=False)
        cli.console.print(table)
    if save is not None:
        save_grid(grid, save)
        cli.console.print(f"saved to {save}", highlight=False)
    if not grid.attrs["complete"]:
        sys.exit(130)  # as any interrupted program


def trace_label(path: Path, paths: list[Path]) -> str:
    """Return the shortest name that tells a file from the others."""
    stems = [other.name.split(".")[0] for other in paths]
    stem = path.name.split(".")[0]
    return stem if stems.count(stem) == 1 else str(path)


def _size(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdigit() else text


def _trace_writer(path: Path) -> Any:
    """Return a function that writes a trace to `path`; refuse what cannot be before the work."""
    from bmoe_lab.errors import TraceFileError
    from bmoe_lab.recording import save_trace
    from bmoe_lab.recording.store import check_writable

    if path.suffix in (".parquet", ".csv"):
        from bmoe_lab.converters import to_bigmoeonedge, to_parquet

        if not path.parent.is_dir():
            raise TraceFileError(
                f"path must be in a folder that exists; got {str(path)!r}. "
                f"Make {str(path.parent)!r}."
            )
        write = to_parquet if path.suffix == ".parquet" else to_bigmoeonedge
        return lambda trace: write(trace, path)
    if path.suffix not in (".nc", ".zarr"):
        raise TraceFileError(
            "path must end in one of ['.csv', '.nc', '.parquet', '.zarr']; got "
            f"{str(path)!r}. The suffix chooses the format."
        )
    check_writable(path)
    return lambda trace: save_trace(trace, path)


class _warnings_as_lines:
    """Show the package's warnings as one line each on the error stream."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings(record=True)
        self._list = self._caught.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, *exception: Any) -> None:
        from rich.console import Console

        self._caught.__exit__(*exception)
        stream = Console(stderr=True)
        for warning in self._list or ():
            text = str(warning.message)
            stream.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)


def _replayed(result: xr.Dataset) -> str:
    told = json.loads(result.attrs["replay_settings"])
    return ", ".join(told[name] for name in ("residency", "routing") if told[name] is not None)


def _totals_table(result: xr.Dataset) -> Table:
    from bmoe_lab import metrics

    table = Table()
    headings = ("phase", "lookups", "hit rate", "bytes hit", "read", "read/token", "evictions")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    totals = json.loads(result.attrs["replay_totals"])
    for phase, total in totals.items():
        table.add_row(
            phase,
            f"{total['lookups']:,}",
            _percent(float(metrics.hit_rate(result, phase=phase))),
            _percent(float(metrics.byte_hit_rate(result, phase=phase))),
            format_size(total["read_bytes"]),
            format_size(float(metrics.read_bytes_per_token(result, phase=phase))),
            f"{total['evictions']:,}" if "evictions" in total else "–",
        )
    return table


def _grid_tables(grid: xr.Dataset, phase: str) -> list[tuple[str, Table]]:
    from rich.markup import escape

    tables = []
    rates = grid[f"hit_rate_{phase}"]
    for trace in grid["trace"].values.tolist():
        cycle = int(grid["token_cycle_bytes"].sel(trace=trace))
        for routing in grid["routing"].values.tolist():
            part = rates.sel(trace=trace, routing=routing)
            if bool(part.isnull().all()):
                continue
            under = "" if routing == "none" else f", {routing}"
            title = f"{trace}{under}: hit rate ({phase}); token cycle {format_size(cycle)}"
            table = Table()
            table.add_column("budget", justify="right")
            for name in grid["residency"].values.tolist():
                table.add_column(escape(name), justify="right")
            for budget in grid["budget"].values.tolist():
                row = part.sel(budget=budget).values.tolist()
                if all(rate != rate for rate in row):
                    continue  # a budget of other traces
                mark = " = T" if budget == cycle else ""
                table.add_row(format_size(budget) + mark, *map(_percent, row))
            tables.append((title, table))
    return tables


def _percent(rate: float) -> str:
    return "–" if rate != rate else f"{100 * rate:.1f} %"
