"""Kernels on single elements: powers, exponentials, activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mp_reference.nn.kernels._common import Array, narrow, sigmoid64, wide

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "exp",
    "gelu",
    "gelu_backward",
    "log",
    "power",
    "rsqrt",
    "sigmoid",
    "sigmoid_backward",
    "silu",
    "silu_backward",
    "softplus",
    "softplus_backward",
    "tanh",
    "tanh_backward",
]

_erf = np.frompyfunc(math.erf, 1, 1)
_TANH_INNER = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def exp(x: Array) -> Array:
    """e**x."""
    with np.errstate(all="ignore"):
        return narrow(np.exp(wide(x)), x)


def log(x: Array) -> Array:
    """Natural logarithm."""
    with np.errstate(all="ignore"):
        return narrow(np.log(wide(x)), x)


def rsqrt(x: Array) -> Array:
    """1 / sqrt(x)."""
    with np.errstate(all="ignore"):
        return narrow(1 / np.sqrt(wide(x)), x)


def power(x: Array, exponent: float) -> Array:
    """x**exponent for a number."""
    with np.errstate(all="ignore"):
        return narrow(np.power(wide(x), exponent), x)


def tanh(x: Array) -> Array:
    """Hyperbolic tangent."""
    return narrow(np.tanh(wide(x)), x)


def tanh_backward(gradient: Array, output: Array) -> Array:
    """Gradient * (1 - output**2)."""
    y = wide(output)
    return narrow(wide(gradient) * (1 - y * y), gradient)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e**-x)."""
    return narrow(sigmoid64(x), x)


def sigmoid_backward(gradient: Array, output: Array) -> Array:
    """Gradient * (1 - output) * output."""
    y = wide(output)
    return narrow(wide(gradient) * ((1 - y) * y), gradient)


def silu(x: Array) -> Array:
    """Product x * sigmoid(x)."""
    return narrow(wide(x) * sigmoid64(x), x)


def silu_backward(gradient: Array, x: Array) -> Array:
    """Gradient * s * (1 + x * (1 - s)), s = sigmoid(x)."""
    s = sigmoid64(x)
    return narrow(wide(gradient) * (s * (1 + wide(x) * (1 - s))), gradient)


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """log(1 + e**(beta x)) / beta; x itself where beta x > threshold."""
    z = wide(x) * beta
    with np.errstate(over="ignore"):
        return narrow(np.where(z > threshold, wide(x), np.log1p(np.exp(z)) / beta), x)


def softplus_backward(gradient: Array, x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """Gradient * sigmoid(beta x); gradient itself where beta x > threshold."""
    z = wide(x) * beta
    return narrow(np.where(z > threshold, wide(gradient), wide(gradient) * sigmoid64(z)), gradient)


def gelu(x: Array, approximate: str = "none") -> Array:
    """Product x * P(N(0, 1) <= x), by the error function ("none") or by a hyperbolic tangent ("tanh")."""
    z = wide(x)
    share = _tanh_of_cubic(z) if approximate == "tanh" else _erf64(z / math.sqrt(2))
    share += 1
    share *= z
    share *= 0.5
    return narrow(share, x)


def _tanh_of_cubic(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """tanh(sqrt(2 / pi) (z + 0.044715 z**3)), in one buffer."""
    inner = z * z
    inner *= _TANH_INNER * _TANH_CUBIC
    inner += _TANH_INNER
    inner *= z
    return np.tanh(inner, out=inner)


def gelu_backward(gradient: Array, x: Array, approximate: str = "none") -> Array:
    """The derivative of ``gelu`` at x, times gradient."""
    z = wide(x)
    if approximate == "tanh":
        t = _tanh_of_cubic(z)
        slope = z * z
        slope *= 3 * _TANH_INNER * _TANH_CUBIC
        slope += _TANH_INNER
        slope *= z
        slope *= 1 - t * t
        slope += 1 + t
        slope *= 0.5
    else:
        slope = 0.5 * (1 + _erf64(z / math.sqrt(2))) + z * (np.exp(-0.5 * (z * z)) / math.sqrt(2 * math.pi))
    return narrow(wide(gradient) * slope, gradient)


def _erf64(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(_erf(z), np.float64)
