"""Train the demo model with single-threaded processes over shared weights.

Small matrix products gain little from a second thread, and lose much when another program
holds one of the cores: every product then waits for the thread that is not running. So each
process has one thread, and the processes meet only twice in a step.

The schedule follows the clock (``--minutes``) or a number of steps (``--steps``). By the clock
a busy machine sees fewer tokens, but the learning rate always comes down.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from model import Config, DemoModel
from optimiser import Adam, Muon, is_matrix, share_of
from tokenizer import END_OF_TEXT_ID, read_documents
from tokenizers import Tokenizer
from torch import Tensor

STEP_TOKENS = 4096
MICRO_TOKENS = 2048
SHORT, LONG = 256, 512
LONG_FROM = 0.75
WARM_UP, FLOOR = 0.02, 0.02
BALANCE, BALANCE_DECAY = 0.02, 0.9
PROBE_WINDOWS = 12


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do."""

    corpus: Path
    out: Path
    minutes: float | None
    steps: int | None
    seed: int
    processes: int
    dtype: torch.dtype
    report_minutes: float


class Windows:
    """An endless sequence of training windows: shuffled epochs, each cut at a new offset.

    Any process can ask for any window by number and gets the same one.
    """

    def __init__(self, ids: np.ndarray, length: int, seed: int) -> None:
        self.ids, self.length, self.seed = ids, length, seed
        self.per_epoch = len(ids) // length - 1
        self.epoch = -1
        self.starts = np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of `count` windows, both (count, length)."""
        targets = np.stack([self._window(first + each) for each in range(count)])
        inputs = np.empty_like(targets)
        inputs[:, 0] = END_OF_TEXT_ID
        inputs[:, 1:] = targets[:, :-1]
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _window(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self.epoch:
            generator = np.random.default_rng((self.seed, self.length, epoch))
            offset = generator.integers(self.length)
            self.starts = offset + self.length * generator.permutation(self.per_epoch)
            self.epoch = epoch
        start = self.starts[place]
        return self.ids[start : start + self.length].astype(np.int64)


class Shared:
    """What the processes have in common. Built once, handed to every process."""

    def __init__(self, config: Config, processes: int, context) -> None:
        size = sum(each.numel() for each in DemoModel(config).parameters())
        routers = (config.block_count, config.expert_count)
        self.weights = torch.zeros(size).share_memory_()
        self.grads = torch.zeros(processes, size).share_memory_()
        self.counts = torch.zeros(processes, *routers).share_memory_()
        self.losses = torch.zeros(processes, 3).share_memory_()
        self.load = torch.full(routers, 1 / config.expert_count).share_memory_()
        self.progress = torch.zeros(1, dtype=torch.float64).share_memory_()
        self.next_micro = context.Value("i", 0)
        self.barrier = context.Barrier(processes)


def bind(model: DemoModel, weights: Tensor, grads: Tensor | None) -> None:
    """Make the parameters (and gradients) of a model views of flat tensors."""
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.data = weights[start:stop].view(parameter.shape)
        if grads is not None:
            parameter.grad = grads[start:stop].view(parameter.shape)
        start = stop


def learning_rate(progress: float) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine to `FLOOR`."""
    if progress < WARM_UP:
        return progress / WARM_UP + 1e-3
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return FLOOR + (1 - FLOOR) * cosine


def balance_term(model: DemoModel, load: Tensor) -> Tensor:
    """Return the Switch balance term, 1 if level, with the load of past steps.

    The load is a mean over steps and so over all domains: an expert may serve one domain only,
    as long as the experts as a whole are used evenly.
    """
    n_expert = load.shape[1]
    layers = [
        n_expert * (fraction * block.moe.probabilities).sum()
        for block, fraction in zip(model.blocks, load, strict=True)
    ]
    return torch.stack(layers).mean()


