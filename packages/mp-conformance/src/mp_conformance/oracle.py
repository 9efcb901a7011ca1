"""Expected values: the exact oracle of ``mp_reference.numerics.exact``, one element at a time, as arrays.

Nothing here comes from the rounding that is tested: values are rounded as fractions, and codes are looked up in a table
of what every code of a format stands for.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics import exact
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_reference.spec.formats import FloatFormat

__all__ = [
    "arithmetic", "cast", "cast_by_midpoints", "cast_float32_patterns", "code_of", "encode", "flags", "midpoints_of",
    "round_between", "value_of_code", "values_of",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def value_of_code(code: int, fmt: FloatFormat) -> float:
    """What a code stands for, from the format's row alone.

    Args:
        code: 0 to ``2**fmt.bits - 1``.
        fmt: the format.

    Returns:
        The value; a Python float holds every value of every format.

    Source: IEEE 754-2019, 3.4; the special codes as in ``fmt.source``.

    >>> from mp_reference.spec.formats import E4M3FN
    >>> value_of_code(0x7E, E4M3FN), value_of_code(0x7F, E4M3FN)
    (448.0, nan)
    """
    negative = fmt.signed and bool(code >> (fmt.bits - 1))
    magnitude = code & ((1 << (fmt.bits - int(fmt.signed))) - 1)
    field, fraction = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    top = (1 << fmt.exponent_bits) - 1
    ones = (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1
    if fmt.specials == "ieee" and field == top:
        value = math.nan if fraction else math.inf
    elif (fmt.specials in ("fn", "exponent-only") and magnitude == ones) or (
        fmt.specials == "fnuz" and negative and magnitude == 0
    ):
        return math.nan
    elif field == 0 and fmt.has_zero:
        value = math.ldexp(fraction, 1 - fmt.bias - fmt.mantissa_bits)
    else:
        value = math.ldexp((1 << fmt.mantissa_bits) + fraction, field - fmt.bias - fmt.mantissa_bits)
    return -value if negative else value


@cache
def _codes_by_value(fmt: FloatFormat) -> dict[tuple[float, float], int]:
    table: dict[tuple[float, float], int] = {}
    for code in range(1 << fmt.bits):
        value = value_of_code(code, fmt)
        if not math.isnan(value):
            table[value, math.copysign(1.0, value)] = code
    return table


@cache
def _nan_code(fmt: FloatFormat) -> int:
    """The first NaN, and the first quiet one where there are two kinds."""
    quiet = 1 << (fmt.mantissa_bits - 1) if fmt.specials == "ieee" else 0
    return next(code for code in range(1 << fmt.bits) if math.isnan(value_of_code(code, fmt)) and code & quiet == quiet)


def encode(values: list[float], fmt: FloatFormat) -> Array:
    """Values of a format as an array of its dtype, through the table of its codes.

    Args:
        values: each exactly representable in ``fmt``, or NaN where ``fmt`` has one.
        fmt: a format of ``FORMATS``; tf32 is carried in float32.

    Returns:
        1-D array of ``fmt.dtype``.

    Raises:
        KeyError: a value that ``fmt`` does not represent.

    Source: ``value_of_code``.

    >>> from mp_reference.spec.formats import BF16
    >>> encode([1.5, -0.0], BF16).view(np.uint16).tolist()
    [16320, 32768]
    """
    if fmt.dtype == np.float32:
        return np.frombuffer(b"".join(struct.pack("<f", value) for value in values), "<f4").astype(np.float32)
    table = _codes_by_value(fmt)
    codes = [_nan_code(fmt) if math.isnan(v) else table[v, math.copysign(1.0, v)] for v in values]
    return np.array(codes, _UNSIGNED[fmt.dtype.itemsize]).view(fmt.dtype)


def values_of(x: Array) -> list[Any]:
    """The elements as Python floats, or Python ints for integer arrays; exact.

    Args:
        x: any shape and dtype of the project.

    Returns:
        A flat list.

    Source: this project.

    >>> values_of(np.array([1.5, np.inf], np.float16))
    [1.5, inf]
    """
    if x.dtype.kind in "iu":
        return [int(v) for v in x.reshape(-1)]
    if x.dtype == np.float64 or x.dtype == np.float32:
        return [float(v) for v in x.reshape(-1)]
    fmt = _format_of(x.dtype)
    codes = x.reshape(-1).view(_UNSIGNED[x.dtype.itemsize])
    table = _values_by_code(fmt)
    return [table[int(code) & ((1 << fmt.bits) - 1)] for code in codes]


@cache
def _values_by_code(fmt: FloatFormat) -> list[float]:
    return [value_of_code(code, fmt) for code in range(1 << fmt.bits)]


@cache
def _format_of(dtype: np.dtype[Any]) -> FloatFormat:
    return next(fmt for fmt in FORMATS.values() if fmt.dtype == dtype and fmt.name != "tf32")


def cast(
    x: Array, fmt: FloatFormat, rounding: str = "nearest-even", overflow: str = "ieee", subnormals: bool = True
) -> Array:
    """``x`` rounded once into ``fmt``.

    Args:
        x: float64, float32, a narrow dtype or an integer dtype; any shape.
        fmt: the target.
        rounding: any mode but ``stochastic``.
        overflow: ``ieee`` or ``saturate``.
        subnormals: whether results below the smallest normal survive.

    Returns:
        Array of ``fmt.dtype``, the shape of ``x``. In a format without NaN a NaN becomes +0.

    Source: ``mp_reference.numerics.exact.round_exact``.

    >>> from mp_reference.spec.formats import BF16
    >>> cast(np.array([1 + 2**-8 + 2**-40]), BF16)
    array([1.00781], dtype=bfloat16)
    """
    rounded = [exact.round_exact(v, fmt, rounding, overflow, subnormals) for v in values_of(x)]
    if not fmt.has_nan:
        rounded = [0.0 if math.isnan(v) else v for v in rounded]
    return encode(rounded, fmt).reshape(x.shape)


def arithmetic(operation: str, operands: tuple[Array, ...], fmt: FloatFormat, rounding: str = "nearest-even") -> Array:
    """One exact operation, rounded once.

    Args:
        operation: add, sub, mul, div, sqrt, fma, minimum or maximum; or less, less_equal, equal.
        operands: arrays of ``fmt.dtype``, one shape.
        fmt: their format.
        rounding: any mode but ``stochastic``.

    Returns:
        Array of ``fmt.dtype``; of bool for the three comparisons.

    Source: IEEE 754-2019, 5.4.1, 5.11 and 9.6.

    >>> from mp_reference.spec.formats import FP16
    >>> arithmetic("add", (np.float16([1.0]), np.float16([2**-11])), FP16)
    array([1.], dtype=float16)
    """
    rows = list(zip(*(values_of(x) for x in operands), strict=True))
    shape = operands[0].shape
    if operation in _COMPARISONS:
        return np.array([_COMPARISONS[operation](*row) for row in rows], bool).reshape(shape)
    if operation in _SELECTIONS:
        return encode([_SELECTIONS[operation](*row) for row in rows], fmt).reshape(shape)
    options = {"downward": rounding == "toward-negative"} if operation in ("add", "sub", "fma") else {}
    function = getattr(exact, operation)
    return encode([exact.round_exact(function(*row, **options), fmt, rounding) for row in rows], fmt).reshape(shape)


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "equal": lambda a, b: a == b,
}


def _minimum(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    if a == b:
        return a if math.copysign(1, a) < 0 else b
    return min(a, b)


_SELECTIONS: dict[str, Callable[[float, float], float]] = {
    "minimum": _minimum,
    "maximum": lambda a, b: -_minimum(-a, -b),
}


def code_of(x: Array) -> Array:
    """The codes of a narrow or fp32 array as unsigned integers, flat.

    >>> code_of(np.float16([1.0])).tolist()
    [15360]
    """
    return np.ascontiguousarray(x).reshape(-1).view(_UNSIGNED[x.dtype.itemsize])


def flags(
    operation: str, operands: tuple[Array, ...], fmt: FloatFormat, rounding: str = "nearest-even"
) -> list[frozenset[str]]:
    """The exception flags that one operation raises; tininess is detected after rounding.

    Args:
        operation: add, sub, mul, div, sqrt or fma.
        operands: arrays of ``fmt.dtype``, one shape.
        fmt: an IEEE 754 format.
        rounding: any mode but ``stochastic``.

    Returns:
        One set an element, of invalid, infinite (division by zero), overflow, underflow, inexact.

    Source: IEEE 754-2019, 7; a quiet NaN operand raises nothing, a signalling one invalid.

    >>> from mp_reference.spec.formats import FP16
    >>> flags("div", (np.float16([1.0]), np.float16([0.0])), FP16)
    [frozenset({'infinite'})]
    """
    quiet = 1 << (fmt.mantissa_bits - 1)
    out = []
    for codes, row in zip(
        zip(*(code_of(x) for x in operands), strict=True),
        zip(*(values_of(x) for x in operands), strict=True),
        strict=True,
    ):
        signalling = any(math.isnan(v) and not int(c) & quiet for c, v in zip(codes, row, strict=True))
        out.append(frozenset({"invalid"} if signalling else _flags_of(operation, row, fmt, rounding)))
    return out


def _flags_of(operation: str, row: tuple[float, ...], fmt: FloatFormat, rounding: str) -> set[str]:
    result = getattr(exact, operation)(*row)
    if isinstance(result, float) and math.isnan(result):
        made_of_nothing = operation == "fma" and {abs(row[0]), abs(row[1])} == {0.0, math.inf}
        return set() if any(map(math.isnan, row)) and not made_of_nothing else {"invalid"}
    if isinstance(result, float) and math.isinf(result):
        return {"infinite"} if operation == "div" and math.isfinite(row[0]) else set()
    value = exact.to_fraction(result)
    unbounded = _to_precision(value, fmt, rounding)
    if unbounded > Fraction(fmt.max):
        return {"overflow", "inexact"}
    if exact.to_fraction(exact.round_exact(result, fmt, rounding)) == value:
        return set()
    return {"underflow", "inexact"} if unbounded < Fraction(fmt.min_normal) else {"inexact"}


def _to_precision(value: Fraction, fmt: FloatFormat, rounding: str) -> Fraction:
    """The magnitude of a number, rounded to the format's precision with an unbounded exponent."""
    scale = Fraction(2) ** (value.denominator.bit_length() - value.numerator.bit_length())  # into the normal range
    return abs(exact.to_fraction(exact.round_exact(value * scale, fmt, rounding))) / scale


