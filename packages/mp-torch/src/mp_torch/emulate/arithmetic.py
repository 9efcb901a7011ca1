"""How an emulated device multiplies 16-bit matrices: one class a choice of ``emulate(arithmetic=...)``."""

from __future__ import annotations

from typing import Protocol

import torch

from mp_torch.emulate.dispatcher import native

__all__ = ["LOW_DTYPES", "Arithmetic", "FastArithmetic"]

LOW_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes whose products are emulated."""


class Arithmetic(Protocol):
    """What the kernels of the matmul family ask of an arithmetic."""

    whole: bool
    """Whether convolution and attention are run whole, by torch's fp32 kernels, rather than from products."""

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``beta * c + alpha * (a @ b)`` of 16-bit matrices.

        Args:
            a: (m, k) or (batch, m, k), fp16 or bf16.
            b: (k, n) or (batch, k, n), the dtype of ``a``.
            c: broadcasts to the result, the dtype of ``a``; None for no addend.
            beta: factor of ``c``.
            alpha: factor of the product.
            dtype: dtype of the result; that of ``a`` unless given, or fp32 for the accumulator itself.

        Returns:
            (m, n) or (batch, m, n), rounded once to ``dtype``.
        """
        ...


class FastArithmetic:
    """Widen exactly to fp32, multiply and accumulate in fp32, round once: what tensor cores do but for the order.

    >>> a = torch.tensor([[1.0, 2.0**-11]], dtype=torch.float16)
    >>> FastArithmetic().product(a, a.t().contiguous()).item()
    1.0
    """

    whole = True

    def __init__(self) -> None:
        self._mm, self._addmm = native("aten::mm"), native("aten::addmm")
        self._bmm, self._baddbmm = native("aten::bmm"), native("aten::baddbmm")

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``beta * c + alpha * (a @ b)`` through fp32, as ``Arithmetic.product``."""
        wide_a, wide_b = a.float(), b.float()
        if c is None:
            wide = (self._mm if a.ndim == 2 else self._bmm)(wide_a, wide_b)
            if alpha != 1.0:
                wide.mul_(alpha)
        else:
            add = self._addmm if a.ndim == 2 else self._baddbmm
            wide = add(c.float(), wide_a, wide_b, beta=beta, alpha=alpha)
        rounded: torch.Tensor = wide.to(dtype or a.dtype)
        return rounded