def probe_sets(settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a few held-out windows of each domain."""
    tokenizer = Tokenizer.from_file(str(settings.corpus / "tokenizer.json"))
    texts: dict[str, list[int]] = {}
    for each in read_documents(settings.corpus / "heldout.jsonl"):
        ids = texts.setdefault(each["domain"], [])
        ids += [END_OF_TEXT_ID, *tokenizer.encode(each["text"]).ids]
    return {
        domain: Windows(np.array(ids, dtype=np.uint16), SHORT, 0).batch(0, PROBE_WINDOWS)
        for domain, ids in texts.items()
    }


def save(model: DemoModel, path: Path) -> None:
    """Write the weights as a NumPy archive, aside first so that a reader never sees half."""
    part = path.with_suffix(".part.npz")
    np.savez(part, **{name: each.detach().numpy() for name, each in model.named_parameters()})
    part.replace(path)


class Reporter:
    """Prints and logs the state of the run; lives in the first process."""

    def __init__(self, settings: Settings, model: DemoModel) -> None:
        self.settings, self.model = settings, model
        self.probes = probe_sets(settings)
        self.start = self.last = time.monotonic()
        self.recent: list[tuple[float, float]] = []

    @property
    def minutes(self) -> float:
        """Return the time since the start."""
        return (time.monotonic() - self.start) / 60

    def add(self, loss: float, balance: float) -> None:
        """Note one step."""
        self.recent.append((loss, balance))

    def due(self) -> bool:
        """Tell whether it is time for a line."""
        return time.monotonic() - self.last > 60 * self.settings.report_minutes

    @torch.no_grad()
    def report(self, step: int, rate: float) -> None:
        """Write a line of the log and a checkpoint."""
        heldout = {name: self.model.loss(*probe).item() for name, probe in self.probes.items()}
        loss, balance = np.mean(self.recent, axis=0)
        line = {
            "minutes": round(self.minutes, 2),
            "step": step,
            "tokens": step * STEP_TOKENS,
            "rate": round(rate, 4),
            "train": round(float(loss), 4),
            "balance": round(float(balance), 4),
            "heldout_mean": round(float(np.mean(list(heldout.values()))), 4),
            "heldout": {name: round(each, 4) for name, each in heldout.items()},
        }
        print(json.dumps(line), flush=True)
        with (self.settings.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        save(self.model, self.settings.out / "model.npz")
        self.recent.clear()
        self.last = time.monotonic()


def worker(rank: int, settings: Settings, config: Config, shared: Shared) -> None:
    """Take micro-batches until the schedule ends."""
    torch.set_num_threads(1)
    model = DemoModel(config, settings.dtype)
    bind(model, shared.weights, shared.grads[rank])
    if rank == 0:
        model.initialise(settings.seed)
    shared.barrier.wait()

    ids = np.load(settings.corpus / "train.npy")
    samplers = {length: Windows(ids, length, settings.seed) for length in (SHORT, LONG)}
    weights = {name: each.detach() for name, each in model.named_parameters()}
    spans = _spans(weights)
    optimisers = {
        name: Muon(name, weights[name], settings.dtype) if is_matrix(name) else Adam(weights[name])
        for name in share_of(rank, settings.processes, weights)
    }
    reporter = Reporter(settings, model) if rank == 0 else None
    micro_per_step = STEP_TOKENS // MICRO_TOKENS
    step = 0
    while True:
        if rank == 0:
            shared.next_micro.value = 0
            done = step / settings.steps if settings.steps else reporter.minutes / settings.minutes
            shared.progress[0] = done
        shared.grads[rank].zero_()
        shared.counts[rank].zero_()
        shared.losses[rank].zero_()
        shared.barrier.wait()
        progress = shared.progress.item()
        if progress >= 1:
            break

        length = LONG if progress >= LONG_FROM else SHORT
        count = MICRO_TOKENS // length
        while True:
            with shared.next_micro.get_lock():
                micro = shared.next_micro.value
                shared.next_micro.value += 1
            if micro >= micro_per_step:
                break
            number = (step * micro_per_step + micro) * count
            loss = model.loss(*samplers[length].batch(number, count))
            balance = balance_term(model, shared.load)
            ((loss + BALANCE * balance) / micro_per_step).backward()
            shared.losses[rank] += torch.tensor([loss.item(), balance.item(), 1.0])
            for layer, block in enumerate(model.blocks):
                chosen = block.moe.chosen.reshape(-1)
                shared.counts[rank, layer] += chosen.bincount(minlength=config.expert_count)
        shared.barrier.wait()

        rate = learning_rate(progress)
        with torch.no_grad():
            for name, optimiser in optimisers.items():
                start, stop = spans[name]
                grad = shared.grads[:, start:stop].sum(0).view(weights[name].shape)
                optimiser.step(grad, rate)
        if rank == 0:
            counts = shared.counts.sum(0)
            shared.load.lerp_(counts / counts.sum(1, keepdim=True), 1 - BALANCE_DECAY)
            loss, balance, n = shared.losses.sum(0).tolist()
            reporter.add(loss / n, balance / n)
        shared.barrier.wait()
        step += 1
        if reporter and reporter.due():
            reporter.report(step, rate)
    if reporter:
        reporter.report(step, 0.0)


def _spans(weights: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return where each parameter lies in the flat tensors of `bind`."""
    spans, start = {}, 0
    for name, each in weights.items():
        spans[name] = (start, start + each.numel())
        start += each.numel()
    return spans


def main() -> None:
    """Parse the options, start the processes, wait."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory of tokenizer.py")
    parser.add_argument("--out", type=Path, required=True, help="directory for log and weights")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--report-minutes", type=float, default=3.0)
    options = vars(parser.parse_args())

    os.environ["OMP_NUM_THREADS"] = "1"
    options["dtype"] = getattr(torch, options["dtype"])
    settings = Settings(**options)
    settings.out.mkdir(parents=True, exist_ok=True)
    config = Config()
    shared = Shared(config, settings.processes, mp.get_context("spawn"))
    mp.spawn(worker, (settings, config, shared), nprocs=settings.processes)


if __name__ == "__main__":
    main()
