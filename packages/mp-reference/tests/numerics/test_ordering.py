"""Minimum, maximum, comparison, neighbours and ulps: exhaustively over the codes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.codec import code_dtype
from mp_reference.numerics.ordering import (
    UNORDERED,
    compare,
    maximum,
    maximum_number,
    minimum,
    minimum_number,
    next_down,
    next_up,
    nextafter,
    ulp,
)
from mp_reference.spec.formats import FORMATS

SMALL = [fmt for fmt in FORMATS.values() if fmt.bits <= 8]
NATIVE = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]


def every_code(fmt):
    return np.arange(1 << fmt.bits).astype(code_dtype(fmt)).view(fmt.dtype)


def all_pairs(fmt):
    codes = every_code(fmt)
    return np.repeat(codes, codes.size), np.tile(codes, codes.size)


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_all_pairs_compare_like_their_values(fmt):
    a, b = all_pairs(fmt)
    x, y = a.astype(np.float64), b.astype(np.float64)
    wanted = np.where(np.isnan(x) | np.isnan(y), UNORDERED, np.sign(np.nan_to_num(x, posinf=1e99) - y))
    wanted = np.where(x == y, 0, np.where(x < y, -1, np.where(x > y, 1, UNORDERED)))
    assert (compare(a, b) == wanted).all()


def smaller(x, y):
    """IEEE 754-2019 minimum of two Python floats."""
    if math.isnan(x) or math.isnan(y):
        return math.nan
    if x == y:
        return x if math.copysign(1, x) < 0 else y
    return min(x, y)


@pytest.mark.parametrize("fmt", [mp.E4M3FN, mp.E5M2, mp.E5M2FNUZ, mp.E2M1FN, mp.E8M0FNU], ids=lambda fmt: fmt.name)
def test_minimum_and_maximum_over_all_pairs_are_ieees(fmt):
    a, b = (values[:: 1 if fmt.bits < 8 else 3] for values in all_pairs(fmt))
    pairs = list(zip(a.astype(np.float64).tolist(), b.astype(np.float64).tolist(), strict=True))
    low = np.array([smaller(x, y) for x, y in pairs])
    high = np.array([-smaller(-x, -y) for x, y in pairs])
    assert differing_bits(minimum(a, b).astype(np.float64), low) == 0
    assert differing_bits(maximum(a, b).astype(np.float64), high) == 0
    one = np.array([y if math.isnan(x) else x if math.isnan(y) else smaller(x, y) for x, y in pairs])
    other = np.array([y if math.isnan(x) else x if math.isnan(y) else -smaller(-x, -y) for x, y in pairs])
    assert differing_bits(minimum_number(a, b).astype(np.float64), one) == 0
    assert differing_bits(maximum_number(a, b).astype(np.float64), other) == 0


@pytest.mark.parametrize("fmt", NATIVE, ids=lambda fmt: fmt.name)
def test_neighbours_are_the_adjacent_values(fmt):
    x = every_code(fmt)
    wide = x.astype(np.float32)
    numbers = np.unique(wide[~np.isnan(wide)] + np.float32(0))
    up, down = next_up(x).astype(np.float32), next_down(x).astype(np.float32)
    place = np.searchsorted(numbers, wide[~np.isnan(wide)])
    assert (up[~np.isnan(wide)] == numbers[np.minimum(place + 1, numbers.size - 1)]).all()
    assert (down[~np.isnan(wide)] == numbers[np.maximum(place - 1, 0)]).all()
    assert np.isnan(up[np.isnan(wide)]).all()
    assert np.isnan(down[np.isnan(wide)]).all()


def test_neighbours_at_zero_infinity_and_the_largest_number():
    smallest = np.float16(2.0**-24)
    assert np.signbit(next_up(-smallest))
    assert next_up(-smallest) == 0
    assert not np.signbit(next_down(smallest))
    assert next_up(np.float16(-0.0)) == smallest
    assert next_up(np.float16(np.inf)) == np.inf
    assert next_down(np.float16(np.inf)) == 65504
    assert next_up(np.array(448, mp.E4M3FN.dtype)).astype(float) == 448
    assert next_down(np.array(2.0**-127, mp.E8M0FNU.dtype)).astype(float) == 2.0**-127


def test_nextafter_is_numpys_for_float32_and_float16():
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32):
        width = np.dtype(dtype).itemsize
        x, y = rng.integers(0, 2 ** (8 * width), (2, 20_000), dtype=np.uint64).astype(f"u{width}").view(dtype)
        y[:1000] = x[:1000]
        y[1000:1500] = -x[1000:1500]
        with np.errstate(all="ignore"):
            wanted = np.nextafter(x, y)
        assert differing_bits(nextafter(x, y), wanted) == 0
    assert np.signbit(nextafter(np.float16(0.0), np.float16(-0.0)))


@pytest.mark.parametrize("fmt", NATIVE, ids=lambda fmt: fmt.name)
def test_an_ulp_is_the_step_to_the_next_larger_magnitude(fmt):
    x = every_code(fmt)
    with np.errstate(invalid="ignore"):  # signalling NaNs are data
        size, wide = ulp(x).astype(np.float64), np.abs(x.astype(np.float64))
    usual = np.isfinite(wide) & (wide < fmt.max) & (wide >= (fmt.min_normal if not fmt.has_zero else 0))
    magnitude = wide[usual].astype(np.float32).astype(fmt.dtype)
    assert (size[usual] == next_up(magnitude).astype(np.float64) - wide[usual]).all()
    assert np.isnan(size[np.isnan(wide)]).all()
    assert (size[np.isinf(wide)] == np.inf).all()
    assert (size[wide == fmt.max] <= fmt.max).all()


def test_operands_of_two_dtypes_are_refused():
    for operation in (minimum, maximum, minimum_number, maximum_number, compare, nextafter):
        with pytest.raises(
            TypeError, match=f"{operation.__name__} needs operands of one dtype, got float16 and float32"
        ):
            operation(np.float16(1), np.float32(1))
