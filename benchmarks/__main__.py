"""``python -m benchmarks``: run every measurement and print one table each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.table import Table

from benchmarks import decoding, replaying, startup, sweep_memory
from bmoe_lab.cores import physical_cores
from bmoe_lab.sizes import format_size

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--model", type=Path, help="use this GGUF instead of writing one")
    parser.add_argument("--folder", type=Path, help="where the 6 GB model is written and kept")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per arm and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--budget", default="1.5 GiB", help="cache of the streamed run")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=["startup", "replay", "sweep-memory", "memory", "streamed"],
        help="run these parts",
    )
    parser.add_argument(
        "--sweep-tokens", type=int, default=10_000_000, help="tokens of the swept Zarr trace"
    )
    parser.add_argument(
        "--route-csv", type=Path, help="replay this BigMoeOnEdge trace, not a synthetic one"
    )
    options = parser.parse_args()
    parts = options.only or ["startup", "replay", "sweep-memory", "memory", "streamed"]
    figures: dict[str, object] = {}
    if "startup" in parts:
        figures["startup"] = _startup(options.rounds)
    if "replay" in parts:
        figures["replay"] = _replay(options.rounds, options.route_csv)
    if "sweep-memory" in parts:
        figures["sweep-memory"] = _sweep_memory(options.sweep_tokens)
    if "memory" in parts or "streamed" in parts:
        model = options.model or _model(options.folder)
        memory = _memory(model, options)
        figures["memory"] = memory
        if "streamed" in parts:
            figures["streamed"] = _streamed(model, options, memory["session, record off"])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def _model(folder: Path | None) -> Path:
    from bmoe_lab.testing import write_large_model

    default = os.environ.get("BMOE_LAB_BENCH_DIR") or platformdirs.user_cache_dir("bmoe-lab")
    folder = folder or Path(default)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench-qwen3-30b-a3b-16-layers.gguf"
    if not path.exists():
        console.print(f"writing {path}")
        write_large_model(path, progress=True)
    return path


def _startup(rounds: int) -> dict[str, float]:
    plain, ours = startup.import_times(rounds)
    opening = startup.open_times(max(3, rounds // 2))
    table = Table(title=f"start-up, medians of {rounds} interleaved new processes")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    table.add_row("import xarray", f"{plain:.3f}")
    table.add_row("import bmoe_lab (imports xarray)", f"{ours:.3f}")
    table.add_row("difference", f"{ours - plain:+.3f}")
    table.add_row("open the demo session, kernels cached", f"{opening:.3f}")
    console.print(table)
    return {"import_xarray_s": plain, "import_bmoe_lab_s": ours, "open_s": opening}


def _replay(rounds: int, csv: Path | None) -> dict[str, object]:
    speeds = replaying.kernels(rounds)
    table = Table(
        title=(
            f"residency policies, million requests per second: {replaying.N_TOKEN} tokens x "
            f"{replaying.N_LAYER} layers, top-{replaying.N_USED} of {replaying.N_EXPERT}, one "
            f"thread; medians of {rounds} interleaved rounds"
        )
    )
    table.add_column("policy")
    for share in replaying.SHARES:
        table.add_column(f"cache {100 * share:g} %", justify="right")
    for name, row in speeds.items():
        table.add_row(name, *(f"{value:.1f}" for value in row))
    console.print(table)
    seconds = replaying.curve_and_grid(rounds) | replaying.replays(rounds, csv)
    table = Table(title=f"replays and sweeps, medians of {rounds} interleaved rounds")
    table.add_column("what")
    table.add_column("milliseconds", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{1000 * value:.1f}")
    console.print(table)
    return {"million_requests_per_s": speeds, "seconds": seconds}


def _sweep_memory(n_token: int) -> list[dict[str, float]]:
    table = Table(
        title=(
            "sweep of a synthetic Zarr trace (4 layers, top-2 of 64; LRU and S3-FIFO at 2 "
            "budgets) on 2 dask workers: peak of the larger worker, kernels compiled before"
        )
    )
    for heading in ("tokens", "trace in memory", "peak before", "peak after", "seconds"):
        table.add_column(heading, justify="right")
    found = []
    for size in (n_token // 10, n_token):
        row = sweep_memory.measure(size)
        found.append(row)
        table.add_row(
            f"{size:,}",
            format_size(row["array_bytes"]),
            format_size(row["peak_before_bytes"]),
            format_size(row["peak_bytes"]),
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    return found


def _ratios(arm: decoding.Arm, base: decoding.Arm) -> list[float]:
    """Speed of `arm` over that of `base`, round by round."""
    return [b / a for a, b in zip(arm.medians, base.medians, strict=True)]


def _memory(model: Path, options: argparse.Namespace) -> dict[str, float]:
    table = Table(
        title=(
            f"decode in memory, {options.threads} threads: ratio of speeds to plain llama.cpp "
            f"(same parameters, weights as in the file); medians of {options.rounds} interleaved "
            f"rounds of {options.tokens} tokens, range over rounds in brackets"
        )
    )
    for heading in ("arm", "ms per token", "speed ratio"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    seconds: dict[str, float] = {}
    for measure in (decoding.repacked, decoding.in_memory):
        arms = measure(model, options.tokens, options.rounds, options.threads)
        for arm in arms:
            ratios = _ratios(arm, arms[0])
            per_token = statistics.median(arm.medians)
            seconds[arm.name] = per_token
            seconds[f"{arm.name}: ratio"] = statistics.median(ratios)
            table.add_row(
                arm.name,
                f"{1000 * per_token:.2f}",
                f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]",
            )
    off = seconds["session, record off"]
    for level in ("ids", "scores"):
        cost = seconds[f"session, record {level}"] / off - 1
        seconds[f"cost of {level}"] = cost
        table.add_row(f"cost of recording {level}", "", f"{100 * cost:+.1f} %")
    console.print(table)
    return seconds


def _streamed(model: Path, options: argparse.Namespace, compute_s: float) -> dict[str, float]:
    figures = decoding.streamed(
        model,
        options.budget,
        options.tokens,
        options.rounds,
        options.threads,
        options.lanes,
        compute_s,
    )
    table = Table(
        title=(
            f"decode from disk, cache {options.budget}, {options.lanes} lanes, "
            f"{'direct' if figures['direct'] else 'buffered'} reads, {options.rounds} rounds of "
            f"{options.tokens} tokens with a probe of the same file between them; "
            "limit = 1 / (compute in memory + bytes / probed bandwidth)"
        )
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("tokens per second", f"{figures['tokens_per_s']:.2f}"),
        ("serial limit", f"{figures['limit_tokens_per_s']:.2f}"),
        (
            "of the limit, median [range]",
            f"{100 * figures['of_limit']:.1f} % [{100 * figures['of_limit_low']:.1f}, "
            f"{100 * figures['of_limit_high']:.1f}]",
        ),
        ("hit rate", f"{100 * figures['hit_rate']:.1f} %"),
        ("read per token", format_size(figures["read_bytes_per_token"])),
        ("probed bandwidth", f"{format_size(figures['bandwidth'])}/s"),
        ("reading", f"{100 * figures['io_frac']:.1f} % of wall time"),
        ("cache management", f"{100 * figures['manage_frac']:.2f} %"),
        ("callback", f"{100 * figures['callback_frac']:.2f} %"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return figures


if __name__ == "__main__":
    main()
