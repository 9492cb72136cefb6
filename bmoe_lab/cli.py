"""The command line: thin commands over the library."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bmoe_lab._version import __version__
from bmoe_lab.cli_report import add_report_command
from bmoe_lab.cli_simulation import add_commands
from bmoe_lab.errors import BmoeLabError
from bmoe_lab.sizes import format_size

if TYPE_CHECKING:
    from bmoe_lab.session import Session

__all__ = ["app", "main"]

app = typer.Typer(
    name="bmoe-lab",
    help="Mixture-of-Experts routing on llama.cpp: stream, record, change, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[Path, typer.Argument(help="GGUF file; the first one of a split model.")]
Cache = Annotated[str, typer.Option(help="Bytes for resident experts: '2 GiB', 0, or 'auto'.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads; physical cores if left out.")]
Lanes = Annotated[int, typer.Option(help="Reads in flight.")]
Context = Annotated[int | None, typer.Option(help="Positions of the context.")]
Dense = Annotated[str, typer.Option(help="Weights that are not experts: 'mmap' or 'anon'.")]
Direct = Annotated[bool, typer.Option(help="Read past the page cache.")]
Policy = Annotated[str | None, typer.Option(help="Routing policy, such as 'DropCold(0.75)'.")]
Record = Annotated[str, typer.Option(help="'ids', 'scores', 'scores16', or 'off'.")]
Seed = Annotated[int, typer.Option(help="Of sampling and random policies.")]


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app(standalone_mode=False)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)
    except BmoeLabError as error:
        # One line, however narrow the terminal: programs read it too.
        Console(stderr=True).print(
            f"[bold red]error:[/] {_plain(error)}", highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except BrokenPipeError:
        # The reader of a pipe went away; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # typer's own usage errors know how to show themselves.
        if hasattr(error, "exit_code") and hasattr(error, "show"):
            error.show()
            sys.exit(error.exit_code)
        raise


def _plain(error: object) -> str:
    from rich.markup import escape

    return escape(str(error))


def _version(value: bool) -> None:
    if value:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Mixture-of-Experts routing on llama.cpp: stream, record, change, compare."""


def _session(model: Path, **settings: Any) -> Session:
    from bmoe_lab.session import Session

    cache = settings.pop("cache")
    if cache.isdigit():
        cache = int(cache)
    return Session(model, cache=cache, **settings)


def _text(text: str | None, file: Path | None) -> str:
    from bmoe_lab.errors import SettingsError

    if (text is None) == (file is None):
        given = "neither" if text is None else "both"
        raise SettingsError(f"text must be given by one of --text and --file; got {given}.")
    if text is not None:
        return text
    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"file must be readable UTF-8 text; got {file}: {error}.") from error


def _rows(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(_plain(label), _plain(value))
    console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for traces and report.")] = Path("traces/demo"),
    seed: Seed = 0,
) -> None:
    """Stream the bundled model, price four policies against lossless, write a report."""
    from bmoe_lab.demo import run_demo

    run_demo(out, console=console, seed=seed)


@app.command()
def record(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    save: Annotated[Path, typer.Option(help="Where the trace goes: .nc or .zarr.")],
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens to generate.")] = 64,
    policy: Policy = None,
    level: Annotated[str, typer.Option("--record", help="'ids', 'scores' or 'scores16'.")] = "ids",
    cache: Cache = "auto",
    threads: Threads = None,
    lanes: Lanes = 4,
    n_ctx: Context = None,
    dense: Dense = "mmap",
    direct: Direct = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Seed = 0,
) -> None:
    """Generate text and save its routing trace."""
    from bmoe_lab.policy_text import parse_routing

    chosen = parse_routing(policy) if policy else None
    with _session(
        model,
        cache=cache,
        n_threads=threads,
        io_lanes=lanes,
        n_ctx=n_ctx,
        dense=dense,
        direct=direct,
    ) as session:
        run = session.generate(
            prompt,
            n_predict=n_predict,
            policy=chosen,
            record=level,  # type: ignore[arg-type]  # checked by the session
            save=save,
            temperature=temperature,
            seed=seed,
            on_text=lambda new: console.print(
                new, end="", markup=False, highlight=False, soft_wrap=True
            ),
        )
    console.print()
    _rows(f"saved to {save}", run.summary.rows())


