"""One small training, written twice: as layers on the reference's tape, and as torch's modules under AmpEngine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.amp.loss_scale import LossScale
from mp_reference.amp.optimizers import AdamW
from mp_reference.nn import ops
from mp_reference.nn.arithmetic import Arithmetic
from mp_reference.nn.models import MLP, Transformer
from mp_reference.nn.training import Training, precision_named

if TYPE_CHECKING:
    from mp_reference.nn.layers import Model, Scope
    from mp_reference.nn.tensor import Tensor
    from mp_reference.spec.accumulators import Accumulator

__all__ = [
    "KINDS",
    "LEARNING_RATE",
    "MAX_NORM",
    "STEPS",
    "TrainedStep",
    "batches",
    "by_the_reference",
    "loss_scale",
    "start",
]

Array = np.ndarray[Any, np.dtype[Any]]

STEPS = 20
LEARNING_RATE = 1e-2
MAX_NORM = 1.0
CLASSES, VOCABULARY, CONTEXT = 3, 32, 8
KINDS: dict[str, Any] = {
    "mlp": MLP((5, 16, 16, CLASSES)),
    "transformer": Transformer(VOCABULARY, width=16, layers=2, heads=2, context=CONTEXT, fused=False),
}
"""The models, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What one step computed and left behind.

    Args:
        loss: unscaled, fp32.
        gradients: by parameter, as they were stored: scaled, fp32.
        masters: by parameter, after the step.
        applied: whether the update was made.
        loss_scale: what the loss was multiplied by.
        next_loss_scale: the scale for the next loss.
    """

    loss: float
    gradients: dict[str, Array]
    masters: dict[str, Array]
    applied: bool
    loss_scale: float
    next_loss_scale: float


def batches(kind: str) -> list[Any]:
    """The data of every step.

    Args:
        kind: a key of ``KINDS``.

    Returns:
        (points, classes) or token sequences, ``STEPS`` of them.

    Source: this project.

    >>> len(batches("mlp"))
    20
    """
    random = np.random.default_rng(0)
    if kind == "mlp":
        return [
            (random.standard_normal((8, 5)).astype(np.float32), random.integers(0, CLASSES, 8)) for _ in range(STEPS)
        ]
    return [random.integers(0, VOCABULARY, (4, CONTEXT + 1)) for _ in range(STEPS)]


def start(kind: str) -> dict[str, Array]:
    """First values of the parameters, fp32, by name in torch's order.

    Args:
        kind: a key of ``KINDS``.

    Source: this project.

    >>> list(start("mlp"))[:2]
    ['0.weight', '0.bias']
    """
    model: Model = KINDS[kind]
    return model.parameters(np.random.default_rng(1))


def loss_scale(fmt: str) -> dict[str, Any]:
    """Knobs of the loss scale: in fp16 so high that the first steps overflow, and growing again within the run.

    Args:
        fmt: "fp16" or "bf16".

    Source: this project.

    >>> loss_scale("fp16")["growth_interval"]
    5
    """
    if fmt == "fp16":
        return {"init_scale": 2.0**18, "growth_interval": 5}
    return {"init_scale": 1.0, "dynamic": False}


def by_the_reference(
    kind: str, fmt: str, steps: int = STEPS, accumulator: str | Accumulator = "exact"
) -> list[TrainedStep]:
    """The training on the reference's tape.

    Args:
        kind: a key of ``KINDS``.
        fmt: "fp16" or "bf16": the compute format of mixed precision.
        steps: how many steps.
        accumulator: of every matrix product.

    Returns:
        One record a step.

    Source: mp_reference.nn and mp_reference.amp.

    >>> by_the_reference("mlp", "bf16", steps=1)[0].applied
    True
    """
    precision = replace(precision_named(f"{fmt}-mixed"), arithmetic=Arithmetic(accumulator=accumulator))
    training = Training.of(
        KINDS[kind], _loss(kind), precision, AdamW(lr=LEARNING_RATE), loss_scale=LossScale(**loss_scale(fmt)),
        max_grad_norm=MAX_NORM,
    )  # fmt: skip
    state, records = training.start_from(start(kind)), []
    for batch in batches(kind)[:steps]:
        loss, gradients, _ = training.micro_step(state, batch)
        state, report, _ = training.step(state, [batch])
        records.append(
            TrainedStep(
                loss=loss,
                gradients={name: np.asarray(one) for name, one in zip(state.names, gradients, strict=True)},
                masters=dict(zip(state.names, state.step.masters, strict=True)),
                applied=report.applied,
                loss_scale=report.loss_scale,
                next_loss_scale=report.next_loss_scale,
            )
        )
    return records


def _loss(kind: str) -> Any:
    def classes(model: Model, scope: Scope, batch: Any) -> Tensor:
        return ops.cross_entropy(model(scope, scope.tape.leaf(batch[0])), batch[1])

    def language(model: Model, scope: Scope, batch: Any) -> Tensor:
        logits = ops.reshape(model(scope, batch[:, :-1]), (-1, VOCABULARY))
        return ops.cross_entropy(logits, batch[:, 1:].reshape(-1))

    return classes if kind == "mlp" else language
