"""How an emulated device multiplies matrices: one class for what torch computes, one for what NumPy emulates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

import mp_reference as mp
from mp_torch.emulate.dispatcher import native

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["FORMATS", "LOW_DTYPES", "Arithmetic", "EmulatedArithmetic", "FastArithmetic", "from_numpy", "to_numpy"]

LOW_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The dtypes whose products every arithmetic emulates."""

FORMATS = {torch.float16: mp.FP16, torch.bfloat16: mp.BF16, torch.float32: mp.FP32}
"""The format of each dtype that products deal with."""


def to_numpy(x: torch.Tensor) -> NDArray[Any]:
    """The values of a CPU tensor as an array of the same format; bfloat16 too.

    >>> to_numpy(torch.ones(1, dtype=torch.bfloat16)).dtype.name
    'bfloat16'
    """
    if x.dtype is torch.bfloat16:
        return x.detach().contiguous().view(torch.int16).numpy().view(mp.BF16.dtype)
    found: NDArray[Any] = x.detach().numpy()
    return found


def from_numpy(x: NDArray[Any]) -> torch.Tensor:
    """The values of an array as a tensor of the same format; bfloat16 too.

    >>> from_numpy(to_numpy(torch.ones(1, dtype=torch.bfloat16)))
    tensor([1.], dtype=torch.bfloat16)
    """
    if x.dtype == mp.BF16.dtype:
        return torch.from_numpy(x.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(x)


class Arithmetic(Protocol):
    """What the kernels of the matmul family ask of an arithmetic."""

    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the operands that it takes over; torch multiplies the others."""

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
        """``beta * c + alpha * (a @ b)``.

        Args:
            a: (m, k) or (batch, m, k), of one of ``dtypes``.
            b: (k, n) or (batch, k, n), the dtype of ``a``.
            c: broadcasts to the result, the dtype of ``a``; None for no addend.
            beta: factor of ``c``.
            alpha: factor of the product.
            dtype: dtype of the result; that of ``a`` unless given.

        Returns:
            (m, n) or (batch, m, n), rounded once to ``dtype`` from the accumulator.
        """
        ...


class FastArithmetic:
    """Widen exactly to fp32, multiply and accumulate in fp32, round once: what tensor cores do but for the order.

    Args:
        tf32: take over fp32 operands as well, and cut them to TF32 first.

    >>> a = torch.tensor([[1.0, 2.0**-12]], dtype=torch.float16)
    >>> FastArithmetic().product(a, torch.ones_like(a).t()).item()
    1.0
    """

    def __init__(self, *, tf32: bool = False) -> None:
        self.dtypes: tuple[torch.dtype, ...] = (*LOW_DTYPES, torch.float32) if tf32 else LOW_DTYPES
        self._mm, self._addmm = native("aten::mm"), native("aten::addmm")
        self._bmm, self._baddbmm = native("aten::bmm"), native("aten::baddbmm")

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in fp32; an fp32 operand without the 13 bits that TF32 lacks."""
        if x.dtype is not torch.float32:
            return x.float()
        cut = x.view(torch.int32) & -(2**13)
        return torch.where(x.isnan(), x, cut.view(torch.float32))  # a NaN whose payload was cut would be infinite

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
        wide_a, wide_b = self.widen(a), self.widen(b)
        if c is None:
            wide = (self._mm if a.ndim == 2 else self._bmm)(wide_a, wide_b)
            if alpha != 1.0:
                wide.mul_(alpha)
        else:
            add = self._addmm if a.ndim == 2 else self._baddbmm
            wide = add(c.float(), wide_a, wide_b, beta=beta, alpha=alpha)
        rounded: torch.Tensor = wide.to(dtype or a.dtype)
        return rounded


class EmulatedArithmetic:
    """Products under a named accumulator, bit for bit.

    The accumulator starts at zero and its result meets ``alpha``, ``beta`` and ``c`` in fp32, as a BLAS epilogue has
    it; then one rounding. The exact accumulator takes ``c`` into its sum, so that everything is rounded once.

    Args:
        accumulators: by operand dtype, what ``mp_reference.matmul`` takes as accumulator.

    >>> a = torch.tensor([[2048.0, 1.0, -2048.0]], dtype=torch.float16)
    >>> ones = torch.ones(3, 1, dtype=torch.float16)
    >>> EmulatedArithmetic({torch.float16: mp.FP16}).product(a, ones).item()
    0.0
    >>> EmulatedArithmetic({torch.float16: "exact"}).product(a, ones).item()
    1.0
    """

    def __init__(self, accumulators: Mapping[torch.dtype, Any]) -> None:
        self._accumulators = dict(accumulators)
        self.dtypes: tuple[torch.dtype, ...] = tuple(self._accumulators)

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
        """``beta * c + alpha * (a @ b)`` with every rounding of the accumulator, as ``Arithmetic.product``."""
        out, accumulator = dtype or a.dtype, self._accumulators[a.dtype]
        if accumulator == "exact" and _exact_factor(alpha) and _exact_factor(beta):
            addend = None if c is None else to_numpy(c.float() * beta)
            factors = to_numpy(a) if alpha == 1.0 else to_numpy(a.float() * alpha)
            return from_numpy(mp.matmul(factors, to_numpy(b), addend, accumulator, out_format=FORMATS[out]))
        total = from_numpy(mp.matmul(to_numpy(a), to_numpy(b), accumulator=accumulator, out_format=mp.FP32))
        if alpha != 1.0:
            total = total * alpha
        if c is not None:
            total = total + (c.float() if beta == 1.0 else c.float() * beta)
        return total.to(out)


def _exact_factor(x: float) -> bool:
    """Whether a product by ``x`` is exact in fp32, for 16-bit values: a power of two of moderate size."""
    return 2.0**-64 <= abs(x) <= 2.0**64 and abs(math.frexp(x)[0]) == 0.5
