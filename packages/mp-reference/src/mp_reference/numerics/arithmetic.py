"""Arithmetic on arrays of one format: the exact result, rounded once into the same format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mp_reference.numerics.elementwise import once

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.rounding import Rounding

__all__ = ["add", "div", "fma", "mul", "rem", "rsqrt", "sqrt", "sub"]


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

    >>> import numpy as np
    >>> add(np.float16(2048), np.float16(1))
    array(2.048e+03, dtype=float16)
    """
    return once("add", rounding, a, b)


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

    >>> import numpy as np
    >>> sub(np.float16(1), np.float16(1), rounding="toward-negative")
    array(-0., dtype=float16)
    """
    return once("sub", rounding, a, b)


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

    >>> import numpy as np
    >>> mul(np.float16(300), np.float16(300), rounding="toward-zero")
    array(6.55e+04, dtype=float16)
    """
    return once("mul", rounding, a, b)


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

    >>> import numpy as np
    >>> div(np.float16(1), np.float16(3), rounding="toward-positive")
    array(0.3335, dtype=float16)
    """
    return once("div", rounding, a, b)


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

    >>> import numpy as np
    >>> sqrt(np.float16(2))
    array(1.414, dtype=float16)
    """
    return once("sqrt", rounding, a)


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

    >>> import numpy as np
    >>> rsqrt(np.float16(2))
    array(0.707, dtype=float16)
    """
    return once("rsqrt", rounding, a)


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

    >>> import numpy as np
    >>> fma(np.float16(1.9921875), np.float16(1.625), np.float16(-(2.0**-24)))
    array(3.236, dtype=float16)
    """
    return once("fma", rounding, a, b, c)


def rem(a: ArrayLike, b: ArrayLike) -> NDArray[Any]:
    """The IEEE remainder ``a - n * b``, n the integer nearest to ``a / b``, ties to even; exact, so no rounding.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        The same dtype, the broadcast shape; a zero has the sign of ``a``, an infinite ``b`` gives ``a``, an infinite
        ``a`` or a zero ``b`` NaN.

    Raises:
        TypeError: the dtypes differ.

    Source: IEEE 754-2019, 5.3.1.

    >>> import numpy as np
    >>> rem(np.float16(5), np.float16(3))
    array(-1., dtype=float16)
    """
    return once("rem", "toward-zero", a, b)