@cache
def midpoints_of(fmt: FloatFormat) -> tuple[Array, Array]:
    """The finite magnitudes of a format in order, and the midpoints between neighbours, overflow's included.

    >>> from mp_reference.spec.formats import FP16
    >>> float(midpoints_of(FP16)[1][-1])
    65520.0
    """
    top = (1 << (fmt.bits - 1)) - 1
    magnitudes = [value_of_code(code, fmt) for code in range(top + 1)]
    finite = [v for v in magnitudes if math.isfinite(v)]
    beyond = finite[-1] + (finite[-1] - finite[-2])
    edges = [(a + b) / 2 for a, b in zip(finite, [*finite[1:], beyond], strict=True)]
    return np.array(finite), np.array(edges)


def cast_by_midpoints(x: Array, fmt: FloatFormat) -> Array:
    """Numbers rounded to nearest even into a narrow format by looking up between which midpoints they lie.

    Args:
        x: float32 or narrower, any shape.
        fmt: a signed format of at most 16 bits.

    Returns:
        Array of ``fmt.dtype``: as ``cast``, but fast enough for all 2**32 inputs.

    Source: IEEE 754-2019, 4.3.1; a midpoint of 16-bit neighbours is exact in float64.

    >>> from mp_reference.spec.formats import BF16
    >>> cast_by_midpoints(np.float32([1.00390625, -3.4e38]), BF16)
    array([1, -inf], dtype=bfloat16)
    """
    return round_between(x, np.zeros(x.shape, np.int8), fmt)


