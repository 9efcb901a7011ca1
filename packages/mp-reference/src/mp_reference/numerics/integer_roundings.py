"""Rounding to an integer in each mode, in place, for the kernels that scale an ulp to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mp_reference.numerics.rounding_kernels import Workspace

__all__ = ["INTEGER_ROUNDINGS", "with_sign"]

_UNSIGNED: dict[str, Any] = {"float32": np.uint32, "float64": np.uint64}
_SUM_WIDTH = 27
"""Random bits that float64 adds to a float32 number without stepping over an integer: the sum is exact, or the number
below 2**-29, which no such bits lift to 1."""


def with_sign(magnitude: float, like: NDArray[Any], out: NDArray[Any]) -> None:
    """A constant with the signs of an array: two passes over patterns, a third of what ``copysign`` takes.

    Args:
        magnitude: not negative.
        like: float32 or float64.
        out: of the dtype and shape of ``like``; written.

    Source: IEEE 754-2019, 3.4 (the sign is the top bit).

    >>> out = np.empty(2)
    >>> with_sign(0.5, np.array([-3.0, 2.0]), out)
    >>> out
    array([-0.5,  0.5])
    """
    unsigned = _UNSIGNED[like.dtype.name]
    pattern = out.view(unsigned)
    np.bitwise_and(like.view(unsigned), unsigned(1 << (8 * like.dtype.itemsize - 1)), out=pattern)
    np.bitwise_or(pattern, like.dtype.type(magnitude).view(unsigned), out=pattern)


def _to_nearest_even(y: NDArray[Any], *_: Any) -> None:
    np.rint(y, out=y)


def _to_zero(y: NDArray[Any], *_: Any) -> None:
    np.trunc(y, out=y)


def _up(y: NDArray[Any], *_: Any) -> None:
    np.ceil(y, out=y)


def _down(y: NDArray[Any], *_: Any) -> None:
    np.floor(y, out=y)


def _to_nearest_away(y: NDArray[Any], work: Workspace, *_: Any) -> None:
    just_below_half = np.nextafter(y.dtype.type(0.5), y.dtype.type(0))  # 0.5 itself would lift 0.49999997 to 1
    with_sign(just_below_half, y, work.scale)
    np.add(y, work.scale, out=y)
    np.trunc(y, out=y)


def _to_odd(y: NDArray[Any], work: Workspace, *_: Any) -> None:
    even, spare, inexact = work.carried, work.scale, work.mask
    np.trunc(y, out=spare)
    np.not_equal(spare, y, out=inexact)
    if inexact.any():
        np.multiply(y, y.dtype.type(0.5), out=even)
        np.trunc(even, out=even)
        np.add(even, even, out=even)
        with_sign(1.0, y, spare)
        np.add(even, spare, out=even)
        np.copyto(y, even, where=inexact)


def _stochastic(y: NDArray[Any], work: Workspace, random: NDArray[Any], width: int) -> None:
    """Up in magnitude where the fraction f has ``f + (R + 1/2) / 2**width >= 1``."""
    if width < 8 * random.dtype.itemsize:
        random = random & random.dtype.type((1 << width) - 1)
    if y.dtype == np.float32 and width <= _SUM_WIDTH:
        total = work.wide
        np.multiply(random, 2.0**-width, out=total)
        np.add(total, 2.0 ** -(width + 1), out=total)
        np.copysign(total, y, out=total)
        np.add(total, y, out=total)
        np.trunc(total, out=y, casting="same_kind")
        return
    fraction, whole, ups = work.carried, work.scale, work.mask
    np.abs(y, out=fraction)
    np.trunc(fraction, out=whole)
    np.subtract(fraction, whole, out=fraction)
    if y.dtype == np.float64 and width < 53:  # f >= 1 - (R + 1/2) / 2**width: both sides are exact
        threshold = random.astype(y.dtype)
        np.multiply(threshold, -(2.0**-width), out=threshold)
        np.add(threshold, 1 - 2.0 ** -(width + 1), out=threshold)
        np.greater_equal(fraction, threshold, out=ups)
    else:
        np.copyto(ups, _carries(fraction, random, width))
    np.add(whole, ups, out=whole)
    np.copysign(whole, y, out=y)


def _carries(fraction: NDArray[Any], random: NDArray[Any], width: int) -> NDArray[np.bool_]:
    """Whether ``fraction * 2**width + R + 1/2`` reaches ``2**width``, for widths that no float holds beside the 1/2."""
    shifted = np.ldexp(fraction.astype(np.float64), width)
    whole = np.trunc(shifted)
    whole += shifted - whole >= 0.5
    ups = whole.astype(np.uint64)  # so many of the 2**width values of R carry
    first = np.uint64((1 << width) % (1 << 64)) - ups
    carries: NDArray[np.bool_] = (random.astype(np.uint64) >= first) & (ups != 0)
    return carries


INTEGER_ROUNDINGS: dict[str, Any] = {
    "nearest-even": _to_nearest_even,
    "nearest-away": _to_nearest_away,
    "toward-zero": _to_zero,
    "toward-positive": _up,
    "toward-negative": _down,
    "to-odd": _to_odd,
    "stochastic": _stochastic,
}
"""Each rounding as a function of ``(y, work, random, width)`` that writes into ``y``."""
