"""Operations on tensors of a tape: forward, vjp, autocast name and rounding, each stated in its docstring.

What holds for all of them:

- Args: tensors of one tape, of any shapes that the docstring names; where a number is allowed, it takes part as an fp32
  value. Two formats meet in fp32. Infinities and NaN are data and pass through as IEEE 754 has them.
- Returns: a new tensor. "fp32 inside" means: an fp32 result of the whole formula, good to one rounding of fp32 (it is
  computed in float64 and rounded), which is then rounded once to the output's format by the tape's arithmetic.
- Vjp: g is the output's gradient, in the output's format. What it gives is rounded to the output's format, summed over
  broadcast dimensions, and rounded to the input's format, as torch's autograd does.
- Autocast: the op's name in ATen and its rule on cuda; ``Tape(rules=...)`` and ``mp.autocast`` apply the rule.
- Raises: ValueError with the op's name, the shapes and the way out; TypeError where no tensor is among the inputs.
- Source: the formulas of PyTorch's documentation for the function of the same name.
"""

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
