"""All 2**32 float32 patterns into fp16 and bf16: by night."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.bits import codes_of, differing_bits
from mp_reference.numerics.codec import encode
from mp_reference.numerics.rounding import round_to

LIBRARY = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
nightly = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="some minutes; HYPOTHESIS_PROFILE=nightly runs it"
)


def towards(x, rounding, dtype):
    """The library's rounding to nearest, stepped back where it went the wrong way."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = x.astype(dtype)
        back = near.astype(np.float32)
        wrong = {
            "nearest-even": np.zeros(x.shape, bool),
            "toward-zero": np.abs(back) > np.abs(x),
            "toward-positive": back < x,
            "toward-negative": back > x,
        }[rounding]
        outward = np.abs(back) < np.abs(x)
    codes = codes_of(near).astype(np.int64)
    stepped = np.where(wrong, np.where(outward, codes + 1, codes - 1), codes)
    return stepped.astype(np.uint16).view(dtype).astype(np.float32)


def assert_all_agree(fmt, rounding, start, stop, block=1 << 22):
    for first in range(start, stop, block):
        x = np.arange(first, first + block, dtype=np.uint64).astype(np.uint32).view(np.float32)
        wanted = towards(x, rounding, LIBRARY[fmt.name])
        assert differing_bits(round_to(x, fmt, rounding), wanted) == 0, hex(first)
        if rounding == "nearest-even":
            with np.errstate(over="ignore", invalid="ignore"):
                assert differing_bits(encode(x, fmt).view(fmt.dtype), x.astype(fmt.dtype)) == 0, hex(first)


@pytest.mark.parametrize("rounding", ["nearest-even", "toward-zero", "toward-positive", "toward-negative"])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16], ids=lambda fmt: fmt.name)
def test_the_ends_of_binades_of_each_kind_are_rounded_as_the_library_does(fmt, rounding):
    for exponent in (0x00, 0x66, 0x70, 0x7F, 0x8E, 0xFE):  # subnormal, below and around fp16's ends, one, the last
        for sign in (0, 1 << 31):
            start = (exponent << 23) + sign
            assert_all_agree(fmt, rounding, start, start + (1 << 17), 1 << 17)
            assert_all_agree(fmt, rounding, start + (1 << 23) - (1 << 17), start + (1 << 23), 1 << 17)


@nightly
@pytest.mark.parametrize("rounding", ["nearest-even", "toward-zero", "toward-positive", "toward-negative"])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16], ids=lambda fmt: fmt.name)
def test_every_float32_is_rounded_as_the_library_does(fmt, rounding):
    assert_all_agree(fmt, rounding, 0, 1 << 32)
