"""Exact sums of products, many at once: integers in slices, never a Fraction an element.

Every factor is cut into slices of ``w`` bits on one fixed grid. Products of two slices are integers below
``2**(2 w)``, so a float64 matrix product of slices is exact in any order; its digits are collected by place, carried
in int64, and read off from the top with the rest as a sticky bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Digits", "digits_of_products", "exact_products", "special_products"]

_WIDEST = 20  # three digits of 20 bits fit int64 and leave more than 40 bits before the sticky one
_DOUBLE_BITS = 53


class Digits:
    """Exact totals in base ``2**width``: ``sign * sum(digit[j] * 2**(low + j * width))``, digits not negative."""

    def __init__(self, places: dict[int, NDArray[np.int64]], width: int, low: int, shape: tuple[int, ...]) -> None:
        self.width, self.low = width, low
        top = max(places, default=0)
        lines = [places.get(place, np.zeros(shape, np.int64)) for place in range(top + 1)]
        digits, carry = self._carried(lines)
        self.negative = carry < 0
        if self.negative.any():
            sign = np.where(self.negative, -1, 1)
            digits, carry = self._carried([line * sign for line in lines])
        while carry.any():
            digits.append(carry & (2**width - 1))
            carry = carry >> width
        self.digits = digits

    def _carried(self, lines: list[NDArray[np.int64]]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Digits from 0 to ``2**width - 1`` and the carry out of the last."""
        carry, digits = np.zeros_like(lines[0]), []
        for line in lines:
            total = line + carry
            digits.append(total & (2**self.width - 1))
            carry = total >> self.width
        return digits, carry

    def to_odd(self) -> NDArray[np.float64]:
        """The totals in float64, to odd: what any rounding to 24 bits or fewer that follows sees as exact."""
        lead, sticky = np.zeros_like(self.digits[0]), np.zeros(self.digits[0].shape, np.bool_)
        place = np.zeros_like(lead)
        for j in range(len(self.digits) - 1, -1, -1):
            take = lead < 2 ** (2 * self.width)
            sticky |= ~take & (self.digits[j] != 0)
            place[take] = j
            lead = np.where(take, (lead << self.width) | self.digits[j], lead)
        lead |= sticky
        extra = max(3 * self.width - _DOUBLE_BITS, 0)
        long = lead >= 2**_DOUBLE_BITS
        cut = (lead >> extra) | ((lead & (2**extra - 1)) != 0)
        lead = np.where(long, cut, lead)
        exponent = self.low + place * self.width + np.where(long, extra, 0)
        value = np.ldexp(lead.astype(np.float64), exponent)
        return np.where(self.negative & (lead != 0), -value, value)

    def to_integers(self) -> list[int]:
        """The totals as Python integers in units of ``2**low``, flattened."""
        flat = [digit.reshape(-1).tolist() for digit in self.digits]
        signs = np.where(self.negative, -1, 1).reshape(-1).tolist()
        return [
            sign * sum(digit[i] << (j * self.width) for j, digit in enumerate(flat)) for i, sign in enumerate(signs)
        ]


