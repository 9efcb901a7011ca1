"""What was lost: gradients by magnitude, and the error of every operation's output against float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.nn.layers import Model, Scope
from mp_reference.nn.tensor import Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mp_reference.nn.training import Trained, Training

__all__ = ["HIGHEST", "LOWEST", "Magnitudes", "errors_by_depth"]

LOWEST, HIGHEST = -100, 40
"""Exponents of the first and the last bin of a histogram of magnitudes."""


@dataclass(slots=True)
class Magnitudes:
    """Counts of numbers by the exponent of their magnitude.

    >>> seen = Magnitudes()
    >>> seen.add(np.float32([0.0, 1.5, -0.25, np.inf]))
    >>> seen.zeros, seen.infinite, seen.counts[0 - LOWEST], seen.counts[-2 - LOWEST]
    (1, 1, 1, 1)
    """

    counts: list[int] = field(default_factory=lambda: [0] * (HIGHEST - LOWEST + 1))
    zeros: int = 0
    infinite: int = 0

    def add(self, values: NDArray[Any]) -> None:
        """Count the elements of an array; NaN counts as infinite."""
        finite = values[np.isfinite(values)]
        nonzero = finite[finite != 0]
        self.infinite += values.size - finite.size
        self.zeros += finite.size - nonzero.size
        exponents = np.clip(np.frexp(nonzero)[1] - 1, LOWEST, HIGHEST)
        found = np.bincount(exponents - LOWEST, minlength=len(self.counts))
        self.counts = (np.array(self.counts) + found).tolist()


def errors_by_depth(
    training: Training, state: Trained, loss: Callable[[Model, Scope, Any], Tensor], batch: Any
) -> list[float]:
    """How far each operation's output is from that of the same parameters in float64.

    Args:
        training: the model and its precision.
        state: the parameters, as they are stored.
        loss: the loss function.
        batch: handed to it.

    Returns:
        One number an operation (casts left out), in order: the root mean square of the difference over that of the
        float64 output; 0 where both are 0.

    >>> from mp_reference.lab.experiment import Task
    >>> from mp_reference.lab.tasks import batch_of, loss_of, model_of, optimizer_of
    >>> from mp_reference.nn.training import Training, precision_named
    >>> task, random = Task(data="spirals", width=8), np.random.default_rng(0)
    >>> training = Training.of(model_of(task), loss_of(task), precision_named("bf16-mixed"), optimizer_of(task))
    >>> errors = errors_by_depth(training, training.start(random), loss_of(task), batch_of(task, random))
    >>> len(errors), bool(max(errors) < 2**-6)
    (7, True)
    """
    ours: list[Tensor] = []
    exact: list[Tensor] = []
    _forward(Tape(training.precision.arithmetic, training.precision.rules, ours), training, state, loss, batch, False)
    _forward(Tape(kept=exact), training, state, loss, batch, True)
    return [_relative(one.carrier, other.carrier) for one, other in zip(ours, exact, strict=True)]


def _forward(
    tape: Tape, training: Training, state: Trained, loss: Callable[[Model, Scope, Any], Tensor], batch: Any, wide: bool
) -> None:
    leaves = {
        name: tape.leaf(value.astype(np.float64)) if wide else tape.leaf(value, training.precision.storage)
        for name, value in state.parameters.items()
    }
    with np.errstate(all="ignore"):
        loss(training.model, Scope(tape, leaves, state.buffers), batch)


def _relative(ours: NDArray[Any], exact: NDArray[Any]) -> float:
    finite = np.isfinite(exact)  # a mask's minus infinity is no value
    with np.errstate(all="ignore"):
        size = float(np.sqrt(np.mean(np.square(exact[finite], dtype=np.float64)))) if finite.any() else 0.0
        miss = ours[finite].astype(np.float64) - exact[finite]
        error = float(np.sqrt(np.mean(np.square(miss)))) if finite.any() else 0.0
    return 0.0 if error == 0 else error / size if size else float("inf")