@cache
def _turns_of(fmt: FloatFormat) -> Array:
    """The float32 pattern from which on magnitudes round to the next code; a midpoint itself goes to the even one."""
    edges = midpoints_of(fmt)[1]
    to_lower: Array = np.arange(len(edges)) % 2 == 0
    return edges.astype(np.float32).view(np.uint32).astype(np.int64) + to_lower


def cast_float32_patterns(start: int, count: int, fmt: FloatFormat) -> Array:
    """Numbers of consecutive float32 patterns, rounded to nearest even into a format of 16 bits.

    Args:
        start: the first pattern.
        count: how many; their signs must agree.
        fmt: fp16 or bf16, whose midpoints float32 has.

    Returns:
        Array of ``fmt.dtype``, shape (count,): as ``cast_by_midpoints``, at the cost of writing it.

    Source: IEEE 754-2019, 4.3.1.

    >>> from mp_reference.spec.formats import BF16
    >>> cast_float32_patterns(0x3F807FFF, 3, BF16)
    array([1, 1, 1.00781], dtype=bfloat16)
    """
    magnitude, turns = start & 0x7FFFFFFF, _turns_of(fmt)
    first, last = np.searchsorted(turns, [magnitude, magnitude + count - 1], side="right")
    ends = np.concatenate([[magnitude], turns[first:last], [magnitude + count]])
    codes = np.repeat(np.arange(first, last + 1, dtype=np.uint16), np.diff(ends))
    codes[max(0x7F800001 - magnitude, 0) :] = _nan_code(fmt)
    codes |= np.uint16(start >> 31 << 15)
    return codes.view(fmt.dtype)


