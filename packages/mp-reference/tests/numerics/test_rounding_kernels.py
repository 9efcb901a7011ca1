"""Kernels where formats and chunks are odd: no fraction bits, no small numbers, a few subnormals among many others."""

from __future__ import annotations

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.bits import differing_bits, same_bits
from mp_reference.numerics.codec import encode
from mp_reference.numerics.rounding import ROUNDINGS, round_to
from mp_reference.numerics.rounding_kernels import NormalKernel, StochasticKernel, kernel_for
from mp_reference.spec.formats import FloatFormat

DETERMINISTIC = [rounding for rounding in ROUNDINGS if rounding != "stochastic"]
BARE = [FloatFormat(f"e{bits}m0", exponent_bits=bits, mantissa_bits=0, specials="fn") for bits in (4, 7)]
COARSE = FloatFormat("e3m2coarse", exponent_bits=3, mantissa_bits=2, bias=-20)


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("fmt", BARE, ids=lambda fmt: fmt.name)
def test_formats_of_one_digit_round_like_the_oracle(fmt, rounding, oracle):
    powers = 2.0 ** np.arange(fmt.min_exponent - 2, min(fmt.max_exponent + 3, 126))
    x = np.concatenate([powers * factor for factor in (1, 1.25, 1.5, 1.75, -1, -1.5)]).astype(np.float32)
    wanted = oracle(x, fmt, rounding=rounding)
    for carrier in (np.float32, np.float64):
        assert differing_bits(round_to(x.astype(carrier), fmt, rounding).astype(np.float64), wanted) == 0


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_what_is_tiny_beside_the_smallest_number_still_counts(rounding, oracle):
    tiny = [0.0, 1e-45, 1e-30, 1.0, COARSE.min_subnormal / 2, COARSE.min_subnormal * 1.5, COARSE.max]
    x = np.float64([*tiny, 5e-324])
    x = np.concatenate([x, -x])
    wanted = oracle(x, COARSE, rounding=rounding)
    assert differing_bits(round_to(x, COARSE, rounding), wanted) == 0
    narrow = x.astype(np.float32)
    wanted = oracle(narrow, COARSE, rounding=rounding)
    assert differing_bits(round_to(narrow, COARSE, rounding).astype(np.float64), wanted) == 0


@pytest.mark.parametrize("rounding", ["toward-zero", "to-odd", "stochastic"])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.E4M3FN, mp.E5M2], ids=lambda fmt: fmt.name)
def test_few_subnormals_in_a_chunk_are_rounded_as_many_are(fmt, rounding):
    rng = np.random.default_rng(5)
    x = rng.uniform(fmt.min_normal, fmt.max / 4, 4000).astype(np.float32) * rng.choice(np.float32([-1, 1]), 4000)
    few = rng.choice(4000, 100, replace=False)
    x[few] = (rng.uniform(-1, 1, 100) * fmt.min_normal).astype(np.float32)
    x[few[0]] = -0.0
    random = rng.integers(0, 65536, 4000, dtype=np.uint16) if rounding == "stochastic" else None
    kernel = kernel_for(fmt, rounding, "ieee", "", "float32")
    assert isinstance(kernel, NormalKernel)
    got = round_to(x, fmt, rounding, random_bits=random)
    alone = round_to(x.astype(np.float64), fmt, rounding, random_bits=random)  # float64 carriers go the general way
    assert same_bits(got, alone.astype(np.float32)).all()
    assert (got != x).any()


def test_stochastic_rounding_of_mostly_subnormals_goes_the_general_way():
    kernel = kernel_for(mp.E4M3FN, "stochastic", "ieee", "", "float32")
    assert isinstance(kernel, NormalKernel)
    assert isinstance(kernel.general, StochasticKernel)
    rng = np.random.default_rng(6)
    x = (rng.standard_normal(5000) * 1e-3).astype(np.float32)
    random = rng.integers(0, 256, 5000, dtype=np.uint8)
    got = round_to(x, mp.E4M3FN, "stochastic", random_bits=random)
    wanted = round_to(x.astype(np.float64), mp.E4M3FN, "stochastic", random_bits=random)
    assert same_bits(got, wanted.astype(np.float32)).all()


def test_nan_keeps_its_sign_on_the_way_to_codes_of_16_bits():
    x = np.float32([np.nan, -np.nan, 1.0, -1.0])
    for fmt in (mp.FP16, mp.BF16):
        for values in (x, np.repeat(x, 2)[::2]):
            assert (encode(values, fmt) >> (fmt.bits - 1)).tolist() == [0, 1, 0, 1], fmt.name


def test_a_width_for_random_bits_is_refused_where_none_are_used():
    with pytest.raises(ValueError, match="random_bits are for rounding='stochastic', not 'nearest-even'; leave them"):
        encode(np.ones(3, np.float32), mp.FP16, random_width=3)


@pytest.mark.parametrize("rounding", ["nearest-even", "nearest-away"])
@pytest.mark.parametrize("zeros", range(5))
@pytest.mark.parametrize("fmt", [mp.FP16, mp.E4M3FN, mp.E5M2], ids=lambda fmt: fmt.name)
def test_few_zeros_in_a_chunk_keep_their_signs_as_many_do(fmt, zeros, rounding, oracle):
    """What rounds to zero, what only looks like it, and zeros themselves, each with both signs, at random places."""
    rng = np.random.default_rng([zeros, fmt.bits])
    unit = fmt.min_subnormal
    small = np.float32([unit / 2, -unit / 2, -0.0, 0.0, unit * 0.51, -unit * 0.75, unit / 7, -unit / 7, 1e-45, -1e-45])
    for overflows in (False, True):
        for in_place in (False, True):
            x = rng.uniform(1, 2, 40).astype(np.float32)
            x[rng.permutation(40)[:zeros]] = rng.choice(small, zeros)
            if overflows:
                x[rng.integers(40)] = -np.inf
            wanted = oracle(x, fmt, rounding=rounding)
            got = round_to(x, fmt, rounding, out=x if in_place else None)
            assert differing_bits(got.astype(np.float64), wanted) == 0
