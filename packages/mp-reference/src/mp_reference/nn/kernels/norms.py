"""Kernels of the normalisations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mp_reference.nn.kernels._common import Array, narrow, wide

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "channel_norm",
    "channel_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]


def layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, with mean and 1 / sqrt(...)."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    return _normalised(x, axes, weight, bias, eps)


def _normalised(
    x: Array, axes: tuple[int, ...], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    with np.errstate(all="ignore"):
        z = wide(x)
        mean64 = z.mean(axis=axes, keepdims=True)
        centred = z - mean64
        rstd64 = 1 / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + eps)
        y = centred * rstd64
        y = y if weight is None else y * wide(weight)
        y = y if bias is None else y + wide(bias)
        return narrow(y, x), narrow(mean64, x), narrow(rstd64, x)


def layer_norm_backward(
    gradient: Array,
    x: Array,
    normalized_shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,  # noqa: ARG001  # ATen's signature
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of x, weight and bias, from the saved mean and rstd."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    return _normalised_backward(gradient, x, axes, mean, rstd, weight, tuple(range(axes[0])), output_mask)


def _normalised_backward(
    gradient: Array,
    x: Array,
    axes: tuple[int, ...],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    weight_axes: tuple[int, ...],
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    with np.errstate(all="ignore"):
        g, normal = wide(gradient), (wide(x) - wide(mean)) * wide(rstd)
        to_weight = narrow((g * normal).sum(axis=weight_axes), x) if output_mask[1] and weight is not None else None
        to_bias = narrow(g.sum(axis=weight_axes), x) if output_mask[2] else None
        if not output_mask[0]:
            return None, to_weight, to_bias
        inner = g if weight is None else g * wide(weight)
        spread = (inner * normal).mean(axis=axes, keepdims=True)
        to_x = wide(rstd) * (inner - inner.mean(axis=axes, keepdims=True) - normal * spread)
        return narrow(to_x, x), to_weight, to_bias


def rms_norm(x: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float) -> tuple[Array, Array]:
    """Quotient x / sqrt(mean(x**2) + eps) * weight over the last dimensions, with 1 / sqrt(...)."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    with np.errstate(all="ignore"):
        z = wide(x)
        rstd64 = 1 / np.sqrt((z * z).mean(axis=axes, keepdims=True) + eps)
        y = z * rstd64
        return narrow(y if weight is None else y * wide(weight), x), narrow(rstd64, x)


def rms_norm_backward(
    gradient: Array, x: Array, normalized_shape: Sequence[int], rstd: Array, weight: Array | None
) -> tuple[Array, Array | None]:
    """Gradients of x and weight, from the saved rstd."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    with np.errstate(all="ignore"):
        g, normal = wide(gradient), wide(x) * wide(rstd)
        to_weight = None if weight is None else narrow((g * normal).sum(axis=tuple(range(axes[0]))), x)
        inner = g if weight is None else g * wide(weight)
        spread = (inner * normal).mean(axis=axes, keepdims=True)
        return narrow(wide(rstd) * (inner - normal * spread), x), to_weight


def channel_norm(
    x: Array, axes: tuple[int, ...], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Batch norm and group norm: statistics over ``axes``; weight and bias already have the shape that broadcasts."""
    return _normalised(x, axes, weight, bias, eps)


def channel_norm_backward(
    gradient: Array,
    x: Array,
    axes: tuple[int, ...],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    weight_axes: tuple[int, ...],
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of x, weight and bias of ``channel_norm``; the latter two summed over ``weight_axes``."""
    return _normalised_backward(gradient, x, axes, mean, rstd, weight, weight_axes, (True, True, True))
