"""Operations that add or multiply many elements into one: sums, softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mp_reference.nn import kernels
from mp_reference.nn.ops._common import Array, Tape, Tensor, operands, require  # noqa: F401  # the examples use Tape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cumsum", "log_softmax", "mean", "prod", "softmax", "sum"]


def _dims(op: str, x: Tensor, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    listed = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    require(
        all(-x.ndim <= dim < x.ndim for dim in listed), op, f"dims={dims!r} of a tensor of shape {x.shape}",
        f"use dimensions from {-x.ndim} to {x.ndim - 1}",
    )  # fmt: skip
    return kernels.kept_dims(listed, x.ndim)


def _spread(g: Array, shape: tuple[int, ...], dims: tuple[int, ...]) -> Array:
    """A reduced gradient over the shape before the reduction."""
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return np.broadcast_to(g.reshape(kept), shape)


def sum(x: Tensor, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:  # noqa: A001  # torch's
    """Sum over dimensions, all of them unless given.

    Vjp: g, spread. Autocast: sum, output fp32 on cuda. Rounding: in float64, to fp32, then once.

    >>> sum(Tape().leaf(np.full(4, 40000, np.float16))).data
    array(inf, dtype=float16)
    """
    tape, (a,) = operands("sum", x)
    kept = _dims("sum", a, dims)
    (a,), fmt = tape.prepared("sum", a)
    return tape.record(kernels.total(a.carrier, kept, keepdim), fmt, (a,), lambda g: (_spread(g, a.shape, kept),))


def mean(x: Tensor, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Mean over dimensions, all of them unless given.

    Vjp: g over the number of terms, spread. Autocast: mean, no rule.
    Rounding: the quotient in float64, to fp32, then once, so that the sum cannot overflow fp16.

    >>> mean(Tape().leaf(np.full(4, 40000, np.float16))).data
    array(4.e+04, dtype=float16)
    """
    tape, (a,) = operands("mean", x)
    kept = _dims("mean", a, dims)
    (a,), fmt = tape.prepared("mean", a)
    count = a.carrier.dtype.type(math.prod(a.shape[dim] for dim in kept))
    return tape.record(
        kernels.mean(a.carrier, kept, keepdim), fmt, (a,), lambda g: (_spread(g / count, a.shape, kept),)
    )


def prod(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Product along a dimension.

    Vjp: g times the product of the others (right with zeros too), in float64, to fp32. Autocast: prod, output fp32 on
    cuda. Rounding: in float64, to fp32, then once.

    >>> prod(Tape().leaf(np.float16([2.0, 3.0])), 0).data
    array(6., dtype=float16)
    """
    tape, (a,) = operands("prod", x)
    (kept,) = _dims("prod", a, dim)
    (a,), fmt = tape.prepared("prod", a)

    def vjp(g: Array) -> tuple[Array]:
        wide = np.moveaxis(a.carrier.astype(np.float64), kept, 0)
        ones = np.ones_like(wide[:1])
        before = np.cumprod(np.concatenate([ones, wide[:-1]]), axis=0)
        after = np.cumprod(np.concatenate([ones, wide[:0:-1]]), axis=0)[::-1]
        others = np.moveaxis(before * after, 0, kept)
        return ((_spread(g, a.shape, (kept,)) * others).astype(a.carrier.dtype),)

    return tape.record(kernels.product(a.carrier, kept, keepdim), fmt, (a,), vjp)


def cumsum(x: Tensor, dim: int) -> Tensor:
    """Sums of all prefixes along a dimension.

    Vjp: sums of all suffixes of g, in float64, to fp32. Autocast: cumsum, output fp32 on cuda.
    Rounding: each sum in float64, to fp32, then once.

    >>> cumsum(Tape().leaf(np.float16([1.0, 2.0, 3.0])), 0).data
    array([1., 3., 6.], dtype=float16)
    """
    tape, (a,) = operands("cumsum", x)
    (kept,) = _dims("cumsum", a, dim)
    (a,), fmt = tape.prepared("cumsum", a)
    return tape.record(
        kernels.cumulative_sum(a.carrier, kept), fmt, (a,),
        lambda g: (np.flip(kernels.cumulative_sum(np.flip(g, kept), kept), kept),),
    )  # fmt: skip


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Exponentials e ** x over their sum along a dimension.

    Vjp: output * (g - sum(g * output)), fp32 inside. Autocast: softmax.int, output fp32 on cuda.
    Rounding: the whole formula in fp32, then once.

    >>> softmax(Tape().leaf(np.float16([0.0, 0.0]))).data
    array([0.5, 0.5], dtype=float16)
    """
    tape, (a,) = operands("softmax", x)
    (kept,) = _dims("softmax", a, dim)
    (a,), fmt = tape.prepared("softmax.int", a)
    output = tape.arithmetic.rounded(kernels.softmax(a.carrier, kept), fmt)
    return tape.record(output, fmt, (a,), lambda g: (kernels.softmax_backward(g, output, kept),), rounded=True)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of the softmax.

    Vjp: g - e ** output * sum(g), fp32 inside. Autocast: log_softmax.int, output fp32 on cuda.
    Rounding: the whole formula in fp32, then once.

    >>> log_softmax(Tape().leaf(np.float16([0.0, 0.0]))).data
    array([-0.6934, -0.6934], dtype=float16)
    """
    tape, (a,) = operands("log_softmax", x)
    (kept,) = _dims("log_softmax", a, dim)
    (a,), fmt = tape.prepared("log_softmax.int", a)
    output = tape.arithmetic.rounded(kernels.log_softmax(a.carrier, kept), fmt)
    return tape.record(output, fmt, (a,), lambda g: (kernels.log_softmax_backward(g, output, kept),), rounded=True)
