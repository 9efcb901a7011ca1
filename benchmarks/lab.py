"""Steps per second of the NumPy laboratory: a transformer of two layers, width 64, context 64, batches of 8.

Prints ``name: value unit``, one line each, for every precision: steps per second of wall time, the best fifth of the
steps, and steps per second of CPU time, which on one thread (``OMP_NUM_THREADS=1``) is what the wall would show if no
other program ran. Goals on two cores: 20 in fp32, 8 in emulated fp16. ``python benchmarks/lab.py [steps]``.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from mp_reference.amp.loss_scale import LossScale
from mp_reference.amp.optimizers import AdamW
from mp_reference.lab.experiment import Task
from mp_reference.lab.tasks import batch_of, loss_of, model_of
from mp_reference.nn.training import PRECISIONS, Training, precision_named

TASK = Task(data="text", batch=8, width=64, layers=2, context=64)


def measured(name: str, steps: int) -> tuple[float, float]:
    """Steps per second of wall time, the best fifth of the steps, and per second of CPU time."""
    precision = precision_named(name)
    loss_scale = LossScale() if "fp16" in name else LossScale(init_scale=1.0, dynamic=False)
    training = Training.of(
        model_of(TASK), loss_of(TASK), precision, AdamW(lr=1e-3), loss_scale=loss_scale, max_grad_norm=1.0
    )
    random = np.random.default_rng(0)
    state, walls = training.start(random), []
    state, _, _ = training.step(state, [batch_of(TASK, random)], random=random)
    cpu = time.process_time()
    for _ in range(steps):
        started = time.perf_counter()
        state, _, _ = training.step(state, [batch_of(TASK, random)], random=random)
        walls.append(time.perf_counter() - started)
    best = sorted(walls)[: max(1, steps // 5)]
    return len(best) / sum(best), steps / (time.process_time() - cpu)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    for name in PRECISIONS:
        wall, cpu = measured(name, steps)
        print(f"lab.{name}.wall: {wall:.1f} steps/s")
        print(f"lab.{name}.cpu: {cpu:.1f} steps/s")


if __name__ == "__main__":
    main()
