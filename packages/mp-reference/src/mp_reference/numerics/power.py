"""``x**y`` in formats of at most 16 bits, correctly rounded.

float64 decides all but the results that lie within a few of its ulps of a midpoint. Those are decided exactly: ``x**y``
with ``y = k / 2**j`` is a midpoint only if ``x`` is a perfect power, which integers tell; else logarithms in integers,
with as many bits as it takes, say on which side it lies.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import codes_of, from_codes
from mp_reference.numerics.codec import decode, encode
from mp_reference.numerics.elementwise import operands_of
from mp_reference.numerics.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.spec.formats import FloatFormat

__all__ = ["pow", "side_of_power"]

_TRUSTED = 64  # float64 ulps; the power functions in use err by less than two


def pow(x: ArrayLike, y: ArrayLike) -> NDArray[Any]:  # noqa: A001  # the operation's name in IEEE 754
    """``x**y``.

    Args:
        x: array of float16, bfloat16 or a narrower ml_dtypes dtype.
        y: array of the same dtype, broadcastable against ``x``.

    Returns:
        The same dtype, the broadcast shape, correctly rounded, ties to even. ``pow(x, 0)`` and ``pow(1, y)`` are 1,
        also for NaN; ``pow(-1, inf)`` is 1; a negative ``x`` with a ``y`` that is no integer gives NaN.

    Raises:
        TypeError: the dtypes differ, are float32, or store no named format.
        ValueError: a NaN result in a format that has none.

    Source: IEEE 754-2019, 9.2 and 9.2.1.

    >>> pow(np.float16([2.0, 9.0, 0.0]), np.float16([-25.0, 0.5, -1.0])).tolist()
    [0.0, 3.0, inf]
    """
    fmt, (base, exponent) = operands_of("pow", x, y)
    if fmt.bits > 16:
        raise TypeError(
            f"pow is correctly rounded for formats of at most 16 bits, got {base.dtype}; cast with mp.cast(x, mp.BF16) "
            "or use numpy, knowing that its last bit is not guaranteed"
        )
    with np.errstate(all="ignore"):
        wide_base, wide_exponent = (decode(codes_of(operand), fmt).astype(np.float64) for operand in (base, exponent))
        power = _power(wide_base, wide_exponent)
    wide_base, wide_exponent = np.broadcast_arrays(wide_base, wide_exponent)
    midpoint, doubtful = _midpoints_near(power, fmt)
    for where in zip(*np.nonzero(np.atleast_1d(doubtful)), strict=True):
        place = where if power.ndim else ()
        side = side_of_power(float(wide_base[place]), float(wide_exponent[place]), float(midpoint[place]))
        power[place] = midpoint[place] * (1 + side * 2.0**-40)
    return from_codes(encode(power, fmt), base.dtype)


def _power(base: NDArray[np.float64], exponent: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64's power; NumPy's turns into a square root where the exponent is 1/2, and that has other limits."""
    limit = (base == 0) | np.isinf(base)
    power = np.asarray(np.power(np.where(limit, np.abs(base), base), exponent))
    odd = np.fmod(np.abs(exponent), 2) == 1
    return np.where(limit & np.signbit(base) & odd, -power, power)


def _midpoints_near(power: NDArray[np.float64], fmt: FloatFormat) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The number of one bit more than the format that is nearest, and where it is a midpoint within float64's error."""
    spare = np.int64(1 << (51 - fmt.mantissa_bits))  # one unit of such a number, in float64 ulps
    pattern = power.view(np.int64)
    short = ((pattern + (spare >> 1)) & ~(spare - 1)).view(np.float64)
    near = np.abs(short.view(np.int64) - pattern) <= _TRUSTED
    near &= (np.abs(power) > fmt.min_subnormal / 4) & (np.abs(power) < fmt.max * 2)
    with np.errstate(invalid="ignore"):
        return short, np.asarray(near & (round_to(short, fmt) != short))


def side_of_power(x: float, y: float, bound: float) -> int:
    """On which side of a number ``x**y`` lies.

    Args:
        x: finite, not 0; negative only with an integer ``y``.
        y: finite.
        bound: of the sign of ``x**y``, near it.

    Returns:
        In magnitude, -1 below the bound, 0 on it, 1 above it.

    Source: this module; a perfect power is recognised by integer square roots.

    >>> side_of_power(3.0, 0.5, 1.7320508075688772)
    1
    >>> side_of_power(1.5, 2.0, 2.25)
    0
    """
    base, goal, numerator = Fraction(abs(x)), Fraction(abs(bound)), Fraction(y).numerator
    roots = Fraction(y).denominator.bit_length() - 1  # y = numerator / 2**roots
    while roots and (root := _perfect_root(base)) is not None:
        base, roots = root, roots - 1
    power_of_two = (base.numerator * base.denominator).bit_count() == 1
    if roots == 0 and (abs(numerator) <= 64 or power_of_two):
        power = base**numerator
        return (power > goal) - (power < goal)
    bits = 32
    while True:  # x**y is no short number, so some precision tells it from the bound
        bits *= 2
        exponent = Fraction(numerator, 1 << roots)
        difference = exponent * _log(base, bits) - _log(goal, bits)
        if abs(difference) > 64 + 64 * abs(exponent):
            return 1 if difference > 0 else -1


def _perfect_root(value: Fraction) -> Fraction | None:
    """The square root, if it is rational."""
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return root if root * root == value else None


def _log(value: Fraction, bits: int) -> int:
    """The natural logarithm in units of ``2**-bits``, to within 64 of them."""
    shift = value.numerator.bit_length() - value.denominator.bit_length()
    return _log_near_one(value / Fraction(2) ** shift, bits) + shift * _log_near_one(Fraction(2), bits + 16) // 65536


def _log_near_one(value: Fraction, bits: int) -> int:
    """``2 * atanh((v - 1) / (v + 1))`` by its series, for values between 1/2 and 2."""
    argument = (value - 1) / (value + 1)
    term = (argument.numerator << (bits + 8)) // argument.denominator
    square = (term * term) >> (bits + 8)
    total, order = 0, 1
    while term not in (0, -1):
        total += term // order
        term = (term * square) >> (bits + 8)
        order += 2
    return total >> 7
