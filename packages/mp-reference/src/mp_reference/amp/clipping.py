"""Clipping of fp32 gradients, by norm and by value, with a norm that does not depend on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.spec.formats import FP32

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Clipped", "clip_by_norm", "clip_by_value", "clip_coefficient", "gradient_norm", "rounded_sqrt", "tree_sum"]

Float32Array = NDArray[np.float32]
_NORM_GUARD = np.float32(1e-6)  # keeps the quotient finite for a zero norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """Gradients after clipping by norm, and what it took.

    Args:
        gradients: fp32 arrays.
        norm: the norm before clipping; an fp32 value, or a float64 one above fp32's maximum.
        coefficient: what every gradient was multiplied by, an fp32 value in [0, 1]; 1.0 left them alone.
    """

    gradients: tuple[Float32Array, ...]
    norm: float
    coefficient: float


def tree_sum(values: NDArray[np.float64]) -> float:
    """Sum of float64 values over a balanced binary tree: the same bits on every device and for every vector width.

    Args:
        values: float64, any shape; flattened in C order, padded with +0.0 to a power of two; then the second half is
            added onto the first until one value is left. No values give 0.0.

    Returns:
        The sum.

    Source: pairwise summation, Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.1.

    >>> tree_sum(np.array([1.0, 2.0, 3.0]))
    6.0
    """
    flat = values.reshape(-1)
    if flat.size == 0:
        return 0.0
    padded = np.zeros(1 << (flat.size - 1).bit_length())
    padded[: flat.size] = flat
    while padded.size > 1:
        half = padded.size // 2
        padded = padded[:half] + padded[half:]
    return float(padded[0])


def rounded_sqrt(square: float) -> float:
    """The square root of a float64, correctly rounded to fp32; in float64 where it exceeds fp32.

    The float64 root rounded to fp32 is wrong only where the float64 root is a midpoint between two fp32 values and
    hides on which side of it the true root lies. A midpoint has 25 bits, so its square is exact in float64 and decides.

    Args:
        square: float64, >= 0, infinite or NaN.

    Returns:
        An fp32 value as a Python float; a float64 value, at least the next power of two after fp32's maximum less half
        an ulp, where fp32 would be infinite.

    Source: IEEE 754-2019, 5.4.1.

    >>> rounded_sqrt(2.0), rounded_sqrt(1e80)
    (1.4142135381698608, 1e+40)
    """
    root = math.sqrt(square)  # correctly rounded in float64
    with np.errstate(over="ignore"):
        nearest = np.float32(root)
    if not np.isfinite(nearest):
        return root
    direction = np.float32(math.inf) if root > float(nearest) else np.float32(-math.inf)
    with np.errstate(over="ignore"):  # above fp32's maximum there is only infinity, which no midpoint belongs to
        other = np.nextafter(nearest, direction)
    midpoint = (float(nearest) + float(other)) / 2
    if root == midpoint and square != midpoint * midpoint:
        return float(max(nearest, other) if square > midpoint * midpoint else min(nearest, other))
    return float(nearest)


def gradient_norm(gradients: Sequence[Float32Array], norm_type: float = 2.0) -> float:
    """The norm of all gradients together.

    Euclidean: squares in float64, which are exact; ``tree_sum`` of each tensor, then of the tensors' sums in order;
    one correctly rounded root. It overflows for no finite gradients. Infinity: the largest magnitude.

    Args:
        gradients: fp32 arrays of any shapes, in parameter order.
        norm_type: 2.0 or infinity.

    Returns:
        An fp32 value as a Python float, or a float64 one above fp32's maximum; infinite or NaN with the gradients.

    Raises:
        ValueError: another ``norm_type``.

    Source: the definition of the norms; ``rounded_sqrt``.

    >>> gradient_norm([np.float32([3.0]), np.float32([4.0])])
    5.0
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r} must be 2.0 or math.inf, whose roundings are stated; use 2.0")
    if norm_type == 2.0:
        sums = [tree_sum(np.square(gradient, dtype=np.float64)) for gradient in gradients]
        return rounded_sqrt(tree_sum(np.array(sums, np.float64)))
    peaks = [np.max(np.abs(gradient)) for gradient in gradients if gradient.size]
    return float(np.max(peaks)) if peaks else 0.0


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by so that their norm is at most ``max_norm``.

    Args:
        norm: as ``gradient_norm`` returns it, finite.
        max_norm: > 0; rounded to fp32.

    Returns:
        ``min(1, max_norm / (norm + 1e-6))``, the sum and the quotient each rounded to fp32; for a norm beyond fp32 the
        sum and the quotient are formed in float64 and the quotient is rounded once to fp32.

    Raises:
        ValueError: ``max_norm`` is not above 0.

    Source: Pascanu et al., On the Difficulty of Training Recurrent Neural Networks, arXiv 1211.5063 (2012).

    >>> clip_coefficient(5.0, 1.0), clip_coefficient(0.5, 1.0)
    (0.19999995827674866, 1.0)
    """
    bound = _positive_fp32("max_norm", max_norm)
    if norm > FP32.max:
        return float(np.float32(min(1.0, float(bound) / (norm + float(_NORM_GUARD)))))
    with np.errstate(over="ignore"):  # a quotient past fp32 is far above 1
        return float(min(np.float32(1), bound / (np.float32(norm) + _NORM_GUARD)))


def clip_by_norm(gradients: Sequence[Float32Array], max_norm: float, norm_type: float = 2.0) -> Clipped:
    """Scale all gradients together so that their norm is at most ``max_norm``.

    Args:
        gradients: fp32 arrays of any shapes, all finite.
        max_norm: > 0, may be infinite (then the norm is measured and nothing is clipped).
        norm_type: 2.0 or infinity.

    Returns:
        New gradients (the given ones where the coefficient is 1), the norm before, and the coefficient.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` outside its range.

    Source: as ``clip_coefficient``.

    >>> clip_by_norm([np.float32([3.0, 4.0])], max_norm=1.0).gradients
    (array([0.5999999 , 0.79999983], dtype=float32),)
    """
    _positive_fp32("max_norm", max_norm)
    norm = gradient_norm(gradients, norm_type)
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient < 1:
        gradients = [gradient * np.float32(coefficient) for gradient in gradients]
    return Clipped(gradients=tuple(gradients), norm=norm, coefficient=coefficient)


def clip_by_value(gradients: Sequence[Float32Array], clip_value: float) -> tuple[Float32Array, ...]:
    """Limit every element to ``[-clip_value, clip_value]``.

    Args:
        gradients: fp32 arrays of any shapes.
        clip_value: > 0; rounded to fp32.

    Returns:
        New gradients.

    Raises:
        ValueError: ``clip_value`` is not above 0.

    Source: the definition.

    >>> clip_by_value([np.float32([3.0, -0.5])], 1.0)
    (array([ 1. , -0.5], dtype=float32),)
    """
    bound = _positive_fp32("clip_value", clip_value)
    return tuple(np.clip(gradient, -bound, bound) for gradient in gradients)


def _positive_fp32(name: str, value: Any) -> np.float32:
    """The bound in fp32, where booleans, NaN, zero and less have no meaning."""
    with np.errstate(over="ignore"):
        bound = np.float32(math.nan if isinstance(value, bool) else value)
    if not bound > 0:
        raise ValueError(f"{name}={value!r} must be a number above 0; to clip nothing use {name}=None")
    return bound
