"""Training: a model, a precision and a step as pure functions; one call is one update of the whole state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.amp.step import StepPolicy, StepReport, StepState, initial_state, step
from mp_reference.nn.arithmetic import Arithmetic, Rules
from mp_reference.nn.layers import Model, Parameters, Scope
from mp_reference.nn.tensor import Tape, Tensor
from mp_reference.spec.formats import BF16, FP16, FP32, FloatFormat

if TYPE_CHECKING:
    from mp_reference.amp.optimizers import Optimizer

__all__ = ["PRECISIONS", "Precision", "Trained", "Training", "precision_named"]

Array = NDArray[Any]
LossFunction = Callable[[Model, Scope, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How values are stored and computed.

    Args:
        name: what to call it.
        storage: the format of the parameters that the model computes with.
        rules: the op rules that cast the operations' inputs; None computes in the storage format.
        arithmetic: how results are rounded and products added.
        master_weights: "fp32", "none" or "kahan", as ``StepPolicy`` has it.
        write_back: the rounding of the write-back.
        accumulate: the format that gradients are summed in over micro-steps; the storage format unless given.

    Source: ARCHITECTURE's precision names, whose rows are ``PRECISIONS``.

    >>> precision_named("bf16-true").storage.name
    'bf16'
    """

    name: str
    storage: FloatFormat = FP32
    rules: Rules | None = None
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    master_weights: Any = "fp32"
    write_back: Any = "nearest-even"
    accumulate: FloatFormat | None = None


PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(name="fp32"),
        Precision(name="tf32", arithmetic=Arithmetic(tf32=True)),
        Precision(name="fp16-mixed", rules=Rules(fmt=FP16)),
        Precision(name="bf16-mixed", rules=Rules(fmt=BF16)),
        Precision(name="fp16-true", storage=FP16),
        Precision(name="bf16-true", storage=BF16),
        Precision(name="bf16-sr", storage=BF16, master_weights="none", write_back="stochastic"),
        Precision(name="bf16-kahan", storage=BF16, master_weights="kahan"),
    )
}
"""Every precision that needs no scale of its own, by name."""


def precision_named(name: str) -> Precision:
    """Look a precision up by its name.

    Args:
        name: a key of ``PRECISIONS``.

    Returns:
        The row; ``dataclasses.replace`` changes its rules, accumulator or formats.

    Raises:
        ValueError: no precision has this name.

    Source: ``PRECISIONS``.

    >>> precision_named("fp16-mixed").rules.fmt.name
    'fp16'
    """
    if name not in PRECISIONS:
        raise ValueError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}; build others with Precision(...)")
    return PRECISIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Everything that training remembers between steps.

    Args:
        names: the parameters' names, in the order of ``step``'s arrays.
        step: masters, parameters, moments and the loss scale.
        buffers: what the layers remember, such as batch norm's statistics.
    """

    names: tuple[str, ...]
    step: StepState
    buffers: Parameters

    @property
    def parameters(self) -> Parameters:
        """The parameters by name, in their storage format."""
        return dict(zip(self.names, self.step.parameters, strict=True))


@dataclass(frozen=True, slots=True)
class Training:
    """A model under a precision and a step policy.

    Args:
        model: what is trained.
        loss: (model, scope, batch) -> a tensor of one element.
        precision: how values are stored and computed.
        policy: the step; its master weights and write-back are the precision's.

    Source: none.

    >>> from mp_reference.amp.optimizers import SGD
    >>> from mp_reference.nn import ops
    >>> from mp_reference.nn.models import MLP
    >>> def loss(model, scope, batch):
    ...     return ops.mse_loss(model(scope, scope.tape.leaf(batch[0])), batch[1])
    >>> training = Training.of(MLP((2, 1)), loss, precision_named("fp16-mixed"), SGD(lr=0.1))
    >>> state = training.start(np.random.default_rng(0))
    >>> batch = (np.float32([[1.0, 2.0]]), np.float32([[3.0]]))
    >>> for _ in range(20):
    ...     state, report, losses = training.step(state, [batch])
    >>> losses[0] < 1e-4
    True
    """

    model: Model
    loss: LossFunction
    precision: Precision
    policy: StepPolicy

    @classmethod
    def of(
        cls, model: Model, loss: LossFunction, precision: Precision, optimizer: Optimizer, **options: Any
    ) -> Training:
        """Build the step policy from the precision, an optimizer and the other fields of ``StepPolicy``."""
        policy = StepPolicy(
            optimizer=optimizer, master_weights=precision.master_weights, write_back=precision.write_back, **options
        )
        return cls(model, loss, precision, policy)

    def start(self, random: np.random.Generator) -> Trained:
        """The state before the first step, from random first values."""
        return self.start_from(self.model.parameters(random))

    def start_from(self, parameters: Parameters) -> Trained:
        """The state before the first step, from given fp32 values by name."""
        return Trained(
            names=tuple(parameters),
            step=initial_state(self.policy, list(parameters.values()), self.precision.storage),
            buffers=self.model.buffers(),
        )

    def micro_step(
        self,
        state: Trained,
        batch: Any,
        weight: float = 1.0,
        into: Sequence[Array | None] | None = None,
        observe: Callable[[Array], None] | None = None,
    ) -> tuple[float, list[Array | None], Parameters]:
        """One forward and backward pass.

        Args:
            state: what is trained; unchanged.
            batch: handed to the loss function.
            weight: the micro-step's weight in its window.
            into: gradients of earlier micro-steps of the window.
            observe: called with the gradient of every recorded value.

        Returns:
            The loss, the sums of the gradients of the scaled and weighted losses, and the new buffers.
        """
        tape = Tape(self.precision.arithmetic, self.precision.rules)
        leaves = {
            name: tape.leaf(value, self.precision.storage, requires_grad=True)
            for name, value in state.parameters.items()
        }
        scope = Scope(tape, leaves, state.buffers)
        with np.errstate(all="ignore"):
            loss = self.loss(self.model, scope, batch)
        seed = float(np.float32(state.step.loss_scale.scale * weight))
        wrt = list(leaves.values())
        gradients = tape.gradients(loss, wrt, seed, into, self.precision.accumulate, observe)
        return float(loss.carrier.reshape(())), gradients, {**state.buffers, **scope.new_buffers}

    def step(
        self,
        state: Trained,
        batches: Sequence[Any],
        weights: Sequence[float] | None = None,
        random: np.random.Generator | None = None,
        observe: Callable[[Array], None] | None = None,
    ) -> tuple[Trained, StepReport, list[float]]:
        """One update from a window of micro-steps; a skip gives the buffers back as they were.

        Args:
            state: what is trained; unchanged.
            batches: one a micro-step.
            weights: one a micro-step, 1.0 each unless given.
            random: where a stochastic write-back takes its bits from.
            observe: called with the gradient of every recorded value.

        Returns:
            The new state, the report, and each micro-step's loss.
        """
        weights = [1.0] * len(batches) if weights is None else weights
        gradients: list[Array | None] | None = None
        losses, moved = [], state
        for batch, weight in zip(batches, weights, strict=True):
            loss, gradients, buffers = self.micro_step(moved, batch, weight, gradients, observe)
            moved = replace(moved, buffers=buffers)
            losses.append(loss)
        bits = None
        if self.policy.write_back == "stochastic" and random is not None:
            bits = [random.integers(0, 2**32, value.shape, dtype=np.uint32) for value in state.step.parameters]
        new, report = step(self.policy, state.step, gradients or [], sum(weights), bits)
        buffers = moved.buffers if report.applied else state.buffers
        return Trained(names=state.names, step=new, buffers=buffers), report, losses
