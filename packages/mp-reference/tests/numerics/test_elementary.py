"""Elementary functions against mpmath: digests of verified tables, a sample every time, every input by night.

``data/elementary_digests.json`` holds the SHA-256 of each table as it was when every one of its 65,536 entries had been
compared with mpmath; ``HYPOTHESIS_PROFILE=nightly`` compares them all again, which takes some minutes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import elementary, exact
from mp_reference.numerics.bits import codes_of, differing_bits, same_bits
from mp_reference.numerics.codec import decode
from mp_reference.numerics.elementary import FUNCTIONS
from mp_reference.numerics.power import pow as power
from mp_reference.numerics.power import side_of_power

mpmath = pytest.importorskip("mpmath", reason="the high-precision truth comes with the test extra: pip install mpmath")

DIGESTS = json.loads((Path(__file__).parents[1] / "data" / "elementary_digests.json").read_text())
FORMATS = {"fp16": mp.FP16, "bf16": mp.BF16}
nightly = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="some minutes; HYPOTHESIS_PROFILE=nightly runs it"
)


def sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


TRUTH = {
    "exp": mpmath.exp,
    "exp2": lambda x: mpmath.power(2, x),
    "expm1": mpmath.expm1,
    "log": mpmath.log,
    "log2": lambda x: mpmath.log(x) / mpmath.ln2,
    "log1p": mpmath.log1p,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * sigmoid(2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf(44715) / 10**6 * x**3)),
    "softplus": lambda x: max(x, 0) + mpmath.log1p(mpmath.exp(-abs(x))),
}


def every_input(fmt):
    return np.arange(65536).astype(np.uint16).view(fmt.dtype)


def truth(name, x, fmt):
    """The correctly rounded value of a finite argument, from 220 bits, or 500 where it hugs a simpler function."""
    if x == 0 and name not in ("log", "log2"):
        return exact.round_exact(float(FUNCTIONS[name][0](x)), fmt)
    if name in ("log", "log2", "log1p") and x <= (0 if name != "log1p" else -1):
        return -math.inf if x == (0 if name != "log1p" else -1) else math.nan
    if abs(x) > 200 and name not in ("log", "log2", "log1p", "sin", "cos"):
        return limit(name, x, fmt)
    with mpmath.workprec(500 if abs(x) < 2**-20 else 220):
        value = TRUTH[name](mpmath.mpf(x))
        if value == 0:
            return 0.0
        return exact.round_exact(as_fraction(value), fmt)


def as_fraction(value):
    sign, mantissa, exponent, _ = value._mpf_
    return Fraction((-1) ** sign * int(mantissa)) * Fraction(2) ** exponent


def limit(name, x, fmt):
    """What every one of the other functions is past 200, rounded."""
    at_minus_inf, at_inf = FUNCTIONS[name][1:]
    if x < 0:
        return at_minus_inf
    return x if name in ("silu", "gelu", "gelu_tanh", "softplus") else at_inf


def assert_rounded(name, fmt, codes):
    x = codes.view(fmt.dtype)
    got = getattr(elementary, name)(x)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(x)
        wanted = np.array([truth(name, value, fmt) for value in x[finite].astype(np.float64).tolist()])
        got = got[finite].astype(np.float64)
    differ = np.flatnonzero(~same_bits(got, wanted))
    assert differ.size == 0, [(float(x[finite][i]).hex(), got[i], wanted[i]) for i in differ[:3]]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_table_is_the_one_that_was_verified(name, fmt):
    table = getattr(elementary, name)(every_input(FORMATS[fmt]))
    codes = np.where(np.isnan(table), 0xFFFF, codes_of(table)).astype("<u2")  # every NaN is the same
    assert hashlib.sha256(codes.tobytes()).hexdigest() == DIGESTS[name][fmt]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_is_correctly_rounded(name, fmt):
    rng = np.random.default_rng([len(name), len(fmt), ord(name[0])])
    assert_rounded(name, FORMATS[fmt], rng.choice(65536, 150, replace=False).astype(np.uint16))


@nightly
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_input_is_correctly_rounded(name, fmt):
    assert_rounded(name, FORMATS[fmt], np.arange(65536).astype(np.uint16))


@pytest.mark.parametrize(
    ("name", "fmt", "code"),
    [
        ("sigmoid", "fp16", 0x9000),  # 2**-37.6 of itself from a midpoint, the closest of all that are not next to one
        ("silu", "fp16", 0x9000),
        ("silu", "bf16", 0x0001),  # 2**-134 from one
        ("silu", "bf16", 0x8001),
        ("gelu", "bf16", 0x0003),
        ("gelu", "bf16", 0x8003),
        ("gelu_tanh", "bf16", 0x0001),
        ("exp2", "fp16", 0xCE40),  # -25: the midpoint between zero and the smallest number
        ("exp2", "bf16", 0xC306),  # -134: likewise
    ],
)
def test_the_hardest_inputs_are_correctly_rounded(name, fmt, code):
    assert_rounded(name, FORMATS[fmt], np.array([code], np.uint16))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_limits_and_signed_zeros_are_right(name, fmt):
    x = np.float32([-np.inf, np.inf, np.nan, -0.0]).astype(FORMATS[fmt].dtype)
    got = getattr(elementary, name)(x).astype(np.float64)
    odd = {"expm1": -0.0, "log1p": -0.0, "sin": -0.0, "tanh": -0.0, "erf": -0.0, "silu": -0.0, "gelu": -0.0}
    odd |= {"gelu_tanh": -0.0, "exp": 1.0, "exp2": 1.0, "cos": 1.0, "sigmoid": 0.5, "log": -np.inf, "log2": -np.inf}
    at_zero = odd.get(name, 0.69140625 if fmt == "bf16" else 0.693359375)
    assert differing_bits(got, np.array([*FUNCTIONS[name][1:], np.nan, at_zero])) == 0


def test_gelu_and_silu_of_minus_infinity_are_minus_zero():
    x = np.float16([-np.inf])
    for function in (elementary.gelu, elementary.gelu_tanh, elementary.silu):
        assert differing_bits(function(x), np.float16([-0.0])) == 0


def test_8_bit_formats_have_their_functions_too():
    x = np.arange(256).astype(np.uint8).view(mp.E5M2.dtype)
    got = elementary.exp(x).astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = np.exp(x.astype(np.float64)).astype(np.float32).astype(mp.E5M2.dtype).astype(np.float64)
    assert differing_bits(got, wanted) == 0


@pytest.mark.parametrize("name", ["log", "log2", "log1p"])
def test_functions_of_formats_without_nan_refuse_only_what_they_cannot_say(name):
    one_and_two = np.array([1.0, 2.0], mp.E2M1FN.dtype)
    wanted = [exact.round_exact(FUNCTIONS[name][0](x), mp.E2M1FN) for x in (1.0, 2.0)]
    assert getattr(elementary, name)(one_and_two).astype(float).tolist() == wanted
    with pytest.raises(ValueError, match=r"element 1 is NaN and float4_e2m1fn has none; replace NaN first"):
        getattr(elementary, name)(np.array([1.0, -2.0], mp.E2M1FN.dtype))


def test_float32_is_refused_with_the_way_out():
    for call in (elementary.exp, lambda x: power(x, x)):
        with pytest.raises(TypeError, match=r"at most 16 bits, got float32; cast with mp.cast\(x, mp.BF16\)"):
            call(np.float32([1]))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("exponent", [2.0, 3.0, -1.0, -2.0, 1.0, 5.0])
def test_integer_powers_of_every_input_are_exact_and_rounded_once(fmt, exponent):
    x = every_input(fmt)[::7]
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    got = power(x, np.array(exponent, np.float32).astype(fmt.dtype)).astype(np.float64)
    usual = np.isfinite(wide) & (wide != 0)
    wanted = [exact.round_exact(Fraction(value) ** int(exponent), fmt) for value in wide[usual].tolist()]
    assert differing_bits(got[usual], np.array(wanted)) == 0


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_roots_as_powers_are_the_roots(fmt):
    x = every_input(fmt)[1 : 0x7C00 if fmt is mp.FP16 else 0x7F80]
    half = np.array(0.5, np.float32).astype(fmt.dtype)
    assert differing_bits(power(x, half), mp.sqrt(x)) == 0
    from mp_reference.numerics.arithmetic import rsqrt

    assert differing_bits(power(x, -half), rsqrt(x)) == 0


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_random_powers_are_correctly_rounded(fmt):
    rng = np.random.default_rng(0)
    x = np.abs(decode(rng.integers(0, 65536, 3000, dtype=np.uint16), fmt))
    with np.errstate(all="ignore"):
        y = (rng.uniform(-20, 20, 3000) / np.abs(np.log2(x))).astype(np.float32)
    usual = np.isfinite(x) & (x != 0) & (x != 1) & np.isfinite(y) & (y != 0)
    x, y = x[usual].astype(fmt.dtype), y[usual].astype(fmt.dtype)
    got = power(x, y).astype(np.float64)
    with mpmath.workprec(250):
        values = [mpmath.power(mpmath.mpf(float(a)), mpmath.mpf(float(b))) for a, b in zip(x, y, strict=True)]
        wanted = [exact.round_exact(as_fraction(value), fmt) for value in values]
    assert differing_bits(got, np.array(wanted)) == 0


def test_special_powers_are_those_of_ieee():
    inf, nan = np.inf, np.nan
    cases = [
        (nan, 0.0, 1.0), (1.0, nan, 1.0), (-1.0, inf, 1.0), (0.0, -1.0, inf), (-0.0, -3.0, -inf), (-0.0, -2.0, inf),
        (-0.0, 3.0, -0.0), (-2.0, 3.0, -8.0), (-2.0, 0.5, nan), (inf, -1.0, 0.0), (-inf, 3.0, -inf), (-inf, -3.0, -0.0),
        (0.5, inf, 0.0), (2.0, -inf, 0.0), (2.0, nan, nan),
    ]  # fmt: skip
    x, y, wanted = np.array(cases).T.astype(np.float16)
    assert differing_bits(power(x, y), wanted) == 0
    for base, exponent, limit in ((-inf, 0.5, inf), (-0.0, 0.5, 0.0), (-inf, 3.0, -inf), (-0.0, -0.5, inf)):
        one_exponent = power(np.full(3, base, np.float16), np.float16(exponent))  # where NumPy takes a root instead
        assert differing_bits(one_exponent, np.full(3, limit, np.float16)) == 0
    assert power(np.float16(2), np.float16(3)).shape == ()
    assert power(np.ones((0, 2), np.float16), np.float16(3)).shape == (0, 2)


def test_the_side_of_a_power_is_decided_exactly():
    assert side_of_power(1.5, 2.0, 2.25) == 0
    assert side_of_power(2.0, -25.0, 2.0**-25) == 0
    assert side_of_power(0.25, 100.0, 2.0**-200) == 0
    assert side_of_power(6.25, 0.5, 2.5) == 0
    assert side_of_power(6.25, 1.5, 15.625) == 0
    for x, y in [(3.0, 0.5), (2.0, 0.3125), (1.0009765625, 300.0), (7.0, -0.75)]:
        value = x**y
        assert side_of_power(x, y, value * (1 - 2.0**-50)) == 1
        assert side_of_power(x, y, value * (1 + 2.0**-50)) == -1
    for x in range(2, 300):  # some of these roots are closer to a float64 than the first precision tells
        bound = math.sqrt(x)
        square = Fraction(bound) ** 2
        assert side_of_power(x, 0.5, bound) == (x > square) - (x < square)
