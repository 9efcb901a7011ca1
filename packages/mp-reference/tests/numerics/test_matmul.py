"""Products: shapes, formats, addends, exact results, threads, refusals."""

from __future__ import annotations

import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.bits import same_bits
from mp_reference.numerics.blocks import quantize
from mp_reference.numerics.products import widened
from mp_reference.numerics.reductions import dot
from mp_reference.numerics.superaccumulator import digits_of_products, exact_products
from mp_reference.spec.blocks import MXFP4

HALF = np.float16
MX = quantize(np.ones((2, 2), np.float32), MXFP4)
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float6_e2m3fn]


def draws(dtype, shape, spread, rng):
    with np.errstate(all="ignore"):
        return np.ldexp(rng.standard_normal(shape), rng.integers(-spread, spread + 1, shape)).astype(dtype)


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32), spread=st.sampled_from([0, 4, 20, 140]),
    shape=st.tuples(st.integers(1, 3), st.integers(0, 7), st.integers(1, 3)), with_c=st.booleans(),
    out=st.sampled_from([mp.FP16, mp.BF16, mp.FP32, mp.E4M3FN]),
)  # fmt: skip
def test_the_exact_accumulator_is_the_oracle_rounded_once(dtype, seed, spread, shape, with_c, out):
    rng = np.random.default_rng(seed)
    m, k, n = shape
    a, b = draws(dtype, (m, k), spread, rng), draws(dtype, (k, n), spread, rng)
    if k > 1:  # let the largest terms cancel
        a[:, -1], b[-1] = -a[:, 0], b[0]
    c = draws(np.float32, (m, n), spread, rng) if with_c else None
    got = mp.matmul(a, b, c, "exact", out_format=out)
    wanted = [
        [exact.round_exact(exact.dot([*map(float, x)], [*map(float, y)], 0.0 if c is None else float(c[i, j])), out)
         for j, y in enumerate(widened(b).T)] for i, x in enumerate(widened(a))
    ]  # fmt: skip
    assert got.dtype == out.dtype
    assert same_bits(got, np.array(wanted, np.float64).astype(out.dtype)).all(), (got, wanted)


@pytest.mark.parametrize("length", [1, 3, 300, 5000])
def test_exact_sums_of_any_length_keep_every_digit(length):
    rng = np.random.default_rng(length)
    a, b = draws(np.float32, (2, length), 60, rng), draws(np.float32, (length, 2), 60, rng)
    digits = digits_of_products(a.astype(float), b.astype(float), None)
    wanted = [
        sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(row, column, strict=True))
        for row in a for column in b.T
    ]  # fmt: skip
    assert [Fraction(number) * Fraction(2) ** digits.low for number in digits.to_integers()] == wanted
    for got, total in zip(digits.to_odd().reshape(-1), wanted, strict=True):
        for fmt in (mp.FP32, mp.FP16, mp.BF16):
            assert exact.round_exact(Fraction(float(got)), fmt) == exact.round_exact(total, fmt)


def test_exact_products_of_special_values_are_ieee_sums():
    inf, nan = np.inf, np.nan
    values = np.array([0.0, -0.0, 1.0, -2.0, inf, -inf, nan])
    for c in (None, *values):
        a, b = values[:, None], values[None, :]
        a = np.concatenate([a, np.full_like(a, 3.0)], axis=1)
        b = np.concatenate([b, np.full_like(b, 5.0)], axis=0)
        addend = None if c is None else np.full((7, 7), c)
        with np.errstate(all="ignore"):
            wanted = a[:, :1] * b[:1] + 15 + (0 if c is None else c)
        assert same_bits(exact_products(a, b, addend), wanted).all()


def test_a_zero_is_positive_unless_every_term_is_a_negative_zero():
    def sign(a, b, c=None):
        return np.copysign(1, mp.matmul(HALF(a), HALF(b), None if c is None else HALF(c), "exact").item())

    assert sign([1, -1], [3, 3]) == 1
    assert sign([0, -0.0], [-1, 2]) == 1  # the accumulator starts at +0
    assert sign([0, -0.0], [-1, 2], -0.0) == -1
    assert sign([0, -0.0], [-1, -2], -0.0) == 1
    assert sign([0, -0.0], [-1, 2], 0.0) == 1


