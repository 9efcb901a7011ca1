"""The step as torch's fused CPU kernels compute it: where they contract a product and a sum into one rounding.

``amp.step`` rounds every operation on its own. torch's fused optimizers read each gradient once, fold loss scale and
clip coefficient into one divisor, and are compiled with fused multiply-add in known places, which differ between the
body, which fills whole vectors, and the tail. The engine's ``update="fused"`` is this model, bit for bit, on a CPU with
FMA; without it (``torch.backends.cpu.get_cpu_capability()`` is ``"DEFAULT"``) the kernels contract elsewhere or not at
all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mp_reference.amp.clipping import clip_coefficient, rounded_sqrt, tree_sum
from mp_reference.amp.optimizers import SGD, Adam, AdamW, Optimizer, OptimizerState
from mp_reference.amp.step import StepPolicy, StepState, divisor_of
from mp_reference.numerics.arithmetic import fma
from mp_reference.numerics.reductions import norm
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.accumulators import lanes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FUSED_WIDTH", "fused_norm", "fused_step", "fused_update", "update_bound"]

Float32Array = NDArray[np.float32]

FUSED_WIDTH = 8
"""Floats in a vector of the fused kernels: they are built for AVX2, on a CPU with AVX-512 as well."""

_SQUARES_LOST = 1e-20
"""Below this total of squares fp32 may have lost some; they are added again in float64."""


def fused_norm(gradients: Sequence[Float32Array], divisor: float = 1.0, width: int = FUSED_WIDTH) -> float:
    """The norm that the fused path clips by: fp32 norms of pieces of 2**18 elements, their squares added in float64.

    Args:
        gradients: fp32, as stored, in parameter order.
        divisor: what they are scaled by.
        width: lanes of the norm kernel.

    Returns:
        The norm of the unscaled gradients: an fp32 value, or a float64 one beyond fp32; infinite or NaN with them.

    Source: torch 2.13, vector_norm on the CPU, as measured.

    >>> fused_norm([np.float32([3.0]), np.float32([4.0])], divisor=2.0)
    2.5
    """
    with np.errstate(all="ignore"):  # what overflows in fp32 is added again in float64
        squares = np.array([_square(one.reshape(-1), width) for one in gradients], np.float64)
        if not _SQUARES_LOST <= squares.sum() < math.inf:
            squares = np.array([tree_sum(np.square(one, dtype=np.float64)) for one in gradients], np.float64)
        return rounded_sqrt(tree_sum(squares / (divisor * divisor)))


def _square(flat: Float32Array, width: int) -> float:
    """Sum of squares of one tensor: that of its pieces, in ``tree_sum``'s order."""
    pieces = [flat[start : start + _PIECE] for start in range(0, max(flat.size, 1), _PIECE)]
    return tree_sum(np.square(np.array([norm(piece, lanes(width)) for piece in pieces], np.float64)))


_PIECE = 1 << 18
"""Elements that one fp32 norm adds up; a sum over many more would stand still."""


def fused_update(
    optimizer: Optimizer,
    master: Float32Array,
    gradient: Float32Array,
    state: OptimizerState,
    *,
    scale: float | None = None,
    width: int = FUSED_WIDTH,
) -> tuple[Float32Array, OptimizerState]:
    """One update as the fused kernel makes it.

    Args:
        optimizer: its settings.
        master: fp32, any shape.
        gradient: fp32, the same shape, as stored.
        state: what the last update returned, or a new one.
        scale: fp32 number that the kernel divides the gradient by; None does not divide.
        width: floats in a vector; the last ``size % width`` elements are the tail.

    Returns:
        New master and new state.

    Raises:
        TypeError: an optimizer that has no such model.

    Source: torch 2.13, FusedSGDKernel.cpp and FusedAdamKernel.cpp, as measured.

    >>> fused_update(SGD(lr=0.5), np.float32([1.0]), np.float32([4.0]), OptimizerState(), scale=4.0)[0]
    array([0.5], dtype=float32)
    """
    if not isinstance(optimizer, SGD | Adam):
        raise TypeError(f"{type(optimizer).__name__} has no model of a fused kernel; use SGD, Adam or AdamW")
    g: Float32Array = gradient if scale is None else gradient / np.float32(scale)
    g = -g if optimizer.maximize else g
    body = np.arange(master.size).reshape(master.shape) < master.size // width * width
    if isinstance(optimizer, SGD):
        return _sgd(optimizer, master, g, state, body)
    return _adam(optimizer, master, g, state, body)


