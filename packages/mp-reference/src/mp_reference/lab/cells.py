"""Running one cell: a training under one policy, or dot products under one accumulator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from mp_reference.lab.experiment import Cell, DotProducts, Task
from mp_reference.lab.policies import Policy, accumulator_of, format_of_name, loss_scale_of  # noqa: F401  # examples
from mp_reference.lab.statistics import Magnitudes, errors_by_depth
from mp_reference.lab.tasks import batch_of, loss_of, model_of, optimizer_of
from mp_reference.nn.training import Trained, Training
from mp_reference.numerics.matmul import matmul
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.formats import FP32

__all__ = ["Row", "run_cell", "steps_of"]

Row = dict[str, Any]
Progress = Callable[[int], None]
_LOOKS = 8  # how often the gradients are counted
_HELD_OUT = 4  # batches


def steps_of(cell: Cell) -> int:
    """How much a progress bar has to count.

    >>> steps_of(Cell(Policy(), 0, Task(steps=7)))
    7
    """
    return cell.work.steps if isinstance(cell.work, Task) else len(cell.work.lengths)


def run_cell(cell: Cell, progress: Progress = lambda _: None) -> Row:
    """Do a cell's work.

    Args:
        cell: policy, seed and work.
        progress: called with the number of steps done since the last call.

    Returns:
        A row of plain numbers, strings and lists: the policy's words and what came of them.

    Source: ``lab.experiment`` names the settings.

    >>> row = run_cell(Cell(Policy(), 0, Task(data="spirals", steps=3, width=8)))
    >>> len(row["losses"]), row["applied"], row["skipped"]
    (3, 3, 0)
    """
    started = time.perf_counter()
    result = _train(cell, cell.work, progress) if isinstance(cell.work, Task) else _dots(cell, cell.work, progress)
    head = {"key": cell.key, "label": cell.policy.label, "seed": cell.seed, **asdict(cell.policy)}
    return {**head, **result, "seconds": round(time.perf_counter() - started, 3)}


def _train(cell: Cell, task: Task, progress: Progress) -> Row:
    random, data = np.random.default_rng(cell.seed), np.random.default_rng(1_000_000 + cell.seed)
    training = Training.of(
        model_of(task), loss_of(task), cell.policy.precision(random), optimizer_of(task),
        loss_scale=loss_scale_of(cell.policy.loss_scale), max_grad_norm=task.max_grad_norm or None,
    )  # fmt: skip
    state = training.start(np.random.default_rng(cell.seed))
    elements = sum(value.size for value in state.step.parameters)
    seen = Magnitudes()
    row: Row = {name: [] for name in ("losses", "scales", "norms", "rounded_away")}
    skipped = 0
    looks = set(np.linspace(0, task.steps - 1, _LOOKS).astype(int).tolist())
    for number in range(task.steps):
        state, report, losses = training.step(
            state, [batch_of(task, data)], random=random, observe=seen.add if number in looks else None
        )
        row["losses"].append(losses[0] / task.loss_factor)
        row["scales"].append(report.loss_scale)
        row["norms"].append(report.grad_norm / task.loss_factor)
        row["rounded_away"].append(report.rounded_away / elements)
        skipped += report.skipped
        progress(1)
    held_out = [_held_out(training, state, task, number) for number in range(_HELD_OUT)]
    return row | {
        "applied": task.steps - skipped, "skipped": skipped, "held_out": float(np.mean(held_out)),
        "histogram": asdict(seen),
        "depth": errors_by_depth(training, state, loss_of(task), batch_of(task, np.random.default_rng(2_000_000))),
    }  # fmt: skip


def _held_out(training: Training, state: Trained, task: Task, number: int) -> float:
    """The loss of a batch that no seed trains on."""
    batch = batch_of(task, np.random.default_rng(3_000_000 + number))
    return training.micro_step(state, batch)[0] / task.loss_factor


def _dots(cell: Cell, work: DotProducts, progress: Progress) -> Row:
    random = np.random.default_rng(cell.seed)
    fmt, accumulator = format_of_name(cell.policy.format), accumulator_of(cell.policy.accumulator)
    row: Row = {"lengths": list(work.lengths), "errors": [], "worst": []}
    for length in work.lengths:
        draw = random.standard_normal if work.values == "normal" else random.random
        a, b = (round_to(draw(shape, dtype=np.float32), fmt) for shape in ((1, length), (length, work.columns)))
        found = matmul(a.astype(fmt.dtype), b.astype(fmt.dtype), accumulator=accumulator, out_format=FP32)
        exact = a.astype(np.float64) @ b.astype(np.float64)  # 24-bit products are exact, sums good to 2**-50
        size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
        errors = np.abs(found.astype(np.float64) - exact) / size
        row["errors"].append(float(errors.mean()))
        row["worst"].append(float(errors.max()))
        progress(1)
    return row
