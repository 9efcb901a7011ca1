"""Operations that a later rounding to ``precision`` bits cannot tell from the exact result.

The operands are values of at most 24 bits held in float64, or of at most 11 bits and of fp16's range held in float32. A
result errs by at most half a unit in its last bit, so it misleads a later rounding only where it is itself a number of
at most ``precision + 1`` bits, that is a number of the narrow format or a midpoint. Those few are recognised by their
low bits, their exact error is computed, and they move to their neighbour towards the exact result: rounding to odd,
where it matters. "Exact" below is meant of float64; float32 has as many bits to spare for 11 as float64 for 24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Wide = NDArray[Any]

__all__ = ["ODD"]

_INTEGERS: dict[Any, Any] = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}
_STORED_BITS = {np.dtype(np.float32): 23, np.dtype(np.float64): 52}


def _short(value: Wide, precision: int) -> NDArray[np.bool_]:
    """Where a result has at most ``precision + 1`` significant bits, so that all lower ones are zero."""
    integer = _INTEGERS[value.dtype]
    low = integer((1 << (_STORED_BITS[value.dtype] - precision)) - 1)
    return np.asarray(np.bitwise_and(value.view(integer), low) == 0)


def _places(mask: NDArray[np.bool_]) -> Any:
    """What picks the true places, sooner than the mask itself does again and again."""
    return np.nonzero(mask) if mask.ndim else mask


def _step(value: Wide, where: Any, error: Wide) -> None:
    """Move ``value[where]`` by one unit towards where ``error`` points, if it lacks anything at all."""
    rounded = value[where]
    inexact = (error != 0) & np.isfinite(rounded) & np.isfinite(error)
    if inexact.any():
        step = np.where((error > 0) == (rounded > 0), 1, -1)
        pattern = rounded.view(_INTEGERS[rounded.dtype])
        pattern += np.where(inexact, step, 0).astype(pattern.dtype)
        value[where] = rounded


def _sum_error(total: Wide, a: Wide, b: Wide) -> Wide:
    """TwoSum: what the rounded sum lacks, exactly (Knuth, TAOCP 4.2.2)."""
    part = total - a
    return np.asarray((a - (total - part)) + (b - part))


def _add(
    a: Wide, b: Wide, *, downward: bool = False, precision: int = 24, unit: float = 0.0, out: Wide | None = None,
    **_: Any,
) -> Wide:  # fmt: skip
    """Where all terms are multiples of ``unit``, sums below ``2**53 * unit`` are exact (2**24 in float32)."""
    total = np.asarray(np.add(a, b, out=out))
    short = _short(total, precision)
    count = int(np.count_nonzero(short))
    if count and max(total.max(), -total.min()) < unit * 2.0 ** (_STORED_BITS[total.dtype] + 1):
        count = 0  # not so where there is a NaN, which is not less
    if count > total.size // 8:  # sums of short numbers are mostly short: look at all of them at once
        error = _sum_error(total, a, b)
        short &= error != 0  # NaN, where the sum is infinite, is looked at and left alone
        if short.any():
            where = _places(short)
            _step(total, where, error[where])
    elif count:
        a, b = np.broadcast_arrays(a, b)
        where = _places(short)
        _step(total, where, _sum_error(total[where], a[where], b[where]))
    if downward:  # a zero sum is -0 unless both terms are +0
        return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), total.dtype.type(-0.0), total)
    return total


def _sub(a: Wide, b: Wide, *, overwrite: bool = False, **how: Any) -> Wide:
    return _add(a, np.negative(b, out=b if overwrite else None), **how)


def _mul(a: Wide, b: Wide, *, overwrite: bool = False, **_: Any) -> Wide:
    """48 bits, 22 in float32, exponents within the carrier's: exact."""
    return np.asarray(np.multiply(a, b, out=a if overwrite else None))


def _fma(a: Wide, b: Wide, c: Wide, *, unit: float = 0.0, overwrite: bool = False, **how: Any) -> Wide:
    product = _mul(a, b, overwrite=overwrite)
    return _add(product, c, unit=unit * min(unit, 1.0), out=b if overwrite else None, **how)


def _div(a: Wide, b: Wide, *, precision: int = 24, **_: Any) -> Wide:
    """25 quotient bits times 24 divisor bits is exact, and so is what remains of the dividend."""
    quotient = np.asarray(a / b)
    short = _short(quotient, precision)
    if short.any():
        a, b = np.broadcast_arrays(a, b)
        where = _places(short)
        divisor = b[where]
        rest = a[where] - quotient[where] * divisor
        _step(quotient, where, rest * np.sign(divisor))
    return quotient


def _sqrt(a: Wide, *, precision: int = 24, **_: Any) -> Wide:
    """25 root bits squared are exact, and so is what remains."""
    root = np.asarray(np.sqrt(a))
    short = _short(root, precision)
    if short.any():
        where = _places(short)
        found = root[where]
        _step(root, where, a[where] - found * found)
    return root


def _rsqrt(a: Wide, **_: Any) -> Wide:
    """Two roundings err by less than two units, and step over no short number: tests ask all fractions there are."""
    return np.asarray(1 / np.sqrt(a))


def _rem(a: Wide, b: Wide, **_: Any) -> Wide:
    """Exact: fmod by twice the divisor leaves at most two more to take away."""
    divisor = np.abs(b)
    rest = np.fmod(np.abs(a), 2 * divisor)
    more = rest + rest > divisor
    once = rest - divisor
    rest = np.where(more, np.where(once + once >= divisor, once - divisor, once), rest)
    return np.asarray(rest * np.copysign(a.dtype.type(1), a))


ODD: dict[str, Any] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "sqrt": _sqrt, "rsqrt": _rsqrt, "fma": _fma, "rem": _rem,
}  # fmt: skip
"""The operations by name: arrays of one carrier in, the same out, as the module says.

Keywords: ``downward``, the sign rule of rounding toward-negative for exact zero sums; ``precision``, the significant
bits of the format that the result will be rounded to, 24 unless given; ``unit``, of which all operands are multiples;
``overwrite``, whether operands may be used as scratch memory, which fits the caches better.
"""