def fused_step(
    policy: StepPolicy,
    state: StepState,
    gradients: Sequence[Float32Array],
    weight: float = 1.0,
    width: int = FUSED_WIDTH,
) -> tuple[StepState, float, float]:
    """One step of fp32 masters in the arithmetic of the fused path.

    Args:
        policy: as for ``amp.step.step``; Euclidean norm, fp32 masters, nearest-even write-back, no clipping by value.
        state: as there; unchanged.
        gradients: fp32, as stored, one a parameter.
        weight: the window's total weight.
        width: floats in a vector of the kernels.

    Returns:
        The new state, the norm before clipping, and the clip coefficient. A gradient that is not finite after unscaling
        changes only the loss scale's state.

    Raises:
        LossScaleError: the loss scale's policy ends the run.

    Source: docs/engine.md, "Exact and fused".

    >>> from mp_reference.amp.step import initial_state
    >>> policy = StepPolicy(optimizer=SGD(lr=0.5), max_grad_norm=1.0)
    >>> fused_step(policy, initial_state(policy, [np.float32([1.0])]), [np.float32([0.5])])[1:]
    (0.5, 1.0)
    """
    divisor = float(divisor_of(state, weight))
    with np.errstate(all="ignore"):  # what overflows here is data: the decision below is about it
        bad = any(not np.isfinite(one / np.float32(divisor)).all() for one in gradients)
        total = fused_norm(gradients, divisor, width)
    moved = policy.loss_scale.next(state.loss_scale, found_inf=bad)
    if bad:
        return replace(state, loss_scale=moved), total, 1.0
    coefficient = 1.0 if policy.max_grad_norm is None else clip_coefficient(total, policy.max_grad_norm)
    with np.errstate(all="ignore"):  # an update may overflow as it likes; IEEE says what it gives
        folded = float(np.float32(divisor / coefficient))
        if math.isinf(folded):  # no fp32 number holds both: unscale and clip before the kernel
            gradients = [one / np.float32(divisor) * np.float32(coefficient) for one in gradients]
            folded = 1.0
        rules = policy.optimizer if isinstance(policy.optimizer, list | tuple) else [policy.optimizer] * len(gradients)
        updated = [
            fused_update(rule, master, gradient, memory, scale=None if folded == 1.0 else folded, width=width)
            for rule, master, gradient, memory in zip(rules, state.masters, gradients, state.optimizer, strict=True)
        ]
        parameters = [round_to(w, fmt).astype(fmt.dtype) for (w, _), fmt in zip(updated, state.formats, strict=True)]
    new = replace(
        state,
        masters=tuple(w for w, _ in updated),
        parameters=tuple(parameters),
        optimizer=tuple(memory for _, memory in updated),
        loss_scale=moved,
        update_index=state.update_index + 1,
    )
    return new, total, coefficient


def update_bound(
    optimizer: SGD | Adam, master: Float32Array, gradient: Float32Array, state: OptimizerState
) -> NDArray[np.float64]:
    """How far one update may lie from ``optimizer.update`` if products and sums are contracted elsewhere, or nowhere.

    Every operation of either form has a relative error of at most u = 2**-24; a contraction only takes one away. Both
    results therefore lie within k u / (1 - k u) of the exact one, relative to the same formula with every term replaced
    by its magnitude, where k counts the roundings on the longest path. Their distance is at most twice that.

    Args:
        optimizer: its settings.
        master: fp32.
        gradient: fp32, as the update uses it: unscaled and clipped. What dividing by a folded scale adds (3 roundings
            instead of 2) is included.
        state: before the update.

    Returns:
        float64, an absolute bound for each element of the master; underflow is not covered.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. (2002), 2.2 and 3.1.

    >>> sgd, w, g = SGD(lr=0.1), np.float32([1.0]), np.float32([0.3])
    >>> apart = fused_update(sgd, w, g, OptimizerState())[0] - sgd.update(w, g, OptimizerState())[0]
    >>> bool(abs(apart) <= update_bound(sgd, w, g, OptimizerState()))
    True
    """
    w, g = np.abs(master, dtype=np.float64), np.abs(gradient, dtype=np.float64)
    if isinstance(optimizer, SGD):
        g = g + optimizer.weight_decay * w
        old = np.abs(state.slots.get("buffer", np.zeros_like(master)), dtype=np.float64)
        buffer = optimizer.momentum * old + (abs(1 - optimizer.dampening) if "buffer" in state.slots else 1.0) * g
        g = g + optimizer.momentum * buffer if optimizer.nesterov else buffer
        return np.asarray(_apart(_DIRECT) * w + _apart(_ROUNDINGS) * optimizer.lr * g)
    (beta1, beta2), t, zeros = optimizer.betas, state.step + 1, np.zeros_like(master)
    signed = gradient.astype(np.float64) * (-1 if optimizer.maximize else 1)
    if not isinstance(optimizer, AdamW):
        signed, g = signed + optimizer.weight_decay * master, g + optimizer.weight_decay * w
    m = np.abs(state.slots.get("m", zeros), dtype=np.float64)
    m = m + (1 - beta1) * (g + m)
    v = beta2 * state.slots.get("v", zeros).astype(np.float64) + (1 - beta2) * np.square(signed)
    slack = (1 - beta2) * _apart(_ROUNDINGS) * np.square(g)  # gradient and decay may cancel inside the square
    largest = state.slots.get("vmax", zeros).astype(np.float64) if optimizer.amsgrad else 0.0

    def step(second: NDArray[np.float64]) -> NDArray[np.float64]:
        root = np.sqrt(np.maximum(np.maximum(second, largest), 0.0))
        return np.asarray(optimizer.lr / (1 - beta1**t) * m / (root / math.sqrt(1 - beta2**t) + optimizer.eps))

    longest = step(v - slack)
    return np.asarray(_apart(_DIRECT) * w + _apart(_ROUNDINGS) * longest + (longest - step(v + slack)))