def test_results_keep_the_half_precision_of_the_factors_unless_told_otherwise():
    half, brain = np.ones((2, 2), HALF), np.ones((2, 2), ml_dtypes.bfloat16)
    eighth = np.ones((2, 2), ml_dtypes.float8_e5m2)
    assert mp.matmul(half, half).dtype == HALF
    assert mp.matmul(brain, brain, accumulator="exact").dtype == brain.dtype
    assert mp.matmul(eighth, eighth).dtype == np.float32
    assert mp.matmul(half, eighth, accumulator="exact").dtype == np.float32
    assert mp.matmul(half, half, np.ones((2, 2), np.float32)).dtype == np.float32
    assert mp.matmul(half, half, accumulator=mp.tensor_core("hopper")).dtype == np.float32
    assert mp.matmul(half, half, half, mp.tensor_core("hopper", result=mp.FP16)).dtype == HALF
    assert mp.matmul(half, half, accumulator=mp.tensor_core("hopper"), out_format=mp.BF16).dtype == brain.dtype
    with pytest.raises(TypeError, match="factors are fp16 and bf16, and nothing says what the result is"):
        mp.matmul(half, brain)
    assert mp.matmul(half, brain, out_format=mp.FP32).dtype == np.float32


def test_the_fast_accumulator_is_single_precision_rounded_once():
    rng = np.random.default_rng(0)
    a, b, c = draws(HALF, (5, 40), 2, rng), draws(HALF, (40, 6), 2, rng), draws(HALF, (5, 6), 2, rng)
    wide = a.astype(np.float32) @ b.astype(np.float32)
    assert same_bits(mp.matmul(a, b), wide.astype(HALF)).all()
    assert same_bits(mp.matmul(a, b, c), (wide + c.astype(np.float32)).astype(HALF)).all()


@pytest.mark.parametrize("accumulator", ["fp32", "exact", mp.FP16, mp.tensor_core("ampere"), mp.split_k(2)], ids=str)
def test_axes_broadcast_as_in_numpy(accumulator):
    rng = np.random.default_rng(1)
    cases = [((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 2)), ((3, 4), (4, 2)), ((5, 1, 3, 4), (2, 4, 6)),
             ((2, 3, 4), (4,)), ((0, 4), (4, 3)), ((2, 0), (0, 3)), ((2, 0, 4), (4, 3))]  # fmt: skip
    for left, right in cases:
        a, b = rng.integers(-3, 4, left).astype(HALF), rng.integers(-3, 4, right).astype(HALF)
        wanted = np.matmul(a.astype(np.float64), b.astype(np.float64))
        got = mp.matmul(a, b, accumulator=accumulator)
        assert got.shape == wanted.shape
        assert (got.astype(np.float64) == wanted).all()
        c = rng.integers(-3, 4, wanted.shape).astype(HALF)
        with_c = mp.matmul(a, b, c, accumulator)
        assert (with_c.astype(np.float64) == wanted + c).all()
        assert (mp.matmul(a, b, HALF(1), accumulator).astype(np.float64) == wanted + 1).all()


@pytest.mark.parametrize("accumulator", ["exact", mp.FP16, mp.tensor_core("hopper"), mp.kahan()], ids=str)
def test_tiles_batches_and_threads_change_no_bit(accumulator, monkeypatch):
    rng = np.random.default_rng(2)
    a, b = draws(HALF, (3, 9, 20), 3, rng), draws(HALF, (20, 11), 3, rng)
    c = draws(HALF, (9, 11), 3, rng)
    whole = mp.matmul(a, b, c, accumulator)
    for size, columns in ((8, 4), (40, 512), (250, 512)):
        monkeypatch.setattr("mp_reference.numerics.matmul._TILE", size)
        monkeypatch.setattr("mp_reference.numerics.matmul._COLUMNS", columns)
        for threads in (1, 2):
            assert same_bits(mp.matmul(a, b, c, accumulator, threads=threads), whole).all()


def test_float32_factors_are_cut_to_tf32_on_nvidia_and_kept_on_amd():
    a = np.float32([[1 + 2.0**-11]])
    one = np.ones((1, 1), np.float32)
    assert mp.matmul(a, one, accumulator=mp.tensor_core("ampere")).item() == 1
    assert mp.matmul(a, one, accumulator=mp.tensor_core("cdna3")).item() == a.item()
    assert mp.matmul(a, one, accumulator=mp.tensor_core("f32_16x16x8_xf32")).item() == 1


