"""Scaled dot-product attention on an emulated device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.emulate.arithmetic import FastArithmetic
from mp_torch.emulate.dispatcher import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_torch.emulate.arithmetic import Arithmetic

__all__ = ["kernels"]

_FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"


def kernels(arithmetic: Arithmetic) -> dict[str, tuple[int, Callable[..., Any]]]:
    """The two kernels: torch's own in fp32 with one rounding, or built from products.

    Args:
        arithmetic: what multiplies the matrices.

    Returns:
        By full overload name: the position of the argument whose dtype decides, and the kernel.

    Source: Dao, FlashAttention-2, arXiv 2307.08691: scores and softmax in fp32, probabilities rounded to the inputs'
    format before they meet the values.

    >>> len(kernels(FastArithmetic()))
    2
    """
    forward, backward = _widened(arithmetic) if isinstance(arithmetic, FastArithmetic) else _from_products(arithmetic)
    return {_FORWARD: (0, forward), _BACKWARD: (0, backward)}


def _wide(mask: torch.Tensor | None) -> torch.Tensor | None:
    """An additive mask in fp32; a boolean one as it is."""
    return mask.float() if mask is not None and mask.dtype.is_floating_point else mask


def _widened(arithmetic: FastArithmetic) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's fp32 kernels between an exact widening and one rounding; the log-sum-exp stays fp32."""
    widen = arithmetic.widen
    attend, differentiate = native(_FORWARD), native(_BACKWARD)

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, attn_mask: Any = None, scale: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp = attend(widen(q), widen(k), widen(v), *args, attn_mask=_wide(attn_mask), scale=scale)
        return out.to(q.dtype), logsumexp

    def backward(  # the rounded output is what the device has kept
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *args: Any,
        attn_mask: Any = None,
        scale: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        wide = [*map(widen, (grad, q, k, v)), out.float()]
        grads = differentiate(*wide, *args, attn_mask=_wide(attn_mask), scale=scale)
        return tuple(part.to(q.dtype) for part in grads)

    return forward, backward


def _from_products(arithmetic: Arithmetic) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Scores in fp32, softmax in fp32, probabilities rounded once, every product by the arithmetic."""

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        _dropout: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _Scores(arithmetic, is_causal, attn_mask, scale or q.shape[-1] ** -0.5)
        found = scores.of(q, k)
        logsumexp = torch.logsumexp(found, -1)
        return scores.product(_probabilities(found, logsumexp).to(v.dtype), v), logsumexp

    def backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        _dropout: float,
        is_causal: bool,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = _Scores(arithmetic, is_causal, attn_mask, scale or q.shape[-1] ** -0.5)
        probabilities = _probabilities(scores.of(q, k), logsumexp)
        grad_v = scores.product(probabilities.to(v.dtype).transpose(-2, -1), grad)
        pull = scores.product(grad, v.transpose(-2, -1), torch.float32)
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        grad_scores = (probabilities * (pull - mean) * scores.scale).to(q.dtype)
        return scores.product(grad_scores, k), scores.product(grad_scores.transpose(-2, -1), q), grad_v

    return forward, backward


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """The softmax; a row that sees nothing gives zeros."""
    return torch.exp(scores - logsumexp.unsqueeze(-1)).nan_to_num(0.0)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Products over leading axes, and the masked scores of one call."""

    arithmetic: Arithmetic
    is_causal: bool
    mask: torch.Tensor | None
    scale: float

    def product(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``a @ b`` over the leading axes that both have."""
        flat_a, flat_b = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
        return self.arithmetic.product(flat_a, flat_b, dtype=dtype).reshape(*a.shape[:-1], b.shape[-1])

    def of(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Scores in fp32, minus infinity where a query may not look."""
        found = self.product(q, k.transpose(-2, -1), torch.float32) * self.scale
        if self.is_causal:
            return found.masked_fill(~torch.ones(found.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        if self.mask is None:
            return found
        if self.mask.dtype is torch.bool:
            return found.masked_fill(~self.mask, -math.inf)
        return found + self.mask.float()
