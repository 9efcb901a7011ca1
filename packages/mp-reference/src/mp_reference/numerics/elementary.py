"""Elementary functions of 16-bit and narrower formats, correctly rounded for every input.

A function of one 16-bit number has 65,536 values, so it is a table: float64 by the machine's mathematical library, then
one rounding. That is enough because no value of these functions lies closer to a midpoint of fp16 or bf16 than
``2**-40`` of itself unless it is one; the tests show it for every input, with 200 and more bits. Values that are
midpoints (``exp2(-25)`` in fp16) are recognised by rounding to 40 bits first.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import codes_of, from_codes
from mp_reference.numerics.codec import code_dtype, decode, encode, refuse_nan
from mp_reference.numerics.elementwise import operands_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from mp_reference.spec.formats import FloatFormat

__all__ = [
    "FUNCTIONS", "cos", "erf", "exp", "exp2", "expm1", "gelu", "gelu_tanh", "log", "log1p", "log2", "sigmoid", "silu",
    "sin", "softplus", "tanh",
]  # fmt: skip


def _sigmoid(x: float) -> float:
    if x < 0:
        grown = math.exp(x)
        return grown / (1 + grown)
    return 1 / (1 + math.exp(-x))


def _half_above(x: float) -> float:
    """``x / 2`` and a trace more in the direction of +inf: what silu and gelu are next to zero, to odd."""
    return 0.5 * x * (1 + math.copysign(2.0**-38, x))


def _silu(x: float) -> float:
    return _half_above(x) if abs(x) < 2.0**-30 else x * _sigmoid(x)


def _gelu(x: float) -> float:
    if abs(x) < 2.0**-30:
        return _half_above(x)
    return 0.5 * x * math.erfc(-x * math.sqrt(0.5))


def _gelu_tanh(x: float) -> float:
    if abs(x) < 2.0**-30:
        return _half_above(x)
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


_NAN = math.nan
FUNCTIONS: dict[str, tuple[Callable[[float], float], float, float]] = {
    # the function of finite numbers, its values at -inf and +inf
    "exp": (math.exp, 0.0, math.inf),
    "exp2": (math.exp2, 0.0, math.inf),
    "expm1": (math.expm1, -1.0, math.inf),
    "log": (math.log, _NAN, math.inf),
    "log2": (math.log2, _NAN, math.inf),
    "log1p": (math.log1p, _NAN, math.inf),
    "sin": (math.sin, _NAN, _NAN),
    "cos": (math.cos, _NAN, _NAN),
    "tanh": (math.tanh, -1.0, 1.0),
    "erf": (math.erf, -1.0, 1.0),
    "sigmoid": (_sigmoid, 0.0, 1.0),
    "silu": (_silu, -0.0, math.inf),
    "gelu": (_gelu, -0.0, math.inf),
    "gelu_tanh": (_gelu_tanh, -0.0, math.inf),
    "softplus": (_softplus, 0.0, math.inf),
}
"""Each function on Python floats, and its limits."""

_POLES = {"log": 0.0, "log2": 0.0, "log1p": -1.0}


def _value(name: str, x: float) -> float:
    """One value in float64, limits, poles and overflow included."""
    function, at_minus_inf, at_inf = FUNCTIONS[name]
    if math.isnan(x):
        return x
    if math.isinf(x):
        return at_inf if x > 0 else at_minus_inf
    if name in _POLES and x <= _POLES[name]:
        return -math.inf if x == _POLES[name] else math.nan
    try:
        return function(x)
    except OverflowError:  # exp, exp2 and expm1 past float64
        return math.inf


@lru_cache(maxsize=128)
def _tables(name: str, fmt: FloatFormat) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The result's code for every code, and its value in float64."""
    inputs = decode(np.arange(1 << fmt.bits, dtype=np.uint32).astype(code_dtype(fmt)), fmt)
    wide = np.array([_value(name, x) for x in inputs.tolist()])
    pattern = wide.view(np.int64)
    forty = ((pattern + (1 << 12)) & ~np.int64((1 << 13) - 1)).view(np.float64)
    known = np.where(np.isfinite(wide), forty, wide)
    table = encode(known if fmt.has_nan else np.nan_to_num(known, posinf=np.inf, neginf=-np.inf), fmt)
    table.flags.writeable = wide.flags.writeable = False
    return table, wide


def _apply(name: str, x: ArrayLike) -> NDArray[Any]:
    fmt, (values,) = operands_of(name, x)
    if fmt.bits > 16:
        raise TypeError(
            f"{name} is correctly rounded for formats of at most 16 bits, got {values.dtype}; cast with mp.cast(x, "
            "mp.BF16) or use numpy, knowing that its last bit is not guaranteed"
        )
    table, wide = _tables(name, fmt)
    codes = codes_of(values)
    if not fmt.has_nan:
        refuse_nan(np.take(wide, codes, mode="clip"), fmt)
    return from_codes(np.take(table, codes, mode="clip"), values.dtype)


