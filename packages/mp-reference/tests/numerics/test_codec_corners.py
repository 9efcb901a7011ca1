"""Codes where an encoder is chosen: refusals, random bits and NaNs are the same whichever way the numbers go."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.codec import code_dtype, decode, decoder_for, encode, encode_into, encoder_for, nan_code
from mp_reference.numerics.codec_kernels import assembled
from mp_reference.numerics.rounding import ROUNDINGS, round_to
from mp_reference.numerics.workspace import Workspace
from mp_reference.spec.formats import FORMATS, FloatFormat

CUSTOM = FloatFormat("e6m12", exponent_bits=6, mantissa_bits=12)
WAYS = [mp.FP16, mp.BF16, mp.E4M3FN, mp.TF32, mp.FP32, CUSTOM]  # one of each encoder and decoder, and none
NANS = [fmt for fmt in [*FORMATS.values(), CUSTOM] if fmt.has_nan]
FOUR = np.float32([[1.1, -2.3], [0.0, 5e-5]])
CARRIED = [FOUR, FOUR.astype(np.float64), FOUR.T, FOUR[:1, 0]]


@pytest.mark.parametrize("call", [encode, mp.cast])
@pytest.mark.parametrize("fmt", WAYS, ids=lambda fmt: fmt.name)
def test_unknown_names_are_refused_whichever_way_the_numbers_go(call, fmt):
    refusals = {
        "rounding='up' must be one of 'nearest-even', ": {"rounding": "up"},
        "overflow='wrap' must be one of 'ieee', 'saturate'": {"overflow": "wrap"},
        "subnormals='no' must be True, False, 'flush-before' or 'flush-after'": {"subnormals": "no"},
        "rounding='stochastic' needs random_bits: ": {"rounding": "stochastic"},
        "random_bits are for rounding='stochastic', not 'nearest-even'; leave them out": {"random_bits": np.uint8([1])},
    }
    for message, how in refusals.items():
        for x in CARRIED:
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                call(x, fmt, **how)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("fmt", WAYS, ids=lambda fmt: fmt.name)
def test_codes_and_casts_draw_as_rounding_does(fmt, width):
    x = np.random.default_rng(2).standard_normal(600).astype(np.float32)
    random = np.random.default_rng(3).integers(0, 256, 600, dtype=np.uint8)
    wanted = round_to(x, fmt, "stochastic", random_bits=random, random_width=width)
    codes = encode(x, fmt, "stochastic", random_bits=random, random_width=width)
    assert differing_bits(decode(codes, fmt), wanted) == 0
    stored = mp.cast(x, fmt, "stochastic", random_bits=random, random_width=width)
    assert differing_bits(stored.astype(np.float32), wanted) == 0


@pytest.mark.parametrize("rounding", [rounding for rounding in ROUNDINGS if rounding != "stochastic"])
@pytest.mark.parametrize("fmt", NANS, ids=lambda fmt: fmt.name)
def test_every_nan_has_the_one_code_and_the_wide_formats_keep_its_sign(fmt, rounding):
    nans = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]).view(np.float32)
    sign = 1 << (fmt.bits - 1) if fmt in (mp.FP16, mp.BF16, mp.FP32) else 0
    wanted = [nan_code(fmt), sign | nan_code(fmt)] * 2
    for overflow in ("ieee", "saturate"):
        for subnormals in (True, False):
            how = {"rounding": rounding, "overflow": overflow, "subnormals": subnormals}
            for x in (nans, np.repeat(nans, 2)[::2]):
                assert encode(x, fmt, **how).tolist() == wanted
            among = np.concatenate([nans, np.float32([np.inf, -np.inf, 0.0, 1.0])])
            codes = encode(among, fmt, **how)
            assert codes[:4].tolist() == wanted
            assert differing_bits(decode(codes, fmt), round_to(among, fmt, **how)) == 0


@pytest.mark.parametrize("fmt", [*FORMATS.values(), CUSTOM], ids=lambda fmt: fmt.name)
def test_codes_keep_every_shape_and_stride(fmt):
    x = np.random.default_rng(4).standard_normal((6, 5, 4)).astype(np.float32)
    whole = encode(x, fmt)
    assert whole.dtype == code_dtype(fmt)
    assert whole.shape == x.shape
    assert (encode(x.T, fmt) == whole.T).all()
    assert (encode(x[::-1, ::2, 1:], fmt) == whole[::-1, ::2, 1:]).all()
    assert differing_bits(decode(whole.T, fmt), decode(whole, fmt).T) == 0
    assert differing_bits(decode(whole[::-1, ::2, 1:], fmt), decode(whole, fmt)[::-1, ::2, 1:]) == 0
    assert encode(x[0, 0, 0], fmt).shape == decode(whole[0, 0, 0], fmt).shape == ()


@pytest.mark.parametrize("fmt", [*FORMATS.values(), CUSTOM], ids=lambda fmt: fmt.name)
def test_long_arrays_have_the_codes_of_their_parts(fmt):
    x = np.random.default_rng(5).standard_normal(200_003).astype(np.float32)
    for rounding in ("nearest-even", "toward-positive"):
        codes = encode(x, fmt, rounding)
        parts = [encode(x[start : start + 977], fmt, rounding) for start in range(0, x.size, 977)]
        assert (codes == np.concatenate(parts)).all()
        assert differing_bits(decode(codes, fmt), round_to(x, fmt, rounding)) == 0


@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.E4M3FN], ids=lambda fmt: fmt.name)
def test_codes_are_written_into_given_memory(fmt):
    x = np.random.default_rng(7).standard_normal((3, 50_001)).astype(np.float32) * 1e5
    codes = np.empty(x.shape, code_dtype(fmt))
    encode_into(x, fmt, codes)
    assert (codes == encode(x, fmt)).all()
    encode_into(x, fmt, codes, "toward-zero", "saturate", "after")
    assert (codes == encode(x, fmt, "toward-zero", "saturate", "flush-after")).all()


@pytest.mark.parametrize("fmt", WAYS, ids=lambda fmt: fmt.name)
def test_codes_may_come_in_wider_integers(fmt):
    codes = encode(FOUR, fmt)
    for dtype in (np.uint32, np.uint64):
        assert differing_bits(decode(codes.astype(dtype), fmt), decode(codes, fmt)) == 0


@pytest.mark.parametrize("fmt", [fmt for fmt in [*FORMATS.values(), CUSTOM] if fmt.bits < 32], ids=lambda fmt: fmt.name)
def test_the_first_code_with_a_bit_too_many_is_refused(fmt):
    message = f"code {1 << fmt.bits:#x} has more than the {fmt.bits} bits of {fmt.name}; mask it first"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode(np.uint64([0, 1 << fmt.bits]), fmt)
    with pytest.raises(TypeError, match=r"^codes must be unsigned integers, got int64; use codes\.astype\(np\.uint"):
        decode(np.int64([0]), fmt)


@pytest.mark.parametrize(("bits", "dtype"), [(8, np.uint8), (9, np.uint16), (16, np.uint16), (17, np.uint32)])
def test_codes_take_the_narrowest_integers_that_hold_them(bits, dtype):
    fmt = FloatFormat("custom", exponent_bits=5, mantissa_bits=bits - 6)
    assert code_dtype(fmt) == dtype
    assert encode(FOUR, fmt).dtype == dtype
    assert differing_bits(decode(encode(FOUR, fmt), fmt), round_to(FOUR, fmt)) == 0


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.bits <= 16], ids=lambda fmt: fmt.name)
def test_a_special_code_alone_is_decoded_as_among_others(fmt):
    codes = np.arange(1 << fmt.bits).astype(code_dtype(fmt))
    values = decode(codes, fmt)
    special = np.flatnonzero(~np.isfinite(values))
    for code in [*special[:2], *special[-2:], *(special[len(special) // 2 :][:2])]:
        assert differing_bits(decode(codes[code : code + 1], fmt), values[code : code + 1]) == 0


@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.E4M3FN], ids=lambda fmt: fmt.name)
def test_a_decoder_takes_rows_that_lie_apart(fmt):
    codes = encode(np.float32([[1.5, -2.0, 0.25], [3.0, -np.inf, 4.0]]), fmt)
    out = np.empty((2, 2), np.float32)
    decoder_for(fmt)(codes[:, :2], out)
    np.testing.assert_array_equal(out, decode(codes, fmt)[:, :2])


def test_chunks_without_elements_are_legal():
    work = Workspace(0, np.dtype(np.float32))
    for fmt in (mp.FP16, mp.BF16, mp.E4M3FN):
        codes, numbers = np.zeros(0, code_dtype(fmt)), np.zeros(0, np.float32)
        encoder_for(fmt, "nearest-even")(numbers, codes, work)
        encoder_for(fmt, "toward-zero")(numbers, codes, work)
        decoder_for(fmt)(codes, numbers)


def test_where_a_format_has_no_nan_its_place_in_a_table_is_zero():
    assert assembled(np.float32([np.nan, -1.0]), mp.E2M1FN).tolist() == [0, 10]


@pytest.mark.parametrize("rounding", [rounding for rounding in ROUNDINGS if rounding != "stochastic"])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_eight_bits_that_are_mostly_fraction_are_encoded_as_they_round(bits, rounding, edges):
    fmt = FloatFormat(f"e{7 - bits}m{bits}", exponent_bits=7 - bits, mantissa_bits=bits, specials="finite")
    x = edges(fmt)
    x = x[~np.isnan(x)]
    for subnormals in (True, False, "flush-before"):
        how = {"rounding": rounding, "subnormals": subnormals}
        assert differing_bits(decode(encode(x, fmt, **how), fmt), round_to(x, fmt, **how)) == 0


def test_every_fp16_number_and_midpoint_and_their_neighbours_have_the_librarys_codes_among_others():
    codes = np.arange(0x7C00, dtype=np.uint16)
    numbers = codes.view(np.float16).astype(np.float32)
    midpoints = (numbers + np.append(numbers[1:], np.float32(65536))) / 2
    near = np.concatenate([numbers, midpoints])
    x = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))])
    np.random.default_rng(6).shuffle(x)
    for values in (x, -x, np.where(np.arange(x.size) % 3, x, -x)):
        with np.errstate(over="ignore"):
            wanted = values.astype(np.float16).view(np.uint16)
        assert (encode(values, mp.FP16) == wanted).all()
        lasting = np.abs(values) > 2.0**-25  # without a code of zero among them
        assert (encode(values[lasting], mp.FP16) == wanted[lasting]).all()


def test_numbers_just_past_the_largest_are_infinite_without_larger_ones_among_them():
    x = np.linspace(65520, 131071, 20_000, dtype=np.float32)
    assert (encode(x, mp.FP16) == 0x7C00).all()
    assert (encode(-x, mp.FP16) == 0xFC00).all()