_DIRECT, _ROUNDINGS = 4, 20
"""Roundings on the path of the master itself, and on the longest one: of an Adam update, hyperparameters included."""


def _apart(count: int) -> float:
    """Relative distance of two results with at most so many roundings each."""
    unit = count * 2.0**-24
    return 2 * unit / (1 - unit)


def _sgd(
    optimizer: SGD, w: Float32Array, g: Float32Array, state: OptimizerState, body: NDArray[np.bool_]
) -> tuple[Float32Array, OptimizerState]:
    slots: dict[str, Float32Array] = {}
    if optimizer.weight_decay != 0:
        g = _fma(w, optimizer.weight_decay, g)
    if optimizer.momentum != 0:
        momentum, share = np.float32(optimizer.momentum), np.float32(1 - optimizer.dampening)
        if "buffer" in state.slots:
            old = state.slots["buffer"]
            buffer: Float32Array = np.where(body, _fma(g, share, old * momentum), _fma(old, momentum, g * share))
        else:
            buffer = g.copy()
        slots["buffer"] = buffer
        g = _fma(buffer, momentum, g) if optimizer.nesterov else buffer
    return _fma(g, -optimizer.lr, w), OptimizerState(step=state.step + 1, slots=slots)


def _adam(
    optimizer: Adam, w: Float32Array, g: Float32Array, state: OptimizerState, body: NDArray[np.bool_]
) -> tuple[Float32Array, OptimizerState]:
    (beta1, beta2), lr, t = optimizer.betas, optimizer.lr, state.step + 1
    if optimizer.weight_decay != 0:
        if isinstance(optimizer, AdamW):
            w = w * np.float32(1 - lr * optimizer.weight_decay)
        else:
            g = _fma(w, optimizer.weight_decay, g)
    zeros = np.zeros_like(w)
    m = _lerp(state.slots.get("m", zeros), g, 1 - beta1)
    old, decay, share = state.slots.get("v", zeros), np.float32(beta2), np.float32(1 - beta2)
    v: Float32Array = np.where(body, _fma(share * g, g, old * decay), _fma(old, decay, (share * g) * g))
    slots = {"m": m, "v": v}
    if optimizer.amsgrad:
        v = slots["vmax"] = np.maximum(state.slots.get("vmax", zeros), v)
    root: Float32Array = np.sqrt(v)
    denominator = root / np.float32(math.sqrt(1 - beta2**t)) + np.float32(optimizer.eps)
    w = w + (np.float32(-(lr / (1 - beta1**t))) * m) / denominator
    return w, OptimizerState(step=t, slots=slots)


def _lerp(start: Float32Array, end: Float32Array, weight: float) -> Float32Array:
    """The linear interpolation of torch: from the nearer end, one rounding."""
    near = np.float32(weight)
    if abs(near) < np.float32(0.5):
        return _fma(end - start, near, start)
    return _fma(end - start, near - np.float32(1), end)


def _fma(a: Float32Array, b: Float32Array | np.float32 | float, c: Float32Array) -> Float32Array:
    result: Float32Array = fma(a, np.broadcast_to(np.asarray(b, np.float32), a.shape), c)
    return result
