"""Software accumulators on one tile of a product: which term is added when, and what is rounded on the way.

A tile's factors have K in front, ``a[k]`` and ``b[k]`` broadcasting to the tile. Everything is one ufunc a step over
the whole tile, in float32 where that is provably exact before the rounding and in float64 elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.numerics.odd import ODD
from mp_reference.numerics.rounding_kernels import NearestKernel, Workspace, kernel_for
from mp_reference.spec.accumulators import Accumulator, Kahan, Lanes, Pairwise, Sequential
from mp_reference.spec.formats import BF16, FP16, FP32, FloatFormat

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Factors", "buffer_size", "run_chain"]

_FEW_OUTPUTS = 256  # below this a cumulative sum along K beats a step a term
_DOUBLE_BITS = 53
Tile = NDArray[Any]


class Factors:
    """The factors of a tile: float32, ``a`` (K, ..., m, 1), ``b`` (K, ..., 1, n), of ``bits`` significant bits."""

    def __init__(self, a: Tile, b: Tile, bits: int) -> None:
        self.a, self.b, self.bits = a, b, bits
        self.shape = np.broadcast_shapes(a.shape[1:], b.shape[1:])
        with np.errstate(invalid="ignore", over="ignore"):
            reach = [_exponent_range(x) for x in (a, b)]
        self.low = sum(low for low, _ in reach) - 2 * bits + 2
        self.high = sum(high for _, high in reach) + 2

    def __len__(self) -> int:
        return len(self.a)

    def exact_in(self, carrier: type[np.floating[Any]]) -> bool:
        """Whether every product is exact in the carrier."""
        return carrier is np.float64 or (2 * self.bits <= 24 and self.low >= -149 and self.high <= 127)

    def converted(self, carrier: type[np.floating[Any]]) -> Factors:
        """The same factors in a carrier."""
        part = object.__new__(Factors)
        part.__dict__.update(self.__dict__)
        part.a, part.b = (x.astype(carrier, copy=False) for x in (self.a, self.b))
        return part

    def at(self, chosen: NDArray[np.bool_]) -> Factors:
        """The factors of some outputs only, one axis."""
        part = object.__new__(Factors)
        part.__dict__.update(self.__dict__)
        part.a, part.b = (np.broadcast_to(x, (len(x), *self.shape))[:, chosen] for x in (self.a, self.b))
        part.shape = part.a.shape[1:]
        return part

    def stay_within(self, fmt: FloatFormat, start: Tile | None) -> bool:
        """Whether no partial sum in any order can overflow ``fmt``, the errors of the roundings on the way included.

        They are below ``n u`` times the sum of the magnitudes (Jeannerod and Rump 2013); twice that is allowed for.
        """
        first = 0.0 if start is None else float(np.abs(start).max(initial=0))
        left, right = (np.abs(x.reshape(len(x), math.prod(x.shape[1:]))) for x in (self.a, self.b))
        steps = left.max(axis=1, initial=0).astype(np.float64) * right.max(axis=1, initial=0)
        largest = (first + float(steps.sum())) * (1 + (len(steps) + 1) * fmt.epsilon)
        return bool(largest < fmt.max)

    def write(self, k: int, out: Tile) -> None:
        """The product of step ``k``."""
        np.multiply(self.a[k], self.b[k], out=out)


def _exponent_range(x: Tile) -> tuple[int, int]:
    """Least and largest exponent of the finite numbers in ``x`` that are not zero."""
    magnitude = np.abs(x)
    usual = np.isfinite(magnitude) & (magnitude > 0)
    if not usual.any():
        return 0, 0
    ends = (np.min(magnitude, where=usual, initial=np.inf), np.max(magnitude, where=usual, initial=0))
    low, high = (int(np.frexp(end)[1]) - 1 for end in ends)
    return low, high


class _Rounder:
    """Rounds a tile in place to one format, in a scratch space of its own."""

    def __init__(
        self, fmt: FloatFormat, rounding: str, carrier: type[np.floating[Any]], size: int, *, bounded: bool = False
    ) -> None:
        dtype = np.dtype(carrier)
        kernel = kernel_for(fmt, rounding, "ieee", "", dtype.name)
        bounded = bounded and rounding == "nearest-even"
        self.kernel: Any = kernel.bounded if bounded and isinstance(kernel, NearestKernel) else kernel
        self.work = Workspace(size, dtype)
        self.idle = fmt == FP32 and carrier is np.float32  # the hardware has rounded already

    def __call__(self, x: Tile) -> Tile:
        if not self.idle:
            flat = x.reshape(-1)
            self.kernel(flat, flat, self.work, None, 0)
        return x


def run_chain(row: Accumulator, factors: Factors, start: Tile | None) -> Tile:
    """Add a tile's products under a software accumulator.

    Args:
        row: ``Sequential``, ``Pairwise``, ``Kahan`` or ``Lanes``.
        factors: the factors.
        start: the addend, shape of the tile, already in the row's format; +0 unless given.

    Returns:
        float32 or float64, every element a number of the row's format.

    Source: the row's ``source``.

    >>> from mp_reference.spec.accumulators import sequential
    >>> from mp_reference.spec.formats import FP16
    >>> ones = np.ones((3, 1, 1), np.float32)
    >>> run_chain(sequential(FP16), Factors(ones * np.float32(2048), ones, 11), np.ones((1, 1)))
    array([[6144.]], dtype=float32)
    """
    with np.errstate(all="ignore"):  # which also brings the buffer size back
        np.setbufsize(buffer_size(factors.shape[-1]))
        if isinstance(row, Sequential):
            return _sequential(row, factors, start)
        if isinstance(row, Pairwise):
            return _pairwise(row, factors, start)
        if isinstance(row, Kahan):
            return _kahan(row, factors, start)
        assert isinstance(row, Lanes)
        return _lanes(row, factors, start)


def buffer_size(row_length: int) -> int:
    """NumPy's buffer size at which a column times a row runs row by row, at four times the speed of the default.

    Args:
        row_length: elements a row of the tile.

    Returns:
        A multiple of 16 from 512 to 1024.

    Source: measured with NumPy 2.4: larger buffers make the broadcast loop gather its operands.

    >>> buffer_size(512), buffer_size(3)
    (512, 512)
    """
    return min(max(row_length // 16 * 16, 512), 1024)


def _carrier_of(fmt: FloatFormat, factors: Factors, rounding: str = "nearest-even") -> type[np.floating[Any]]:
    """float32 where a float32 operation and then the rounding is the exact result rounded once, else float64.

    For sums and for exact products that holds to nearest even where 24 >= 2 p + 2 (Figueroa 1995).
    """
    if fmt == FP32 and rounding == "nearest-even":
        return np.float32
    narrow = 2 * (fmt.mantissa_bits + 1) + 2 <= 24 and fmt.min_exponent - fmt.mantissa_bits >= -133
    return np.float32 if narrow and rounding == "nearest-even" and factors.exact_in(np.float32) else np.float64


def _first(start: Tile | None, shape: tuple[int, ...], carrier: type[np.floating[Any]]) -> Tile:
    """The accumulator before the first step."""
    total = np.zeros(shape, carrier)
    if start is not None:
        np.copyto(total, start, casting="same_kind")
    return total


def _sequential(row: Sequential, factors: Factors, start: Tile | None) -> Tile:
    fmt = row.format
    if row.fused:
        return _fused(row, factors, start)
    carrier = _carrier_of(fmt, factors, row.rounding)
    factors = factors.converted(carrier)
    total = _first(start, factors.shape, carrier)
    if total.size < _FEW_OUTPUTS and fmt in (FP16, BF16, FP32) and row.rounding == "nearest-even":
        return _accumulated(fmt, factors, total)
    safe = factors.stay_within(fmt, start) and not (np.signbit(total) & (total == 0)).any()
    round_ = _Rounder(fmt, row.rounding, carrier, total.size, bounded=safe)
    odd = carrier is np.float64 and row.rounding != "nearest-even"
    product = np.empty_like(total)
    for k in range(len(factors)):
        factors.write(k, product)
        round_(product)
        if odd:
            np.copyto(total, ODD["add"](total, product, downward=row.rounding == "toward-negative"))
        else:
            np.add(total, product, out=total)
        round_(total)
    return total


def _accumulated(fmt: FloatFormat, factors: Factors, total: Tile) -> Tile:
    """The same for few outputs: NumPy's cumulative sum in the format's own dtype rounds every step."""
    step = max(1, 65536 // total.size) if total.size else 1
    round_ = _Rounder(fmt, "nearest-even", total.dtype.type, step * total.size)
    running = total.astype(fmt.dtype)[np.newaxis]
    for k in range(0, len(factors), step):
        products = round_(factors.a[k : k + step] * factors.b[k : k + step])
        terms = np.concatenate([running, products.astype(fmt.dtype)])
        running = np.add.accumulate(terms, axis=0)[-1:]
    return np.asarray(running[0].astype(total.dtype))


def _fused(row: Sequential, factors: Factors, start: Tile | None) -> Tile:
    """``acc = round(acc + a * b)``."""
    fmt, nearest = row.format, row.rounding == "nearest-even"
    if fmt == FP32 and nearest and factors.exact_in(np.float32):
        unfused = Sequential(name=row.name, source=row.source, format=fmt, fused=False, rounding=row.rounding)
        return _sequential(unfused, factors, start)
    low = factors.low if start is None else min(factors.low, _exponent_range(start)[0] - fmt.mantissa_bits)
    plain = nearest and _double_is_enough(fmt, factors, low)
    factors = factors.converted(np.float64)
    safe = nearest and factors.stay_within(fmt, start)
    unit = None if plain else 2.0**low
    total = _fused_chain(row, factors, start, unit=unit, bounded=safe)
    zero = total == 0
    if safe and zero.any():  # a bounded kernel rounds to +0 whatever the sign
        if 16 * np.count_nonzero(zero) > total.size:
            return _fused_chain(row, factors, start, unit=unit, bounded=False)
        total[zero] = _fused_chain(
            row, factors.at(zero), None if start is None else start[zero], unit=unit, bounded=False
        )
    return total


def _double_is_enough(fmt: FloatFormat, factors: Factors, low: int) -> bool:
    """Whether the sum in float64, rounded to nearest even once more, is always the exact one rounded once.

    A product must be too short to reach from the middle between two numbers of the format, where the accumulator is
    the larger term, down to the last bit of a float64. Where the product is, it must be too short to be such a middle,
    or so near that float64 holds the accumulator's lowest bit too, which is ``2**low`` or the format's own.
    """
    bits = 2 * factors.bits
    highest = min(factors.high, fmt.max_exponent + 1)
    near = highest + 2 - max(low, fmt.min_exponent - fmt.mantissa_bits) <= _DOUBLE_BITS
    return bits + fmt.mantissa_bits + 3 <= _DOUBLE_BITS and (bits <= fmt.mantissa_bits + 1 or near)


def _fused_chain(row: Sequential, factors: Factors, start: Tile | None, *, unit: float | None, bounded: bool) -> Tile:
    """In plain sums, or to odd in float64, where all terms are multiples of ``unit``."""
    total = _first(start, factors.shape, np.float64)
    round_ = _Rounder(row.format, row.rounding, np.float64, total.size, bounded=bounded)
    product = np.empty_like(total)
    how = {"downward": row.rounding == "toward-negative", "precision": row.format.mantissa_bits + 1}
    for k in range(len(factors)):
        factors.write(k, product)
        if unit is None:
            np.add(total, product, out=total)
        else:
            np.copyto(total, ODD["add"](total, product, **how, unit=unit))
        round_(total)
    return total


def _rounded_products(
    fmt: FloatFormat, factors: Factors, start: Tile | None
) -> tuple[Tile, Callable[[int, Tile], Tile], _Rounder]:
    """The accumulator at its start, a function that writes the rounded product of step k, and the rounder.

    Where nothing can overflow the bounded kernel serves: the signs of zeros that it loses reach no result that does
    not start at -0.
    """
    carrier = _carrier_of(fmt, factors)
    factors = factors.converted(carrier)
    total = _first(start, factors.shape, carrier)
    safe = factors.stay_within(fmt, start) and not np.signbit(total).any()
    round_ = _Rounder(fmt, "nearest-even", carrier, total.size, bounded=safe)

    def product(k: int, out: Tile) -> Tile:
        factors.write(k, out)
        return round_(out)

    return total, product, round_


def _pairwise(row: Pairwise, factors: Factors, start: Tile | None) -> Tile:
    total, product, round_ = _rounded_products(row.format, factors, start)
    spare = np.empty_like(total)

    def tree(first: int, count: int) -> Tile:
        if count <= row.base:
            run = product(first, np.empty_like(total))
            for k in range(first + 1, first + count):
                round_(np.add(run, product(k, spare), out=run))
            return run
        half = count - count // 2
        run = tree(first, half)
        return round_(np.add(run, tree(first + half, count - half), out=run))

    return round_(np.add(total, tree(0, len(factors)), out=total)) if len(factors) else total


def _kahan(row: Kahan, factors: Factors, start: Tile | None) -> Tile:
    total, product, round_ = _rounded_products(row.format, factors, start)
    excess = np.zeros_like(total)  # what the sums so far are too large by
    term, grown = np.empty_like(total), np.empty_like(total)
    for k in range(len(factors)):
        product(k, term)
        round_(np.subtract(term, excess, out=term))
        round_(np.add(total, term, out=grown))
        round_(np.subtract(grown, total, out=excess))
        round_(np.subtract(excess, term, out=excess))
        total, grown = grown, total
    return total


def _lanes(row: Lanes, factors: Factors, start: Tile | None) -> Tile:
    """Whole vectors lane by lane, lanes left to right, an unrolled remainder, then fused single terms."""
    factors = factors.converted(np.float32)
    body = len(factors) // row.width * row.width
    a, b = (x[:body].reshape(-1, row.width, *x.shape[1:]) for x in (factors.a, factors.b))
    lanes = np.zeros((1, row.width, *factors.shape), np.float32)
    together = max(1, 65536 // max(lanes.size, 1))
    for step in range(0, len(a), together):
        products = a[step : step + together] * b[step : step + together]
        lanes = np.add.accumulate(np.concatenate([lanes, products]), axis=0)[-1:]
    total = _first(start, factors.shape, np.float32)
    for lane in lanes[0]:
        np.add(total, lane, out=total)
    unrolled = body + (len(factors) - body) // row.tail * row.tail
    for k in range(body, unrolled):
        np.add(total, factors.a[k] * factors.b[k], out=total)
    for k in range(unrolled, len(factors)):
        wide = (np.broadcast_to(x, factors.shape).astype(np.float64) for x in (factors.a[k], factors.b[k], total))
        total = ODD["fma"](*wide).astype(np.float32)
    return total
