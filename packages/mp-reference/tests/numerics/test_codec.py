"""Codes against ml_dtypes, NumPy and the oracle."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.codec import code_dtype, decode, encode, encode_representable, nan_code
from mp_reference.numerics.rounding import ROUNDINGS, round_to
from mp_reference.spec.formats import FORMATS, FloatFormat

NARROW = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]
CUSTOM = [
    FloatFormat("e5m4", exponent_bits=5, mantissa_bits=4),
    FloatFormat("e4m9fn", exponent_bits=4, mantissa_bits=9, specials="fn", bias=3),
    FloatFormat("e6m6fnuz", exponent_bits=6, mantissa_bits=6, specials="fnuz"),
    FloatFormat("e6m12", exponent_bits=6, mantissa_bits=12),
    FloatFormat("e3m7finite", exponent_bits=3, mantissa_bits=7, specials="finite"),
]


@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_every_code_is_what_ml_dtypes_or_numpy_says(fmt):
    codes = np.arange(1 << fmt.bits).astype(code_dtype(fmt))
    theirs = codes.view(fmt.dtype).astype(np.float32)
    assert differing_bits(decode(codes, fmt), theirs) == 0


@pytest.mark.parametrize("fmt", [*NARROW[1:], *CUSTOM], ids=lambda fmt: fmt.name)
def test_every_code_is_what_the_oracle_says_and_comes_back(fmt):
    codes = np.arange(1 << fmt.bits).astype(code_dtype(fmt))
    values = decode(codes, fmt)
    for code in codes[:: max(1, codes.size // 5000)].tolist():
        wanted, got = exact.value_of(code, fmt), float(values[code])
        assert (math.isnan(wanted) and math.isnan(got)) or (got == wanted)
        assert math.isnan(wanted) or math.copysign(1, got) == math.copysign(1, wanted)
    number = ~np.isnan(values)
    assert (encode_representable(values[number], fmt) == codes[number]).all()
    assert (encode_representable(values[number].astype(np.float64), fmt) == codes[number]).all()


@pytest.mark.parametrize("fmt", [mp.FP32, mp.TF32], ids=lambda fmt: fmt.name)
def test_codes_of_the_float32_family_are_its_upper_bits(fmt):
    pattern = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    x = pattern.view(np.float32)
    x = x[~np.isnan(x)]
    rounded = round_to(x, fmt)
    assert (encode(x, fmt) == rounded.view(np.uint32) >> (32 - fmt.bits)).all()
    assert differing_bits(decode(encode(x, fmt), fmt), rounded) == 0


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if r != "stochastic"])
@pytest.mark.parametrize("fmt", [*NARROW, *CUSTOM], ids=lambda fmt: fmt.name)
def test_encoding_rounds_as_round_to_does(fmt, rounding, edges):
    x = edges(fmt, every=max(1, 2 ** (fmt.bits - 8)))
    x = x if fmt.has_nan else x[~np.isnan(x)]
    for overflow in ("ieee", "saturate"):
        for subnormals in (True, "flush-after", "flush-before"):
            how = {"rounding": rounding, "overflow": overflow, "subnormals": subnormals}
            wanted = round_to(x, fmt, **how)
            for carried in (x, x.astype(np.float64), np.repeat(x, 2)[::2]):
                assert differing_bits(decode(encode(carried, fmt, **how), fmt), wanted) == 0


def test_encoding_fp16_gives_numpys_codes_on_every_edge(edges):
    x = edges(mp.FP16)
    with np.errstate(over="ignore"):
        theirs = x.astype(np.float16)
    assert differing_bits(encode(x, mp.FP16).view(np.float16), theirs) == 0


@pytest.mark.parametrize("bias", [131, 132, 133, 140, 146])
def test_formats_far_into_float32s_subnormals_encode_as_they_round(bias):
    for widths, specials in (((4, 0), "fn"), ((2, 1), "ieee"), ((3, 3), "fnuz"), ((5, 0), "finite"), ((1, 2), "fn")):
        try:
            fmt = FloatFormat("low", exponent_bits=widths[0], mantissa_bits=widths[1], bias=bias, specials=specials)
        except ValueError:
            continue  # this one lies below float32
        numbers = decode(np.arange(1 << fmt.bits).astype(code_dtype(fmt)), fmt)
        numbers = numbers[np.isfinite(numbers)]
        near = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), numbers * np.float32(1.25)])
        for rounding in ROUNDINGS[:-1]:
            back = decode(encode(near, fmt, rounding, "saturate"), fmt)
            assert differing_bits(back, round_to(near, fmt, rounding, "saturate")) == 0, (fmt, bias, rounding)


def test_stochastic_codes_are_those_of_round_to():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    random = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    for fmt in (mp.FP16, mp.BF16, mp.E4M3FN):
        wanted = round_to(x, fmt, "stochastic", random_bits=random)
        assert differing_bits(decode(encode(x, fmt, "stochastic", random_bits=random), fmt), wanted) == 0


@pytest.mark.parametrize("fmt", [fmt for fmt in [*NARROW, *CUSTOM] if fmt.has_nan], ids=lambda fmt: fmt.name)
def test_nan_is_encoded_as_a_nan(fmt):
    x = np.float32([np.nan, -np.nan, 1.0])
    assert np.isnan(decode(encode(x, fmt), fmt)).tolist() == [True, True, False]
    assert int(encode(x, fmt)[0]) == nan_code(fmt)
    signalling = np.uint32([0x7F800001, 0xFFC12345]).view(np.float32)
    assert np.isnan(decode(encode(signalling, fmt), fmt)).all()
    assert int(encode(signalling, fmt)[0]) == nan_code(fmt)


@pytest.mark.parametrize("fmt", [mp.E2M1FN, mp.E2M3FN, mp.E3M2FN], ids=lambda fmt: fmt.name)
def test_nan_is_refused_by_a_format_that_has_none(fmt):
    way_out = "replace NaN first, for example with np.nan_to_num"
    refused = f"is NaN and {fmt.name} has none; {way_out}, or keep the float32 carrier of round_to"
    for call in (encode, mp.cast):
        with pytest.raises(ValueError, match=f"^element 1 {re.escape(refused)}$"):
            call(np.float32([0, np.nan]), fmt)
    with pytest.raises(ValueError, match=f"^element 0 {re.escape(refused)}$"):
        encode(np.float64([np.nan]), fmt)
    with pytest.raises(ValueError, match=f"^element 3 {re.escape(refused)}$"):
        encode(np.float32([[0, 1], [2, np.nan]]), fmt)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{fmt.name} has no NaN; {way_out}')}$"):
        nan_code(fmt)


def test_codes_that_no_format_has_are_refused():
    with pytest.raises(TypeError, match=r"^codes must be unsigned integers, got int64; use codes.astype\(np.uint8\)$"):
        decode(np.array([1]), mp.E4M3FN)
    with pytest.raises(ValueError, match=r"^code 0x10 has more than the 4 bits of float4_e2m1fn; mask it first$"):
        decode(np.uint8([16]), mp.E2M1FN)


def test_no_elements_are_legal():
    assert encode(np.zeros((0, 2), np.float32), mp.FP16).shape == (0, 2)
    assert decode(np.zeros((3, 0), np.uint16), mp.FP16).shape == (3, 0)
    assert decode(np.uint8([]), mp.E4M3FN).shape == (0,)


def test_casts_store_the_dtype_of_the_format():
    for fmt in FORMATS.values():
        assert mp.cast([1.0, 2.0], fmt).dtype == fmt.dtype
    assert mp.cast(np.float32(1.1), CUSTOM[0]).dtype == np.float32


def test_int_and_float64_casts_round_once():
    assert mp.cast(16973823, mp.BF16).astype(np.float64) == 16908288
    assert mp.cast(-431.99999999999994, mp.E4M3FN).astype(np.float64) == -416
    assert mp.cast(1 + 2.0**-24 + 2.0**-50, mp.FP32) == np.float32(1 + 2.0**-23)
