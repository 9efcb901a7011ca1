"""Normalisations: layer, root mean square, group and batch, with batch norm's buffers as arguments and results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.nn import kernels
from mp_reference.nn.ops._common import Array, Tape, Tensor, operands, require

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["batch_norm", "group_norm", "layer_norm", "rms_norm"]


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [one for one in tensors if one is not None]


def _carrier(x: Tensor | None) -> Array | None:
    return None if x is None else x.carrier


def _affine(
    op: str, rule: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> tuple[Tape, Tensor, Tensor | None, Tensor | None, Any]:
    """Check and prepare x with an optional weight and bias of one shape."""
    tape, _ = operands(op, *_given(x, weight, bias))
    for name, one in (("weight", weight), ("bias", bias)):
        require(one is None or one.shape == shape, op, f"{name} has shape {one and one.shape}, x {x.shape}",
                f"{name} must have shape {shape}")  # fmt: skip
    prepared, fmt = tape.prepared(rule, *_given(x, weight, bias))
    rest = list(prepared[1:])
    return (
        tape, prepared[0], None if weight is None else rest.pop(0), None if bias is None else rest.pop(0), fmt,
    )  # fmt: skip


def _chosen(gradients: Sequence[Array | None], weight: Tensor | None, bias: Tensor | None) -> list[Array | None]:
    """Gradients of the inputs that exist."""
    return [
        gradients[0],
        *([gradients[1]] if weight is not None else []),
        *([gradients[2]] if bias is not None else []),
    ]


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions.

    Vjp: from mean and 1 / sqrt(...) saved in fp32, fp32 inside. Autocast: layer_norm, fp32 on cuda.
    Rounding: the whole formula in fp32, then once.

    >>> layer_norm(Tape().leaf(np.float16([1.0, 3.0])), [2], eps=0.0).data
    array([-1.,  1.], dtype=float16)
    """
    shape = tuple(normalized_shape)
    require(len(shape) > 0 and x.shape[-len(shape) :] == shape, "layer_norm",
            f"normalized_shape={shape} is not the end of x's {x.shape}", "give the last dimensions")  # fmt: skip
    tape, a, w, b, fmt = _affine("layer_norm", "layer_norm", x, weight, bias, shape)
    output, mean, rstd = kernels.layer_norm(a.carrier, shape, _carrier(w), _carrier(b), eps)
    return tape.record(
        output, fmt, _given(a, w, b),
        lambda g: _chosen(
            kernels.layer_norm_backward(g, a.carrier, shape, mean, rstd, _carrier(w), _carrier(b)), w, b
        ),
    )  # fmt: skip


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divide by the root of the mean square: x / sqrt(mean(x ** 2) + eps) * weight over the last dimensions.

    Vjp: from 1 / sqrt(...) saved in fp32, fp32 inside. Autocast: rms_norm, fp32 on cuda.
    Rounding: the whole formula in fp32, then once.

    >>> rms_norm(Tape().leaf(np.float16([3.0, 3.0])), [2], eps=0.0).data
    array([1., 1.], dtype=float16)
    """
    shape = tuple(normalized_shape)
    require(len(shape) > 0 and x.shape[-len(shape) :] == shape, "rms_norm",
            f"normalized_shape={shape} is not the end of x's {x.shape}", "give the last dimensions")  # fmt: skip
    tape, a, w, _, fmt = _affine("rms_norm", "rms_norm", x, weight, None, shape)
    output, rstd = kernels.rms_norm(a.carrier, shape, _carrier(w), eps)

    def vjp(g: Array) -> list[Array | None]:
        to_x, to_weight = kernels.rms_norm_backward(g, a.carrier, shape, rstd, _carrier(w))
        return _chosen((to_x, to_weight, None), w, None)

    return tape.record(output, fmt, _given(a, w), vjp)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each sample over groups of channels, then weight and bias each channel; x is (N, C, ...).

    Vjp: from mean and 1 / sqrt(...) saved in fp32, fp32 inside. Autocast: group_norm, fp32 on cuda.
    Rounding: the whole formula in fp32, then once.

    >>> group_norm(Tape().leaf(np.float16([[1.0, 3.0, 5.0, 7.0]])), 2, eps=0.0).data
    array([[-1.,  1., -1.,  1.]], dtype=float16)
    """
    require(x.ndim >= 2 and x.shape[1] % groups == 0, "group_norm", f"groups={groups} of x {x.shape}",
            "x is (N, C, ...) and groups divides C")  # fmt: skip
    channels = x.shape[1]
    tape, a, w, b, fmt = _affine("group_norm", "group_norm", x, weight, bias, (channels,))
    split = (x.shape[0], groups, channels // groups, *x.shape[2:])
    axes, others = tuple(range(2, len(split))), (0, *range(3, len(split)))
    ones = (1, groups, channels // groups) + (1,) * (x.ndim - 2)
    shaped = [None if one is None else one.carrier.reshape(ones) for one in (w, b)]
    grouped = a.carrier.reshape(split)
    output, mean, rstd = kernels.channel_norm(grouped, axes, shaped[0], shaped[1], eps)

    def vjp(g: Array) -> list[Array | None]:
        gradients = kernels.channel_norm_backward(g.reshape(split), grouped, axes, mean, rstd, shaped[0], others)
        shapes = (x.shape, (channels,), (channels,))
        fitted = [one if one is None else one.reshape(to) for one, to in zip(gradients, shapes, strict=True)]
        return _chosen(fitted, w, b)

    return tape.record(output.reshape(x.shape), fmt, _given(a, w, b), vjp)


def batch_norm(
    x: Tensor, running_mean: Array, running_var: Array, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Tensor, Array, Array]:  # fmt: skip
    """Normalise each channel over the batch (training) or by the buffers; x is (N, C, ...).

    Returns the output and the new buffers (fp32): the given ones moved by momentum towards the batch's mean and
    unbiased variance, in float64, rounded once; the same arrays where not training.

    Vjp: through the batch's statistics (training), else through a fixed scale, fp32 inside.
    Autocast: batch_norm, no rule. Rounding: the whole formula in fp32, then once.

    >>> y, mean, var = batch_norm(Tape().leaf(np.float16([[1.0], [3.0]])), np.zeros(1, "f4"), np.ones(1, "f4"), eps=0.0)
    >>> y.data.ravel(), mean
    (array([-1.,  1.], dtype=float16), array([0.2], dtype=float32))
    """
    require(x.ndim >= 2, "batch_norm", f"x has shape {x.shape}", "x is (N, C, ...)")
    channels = (x.shape[1],)
    require(running_mean.shape == running_var.shape == channels, "batch_norm",
            f"buffers of shapes {running_mean.shape} and {running_var.shape}, x {x.shape}",
            f"both must have shape {channels}")  # fmt: skip
    tape, a, w, b, fmt = _affine("batch_norm", "batch_norm", x, weight, bias, channels)
    axes, ones = (0, *range(2, x.ndim)), (1, x.shape[1]) + (1,) * (x.ndim - 2)
    shaped = [None if one is None else one.carrier.reshape(ones) for one in (w, b)]
    if not training:
        output, vjp = _by_buffers(a.carrier, running_mean, running_var, shaped, (axes, ones), eps)
        return tape.record(output, fmt, _given(a, w, b), lambda g: _chosen(vjp(g), w, b)), running_mean, running_var
    output, mean, rstd = kernels.channel_norm(a.carrier, axes, shaped[0], shaped[1], eps)
    count = math.prod(x.shape[axis] for axis in axes)
    require(
        count > 1, "batch_norm", f"one value a channel in x {x.shape}", "train on larger batches, or training=False"
    )
    wide = a.carrier.astype(np.float64)
    with np.errstate(all="ignore"):
        moved = (1 - momentum) * running_mean.astype(np.float64) + momentum * wide.mean(axis=axes)
        spread = (1 - momentum) * running_var.astype(np.float64) + momentum * wide.var(axis=axes, ddof=1)
        buffers = (moved.astype(running_mean.dtype), spread.astype(running_var.dtype))
    result = tape.record(
        output, fmt, _given(a, w, b),
        lambda g: _chosen(kernels.channel_norm_backward(g, a.carrier, axes, mean, rstd, shaped[0], axes), w, b),
    )  # fmt: skip
    return result, *buffers


def _by_buffers(
    x: Array, running_mean: Array, running_var: Array, shaped: list[Array | None],
    layout: tuple[tuple[int, ...], tuple[int, ...]], eps: float,
) -> tuple[Array, Any]:  # fmt: skip
    """Output and vjp of a batch norm whose statistics are constants."""
    axes, ones = layout
    rstd = 1 / np.sqrt(running_var.astype(np.float64) + eps).reshape(ones)
    normal = (x.astype(np.float64) - running_mean.astype(np.float64).reshape(ones)) * rstd
    scale = rstd if shaped[0] is None else rstd * shaped[0].astype(np.float64)
    output = normal if shaped[0] is None else normal * shaped[0].astype(np.float64)
    output = output if shaped[1] is None else output + shaped[1].astype(np.float64)

    def vjp(g: Array) -> tuple[Array, Array, Array]:
        wide = g.astype(np.float64)
        gradients = (wide * scale, (wide * normal).sum(axis=axes), wide.sum(axis=axes))
        to_x, to_weight, to_bias = (one.astype(x.dtype) for one in gradients)
        return to_x, to_weight, to_bias

    return output.astype(x.dtype), vjp
