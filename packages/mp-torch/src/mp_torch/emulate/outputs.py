"""Hardware whose 16-bit results saturate, or flush subnormals to zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mp_torch.emulate.arithmetic import LOW_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OutputMode", "limit_"]


def limit_(x: torch.Tensor, *, saturate: bool, flush: bool) -> torch.Tensor:
    """Bring 16-bit values in place to what limited hardware would have stored.

    Args:
        x: fp16 or bf16, any shape.
        saturate: infinities become the largest finite value of their sign, NaN becomes 0.
        flush: subnormals become zeros of their sign.

    Returns:
        ``x``.

    Source: CANN, environment variable INF_NAN_MODE_ENABLE: in saturation mode Inf -> 65504, NaN -> 0.

    >>> x = torch.tensor([float("inf"), float("nan"), -(2.0**-20)], dtype=torch.float16)
    >>> limit_(x, saturate=True, flush=True).tolist()
    [65504.0, 0.0, -0.0]
    """
    limits = torch.finfo(x.dtype)
    if saturate:
        x.nan_to_num_(nan=0.0, posinf=limits.max, neginf=limits.min)
    if flush:
        x.mul_((x.abs() >= limits.smallest_normal) | x.isnan())
    return x


class OutputMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Limit every 16-bit result of this thread, forward and backward: below autograd, after each kernel.

    Args:
        saturate: as for ``limit_``.
        flush: as for ``limit_``.
    """

    def __init__(self, *, saturate: bool, flush: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saturate, self._flush = saturate, flush

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, then limit what it wrote; a view shows what was limited already."""
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and x.dtype in LOW_DTYPES:
                    limit_(x, saturate=self._saturate, flush=self._flush)
        return out
