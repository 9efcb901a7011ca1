"""What a cell trains: data that any machine has, a model, and a loss."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.amp.optimizers import SGD, Adam, AdamW, Optimizer
from mp_reference.lab.experiment import Task  # noqa: TC001  # the examples use it
from mp_reference.nn import ops
from mp_reference.nn.models import CNN, MLP, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mp_reference.nn.layers import Model, Scope
    from mp_reference.nn.tensor import Tensor

__all__ = ["batch_of", "loss_of", "model_of", "optimizer_of", "text"]

_VOCABULARY = 128  # of ASCII text
_SIDE = 8  # of an image


@functools.cache
def text() -> NDArray[np.int64]:
    """Bytes of source text of Python's own library, those beyond ASCII left out.

    >>> bool(len(text()) > 100_000 and text().max() < 128)
    True
    """
    sources = (Path(str(module.__file__)) for module in (argparse, dataclasses, functools))
    raw = np.frombuffer(b"\n".join(path.read_bytes() for path in sources), np.uint8).astype(np.int64)
    return raw[raw < _VOCABULARY]


def model_of(task: Task) -> Model:
    """The model that a task trains.

    >>> model_of(Task(data="spirals", width=8, layers=2)).sizes
    (2, 8, 8, 2)
    """
    if task.data == "text":
        return Transformer(
            _VOCABULARY, width=task.width, layers=task.layers, heads=max(1, task.width // 16), context=task.context
        )
    if task.data == "stripes":
        return CNN(1, task.width, 3)
    return MLP((2, *[task.width] * task.layers, 2), "gelu-tanh")


def optimizer_of(task: Task) -> Optimizer:
    """The optimizer of a task.

    >>> optimizer_of(Task(optimizer="sgd", lr=0.5)).lr
    0.5
    """
    if task.optimizer == "sgd":
        return SGD(lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay)
    return (AdamW if task.optimizer == "adamw" else Adam)(lr=task.lr, weight_decay=task.weight_decay)


def batch_of(task: Task, random: np.random.Generator) -> Any:
    """One batch, drawn from a generator.

    >>> [one.shape for one in batch_of(Task(data="stripes", batch=4), np.random.default_rng(0))]
    [(4, 1, 8, 8), (4,)]
    """
    if task.data == "text":
        source = text()
        starts = random.integers(0, len(source) - task.context - 1, task.batch)
        return np.stack([source[start : start + task.context + 1] for start in starts])
    if task.data == "stripes":
        labels = random.integers(0, 3, task.batch)
        down, across = np.mgrid[:_SIDE, :_SIDE]
        waves = np.stack([down, across, down + across])[labels] + random.integers(0, 4, (task.batch, 1, 1))
        images = np.sin(waves * (math.pi / 2)) + 0.5 * random.standard_normal((task.batch, _SIDE, _SIDE))
        return images[:, None].astype(np.float32), labels
    labels, radius = random.integers(0, 2, task.batch), random.uniform(0.2, 1, task.batch)
    angle = 6 * radius + math.pi * labels
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return (points + 0.02 * random.standard_normal(points.shape)).astype(np.float32), labels


def loss_of(task: Task) -> Callable[[Model, Scope, Any], Tensor]:
    """The loss function of a task, multiplied by its factor.

    >>> callable(loss_of(Task()))
    True
    """

    def language(model: Model, scope: Scope, batch: Any) -> Tensor:
        logits = model(scope, batch[:, :-1])
        return ops.cross_entropy(ops.reshape(logits, (-1, _VOCABULARY)), batch[:, 1:].reshape(-1))

    def classes(model: Model, scope: Scope, batch: Any) -> Tensor:
        stored = next(iter(scope.tensors.values())).format  # inputs come in the parameters' format
        return ops.cross_entropy(model(scope, ops.cast(scope.tape.leaf(batch[0]), stored)), batch[1])

    plain = language if task.data == "text" else classes
    if task.loss_factor == 1.0:
        return plain
    return lambda model, scope, batch: ops.mul(plain(model, scope, batch), task.loss_factor)
