"""Sums, means, dot products and norms against the oracle and against torch's recorded norms."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.bits import same_bits
from mp_reference.numerics.products import widened
from mp_reference.numerics.reductions import dot, mean, norm
from mp_reference.spec.accumulators import lanes

HALF = np.float16
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e5m2]


@st.composite
def vectors(draw, dtype):
    length = draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 5, 30, 140]))
    with np.errstate(all="ignore"):
        x = np.ldexp(rng.standard_normal(length), rng.integers(-spread, spread + 1, length)).astype(dtype)
    return x[np.isfinite(widened(x))]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), out=st.sampled_from([mp.FP16, mp.BF16, mp.FP32]))
def test_exact_reductions_round_the_exact_value_once(data, dtype, out):
    x = data.draw(vectors(dtype))
    terms = [Fraction(float(value)) for value in widened(x)]
    total, squares = sum(terms, Fraction(0)), sum((term * term for term in terms), Fraction(0))
    assert mp.sum(x, "exact", out_format=out).item() == exact.round_exact(total, out)
    if len(x):
        assert mean(x, "exact", out_format=out).item() == exact.round_exact(total / len(x), out)
    assert dot(x, x, accumulator="exact", out_format=out).item() == exact.round_exact(squares, out)
    got = Fraction(norm(x, "exact", out_format=mp.FP32).item()) if squares < Fraction(2) ** 250 else None
    if got is not None:
        assert_nearest_root(got, squares)


def assert_nearest_root(got, square):
    """The midpoints to the neighbours of ``got`` enclose the root: no root is computed."""
    spacing = Fraction(float(np.spacing(np.float32(got))))
    assert (got + spacing / 2) ** 2 >= square
    below = Fraction(float(np.nextafter(np.float32(got), np.float32(0))))
    assert got == 0 or ((got + below) / 2) ** 2 <= square


def test_axes_of_reductions_are_numpys():
    x = np.arange(24, dtype=HALF).reshape(2, 3, 4)
    for accumulator in ("fp32", "exact", mp.FP16, mp.tensor_core("hopper")):
        for axis in (None, 0, -1, (0, 2), (), (1, 2)):
            wanted = x.astype(float).sum(axis=axis)
            got = mp.sum(x, accumulator, axis=axis)
            assert got.shape == np.shape(wanted)
            assert (got.astype(float) == wanted).all()
            assert mean(x, accumulator, axis=axis).shape == np.shape(wanted)
            squares = (x.astype(float) ** 2).sum(axis=axis)
            assert np.allclose(norm(x, accumulator, axis=axis).astype(float), np.sqrt(squares), rtol=1e-3)
    with pytest.raises(ValueError, match="axis 3 is out of bounds"):
        mp.sum(x, axis=3)


def test_reductions_of_nothing():
    nothing = np.zeros((0,), HALF)
    assert mp.sum(nothing).item() == 0
    assert mp.sum(nothing, "exact").item() == 0
    assert np.isnan(mean(nothing, "exact").item())
    assert np.isnan(mean(nothing).item())
    assert norm(nothing, "exact").item() == 0
    assert mp.sum(np.zeros((0, 3), HALF), "exact", axis=1).shape == (0,)


def test_result_formats_follow_the_products():
    half, eighth = np.ones(3, HALF), np.ones(3, ml_dtypes.float8_e4m3fn)
    assert mp.sum(half).dtype == HALF
    assert mp.sum(eighth).dtype == np.float32
    assert mean(half, "exact", out_format=mp.BF16).dtype == ml_dtypes.bfloat16
    assert norm(half, mp.tensor_core("hopper")).dtype == np.float32
    assert dot(half, half, HALF(1)).item() == 4


def test_a_scalar_is_its_own_sum():
    assert mp.sum(HALF(3), "exact").item() == 3
    assert norm(HALF(-3)).item() == 3


def test_special_values_pass_through_reductions():
    for x, total, root in (
        ([np.inf, 1], np.inf, np.inf),
        ([np.inf, -np.inf], np.nan, np.inf),
        ([np.nan, 1], np.nan, np.nan),
    ):
        for accumulator in ("exact", "fp32", mp.FP32):
            assert same_bits(mp.sum(HALF(x), accumulator), HALF(total))
            assert same_bits(mean(HALF(x), accumulator), HALF(total))
            assert same_bits(norm(HALF(x), accumulator), HALF(root))


def test_a_mean_divides_the_rounded_sum_and_rounds_once_more():
    x = np.ones(4097, HALF)
    assert mean(x, "exact").item() == 1
    assert mean(x, mp.FP16).item() == exact.round_exact(Fraction(2048, 4097), mp.FP16)


def test_norms_in_lanes_are_torchs_bit_for_bit():
    witness = json.loads((Path(__file__).parents[1] / "data" / "torch_vector_norm.json").read_text())
    for capability, row in (("avx2", lanes()), ("default", lanes(tail=1))):
        rng = np.random.default_rng(20)
        for length, code in witness[capability]:
            x = (rng.standard_normal(length) * 2.0 ** rng.integers(-3, 4, length)).astype(np.float32)
            assert hex(norm(x, row).view(np.uint32).item()) == code, (capability, length)


def test_another_width_or_tail_misses_torchs_norms():
    witness = json.loads((Path(__file__).parents[1] / "data" / "torch_vector_norm.json").read_text())
    for row in (lanes(16), lanes(4), lanes(8, 1), lanes(8, 8)):
        rng = np.random.default_rng(20)
        misses = 0
        for length, code in witness["avx2"]:
            x = (rng.standard_normal(length) * 2.0 ** rng.integers(-3, 4, length)).astype(np.float32)
            misses += hex(norm(x, row).view(np.uint32).item()) != code
        assert misses > 0, row.name


def test_sums_of_native_dtypes_step_as_numpys_cumulative_sum():
    rng = np.random.default_rng(4)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        x = (rng.standard_normal(70000) * 4).astype(dtype)
        fmt = {2: mp.FP16, 4: mp.FP32}[x.itemsize] if x.dtype.name != "bfloat16" else mp.BF16
        assert same_bits(mp.sum(x, fmt), np.add.accumulate(x)[-1])


def test_the_sign_of_an_empty_or_cancelled_sum_is_plus():
    for accumulator in ("exact", mp.FP16, mp.tensor_core("hopper")):
        assert math.copysign(1, mp.sum(HALF([-0.0, -0.0]), accumulator).item()) == 1
