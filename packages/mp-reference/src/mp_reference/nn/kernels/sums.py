"""Kernels that add or multiply along dimensions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mp_reference.nn.kernels._common import Array, kept_dims, narrow, wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "cumulative_sum",
    "log_softmax",
    "log_softmax_backward",
    "mean",
    "product",
    "softmax",
    "softmax_backward",
    "total",
]


def total(x: Array, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: object = None) -> Array:
    """Sum over dimensions; the caller rounds, to ``dtype`` where one is given."""
    del dtype
    kept = kept_dims(dims, x.ndim)
    with np.errstate(all="ignore"):
        return narrow(np.sum(np.asarray(x, order="C"), axis=kept, keepdims=keepdim, dtype=np.float64), x)


def mean(x: Array, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: object = None) -> Array:
    """Sum over dimensions, divided by the number of terms; the caller rounds, to ``dtype`` where one is given."""
    del dtype
    kept = kept_dims(dims, x.ndim)
    count = math.prod(x.shape[dim] for dim in kept)
    with np.errstate(all="ignore"):
        return narrow(np.sum(np.asarray(x, order="C"), axis=kept, keepdims=keepdim, dtype=np.float64) / count, x)


def product(x: Array, dim: int, keepdim: bool = False) -> Array:
    """Product along a dimension."""
    with np.errstate(all="ignore"):
        return narrow(np.prod(wide(x), axis=dim, keepdims=keepdim), x)


def cumulative_sum(x: Array, dim: int) -> Array:
    """Sums of all prefixes along a dimension."""
    with np.errstate(all="ignore"):
        return narrow(np.cumsum(wide(x), axis=dim), x)


def _shifted(x: Array, dim: int) -> NDArray[np.float64]:
    """Value less its largest element, in float64; a row of -inf alone gives NaN, as on a device."""
    z = wide(x)
    with np.errstate(invalid="ignore"):
        return np.asarray(z - np.max(z, axis=dim, keepdims=True))


def softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:  # noqa: ARG001  # the caller rounds
    """e**x over its sum along a dimension."""
    terms = np.exp(_shifted(x, dim))
    return narrow(terms / terms.sum(axis=dim, keepdims=True), x)


def softmax_backward(gradient: Array, output: Array, dim: int, input_dtype: object = None) -> Array:  # noqa: ARG001
    """Output * (gradient - sum(gradient * output))."""
    g, y = wide(gradient), wide(output)
    with np.errstate(all="ignore"):
        return narrow(y * (g - (g * y).sum(axis=dim, keepdims=True)), gradient)


def log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:  # noqa: ARG001  # the caller rounds
    """Logarithm of the softmax."""
    z = _shifted(x, dim)
    return narrow(z - np.log(np.exp(z).sum(axis=dim, keepdims=True)), x)


def log_softmax_backward(gradient: Array, output: Array, dim: int, input_dtype: object = None) -> Array:  # noqa: ARG001
    """Gradient - e**output * sum(gradient)."""
    g = wide(gradient)
    with np.errstate(all="ignore"):
        return narrow(g - np.exp(wide(output)) * g.sum(axis=dim, keepdims=True), gradient)
