"""Views, comparison by bits and distances."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.bits import (
    codes_of,
    differing_bits,
    format_of,
    from_codes,
    hex_of,
    native,
    ordinals,
    same_bits,
    ulp_distance,
)
from mp_reference.spec.formats import FORMATS


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.name != "tf32"], ids=lambda fmt: fmt.name)
def test_a_dtype_names_its_format_and_back(fmt):
    assert format_of(fmt.dtype) is fmt


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64])
def test_a_dtype_without_a_format_is_refused(dtype):
    with pytest.raises(TypeError, match="stores none of the named formats; use float32, float16"):
        format_of(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_codes_and_back_share_memory_and_bits(dtype):
    x = np.array([1.5, -0.0, np.inf], dtype)
    codes = codes_of(x)
    assert codes.dtype.kind == "u"
    assert codes.dtype.itemsize == x.dtype.itemsize
    again = from_codes(codes, dtype)
    assert np.shares_memory(x, again)
    assert same_bits(x, again).all()


def test_codes_of_the_other_byte_order_are_the_same_codes():
    swapped = np.array([1.0, -2.0], ">f2")
    assert codes_of(swapped).tolist() == [0x3C00, 0xC000]
    assert from_codes(codes_of(swapped).astype(">u2"), swapped.dtype).tolist() == [1.0, -2.0]
    assert native(swapped).dtype == np.float16
    here = np.float32([1.0])
    assert native(here) is here


def test_codes_of_another_width_are_refused():
    with pytest.raises(TypeError, match="codes of float16 are uint16, got uint32; cast them first"):
        from_codes(np.uint32([1]), np.float16)


def test_nan_is_a_class_and_zero_has_a_sign():
    a = from_codes(np.uint32([0x7FC00000, 0xFFC00001, 0x00000000, 0x3F800000]), np.float32)
    b = from_codes(np.uint32([0xFFFFFFFF, 0x7F800001, 0x80000000, 0x3F800000]), np.float32)
    assert same_bits(a, b).tolist() == [True, True, False, True]
    assert differing_bits(a, b) == 1


def test_comparison_of_two_dtypes_is_refused():
    with pytest.raises(TypeError, match="same_bits needs one dtype, got float16 and float32"):
        same_bits(np.float16([1]), np.float32([1]))
    with pytest.raises(TypeError, match="ulp_distance needs one dtype, got float16 and float32"):
        ulp_distance(np.float16([1]), np.float32([1]))


def test_hex_has_the_digits_of_the_dtype():
    assert hex_of(np.array([1], ml_dtypes.float8_e4m3fn)) == ["0x38"]
    assert hex_of(np.float32([[1], [-0.0]])) == ["0x3f800000", "0x80000000"]


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.bits <= 16], ids=lambda fmt: fmt.name)
def test_ordinals_count_along_the_number_line(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint32)
    values = codes.astype(np.dtype(f"u{fmt.dtype.itemsize}")).view(fmt.dtype).astype(np.float32)
    number = ~np.isnan(values)
    order = np.argsort(values[number], kind="stable")
    steps = np.diff(ordinals(codes, fmt)[number][order])
    jumps = np.diff(values[number][order])
    assert ((steps == 0) == (jumps == 0)).all()
    assert set(steps.tolist()) <= {0, 1}


def test_distances_are_counted_in_representable_steps():
    a = np.float16([1.0, 0.0, 2.0**-24, np.nan, np.nan, 65504.0, 1.0])
    b = np.float16([1.0009765625, -0.0, -(2.0**-24), np.nan, 1.0, np.inf, 2.0])
    assert ulp_distance(a, b).tolist() == [1, 0, 2, 0, 2**62, 1, 1024]
    assert ulp_distance(
        np.array([1, 4], ml_dtypes.float8_e8m0fnu), np.array([4, 1], ml_dtypes.float8_e8m0fnu)
    ).tolist() == [2, 2]
    assert mp.FP16.dtype == a.dtype
