"""Counts of what a format loses: overflows, zeros, subnormals, and a histogram of magnitudes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mp_reference import FloatFormat

__all__ = ["LOWEST", "Magnitudes", "measure"]

LOWEST = -150
"""The binary exponent of the first bin of a histogram: below every fp32 number."""

_BINS = 280


@dataclass
class Magnitudes:
    """What became of some values in a format; ``add`` joins two.

    Args:
        values: how many there were.
        overflows: finite results beyond the format's largest finite number.
        underflows: results other than zero that the format rounds to zero.
        subnormals: results that it holds with fewer bits.
        nans: NaNs that were made here, from inputs without.
        zeros: exact zeros.
        max_abs: the largest finite magnitude.
        histogram: how many magnitudes lie in [2**e, 2**(e+1)), for e from ``LOWEST`` up.

    >>> a = Magnitudes(values=2, underflows=1, max_abs=3.0)
    >>> a.add(Magnitudes(values=2, max_abs=5.0))
    >>> a.values, a.max_abs, a.flushed_share
    (4, 5.0, 0.25)
    """

    values: int = 0
    overflows: int = 0
    underflows: int = 0
    subnormals: int = 0
    nans: int = 0
    zeros: int = 0
    max_abs: float = 0.0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def add(self, other: Magnitudes) -> None:
        """Count ``other`` in."""
        for name in ("values", "overflows", "underflows", "subnormals", "nans", "zeros"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs = max(self.max_abs, other.max_abs)
        self.histogram += other.histogram

    @property
    def flushed_share(self) -> float:
        """The part of the values other than zero that became zero."""
        there = self.values - self.zeros
        return self.underflows / there if there else 0.0

    def headroom(self, fmt: FloatFormat) -> float:
        """How many doublings separate the largest magnitude from the format's limit; negative beyond it."""
        return math.inf if self.max_abs == 0.0 else math.log2(fmt.max / self.max_abs)

    def flushed_at(self, fmt: FloatFormat, doublings: int) -> float:
        """The share that would round to zero after so many doublings; bins count whole, so within one doubling."""
        total = int(self.histogram.sum())
        smallest = math.frexp(fmt.min_subnormal)[1] - 2  # below half the smallest number everything becomes zero
        below = int(self.histogram[: max(0, smallest - doublings - LOWEST)].sum())
        return below / total if total else 0.0


def measure(
    values: torch.Tensor, fmt: FloatFormat, *, scale: float = 1.0, fresh: bool = True, subnormals: bool = True
) -> Magnitudes:
    """Count what a format loses of some values.

    Args:
        values: results before they are rounded to ``fmt`` (or after, where there is nothing better), any shape.
        fmt: the format that is judged.
        scale: what gradients were multiplied by; the histogram and ``max_abs`` are divided by it.
        fresh: whether the inputs were finite, so that what is not finite was made here.
        subnormals: False where the device flushes them.

    Returns:
        The counts.

    Source: IEEE 754-2019, 7.4 and 7.5.

    >>> import mp_reference as mp
    >>> found = measure(torch.tensor([65520.0, 2.0**-26, 2.0**-20, 0.0, 1.0]), mp.FP16)
    >>> found.overflows, found.underflows, found.subnormals, found.zeros
    (1, 1, 1, 1)
    """
    magnitude = values.detach().abs().float().flatten()
    finite = magnitude.isfinite()
    limit = fmt.max * (1 + fmt.epsilon / (2 - fmt.epsilon) / 2)  # half a unit beyond the largest: ties go to infinity
    smallest = fmt.min_subnormal / 2 if subnormals else fmt.min_normal
    there = magnitude > 0
    lost = there & ((magnitude <= smallest) if subnormals else (magnitude < smallest))
    over = (magnitude >= limit) & (finite | fresh) & ~magnitude.isnan()
    held = torch.where(finite, magnitude, 0.0)
    exponents = torch.frexp(held[held > 0].double() / scale)[1] - 1
    bins = torch.bincount((exponents - LOWEST).clamp(0, _BINS - 1), minlength=_BINS)
    counts: list[Any] = torch.stack(
        [over.sum(), lost.sum(), (there & ~lost & (magnitude < fmt.min_normal)).sum(), magnitude.isnan().sum(),
         (magnitude == 0).sum()]
    ).tolist()  # fmt: skip
    return Magnitudes(
        values=magnitude.numel(),
        overflows=counts[0],
        underflows=counts[1],
        subnormals=counts[2],
        nans=counts[3] if fresh else 0,
        zeros=counts[4],
        max_abs=float(held.max()) / scale if magnitude.numel() else 0.0,
        histogram=bins.cpu().numpy().astype(np.int64),
    )
