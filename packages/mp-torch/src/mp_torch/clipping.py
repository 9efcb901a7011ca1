"""Norms that never overflow, finiteness of the unscaled gradient, and the coefficient that clips.

Two ways to the sum of squares: ``exact_squares`` adds float64 squares in a fixed order, the same bits on every device;
``fast_squares`` reads each gradient once with the device's own norm kernel. Everything after it is shared.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import torch

from mp_torch.scaling import fp32

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PIECE",
    "clip_coefficient",
    "device_norm",
    "exact_squares",
    "fast_squares",
    "fold",
    "host_coefficient",
    "host_fold",
    "host_norm",
    "host_squares",
    "magnitudes",
    "power_sums",
    "rounded_norm",
]

_foreach_norm = torch._foreach_norm  # noqa: SLF001  # one kernel for a list, as torch.nn.utils does it

EPSILON = 1e-6
"""Added to the norm before the division, as ``torch.nn.utils.clip_grad_norm_`` does."""

PIECE = 1 << 18
"""Elements that one fp32 norm adds up at most."""

_LONG = 64
"""Numbers in a list from which on tensors add faster than Python."""

_SQUARES_LOST = 1e-20
"""Below this total, squares that underflowed fp32 could matter: 1e9 of them add at most 1e-29."""


def fold(values: torch.Tensor) -> torch.Tensor:
    """Add the elements in an order that every device and every implementation can repeat.

    Args:
        values: float64, one-dimensional; padded with zeros to a power of two, then halves are added to each other until
            one is left.

    Returns:
        float64 scalar tensor; 0.0 for an empty one.

    >>> fold(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).item()
    6.0
    """
    count = values.numel()
    if count == 0:
        return values.new_zeros(())
    width = 1 << (count - 1).bit_length()
    if width != count:
        values = torch.nn.functional.pad(values, (0, width - count))
    while width > 1:
        width //= 2
        values = values[:width] + values[width:]
    return values.reshape(())


def exact_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each gradient in float64: every square is exact, every addition is in the order of ``fold``.

    Args:
        gradients: fp32, unscaled. A finite one has a finite sum, whatever its length.

    Returns:
        float64, one for each gradient.

    >>> exact_squares([torch.full((4,), 40000.0)]).sqrt().item()
    80000.0
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([_fold_(one.detach().reshape(-1).double().square_()) for one in gradients])


def _fold_(squares: torch.Tensor) -> torch.Tensor:
    """``fold`` of numbers that are not negative, without memory of its own: the zeros it adds would change nothing."""
    count = squares.numel()
    while count > 1:
        width = 1 << (count - 1).bit_length() - 1
        squares[: count - width].add_(squares[width:count])
        count = width
    return squares[0].clone() if squares.numel() else squares.sum()  # a view would keep all of them


def host_fold(values: Sequence[float]) -> float:
    """``fold`` in Python numbers, bit for bit.

    >>> host_fold([1.0, 2.0, 3.0])
    6.0
    """
    if len(values) > _LONG:
        return float(fold(torch.tensor(values, dtype=torch.float64)))
    width = 1 << max(len(values) - 1, 0).bit_length()
    folded = [*values, *[0.0] * (width - len(values))]
    while width > 1:
        width //= 2
        folded = [a + b for a, b in zip(folded[:width], folded[width:], strict=True)]
    return folded[0] + 0.0


def host_squares(gradients: Sequence[torch.Tensor], *, exact: bool) -> list[float]:
    """Sum of squares of each gradient on the CPU, as Python numbers.

    Args:
        gradients: fp32.
        exact: as ``exact_squares``; else one fp32 norm of each piece of ``PIECE`` elements, whose squares are added in
            float64 in the order of ``fold``. A single fp32 sum would stand still after some 100 million equal terms.

    Returns:
        One number for each gradient; finite exactly where the gradient is.

    >>> host_squares([torch.full((4,), 2.0)], exact=False)
    [16.0]
    """
    if exact or not gradients:
        return [float(one) for one in exact_squares(gradients)]
    pieces = [[one] if one.numel() <= PIECE else list(torch.split(one.reshape(-1), PIECE)) for one in gradients]
    norms = torch.stack(_foreach_norm([piece for several in pieces for piece in several], 2.0)).tolist()
    squares = iter([one * one for one in norms])
    sums = [host_fold(list(islice(squares, len(several)))) for several in pieces]
    if _SQUARES_LOST <= sum(sums) < math.inf:
        return sums
    return [float(one) for one in exact_squares(gradients)]


def fast_squares(gradients: Sequence[torch.Tensor], *, reads_are_free: bool, float64: bool = True) -> torch.Tensor:
    """Sum of squares of each gradient, one read of each.

    Where a value can be read without waiting, fp32 kernels do it, and float64 ones only if fp32 overflowed or
    underflowed. Elsewhere float64 kernels do it at once, which cost a read all the same.

    Args:
        gradients: fp32, still scaled.
        reads_are_free: the gradients are on the CPU.
        float64: the device has float64; otherwise the sums are made from fp32 norms of scaled-down gradients.

    Returns:
        float64, one for each gradient; finite exactly where the gradient is.

    >>> fast_squares([torch.full((4,), 3e19)], reads_are_free=True).sqrt().item() == 2 * 3e19
    False
    >>> abs(fast_squares([torch.full((4,), 3e19)], reads_are_free=True).sqrt().item() / 6e19 - 1) < 1e-7
    True
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    if not float64:
        return _scaled_squares(gradients)
    if not reads_are_free:
        return torch.stack(_foreach_norm(list(gradients), 2.0, dtype=torch.float64)).square()
    return torch.tensor(host_squares(gradients, exact=False), dtype=torch.float64)


