"""``python -m examples.quickstart``: train once per precision, tabulate, draw, and check every update."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.quickstart import corpus as text
from examples.quickstart import report
from examples.quickstart.model import ByteGPT, Size, next_byte_loss
from examples.quickstart.recipes import RECIPES, Recipe
from examples.quickstart.replay import Verdict, replay
from examples.quickstart.train import Run, train

if TYPE_CHECKING:
    from mp_torch import StepReport

SIZE = Size()
PROBE_STEPS = 6


def arguments() -> argparse.Namespace:
    """What the user may say."""
    parser = argparse.ArgumentParser(prog="python -m examples.quickstart", description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file to train on (the Python standard library unless given)")
    parser.add_argument("--steps", type=int, default=300, help="updates per precision (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the text")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the picture (default %(default)s)")
    parsed = parser.parse_args()
    if parsed.steps < 1:
        parser.error(f"--steps {parsed.steps} must be at least 1; leave it out for 300")
    if parsed.text is not None and not parsed.text.is_file():
        parser.error(f"--text {parsed.text} is not a file; leave it out to train on the Python standard library")
    return parsed


def seconds_per_step(threads: int) -> float:
    """Time of one plain fp32 step: two threads on a busy machine can be slower than one, so ask."""
    torch.set_num_threads(threads)
    model = ByteGPT(SIZE)
    tokens = torch.zeros(SIZE.batch_size, SIZE.context, dtype=torch.int64)
    torch.autograd.backward(next_byte_loss(model(tokens), tokens))
    started = time.perf_counter()
    for _ in range(PROBE_STEPS):
        torch.autograd.backward(next_byte_loss(model(tokens), tokens))
    return (time.perf_counter() - started) / PROBE_STEPS


def choose_device(console: Console) -> torch.device:
    """The accelerator, if there is one; else the CPU with as many threads as are worth it, one to four."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        console.print(f"device: {device}")
        return device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = {threads: seconds_per_step(threads) for threads in sorted({1, min(cores, 4)})}
    best = min(times, key=lambda threads: times[threads])
    torch.set_num_threads(best)
    measured = ", ".join(f"{threads}: {1e3 * spent:.1f} ms" for threads, spent in times.items())
    console.print("device: CPU, computing by CUDA's op rules and matmul arithmetic (mp_torch.emulate)")
    console.print(f"threads: {best} (a step took with {measured})")
    return torch.device("cpu")


def bars(console: Console) -> Progress:
    """Bars with the loss beside them."""
    columns = TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def train_and_check(recipe: Recipe, data: text.Corpus, options: argparse.Namespace, device: torch.device,
                    progress: Progress) -> tuple[Run, Verdict]:  # fmt: skip
    """One precision: train with a live bar, then replay with another."""
    task = progress.add_task(recipe.name, total=options.steps, note="")

    def tick(done: StepReport, loss: float) -> None:
        scale = f"  loss scale {done.next_loss_scale:g}" if done.next_loss_scale != 1 else ""
        progress.update(task, advance=1, note=f"loss {loss:.3f}{scale}")

    run = train(recipe, data, SIZE, steps=options.steps, device=device, seed=options.seed, tick=tick)
    check = progress.add_task("  every update again in NumPy", total=options.steps, note="")
    verdict = replay(run, lambda: progress.advance(check))
    progress.update(check, note=f"{verdict.differing_bits} bits differ")
    if not progress.console.is_terminal:  # where bars cannot move they are drawn once, at the end
        progress.console.print(f"{recipe.name}: loss {run.losses[-1]:.3f}, {verdict.differing_bits} bits differ")
    return run, verdict


def main() -> int:
    """Run it all; 1 if any bit differs."""
    options, console, started = arguments(), Console(width=None if sys.stdout.isatty() else 110), time.perf_counter()
    data = text.load(options.text)
    console.print(f"text: {data.name}, {len(data.train):,} bytes to train on, {len(data.held_out):,} held out")
    device = choose_device(console)
    with bars(console) as progress:
        pairs = [train_and_check(recipe, data, options, device, progress) for recipe in RECIPES]
    runs, verdicts = [run for run, _ in pairs], [verdict for _, verdict in pairs]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "quickstart.png"
    report.picture(runs, data.name, path)
    console.print(report.table(runs, SIZE.tokens))
    console.print(report.verdict_line(verdicts))
    console.print(f"picture: {path}; all in {time.perf_counter() - started:.0f} s")
    return int(any(verdict.differing_bits or verdict.differing_reports for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
