"""Convolution and its backward on an emulated device."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.emulate.arithmetic import FastArithmetic
from mp_torch.emulate.dispatcher import native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mp_torch.emulate.arithmetic import Arithmetic

__all__ = ["kernels"]


def kernels(arithmetic: Arithmetic) -> dict[str, tuple[int, Callable[..., Any]]]:
    """The two kernels: torch's own in fp32 with one rounding, or built from products.

    Args:
        arithmetic: what multiplies the matrices.

    Returns:
        By full overload name: the position of the argument whose dtype decides, and the kernel.

    Source: the schemas of ``aten::convolution`` and ``aten::convolution_backward``.

    >>> sorted(kernels(FastArithmetic()))
    ['aten::convolution', 'aten::convolution_backward']
    """
    forward, backward = _widened(arithmetic) if isinstance(arithmetic, FastArithmetic) else _from_products(arithmetic)
    return {"aten::convolution": (0, forward), "aten::convolution_backward": (0, backward)}


def _widened(arithmetic: FastArithmetic) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's fp32 kernels between an exact widening and one rounding."""
    widen = arithmetic.widen
    convolve, differentiate = native("aten::convolution"), native("aten::convolution_backward")

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> torch.Tensor:
        wide = convolve(widen(x), widen(weight), None if bias is None else bias.float(), *geometry)
        rounded: torch.Tensor = wide.to(x.dtype)
        return rounded

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *geometry: Any) -> tuple[Any, ...]:
        wide = differentiate(widen(grad), widen(x), widen(weight), *geometry)
        return tuple(None if part is None else part.to(grad.dtype) for part in wide)

    return forward, backward


def _windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], count: Sequence[int]
) -> torch.Tensor:
    """The values under each position of the kernel: (batch * positions, kernel values * channels), channels last."""
    batch, channels = x.shape[:2]
    steps = x.stride()[2:]
    view = x.as_strided(
        (batch, *count, *kernel, channels),
        (
            x.stride(0),
            *(step * by for step, by in zip(steps, stride, strict=True)),
            *(step * by for step, by in zip(steps, dilation, strict=True)),
            x.stride(1),
        ),
    )
    return view.reshape(batch * math.prod(count), -1)


def _padded(x: torch.Tensor, before: Sequence[int], after: Sequence[int], spread: Sequence[int]) -> torch.Tensor:
    """``x`` with ``spread - 1`` zeros between neighbours and zeros around it; a negative width cuts."""
    sizes = [(size - 1) * by + 1 for size, by in zip(x.shape[2:], spread, strict=True)]
    wide = x.new_zeros((*x.shape[:2], *sizes))
    inner = wide
    for dim, by in enumerate(spread, start=2):
        inner = inner[(slice(None),) * dim + (slice(None, None, by),)]
    inner.copy_(x)
    amounts = itertools.chain.from_iterable(reversed(list(zip(before, after, strict=True))))
    return torch.constant_pad_nd(wide, list(amounts), 0.0).contiguous()


def _from_products(arithmetic: Arithmetic) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Implicit GEMM over the kernel's positions and then the channels, channels innermost."""

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> torch.Tensor:
        return _Geometry(arithmetic, *geometry).forward(x, weight, bias)

    def backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        _bias_sizes: Sequence[int] | None,
        *geometry: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        *shape, output_mask = geometry
        return _Geometry(arithmetic, *shape).backward(grad, x, weight, output_mask)

    return forward, backward


@dataclass(frozen=True, slots=True)
class _Geometry:
    """A convolution's arguments in the order of its schema, and its three sums as products of matrices."""

    arithmetic: Arithmetic
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The convolution, or the transposed one."""
        if not self.transposed:
            return self.correlate(self.surrounded(x), weight, bias, self.stride)
        size = [
            (have - 1) * step - 2 * pad + reach + 1 + extra
            for have, step, pad, reach, extra in zip(
                x.shape[2:], self.stride, self.padding, self.reach(weight), self.output_padding, strict=True
            )
        ]
        return self.adjoint(x, weight, bias, size)

    def backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of input, weight and bias, as far as they are wanted."""
        parts: list[torch.Tensor | None] = [None, None, None]
        if wanted[0]:
            if self.transposed:
                parts[0] = self.correlate(self.surrounded(grad), weight, None, self.stride)
            else:
                parts[0] = self.adjoint(grad, weight, None, x.shape[2:])
        if wanted[1]:
            small, large = (x, grad) if self.transposed else (grad, x)
            parts[1] = self.weight_gradient(small, self.surrounded(large), weight.shape[2:])
        if wanted[2]:
            values = grad.movedim(1, 0).reshape(grad.shape[1], -1)
            parts[2] = self.arithmetic.product(values, values.new_ones(values.shape[1], 1)).squeeze(1)
        return tuple(parts)

    def reach(self, weight: torch.Tensor) -> list[int]:
        """How far the kernel extends beyond its first position, in each dimension."""
        return [(width - 1) * by for width, by in zip(weight.shape[2:], self.dilation, strict=True)]

    def surrounded(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` within its padding."""
        return _padded(x, self.padding, self.padding, [1] * len(self.padding))

    def correlate(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int]
    ) -> torch.Tensor:
        """Slide the kernel over a padded input: every output position is one row of a product."""
        spans = zip(x.shape[2:], self.reach(weight), stride, strict=True)
        count = [(size - reach - 1) // step + 1 for size, reach, step in spans]
        biases = [None] * self.groups if bias is None else list(bias.chunk(self.groups))
        parts = []
        for part, filters, addend in zip(x.chunk(self.groups, 1), weight.chunk(self.groups), biases, strict=True):
            matrix = filters.movedim(1, -1).reshape(filters.shape[0], -1).t()
            windows = _windows(part, weight.shape[2:], stride, self.dilation, count)
            rows = self.arithmetic.product(windows, matrix, addend)
            parts.append(rows.reshape(x.shape[0], *count, -1).movedim(-1, 1))
        return torch.cat(parts, 1).contiguous()

    def adjoint(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: Sequence[int]
    ) -> torch.Tensor:
        """The transpose of ``correlate``, as a correlation of the spread input with the turned kernel."""
        reach = self.reach(weight)
        before = [span - pad for span, pad in zip(reach, self.padding, strict=True)]
        after = [
            want + span - ((have - 1) * step + 1) - first
            for want, span, have, step, first in zip(size, reach, x.shape[2:], self.stride, before, strict=True)
        ]
        turned = torch.cat([part.transpose(0, 1) for part in weight.chunk(self.groups)])
        flipped = turned.flip(list(range(2, turned.ndim)))
        return self.correlate(_padded(x, before, after, self.stride), flipped, bias, [1] * len(size))

    def weight_gradient(self, small: torch.Tensor, large: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
        """Sums over batch and positions of ``small`` times what lies under each position of the kernel."""
        parts = []
        for values, under in zip(small.chunk(self.groups, 1), large.chunk(self.groups, 1), strict=True):
            matrix = values.movedim(1, 0).reshape(values.shape[1], -1)
            windows = _windows(under, kernel, self.stride, self.dilation, small.shape[2:])
            part = self.arithmetic.product(matrix, windows)
            parts.append(part.reshape(values.shape[1], *kernel, -1).movedim(-1, 1))
        return torch.cat(parts).contiguous()
