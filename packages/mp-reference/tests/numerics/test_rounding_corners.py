"""Rounding where a chunk, a kernel or an argument is at its edge: every way through it gives what the oracle gives."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics import rounding as walking
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.rounding import ROUNDINGS, check_rounding, round_to
from mp_reference.numerics.rounding_kernels import kernel_for
from mp_reference.numerics.workspace import Workspace
from mp_reference.spec.formats import FORMATS, FloatFormat

DETERMINISTIC = [rounding for rounding in ROUNDINGS if rounding != "stochastic"]
FLUSHES = [True, "flush-after", "flush-before"]
LONG = FloatFormat("e8m22", exponent_bits=8, mantissa_bits=22)  # one bit shorter than fp32
NEAR = [FloatFormat(f"e6m{bits}", exponent_bits=6, mantissa_bits=bits) for bits in (20, 21, 22)]
HIGH = FloatFormat("e7m3high", exponent_bits=7, mantissa_bits=3, bias=5)  # a large number times its ulp leaves float32
SMALL = FloatFormat("e4m3small", exponent_bits=4, mantissa_bits=3, bias=20)  # all of its numbers are below 1
POWERS = FloatFormat("e5m0", exponent_bits=5, mantissa_bits=0)  # one digit: every number is odd
KINDS = [mp.FP16, mp.E4M3FN, mp.E4M3FNUZ, mp.E2M1FN, mp.E8M0FNU, mp.BF16, mp.TF32, LONG, *NEAR, HIGH, SMALL, POWERS]
WIDTHS = [1, 5, 10, 11, 12, 15, 16, 17, 22, 23, 24, 27, 28, 29, 30, 31, 32]


def places(fmt):
    """A few values of each kind: zeros, around half the smallest number, a normal one, around the largest, and past."""
    tiny, one = fmt.min_subnormal, 1.0 if fmt.max >= 1 else fmt.max
    with np.errstate(over="ignore"):
        return {
            "zeros": np.float64([0.0, -0.0]),
            "below half the smallest": tiny * np.float64([0.25, 0.4375, -0.4375]),
            "half the smallest": tiny * np.float64([0.5, -0.5]),
            "above half the smallest": tiny * np.float64([0.5625, 0.75, -0.9375]),
            "subnormal": fmt.min_normal * np.float64([0.5, 0.7, -0.96875]),
            "smallest normal": fmt.min_normal * np.float64([1.0, 1 - fmt.epsilon / 4, 1 + fmt.epsilon / 2]),
            "normal": one * np.float64([1.0, 1 + fmt.epsilon / 2, -1 - fmt.epsilon * 0.75]),
            "a binade below": one * np.float64([0.5, 0.75, -0.875, 0.5 + fmt.epsilon]),
            "the next float": one
            * np.nextafter(np.float32([1, -1, 1, -1]), np.float32([2, -2, 0, 0])).astype(np.float64),
            "the last binade": fmt.max * np.float64([0.5, 0.625, -0.8125, 1.0]),
            "past the largest": fmt.max * np.float64([1 + fmt.epsilon / 8, 1.5, 4.0, -4.0]),
            "infinite": np.float64([np.inf, -np.inf]),
            "no number": np.float64([np.nan, 1.0]),
        }


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("fmt", KINDS, ids=lambda fmt: fmt.name)
def test_a_chunk_of_one_kind_of_values_rounds_like_the_oracle(fmt, rounding, oracle):
    for subnormals in FLUSHES:
        for overflow in ("ieee", "saturate"):
            how = {"rounding": rounding, "overflow": overflow, "subnormals": subnormals}
            for kind, values in places(fmt).items():
                for carrier in (np.float32, np.float64):
                    with np.errstate(over="ignore"):
                        x = values.astype(carrier)
                    for part in (x, x[:1]):
                        wanted = oracle(part.astype(np.float64), fmt, **how)
                        there = part.copy()
                        for got in (round_to(part, fmt, **how), round_to(there, fmt, out=there, **how)):
                            assert differing_bits(got.astype(np.float64), wanted) == 0, (kind, carrier, overflow)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fmt", KINDS, ids=lambda fmt: fmt.name)
def test_a_chunk_of_one_kind_of_values_rounds_stochastically_as_defined(fmt, width):
    top = 2**width - 1
    for kind, values in places(fmt).items():
        for carrier in (np.float32, np.float64):
            with np.errstate(over="ignore"):
                x = values.astype(carrier)
            for drawn in {0, 1, top // 2, top // 2 + 1, top // 4, max(top - 1, 0), top}:
                random = np.full(x.shape, drawn | (-1 << width) % 2**32, np.uint32)  # what lies above must not count
                how = {"random_bits": drawn, "random_width": width}
                wanted = np.array([exact.round_exact(float(value), fmt, "stochastic", **how) for value in x])
                for part in (slice(None), slice(1)):
                    got = round_to(x[part], fmt, "stochastic", random_bits=random[part], random_width=width)
                    assert differing_bits(got.astype(np.float64), wanted[part]) == 0, (kind, carrier, drawn)


@pytest.mark.parametrize("width", [*WIDTHS, 33, 51, 52, 53, 54, 63, 64])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.E4M3FN, mp.BF16, mp.FP32], ids=lambda fmt: fmt.name)
def test_numbers_go_up_from_the_very_fraction_that_the_random_bits_ask_for(fmt, width):
    top = 2**width - 1
    for drawn in (0, 1, top // 2, top // 2 + 1, top - 1, top):
        fraction = float(1 - Fraction(2 * drawn + 1, 2 ** (width + 1)))  # rounded where float64 cannot hold it
        beside = [np.nextafter(fraction, towards) for towards in (0.0, fraction, 1.0)]
        for low, unit in ((0.0, fmt.min_subnormal), (1.0, fmt.epsilon)):
            numbers = [low + part * unit for part in beside]
            for others, carrier in itertools.product(([], [fmt.max]), (np.float32, np.float64)):
                x = np.array([*numbers, *np.negative(numbers), *others]).astype(carrier)
                how = {"random_bits": drawn, "random_width": width}
                wanted = [exact.round_exact(float(value), fmt, "stochastic", **how) for value in x]
                random = np.full(x.shape, drawn, np.uint64 if width > 32 else np.uint32)
                got = round_to(x, fmt, "stochastic", random_bits=random, random_width=width)
                assert differing_bits(got.astype(np.float64), np.array(wanted)) == 0, (drawn, low, others, carrier)


@pytest.mark.parametrize("subnormals", FLUSHES)
def test_flushing_follows_the_rounding_or_comes_before_it_in_every_kernel(subnormals):
    for fmt in (mp.FP16, mp.E4M3FN, mp.BF16):
        just_below = np.nextafter(np.float32(fmt.min_normal), np.float32(0))
        x = np.float32([just_below, -just_below, fmt.min_normal, fmt.min_normal / 2])
        kept = {True: fmt.min_normal, "flush-after": fmt.min_normal, "flush-before": 0.0}[subnormals]
        small = fmt.min_normal / 2 if subnormals is True else 0.0
        wanted = np.float32([kept, -kept, fmt.min_normal, small])
        for carrier in (np.float32, np.float64):
            got = round_to(x.astype(carrier), fmt, subnormals=subnormals)
            assert differing_bits(got, wanted.astype(carrier)) == 0


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.has_nan], ids=lambda fmt: fmt.name)
def test_a_signalling_nan_among_numbers_stays_nan_alone(fmt):
    x = np.uint32([0x7F800001, 0x3F800000, 0xFF800001, 0x7FFFFFFF]).view(np.float32)
    for rounding in DETERMINISTIC:
        for overflow in ("ieee", "saturate"):
            assert np.isnan(round_to(x, fmt, rounding, overflow)).tolist() == [True, False, True, True]


@pytest.mark.parametrize("width", [1, 9, 23])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.FP32], ids=lambda fmt: fmt.name)
def test_a_generator_gives_32_bits_an_element_in_order(fmt, width):
    x = np.random.default_rng(12).standard_normal(70_000).astype(np.float32)
    got = round_to(x, fmt, "stochastic", random_bits=np.random.default_rng(13), random_width=width)
    drawn = np.frombuffer(np.random.default_rng(13).bytes(4 * x.size), np.uint32)
    assert differing_bits(got, round_to(x, fmt, "stochastic", random_bits=drawn, random_width=width)) == 0


def test_a_generators_bits_count_23_unless_fewer_are_asked_for():
    x = np.full(40_000, 1 + 2.0**-11, np.float32)
    default, widest = (
        round_to(x, mp.FP16, "stochastic", random_bits=np.random.default_rng(1), random_width=width)
        for width in (None, 23)
    )
    assert differing_bits(default, widest) == 0


def test_random_bits_are_shared_along_broadcast_axes():
    random = np.uint8([[255], [0], [128]])
    for fmt in (mp.FP16, mp.E5M2, mp.BF16):
        x = np.full((3, 4), 1 + fmt.epsilon / 2, np.float32)
        up = round_to(x, fmt, "stochastic", random_bits=random) > 1
        assert up.all(axis=1).tolist() == [True, False, True]
        assert up.any(axis=1).tolist() == [True, False, True]
    assert (round_to(x, mp.BF16, "stochastic", random_bits=np.uint8(255)) > 1).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_of_every_dtype_go_straight_into_the_format(dtype):
    info = np.iinfo(dtype)
    x = np.array([info.min, info.max, info.max // 3, info.max - 1, 1, 0], dtype)
    for fmt in (mp.FP32, mp.BF16, mp.E5M2):
        for rounding in DETERMINISTIC:
            wanted = [exact.round_exact(Fraction(int(value)), fmt, rounding) for value in x]
            got = round_to(x, fmt, rounding)
            assert got.dtype == np.float64
            assert got.tolist() == wanted


@pytest.mark.parametrize("bits", [52, 53, 54, 55, 61, 62, 63])
def test_integers_around_the_end_of_float64s_precision_round_once(bits):
    x = [2**bits + step for step in range(-3, 4)] + [2**bits + 2 ** (bits - 24) + step for step in (-1, 0, 1)]
    for values in (np.array(x, np.uint64), np.array([-value for value in x if value < 2**63], np.int64)):
        for rounding in DETERMINISTIC:
            wanted = [exact.round_exact(Fraction(int(value)), mp.FP32, rounding) for value in values]
            assert round_to(values, mp.FP32, rounding).tolist() == wanted


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_fractions_beyond_either_end_and_just_beside_ties_round_once(rounding):
    beside = [Fraction(0), Fraction(1, 2**90), Fraction(-1, 2**90)]
    ties = [Fraction(2049), Fraction(2**24 + 1), Fraction(3, 2**25), 1 + Fraction(1, 2**11), Fraction(65520)]
    beside += [Fraction(1, 2**53), Fraction(1, 2**52)]  # the last bit of 54, and of 53
    ends = [Fraction(10) ** 400, Fraction(1, 10**400), Fraction(7, 2**1080), Fraction(2**1023), Fraction(5, 3 * 2**150)]
    values = [sign * value for value in [tie + by for tie in ties for by in beside] + ends for sign in (1, -1)]
    for fmt in (mp.FP16, mp.FP32, mp.E4M3FN):
        wanted = np.array([exact.round_exact(value, fmt, rounding) for value in values])
        assert differing_bits(round_to(np.array(values, object).reshape(2, -1), fmt, rounding).ravel(), wanted) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn])
def test_narrow_floats_give_float32_in_any_stride(dtype):
    x = np.linspace(-3, 3, 24).astype(np.float32).reshape(4, 6).astype(dtype)
    for part in (x, x.T, x[::2, ::-1], x[0, 0]):
        got = round_to(part, mp.E4M3FN, "toward-zero")
        assert got.dtype == np.float32
        assert differing_bits(got, round_to(part.astype(np.float32), mp.E4M3FN, "toward-zero")) == 0


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_the_smallest_float_still_counts_beside_a_smallest_number_of_two(rounding, oracle):
    fmt = FloatFormat("e3m2two", exponent_bits=3, mantissa_bits=2, bias=-2)
    assert fmt.min_subnormal == 2.0
    among = np.concatenate([np.float32([1e-45]), np.full(99, 10.0, np.float32)])  # too few to be a kind of their own
    for x in (np.float32([1e-45, -1e-45, 1.0, 3.0, 0.0]), np.float64([5e-324, -5e-324, 1.0, 3.0, -0.0]), among):
        wanted = oracle(x.astype(np.float64), fmt, rounding=rounding)
        assert differing_bits(round_to(x, fmt, rounding).astype(np.float64), wanted) == 0


@pytest.mark.parametrize("carrier", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.E4M3FN, NEAR[0]], ids=lambda fmt: fmt.name)
def test_numbers_known_to_be_small_are_rounded_alike_but_for_the_sign_of_zero(fmt, carrier):
    tiny = fmt.min_subnormal * np.linspace(-4, 4, 65)
    x = np.concatenate([tiny, np.linspace(-0.49, 0.49, 1001) * min(fmt.max, 2.0**20)]).astype(carrier)
    bounded = kernel_for(fmt, "nearest-even", "ieee", "", x.dtype.name).bounded
    out = np.empty_like(x)
    bounded(x, out, Workspace(x.size + 3, x.dtype), None, 0)
    assert (out == round_to(x, fmt)).all()


def test_integers_of_zero_have_no_sign():
    for dtype in (np.int8, np.uint8, np.int64, np.uint64, object):
        assert not np.signbit(round_to(np.zeros(3, dtype), mp.FP16)).any()


def test_an_integer_in_a_list_counts_from_the_first_bit_that_float64_would_drop(oracle):
    for whole in (2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1):
        for rounding in DETERMINISTIC:
            wanted = exact.round_exact(Fraction(whole), mp.FP32, rounding)
            assert round_to([whole, 0.5], mp.FP32, rounding).tolist() == [wanted, 0.5]


def test_a_rounding_alone_is_a_legal_choice():
    for rounding in ROUNDINGS:
        check_rounding(rounding)


def test_threads_share_parts_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(walking, "_WORTH_SHARING", 1000)
    x = np.random.default_rng(14).standard_normal(100_001).astype(np.float32)
    for fmt in (mp.FP16, mp.BF16, mp.E4M3FN):
        assert differing_bits(round_to(x, fmt, "toward-zero", threads=2), round_to(x, fmt, "toward-zero")) == 0


def test_a_generator_serves_strided_arrays_in_their_order():
    x = np.random.default_rng(15).standard_normal(140_000).astype(np.float32)
    for fmt in (mp.FP16, mp.BF16):
        apart, together = (
            round_to(values, fmt, "stochastic", random_bits=np.random.default_rng(16))
            for values in (x[::2], x[::2].copy())
        )
        assert differing_bits(apart, together) == 0


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("exponent_bits", [6, 7])
def test_a_format_anywhere_within_float32_keeps_to_its_ends(exponent_bits, rounding, oracle):
    highest = 127 - (2**exponent_bits - 2)  # the bias whose largest exponent is 127
    for bias in range(highest, highest + 26):
        fmt = FloatFormat("moved", exponent_bits=exponent_bits, mantissa_bits=2, bias=bias)
        high, low = np.float64(fmt.max), np.float64(fmt.min_subnormal)
        x = np.concatenate([high * np.float64([1, 0.8, 0.5]), low * np.float64([0.25, 0.5, 0.75, 1, 1.5]), [2.0**-149]])
        x = np.append(x, min(high * 1.1, 3.4e38)).astype(np.float32)
        x = np.concatenate([x, -x])
        wanted = oracle(x.astype(np.float64), fmt, rounding=rounding)
        assert differing_bits(round_to(x, fmt, rounding).astype(np.float64), wanted) == 0
