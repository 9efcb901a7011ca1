"""torch's autograd in float64 as a subject: what the reference's operations and their gradients are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from mp_conformance.implementations import NotOfferedError
from mp_reference.nn.kernels import ATEN
from mp_torch.emulate import emulate
from mp_torch.emulate.arithmetic import from_numpy, to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["CALLS", "AutogradSubject"]

_TARGET = torch.tensor([2, 0, 3, -100])
_MASK = torch.tensor([[True, False, True], [False, True, True]])
_TABLE = torch.tensor([[1, 3], [1, 0]])


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, training: bool) -> torch.Tensor:
    mean, var = torch.tensor([0.3, -0.2], dtype=torch.float64), torch.tensor([1.5, 0.5], dtype=torch.float64)
    return functional.batch_norm(x, mean, var, w, b, training=training)


def _rotary(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


CALLS: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "pow": lambda x: torch.pow(x, 2.5),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: functional.softplus(x, beta=2.0, threshold=2.0),
    "where": lambda x, y: torch.where(_MASK, x, y),
    "dropout": lambda x: x * _MASK / 0.75,
    "sum": lambda x: torch.sum(x, (0, -1)),
    "mean": lambda x: torch.mean(x, 1),
    "prod": lambda x: torch.prod(x, 1),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "layer_norm": lambda x, w, b: functional.layer_norm(x, (3, 4), w, b),
    "rms_norm": lambda x, w: functional.rms_norm(x, (4,), w, 1e-6),
    "group_norm": lambda x, w, b: functional.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: _batch_norm(x, w, b, True),
    "batch_norm-eval": lambda x, w, b: _batch_norm(x, w, b, False),
    "nll_loss": lambda x: functional.nll_loss(x, _TARGET),
    "cross_entropy": lambda x: functional.cross_entropy(x, _TARGET, reduction="sum"),
    "mse_loss": lambda x: functional.mse_loss(x, torch.ones_like(x)),
    "bce_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, _MASK.double()),
    "matmul": torch.matmul,
    "bmm": torch.bmm,
    "linear": functional.linear,
    "einsum": lambda x, y: torch.einsum("bik,bjk->bji", x, y),
    "conv2d": lambda x, w, b: functional.conv2d(x, w, b, stride=2, padding=1),
    "conv2d-dilated": lambda x, w, b: functional.conv2d(x, w, b, dilation=2),
    "scaled_dot_product_attention": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "embedding": lambda w: functional.embedding(_TABLE, w),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "index": lambda x: x[torch.tensor([0, 2, 0])],
    "reshape": lambda x: x.reshape(3, -1),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "rotary": _rotary,
}
"""Each operation of the reference as torch spells it."""


def _in_low_precision(op: str, operands: list[Array]) -> list[Array]:
    """Output and gradients of 16-bit operands, with exact products and the reference's kernels."""
    leaves = [from_numpy(x.copy()).requires_grad_() for x in operands]
    with emulate("cuda", arithmetic="exact", kernels=ATEN):
        output = CALLS[op](*leaves)
        weights = torch.arange(output.numel(), dtype=torch.float64).cos().float().to(output.dtype)
        gradients = torch.autograd.grad(output, leaves, weights.reshape(output.shape))
    return [to_numpy(one.detach()) for one in (output, *gradients)]


class AutogradSubject:
    """Functions of torch and their gradients on the CPU: in float64, and of 16-bit operands under ``emulate``."""

    name = "autograd"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """One operation, differentiated."""
        del options
        return operation in ("differentiate", "differentiate_low")

    def perform(self, operation: str, *operands: Any, **options: Any) -> list[Array]:
        """The output of an op and the gradients of its sum weighted by ``cos`` of each element's number."""
        if operation == "differentiate_low":
            return _in_low_precision(options["op"], list(operands))
        if operation != "differentiate":
            raise NotOfferedError(f"autograd has no {operation}")
        leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in operands]
        output = CALLS[options["op"]](*leaves)
        weights = torch.arange(output.numel(), dtype=torch.float64).cos().reshape(output.shape)
        gradients = torch.autograd.grad((output * weights).sum(), leaves)
        return [output.detach().numpy(), *(one.numpy() for one in gradients)]
