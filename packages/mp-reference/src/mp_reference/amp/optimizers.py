"""SGD, Adam and AdamW on fp32 masters: one IEEE operation at a time, in the order that ``spec.optimizers`` states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mp_reference.spec.formats import FP32
from mp_reference.spec.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "OptimizerState"]

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What an optimizer remembers of one parameter.

    Args:
        step: updates applied to this parameter; the t of the bias corrections is the number of the update, from 1.
        slots: name -> fp32 array of the parameter's shape; empty before the first update.

    >>> OptimizerState().step
    0
    """

    step: int = 0
    slots: Mapping[str, Float32Array] = field(default_factory=dict)


class Optimizer(Protocol):
    """What ``mp_reference.amp.step`` asks of an optimizer."""

    def update(
        self, master: Float32Array, gradient: Float32Array, state: OptimizerState
    ) -> tuple[Float32Array, OptimizerState]:
        """The master and the state after one update; the arguments are unchanged."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum, dampening, Nesterov's rule and weight decay.

    Args:
        lr: learning rate, >= 0.
        momentum: 0 keeps no buffer.
        dampening: what the gradient's share of the buffer is reduced by.
        weight_decay: added to the gradient, times the master.
        nesterov: look ahead; needs momentum > 0 and dampening 0.
        maximize: climb.

    Raises:
        ValueError: a hyperparameter outside its range.

    Source: ``mp_reference.spec.optimizers.OPTIMIZERS["sgd"]``.

    >>> w, state = SGD(lr=0.5).update(np.float32([1.0]), np.float32([0.25]), OptimizerState())
    >>> w
    array([0.875], dtype=float32)
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        _at_least_zero(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if not math.isfinite(self.dampening):
            raise ValueError(f"dampening={self.dampening!r} must be finite; 0.0 is usual")
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise ValueError(
                f"nesterov=True needs momentum > 0 and dampening 0, got momentum={self.momentum!r} and dampening="
                f"{self.dampening!r}; set momentum=0.9, dampening=0.0"
            )

    def update(
        self, master: Float32Array, gradient: Float32Array, state: OptimizerState
    ) -> tuple[Float32Array, OptimizerState]:
        """One update.

        Args:
            master: fp32, any shape.
            gradient: fp32, the same shape: unscaled and clipped.
            state: what the last update returned, or a new one.

        Returns:
            New master and new state.

        Source: as the class.

        >>> SGD(lr=1.0, momentum=0.5).update(np.float32([0.0]), np.float32([2.0]), OptimizerState())[1].slots
        {'buffer': array([2.], dtype=float32)}
        """
        slots: dict[str, Float32Array] = {}
        g: Float32Array = -gradient if self.maximize else gradient
        if self.weight_decay != 0:
            g = g + np.float32(self.weight_decay) * master
        if self.momentum != 0:
            momentum = np.float32(self.momentum)
            if "buffer" in state.slots:
                buffer: Float32Array = momentum * state.slots["buffer"] + np.float32(1 - self.dampening) * g
            else:
                buffer = g.copy()
            slots["buffer"] = buffer
            g = g + momentum * buffer if self.nesterov else buffer
        master = master - np.float32(self.lr) * g
        return master, OptimizerState(step=state.step + 1, slots=slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam with bias correction; weight decay, if any, is added to the gradient.

    Args:
        lr: learning rate, >= 0.
        betas: decay of the two moments, each inside [0, 1).
        eps: added to the denominator; at least fp32's smallest number, else a zero gradient divides 0 by 0.
        weight_decay: added to the gradient, times the master.
        amsgrad: divide by the largest second moment so far.
        maximize: climb.

    Raises:
        ValueError: a hyperparameter outside its range.

    Source: ``mp_reference.spec.optimizers.OPTIMIZERS["adam"]``.

    >>> w, state = Adam(lr=0.5).update(np.float32([1.0]), np.float32([3.0]), OptimizerState())
    >>> w, state.step
    (array([0.5], dtype=float32), 1)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        _at_least_zero(lr=self.lr, weight_decay=self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas!r} must be two numbers inside [0, 1); (0.9, 0.999) is usual")
        if not (math.isfinite(self.eps) and self.eps >= FP32.min_subnormal):
            raise ValueError(
                f"eps={self.eps!r} must be finite and at least {FP32.min_subnormal!r}, the smallest fp32 number, or "
                "a zero gradient divides 0 by 0; 1e-8 is usual"
            )

    def update(
        self, master: Float32Array, gradient: Float32Array, state: OptimizerState
    ) -> tuple[Float32Array, OptimizerState]:
        """One update; arguments and result as for ``SGD.update``.

        >>> sorted(Adam(amsgrad=True).update(np.float32([1.0]), np.float32([3.0]), OptimizerState())[1].slots)
        ['m', 'v', 'vmax']
        """
        g: Float32Array = -gradient if self.maximize else gradient
        if self.weight_decay != 0:
            g = g + np.float32(self.weight_decay) * master
        return self._moments(master, g, state)

    def _moments(self, w: Float32Array, g: Float32Array, state: OptimizerState) -> tuple[Float32Array, OptimizerState]:
        beta1, beta2 = self.betas
        t = state.step + 1
        m = state.slots.get("m", np.zeros_like(w))
        v = state.slots.get("v", np.zeros_like(w))
        m = m + np.float32(1 - beta1) * (g - m)
        v = np.float32(beta2) * v + (np.float32(1 - beta2) * g) * g
        slots = {"m": m, "v": v}
        if self.amsgrad:
            v = slots["vmax"] = np.maximum(state.slots.get("vmax", np.zeros_like(w)), v)
        root: Float32Array = np.sqrt(v)
        denominator = root / np.float32(math.sqrt(1 - beta2**t)) + np.float32(self.eps)
        w = w - (np.float32(self.lr / (1 - beta1**t)) * m) / denominator
        return w, OptimizerState(step=t, slots=slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """Adam whose weight decay shrinks the master itself.

    Args: those of ``Adam``; ``weight_decay`` is 0.01 unless given.

    Raises:
        ValueError: a hyperparameter outside its range.

    Source: ``mp_reference.spec.optimizers.OPTIMIZERS["adamw"]``.

    >>> AdamW(lr=0.5, weight_decay=0.5).update(np.float32([1.0]), np.float32([3.0]), OptimizerState())[0]
    array([0.25], dtype=float32)
    """

    weight_decay: float = 1e-2

    def update(
        self, master: Float32Array, gradient: Float32Array, state: OptimizerState
    ) -> tuple[Float32Array, OptimizerState]:
        """One update; arguments and result as for ``Adam.update``.

        >>> AdamW(lr=0.5, weight_decay=0.5).update(np.float32([1.0]), np.float32([-3.0]), OptimizerState())[0]
        array([1.25], dtype=float32)
        """
        g: Float32Array = -gradient if self.maximize else gradient
        return self._moments(master * np.float32(1 - self.lr * self.weight_decay), g, state)


def _at_least_zero(**numbers: Any) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            default = OPTIMIZERS["sgd"].defaults[name]
            raise ValueError(f"{name}={value!r} must be finite and at least 0; {default!r} is the default")
