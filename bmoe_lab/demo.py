"""The demonstration: the bundled model streamed, two policies priced against their controls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bmoe_lab.sizes import format_size

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

__all__ = ["demo_texts", "run_demo"]

#: Far smaller than the 7.2 MiB of experts, and twice what one token asks for.
CACHE = "2 MiB"
_CHARACTERS = 450


def demo_texts() -> list[str]:
    """Return the beginning of one held-out document of each domain.

    Examples
    --------
    >>> len(demo_texts())
    5
    """
    from bmoe_lab.datasets import DOMAINS, heldout

    return [
        max(heldout(domain), key=lambda document: len(document.text)).text[:_CHARACTERS]
        for domain in DOMAINS
    ]


def run_demo(out: Path, *, console: Console, seed: int = 0) -> xr.DataTree:
    """Run the demonstration and leave traces and report in `out`.

    Parameters
    ----------
    out : Path
        Folder for ``comparison.nc`` (a trace per arm), ``generation.nc`` (with router scores)
        and ``report.html``.
    console : rich.console.Console
        Where people read along.
    seed : int, default 0
        Of the random controls and the bootstrap.

    Returns
    -------
    xarray.DataTree
        The comparison.

    Raises
    ------
    TraceFileError
        If `out` cannot be written.
    """
    from bmoe_lab.comparison.comparing import compare
    from bmoe_lab.datasets import demo_model
    from bmoe_lab.errors import TraceFileError
    from bmoe_lab.recording import save_trace
    from bmoe_lab.report import write_report
    from bmoe_lab.routing import CachePrior, DropCold
    from bmoe_lab.session import Session
    from bmoe_lab.tables import comparison_table

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceFileError(
            f"out must be a folder that can be made; got {str(out)!r} ({error.strerror})."
        ) from error
    console.rule("bmoe-lab demo")
    # The model is so small that a second compute thread costs more than it brings.
    with Session(demo_model(), cache=CACHE, n_threads=1) as session:
        info = session.info()
        console.print(
            f"{info['model']}: {info['n_layer']} expert layers, top {info['n_expert_used']} of "
            f"{info['n_expert']}. Experts {format_size(info['expert_bytes_total'])}, cache "
            f"{format_size(info['cache_budget_bytes'])}, one token asks for "
            f"{format_size(info['token_cycle_bytes'])}. Reads are "
            f"{'direct' if info['direct'] else 'through the page cache'}.",
            highlight=False,
        )
        console.print("A lossless generation, its router scores recorded:", highlight=False)
        run = session.generate(
            "In the beginning",
            n_predict=48,
            record="scores",
            save=out / "generation.nc",
        )
        console.print(
            f"  In the beginning{run.text}", style="italic", markup=False, highlight=False
        )
        console.print(
            "Five held-out texts, token by token: lossless, then each policy and its random "
            "control at the same rate.",
            highlight=False,
        )
        tree = compare(
            session,
            demo_texts(),
            policies=[DropCold(0.75), CachePrior(0.15)],
            controls=True,
            seed=seed,
            progress=True,
        )
    console.print(comparison_table(tree))
    save_trace(tree, out / "comparison.nc")
    write_report(tree, out / "report.html")
    for name, what in (
        ("report.html", "interactive report, open it in a browser"),
        ("comparison.nc", "one trace per arm: bl.open_trace(...) gives a DataTree"),
        ("generation.nc", "the generation with its router scores"),
    ):
        console.print(f"  {out / name}  {what}", highlight=False, soft_wrap=True)
    return tree