def _scaled_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """For a device without float64: divide by the largest magnitude first; the result lives on the CPU."""
    peaks = magnitudes(gradients)
    safe = torch.where((peaks > 0) & peaks.isfinite(), peaks, 1.0)
    norms = torch.stack(_foreach_norm([one / unit for one, unit in zip(gradients, safe, strict=True)], 2.0))
    return (norms.cpu().double() * safe.cpu().double()).square()


def magnitudes(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each gradient; NaN if it holds one.

    >>> magnitudes([torch.tensor([1.0, -3.0]), torch.zeros(0)])
    tensor([3., 0.])
    """
    if not gradients:
        return torch.zeros(0)
    return torch.stack([one.abs().amax() if one.numel() else one.new_zeros(()) for one in gradients])


def power_sums(gradients: Sequence[torch.Tensor], power: float) -> torch.Tensor:
    """Sum of the magnitudes' powers of each gradient, in float64.

    >>> power_sums([torch.tensor([1.0, -3.0])], 1.0)
    tensor([4.], dtype=torch.float64)
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([one.double().abs().pow(power).sum() for one in gradients])


def rounded_norm(total: torch.Tensor) -> torch.Tensor:
    """The square root, correctly rounded to fp32; past the largest fp32 it stays in float64.

    torch's own square root is not correctly rounded on the CPU. Here a candidate is corrected by comparing with the
    squares of the midpoints to its neighbours, which float64 holds exactly.

    Args:
        total: float64, a sum of squares.

    Returns:
        float64 that holds an fp32 value, or a larger one if fp32 overflows; NaN and infinity stay.

    Source: IEEE 754-2019, 5.4.1 (squareRoot), 4.3.1 (ties to even cannot occur with a total of 53 bits unless exact).

    >>> rounded_norm(torch.tensor(2.0, dtype=torch.float64)).item()
    1.4142135381698608
    """
    wide = total.sqrt()
    root = wide.float()
    upper = torch.nextafter(root, root.new_full((), torch.inf)).double()
    lower = torch.nextafter(root, root.new_zeros(())).double()
    middle = root.double()
    above, below = (middle + upper) / 2, (lower + middle) / 2
    odd = (root.view(torch.int32) & 1).bool()
    up = (total > above * above) | ((total == above * above) & odd)
    down = (total < below * below) | ((total == below * below) & odd)
    narrow = torch.where(up, upper, torch.where(down, lower, middle))
    return torch.where(root.isfinite(), narrow, wide)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """``min(1, max_norm / (norm + 1e-6))`` in fp32, or in float64 where the norm is past fp32.

    Args:
        norm: float64, as ``rounded_norm`` gives it.
        max_norm: the limit.

    Returns:
        fp32 in [0, 1].

    >>> clip_coefficient(torch.tensor(4.0, dtype=torch.float64), 2.0).item()
    0.49999988079071045
    """
    narrow = norm.float()
    limit = narrow.new_full((), max_norm)
    coefficient = limit / (narrow + narrow.new_full((), EPSILON))
    wide = (limit.double() / (norm + fp32(EPSILON))).float()
    return torch.where(narrow.isfinite(), coefficient, wide).clamp(max=1.0)


def host_coefficient(norm: float, max_norm: float) -> float:
    """``clip_coefficient`` in Python numbers, bit for bit.

    >>> host_coefficient(4.0, 2.0) == clip_coefficient(torch.tensor(4.0, dtype=torch.float64), 2.0).item()
    True
    """
    narrow = fp32(norm)
    denominator = fp32(narrow + fp32(EPSILON)) if math.isfinite(narrow) else norm + fp32(EPSILON)
    coefficient = fp32(fp32(max_norm) / denominator)
    return coefficient if not coefficient > 1.0 else 1.0


def host_norm(total: float, norm_type: float) -> float:
    """The norm that belongs to a total of powers, in Python numbers: for 2.0 bit for bit ``rounded_norm``.

    Args:
        total: sum of squares, sum of powers, or largest magnitude.
        norm_type: 2.0, another p >= 1, or infinity.

    >>> host_norm(2.0, 2.0) == rounded_norm(torch.tensor(2.0, dtype=torch.float64)).item()
    True
    """
    if norm_type == math.inf or not math.isfinite(total):
        return total
    wide = math.sqrt(total) if norm_type == 2.0 else total ** (1.0 / norm_type)
    root = fp32(wide)
    if math.isinf(root):
        return wide
    if norm_type != 2.0:
        return root
    other = wide + (wide - root)
    if other != root and fp32(other) == other and total != wide * wide:  # float64 rounded onto a midpoint of fp32
        return max(root, other) if total > wide * wide else min(root, other)
    return root


def device_norm(totals: torch.Tensor, norm_type: float) -> torch.Tensor:
    """``host_norm`` on a device without reading from it; float64.

    >>> device_norm(torch.tensor([4.0], dtype=torch.float64), 2.0)
    tensor([2.], dtype=torch.float64)
    """
    if norm_type == math.inf:
        return totals.double()
    if norm_type == 2.0:
        return rounded_norm(totals)
    wide = totals.pow(1.0 / norm_type)
    narrow = wide.float()
    return torch.where(narrow.isfinite(), narrow.double(), wide)
