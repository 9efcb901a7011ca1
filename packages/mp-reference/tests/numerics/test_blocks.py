"""Block formats against an oracle in fractions that follows the rules word by word."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.blocks import BlockArray, dequantize, quantize, tensor_scale_of
from mp_reference.spec.blocks import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    SCALE_RULES,
    BlockFormat,
    block_format_named,
)

LONG = BlockFormat(
    name="long", element="fp16", block_size=4, scale="fp32", scale_rule="amax", tensor_scale=True
)  # fmt: skip
MX = [fmt for fmt in BLOCK_FORMATS.values() if fmt.scale == "float8_e8m0fnu"]


def floor_log2(value):
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1


def oracle_scale(block, fmt, rule, tensor_scale):
    amax = max(abs(Fraction(float(v))) for v in block)
    element = fmt.element_format
    if amax == 0:
        return Fraction(2) ** -127 if fmt.scale_format.specials == "exponent-only" else Fraction(0)
    if rule == "amax":
        wanted = amax / (Fraction(element.max) * Fraction(tensor_scale))
        return Fraction(exact.round_exact(wanted, fmt.scale_format, overflow="saturate"))
    if rule == "ocp":
        return max(Fraction(2) ** (floor_log2(amax) - element.max_exponent), Fraction(2) ** -127)
    exponent = -127
    while amax > Fraction(element.max) * Fraction(2) ** exponent:
        exponent += 1
    return Fraction(2) ** exponent


def oracle(block, fmt, rule, tensor_scale, rounding):
    if not np.isfinite(block).all():
        return [math.nan] * len(block)
    scale = oracle_scale(block, fmt, rule, tensor_scale) * Fraction(tensor_scale)
    values = []
    for number in block:
        signed_zero = math.copysign(0.0, number)
        quotient = Fraction(float(number)) / scale if scale else 0
        element = exact.round_exact(quotient or signed_zero, fmt.element_format, rounding, "saturate")
        values.append(float(Fraction(element) * scale) if element else math.copysign(0.0, element))
    return values


def blocks_of(fmt, count, rng):
    """Normal, wide, tiny, zero, non-finite blocks, and blocks whose amax is a power of two or one ulp below."""
    rows = rng.standard_normal((count, fmt.block_size)).astype(np.float32)
    rows[::7] *= np.exp2(rng.integers(-30, 30, rows[::7].shape)).astype(np.float32)
    rows[1::7] *= np.float32(2.0**-140)
    rows[2::7] = 0.0
    rows[3::7, 0] = np.exp2(rng.integers(-20, 20, rows[3::7, 0].shape)).astype(np.float32) * 16
    rows[4::7, 0] = np.nextafter(rows[3::7, 0][: rows[4::7].shape[0]], np.float32(0))
    rows[5::7, 1] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38]), rows[5::7, 1].shape)
    rows[2::14] *= -1
    return rows


@pytest.mark.parametrize("rounding", ["nearest-even", "toward-zero"])
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("fmt", MX, ids=lambda fmt: fmt.name)
def test_mx_blocks_are_the_oracles(fmt, rule, rounding):
    rows = blocks_of(fmt, 70, np.random.default_rng(0))
    got = dequantize(quantize(rows, fmt, scale_rule=rule, rounding=rounding))
    wanted = np.array([oracle(row, fmt, rule, 1.0, rounding) for row in rows])
    assert differing_bits(got, wanted) == 0


@pytest.mark.parametrize("tensor_scale", [1.0, 0.0123456789, 37.0])
def test_nvfp4_blocks_are_the_oracles(tensor_scale):
    scale = float(np.float32(tensor_scale))
    rows = blocks_of(NVFP4, 70, np.random.default_rng(1))
    got = dequantize(quantize(rows, NVFP4, tensor_scale=scale))
    wanted = np.array([oracle(row, NVFP4, "amax", scale, "nearest-even") for row in rows])
    assert differing_bits(got, wanted) == 0


def test_amax_one_ulp_below_a_power_of_two_keeps_the_lower_scale():
    for exponent in (-100, -3, 0, 9, 100):
        power = np.float32(2.0**exponent)
        below = np.nextafter(power, np.float32(0))
        scales = [int(quantize(np.float32([v]), MXFP8_E4M3).scales[0]) for v in (below, power)]
        assert scales == [exponent - 1 - 8 + 127, exponent - 8 + 127]


def test_round_up_saturates_nothing_and_ocp_does():
    x = np.float32([449.0, 1.0])
    assert dequantize(quantize(x, MXFP8_E4M3)).tolist() == [448.0, 1.0]
    assert dequantize(quantize(x, MXFP8_E4M3, scale_rule="round-up")).tolist() == [448.0, 1.0]
    assert quantize(x, MXFP8_E4M3, scale_rule="round-up").scales.tolist() == [128]
    assert quantize(np.float32([448.0]), MXFP8_E4M3, scale_rule="round-up").scales.tolist() == [127]


def test_blocks_of_zeros_have_the_smallest_scale_and_stay_zeros():
    for fmt in (MXFP4, NVFP4, MXFP8_E5M2):
        packed = quantize(np.float32([[0.0, -0.0]]), fmt)
        assert packed.scales.tolist() == [[0]]
        assert differing_bits(dequantize(packed), np.array([[0.0, -0.0]])) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3, NVFP4], ids=lambda fmt: fmt.name)
def test_a_block_that_is_not_finite_reads_as_nan_and_its_neighbours_do_not(fmt, bad):
    x = np.full(2 * fmt.block_size, 6, np.float32)
    x[3] = bad
    packed = quantize(x, fmt)
    assert packed.scales[0] == (255 if fmt.scale == "float8_e8m0fnu" else 0x7F)
    assert np.isnan(dequantize(packed)[: fmt.block_size]).all()
    assert (dequantize(packed)[fmt.block_size :] == 6).all()


def test_scale_codes_0_and_255_are_the_smallest_power_and_nan():
    packed = BlockArray(format=MXFP4, elements=np.uint8([[7, 1], [7, 1]]), scales=np.uint8([[0], [255]]), axis=-1)
    assert dequantize(packed)[0].tolist() == [6 * 2.0**-127, 0.5 * 2.0**-127]
    assert np.isnan(dequantize(packed)[1]).all()


def test_the_largest_numbers_have_the_largest_scales():
    x = np.float32([3.4028235e38])
    assert quantize(x, MXFP4).scales.tolist() == [127 + 125]
    assert quantize(x, MXFP8_E5M2).scales.tolist() == [127 + 112]
    assert dequantize(quantize(x, MXFP6_E2M3, scale_rule="round-up")).tolist() == [2.0**128]


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_blocks_run_along_any_axis_and_may_end_short(axis):
    x = np.random.default_rng(2).standard_normal((70, 45)).astype(np.float32)
    packed = quantize(x, MXFP8_E4M3, axis=axis)
    assert packed.elements.shape == x.shape
    assert packed.scales.shape == ((45, 3) if axis in (0, -2) else (70, 2))
    rows = x.T if axis in (0, -2) else x
    parts = [dequantize(quantize(rows[:, i : i + 32], MXFP8_E4M3)) for i in range(0, rows.shape[1], 32)]
    wanted = np.concatenate(parts, axis=1)
    assert differing_bits(dequantize(packed), wanted.T if axis in (0, -2) else wanted) == 0


def test_many_blocks_meet_without_a_seam():
    x = np.random.default_rng(3).standard_normal((5000, 32)).astype(np.float32)
    whole = dequantize(quantize(x, MXFP4))
    assert differing_bits(whole[1900:2200], dequantize(quantize(x[1900:2200], MXFP4))) == 0


def test_16_bit_inputs_are_widened_exactly_and_no_elements_are_legal():
    x = np.random.default_rng(4).standard_normal((4, 64)).astype(np.float16)
    assert differing_bits(dequantize(quantize(x, MXFP4)), dequantize(quantize(x.astype(np.float32), MXFP4))) == 0
    assert dequantize(quantize(np.zeros((3, 0), np.float32), MXFP4)).shape == (3, 0)


def test_stochastic_elements_are_unbiased():
    x = np.full((2, 40_000), 1.1, np.float32)
    packed = quantize(x, MXFP4, rounding="stochastic", random_bits=np.random.default_rng(5))
    assert abs(dequantize(packed).mean() - np.float32(1.1)) < 0.01
    every = np.tile(np.arange(256, dtype=np.uint8), (2, 157))[:, :40_000]
    given = dequantize(quantize(x, MXFP4, rounding="stochastic", random_bits=every))
    assert differing_bits(given[0], given[1]) == 0
    assert abs(given.mean() - np.float32(1.1)) < 0.01


def test_the_tensor_scale_brings_amax_to_the_largest_scale_and_element():
    x = np.random.default_rng(6).standard_normal(256).astype(np.float32) * 1e6
    scale = tensor_scale_of(x, NVFP4)
    assert quantize(x, NVFP4, tensor_scale=scale).scales.max() == 0x7E  # 448
    assert tensor_scale_of(np.zeros(4, np.float32), NVFP4) == 1.0
    assert tensor_scale_of(np.zeros(0, np.float32), NVFP4) == 1.0


def test_bits_per_value_count_the_scale():
    bits = {fmt.name: fmt.bits_per_value for fmt in BLOCK_FORMATS.values()}
    assert bits == {
        "mxfp8_e4m3": 8.25, "mxfp8_e5m2": 8.25, "mxfp6_e2m3": 6.25, "mxfp6_e3m2": 6.25, "mxfp4": 4.25, "nvfp4": 4.5,
    }  # fmt: skip


ONES = np.ones(4, np.float32)
MISFIT = BlockArray(format=MXFP4, elements=np.zeros((2, 33), np.uint8), scales=np.zeros(2, np.uint8), axis=-1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(ONES, MXFP4, scale_rule="floor"), ValueError, "'floor' must be one of ocp, round-up, amax"),
        (lambda: quantize(ONES, NVFP4, scale_rule="ocp"), ValueError, "which nvfp4 does not store; use 'amax'"),
        (
            lambda: quantize(ONES, NVFP4, tensor_scale=0.1),
            ValueError,
            "tensor_scale=0.1 must be a positive fp32 number",
        ),
        (lambda: quantize(ONES, NVFP4, tensor_scale=-1.0), ValueError, r"use tensor_scale_of\(x, fmt\)"),
        (lambda: quantize(ONES, MXFP4, tensor_scale=2.0), ValueError, "mxfp4 has no tensor scale; leave it out"),
        (lambda: tensor_scale_of(ONES, MXFP4), ValueError, "mxfp4 has no tensor scale; leave it out"),
        (lambda: tensor_scale_of(ONES * np.float32(np.inf), NVFP4), ValueError, "the largest magnitude is inf"),
        (lambda: quantize(np.float32(1), MXFP4), ValueError, r"x has none; use x\[np.newaxis\]"),
        (lambda: quantize(ONES.astype(np.float64), MXFP4), TypeError, r"use mp.cast\(x, mp.FP32\) first"),
        (lambda: quantize([1.0], MXFP4), TypeError, "takes float32 or narrower floats, got float64"),
        (lambda: quantize(ONES, "mxfp4"), TypeError, r"fmt='mxfp4' must be a BlockFormat; look one up with block_for"),
        (
            lambda: quantize(ONES, MXFP4, rounding="stochastic", random_bits=np.zeros(5, np.uint8)),
            ValueError,
            r"random_bits have shape \(5,\) and must broadcast to",
        ),
        (lambda: quantize(ONES, NVFP4, tensor_scale=np.ones(2)), ValueError, "must be a positive fp32 number"),
        (lambda: tensor_scale_of(np.array([1e300]), NVFP4), ValueError, "the largest magnitude is 1e[+]300, which no"),
        (lambda: quantize(ONES, LONG, tensor_scale=0.5), ValueError, "more bits together than float64 divides exactly"),
        (lambda: quantize(np.arange(3), MXFP4), TypeError, "got int64"),
        (lambda: dequantize(MISFIT), ValueError, r"\(2, 33\) in blocks of 32 along axis -1 need \(2, 2\)"),
        (lambda: block_format_named("mxint8"), ValueError, "block format 'mxint8' is not one of mxfp8_e4m3"),
    ],
)
def test_bad_arguments_are_refused_with_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"element": "int8"}, "b: format 'int8' is not one of fp32"),
        ({"scale": "int8"}, "b: format 'int8' is not one of fp32"),
        ({"scale_rule": "up"}, "b: scale_rule='up' must be one of ocp, round-up, amax"),
        ({"scale_rule": "ocp"}, "with bf16 use scale_rule='amax'"),
        ({"block_size": 0}, "block_size=0 must be a whole number of at least 1; MX formats have 32"),
        ({"block_size": 2.5}, "block_size=2.5 must be a whole number of at least 1"),
        ({"element": "float8_e8m0fnu"}, "element='float8_e8m0fnu' has no zero and no sign; it can only be the scale"),
        ({"scale": "float4_e2m1fn"}, "scale='float4_e2m1fn' has no NaN to mark a block that holds one"),
    ],
)
def test_an_impossible_block_format_is_refused(wrong, message):
    right = {"name": "b", "element": "bf16", "block_size": 32, "scale": "bf16", "scale_rule": "amax"}
    with pytest.raises(ValueError, match=message):
        BlockFormat(**(right | wrong))


@pytest.mark.parametrize("element", ["fp16", "bf16", "fp32", "float8_e5m2fnuz"])
@pytest.mark.parametrize("scale", ["fp32", "fp16", "bf16", "float8_e5m2", "float8_e8m0fnu"])
def test_elements_and_scales_of_any_width_keep_all_their_bits(element, scale):
    fmt = BlockFormat(name="b", element=element, block_size=4, scale=scale, scale_rule="amax")
    x = np.float32([1.5, -3.25, 1000.0, 0.1, -0.0, 7e-3, 2.0, -1.0])
    packed = quantize(x, fmt)
    wanted = [value for block in x.reshape(2, 4) for value in oracle(block, fmt, "amax", 1.0, "nearest-even")]
    assert differing_bits(dequantize(packed), np.array(wanted)) == 0
    assert np.isnan(dequantize(quantize(np.float32([np.nan, 1.0]), fmt))).all()


def test_the_scale_of_a_tensor_of_tiny_numbers_is_the_smallest_there_is():
    tiny = np.float32([1e-45, -3e-45])
    assert tensor_scale_of(tiny, NVFP4) == mp.FP32.min_subnormal
    packed = quantize(tiny, NVFP4, tensor_scale=tensor_scale_of(tiny, NVFP4))
    assert np.abs(dequantize(packed) / tiny.astype(float) - 1).max() <= 2.0**-4  # half an ulp of the E4M3 scale
    assert tensor_scale_of([0.0], NVFP4) == 1.0


def test_the_text_of_a_block_format_teaches():
    assert repr(MXFP4) == (
        "BlockFormat(mxfp4: 4.25 bits a value = float4_e2m1fn elements, 32 to a scale in float8_e8m0fnu chosen by ocp)"
    )
    assert repr(NVFP4).endswith("16 to a scale in float8_e4m3fn chosen by amax, and an fp32 scale of the whole tensor)")


def test_rows_cite_their_source():
    for name, fmt in BLOCK_FORMATS.items():
        assert name == fmt.name
        assert fmt.source != "the caller"
    assert mp.E8M0FNU is MXFP4.scale_format