@app.command()
def score(
    model: Model,
    text: Annotated[str | None, typer.Option(help="Text to score.")] = None,
    file: Annotated[Path | None, typer.Option(help="UTF-8 file to score.")] = None,
    save: Annotated[Path | None, typer.Option(help="Where the trace goes: .nc or .zarr.")] = None,
    policy: Policy = None,
    level: Record = "ids",
    cache: Cache = "auto",
    threads: Threads = None,
    lanes: Lanes = 4,
    n_ctx: Context = None,
    n_context: Annotated[int, typer.Option(help="Tokens read losslessly before scoring.")] = 16,
    dense: Dense = "mmap",
    direct: Direct = True,
    seed: Seed = 0,
) -> None:
    """Read a text token by token and print its perplexity under a policy."""
    from tqdm import tqdm

    from bmoe_lab.policy_text import parse_routing

    content = _text(text, file)
    chosen = parse_routing(policy) if policy else None
    with _session(
        model,
        cache=cache,
        n_threads=threads,
        io_lanes=lanes,
        n_ctx=n_ctx,
        dense=dense,
        direct=direct,
    ) as session:
        total = sum(len(w) - n_context for w in session.windows(content, n_context=n_context))
        with tqdm(total=total, unit="token", leave=False, delay=0.5) as bar:

            def advance(done: int) -> None:
                bar.update(done)

            run = session.score(
                content,
                policy=chosen,
                n_context=n_context,
                record=level,  # type: ignore[arg-type]  # checked by the session
                save=save,
                seed=seed,
                progress=advance,
            )
    rows = [
        ("scored", f"{len(run.tokens)} tokens"),
        ("perplexity", f"{run.perplexity:.4f}"),
        ("mean NLL", f"{run.nll:.5f} nats per token"),
    ]
    _rows("score", rows + run.summary.rows())


@app.command()
def compare(
    model: Model,
    policies: Annotated[
        list[str], typer.Option("--policy", help="Routing policy; repeat for several.")
    ],
    text: Annotated[str | None, typer.Option(help="Text to score.")] = None,
    file: Annotated[Path | None, typer.Option(help="UTF-8 file to score.")] = None,
    save: Annotated[Path | None, typer.Option(help="Where the tree goes: .nc or .zarr.")] = None,
    report: Annotated[Path | None, typer.Option(help="Where the HTML report goes.")] = None,
    controls: Annotated[
        bool, typer.Option(help="Add each policy's random control at the rate it changed slots.")
    ] = True,
    cache: Cache = "auto",
    threads: Threads = None,
    lanes: Lanes = 4,
    n_ctx: Context = None,
    n_context: Annotated[int, typer.Option(help="Tokens read losslessly before scoring.")] = 16,
    dense: Dense = "mmap",
    direct: Direct = True,
    seed: Seed = 0,
) -> None:
    """Price lossy policies against the lossless run on the same text."""
    from bmoe_lab.comparison.comparing import compare as run_compare
    from bmoe_lab.policy_text import parse_routing
    from bmoe_lab.recording import save_trace
    from bmoe_lab.report import write_report
    from bmoe_lab.tables import comparison_table

    content = _text(text, file)
    chosen = [parse_routing(policy) for policy in policies]
    with _session(
        model,
        cache=cache,
        n_threads=threads,
        io_lanes=lanes,
        n_ctx=n_ctx,
        dense=dense,
        direct=direct,
    ) as session:
        tree = run_compare(
            session,
            content,
            policies=chosen,
            controls=controls,
            n_context=n_context,
            seed=seed,
            progress=True,
        )
    console.print(comparison_table(tree))
    if save is not None:
        save_trace(tree, save)
        console.print(f"saved to {save}", highlight=False)
    if report is not None:
        write_report(tree, report)
        console.print(f"report: {report}", highlight=False)


