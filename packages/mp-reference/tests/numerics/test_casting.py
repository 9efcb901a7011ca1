"""The rows of spec.casts against NumPy and ml_dtypes; torch's rows are claims of the conformance suite."""

from __future__ import annotations

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.casting import cast_as
from mp_reference.spec.casts import CASTS, PRODUCERS, cast_rule
from mp_reference.spec.formats import format_named

HERE = [row for row in CASTS if row.producer in ("numpy", "ml_dtypes")]


def inputs(fmt, edges):
    near = edges(fmt, every=max(1, 2 ** (fmt.bits - 11)))
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore", invalid="ignore"):
        yield near
        yield rng.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
        yield near.astype(np.float64) * (1 + 2.0**-40)
        yield near.astype(np.float64) * (1 - 2.0**-45)
    yield rng.integers(-(2**63), 2**63 - 1, 5000) >> rng.integers(0, 62, 5000)
    yield np.int64([16973823, -16973823, 2**24 + 1, 0])
    yield np.arange(-300, 300, dtype=np.int16)
    yield np.arange(65536, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("row", HERE, ids=lambda row: f"{row.producer}-{row.target}")
def test_a_row_says_what_its_producer_does(row, edges):
    fmt = format_named(row.target)
    for x in inputs(fmt, edges):
        with np.errstate(over="ignore", invalid="ignore"):
            theirs = x.astype(fmt.dtype)
        assert differing_bits(cast_as(x, fmt, row.producer), theirs) == 0


@pytest.mark.parametrize("row", HERE, ids=lambda row: f"{row.producer}-{row.target}")
def test_a_row_says_which_nan_its_producer_writes(row):
    fmt = format_named(row.target)
    x = np.uint32([0x7FC00000, 0xFFC00000, 0x7FC12000, 0xFFC12000]).view(np.float32)
    codes = x.astype(fmt.dtype).view(np.dtype(f"u{fmt.dtype.itemsize}"))
    distinct = {"only": 1, "sign-kept": 2, "payload-kept": 4, "none": 2}[row.nan_code]
    assert len(set(codes.tolist())) == distinct


def test_torch_saturates_e4m3fn_and_takes_the_magnitude_for_e8m0():
    assert cast_as(np.float32([465, 1e6, np.inf, -np.inf]), mp.E4M3FN, "torch-cpu").tolist() == [448, 448, 448, -448]
    assert cast_as(np.float32([-3, 0, -0.0]), mp.E8M0FNU, "torch-cpu").astype(np.float64).tolist() == [
        4,
        2.0**-127,
        2.0**-127,
    ]


def test_an_ascend_in_saturation_mode_hides_infinity_and_nan():
    x = np.float32([np.inf, -1e9, np.nan, -np.nan, 1.0])
    assert cast_as(x, mp.FP16, "ascend-saturation").tolist() == [65504, -65504, 0, 0, 1]


def test_an_unknown_row_is_refused_with_those_that_exist():
    with pytest.raises(
        ValueError, match="no cast of producer 'numpy' to 'bf16' is recorded; numpy has rows for fp32, fp16"
    ):
        cast_rule("numpy", "bf16")
    with pytest.raises(ValueError, match="producers are numpy, ml_dtypes, torch-cpu, ascend-saturation"):
        cast_rule("jax", "bf16")


@pytest.mark.parametrize("x", [1j, None, np.longdouble(1)], ids=repr)
def test_what_no_producer_casts_exactly_is_refused(x):
    with pytest.raises(TypeError, match="round_to takes float32, float64, integers, float16, ml_dtypes or Fraction"):
        cast_as(x, mp.FP16, "numpy")


def test_every_row_names_a_producer_a_format_and_a_source_once():
    assert len({(row.producer, row.target) for row in CASTS}) == len(CASTS)
    for row in CASTS:
        assert row.producer in PRODUCERS
        assert format_named(row.target).has_nan or row.nan_code == "none"
        assert row.source