@pytest.mark.parametrize("accumulator", ["fp32", "exact", mp.FP16, mp.tensor_core("hopper")], ids=str)
def test_factors_of_the_other_byte_order_are_the_same_numbers(accumulator):
    here = [np.linspace(-3, 3, n, dtype=HALF).reshape(shape) for n, shape in ((12, (3, 4)), (20, (4, 5)), (15, (3, 5)))]
    there = [x.astype(x.dtype.newbyteorder(">")) for x in here]
    wanted = mp.matmul(*here[:2], np.zeros((3, 5), np.float32), accumulator)
    assert same_bits(mp.matmul(*there[:2], np.zeros((3, 5), ">f4"), accumulator), wanted).all()
    assert same_bits(mp.sum(there[2], accumulator), mp.sum(here[2], accumulator)).all()


def test_the_addend_is_where_the_accumulator_starts():
    c = HALF([[2048]])
    ones = np.ones((1, 3), HALF)
    assert mp.matmul(ones, ones.T, c, mp.FP16).item() == 2048
    assert mp.matmul(ones, ones.T, c, "exact").item() == 2052  # 2051, to even
    assert mp.matmul(ones, ones.T, c, mp.blocked(mp.FP16, 2, mp.FP16)).item() == 2052


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mp.matmul(HALF(1), HALF([1])), ValueError, "matmul takes arrays of one axis or more, got shapes ()"),
        (lambda: mp.matmul(np.ones((2, 3), HALF), np.ones((2, 3), HALF)), ValueError,
         "matmul of (2, 3) by (2, 3): the last axis of a (3) must equal the last but one of b (2); transpose one"),
        (lambda: mp.matmul(HALF([1]), HALF([1]), np.ones(3, HALF)), ValueError,
         "c has shape (3,), which does not broadcast to the result's (); reshape it"),
        (lambda: mp.matmul(np.ones((1, 1)), np.ones((1, 1))), TypeError, "float64 stores none of the named formats"),
        (lambda: mp.matmul(HALF([1]), HALF([1]), accumulator="double"), ValueError,
         "accumulator='double' is none of 'exact', 'fp32'; build others with sequential(format)"),
        (lambda: mp.matmul(np.ones((2, 1, 1), HALF), np.ones((3, 1, 1), HALF)), ValueError,
         "matmul of (2, 1, 1) by (3, 1, 1): the leading axes (2,) and (3,) do not broadcast; give one of them length"),
        (lambda: mp.matmul(HALF([1]), HALF([1]), threads=0.5), ValueError, "threads=0.5 must be a whole number of"),
        (lambda: mp.matmul(HALF([1]), HALF([1]), out_format="fp32"), TypeError,
         "out_format='fp32' must be a FloatFormat; use format_named('fp32')"),
        (lambda: mp.sum([1, 2]), TypeError, "dtype int64 stores none of the named formats"),
        (lambda: dot(HALF(1), HALF([1])), ValueError, "dot takes arrays of one axis or more, got shapes () and (1,)"),
        (lambda: mp.matmul(MX, HALF([[1]])), TypeError, "a is a BlockArray and the other factor is not; quantize that"),
        (lambda: mp.matmul(HALF([[1]]), MX), TypeError, "b is a BlockArray and the other factor is not; quantize that"),
        (lambda: mp.matmul(MX, MX, scales=(HALF(1), HALF(1))), ValueError, "block arrays bring their scales along"),
        (lambda: mp.matmul(MX, quantize(np.ones((3, 2), np.float32), MXFP4, axis=0)), ValueError,
         "matmul of (2, 2) by (3, 2): the last axis of a must equal the last but one of b"),
        (lambda: mp.matmul(HALF([1]), HALF([1]), np.float32(0.1), mp.FP16), ValueError,
         "c is fp32 and holds values that fp16, in which sequential(fp16) starts, does not have; round it first, with "
         "cast(c, FP16)"),
    ],
)  # fmt: skip
def test_what_cannot_be_multiplied_says_why_and_what_to_do(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_an_addend_of_another_format_is_taken_where_nothing_is_lost():
    got = mp.matmul(HALF([1]), HALF([1]), np.float32(0.5), mp.FP16)
    assert (got.dtype, got.item()) == (np.float32, 1.5)
    assert np.isnan(mp.matmul(HALF([1]), HALF([1]), np.float32(np.nan), mp.FP16).item())


@pytest.mark.parametrize("accumulator", [mp.FP16, mp.tensor_core("hopper"), "exact", "fp32"], ids=str)
def test_a_product_leaves_numpys_settings_as_they_were(accumulator):
    before = np.getbufsize(), np.geterr()
    with np.errstate(all="raise"):
        mp.matmul(np.full((2, 40), 300, HALF), np.full((40, 2), 300, HALF), accumulator=accumulator)
        assert np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), "raise")
    assert (np.getbufsize(), np.geterr()) == before
