"""Rounding of float32 patterns as integers: what to add so that a carry leaves the dropped bits where it must go up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Pattern = NDArray[np.uint32]
    Carry: TypeAlias = Callable[[Pattern, Pattern, NDArray[Any] | None, int], None]

__all__ = ["carry_out"]


def carry_out(rounding: str, dropped: int) -> Carry | None:
    """The function that adds to a pattern what its rounding needs, the dropped bits still to be cleared.

    Args:
        rounding: one of ``rounding.ROUNDINGS``.
        dropped: how many low bits of the pattern go, fewer than 24.

    Returns:
        A callable ``(pattern, total, random, width)`` that writes ``total``; nothing where nothing is to be added.

    Source: IEEE 754-2019, 3.4: patterns of one sign are in the order of their magnitudes.

    >>> total = np.empty(2, np.uint32)
    >>> carry_out("nearest-even", 8)(np.uint32([0x180, 0x280]), total, None, 0)
    >>> [hex(pattern >> 8) for pattern in total.tolist()]
    ['0x2', '0x2']
    """
    if rounding == "toward-zero" or dropped == 0:
        return None
    return partial(_CARRIES[rounding], np.uint32((1 << dropped) - 1), np.uint32(dropped))


def _nearest_even(low: Any, dropped: Any, pattern: Pattern, total: Pattern, *_: Any) -> None:
    np.right_shift(pattern, dropped, out=total)
    np.bitwise_and(total, np.uint32(1), out=total)
    np.add(total, low >> np.uint32(1), out=total)
    np.add(total, pattern, out=total)


def _nearest_away(low: Any, _: Any, pattern: Pattern, total: Pattern, *__: Any) -> None:
    np.add(pattern, (low >> np.uint32(1)) + np.uint32(1), out=total)


def _up(low: Any, _: Any, pattern: Pattern, total: Pattern, *__: Any) -> None:
    np.right_shift(pattern.view(np.int32), np.int32(31), out=total.view(np.int32))  # all ones if negative
    np.invert(total, out=total)
    np.bitwise_and(total, low, out=total)
    np.add(total, pattern, out=total)


def _down(low: Any, _: Any, pattern: Pattern, total: Pattern, *__: Any) -> None:
    np.right_shift(pattern.view(np.int32), np.int32(31), out=total.view(np.int32))
    np.bitwise_and(total, low, out=total)
    np.add(total, pattern, out=total)


def _to_odd(low: Any, _: Any, pattern: Pattern, total: Pattern, *__: Any) -> None:
    np.bitwise_and(pattern, low, out=total)
    np.add(total, low, out=total)  # carries where anything was dropped
    np.bitwise_or(total, pattern, out=total)


def _stochastic(_: Any, dropped: Any, pattern: Pattern, total: Pattern, random: NDArray[Any], width: int) -> None:
    """``width`` random bits, put just below the last kept one; half of their last unit added if some places stay."""
    kind, places = random.dtype.type, int(dropped)
    if width < 8 * random.dtype.itemsize:
        random = random & kind((1 << width) - 1)
    if width > places:
        random = random >> kind(width - places)
    np.copyto(total, random, casting="same_kind")
    if width < places:
        np.left_shift(total, np.uint32(places - width), out=total)
        np.bitwise_or(total, np.uint32(1 << (places - width - 1)), out=total)
    np.add(total, pattern, out=total)


_CARRIES: dict[str, Any] = {
    "nearest-even": _nearest_even,
    "nearest-away": _nearest_away,
    "toward-positive": _up,
    "toward-negative": _down,
    "to-odd": _to_odd,
    "stochastic": _stochastic,
}