def round_between(x: Array, side: Array, fmt: FloatFormat) -> Array:
    """As ``cast_by_midpoints``, for values known better than float64 tells.

    Args:
        x: float32 or float64, any shape.
        side: where ``x`` is a midpoint, the sign of (true magnitude - midpoint); 0 is a tie.
        fmt: a signed format of at most 16 bits.

    Returns:
        Array of ``fmt.dtype``.

    Source: IEEE 754-2019, 4.3.1.

    >>> from mp_reference.spec.formats import FP16
    >>> round_between(np.array([1 + 2**-11] * 2), np.array([0, 1]), FP16)
    array([1.   , 1.001], dtype=float16)
    """
    finite, edges = midpoints_of(fmt)
    wide = np.asarray(x).astype(np.float64)
    magnitude = np.abs(wide)
    left = np.searchsorted(edges, magnitude, side="left")  # below or at a midpoint: the lower neighbour
    at_edge = np.take(edges, left, mode="clip") == magnitude
    at_midpoint = np.where(side == 0, left + (left & 1), left + (side > 0))  # a tie goes to the even one
    code = np.where(at_edge, at_midpoint, left)
    beyond = len(finite) - 1 if not fmt.has_nan else _nan_code(fmt) if not fmt.has_inf else len(finite)
    sign = np.signbit(wide).astype(np.int64) << (fmt.bits - 1)
    code = np.where(code >= len(finite), beyond, code)
    if fmt.has_nan:
        code = np.where(np.isnan(wide), _nan_code(fmt), code)
    if not fmt.has_negative_zero:  # its code is the NaN
        sign = np.where((code == 0) | (code == _nan_code(fmt)), 0, sign)
    return np.asarray((code | sign).astype(_UNSIGNED[fmt.dtype.itemsize]).view(fmt.dtype))
