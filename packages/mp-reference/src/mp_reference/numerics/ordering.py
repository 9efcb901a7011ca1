"""Order and neighbours: minimum and maximum, comparison, the next number up and down, the size of an ulp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import codes_of, from_codes, is_nan, ordinals
from mp_reference.numerics.codec import decode, encode_representable, nan_code
from mp_reference.numerics.elementwise import operands_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.spec.formats import FloatFormat

__all__ = [
    "UNORDERED", "compare", "maximum", "maximum_number", "minimum", "minimum_number", "next_down", "next_up",
    "nextafter", "ulp",
]  # fmt: skip

UNORDERED = 2
"""What ``compare`` says where an operand is NaN."""


def minimum(a: ArrayLike, b: ArrayLike) -> NDArray[Any]:
    """The smaller of two numbers; NaN if either is NaN; -0 is smaller than +0.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: IEEE 754-2019, 9.6 (minimum).

    >>> minimum(np.float16([0.0, np.nan]), np.float16([-0.0, 1.0]))
    array([-0., nan], dtype=float16)
    """
    return _choose("minimum", a, b, larger=False, number=False)


def maximum(a: ArrayLike, b: ArrayLike) -> NDArray[Any]:
    """The larger of two numbers; NaN if either is NaN; +0 is larger than -0.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: IEEE 754-2019, 9.6 (maximum).

    >>> maximum(np.float16([-0.0, 1.0]), np.float16([0.0, 2.0]))
    array([0., 2.], dtype=float16)
    """
    return _choose("maximum", a, b, larger=True, number=False)


def minimum_number(a: ArrayLike, b: ArrayLike) -> NDArray[Any]:
    """The smaller of two numbers; a NaN only if both are NaN.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: IEEE 754-2019, 9.6 (minimumNumber).

    >>> minimum_number(np.float16([0.0, np.nan]), np.float16([-0.0, 1.0]))
    array([-0.,  1.], dtype=float16)
    """
    return _choose("minimum_number", a, b, larger=False, number=True)


def maximum_number(a: ArrayLike, b: ArrayLike) -> NDArray[Any]:
    """The larger of two numbers; a NaN only if both are NaN.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: IEEE 754-2019, 9.6 (maximumNumber).

    >>> maximum_number(np.float16([np.nan, -1.0]), np.float16([np.nan, 1.0]))
    array([nan,  1.], dtype=float16)
    """
    return _choose("maximum_number", a, b, larger=True, number=True)


def _choose(name: str, a: ArrayLike, b: ArrayLike, *, larger: bool, number: bool) -> NDArray[Any]:
    fmt, (left, right) = operands_of(name, a, b)
    left, right = np.broadcast_arrays(left, right)
    left_nan, right_nan = is_nan(left), is_nan(right)
    left_key, right_key = _keys(left, fmt), _keys(right, fmt)
    take_left = left_key >= right_key if larger else left_key <= right_key
    if number:
        take_left = (take_left & ~left_nan) | right_nan
    chosen = np.where(take_left, codes_of(left), codes_of(right))
    nan = left_nan & right_nan if number else left_nan | right_nan
    if fmt.has_nan:
        chosen = np.where(nan, chosen.dtype.type(nan_code(fmt)), chosen)
    return from_codes(chosen, left.dtype)


def _keys(x: NDArray[Any], fmt: FloatFormat) -> NDArray[np.int64]:
    """Integers in the order of the numbers, -0 before +0."""
    keys = ordinals(codes_of(x), fmt)
    negative = codes_of(x).astype(np.int64) >> (fmt.bits - 1) & 1 if fmt.signed else np.zeros(keys.shape, np.int64)
    return keys - negative


def compare(a: ArrayLike, b: ArrayLike) -> NDArray[np.int8]:
    """Compare two numbers.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        int8, the broadcast shape: -1 less, 0 equal (so are -0 and +0), 1 greater, ``UNORDERED`` (2) where either is
        NaN.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: IEEE 754-2019, 5.11.

    >>> compare(np.float16([-0.0, 1.0, np.nan]), np.float16([0.0, 2.0, 0.0])).tolist()
    [0, -1, 2]
    """
    fmt, (left, right) = operands_of("compare", a, b)
    order = np.sign(ordinals(codes_of(left), fmt) - ordinals(codes_of(right), fmt)).astype(np.int8)
    return np.where(is_nan(left) | is_nan(right), np.int8(UNORDERED), order)


def next_up(x: ArrayLike) -> NDArray[Any]:
    """The smallest number of the format that is greater.

    Args:
        x: array of float32, float16 or an ml_dtypes dtype.

    Returns:
        The same dtype and shape. The largest number gives infinity, or itself where there is none; infinity gives
        itself; the negative number next to zero gives -0 where there is one; NaN gives NaN.

    Raises:
        TypeError: the dtype stores no named format.

    Source: IEEE 754-2019, 5.3.1 (nextUp).

    >>> next_up(np.float16([1.0, -0.0, 65504.0])).tolist()
    [1.0009765625, 5.960464477539063e-08, inf]
    """
    fmt, (values,) = operands_of("next_up", x)
    return _neighbour(values, np.ones(values.shape, np.int64), fmt)


def next_down(x: ArrayLike) -> NDArray[Any]:
    """The largest number of the format that is less.

    Args:
        x: array of float32, float16 or an ml_dtypes dtype.

    Returns:
        The same dtype and shape; as ``next_up``, mirrored.

    Raises:
        TypeError: the dtype stores no named format.

    Source: IEEE 754-2019, 5.3.1 (nextDown).

    >>> next_down(np.float16([1.0, 0.0])).tolist()
    [0.99951171875, -5.960464477539063e-08]
    """
    fmt, (values,) = operands_of("next_down", x)
    return _neighbour(values, -np.ones(values.shape, np.int64), fmt)


def nextafter(x: ArrayLike, towards: ArrayLike) -> NDArray[Any]:
    """The number of the format next to ``x`` in a direction.

    Args:
        x: array of float32, float16 or an ml_dtypes dtype.
        towards: array of the same dtype, broadcastable against ``x``.

    Returns:
        The same dtype, the broadcast shape; ``towards`` where the two compare equal, NaN where either is NaN.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: C23, 7.12.11.3 (nextafter).

    >>> nextafter(np.float16(1), np.float16(0))
    array(0.9995, dtype=float16)
    """
    fmt, (values, goal) = operands_of("nextafter", x, towards)
    values, goal = np.broadcast_arrays(values, goal)
    order = compare(values, goal)
    moved = _neighbour(values, -order.astype(np.int64), fmt)
    chosen = np.where((order == 0) | ((order == UNORDERED) & is_nan(goal)), codes_of(goal), codes_of(moved))
    return from_codes(chosen, values.dtype)


def _neighbour(x: NDArray[Any], steps: NDArray[np.int64], fmt: FloatFormat) -> NDArray[Any]:
    """Move along the number line, keeping the sign at zero and NaN as it is."""
    codes = codes_of(x)
    last = int(encode_representable(np.array(np.inf if fmt.has_inf else fmt.max), fmt))
    first = -last if fmt.signed else 0
    place = np.clip(ordinals(codes, fmt) + np.sign(steps), first, last)
    if fmt.has_negative_zero:
        negative = (place < 0) | ((place == 0) & (codes.astype(np.int64) >> (fmt.bits - 1) == 1))
    else:
        negative = place < 0
    sign = np.int64(1 << (fmt.bits - 1)) if fmt.signed else np.int64(0)
    moved = np.where(negative, sign | np.abs(place), place).astype(codes.dtype)
    return from_codes(np.where(is_nan(x), codes, moved), x.dtype)


def ulp(x: ArrayLike) -> NDArray[Any]:
    """The distance from ``|x|`` to the next larger number, were the exponent unbounded.

    Args:
        x: array of float32, float16 or an ml_dtypes dtype.

    Returns:
        The same dtype and shape; ``min_subnormal`` for zero and subnormals, infinity for infinity, NaN for NaN. An ulp
        below the smallest number of a format without subnormals is that number.

    Raises:
        TypeError: the dtype stores no named format.

    Source: Muller et al., Handbook of Floating-Point Arithmetic, 2nd ed. (2018), 2.3.2.

    >>> ulp(np.float16([1.0, 2048.0, 0.0])).tolist()
    [0.0009765625, 2.0, 5.960464477539063e-08]
    """
    fmt, (values,) = operands_of("ulp", x)
    with np.errstate(invalid="ignore"):
        wide = np.abs(decode(codes_of(values), fmt).astype(np.float64))
        exponent = np.maximum(np.frexp(wide)[1] - 1, fmt.min_exponent)
        size = np.where(wide == 0, fmt.min_subnormal, np.ldexp(1.0, exponent - fmt.mantissa_bits))
    return from_codes(encode_representable(np.where(np.isfinite(wide), size, wide), fmt), values.dtype)
