"""The rows of spec.formats against ml_dtypes' finfo, and the derivations against the rows."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.spec.formats import FORMATS, FloatFormat, format_named, format_table, require_format

STORED = [fmt for fmt in FORMATS.values() if fmt.name != "tf32"]


@pytest.mark.parametrize("fmt", STORED, ids=lambda fmt: fmt.name)
def test_a_row_agrees_with_ml_dtypes_finfo(fmt):
    info = ml_dtypes.finfo(fmt.dtype)
    assert fmt.bits == info.bits
    assert fmt.mantissa_bits == info.nmant
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.epsilon == float(info.eps)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.exponent_bits == info.nexp


def test_tf32_is_nvidias_nineteen_bits_in_a_float32():
    assert (mp.TF32.bits, mp.TF32.exponent_bits, mp.TF32.mantissa_bits, mp.TF32.dtype) == (19, 8, 10, np.float32)
    assert mp.TF32.max == np.uint32(0x7F7FE000).view(np.float32)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_printed_maximum_is_the_derived_one(fmt):
    widths = {"exponent_bits": fmt.exponent_bits, "mantissa_bits": fmt.mantissa_bits, "bias": fmt.bias}
    assert FloatFormat("again", **widths, specials=fmt.specials).max == fmt.max


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_repr_teaches_bits_range_and_epsilon(fmt):
    widths = (f"{fmt.bits} bits", f"{fmt.exponent_bits} exponent", f"{fmt.mantissa_bits} mantissa")
    for part in (fmt.name, *widths, "range", "epsilon"):
        assert part in repr(fmt)


def test_special_codes_are_told_apart():
    def names(wanted):
        return [fmt.name for fmt in FORMATS.values() if wanted(fmt)]

    assert names(lambda fmt: fmt.has_inf) == ["fp32", "tf32", "fp16", "bf16", "float8_e5m2"]
    assert names(lambda fmt: not fmt.has_nan) == ["float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"]
    assert names(lambda fmt: not fmt.has_negative_zero) == ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
    assert names(lambda fmt: not fmt.has_zero) == ["float8_e8m0fnu"]
    assert not FloatFormat("e5m0", exponent_bits=5, mantissa_bits=0).has_nan
    assert FloatFormat("e4m0fn", exponent_bits=4, mantissa_bits=0, specials="fn").max == 2.0**7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exponent_bits": 9, "mantissa_bits": 3}, "exponent_bits=9, mantissa_bits=3 must lie in 1..8 and 0..23"),
        ({"exponent_bits": 0, "mantissa_bits": 3}, "exponent_bits=0"),
        ({"exponent_bits": 5, "mantissa_bits": 24}, "mantissa_bits=24"),
        ({"exponent_bits": 5, "mantissa_bits": 2, "specials": "posit"}, "specials='posit' must be one of 'ieee', 'fn'"),
        ({"exponent_bits": 1, "mantissa_bits": 2}, "exponent_bits=1 leaves specials='ieee' no normal number"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "specials": "fn"}, "use 2 exponent bits or specials='finite'"),
        ({"exponent_bits": 4, "mantissa_bits": 2, "specials": "exponent-only"}, "mantissa_bits=2 must be 0 where only"),
        ({"exponent_bits": 5, "mantissa_bits": 2, "max": 1.0}, "max=1.0 contradicts the widths, which give 57344.0"),
        ({"exponent_bits": 8, "mantissa_bits": 2, "bias": 200}, "bias=200 puts values outside float32"),
        ({"exponent_bits": 8, "mantissa_bits": 2, "bias": 100}, "choose a bias near 127"),
    ],
)
def test_an_impossible_format_is_refused_with_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        FloatFormat("odd", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exponent_bits": 4.0, "mantissa_bits": 3}, r"odd: exponent_bits=4.0 must be an integer; use int\(4.0\)"),
        ({"exponent_bits": 4, "mantissa_bits": "3"}, r"odd: mantissa_bits='3' must be an integer; use int\('3'\)"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "bias": 7.5}, r"odd: bias=7.5 must be an integer"),
    ],
)
def test_a_width_that_is_no_integer_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        FloatFormat("odd", **arguments)


def test_any_integers_and_any_bias_make_a_format():
    plain = FloatFormat("e4m3", exponent_bits=4, mantissa_bits=3)
    assert FloatFormat("e4m3", exponent_bits=np.int64(4), mantissa_bits=np.uint8(3), bias=np.int32(7)) == plain
    below_zero = FloatFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=-1)
    assert (below_zero.bias, below_zero.min_normal, below_zero.max) == (-1, 4.0, 240.0 * 2**8)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="format 'half' is not one of fp32, tf32, fp16"):
        format_named("half")
    with pytest.raises(ValueError, match=r"float4_e2m1fn \(did you mean 'bf16'\?\); for another one write"):
        format_named("BF16")


def test_the_name_of_a_format_is_no_format():
    assert require_format(mp.BF16) is mp.BF16
    with pytest.raises(TypeError, match=r"out='bf16' must be a FloatFormat; use format_named\('bf16'\)"):
        require_format("bf16", "out")
    with pytest.raises(TypeError, match="fmt='half' must be a FloatFormat; use one of FORMATS, such as FP16, or build"):
        require_format("half")


def test_a_custom_row_under_a_known_name_does_not_claim_its_dtype():
    assert FloatFormat("fp16", exponent_bits=4, mantissa_bits=11).dtype == np.float32


def test_the_table_has_one_line_a_row():
    lines = format_table().splitlines()
    assert len(lines) == len(FORMATS) + 1
    for line, fmt in zip(lines[1:], FORMATS.values(), strict=True):
        assert line.startswith(fmt.name)
        assert fmt.source in line


def test_the_spec_needs_the_standard_library_alone():
    code = "import sys, mp_reference.spec.formats, mp_reference.spec.casts; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
