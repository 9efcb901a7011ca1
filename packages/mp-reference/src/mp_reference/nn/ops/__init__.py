"""Operations on tensors of a tape: forward, vjp, autocast name and rounding, each stated in its docstring."""

from mp_reference.nn.ops.elementwise import (
    add,
    cast,
    div,
    dropout,
    exp,
    gelu,
    log,
    mul,
    neg,
    relu,
    rsqrt,
    sigmoid,
    silu,
    softplus,
    sqrt,
    sub,
    tanh,
    where,
)
from mp_reference.nn.ops.elementwise import pow as pow  # noqa: A004  # torch's name
from mp_reference.nn.ops.losses import bce_with_logits, cross_entropy, mse_loss, nll_loss
from mp_reference.nn.ops.normalisations import batch_norm, group_norm, layer_norm, rms_norm
from mp_reference.nn.ops.products import bmm, conv2d, einsum, linear, matmul, scaled_dot_product_attention
from mp_reference.nn.ops.reductions import cumsum, log_softmax, mean, prod, softmax
from mp_reference.nn.ops.reductions import sum as sum  # noqa: A004  # torch's name
from mp_reference.nn.ops.shapes import cat, embedding, index, permute, reshape, rotary, stack, transpose

__all__ = [
    "add", "batch_norm", "bce_with_logits", "bmm", "cast", "cat", "conv2d", "cross_entropy", "cumsum", "div", "dropout",
    "einsum", "embedding", "exp", "gelu", "group_norm", "index", "layer_norm", "linear", "log", "log_softmax", "matmul",
    "mean", "mse_loss", "mul", "neg", "nll_loss", "permute", "pow", "prod", "relu", "reshape", "rms_norm", "rotary",
    "rsqrt", "scaled_dot_product_attention", "sigmoid", "silu", "softmax", "softplus", "sqrt", "stack", "sub", "sum",
    "tanh", "transpose", "where",
]  # fmt: skip