@app.command()
def recover(
    journal: Annotated[Path | None, typer.Argument(help="Journal to turn into a trace.")] = None,
    save: Annotated[Path | None, typer.Option(help="Where the trace goes: .nc or .zarr.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder to look in as well.")] = None,
) -> None:
    """List recordings that were cut off, or turn one into a trace."""
    from bmoe_lab.errors import SettingsError
    from bmoe_lab.recording import find_leftovers
    from bmoe_lab.recording import recover as recover_journal

    if journal is not None:
        if save is None:
            raise SettingsError("save must name the trace to write; got nothing. Add --save x.nc.")
        trace = recover_journal(journal, save=save)
        assert not isinstance(trace, list)  # a journal was given, so a trace comes back
        console.print(f"saved {trace.sizes['token']} tokens to {save}", highlight=False)
        return
    leftovers = find_leftovers(folder)
    if not leftovers:
        console.print("no recordings were left behind")
        return
    table = Table(title="recordings left behind", title_justify="left")
    for heading in ("journal", "model", "tokens", "age", "state"):
        table.add_column(heading, overflow="fold")
    for leftover in leftovers:
        state = "still running" if leftover.running else leftover.note or "cut off"
        if leftover.complete:
            state = "run ended, file was not written"
        table.add_row(
            _plain(leftover.path),
            _plain(leftover.model),
            str(leftover.n_token),
            f"{leftover.age_s / 60:.0f} min",
            _plain(state),
        )
    console.print(table)
    console.print("bmoe-lab recover JOURNAL --save trace.nc", highlight=False)


@app.command()
def info(model: Model, n_expert_used: Annotated[int | None, typer.Option()] = None) -> None:
    """Show what the capture finds in a model: layers, experts, bytes, the LRU cliff."""
    with _session(
        model, cache="0", n_threads=1, n_ctx=64, n_ubatch=16, n_expert_used=n_expert_used
    ) as session:
        found = session.info()
    cycle = found["token_cycle_bytes"]
    rows = [
        ("model", f"{found['model']} ({found['arch']})"),
        ("file", format_size(found["file_bytes"])),
        ("expert layers", f"{found['n_layer']}: blocks {_ranges(found['blocks'])}"),
        ("experts", f"top {found['n_expert_used']} of {found['n_expert']} per layer"),
        ("one expert", _size_range(found["expert_bytes"])),
        ("stacks per layer", str(sorted({len(names) for names in found["stacks"]}))[1:-1]),
        ("all experts", format_size(found["expert_bytes_total"])),
        ("everything else", format_size(found["dense_bytes_total"])),
        ("one token asks for", f"{format_size(cycle)} (token cycle)"),
        ("LRU cliff", f"a cache below {format_size(cycle)} hits nothing"),
        (
            "routing policies",
            "every layer can be edited"
            if not found["not_editable"]
            else "; ".join(f"block {b}: {why}" for b, why in found["not_editable"].items()),
        ),
        ("reads", "direct" if found["direct"] else "through the page cache"),
        ("trained context", str(found["n_ctx_train"])),
    ]
    _rows(str(found["path"]), rows)


@app.command()
def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="A model file: whether direct reads work there.")
    ] = None,
) -> None:
    """Check the installation: versions, struct layout, direct reads, wait points, memory."""
    import importlib.metadata

    import psutil

    from bmoe_lab.cores import physical_cores
    from bmoe_lab.datasets import demo_model
    from bmoe_lab.seam.library import library
    from bmoe_lab.seam.userfault import userfault_status
    from bmoe_lab.streaming.reader import Reader

    versions = library().versions
    target = path if path is not None else demo_model()
    reader = Reader([target], 1, True)
    direct = reader.direct
    reader.close()
    memory = psutil.virtual_memory()
    packages = ("numpy", "numba", "xarray", "h5netcdf", "zarr", "pyarrow", "plotly", "ipywidgets")
    rows = [
        ("bmoe_lab", __version__),
        ("python", sys.version.split()[0]),
        ("llama-cpp-python", versions["llama_cpp_python"]),
        ("llama.cpp", f"{versions['llama_cpp']}, ggml {versions['ggml_commit']}"),
        ("tensor layout", "as expected"),
        ("packages", ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)),
        ("direct reads", f"{'work' if direct else 'do not work'} on {target}"),
        ("wait points", f"none in use; userfaultfd {userfault_status()}"),
        ("cores", f"{physical_cores()} physical"),
        ("memory", f"{format_size(memory.available)} of {format_size(memory.total)} available"),
    ]
    _rows("doctor", rows)


def _ranges(numbers: list[int]) -> str:
    """Write sorted numbers with runs joined: 0-5, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _size_range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return format_size(low) if low == high else f"{format_size(low)} to {format_size(high)}"


add_commands(app)
add_report_command(app)
