"""Arithmetic on arrays of one format: the exact result, rounded once into the same format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import format_of
from mp_reference.numerics.codec import cast
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.rounding import Rounding, check_rounding
from mp_reference.spec.formats import FP32, FloatFormat

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["add", "div", "fma", "mul", "rsqrt", "sqrt", "sub"]

_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}


def operands_of(name: str, *arrays: ArrayLike) -> tuple[FloatFormat, list[NDArray[Any]]]:
    """Check that all operands store one format.

    Args:
        name: the operation, for the message.
        arrays: the operands, broadcastable.

    Returns:
        The format and the operands as arrays.

    Raises:
        TypeError: the dtypes differ, or store no named format.

    Source: this project's contract: no operand is converted silently.

    >>> operands_of("add", np.float16(1), np.float16(2))[0].name
    'fp16'
    """
    values = [np.asarray(array) for array in arrays]
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:
        raise TypeError(
            f"{name} needs operands of one dtype, got {' and '.join(str(value.dtype) for value in values)}; widen the "
            "narrower with .astype, which is exact, or cast the wider with mp.cast"
        )
    if values[0].dtype == np.float64:
        raise TypeError(f"{name} computes in the formats of mp.FORMATS, got float64; cast it with mp.cast(x, mp.FP32)")
    return format_of(values[0].dtype), values


def _once(name: str, rounding: Rounding, *arrays: ArrayLike) -> NDArray[Any]:
    """The operation rounded once: through float32 where that is innocuous, else through float64 rounded to odd."""
    if rounding == "stochastic":
        raise ValueError(f"{name} has no random bits; compute in float32 and use mp.round_to(..., 'stochastic')")
    check_rounding(rounding)
    fmt, values = operands_of(name, *arrays)
    with np.errstate(all="ignore"):
        if rounding == "nearest-even" and name in _UFUNCS:
            if fmt == FP32:
                return np.asarray(_UFUNCS[name](*values))
            return cast(_UFUNCS[name](*(value.astype(np.float32) for value in values)), fmt)
        wide = [value.astype(np.float64) for value in values]
        odd = ODD[name](*wide, downward=rounding == "toward-negative")
        return cast(odd, fmt, rounding).astype(values[0].dtype)


def add(a: ArrayLike, b: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """``a + b``, rounded once.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype, the broadcast shape. An exact zero of opposite signs is +0, toward-negative -0.

    Raises:
        TypeError: the dtypes differ.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3.

    >>> add(np.float16(2048), np.float16(1))
    array(2.048e+03, dtype=float16)
    """
    return _once("add", rounding, a, b)


def sub(a: ArrayLike, b: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """``a - b``, rounded once.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3.

    >>> sub(np.float16(1), np.float16(1), rounding="toward-negative")
    array(-0., dtype=float16)
    """
    return _once("sub", rounding, a, b)


def mul(a: ArrayLike, b: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """``a * b``, rounded once.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype, the broadcast shape; ``0 * inf`` is NaN.

    Raises:
        TypeError: the dtypes differ.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3.

    >>> mul(np.float16(300), np.float16(300), rounding="toward-zero")
    array(6.55e+04, dtype=float16)
    """
    return _once("mul", rounding, a, b)


def div(a: ArrayLike, b: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """``a / b``, rounded once.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype, the broadcast shape; ``1 / 0`` is infinite, ``0 / 0`` and ``inf / inf`` are NaN.

    Raises:
        TypeError: the dtypes differ.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3, 7.3.

    >>> div(np.float16(1), np.float16(3), rounding="toward-positive")
    array(0.3335, dtype=float16)
    """
    return _once("div", rounding, a, b)


def sqrt(a: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """The square root, rounded once.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype and shape; ``sqrt(-0)`` is -0, of other negative numbers NaN.

    Raises:
        TypeError: the dtype stores no named format.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 5.4.1.

    >>> sqrt(np.float16(2))
    array(1.414, dtype=float16)
    """
    return _once("sqrt", rounding, a)


def rsqrt(a: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """``1 / sqrt(a)``, rounded once, not twice.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype and shape; of +-0 infinity of that sign, of infinity +0, of negative numbers NaN.

    Raises:
        TypeError: the dtype stores no named format.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 9.2 (rSqrt).

    >>> rsqrt(np.float16(2))
    array(0.707, dtype=float16)
    """
    return _once("rsqrt", rounding, a)


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike, rounding: Rounding = "nearest-even") -> NDArray[Any]:
    """``a * b + c``, rounded once.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable.
        c: array of the same dtype, broadcastable.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ.
        ValueError: an unknown rounding.

    Source: IEEE 754-2019, 5.4.1. In fp16 neither float32 nor float64 arithmetic followed by a cast gives these bits.

    >>> fma(np.float16(1.9921875), np.float16(1.625), np.float16(-(2.0**-24)))
    array(3.236, dtype=float16)
    """
    return _once("fma", rounding, a, b, c)
