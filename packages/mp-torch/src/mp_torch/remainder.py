"""An fp32 value as a bf16 value and the 16 bits below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["join", "split"]


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 value as the nearest bf16 value and the 16 bits that complete it.

    Ties go away from zero here: with ties to even two fp32 values would share one pair, since an even bf16 value is
    nearest to 65537 patterns and 16 bits tell only 65536 apart. Every NaN becomes the canonical one.

    Args:
        value: fp32, any shape.

    Returns:
        The bf16 value and an int16 remainder, from which ``join`` makes the same bits again.

    >>> high, low = split(torch.tensor([1.00390625]))  # half way between 1 and the next bf16 value
    >>> high.item(), join(high, low).item()
    (1.0078125, 1.00390625)
    """
    bits = torch.where(value.isnan(), value.new_full((), torch.nan), value).view(torch.int32)
    low = bits.to(torch.int16)  # keeps the low half
    high = ((bits >> 16) + (low < 0)).to(torch.int16)
    return high.view(torch.bfloat16), low


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 value whose halves ``split`` gave.

    Args:
        high: bf16.
        low: int16, the remainder.

    Returns:
        fp32, the same bits that were split.

    >>> join(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0], dtype=torch.int16))
    tensor([1.])
    """
    below = low.to(torch.int32) & 0xFFFF
    above = (high.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)) << 16
    return (above | below).view(torch.float32)
