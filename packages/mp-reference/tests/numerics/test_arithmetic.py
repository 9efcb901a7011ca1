"""Arithmetic against the oracle, exhaustively where the pairs are finite, and against NumPy and ml_dtypes."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import arithmetic, exact
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.codec import code_dtype
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.rounding import ROUNDINGS
from mp_reference.spec.formats import FORMATS

DETERMINISTIC = [rounding for rounding in ROUNDINGS if rounding != "stochastic"]
OPERATIONS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "sqrt": 1, "rsqrt": 1, "fma": 3}
SIGNED_ZERO = ("add", "sub", "fma")  # where toward-negative decides the sign of an exact zero


def oracle(name, fmt, rounding, operands):
    downward = {"downward": rounding == "toward-negative"} if name in SIGNED_ZERO else {}
    with np.errstate(invalid="ignore"):  # signalling NaNs are data
        values = [operand.astype(np.float64).tolist() for operand in operands]
    results = [getattr(exact, name)(*row, **downward) for row in zip(*values, strict=True)]
    rounded = [exact.round_exact(result, fmt, rounding) for result in results]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(rounded, np.float64).astype(fmt.dtype)


def drawn(fmt, size, rng):
    """Half random codes, half numbers near one, where cancellation and ties are common."""
    codes = rng.integers(0, 2**fmt.bits, size).astype(code_dtype(fmt)).view(fmt.dtype)
    near = (1 + rng.integers(0, 2 ** (fmt.mantissa_bits + 1), size) * fmt.epsilon) * 2.0 ** rng.integers(-2, 3, size)
    near = np.where(rng.random(size) < 0.5, near, -near).astype(np.float32).astype(fmt.dtype)
    return np.where(rng.random(size) < 0.5, codes, near)


def operands_for(name, fmt, size, rng):
    operands = [drawn(fmt, size, rng) for _ in range(OPERATIONS[name])]
    if name == "fma":  # some of them cancel
        with np.errstate(all="ignore"):
            product = -(operands[0].astype(np.float64) * operands[1].astype(np.float64))
            operands[2] = np.where(rng.random(size) < 0.3, product.astype(fmt.dtype), operands[2])
    return operands


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("fmt", [mp.FP32, mp.FP16, mp.BF16, mp.E4M3FN, mp.E5M2], ids=lambda fmt: fmt.name)
def test_an_operation_is_the_exact_result_rounded_once(fmt, name, rounding):
    rng = np.random.default_rng([fmt.bits, fmt.mantissa_bits, len(name), len(rounding)])
    operands = operands_for(name, fmt, 150, rng)
    got = getattr(arithmetic, name)(*operands, rounding=rounding)
    assert got.dtype == fmt.dtype
    assert differing_bits(got, oracle(name, fmt, rounding, operands)) == 0


def all_pairs(fmt):
    codes = np.arange(1 << fmt.bits).astype(code_dtype(fmt)).view(fmt.dtype)
    return np.repeat(codes, codes.size), np.tile(codes, codes.size)


def oracle_of_pairs(name, fmt, rounding, a, b):
    """The oracle on one pair of each distinct result: float64 holds sums and products of these formats exactly and
    tells their quotients apart, so pairs with one float64 result have one exact result."""
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    with np.errstate(all="ignore"):
        wide = operation(a.astype(np.float64), b.astype(np.float64))
    wide = np.where(np.isnan(wide), np.nan, wide)
    _, first, back = np.unique(wide.view(np.uint64), return_index=True, return_inverse=True)
    return oracle(name, fmt, rounding, (a[first], b[first]))[back]


EIGHT_BITS = [fmt for fmt in FORMATS.values() if fmt.bits == 8]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=lambda fmt: fmt.name)
def test_all_pairs_of_an_8_bit_format_are_the_oracles(fmt, name):
    a, b = all_pairs(fmt)
    for rounding in ("nearest-even", "toward-zero") if name in ("mul", "div") else ("nearest-even",):
        got = getattr(arithmetic, name)(a, b, rounding=rounding)
        assert differing_bits(got, oracle_of_pairs(name, fmt, rounding, a, b)) == 0


@pytest.mark.parametrize("fmt", [mp.E2M1FN, mp.E2M3FN, mp.E3M2FN], ids=lambda fmt: fmt.name)
def test_all_pairs_of_the_smallest_formats_are_the_oracles_in_every_rounding(fmt):
    a, b = all_pairs(fmt)
    for name, rounding in itertools.product(["add", "sub", "mul"], DETERMINISTIC):
        got = getattr(arithmetic, name)(a, b, rounding=rounding)
        if rounding == "toward-negative":  # the sign of an exact zero depends on the operands
            assert differing_bits(got, oracle(name, fmt, rounding, (a, b))) == 0
        else:
            assert differing_bits(got, oracle_of_pairs(name, fmt, rounding, a, b)) == 0


@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16], ids=lambda fmt: fmt.name)
def test_roots_of_every_16_bit_code_are_nearest(fmt):
    x = np.arange(1 << 16).astype(np.uint16).view(fmt.dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs are data
        wide = x.astype(np.float64)
    root = arithmetic.sqrt(x).astype(np.float64)
    usual = np.isfinite(wide) & (wide > 0)
    half_ulp = np.exp2(np.floor(np.log2(np.where(usual, root, 1))) - fmt.mantissa_bits - 1)
    below, above = root[usual] - half_ulp[usual], root[usual] + half_ulp[usual]
    assert (below**2 <= wide[usual]).all()  # squares of 12 bits: exact in float64
    assert (above**2 >= wide[usual]).all()
    assert np.isnan(root[np.isnan(wide) | (wide < 0)]).all()
    assert np.isposinf(root[np.isposinf(wide)]).all()
    assert np.signbit(arithmetic.sqrt(x[wide == 0])).tolist() == [False, True]


@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16], ids=lambda fmt: fmt.name)
def test_reciprocal_roots_of_16_bit_codes_are_the_oracles(fmt):
    x = np.arange(0, 1 << 15, 13).astype(np.uint16).view(fmt.dtype)
    for rounding in ("nearest-even", "toward-positive"):
        assert differing_bits(arithmetic.rsqrt(x, rounding=rounding), oracle("rsqrt", fmt, rounding, (x,))) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_nearest_even_is_numpys_and_ml_dtypes_arithmetic(dtype):
    rng = np.random.default_rng(0)
    width = 8 * np.dtype(dtype).itemsize
    a, b = rng.integers(0, 2**width, (2, 200_000), dtype=np.uint32).astype(f"u{width // 8}").view(dtype)
    with np.errstate(all="ignore"):
        for ours, theirs in ((mp.add, np.add), (mp.sub, np.subtract), (mp.mul, np.multiply), (mp.div, np.divide)):
            assert differing_bits(ours(a, b), theirs(a, b)) == 0
        assert differing_bits(mp.sqrt(a), np.sqrt(a)) == 0


@pytest.mark.parametrize("fmt", [mp.FP32, mp.FP16, mp.BF16], ids=lambda fmt: fmt.name)
def test_long_results_alone_need_no_repair(fmt):
    near_one = [1.0009765625, 1.0029296875] if fmt != mp.BF16 else [1.0078125, 1.0234375]
    x = np.array(near_one, fmt.dtype)  # their products have twice as many bits, their roots never end
    for name, operands in [("fma", (x, x[::-1], x)), ("rsqrt", (x,)), ("mul", (x, x[::-1])), ("div", (x, x[::-1]))]:
        got = getattr(arithmetic, name)(*operands, rounding="toward-zero")
        assert differing_bits(got, oracle(name, fmt, "toward-zero", operands)) == 0
    irrational = np.sqrt(np.array([2.0, 3.0], fmt.dtype))
    added = arithmetic.add(irrational, np.array(1e-3, fmt.dtype), rounding="toward-positive")
    assert (added > irrational).all()


LANDMARKS = np.uint16([
    0x0000, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x07FF, 0x0800, 0x13FF, 0x2FFF, 0x3000, 0x3555, 0x37FF, 0x3800,
    0x3BFF, 0x3C00, 0x3C01, 0x3FFF, 0x4000, 0x4200, 0x5BFF, 0x6400, 0x6800, 0x7800, 0x7BFE, 0x7BFF, 0x7C00, 0x7E00,
])  # fmt: skip


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_every_fp16_code_with_landmarks_is_the_float64_result_rounded_once(name, rounding):
    """float64 holds sums and products of fp16 exactly, and no quotient of 11 bits lies so near a midpoint as to err."""
    codes = np.concatenate([LANDMARKS, LANDMARKS | 0x8000]).view(np.float16)[:, None]
    x = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    exactly = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    for a, b in ((x, codes), (codes, x)):
        with np.errstate(all="ignore"):
            wide = exactly(a.astype(np.float64), b.astype(np.float64))
            expected = mp.round_to(wide, mp.FP16, rounding).astype(np.float16)
            if rounding == "toward-negative" and name in SIGNED_ZERO:
                second = np.signbit(b) != (name == "sub")
                expected = np.where((wide == 0) & (np.signbit(a) | second), np.float16(-0.0), expected)
            got = getattr(arithmetic, name)(a, b, rounding=rounding)
        assert differing_bits(got, expected) == 0


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "sqrt", "fma", "rem"])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.E5M2, mp.E4M3FNUZ, mp.E2M3FN], ids=lambda fmt: fmt.name)
def test_both_carriers_hold_results_that_round_alike(fmt, name):
    rng = np.random.default_rng([fmt.bits, fmt.bias, len(name)])
    operands = [drawn(fmt, 300_000, rng).astype(np.float32) for _ in range(OPERATIONS.get(name, 2))]
    if name == "fma":  # products in the middle of two numbers, and a trace that decides
        operands[2][::3] = rng.choice(np.float32([fmt.min_subnormal, -fmt.min_subnormal, 0]), operands[2][::3].size)
    how = {"precision": fmt.mantissa_bits + 1, "unit": fmt.min_subnormal}
    for rounding in DETERMINISTIC:
        with np.errstate(all="ignore"):
            short = ODD[name](*operands, downward=rounding == "toward-negative", **how)
            long = ODD[name](*(x.astype(np.float64) for x in operands), downward=rounding == "toward-negative", **how)
        assert (short.dtype, long.dtype) == (np.float32, np.float64)
        assert differing_bits(mp.round_to(short, fmt, rounding), mp.round_to(long, fmt, rounding).astype("f4")) == 0


@pytest.mark.parametrize(("bits", "carrier"), [(24, np.float64), (11, np.float32)], ids=["fp32", "fp16"])
def test_two_roundings_of_a_reciprocal_root_step_over_no_short_number(bits, carrier):
    """Every fraction of ``bits`` bits, both parities of the exponent: what comes near a short number is on its side."""
    integer, dropped = (np.int64, 52 - bits) if carrier is np.float64 else (np.int32, 23 - bits)
    found = 0
    for first in np.array_split(np.arange(1 << (bits - 1), 1 << bits, dtype=np.float64), 8):
        for x in (first.astype(carrier), (2 * first).astype(carrier)):
            pattern = ODD["rsqrt"](x).view(integer)
            to_short = (pattern + integer(1 << (dropped - 1)) & ~integer((1 << dropped) - 1)) - pattern
            for i in np.flatnonzero(np.abs(to_short) <= 4):
                exactly, short = 1 / Fraction(float(x[i])), Fraction(float((pattern[i] + to_short[i]).view(carrier)))
                assert np.sign(exactly - short**2) == -np.sign(to_short[i])
                found += 1
    assert found


@pytest.mark.parametrize("fmt", [mp.FP32, mp.FP16, mp.BF16, mp.E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_smallest_sums_that_their_carrier_cannot_hold_are_repaired(fmt, sign):
    """Alone in a chunk, where all sums are of one sign and barely too large to be exact."""
    carrier_bits = 24 if fmt in (mp.FP16, mp.E5M2) else 53
    large = min(2.0**carrier_bits * fmt.min_subnormal, fmt.max / 4)
    a = np.full(100, sign * large).astype(np.float32).astype(fmt.dtype)
    b = np.full(100, sign * fmt.min_subnormal).astype(np.float32).astype(fmt.dtype)
    outward = "toward-positive" if sign > 0 else "toward-negative"
    one = np.float32(1).astype(fmt.dtype)
    for got in (mp.add(a, b, rounding=outward), mp.sub(a, -b, rounding=outward), mp.fma(a, one, b, rounding=outward)):
        assert (got.astype(np.float64) == sign * large * (1 + fmt.epsilon)).all()


def test_a_few_short_results_among_many_long_ones_are_found():
    rng = np.random.default_rng(6)
    a, b = rng.uniform(1, 2, (2, 2000)).astype(np.float32)
    tiny = np.float32(2.0**-60)
    a[::40], b[::40] = 1.5, tiny  # the sum is 1.5 and a little
    assert (mp.add(a, b, rounding="toward-positive")[::40] == np.float32(1.5 + 2.0**-23)).all()
    assert (mp.add(a, b, rounding="toward-negative")[::40] == np.float32(1.5)).all()
    assert (mp.fma(a, a, -tiny * b, rounding="toward-zero")[::40] == np.float32(2.25 - 2.0**-22)).all()
    assert (mp.sqrt(a[a != 1.5], rounding="toward-zero") <= np.sqrt(a[a != 1.5].astype(np.float64))).all()


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("fmt", [mp.FP32, mp.FP16, mp.BF16, mp.E4M3FN], ids=lambda fmt: fmt.name)
def test_what_is_exact_in_every_place_stays_so(fmt, rounding):
    x = np.full(100, 1.5, np.float32).astype(fmt.dtype)
    for got, wanted in ((mp.add(x, x, rounding), 3), (mp.div(x, x, rounding), 1), (mp.fma(x, x, -x, rounding), 0.75)):
        assert (got.astype(np.float64) == wanted).all()


@pytest.mark.parametrize("fmt", [mp.FP32, mp.FP16, mp.BF16, mp.E4M3FN], ids=lambda fmt: fmt.name)
def test_remainders_are_the_oracles(fmt):
    rng = np.random.default_rng(4)
    operands = [drawn(fmt, 2000, rng), drawn(fmt, 2000, rng)]
    assert differing_bits(arithmetic.rem(*operands), oracle("rem", fmt, "toward-zero", operands)) == 0


def test_a_result_that_the_format_cannot_say_is_refused():
    with pytest.raises(ValueError, match="is NaN and float4_e2m1fn has none"):
        mp.div(np.zeros(2, mp.E2M1FN.dtype), np.zeros(2, mp.E2M1FN.dtype))


def test_fma_in_fp16_is_not_what_float32_gives():
    a, b, c = np.float16([1.9921875]), np.float16([1.625]), np.float16([-(2.0**-24)])
    assert mp.fma(a, b, c) == np.float16(3.236328125)
    through_float32 = (a.astype(np.float32) * b.astype(np.float32) + c.astype(np.float32)).astype(np.float16)
    assert through_float32 == np.float16(3.23828125)


def test_operands_broadcast_and_keep_their_dtype():
    a, b = np.ones((3, 1), np.float16), np.ones(4, np.float16)
    for rounding in ("nearest-even", "toward-zero"):
        assert mp.add(a, b, rounding=rounding).shape == (3, 4)
        assert mp.fma(a, b, np.float16(1), rounding=rounding).dtype == np.float16
    assert mp.add(np.zeros((0, 2), np.float16), b[:2]).shape == (0, 2)


@pytest.mark.parametrize("dtype", [">f2", ">f4"])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_operands_of_the_other_byte_order_are_the_same_numbers(dtype, rounding):
    swapped = np.array([1.5, -2.25, 3.0, 0.1], dtype)
    here = swapped.astype(swapped.dtype.newbyteorder("="))
    for name, count in (("add", 2), ("mul", 2), ("div", 2), ("sqrt", 1), ("fma", 3)):
        operation = getattr(arithmetic, name)
        got, wanted = operation(*[swapped] * count, rounding=rounding), operation(*[here] * count, rounding=rounding)
        assert got.dtype.isnative
        assert differing_bits(got, wanted) == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: mp.add(np.float16(1), np.float32(1)),
            TypeError,
            "add needs operands of one dtype, got float16 and float32; widen the narrower with .astype, which is exact",
        ),
        (lambda: mp.mul(1.0, 2.0), TypeError, r"got float64; cast it with mp.cast\(x, mp.FP32\)"),
        (lambda: mp.sqrt(np.int32(1)), TypeError, "dtype int32 stores none of the named formats"),
        (lambda: mp.div(np.float16(1), np.float16(1), rounding="up"), ValueError, "rounding='up' must be one of"),
        (
            lambda: mp.add(np.float16(1), np.float16(1), rounding="stochastic"),
            ValueError,
            r"add has no random bits; compute in float32 and use mp.round_to\(..., 'stochastic'\)",
        ),
    ],
)
def test_bad_operands_are_refused_with_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()
