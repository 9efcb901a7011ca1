"""The oracle: arithmetic in ``fractions.Fraction``, rounded by integer division. It shares no code with ``rounding``.

Slow and obvious on purpose: one number at a time, no floating-point operation anywhere but to read and write values.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mp_reference.spec.formats import FloatFormat

__all__ = [
    "Exact", "add", "div", "dot", "exact_sum", "fma", "mul", "rem", "round_exact", "rsqrt", "sqrt", "sub",
    "to_fraction", "value_of",
]  # fmt: skip

Exact = Fraction | float
"""An exact number: a ``Fraction``, or a float for what no fraction is: -0.0, infinities, NaN."""


def to_fraction(value: Fraction | float) -> Fraction:
    """Read a finite number exactly.

    Args:
        value: int, finite float, NumPy or ml_dtypes scalar, or ``Fraction``.

    Returns:
        The same number.

    Raises:
        ValueError: ``value`` is infinite or NaN, which no fraction is.

    Source: IEEE 754-2019, 3.3 (the value that a representation stands for).

    >>> to_fraction(0.1) == Fraction(0.1)
    True
    """
    if isinstance(value, Fraction | int):
        return Fraction(value)
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is no fraction; treat infinities and NaN before")
    return Fraction(float(value))


def value_of(code: int, fmt: FloatFormat) -> Exact:
    """Read a code by the definition of its format, field by field.

    Args:
        code: from 0 to ``2**fmt.bits - 1``.
        fmt: the format.

    Returns:
        ``Fraction``, or a float for zeros, infinities and NaN.

    Source: IEEE 754-2019, 3.4; ``fmt.source`` for the formats that it does not know.

    >>> from mp_reference.spec.formats import E4M3FN
    >>> value_of(0x7E, E4M3FN), value_of(0x80, E4M3FN), value_of(0x7F, E4M3FN)
    (Fraction(448, 1), -0.0, nan)
    """
    magnitude = code % 2 ** (fmt.exponent_bits + fmt.mantissa_bits)
    sign = -1 if magnitude != code else 1
    field, fraction = divmod(magnitude, 2**fmt.mantissa_bits)
    all_ones = magnitude == 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    if fmt.specials == "ieee" and field == 2**fmt.exponent_bits - 1:
        return math.nan if fraction else sign * math.inf
    if (fmt.specials in ("fn", "exponent-only") and all_ones) or (
        fmt.specials == "fnuz" and sign < 0 and magnitude == 0
    ):
        return math.nan
    if fmt.specials == "exponent-only" or field > 0:
        fraction += 2**fmt.mantissa_bits
    exponent = field if fmt.specials == "exponent-only" else max(field, 1)
    value = sign * fraction * Fraction(2) ** (exponent - fmt.bias - fmt.mantissa_bits)
    return value if value else math.copysign(0.0, sign)


def round_exact(
    value: Exact,
    fmt: FloatFormat,
    rounding: str = "nearest-even",
    overflow: str = "ieee",
    subnormals: bool | str = True,
    random_bits: int | None = None,
    random_width: int = 32,
) -> float:
    """Round one number into a format by integer division.

    Args:
        value: ``Fraction``, int or float; floats may be -0.0, infinite or NaN.
        fmt: the target format.
        rounding: a name of ``rounding.ROUNDINGS``.
        overflow: ``ieee`` or ``saturate``.
        subnormals: ``True``, ``False``, ``flush-before`` or ``flush-after``.
        random_bits: for ``stochastic``, an integer below ``2**random_width``.
        random_width: how many random bits there are.

    Returns:
        The rounded value as a Python float, which holds every value of every format.

    Source: IEEE 754-2019, 4.3 and 7.4; overflow of 8-bit formats as in ``fmt.source``.

    >>> from mp_reference.spec.formats import E4M3FN, FP16
    >>> round_exact(Fraction(1, 3), FP16)
    0.333251953125
    >>> round_exact(465, E4M3FN), round_exact(465, E4M3FN, overflow="saturate")
    (nan, 448.0)
    """
    real = float(value) if isinstance(value, float) or value == 0 else math.nan  # fractions may be past every float
    if isinstance(value, float) and math.isnan(value):
        return math.nan
    negative = value < 0 or (value == 0 and math.copysign(1, real) < 0)
    if not fmt.signed and (negative or value == 0):
        return math.nan  # no sign and no zero
    if math.isinf(real):
        magnitude = _largest(fmt, overflow) if overflow == "saturate" or not fmt.has_inf else math.inf
        return math.copysign(magnitude, real)
    exact = abs(to_fraction(value))
    if subnormals == "flush-before" and fmt.has_zero and exact < Fraction(fmt.min_normal):
        return _signed_zero(fmt, negative)
    steps, ulp = _steps(exact, fmt, _direction(rounding, negative), random_bits, random_width)
    rounded = steps * ulp
    if not fmt.has_zero:
        rounded = max(rounded, Fraction(fmt.min_normal))
    if rounded > Fraction(fmt.max):
        stays = overflow == "saturate" or _direction(rounding, negative) in ("down", "odd")
        magnitude = fmt.max if stays else _largest(fmt, overflow)
        return math.copysign(magnitude, -1.0 if negative else 1.0)
    if rounded == 0 or (subnormals in (False, "flush-after") and rounded < Fraction(fmt.min_normal)):
        return _signed_zero(fmt, negative)
    return -float(rounded) if negative else float(rounded)


def _signed_zero(fmt: FloatFormat, negative: bool) -> float:
    return -0.0 if negative and fmt.has_negative_zero else 0.0


def _largest(fmt: FloatFormat, overflow: str) -> float:
    """What an overflow away from zero becomes."""
    if overflow == "saturate" or fmt.specials == "finite":
        return fmt.max
    return math.inf if fmt.has_inf else math.nan


def _direction(rounding: str, negative: bool) -> str:
    """The rounding of the magnitude."""
    toward = {"toward-zero": "down", "to-odd": "odd", "nearest-even": "even", "nearest-away": "away"}
    if rounding == "toward-positive":
        return "down" if negative else "up"
    if rounding == "toward-negative":
        return "up" if negative else "down"
    return toward.get(rounding, rounding)


def _steps(
    exact: Fraction, fmt: FloatFormat, direction: str, random_bits: int | None, random_width: int
) -> tuple[int, Fraction]:
    """The rounded magnitude as a number of ulps, the exponent having no upper end."""
    exponent = fmt.min_exponent
    if exact >= Fraction(fmt.min_normal):
        exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
        if exact < Fraction(2) ** exponent:
            exponent -= 1
    ulp = Fraction(2) ** (exponent - fmt.mantissa_bits)
    steps, rest = divmod(exact, ulp)
    fraction = rest / ulp
    if direction == "stochastic":
        if random_bits is None:
            raise ValueError("rounding='stochastic' needs random_bits, an integer below 2**random_width")
        up = fraction + (random_bits + Fraction(1, 2)) / 2**random_width >= 1
    else:
        half = Fraction(1, 2)
        tie_up = direction == "away" or steps % 2 == 1 or (fmt.mantissa_bits == 0 and steps == 1)
        up = {
            "down": False,
            "up": fraction > 0,
            "odd": fraction > 0 and steps % 2 == 0,
            "even": fraction > half or (fraction == half and tie_up),
            "away": fraction >= half,
        }[direction]
    return int(steps) + int(up), ulp


def add(a: float, b: float, *, downward: bool = False) -> Exact:
    """The exact sum.

    Args:
        a: a number, infinity or NaN.
        b: likewise.
        downward: the sign rule of rounding toward-negative: an exact zero sum of opposite signs is -0.

    Returns:
        ``Fraction``, or a float for signed zeros, infinities and NaN.

    Source: IEEE 754-2019, 6.1 to 6.3 and 7.2.

    >>> add(1.0, 2.0**-60) == 1 + Fraction(1, 2**60)
    True
    """
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    total = to_fraction(a) + to_fraction(b)
    return total if total else _zero_sum(a, b, downward)


def _zero_sum(a: float, b: float, downward: bool) -> float:
    """Zero: the common sign of two equal-signed zeros, else by the direction."""
    signs = {math.copysign(1, a), math.copysign(1, b)}
    if len(signs) == 1:
        return math.copysign(0.0, signs.pop())
    return -0.0 if downward else 0.0


def sub(a: float, b: float, *, downward: bool = False) -> Exact:
    """The exact difference, ``add(a, -b)``.

    Args:
        a: a number, infinity or NaN.
        b: likewise.
        downward: as for ``add``.

    Returns:
        As ``add``.

    Source: IEEE 754-2019, 6.3.

    >>> sub(1.0, 1.0)
    0.0
    """
    return add(a, -b, downward=downward)


def mul(a: float, b: float) -> Exact:
    """The exact product.

    Args:
        a: a number, infinity or NaN.
        b: likewise.

    Returns:
        ``Fraction``, or a float for signed zeros, infinities and NaN (of ``0 * inf``).

    Source: IEEE 754-2019, 6.1 to 6.3 and 7.2.

    >>> mul(0.5, -3.0)
    Fraction(-3, 2)
    """
    if math.isfinite(a) and math.isfinite(b) and a != 0 and b != 0:
        return to_fraction(a) * to_fraction(b)
    return float(a) * float(b)


def div(a: float, b: float) -> Exact:
    """The exact quotient.

    Args:
        a: a number, infinity or NaN.
        b: likewise.

    Returns:
        ``Fraction``, or a float: signed zeros, infinities (of ``1 / 0``), NaN (of ``0 / 0`` and ``inf / inf``).

    Source: IEEE 754-2019, 6.1 to 6.3, 7.2 and 7.3.

    >>> div(1.0, -3.0)
    Fraction(-1, 3)
    >>> div(-1.0, 0.0)
    -inf
    """
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    if math.isinf(a) or b == 0:
        return math.copysign(math.inf, sign)
    if math.isinf(b) or a == 0:
        return math.copysign(0.0, sign)
    return to_fraction(a) / to_fraction(b)


def sqrt(a: float) -> Exact:
    """The square root, exact where it is rational and else a fraction that every rounding takes for it.

    Args:
        a: a number, infinity or NaN.

    Returns:
        ``Fraction`` that lies on the same side of every number of up to 60 significant bits as the root; or a float for
        zeros (of their own sign), infinity and NaN (of negative numbers).

    Source: IEEE 754-2019, 5.4.1.

    >>> sqrt(2.25)
    Fraction(3, 2)
    >>> sqrt(-0.0)
    -0.0
    """
    if math.isnan(a) or a == 0 or a == math.inf:
        return float(a)
    if a < 0:
        return math.nan
    return _root(to_fraction(a))


def _root(exact: Fraction) -> Fraction:
    """At least 60 bits of the root, and half a unit more where bits follow."""
    shift = 128 - exact.numerator.bit_length() + exact.denominator.bit_length()
    shift += shift % 2
    whole, rest = divmod(exact * Fraction(2) ** shift, 1)
    root = math.isqrt(whole)
    sticky = Fraction(1, 2) if rest or root * root != whole else 0
    return (root + sticky) / Fraction(2) ** (shift // 2)


def rsqrt(a: float) -> Exact:
    """The reciprocal square root, exact where it is rational and else a fraction that every rounding takes for it.

    Args:
        a: a number, infinity or NaN.

    Returns:
        As ``sqrt``; infinity of the sign of a zero, +0 of infinity.

    Source: IEEE 754-2019, 9.2.

    >>> rsqrt(0.25)
    Fraction(2, 1)
    """
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0:
        return math.copysign(math.inf, a)
    return 0.0 if math.isinf(a) else _root(1 / to_fraction(a))


def fma(a: float, b: float, c: float, *, downward: bool = False) -> Exact:
    """The exact ``a * b + c``.

    Args:
        a: a number, infinity or NaN.
        b: likewise.
        c: likewise.
        downward: as for ``add``.

    Returns:
        ``Fraction``, or a float for signed zeros, infinities and NaN.

    Source: IEEE 754-2019, 5.4.1, 6.3 and 7.2.

    >>> fma(1.9921875, 1.625, -(2.0**-24))
    Fraction(54312959, 16777216)
    """
    if not (math.isfinite(a) and math.isfinite(b)) or not math.isfinite(c):
        return float(mul(a, b)) + c
    total = to_fraction(a) * to_fraction(b) + to_fraction(c)
    return total if total else _zero_sum(math.copysign(1, a) * math.copysign(1, b), c, downward)


def rem(a: float, b: float) -> Exact:
    """The IEEE remainder ``a - n * b`` with n the integer nearest to ``a / b``, ties to even; always representable.

    Args:
        a: a number, infinity or NaN.
        b: likewise.

    Returns:
        ``Fraction``, or a float: zero of the sign of ``a``, ``a`` for infinite ``b``, NaN for infinite ``a`` or zero
        ``b``.

    Source: IEEE 754-2019, 5.3.1.

    >>> rem(5.0, 3.0)
    Fraction(-1, 1)
    """
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or b == 0:
        return math.nan
    if math.isinf(b) or a == 0:
        return float(a)
    rest = to_fraction(a) - round(to_fraction(a) / to_fraction(b)) * to_fraction(b)
    return rest if rest else math.copysign(0.0, a)


def exact_sum(values: list[float]) -> Exact:
    """The exact sum of many numbers.

    Args:
        values: numbers, infinities or NaN; none at all gives +0.

    Returns:
        ``Fraction``, or a float: infinities, NaN, and zero (-0 only where every term is -0).

    Source: IEEE 754-2019, 9.4 (sum), with the sign of 6.3.

    >>> exact_sum([1e30, 1.0, -1e30])
    Fraction(1, 1)
    """
    if not all(math.isfinite(value) for value in values):
        return sum(value for value in values if not math.isfinite(value))
    total = sum((to_fraction(value) for value in values), Fraction(0))
    if total:
        return total
    return -0.0 if values and all(math.copysign(1, value) < 0 for value in values) and not any(values) else 0.0


def dot(a: list[float], b: list[float], c: float = 0.0) -> Exact:
    """The exact ``c + sum(a[i] * b[i])``.

    Args:
        a: numbers, infinities or NaN.
        b: as many of them.
        c: what the products are added to.

    Returns:
        ``Fraction``, or a float for infinities, NaN and zero.

    Raises:
        ValueError: the lengths differ.

    Source: IEEE 754-2019, 9.4 (dot).

    >>> dot([1e30, 1.0], [1.0, 3.0], -1e30)
    Fraction(3, 1)
    """
    products = [mul(x, y) for x, y in zip(a, b, strict=True)]
    special = [float(p) for p in [*products, c] if isinstance(p, float) and not math.isfinite(p)]
    if special:
        return sum(special)
    total = sum((to_fraction(p) for p in products), to_fraction(c))
    if total:
        return total
    negative = [isinstance(p, float) and math.copysign(1, p) < 0 for p in [*products, c]]
    return -0.0 if all(negative) and c == 0 else 0.0
