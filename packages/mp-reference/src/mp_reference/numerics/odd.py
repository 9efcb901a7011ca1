"""Operations in float64 that a later rounding to ``precision`` bits, 24 or fewer, cannot tell from the exact result.

The operands are float32 values held in float64. A float64 result errs by at most half a unit in its 53rd bit, so it
misleads a later rounding only where it is itself a number of at most ``precision + 1`` bits, that is a number of the
narrow format or a midpoint. Those few are recognised by their low bits, their exact error is computed, and they move to
their neighbour towards the exact result: rounding to odd, where it matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Wide = NDArray[np.float64]

__all__ = ["ODD"]


def _low(precision: int) -> np.int64:
    """The bits that are zero in every number of at most ``precision + 1`` bits, 53 being there."""
    return np.int64((1 << (52 - precision)) - 1)


def _short(value: Wide, precision: int) -> NDArray[np.bool_]:
    """Where a result has at most ``precision + 1`` significant bits."""
    low = np.bitwise_and(value.view(np.int64), _low(precision))
    return np.asarray(low == 0)


def _step(value: Wide, where: NDArray[np.bool_], error: Wide) -> None:
    """Move ``value[where]`` by one unit towards where ``error`` points, if it lacks anything at all."""
    rounded = value[where]
    inexact = (error != 0) & np.isfinite(rounded) & np.isfinite(error)
    if inexact.any():
        step = np.where((error > 0) == (rounded > 0), 1, -1)
        value[where] = (rounded.view(np.int64) + np.where(inexact, step, 0)).view(np.float64)


def _sum_error(total: Wide, a: Wide, b: Wide) -> Wide:
    """TwoSum: what the rounded sum lacks, exactly (Knuth, TAOCP 4.2.2)."""
    part = total - a
    return np.asarray((a - (total - part)) + (b - part))


def _add(a: Wide, b: Wide, *, downward: bool = False, precision: int = 24, unit: float = 0.0) -> Wide:
    """Where all terms are multiples of ``unit``, sums below ``2**53 * unit`` are exact."""
    total = np.asarray(a + b)
    short = _short(total, precision)
    count = int(np.count_nonzero(short))
    if count and max(total.max(), -total.min()) < unit * 2.0**53:  # a NaN is not less
        count = 0
    if count > total.size // 8:  # sums of short numbers are mostly short: look at all of them at once
        error = _sum_error(total, a, b)
        short &= error != 0  # NaN, where the sum is infinite, is looked at and left alone
        if short.any():
            _step(total, short, error[short])
    elif count:
        a, b = np.broadcast_arrays(a, b)
        _step(total, short, _sum_error(total[short], a[short], b[short]))
    if downward:  # a zero sum is -0 unless both terms are +0
        return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
    return total


def _sub(a: Wide, b: Wide, *, downward: bool = False, precision: int = 24, unit: float = 0.0) -> Wide:
    return _add(a, -b, downward=downward, precision=precision, unit=unit)


def _mul(a: Wide, b: Wide, **_: Any) -> Wide:
    return np.asarray(a * b)  # 48 bits, exponents within float64's: exact


def _fma(a: Wide, b: Wide, c: Wide, *, downward: bool = False, precision: int = 24, unit: float = 0.0) -> Wide:
    return _add(np.asarray(a * b), c, downward=downward, precision=precision, unit=unit * min(unit, 1.0))


def _div(a: Wide, b: Wide, *, precision: int = 24, **_: Any) -> Wide:
    """25 quotient bits times 24 divisor bits is exact, and so is what remains of the dividend."""
    quotient = np.asarray(a / b)
    short = _short(quotient, precision)
    if short.any():
        a, b = np.broadcast_arrays(a, b)
        rest = a[short] - quotient[short] * b[short]
        _step(quotient, short, rest * np.sign(b[short]))
    return quotient


def _sqrt(a: Wide, *, precision: int = 24, **_: Any) -> Wide:
    """25 root bits squared are exact, and so is what remains."""
    root = np.asarray(np.sqrt(a))
    short = _short(root, precision)
    if short.any():
        _step(root, short, a[short] - root[short] * root[short])
    return root


def _rsqrt(a: Wide, **_: Any) -> Wide:
    """Two roundings may step over a short number, so all results near one are decided by ``1 - a * short**2``."""
    root = np.asarray(1.0 / np.sqrt(a))
    lifted = root.view(np.int64) + 4  # two roundings err by less than four units
    near = np.asarray(np.bitwise_and(lifted, _low(24)) <= 8)
    if near.any():
        kept = np.where(np.isfinite(root), np.bitwise_and(lifted, ~_low(24)).view(np.float64), root)
        root[near] = kept[near]
        square = root[near] * root[near]  # 50 bits, exact
        high = np.bitwise_and(square.view(np.int64), ~np.int64((1 << 26) - 1)).view(np.float64)
        rest = (1.0 - a[near] * high) - a[near] * (square - high)  # both products are exact
        _step(root, near, rest)
    return root


def _rem(a: Wide, b: Wide, **_: Any) -> Wide:
    """Exact: fmod by twice the divisor leaves at most two more to take away."""
    divisor = np.abs(b)
    rest = np.fmod(np.abs(a), 2 * divisor)
    more = rest + rest > divisor
    once = rest - divisor
    rest = np.where(more, np.where(once + once >= divisor, once - divisor, once), rest)
    return np.asarray(rest * np.copysign(1.0, a))


ODD: dict[str, Any] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "sqrt": _sqrt, "rsqrt": _rsqrt, "fma": _fma, "rem": _rem,
}  # fmt: skip
"""The operations by name: float64 arrays of float32 values in, float64 out, as the module says.

Keywords: ``downward``, the sign rule of rounding toward-negative for exact zero sums; ``precision``, the significant
bits of the format that the result will be rounded to, 24 unless given; ``unit``, of which all operands are multiples.
"""
