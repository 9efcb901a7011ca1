"""Scaled dot-product attention on an emulated device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

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

    >>> from mp_torch.emulate.arithmetic import FastArithmetic
    >>> len(kernels(FastArithmetic()))
    2
    """
    forward, backward = _widened(arithmetic) if arithmetic.whole else _from_products(arithmetic)
    return {_FORWARD: (0, forward), _BACKWARD: (0, backward)}


def _wide(mask: torch.Tensor | None) -> torch.Tensor | None:
    """An additive mask in fp32; a boolean one as it is."""
    return mask.float() if mask is not None and mask.dtype.is_floating_point else mask


def _widened(arithmetic: Arithmetic) -> tuple[Callable[..., Any], Callable[..., Any]]:
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

    def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        flat_a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
        flat_b = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
        return arithmetic.product(flat_a, flat_b, dtype=dtype).reshape(*batch, a.shape[-2], b.shape[-1])

    def scores(
        q: torch.Tensor, k: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        found = product(q, k.transpose(-2, -1), torch.float32) * scale
        if is_causal:
            allowed = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
            return found.masked_fill(~allowed, -math.inf)
        if attn_mask is None:
            return found
        if attn_mask.dtype is torch.bool:
            return found.masked_fill(~attn_mask, -math.inf)
        return found + attn_mask.float()

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
        found = scores(q, k, is_causal, attn_mask, scale or q.shape[-1] ** -0.5)
        logsumexp = torch.logsumexp(found, -1)
        probabilities = torch.exp(found - logsumexp.unsqueeze(-1)).nan_to_num(0.0)  # a row that sees nothing gives 0
        return product(probabilities.to(v.dtype), v), logsumexp

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
        factor = scale or q.shape[-1] ** -0.5
        found = scores(q, k, is_causal, attn_mask, factor)
        probabilities = torch.exp(found - logsumexp.unsqueeze(-1)).nan_to_num(0.0)
        grad_v = product(probabilities.to(v.dtype).transpose(-2, -1), grad)
        pull = product(grad, v.transpose(-2, -1), torch.float32)
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        grad_scores = (probabilities * (pull - mean) * factor).to(q.dtype)
        return product(grad_scores, k), product(grad_scores.transpose(-2, -1), q), grad_v

    return forward, backward