def digits_of_products(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None) -> Digits:
    """Sum exactly: ``a @ b + c``.

    Args:
        a: finite float64 of at most 24 significant bits, (..., m, k).
        b: likewise, (..., k, n).
        c: likewise, (..., m, n), or nothing.

    Returns:
        The totals, shape (..., m, n).

    Source: Ozaki, Ogita, Oishi, Rump, Error-free transformations of matrix multiplication, Numer. Algorithms 59 (2012).

    >>> digits_of_products(np.array([[2.0**99, 1]]), np.array([[1.0], [3]]), np.array([[-(2.0**99)]])).to_odd()
    array([[3.]])
    """
    length = max(a.shape[-1], 1)
    width = min(_WIDEST, (_DOUBLE_BITS - length.bit_length()) // 2)
    first, low_a = _slices(a, width)
    second, low_b = _slices(b, width)
    places: dict[int, NDArray[np.int64]] = {}
    for i, left in first.items():
        for j, right in second.items():
            _add_at(places, i + j, np.matmul(left, right))
    low = low_a + low_b
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if c is not None:
        addend, low_c = _slices(c, width, grid=low)
        shift = min((low_c - low) // width, 0)
        if shift < 0:
            places, low = {place - shift: digit for place, digit in places.items()}, low_c
        for j, part in addend.items():
            _add_at(places, j + (low_c - low) // width, np.broadcast_to(part, shape))
    return Digits(places, width, low, shape)


def exact_products(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None) -> NDArray[np.float64]:
    """``a @ b + c`` exactly, then to odd; infinities, NaN and the sign of zeros as IEEE arithmetic has them.

    An exact zero is +0, but for a sum of nothing but negative zeros, ``c`` among them.

    Args:
        a: at most 24 significant bits, (..., m, k).
        b: likewise, (..., k, n).
        c: likewise, (..., m, n), or nothing.

    Returns:
        float64 rounded to odd, (..., m, n).

    Source: IEEE 754-2019, 9.4 (dot).

    >>> exact_products(np.array([[1.0, np.inf]]), np.array([[2.0], [3.0]]), None)
    array([[inf]])
    """
    wide_a, wide_b, wide_c = a.astype(np.float64), b.astype(np.float64), None if c is None else c.astype(np.float64)
    special = special_products(wide_a, wide_b, wide_c)
    if special is None:
        exact = digits_of_products(wide_a, wide_b, wide_c).to_odd()
    else:
        addend = None if wide_c is None else _finite(wide_c)
        exact = digits_of_products(_finite(wide_a), _finite(wide_b), addend).to_odd()
        exact = np.where(special == 0, exact, special)
    if wide_c is not None and np.signbit(wide_c[wide_c == 0]).any():
        exact = np.where((exact == 0) & (wide_c == 0) & np.signbit(wide_c) & _all_negative(a, b), -0.0, exact)
    return exact


def _all_negative(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Where the factors of every product have different signs."""
    minus_a, minus_b = np.signbit(a), np.signbit(b)
    return ~(_any(minus_a, minus_b) | _any(~minus_a, ~minus_b))


def _finite(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(x), x, 0.0)


def _add_at(places: dict[int, NDArray[np.int64]], place: int, part: NDArray[np.float64]) -> None:
    whole = part.astype(np.int64)
    places[place] = places[place] + whole if place in places else whole


def _slices(x: NDArray[Any], width: int, grid: int = 0) -> tuple[dict[int, NDArray[np.float64]], int]:
    """Integer slices: ``x = sum(slice[j] * 2**(low + j * width))``, each below ``2**width`` in magnitude.

    Returns:
        The slices that are not all zero, and ``low``, which is congruent to ``grid`` modulo ``width``.
    """
    rest = np.array(x, np.float64)
    magnitude = np.abs(rest)
    if not magnitude.any():
        return {}, grid
    smallest = np.min(magnitude, where=magnitude > 0, initial=np.inf)
    low = int(np.frexp(smallest)[1]) - 24  # at most 24 significant bits
    low -= (low - grid) % width
    found = {}
    largest = int(np.frexp(magnitude.max())[1])
    for j in range((largest - low) // width, -1, -1):
        unit = 2.0 ** (low + j * width)
        part = np.trunc(rest / unit)
        if part.any():
            found[j] = part
            rest -= part * unit
    return found, low


def special_products(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None) -> NDArray[np.float64] | None:
    """What IEEE arithmetic makes of infinities and NaNs in ``a @ b + c``, where any take part.

    Args:
        a: float64, (..., m, k).
        b: float64, (..., k, n).
        c: float64, (..., m, n), or nothing.

    Returns:
        Infinity or NaN where the sum is not finite, 0 elsewhere, shape (..., m, n); nothing if all inputs are finite.

    Source: IEEE 754-2019, 7.2 (invalid operation).

    >>> special_products(np.array([[np.inf, 1.0]]), np.array([[1.0, 0.0], [1.0, 1.0]]), None)
    array([[inf, nan]])
    """
    if np.isfinite(a).all() and np.isfinite(b).all() and (c is None or np.isfinite(c).all()):
        return None
    a_signs, b_signs = (np.nan_to_num(np.sign(x), nan=0.0) for x in (a, b))
    a_inf, b_inf = (np.where(np.isinf(x), signs, 0.0) for x, signs in ((a, a_signs), (b, b_signs)))
    with np.errstate(invalid="ignore"):
        up = _any(a_inf > 0, b_signs > 0) | _any(a_inf < 0, b_signs < 0)
        up |= _any(a_signs > 0, b_inf > 0) | _any(a_signs < 0, b_inf < 0)
        down = _any(a_inf > 0, b_signs < 0) | _any(a_inf < 0, b_signs > 0)
        down |= _any(a_signs > 0, b_inf < 0) | _any(a_signs < 0, b_inf > 0)
        invalid = _any(a_inf != 0, b == 0) | _any(a == 0, b_inf != 0)
        invalid |= np.isnan(a).any(-1)[..., :, None] | np.isnan(b).any(-2)[..., None, :]
        if c is not None:
            up, down, invalid = up | (c == np.inf), down | (c == -np.inf), invalid | np.isnan(c)
    value = np.where(up, np.inf, np.where(down, -np.inf, 0.0))
    return np.where(invalid | (up & down), np.nan, value)


def _any(left: NDArray[np.bool_], right: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether some k has both: a matrix product of truth values."""
    return np.asarray(np.matmul(left.astype(np.float32), right.astype(np.float32)) > 0)
