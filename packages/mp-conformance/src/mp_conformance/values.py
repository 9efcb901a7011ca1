"""Values drawn where behaviour changes: ties and their neighbours, subnormals, overflow, zeros, NaN, infinities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from mp_reference.spec.formats import FloatFormat

__all__ = ["LANDMARKS", "codes", "floats_near", "integers_near", "landmarks", "operands"]

Array = np.ndarray[Any, np.dtype[Any]]

LANDMARKS = (
    "tie", "beside a tie", "representable", "subnormal", "below the subnormals", "subnormal edge", "overflow edge",
    "beyond overflow", "positive zero", "negative zero", "nan", "infinity",
)  # fmt: skip
"""The places a draw must reach; the meta-tests count them."""

_SPECIALS = (0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _words(size: int) -> st.SearchStrategy[Array]:
    """``size`` uniform 32-bit words in one draw; they shrink towards zero, which every decoder reads as the value 0."""
    return st.binary(min_size=4 * size, max_size=4 * size).map(lambda data: np.frombuffer(data, "<u4").astype(np.int64))


def _split(words: Array, *widths: int) -> list[Array]:
    """Bit fields of every word, from the lowest bit up."""
    fields, shift = [], 0
    for width in widths:
        fields.append(words >> shift & ((1 << width) - 1))
        shift += width
    return fields


def floats_near(fmt: FloatFormat, carrier: type[Any], size: int = 16) -> st.SearchStrategy[Array]:
    """Arrays of ``carrier`` values around the places where rounding to ``fmt`` changes its mind.

    Args:
        fmt: the target format.
        carrier: ``np.float32`` or ``np.float64``, the dtype of the drawn values.
        size: elements of each array.

    Returns:
        A strategy of 1-D arrays: two bits beyond the format's fraction in every binade from below the subnormals to
        past overflow, moved by -1, 0 or 1 ulp of the carrier, either sign, and now and then zero, infinity or NaN.

    Source: this project; random 32-bit patterns almost never meet a tie.
    """
    low, high = fmt.min_exponent - fmt.mantissa_bits - 2, fmt.max_exponent + 1
    edges = (low, low + 1, low + 2, fmt.min_exponent - 1, fmt.min_exponent, fmt.max_exponent, fmt.max_exponent, high)
    steps = 1 << (fmt.mantissa_bits + 2)
    nasty = np.array([0, 1, 2, steps // 2, steps - 4, steps - 3, steps - 2, steps - 1])

    def build(words: Array) -> Array:
        kind, sign, nudge, place, where, coarse, which = _split(words, 3, 1, 2, 1, 9, 1, 3)
        exponent = np.where(place == 0, np.array(edges)[where % 8], low + where % (high - low + 1))
        fraction = np.where(coarse == 0, nasty[which], (words >> 7) * 2654435761 % steps)
        below = np.clip(fmt.min_exponent - exponent, 0, fmt.mantissa_bits + 2)
        # among the subnormals the format's own grid is coarser: two times in three, stay on its halves
        fraction = np.where(fraction % 3 > 0, fraction >> below << below, fraction)
        with np.errstate(over="ignore", under="ignore"):
            value = np.ldexp(1 + fraction / steps, exponent).astype(carrier)
            beside = np.nextafter(value, np.where(nudge == 2, carrier(0), carrier(np.inf)))
        value = np.where(nudge % 3 > 0, beside, value)
        value = np.where(sign == 1, -value, value)
        return np.where(kind == 0, np.array(_SPECIALS, carrier)[which], value)

    return _words(size).map(build)


def landmarks(x: Array, fmt: FloatFormat) -> set[str]:
    """Which of ``LANDMARKS`` an array visits.

    Args:
        x: float32 or float64, any shape.
        fmt: the target format.

    Returns:
        The names of the places reached.

    Source: this project.

    >>> from mp_reference.spec.formats import FP16
    >>> sorted(landmarks(np.float32([65520.0, -0.0]), FP16))
    ['negative zero', 'overflow edge', 'tie']
    """
    found: set[str] = set()
    with np.errstate(over="ignore"):
        for value in x.reshape(-1):
            found |= _landmarks_of(value, fmt)
    return found


def _landmarks_of(value: Any, fmt: FloatFormat) -> set[str]:
    if np.isnan(value):
        return {"nan"}
    if np.isinf(value):
        return {"infinity"}
    if value == 0:
        return {"negative zero" if np.signbit(value) else "positive zero"}
    size = abs(float(value))
    neighbours = [float(np.nextafter(value, type(value)(toward))) for toward in (-math.inf, math.inf)]
    return _grid_place(size, neighbours, fmt) | _range_place(size, fmt)


def _grid_place(size: float, neighbours: list[float], fmt: FloatFormat) -> set[str]:
    """On a number of the format, on a tie between two, or beside a tie."""
    grid = math.ldexp(1.0, max(math.frexp(size)[1] - 1, fmt.min_exponent) - fmt.mantissa_bits)
    if (size / grid) % 1 == 0.5:
        return {"tie"}
    if any((abs(n) / grid) % 1 == 0.5 for n in neighbours):
        return {"beside a tie"}
    return {"representable"} if (size / grid) % 1 == 0 else set()


def _range_place(size: float, fmt: FloatFormat) -> set[str]:
    """Among or below the subnormals, or at or past the largest number."""
    found: set[str] = set()
    if size < fmt.min_normal:
        found.add("below the subnormals" if size < fmt.min_subnormal else "subnormal")
    if abs(size - fmt.min_normal) <= 2 * fmt.min_subnormal:
        found.add("subnormal edge")
    half_ulp = math.ldexp(1.0, fmt.max_exponent - fmt.mantissa_bits - 1)
    if size >= fmt.max:
        found.add("overflow edge" if size <= fmt.max + 2 * half_ulp else "beyond overflow")
    return found - ({"beyond overflow"} if size == fmt.max else set())


def integers_near(fmt: FloatFormat, size: int = 16) -> st.SearchStrategy[Array]:
    """int64 arrays around the ties of ``fmt`` among the integers, where a detour through float32 rounds twice.

    Args:
        fmt: the target format.
        size: elements of each array.

    Returns:
        A strategy of 1-D int64 arrays: ties of the format far up, plus or minus one, and small numbers.

    Source: the fault is real: 16973823 goes to bf16 as 16908288, through float32 as 17039360.
    """
    top = max(0, min(62, fmt.max_exponent + 1) - fmt.mantissa_bits - 2)
    least = 1 << (fmt.mantissa_bits + 1)

    def build(words: Array) -> Array:
        kind, sign, move, shift = _split(words, 2, 1, 2, 6)
        significand = least + (words >> 5) * 2654435761 % least
        near = (significand | (move & 1)) << (shift % (top + 1))
        near = near + np.array([0, 0, 1, -1])[move ^ (kind & 2)]
        value = np.where(kind == 0, words >> 3 & 255, near)
        return np.where(sign == 1, -value, value)

    return _words(size).map(build)


def codes(fmt: FloatFormat, size: int = 16) -> st.SearchStrategy[Array]:
    """Arrays in ``fmt.dtype`` drawn by code, the extreme codes of every exponent more often than chance.

    Args:
        fmt: a format that has a NumPy dtype of its own.
        size: elements of each array.

    Returns:
        A strategy of 1-D arrays of ``fmt.dtype``.

    Source: this project.
    """
    return _words(size).map(lambda words: _coded(words, fmt).astype(_UNSIGNED[fmt.dtype.itemsize]).view(fmt.dtype))


def _coded(words: Array, fmt: FloatFormat) -> Array:
    width = fmt.bits - int(fmt.signed)
    top, field = (1 << width) - 1, 1 << fmt.mantissa_bits
    special = (0, 1, field - 1, field, field + 1, top, top - 1, max(0, top - field), max(0, top - field + 1), top // 2)
    kind, sign, which = _split(words, 2, 1, 8)
    anywhere = (words >> 3) * 2654435761 & top
    magnitude = np.where(kind < 2, np.array(special)[which % len(special)], anywhere)
    return np.asarray(magnitude | (sign * int(fmt.signed) << width))


def _halfway(a: Array, b: Array, c: Array, word: Array, fmt: FloatFormat) -> tuple[Array, Array, Array]:
    """Codes whose product has one bit more than ``fmt`` holds, or fits, and a third far below its last bit."""
    field, width = fmt.mantissa_bits, fmt.bits - int(fmt.signed)

    def shortened(x: Array, kept: int) -> Array:
        """The significand cut to ``kept`` bits, the hidden one included, of which the last is set."""
        spare = field + 1 - kept
        return (x >> spare | 1) << spare

    left = (field + 2) // 2
    a, b = shortened(a, left), shortened(b, field + 2 - left)
    top = (1 << fmt.exponent_bits) - 1
    product = (a >> field & top) + (b >> field & top) - fmt.bias
    exponent = np.clip(product - (field + 3) - (word & 31), 0, top)
    return a, b, (c >> width << width) | exponent << field | (c & ((1 << field) - 1))


def operands(fmt: FloatFormat, arity: int = 2, size: int = 16) -> st.SearchStrategy[tuple[Array, ...]]:
    """``arity`` arrays whose exponents lie close enough that their sums cancel, tie and carry.

    Args:
        fmt: a format that has a NumPy dtype of its own.
        arity: how many operands.
        size: elements of each.

    Returns:
        A strategy of tuples of arrays of ``fmt.dtype``; half of the elements are any code, the others lie within three
        binades of the first operand. Of three operands, a quarter are such that the product of the first two lies
        halfway between two numbers of ``fmt`` and the third is a trifle, which a second rounding would lose.

    Source: this project.
    """
    width = fmt.bits - int(fmt.signed)

    def build(words: Array) -> tuple[Array, ...]:
        rows = words.reshape(arity, size)
        first = _coded(rows[0], fmt)
        out = [first]
        for row in rows[1:]:
            other = _coded(row, fmt)
            move, take = row >> 24 & 7, row >> 27 & 1
            near = (first & ((1 << width) - 1)) >> fmt.mantissa_bits << fmt.mantissa_bits
            near = near + (move - 3 << fmt.mantissa_bits) + (other & ((1 << fmt.mantissa_bits) - 1))
            near = np.clip(near, 0, (1 << width) - 1) | (other >> width << width)
            out.append(np.where(take == 1, near, other))
        if arity == 3:
            halfway = rows[1] >> 28 & 3 == 0
            out = [
                np.where(halfway, new, old)
                for new, old in zip(_halfway(out[0], out[1], out[2], rows[2], fmt), out, strict=True)
            ]
        return tuple(x.astype(_UNSIGNED[fmt.dtype.itemsize]).view(fmt.dtype) for x in out)

    return _words(arity * size).map(build)