def exp(x: ArrayLike) -> NDArray[Any]:
    """``e**x``.

    Args:
        x: array of float16, bfloat16 or a narrower ml_dtypes dtype, any shape.

    Returns:
        The same dtype and shape, correctly rounded, ties to even.

    Raises:
        TypeError: float32 or a dtype that stores no named format.
        ValueError: a NaN in a format that has none.

    Source: IEEE 754-2019, 9.2; see ``FUNCTIONS`` for the limits.

    >>> exp(np.float16([0.0, 1.0, -np.inf])).tolist()
    [1.0, 2.71875, 0.0]
    """
    return _apply("exp", x)


def exp2(x: ArrayLike) -> NDArray[Any]:
    """``2**x``.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> exp2(np.float16([-24.0, -25.0])).tolist()
    [5.960464477539063e-08, 0.0]
    """
    return _apply("exp2", x)


def expm1(x: ArrayLike) -> NDArray[Any]:
    """``e**x - 1``; the sign of a zero is kept.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> expm1(np.float16([-0.0, -np.inf])).tolist()
    [-0.0, -1.0]
    """
    return _apply("expm1", x)


def log(x: ArrayLike) -> NDArray[Any]:
    """The natural logarithm; of zero -inf, of negative numbers NaN.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> log(np.float16([1.0, 2.0, 0.0])).tolist()
    [0.0, 0.693359375, -inf]
    """
    return _apply("log", x)


def log2(x: ArrayLike) -> NDArray[Any]:
    """The logarithm to base 2; of zero -inf, of negative numbers NaN.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> log2(np.float16([8.0, 2.0**-24])).tolist()
    [3.0, -24.0]
    """
    return _apply("log2", x)


def log1p(x: ArrayLike) -> NDArray[Any]:
    """``log(1 + x)``; the sign of a zero is kept; of -1 -inf, below NaN.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> log1p(np.float16([-0.0, -1.0, 1.0])).tolist()
    [-0.0, -inf, 0.693359375]
    """
    return _apply("log1p", x)


def sin(x: ArrayLike) -> NDArray[Any]:
    """The sine of radians; of infinity NaN.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``; large arguments are reduced exactly.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> sin(np.float16([-0.0, 65504.0])).tolist()
    [-0.0, 0.9755859375]
    """
    return _apply("sin", x)


def cos(x: ArrayLike) -> NDArray[Any]:
    """The cosine of radians; of infinity NaN.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``; large arguments are reduced exactly.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> cos(np.float16([0.0, np.inf])).tolist()
    [1.0, nan]
    """
    return _apply("cos", x)


def tanh(x: ArrayLike) -> NDArray[Any]:
    """The hyperbolic tangent; the sign of a zero is kept.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: IEEE 754-2019, 9.2.

    >>> tanh(np.float16([-0.0, 1.0, -np.inf])).tolist()
    [-0.0, 0.76171875, -1.0]
    """
    return _apply("tanh", x)


def erf(x: ArrayLike) -> NDArray[Any]:
    """The error function; the sign of a zero is kept.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: C23, 7.12.8.1 (erf).

    >>> erf(np.float16([-0.0, 1.0, np.inf])).tolist()
    [-0.0, 0.8427734375, 1.0]
    """
    return _apply("erf", x)


def sigmoid(x: ArrayLike) -> NDArray[Any]:
    """``1 / (1 + exp(-x))``.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: the formula, rounded once.

    >>> sigmoid(np.float16([0.0, -np.inf])).tolist()
    [0.5, 0.0]
    """
    return _apply("sigmoid", x)


def silu(x: ArrayLike) -> NDArray[Any]:
    """``x * sigmoid(x)``; of -inf -0, the limit.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: Elfwing et al., arXiv 1702.03118 (2017), rounded once.

    >>> silu(np.float16([1.0, -np.inf])).tolist()
    [0.73095703125, -0.0]
    """
    return _apply("silu", x)


def gelu(x: ArrayLike) -> NDArray[Any]:
    """``x * (1 + erf(x / sqrt(2))) / 2``; of -inf -0, the limit.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: Hendrycks and Gimpel, arXiv 1606.08415 (2016), rounded once.

    >>> gelu(np.float16([1.0, -np.inf])).tolist()
    [0.84130859375, -0.0]
    """
    return _apply("gelu", x)


def gelu_tanh(x: ArrayLike) -> NDArray[Any]:
    """``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``, the usual approximation of ``gelu``.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``; of -inf -0, the limit.

    Raises:
        TypeError: as ``exp``.

    Source: Hendrycks and Gimpel, arXiv 1606.08415 (2016), rounded once.

    >>> gelu_tanh(np.float16([1.0, -np.inf])).tolist()
    [0.84130859375, -0.0]
    """
    return _apply("gelu_tanh", x)


def softplus(x: ArrayLike) -> NDArray[Any]:
    """``log(1 + exp(x))``.

    Args:
        x: as ``exp``.

    Returns:
        As ``exp``.

    Raises:
        TypeError: as ``exp``.

    Source: the formula, rounded once.

    >>> softplus(np.float16([0.0, 100.0, -np.inf])).tolist()
    [0.693359375, 100.0, 0.0]
    """
    return _apply("softplus", x)
