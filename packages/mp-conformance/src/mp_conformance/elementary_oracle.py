"""Correctly rounded functions of every 16-bit number: float64 first, mpmath where that is too close to a midpoint."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import mpmath  # type: ignore[import-untyped]  # ships no annotations
import numpy as np

from mp_conformance.oracle import midpoints_of, round_between

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_reference.spec.formats import FloatFormat

__all__ = ["FUNCTIONS", "every_input", "expected", "resolved_by_mpmath"]

Array = np.ndarray[Any, np.dtype[Any]]

_CLOSE = 2.0**-44  # float64's functions are within a few units of 2**-52; anything nearer to a midpoint asks mpmath


def _sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _silu(x: Array) -> Array:
    return np.where(x == -np.inf, -0.0, x * _sigmoid(x))


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _erf(x: Array) -> Array:
    return np.array([math.erf(v) if not math.isnan(v) else v for v in x.tolist()])


def _gelu(x: Array) -> Array:
    half = np.array([math.erfc(-v / math.sqrt(2)) / 2 if not math.isnan(v) else v for v in x.tolist()])
    return np.where(x == -np.inf, -0.0, x * half)


FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Any], Any]]] = {
    "exp": (np.exp, mpmath.exp),
    "exp2": (np.exp2, lambda x: mpmath.power(2, x)),
    "expm1": (np.expm1, mpmath.expm1),
    "log": (np.log, mpmath.log),
    "log2": (np.log2, lambda x: mpmath.log(x, 2)),
    "log10": (np.log10, lambda x: mpmath.log(x, 10)),
    "log1p": (np.log1p, mpmath.log1p),
    "sin": (np.sin, mpmath.sin),
    "cos": (np.cos, mpmath.cos),
    "tanh": (np.tanh, mpmath.tanh),
    "erf": (_erf, mpmath.erf),
    "sigmoid": (_sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
    "silu": (_silu, lambda x: x / (1 + mpmath.exp(-x))),
    "gelu": (_gelu, lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2),
    "softplus": (_softplus, lambda x: mpmath.log1p(mpmath.exp(-abs(x))) + max(x, 0)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: 1 / mpmath.sqrt(x)),
}
"""Name -> the function in float64, and in mpmath."""


def every_input(fmt: FloatFormat) -> Array:
    """All 65,536 values of a 16-bit format, by code."""
    return np.arange(1 << fmt.bits).astype(np.uint16).view(fmt.dtype)


@cache
def _rounded(function: str, fmt: FloatFormat) -> tuple[Array, int]:
    with np.errstate(all="ignore"):
        x = every_input(fmt).astype(np.float64)
        y = np.asarray(FUNCTIONS[function][0](x), np.float64)
    _, edges = midpoints_of(fmt)
    with np.errstate(invalid="ignore"):  # infinite results are infinitely far from every midpoint
        place = np.clip(np.searchsorted(edges, np.abs(y)), 1, len(edges) - 1)
        near = np.minimum(np.abs(np.abs(y) - edges[place]), np.abs(np.abs(y) - edges[place - 1]))
        close = np.isfinite(y) & (near <= np.abs(y) * _CLOSE) & (y != 0)
    side = np.zeros(y.shape, np.int8)
    with mpmath.workprec(300):
        for index in np.flatnonzero(close):
            exact = abs(FUNCTIONS[function][1](mpmath.mpf(float(x[index]))))
            at = place[index] - int(
                abs(abs(y[index]) - edges[place[index] - 1]) < abs(abs(y[index]) - edges[place[index]])
            )
            side[index] = int(mpmath.sign(exact - mpmath.mpf(float(edges[at]))))
            y[index] = math.copysign(edges[at], y[index])
    return round_between(y, side, fmt), int(close.sum())


def expected(function: str, fmt: FloatFormat) -> Array:
    """The correctly rounded values of a function at every input of a 16-bit format.

    Args:
        function: a key of ``FUNCTIONS``.
        fmt: fp16 or bf16.

    Returns:
        65,536 values of ``fmt.dtype``, by code of the input.

    Source: IEEE 754-2019, 9.2; the limit where the argument is infinite.

    >>> from mp_reference.spec.formats import FP16
    >>> expected("exp", FP16)[0x3C00]
    np.float16(2.719)
    """
    return _rounded(function, fmt)[0]


def resolved_by_mpmath(function: str, fmt: FloatFormat) -> int:
    """How many inputs lay too close to a midpoint for float64, so that 300 bits decided.

    >>> from mp_reference.spec.formats import FP16
    >>> resolved_by_mpmath("exp", FP16) < 20
    True
    """
    return _rounded(function, fmt)[1]
