"""The oracle against hand-computed cases and against Python's own correctly rounded float arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.spec.formats import FORMATS, FloatFormat

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
ANY = st.floats(width=32)


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@given(st.fractions(min_value=-(2**128), max_value=2**128))
def test_rounding_to_fp32_is_pythons_when_float64_holds_the_value(value):
    carried = Fraction(float(value))
    with np.errstate(over="ignore"):
        assert exact.round_exact(carried, mp.FP32) == float(np.float32(float(value)))


@pytest.mark.parametrize(
    ("value", "fmt", "rounding", "wanted"),
    [
        (Fraction(2049), mp.FP16, "nearest-even", 2048.0),
        (Fraction(2051), mp.FP16, "nearest-even", 2052.0),
        (Fraction(2049), mp.FP16, "nearest-away", 2050.0),
        (Fraction(2049), mp.FP16, "toward-zero", 2048.0),
        (Fraction(2049), mp.FP16, "toward-positive", 2050.0),
        (Fraction(-2049), mp.FP16, "toward-positive", -2048.0),
        (Fraction(-2049), mp.FP16, "toward-negative", -2050.0),
        (Fraction(2049), mp.FP16, "to-odd", 2050.0),
        (Fraction(2051), mp.FP16, "to-odd", 2050.0),
        (Fraction(1, 2**25), mp.FP16, "nearest-even", 0.0),
        (Fraction(3, 2**25), mp.FP16, "nearest-even", 2.0**-23),
        (Fraction(-1, 2**25), mp.FP16, "nearest-even", -0.0),
        (Fraction(65519), mp.FP16, "nearest-even", 65504.0),
        (Fraction(65520), mp.FP16, "nearest-even", math.inf),
        (Fraction(65520), mp.FP16, "toward-negative", 65504.0),
        (Fraction(464), mp.E4M3FN, "nearest-even", 448.0),
        (Fraction(465), mp.E4M3FN, "nearest-even", math.nan),
        (Fraction(465), mp.E4M3FN, "to-odd", 448.0),
        (Fraction(100), mp.E2M1FN, "nearest-even", 6.0),
        (Fraction(-1, 100), mp.E4M3FNUZ, "toward-zero", -0.009765625),
        (Fraction(-1, 10**6), mp.E4M3FNUZ, "nearest-even", 0.0),
        (Fraction(3, 4), mp.E8M0FNU, "nearest-even", 1.0),
        (Fraction(1, 2**200), mp.E8M0FNU, "nearest-even", 2.0**-127),
        (Fraction(-1), mp.E8M0FNU, "nearest-even", math.nan),
        (Fraction(0), mp.E8M0FNU, "nearest-even", math.nan),
        (-0.0, mp.FP16, "toward-positive", -0.0),
        (math.nan, mp.FP16, "to-odd", math.nan),
        (-math.inf, mp.FP16, "toward-zero", -math.inf),
        (math.inf, mp.E4M3FN, "toward-zero", math.nan),
        (math.inf, mp.E2M1FN, "nearest-even", 6.0),
    ],
)
def test_hand_computed_roundings(value, fmt, rounding, wanted):
    assert same(exact.round_exact(value, fmt, rounding), wanted)


def test_saturation_and_flushing():
    assert exact.round_exact(math.inf, mp.FP16, overflow="saturate") == 65504
    assert exact.round_exact(-1e9, mp.FP16, overflow="saturate") == -65504
    almost = Fraction(mp.FP16.min_normal) * Fraction(9999, 10000)
    assert exact.round_exact(almost, mp.FP16) == mp.FP16.min_normal
    assert exact.round_exact(almost, mp.FP16, subnormals="flush-after") == mp.FP16.min_normal
    assert same(exact.round_exact(-almost, mp.FP16, subnormals="flush-before"), -0.0)
    assert same(exact.round_exact(-almost / 3, mp.FP16, subnormals=False), -0.0)


def test_ties_of_one_digit_formats_go_to_the_larger_magnitude():
    powers = FloatFormat("e5m0", exponent_bits=5, mantissa_bits=0, specials="fn")
    assert exact.round_exact(Fraction(3, 2), powers) == 2
    assert exact.round_exact(Fraction(3), powers) == 4


def test_stochastic_rounding_needs_its_bits():
    with pytest.raises(ValueError, match="needs random_bits, an integer below 2\\*\\*random_width"):
        exact.round_exact(Fraction(1, 3), mp.FP16, "stochastic")


def test_no_fraction_is_infinite():
    with pytest.raises(ValueError, match="inf is no fraction; treat infinities and NaN before"):
        exact.to_fraction(math.inf)
    assert exact.to_fraction(np.float16(0.1)) == Fraction(float(np.float16(0.1)))
    assert exact.to_fraction(3) == 3


@given(ANY, ANY)
def test_float32_operands_give_the_sums_and_products_of_ieee(a, b):
    with np.errstate(all="ignore"):
        assert same(exact.round_exact(exact.add(a, b), mp.FP32), float(np.float32(a) + np.float32(b)))
        assert same(exact.round_exact(exact.sub(a, b), mp.FP32), float(np.float32(a) - np.float32(b)))
        assert same(exact.round_exact(exact.mul(a, b), mp.FP32), float(np.float32(a) * np.float32(b)))
        assert same(exact.round_exact(exact.div(a, b), mp.FP32), float(np.float32(a) / np.float32(b)))
        assert same(exact.round_exact(exact.sqrt(a), mp.FP32), float(np.sqrt(np.float32(a))))


@given(FINITE, FINITE)
def test_remainders_are_pythons(a, b):
    if b != 0:
        assert same(float(exact.rem(a, b)), math.remainder(a, b))


def test_special_values_of_the_operations():
    inf, nan = math.inf, math.nan
    assert same(exact.add(1.0, -1.0, downward=True), -0.0)
    assert same(exact.add(-0.0, -0.0), -0.0)
    assert same(exact.add(-0.0, 0.0), 0.0)
    assert math.isnan(exact.add(inf, -inf))
    assert same(exact.div(0.0, -2.0), -0.0)
    assert same(exact.div(1.0, -inf), -0.0)
    assert same(exact.div(-inf, 2.0), -inf)
    assert math.isnan(exact.div(inf, inf))
    assert math.isnan(exact.sqrt(-1.0))
    assert same(exact.rsqrt(-0.0), -inf)
    assert same(exact.rsqrt(inf), 0.0)
    assert math.isnan(exact.rsqrt(-1.0))
    assert math.isnan(exact.rsqrt(nan))
    assert exact.fma(2.0, 3.0, inf) == inf
    assert math.isnan(exact.fma(0.0, inf, 1.0))
    assert same(exact.fma(-1.0, 0.0, 0.0), 0.0)
    assert same(exact.fma(-1.0, 1.0, 1.0, downward=True), -0.0)
    assert math.isnan(exact.rem(inf, 1.0))
    assert math.isnan(exact.rem(1.0, 0.0))
    assert same(exact.rem(-1.0, inf), -1.0)
    assert same(exact.rem(-4.0, 2.0), -0.0)


def test_roots_lie_on_the_right_side_of_every_short_number():
    for value in (2.0, 3.0, 0.5, 2.0**-149, 3.4e38, 1e-40):
        root = exact.sqrt(float(np.float32(value)))
        square = exact.to_fraction(float(np.float32(value)))
        near = Fraction(math.isqrt(int(square * 2**400)), 2**200)
        assert abs(root - near) <= near * Fraction(1, 2**60)
        assert exact.rsqrt(float(np.float32(value))) * root - 1 < Fraction(1, 2**58)
    assert exact.sqrt(6.25) == Fraction(5, 2)


def test_sums_and_dot_products_are_exact():
    inf = math.inf
    assert exact.exact_sum([2.0**100, 1.0, -(2.0**100)]) == 1
    assert same(exact.exact_sum([]), 0.0)
    assert same(exact.exact_sum([-0.0, -0.0]), -0.0)
    assert same(exact.exact_sum([1.0, -1.0]), 0.0)
    assert exact.exact_sum([inf, 1.0]) == inf
    assert math.isnan(exact.exact_sum([inf, -inf]))
    assert exact.dot([2.0**100, 3.0], [2.0**100, 1.0], -(2.0**200)) == 3
    assert same(exact.dot([-0.0], [1.0], -0.0), -0.0)
    assert same(exact.dot([1.0], [1.0], -1.0), 0.0)
    assert exact.dot([inf, 1.0], [1.0, 2.0]) == inf
    assert math.isnan(exact.dot([0.0], [inf]))
    with pytest.raises(ValueError, match="shorter"):
        exact.dot([1.0, 2.0], [1.0])


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.bits <= 8], ids=lambda fmt: fmt.name)
def test_every_value_is_its_own_rounding(fmt):
    for code in range(1 << fmt.bits):
        value = exact.value_of(code, fmt)
        if not (isinstance(value, float) and math.isnan(value)):
            for rounding in ("nearest-even", "toward-zero", "to-odd", "toward-positive"):
                assert same(exact.round_exact(value, fmt, rounding), float(value))
