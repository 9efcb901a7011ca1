"""What one kernel of an accelerator computes: fp32 inside, forward and backward, on arrays.

Arrays are carriers: fp32 (or float64, for reference runs) arrays whose values are those of any format. A kernel returns
what it has before it rounds to the format of its output; the caller rounds once. Inside, everything that is more than
one operation (transcendental functions, sums, normalisations) is computed in float64 and rounded once to fp32, so that
no result depends on a library's vector width. Names and argument order are ATen's; ``ATEN`` lists them by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mp_reference.nn.kernels._common import kept_dims
from mp_reference.nn.kernels.losses import (
    bce_with_logits,
    bce_with_logits_backward,
    embedding_backward,
    mse_loss,
    mse_loss_backward,
    nll_loss,
    nll_loss_backward,
)
from mp_reference.nn.kernels.norms import (
    channel_norm,
    channel_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from mp_reference.nn.kernels.pointwise import (
    exp,
    gelu,
    gelu_backward,
    log,
    power,
    rsqrt,
    sigmoid,
    sigmoid_backward,
    silu,
    silu_backward,
    softplus,
    softplus_backward,
    tanh,
    tanh_backward,
)
from mp_reference.nn.kernels.sums import (
    cumulative_sum,
    log_softmax,
    log_softmax_backward,
    mean,
    product,
    softmax,
    softmax_backward,
    total,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ATEN",
    "bce_with_logits",
    "bce_with_logits_backward",
    "channel_norm",
    "channel_norm_backward",
    "cumulative_sum",
    "embedding_backward",
    "exp",
    "gelu",
    "gelu_backward",
    "kept_dims",
    "layer_norm",
    "layer_norm_backward",
    "log",
    "log_softmax",
    "log_softmax_backward",
    "mean",
    "mse_loss",
    "mse_loss_backward",
    "nll_loss",
    "nll_loss_backward",
    "power",
    "product",
    "rms_norm",
    "rms_norm_backward",
    "rsqrt",
    "sigmoid",
    "sigmoid_backward",
    "silu",
    "silu_backward",
    "softmax",
    "softmax_backward",
    "softplus",
    "softplus_backward",
    "tanh",
    "tanh_backward",
    "total"
]  # fmt: skip

ATEN: dict[str, Callable[..., Any]] = {
    "exp": exp,
    "log": log,
    "rsqrt": rsqrt,
    "pow.Tensor_Scalar": power,
    "tanh": tanh,
    "tanh_backward": tanh_backward,
    "sigmoid": sigmoid,
    "sigmoid_backward": sigmoid_backward,
    "silu": silu,
    "silu_backward": silu_backward,
    "softplus": softplus,
    "softplus_backward": softplus_backward,
    "gelu": gelu,
    "gelu_backward": gelu_backward,
    "sum.dim_IntList": total,
    "sum": total,
    "mean.dim": mean,
    "mean": mean,
    "prod.dim_int": product,
    "cumsum": cumulative_sum,
    "_softmax": softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax": log_softmax,
    "_log_softmax_backward_data": log_softmax_backward,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "nll_loss_forward": nll_loss,
    "nll_loss_backward": nll_loss_backward,
    "mse_loss": mse_loss,
    "mse_loss_backward": mse_loss_backward,
    "embedding_dense_backward": embedding_backward,
}
"""Kernel by ATen's name: fp32 carriers and plain arguments in ATen's order in, unrounded carriers out."""
