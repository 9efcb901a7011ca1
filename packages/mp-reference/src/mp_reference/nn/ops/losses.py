"""Losses; each is one fp32 operation on cuda under autocast."""

from __future__ import annotations

from typing import Literal

import numpy as np  # noqa: F401  # the examples use it

from mp_reference.nn import kernels
from mp_reference.nn.ops._common import Array, Tape, Tensor, operands, require  # noqa: F401  # the examples use Tape
from mp_reference.nn.ops.reductions import log_softmax

__all__ = ["bce_with_logits", "cross_entropy", "mse_loss", "nll_loss"]

Reduction = Literal["mean", "sum", "none"]
_CODES = {"none": 0, "mean": 1, "sum": 2}


def _code(op: str, reduction: str) -> int:
    require(reduction in _CODES, op, f"reduction={reduction!r}", "use 'mean', 'sum' or 'none'")
    return _CODES[reduction]


def nll_loss(
    x: Tensor, target: Array, weight: Array | None = None, reduction: Reduction = "mean", ignore_index: int = -100
) -> Tensor:
    """Minus the log probability at each row's target; x is (N, C), target (N,) of integers, weight (C,) by class.

    Vjp: minus g (over the total weight for a mean) at the target. Autocast: nll_loss, fp32 on cuda.
    Rounding: in float64, to fp32, then once.

    >>> float(nll_loss(Tape().leaf(np.float16([[-1.0, -2.0]])), np.array([1])).data)
    2.0
    """
    tape, (a,) = operands("nll_loss", x)
    code = _code("nll_loss", reduction)
    _check_target("nll_loss", a, target, ignore_index)
    (a,), fmt = tape.prepared("nll_loss", a)
    output, total = kernels.nll_loss(a.carrier, target, weight, code, ignore_index)
    return tape.record(
        output, fmt, (a,),
        lambda g: (kernels.nll_loss_backward(g, a.carrier, target, weight, code, ignore_index, total),),
    )  # fmt: skip


def _check_target(op: str, x: Tensor, target: Array, ignore_index: int) -> None:
    require(
        x.ndim == 2 and target.shape == x.shape[:1] and target.dtype.kind in "iu",
        op,
        f"x {x.shape} with target {target.shape} of {target.dtype}",
        "x is (N, C), target (N,) of integers",
    )
    kept = target[target != ignore_index]
    require(kept.size == 0 or (kept.min() >= 0 and kept.max() < x.shape[1]), op,
            f"a target outside 0..{x.shape[1] - 1}", f"mark rows to leave out with {ignore_index}")  # fmt: skip


def cross_entropy(
    x: Tensor, target: Array, weight: Array | None = None, reduction: Reduction = "mean", ignore_index: int = -100
) -> Tensor:
    """nll_loss(log_softmax(x), target): two recorded operations, as torch composes them.

    Vjp: that of the two. Autocast: cross_entropy_loss, whose parts are fp32 on cuda. Rounding: that of the two.

    >>> round(float(cross_entropy(Tape().leaf(np.float32([[0.0, 0.0]])), np.array([1])).data), 4)
    0.6931
    """
    tape, (a,) = operands("cross_entropy", x)
    _check_target("cross_entropy", a, target, ignore_index)
    (a,), _ = tape.prepared("cross_entropy_loss", a)
    return nll_loss(log_softmax(a, 1), target, weight, reduction, ignore_index)


def mse_loss(x: Tensor, target: Array | Tensor, reduction: Reduction = "mean") -> Tensor:
    """(x - target) ** 2, its mean or sum; a target on the tape takes part as a constant.

    Vjp: 2 (x - target) g, over the number of elements for a mean. Autocast: mse_loss, fp32 on cuda.
    Rounding: in float64, to fp32, then once.

    >>> float(mse_loss(Tape().leaf(np.float32([1.0, 3.0])), np.float32([0.0, 0.0])).data)
    5.0
    """
    tape, (a,) = operands("mse_loss", x)
    code = _code("mse_loss", reduction)
    aim = target.carrier if isinstance(target, Tensor) else target
    require(aim.shape == a.shape, "mse_loss", f"x {a.shape} with target {aim.shape}", "make the shapes equal")
    (a,), fmt = tape.prepared("mse_loss", a)
    return tape.record(
        kernels.mse_loss(a.carrier, aim, code), fmt, (a,),
        lambda g: (kernels.mse_loss_backward(g, a.carrier, aim, code),),
    )  # fmt: skip


def bce_with_logits(x: Tensor, target: Array, reduction: Reduction = "mean") -> Tensor:
    """Cross entropy of sigmoid(x) with targets in [0, 1], computed from the logits without overflow.

    Vjp: (sigmoid(x) - target) g, over the number of elements for a mean.
    Autocast: binary_cross_entropy_with_logits, fp32 on cuda. Rounding: in float64, to fp32, then once.

    >>> round(float(bce_with_logits(Tape().leaf(np.float32([0.0])), np.float32([1.0])).data), 4)
    0.6931
    """
    tape, (a,) = operands("bce_with_logits", x)
    code = _code("bce_with_logits", reduction)
    require(target.shape == a.shape, "bce_with_logits", f"x {a.shape} with target {target.shape}", "make them equal")
    (a,), fmt = tape.prepared("binary_cross_entropy_with_logits", a)
    return tape.record(
        kernels.bce_with_logits(a.carrier, target, code), fmt, (a,),
        lambda g: (kernels.bce_with_logits_backward(g, a.carrier, target, code),),
    )  # fmt: skip
