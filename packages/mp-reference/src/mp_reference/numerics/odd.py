"""Operations in float64 rounded to odd: what any later rounding to 24 bits or fewer cannot tell from the exact result.

The operands are float32 values held in float64, so products are exact and quotients and roots have exact residuals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ODD"]

Wide = NDArray[np.float64]


def _step_to_odd(value: Wide, error: Wide) -> Wide:
    """``value`` plus what it lacks, to odd: an inexact even pattern moves to its odd neighbour towards the error."""
    pattern = value.view(np.int64)
    inexact = (error != 0) & (pattern & 1 == 0) & np.isfinite(value)
    if inexact.any():
        away = (error > 0) == (value > 0)
        pattern = np.where(inexact, np.where(away, pattern + 1, pattern - 1), pattern)
    return pattern.view(np.float64)


def _add(a: Wide, b: Wide, *, downward: bool = False) -> Wide:
    """TwoSum gives the exact error of the sum."""
    total = np.asarray(a + b)
    part = total - a
    error = (a - (total - part)) + (b - part)
    odd = _step_to_odd(total, np.asarray(np.where(np.isfinite(total), error, 0.0)))
    if downward:  # a zero sum is -0 unless both terms are +0
        return np.where((odd == 0) & (np.signbit(a) | np.signbit(b)), -0.0, odd)
    return odd


def _sub(a: Wide, b: Wide, *, downward: bool = False) -> Wide:
    return _add(a, -b, downward=downward)


def _mul(a: Wide, b: Wide, *, downward: bool = False) -> Wide:  # noqa: ARG001  # one signature for all
    return np.asarray(a * b)  # 48 bits, exponents within float64's


def _fma(a: Wide, b: Wide, c: Wide, *, downward: bool = False) -> Wide:
    return _add(np.asarray(a * b), c, downward=downward)


def _cut(value: Wide, bits: int) -> Wide:
    """``value`` truncated to ``bits`` significant bits."""
    mask = np.int64(-1 << (53 - bits))
    return (value.view(np.int64) & mask).view(np.float64)


def _sticky(cut: Wide, rest: Wide, bits: int) -> Wide:
    """A truncated value and the sign of what it lacks: to odd at ``bits`` significant bits."""
    unit = np.int64(1 << (53 - bits))
    pattern = cut.view(np.int64)
    pattern = np.where(rest < 0, pattern - unit, pattern)  # the value was rounded up to the cut
    pattern = np.where((rest != 0) & np.isfinite(cut), pattern | unit, pattern)
    return pattern.view(np.float64)


def _div(a: Wide, b: Wide, *, downward: bool = False) -> Wide:  # noqa: ARG001  # one signature for all
    """28 quotient bits times 24 divisor bits is exact, and so is what remains of the dividend."""
    quotient = np.asarray(a / b)
    cut = _cut(quotient, 28)
    rest = (a - cut * b) * np.sign(a)  # in the direction of the magnitude
    usual = np.isfinite(quotient) & (quotient != 0) & np.isfinite(b)
    return _sticky(np.where(usual, cut, quotient), np.where(usual, rest, 0.0), 28)


def _sqrt(a: Wide, *, downward: bool = False) -> Wide:  # noqa: ARG001  # one signature for all
    """26 root bits squared are exact, and so is what remains."""
    root = np.asarray(np.sqrt(a))
    cut = _cut(root, 26)
    usual = np.isfinite(root) & (root != 0)
    return _sticky(np.where(usual, cut, root), np.where(usual, a - cut * cut, 0.0), 26)


def _rsqrt(a: Wide, *, downward: bool = False) -> Wide:  # noqa: ARG001  # one signature for all
    """26 bits of ``1 / sqrt(a)``, corrected by the sign of ``1 - a * cut**2``, which two exact products decide."""
    root = np.asarray(1.0 / np.sqrt(a))
    above = (root.view(np.int64) + 4).view(np.float64)  # two roundings may have gone below a 26-bit number: be above
    cut = _cut(above, 26)
    square = cut * cut  # 52 bits, exact
    high = _cut(square, 27)
    rest = (1.0 - a * high) - a * (square - high)
    usual = np.isfinite(root) & (root != 0)
    return _sticky(np.where(usual, cut, root), np.where(usual, rest, 0.0), 26)


ODD: dict[str, Any] = {"add": _add, "sub": _sub, "mul": _mul, "div": _div, "sqrt": _sqrt, "rsqrt": _rsqrt, "fma": _fma}
"""The operations by name: float64 arrays of float32 values in, float64 rounded to odd out."""
