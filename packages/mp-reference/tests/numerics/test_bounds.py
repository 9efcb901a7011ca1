"""Bounds hold on drawn and on adversarial inputs, and are not idle."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics.blocks import dequantize, quantize, tensor_scale_of
from mp_reference.numerics.bounds import bound
from mp_reference.numerics.products import widened
from mp_reference.spec import blocks
from mp_reference.spec.accumulators import lanes
from mp_reference.spec.tensor_cores import ARCHITECTURES

SOFTWARE = [
    "exact", "fp32", mp.FP32, mp.FP16, mp.BF16, mp.sequential(mp.FP16, fused=True), mp.pairwise(mp.FP16),
    mp.sequential(mp.FP32, rounding="toward-zero"), mp.sequential(mp.BF16, rounding="toward-positive", fused=True),
    mp.pairwise(mp.FP32, 8), mp.kahan(mp.FP32), mp.kahan(mp.FP16), lanes(), mp.blocked(mp.FP16, 8),
    mp.blocked("exact", 4, mp.BF16), mp.split_k(3, mp.FP16),
    mp.split_k(4, mp.FP32, layout="interleaved", combine="halves"),
    mp.blocked(mp.tensor_core("hopper"), 32),
]  # fmt: skip
UNITS = [mp.tensor_core(name) for name in ARCHITECTURES]
UNITS += [
    mp.tensor_core("hopper", result=mp.FP16), mp.tensor_core("hopper", family="mma"),
    mp.tensor_core("b200", family="mma", result=mp.FP16), mp.tensor_core("ampere", zero_products="minimum-exponent"),
    mp.tensor_core("ampere", exponent_floor=None), mp.tensor_core("f32_32x32x4bf16", architecture="cdna2"),
]  # fmt: skip
DTYPES = {
    "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
}  # fmt: skip


def inputs_of(row):
    if isinstance(row, type(UNITS[0])):
        names = {name for unit in row.rows for name in unit.inputs if not unit.scale}
        return sorted(name for name in DTYPES if name in names or (name == "fp32" and "tf32" in names))
    return ["fp16", "bf16", "fp32"] if row not in (SOFTWARE[-1],) else ["fp16", "bf16"]


def assert_bounded(a, b, row, c):
    got = mp.matmul(a, b, c, row, out_format=mp.FP32).astype(np.float64)
    limit = bound(a, b, row, c, out_format=mp.FP32)
    assert limit.shape == got.shape
    wide = [widened(x).astype(np.float64) for x in (a, b)]
    exact = np.array([[float(sum(map(_fraction, x * y), start=_start(c, i, j))) for j, y in enumerate(wide[1].T)]
                      for i, x in enumerate(wide[0])])  # fmt: skip
    finite = np.isfinite(got)
    error = np.abs(np.where(finite, got, 0) - exact)
    assert (error <= limit)[finite].all(), (error, limit)


def _fraction(value):
    return Fraction(float(value))


def _start(c, i, j):
    return _fraction(0 if c is None else c[i, j])


@pytest.mark.parametrize("row", SOFTWARE + UNITS, ids=lambda row: row if isinstance(row, str) else row.name)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_result_leaves_its_bound(row, data):
    dtype = DTYPES[data.draw(st.sampled_from(inputs_of(row)))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    length = data.draw(st.sampled_from([1, 2, 7, 40]))
    kind = data.draw(st.sampled_from(["normal", "positive", "wide", "tiny", "cancel"]))
    spread = {"wide": (-6, 5), "tiny": (-26, -14)}.get(kind, (0, 1))
    with np.errstate(all="ignore"):
        a, b = (
            np.ldexp(rng.standard_normal(shape), rng.integers(*spread, shape)).astype(dtype)
            for shape in ((2, length), (length, 3))
        )
    if kind == "positive":
        a, b = np.abs(a), np.abs(b)
    if kind == "cancel":
        a[:, length // 2 : 2 * (length // 2)] = -a[:, : length // 2]
        b[length // 2 : 2 * (length // 2)] = b[: length // 2]
    c = None
    if data.draw(st.booleans()):
        c = (rng.standard_normal((2, 3)) * 2.0 ** rng.integers(-20, 4)).astype(ml_dtypes.float8_e5m2)
    assert_bounded(a, b, row, c)


@pytest.mark.parametrize("form", sorted(blocks.BLOCK_FORMATS))
def test_no_block_scaled_result_leaves_its_bound(form):
    fmt, rng = blocks.BLOCK_FORMATS[form], np.random.default_rng(31)
    for trial in range(6):
        x, y = (
            np.ldexp(rng.standard_normal(shape), rng.integers(-trial, trial + 1, shape)).astype(np.float32)
            for shape in ((3, 100), (100, 4))
        )
        tensor_scale = tensor_scale_of(x, fmt) if fmt.tensor_scale and trial % 2 else 1.0
        a, b = quantize(x, fmt, tensor_scale=tensor_scale), quantize(y, fmt, axis=0)
        c = None if tensor_scale != 1 else np.float32(2.0**trial)
        exact = dequantize(a).astype(np.float64) @ dequantize(b) + (0 if c is None else c)
        for name in ("blackwell", "blackwell-rtx"):
            row = mp.tensor_core(name)
            error = np.abs(mp.matmul(a, b, c, row) - exact)
            limit = bound(a, b, row, c)
            assert (error <= limit).all(), (error / limit).max()
            assert limit.max() <= 1e-3 * np.abs(exact).max() + np.abs(dequantize(a)).max() * 1e-3
    with pytest.raises(ValueError, match="exact takes no scales; use tensor_core"):
        bound(a, b, "exact")


def test_bounds_of_long_sums_are_within_reach_of_what_happens():
    ones = np.ones((1, 4096), np.float16)
    error = 4096 - mp.matmul(ones, ones.T, accumulator=mp.FP16).item()
    assert error <= bound(ones, ones.T, mp.FP16).item() <= 6 * error
    volta = mp.tensor_core("volta")
    a, b = np.full((1, 4096), 1 + 31 * 2.0**-10, np.float16), np.full((4096, 1), 1 + 33 * 2.0**-10, np.float16)
    product = (1 + 31 * 2.0**-10) * (1 + 33 * 2.0**-10)
    assert product % 2.0**-11 > 0.99 * 2.0**-11  # the unit cuts off all of this past 2048
    lost = 4096 * product - mp.matmul(a, b, accumulator=volta).item()
    assert 0 < lost <= bound(a, b, volta).item() <= 6 * lost


def test_what_is_promised_grows_with_the_length_and_with_the_roundings():
    a, b = np.ones((1, 64), np.float16), np.ones((64, 1), np.float16)
    limits = [
        bound(a, b, row, out_format=mp.FP32).item() for row in ("exact", "fp32", mp.pairwise(mp.FP16), mp.FP16, mp.BF16)
    ]
    assert limits == sorted(limits)
    assert bound(a[:, :8], b[:8], mp.FP16).item() < bound(a, b, mp.FP16).item()
    assert bound(a[0], b[:, 0], "exact").shape == ()


def test_where_nothing_can_be_promised_the_bound_is_infinite():
    a = np.ones((1, 40000), np.float16)
    assert bound(a, a.T, mp.kahan(mp.BF16)).item() == np.inf
    assert bound(a, a.T, mp.sequential(mp.E5M2, rounding="toward-zero")).item() == np.inf
