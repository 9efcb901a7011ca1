"""Matrix units: recordings of eight GPUs, and a scalar model that aligns integers."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.aligned_fast import FastAligned
from mp_reference.numerics.bits import codes_of, same_bits
from mp_reference.numerics.blocks import dequantize, quantize, tensor_scale_of
from mp_reference.numerics.products import widened
from mp_reference.numerics.tensor_core import run_unit
from mp_reference.spec import blocks
from mp_reference.spec.formats import FORMATS
from mp_reference.spec.tensor_cores import ARCHITECTURES, ROWS

ARCHITECTURE_OF = {
    "V100": "volta", "A100": "ampere", "A2": "ampere", "Ada": "ada", "L40S": "ada", "H100": "hopper", "H200": "hopper",
    "B200": "blackwell",
}  # fmt: skip
DTYPE_OF = {
    "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
SETS = 48


@pytest.fixture(scope="module")
def recordings():
    beside = [Path(os.environ["MP_SHARED"])] if "MP_SHARED" in os.environ else []
    beside += [parent.parent / "shared" for parent in Path(__file__).resolve().parents]
    for folder in beside:
        if (found := folder / "data" / "tensor_core_recordings.npz").is_file():
            with np.load(found) as archive:
                return dict(archive)
    pytest.skip("no shared/data/tensor_core_recordings.npz beside the checkout, nor under MP_SHARED")


def never(unit):
    return False


def unit_of(gpu, form, result):
    """The accumulator that a set was recorded from: fp8 by mma.sync, save for Hopper's fp32 results."""
    eighth = form in ("E4M3", "E5M2")
    through_fp16 = eighth and (gpu == "B200" or (gpu in ("H100", "H200") and result == "fp16"))
    family = "mma" if through_fp16 else None
    return mp.tensor_core(gpu if gpu != "Ada" else "ada", family=family, result=FORMATS[result])


def differing(recordings, gpu, form, result, accumulator):
    key = f"{gpu}/{form}/"
    a, b = (recordings[key + name].view(DTYPE_OF[form]) for name in "ab")
    c = recordings[key + "c"].view(np.float32).astype(np.float16 if result == "fp16" else np.float32)
    if form in ("E4M3", "E5M2") and gpu in ("H100", "H200") and result == "fp32":
        c = np.zeros_like(c)  # recorded without the addend
    got = mp.matmul(a[:, None, :], b[:, :, None], c[:, None, None], accumulator)[:, 0, 0].astype(np.float32)
    wanted = recordings[key + "d_" + result].view(np.float32)
    return int(np.count_nonzero(~same_bits(got, wanted))), len(wanted)


def all_sets(recordings):
    return sorted(key.replace("/d_", "/").split("/") for key in recordings if "/d_" in key)


@pytest.mark.parametrize("path", ["fast", "general"])
def test_no_recorded_row_of_any_gpu_differs(recordings, path, monkeypatch):
    if path == "general":
        monkeypatch.setattr(FastAligned, "suits", staticmethod(never))
    sets = all_sets(recordings)
    counts = {"/".join(which): differing(recordings, *which, unit_of(*which)) for which in sets}
    assert len(counts) == SETS
    assert {name: count for name, (count, _) in counts.items() if count} == {}
    assert sum(rows for _, rows in counts.values()) == SETS * 2500


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
def test_recordings_reject_another_number_of_bits_or_of_products(recordings, form):
    for wrong in ({"fraction_bits": 23}, {"fraction_bits": 25}, {"block": 2}, {"rounding": "nearest-even"}):
        unit = mp.tensor_core("ampere", **wrong)
        assert differing(recordings, "A100", form, "fp32", unit)[0] > 0, wrong


def test_recordings_fix_the_block_and_the_bits_of_every_unit(recordings):
    for which, wrong in (
        (["V100", "fp16", "fp32"], {"fraction_bits": 24}), (["V100", "fp16", "fp16"], {"block": 2}),
        (["H100", "fp16", "fp32"], {"fraction_bits": 24}), (["H100", "fp16", "fp32"], {"block": 8}),
        (["H100", "E4M3", "fp32"], {"block": 16}), (["H200", "E5M2", "fp32"], {"result_bits": 23}),
        (["L40S", "E4M3", "fp32"], {"block": 32}), (["Ada", "E5M2", "fp16"], {"fraction_bits": 14}),
        (["B200", "bf16", "fp32"], {"fraction_bits": 26}), (["B200", "tf32", "fp32"], {"fraction_bits": 24}),
    ):  # fmt: skip
        unit = unit_of(*which)
        changed = replace(unit, rows=tuple(replace(row, **wrong) for row in unit.rows))
        assert differing(recordings, *which, changed)[0] > 0, (which, wrong)


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
@pytest.mark.parametrize("form", ["E4M3", "E5M2"])
def test_recordings_show_fp8_running_through_the_fp16_unit(recordings, gpu, form):
    for wrong in ({"quads": False}, {"block": 32}, {"addend": "early"}):
        unit = mp.tensor_core(gpu, family="mma", result=mp.FP16, **wrong)
        assert differing(recordings, gpu, form, "fp16", unit)[0] > 0, wrong


def test_recordings_decide_neither_zero_products_nor_the_floor_of_the_exponent(recordings):
    for which in (["A100", "bf16", "fp32"], ["H100", "fp16", "fp16"], ["V100", "fp16", "fp16"]):
        for fields in ({"zero_products": "minimum-exponent"}, {"exponent_floor": None}, {"exponent_floor": -126}):
            unit = mp.tensor_core(which[0], result=FORMATS[which[2]], **fields)
            assert differing(recordings, *which, unit)[0] == 0


# --- an independent model: integers aligned one by one -------------------------------------------------------------


def exponent(x, fmt, zero):
    if x == 0:
        return zero
    return max(math.frexp(x)[1] - 1, fmt.min_exponent)


def cut(value: Fraction, unit: Fraction, down=False) -> Fraction:
    whole = math.floor(value / unit) if down else math.trunc(value / unit)
    return whole * unit


def power(e):
    return Fraction(2) ** e


def special(a, b, c):
    """The IEEE value of the sum if it is not finite."""
    total = c
    for x, y in zip(a, b, strict=True):
        with np.errstate(all="ignore"):
            total = float(np.float64(total) + np.float64(x) * np.float64(y))
    return None if math.isfinite(total) else total


def rounded(unit, value):
    if unit.rounding == "toward-zero":
        if abs(value) >= power(128):
            return math.copysign(math.inf, value)
        fmt = mp.FloatFormat("cut", exponent_bits=8, mantissa_bits=unit.result_bits)
        return exact.round_exact(value, fmt, "toward-zero") + 0.0
    return exact.round_exact(value, FORMATS[unit.result], "nearest-even") + 0.0


def aligned(unit, formats, a, b, c):
    if (value := special(a, b, c)) is not None:
        return value
    zero = -126 if unit.zero_products == "minimum-exponent" else None
    exponents = []
    for x, y in zip(a, b, strict=True):
        parts = [exponent(x, formats[0], zero), exponent(y, formats[1], zero)]
        exponents += [] if None in parts else [sum(parts)]
    c_exponent = exponent(c, FORMATS[unit.result], zero)
    exponents += [] if c_exponent is None else [c_exponent]
    exponents += [] if unit.exponent_floor is None else [unit.exponent_floor]
    if not exponents:
        return 0.0
    place = power(max(exponents) - unit.fraction_bits)
    total = sum((cut(Fraction(x) * Fraction(y), place) for x, y in zip(a, b, strict=True)), cut(Fraction(c), place))
    return rounded(unit, total)


def pairwise(unit, formats, a, b, c):
    def flush(x, least=2.0**-126):
        return math.copysign(0.0, x) if abs(x) < least else x

    def add(x, y):
        return flush(exact.round_exact(exact.add(x, y), mp.FP32))

    a = [0.0 if abs(x) < formats[0].min_normal else x for x in a]
    b = [0.0 if abs(x) < formats[1].min_normal else x for x in b]
    level = [flush(exact.round_exact(exact.mul(x, y), mp.FP32)) for x, y in zip(a, b, strict=True)]
    while len(level) > 1:
        level = [add(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return add(0.0 if abs(c) < 2.0**-126 else c, level[0])


def once_rounded(unit, formats, a, b, c):
    return exact.round_exact(exact.dot(a, b, c), mp.FP32)


def chain(unit, formats, a, b, c):
    for x, y in zip(a, b, strict=True):
        c = exact.round_exact(exact.fma(x, y, c), mp.FP32)
    return c


def two_stage(unit, formats, a, b, c):
    large = [math.copysign(math.inf, x * y) for x, y in zip(a, b, strict=True) if math.inf > abs(x * y) >= 2.0**128]
    if large or special(a, b, c) is not None:
        value = special([*a, *large], [*b, *([1.0] * len(large))], c)
        assert value is not None
        return value

    def products(pairs):
        pairs = [(x, y) for x, y in pairs if x != 0 and y != 0]
        if not pairs:
            return Fraction(0), None
        top = max(exponent(x, formats[0], 0) + exponent(y, formats[1], 0) for x, y in pairs)
        return sum(cut(Fraction(x) * Fraction(y), power(top - 24)) for x, y in pairs), top

    pairs = list(zip(a, b, strict=True))
    groups = [products(pairs[0::2]), products(pairs[1::2])] if unit.even_odd else [products(pairs)]
    tops = [top for _, top in groups if top is not None]
    value, top = groups[0]
    if unit.even_odd and tops:
        top = max(tops)
        value = sum(cut(part, power(top - 24), down=unit.second_cut == "toward-negative") for part, _ in groups)
    c_exponent = exponent(c, mp.FP32, None)
    largest = max(e for e in (top, c_exponent, -126) if e is not None)
    if unit.even_odd and c_exponent is not None and c_exponent < largest - 25:
        c = 0.0
    total = cut(value, power(largest - 31), down=unit.second_cut == "toward-negative") + cut(
        Fraction(c), power(largest - 24), down=unit.second_cut == "toward-negative"
    )
    return exact.round_exact(total, mp.FP32) + 0.0


BLOCK = {"aligned": aligned, "two-stage": two_stage, "pairwise": pairwise, "exact": once_rounded, "fma": chain}


def scalar(unit, formats, a, b, c):
    """One output of a unit, K filled up with zeros."""
    whole = unit.span or unit.block
    a, b = ([*map(float, x)] + [0.0] * (-len(x) % whole) for x in (a, b))
    late = unit.addend == "late" and unit.span
    for start in range(0, len(a), whole):
        order = list(range(start, start + whole))
        if unit.quads:
            order = [k for k in order if k % 4 < 2] + [k for k in order if k % 4 >= 2]
        part = 0.0 if late else c
        for first in range(0, whole, unit.block):
            ks = order[first : first + unit.block]
            part = BLOCK[unit.arithmetic](unit, formats, [a[k] for k in ks], [b[k] for k in ks], part)
        c = exact.round_exact(exact.add(part, c), FORMATS[unit.result]) if late else part
    return c


def dtype_of(name):
    return FORMATS[name].dtype


@st.composite
def tiles(draw, unit, specials=True):
    """Factors whose exponents are far apart, or cancel, or are subnormal, or any codes; and an addend."""
    a_name, b_name = draw(st.sampled_from(unit.inputs)), draw(st.sampled_from(unit.inputs))
    length = draw(st.integers(1, 2 * (unit.span or unit.block) + 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["wide", "cancel", "codes", "sparse", "extreme"]))
    operands = []
    for name, shape in ((a_name, (3, length)), (b_name, (length, 3)), (unit.result, (3, 3))):
        fmt = FORMATS[name]
        dtype = dtype_of(name)
        if kind == "codes" and specials:
            raw = rng.integers(0, 1 << min(fmt.bits, 32) if name != "tf32" else 1 << 32, shape)
            operands.append(raw.astype(f"u{np.dtype(dtype).itemsize}").view(dtype))
            continue
        low, high = fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent
        low, high = {"wide": (max(low, -30), min(high, 30)), "extreme": (low, high)}.get(kind, (max(low, -3), 2))
        with np.errstate(all="ignore"):
            values = np.ldexp(rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape), rng.integers(low, high + 1, shape))
            if kind == "sparse":
                values *= rng.random(shape) < 0.3
            values = np.clip(values, -fmt.max, fmt.max)
        operands.append(values.astype(dtype))
    if kind == "cancel" and length > 1:
        half = length // 2
        operands[0][:, half : 2 * half] = -operands[0][:, :half]
        operands[1][half : 2 * half] = operands[1][:half]
    return operands


def plain_rows():
    return [row for row in ROWS if not row.scale]


def name_of(row):
    return f"{row.architecture}-{row.family}-{'-'.join(row.inputs)}-{row.result}-{row.block}"


@pytest.mark.parametrize("unit", plain_rows(), ids=name_of)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_unit_computes_what_its_row_says(unit, data):
    floor = data.draw(st.sampled_from([unit.exponent_floor, unit.exponent_floor, None, -5]))
    if unit.arithmetic == "two-stage":
        unit = replace(unit, second_cut=data.draw(st.sampled_from(["toward-negative", "toward-zero"])))
    if unit.arithmetic == "aligned":
        zero = data.draw(st.sampled_from(["excluded", "excluded", "minimum-exponent"]))
        unit = replace(unit, exponent_floor=floor, zero_products=zero)
    a, b, c = data.draw(tiles(unit))
    if "tf32" in unit.inputs:
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    formats = [FORMATS[unit.inputs[0]] if x.dtype == np.float32 else mp_format(x) for x in (a, b)]
    got = run_unit(unit, tuple(formats), widened(a)[None], widened(b)[None], widened(c)[None])[0]
    wanted = np.array(
        [[scalar(unit, formats, x, y, float(z)) for y, z in zip(widened(b).T, row, strict=True)]
         for x, row in zip(widened(a), widened(c), strict=True)], np.float32,
    )  # fmt: skip
    assert same_bits(got, wanted).all(), (got, wanted)


def mp_format(x):
    return next(fmt for fmt in FORMATS.values() if fmt.name != "tf32" and fmt.dtype == x.dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("architecture", ["volta", "ampere", "ada", "hopper", "blackwell"])
@pytest.mark.parametrize("result", [mp.FP32, mp.FP16], ids=["fp32", "fp16"])
def test_the_fast_path_equals_the_general_one(dtype, architecture, result, monkeypatch):
    rng = np.random.default_rng(5)
    unit = mp.tensor_core(architecture, result=result)
    fmt = mp_format(np.zeros(1, dtype))
    if not any(fmt.name in row.inputs for row in unit.rows):
        with pytest.raises(ValueError, match=f"does not multiply {fmt.name}"):
            mp.matmul(np.zeros((1, 1), dtype), np.zeros((1, 1), dtype), accumulator=unit)
        return
    for spread, zeros in ((1, 0.0), (6, 0.3), (12, 0.9)):
        a, b = (
            (np.ldexp(rng.standard_normal((70, 70)), rng.integers(-spread, spread, (70, 70)) // 2)
             * (rng.random((70, 70)) >= zeros)).astype(dtype) for _ in range(2)
        )  # fmt: skip
        c = (rng.standard_normal((70, 70)) * 2.0**-20).astype(result.dtype)
        fast = mp.matmul(a, b, c, unit)
        with monkeypatch.context() as patch:
            patch.setattr(FastAligned, "suits", staticmethod(never))
            assert same_bits(fast, mp.matmul(a, b, c, unit)).all()


def test_the_fast_path_declines_what_it_cannot_hold(monkeypatch):
    hopper = mp.tensor_core("hopper")
    cases = {
        "a tiny accumulator beside nothing": (np.zeros((1, 4), np.float16), np.zeros((4, 1), np.float16), 1e-40),
        "an overflow": (np.full((1, 4), 2.0**120, np.float32), np.full((4, 1), 128.0, np.float32), 3e38),
        "products below float32": (np.full((1, 4), 2.0**-90, np.float32), np.full((4, 1), 2.0**-40, np.float32), 0.0),
        "products above float32": (np.full((1, 4), 2.0**90, np.float32), np.full((4, 1), 2.0**90, np.float32), 0.0),
    }
    for name, (a, b, c) in cases.items():
        addend = np.float32([[c]])
        fast = mp.matmul(a, b, addend, hopper)
        with monkeypatch.context() as patch:
            patch.setattr(FastAligned, "suits", staticmethod(never))
            assert same_bits(fast, mp.matmul(a, b, addend, hopper)).all(), name


def test_k_is_chained_block_by_block_through_the_accumulator():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((5, 64)).astype(np.float16), rng.standard_normal((64, 6)).astype(np.float16)
    unit = mp.tensor_core("hopper")
    total = np.zeros((5, 6), np.float32)
    for k in range(0, 64, 16):
        total = mp.matmul(a[:, k : k + 16], b[k : k + 16], total, unit)
    assert same_bits(total, mp.matmul(a, b, accumulator=unit)).all()


def test_ampere_splits_an_instruction_of_sixteen_and_hopper_does_not():
    a = np.zeros((1, 16), np.float16)
    a[0, [0, 8, 9]] = [2.0**13, -(2.0**13), 2.0**-11]
    b = np.ones((16, 1), np.float16)
    c = np.float32([[2.0**-11]])
    split = mp.matmul(a, b, c, mp.tensor_core("m16n8k16.f32.f16.f16.f32"))
    joint = mp.matmul(a, b, c, mp.tensor_core("m16n8k16.f32.f16.f16.f32", architecture="hopper"))
    assert (split.item(), joint.item()) == (2.0**-11, 2.0**-10)  # 2**13 + 2**-11 needs one bit more than fp32 has


def test_special_values_follow_the_exact_sum_and_nan_has_one_code():
    unit = mp.tensor_core("hopper")
    inf, big = np.float16(np.inf), np.float16(60000)

    def of(*pairs, c=0.0):
        a, b = np.array([[x for x, _ in pairs]], np.float16), np.array([[y] for _, y in pairs], np.float16)
        return mp.matmul(a, b, np.float32([[c]]), unit)

    assert of((inf, 1)).item() == math.inf
    assert of((inf, -1), (1, 1)).item() == -math.inf
    for nan in (of((inf, 0)), of((inf, 1), (inf, -1)), of((np.nan, 1)), of((inf, 1), c=-np.inf), of((1, 1), c=np.nan)):
        assert codes_of(nan).item() == 0x7FFFFFFF
    assert (
        codes_of(
            mp.matmul(np.float16([[np.nan]]), np.float16([[1]]), accumulator=mp.tensor_core("hopper", result=mp.FP16))
        ).item()
        == 0x7FFF
    )
    assert of((1, 1), c=3.4e38).item() == np.float32(3.4e38)
    assert (
        mp.matmul(np.float16([[big]]), np.float16([[big]]), accumulator=mp.tensor_core("ampere", result=mp.FP16)).item()
        == math.inf
    )
    assert math.copysign(1, of((-1, 0), (0, -1), c=-0.0).item()) == 1  # a zero is +0
    after = mp.matmul(np.float16([[inf] + [0] * 16 + [1]]), np.ones((18, 1), np.float16), accumulator=unit)
    assert after.item() == math.inf


def test_a_zero_product_claims_an_exponent_only_where_the_row_says_so():
    a, b = (
        np.float32([[0, 2.0**-30]]).astype(ml_dtypes.bfloat16),
        np.float32([[2.0**127], [1]]).astype(ml_dtypes.bfloat16),
    )
    assert mp.matmul(a, b, accumulator=mp.tensor_core("a100")).item() == 2.0**-30
    assert mp.matmul(a, b, accumulator=mp.tensor_core("a100", zero_products="minimum-exponent")).item() == 0


def test_a_floor_of_the_exponent_cuts_what_lies_far_below_it():
    a, b = np.float16([[2.0**-12, 2.0**-23]]), np.float16([[2.0**-13], [2.0**-23]])
    kept = mp.tensor_core("a100", result=mp.FP16, exponent_floor=None)
    assert mp.matmul(a, b, accumulator=kept).item() == 2.0**-24  # just above the middle
    assert mp.matmul(a, b, accumulator=mp.tensor_core("a100", result=mp.FP16)).item() == 0  # the middle, to even


@pytest.mark.parametrize(
    ("name", "architecture", "block", "inputs"),
    [
        ("m8n8k4.f32.f16.f16.f32", "volta", 4, ("fp16",)),
        ("m8n8k4.f32.f16.f16.f16", "volta", 4, ("fp16",)),
        ("m16n8k8.f32.f16.f16.f32", "turing", 8, ("fp16",)),
        ("m16n8k16.f32.f16.f16.f32", "ampere", 8, ("fp16",)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "ampere", 8, ("bf16",)),
        ("m16n8k4.f32.tf32.tf32.f32", "ampere", 4, ("tf32",)),
        ("m16n8k32.f32.e4m3.e5m2.f32", "ada", 16, ("float8_e4m3fn", "float8_e5m2")),
        ("m64n128k16.f32.f16.f16", "hopper", 16, ("fp16",)),
        ("wgmma.m64n8k32.f32.e4m3.e4m3", "hopper", 32, ("float8_e4m3fn",)),
        ("tcgen05.m128n256k32.f32.e2m1.e4m3", "blackwell", 32, ("float4_e2m1fn", "float8_e4m3fn")),
        ("f32_32x32x8f16", "cdna1", 4, ("fp16",)),
        ("v_mfma_f32_16x16x16_f16", "cdna1", 4, ("fp16",)),
        ("f32_32x32x8bf16_1k", "cdna2", 4, ("bf16",)),
        ("f32_16x16x8_xf32", "cdna3", 4, ("tf32",)),
        ("f32_16x16x32_fp8_bf8", "cdna3", 16, ("float8_e4m3fnuz", "float8_e5m2fnuz")),
    ],
)
def test_instruction_names_find_their_row(name, architecture, block, inputs):
    row = mp.tensor_core(name).rows[0]
    assert (row.architecture, row.block, row.inputs) == (architecture, block, inputs)


def test_an_instruction_shorter_than_the_block_adds_no_more_than_it_has():
    assert mp.tensor_core("m16n8k8.f32.f16.f16.f32", architecture="h100").rows[0].block == 8
    assert mp.tensor_core("f32_4x4x4_16b_f16", architecture="mi300x").rows[0].block == 4
    assert mp.tensor_core("m16n8k16.f16.e4m3.e4m3.f16", architecture="b200").rows[0].span == 16
    assert mp.tensor_core("f32_32x32x4bf16", architecture="cdna2").rows[0].block == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pascal",), "tensor core 'pascal' is none of volta, turing"),
        (("Hoper",), "cdna3 (did you mean 'hopper'?), nor a device such as v100"),
        (("m16n8k17.f32.f16.f16.f32",), "m8n8k4, mMnNk16, mMnNk32, mMnNk64, mMnNk8 (did you mean 'm16n8k16'?), types"),
        (("hopper", "ampere"), "architecture='ampere' says which one runs an instruction, and 'hopper' is an archite"),
        (("m16n8k16.f32.f16.f16.f32", "volta"), "instruction 'm16n8k16.f32.f16.f16.f32' is not known for volta"),
        (("m16n8k16.f32.f64.f64.f32",), "is not known for any architecture; shapes are"),
        (("m16n8k16",), "is not known for any architecture"),
        (("f32_16x16x32_fp8",), "is not known for any architecture"),
        (("f32_16x16x16_f17",), "is not known for any architecture"),
    ],
)
def test_an_unknown_unit_is_refused_with_the_known_ones(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mp.tensor_core(arguments[0], architecture=arguments[1] if len(arguments) > 1 else None)


def test_devices_and_results_have_more_than_one_name():
    assert mp.tensor_core("sm_90").rows == mp.tensor_core("H100").rows == mp.tensor_core("hopper").rows
    assert mp.tensor_core("gfx942").rows == mp.tensor_core("MI300X").rows
    assert mp.tensor_core("hopper", result="fp16").rows == mp.tensor_core("hopper", result=mp.FP16).rows


def test_an_instruction_has_the_result_that_its_name_says():
    with pytest.raises(
        ValueError, match="has no unit with family=None, result=fp16; leave family out, and choose result"
    ):
        mp.tensor_core("m16n8k16.f32.f16.f16.f32", result=mp.FP16)


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(
        TypeError, match="tensor_core has no field 'zero_product'; a row's fields are architecture, family"
    ):
        mp.tensor_core("hopper", zero_product="excluded")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero_products": "included"}, "zero_products='included' must be one of 'excluded', 'minimum-exponent'"),
        ({"second_cut": "up"}, "second_cut='up' must be one of 'toward-negative', 'toward-zero'"),
        ({"rounding": "up"}, "rounding='up' must be one of 'toward-zero', 'nearest-even'"),
        ({"block": 0}, "block=0 must be a whole number of at least 1"),
        ({"block": 2.0}, "block=2.0 must be a whole number of at least 1"),
        ({"block": 24}, "block=24 must be a power of two, as every unit's is"),
        ({"span": 8}, "block=16 must be a multiple of group=1 and divide span=8; change them together"),
        ({"fraction_bits": 47}, "fraction_bits=47 and block=16 make sums of more than 53 bits, which are not exact"),
        ({"result_bits": 24}, "result_bits=24 does not fit fp32, which stores 23"),
        ({"exponent_floor": 0.5}, "exponent_floor=0.5 must be an integer, or None for no floor"),
    ],
)
def test_a_field_that_means_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mp.tensor_core("m16n8k16.f32.f16.f16.f32", architecture="hopper", **fields)


@pytest.mark.parametrize("bits", [28, 29, 44])
def test_more_fraction_bits_than_int32_holds_are_exact_too(bits):
    unit = mp.tensor_core("m16n8k16.f32.f16.f16.f32", architecture="hopper", fraction_bits=bits)
    a = np.float16([[1024.0, 2.0**-14, 1.5 * 2.0**-5]])
    b = np.float16([[1.0], [2.0**-14], [1.0]])
    cut = sum(math.floor(x * 2.0 ** (bits - 10)) for x in (1024.0, 2.0**-28, 1.5 * 2.0**-5)) * 2.0 ** (10 - bits)
    assert mp.matmul(a, b, accumulator=unit).item() == math.floor(cut * 2.0**13) * 2.0**-13


def test_a_device_is_known_however_it_is_written():
    names = ("h100", "H-100", "sm_90", "H200", "gh200")
    assert {mp.tensor_core(name).rows for name in names} == {mp.tensor_core("hopper").rows}
    assert mp.tensor_core("RTX 4090").rows == mp.tensor_core("ada").rows
    with pytest.raises(TypeError, match="name=90 must be a string such as 'hopper'"):
        mp.tensor_core(90)


def test_the_text_of_a_unit_teaches():
    assert repr(mp.tensor_core("volta")) == "TensorCore(tensor_core(volta): volta, fp16 to fp32)"
    assert repr(mp.tensor_core("h100", result="fp16")).endswith("hopper, fp16, float8_e4m3fn, float8_e5m2 to fp16)")


def test_a_family_without_units_is_refused():
    with pytest.raises(ValueError, match=r"tensor_core\('volta'\) has no unit with family='wgmma', result=fp32; leave"):
        mp.tensor_core("volta", family="wgmma")


def test_every_architecture_has_rows_with_source_and_witness():
    assert ARCHITECTURES == (
        "volta", "turing", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna1", "cdna2", "cdna3",
    )  # fmt: skip
    for row in ROWS:
        assert row.source
        assert row.witness
        assert set(row.inputs) <= set(FORMATS)
        assert row.block > 0
        assert row.shapes


# --- block scales ----------------------------------------------------------------------------------------------------


def scaled_scalar(unit, formats, a, b, scales, c):
    """One output of a scaled row: scale exponents join the alignment, significands the values."""
    for first in range(0, len(a), unit.block):
        terms = []
        for k in range(first, min(first + unit.block, len(a)), unit.group):  # what is filled up is zero
            s, t = (scale[k // unit.scale_block] for scale in scales)
            dot = sum(Fraction(float(a[i])) * Fraction(float(b[i])) for i in range(k, k + unit.group))
            e = exponent(abs(s), FORMATS[unit.scale], 0) + exponent(abs(t), FORMATS[unit.scale], 0)
            if unit.group == 1:
                e += exponent(float(a[k]), formats[0], -10000) + exponent(float(b[k]), formats[1], -10000)
            value = dot * abs(Fraction(float(s)) * Fraction(float(t)))
            terms += [(value, e)] if value else []
        if c:
            terms.append((Fraction(c), exponent(c, mp.FP32, 0)))
        place = power(max((e for _, e in terms), default=0) - unit.fraction_bits)
        c = rounded(unit, sum((cut(value, place) for value, _ in terms), Fraction(0)))
    return c


def scaled_rows():
    return [row for row in ROWS if row.scale]


@pytest.mark.parametrize("unit", scaled_rows(), ids=lambda row: f"{name_of(row)}-{row.scale}-{row.scale_block}")
def test_block_scaled_products_compute_what_their_row_says(unit):
    rng = np.random.default_rng(11)
    accumulator = mp.tensor_core(unit.architecture)
    for trial in range(8):
        length = (2 if trial % 2 else 3) * unit.scale_block
        names = rng.choice(unit.inputs, 2)
        if set(names) == {"float4_e2m1fn"} and unit.block == 32:
            continue  # both e2m1 is the faster row's
        a, b = (
            rng.integers(0, 1 << FORMATS[name].bits, shape).astype(np.uint8).view(dtype_of(name))
            for name, shape in zip(names, ((3, length), (length, 2)), strict=True)
        )
        a, b = (np.where(np.isfinite(x.astype(np.float32)), x, np.ones_like(x)) for x in (a, b))
        scales = [
            np.exp2(rng.integers(-6, 7, shape)).astype(dtype_of(unit.scale))
            * (np.ones_like(1.0, dtype_of(unit.scale)) if "e8m0" in unit.scale else dtype_of(unit.scale).type(1.125))
            for shape in ((3, length // unit.scale_block), (length // unit.scale_block, 2))
        ]
        scales = [scale.astype(dtype_of(unit.scale)) for scale in scales]
        c = (rng.standard_normal((3, 2)) * 10.0 ** rng.integers(-2, 6)).astype(np.float32)
        got = mp.matmul(a, b, c if trial else None, accumulator, scales=tuple(scales))
        formats = [FORMATS[name] for name in names]
        wanted = [
            [scaled_scalar(unit, formats, widened(a)[i], widened(b)[:, j],
                           (widened(scales[0])[i], widened(scales[1])[:, j]), float(c[i, j]) if trial else 0.0)
             for j in range(2)] for i in range(3)
        ]  # fmt: skip
        assert same_bits(got, np.array(wanted, np.float32)).all(), trial


def test_a_nan_scale_makes_its_rows_nan_and_a_batch_shares_scales():
    a, b = np.ones((2, 3, 64), ml_dtypes.float4_e2m1fn), np.ones((64, 2), ml_dtypes.float4_e2m1fn)
    scale_a, scale_b = np.ones((3, 2), ml_dtypes.float8_e8m0fnu), np.ones((2, 2), ml_dtypes.float8_e8m0fnu)
    scale_a[1, 0] = np.nan
    for unit in (mp.tensor_core("blackwell"), mp.tensor_core("blackwell-rtx")):
        got = mp.matmul(a, b, np.ones((3, 2), np.float32), unit, scales=(scale_a, scale_b))
        assert got.shape == (2, 3, 2)
        assert np.isnan(got[:, 1]).all()
        assert (got[:, [0, 2]] == 65).all()
    eighth = a.astype(ml_dtypes.float8_e4m3fn)[0]
    got = mp.matmul(
        eighth, b.astype(ml_dtypes.float8_e4m3fn), accumulator=mp.tensor_core("b200"), scales=(scale_a, scale_b)
    )
    assert np.isnan(got[1]).all()
    assert (got[[0, 2]] == 64).all()


@pytest.mark.parametrize("form", ["MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP4", "NVFP4"])
def test_block_arrays_multiply_as_their_elements_and_scales(form):
    rng = np.random.default_rng(8)
    fmt = getattr(blocks, form)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 80), (80, 4)))
    a, b = quantize(x, fmt), quantize(y, fmt, axis=-2)
    exact = dequantize(a) @ dequantize(b)
    for name in ("blackwell", "blackwell-rtx"):
        got = mp.matmul(a, b, np.float32(1), mp.tensor_core(name))
        assert got.dtype == np.float32
        assert np.abs(got - 1 - exact).max() <= 1e-5 * np.abs(exact).max()
    with pytest.raises(ValueError, match="exact takes no scales"):
        mp.matmul(a, b, accumulator="exact")


def test_tensor_scales_multiply_the_sum_and_exclude_an_addend():
    rng = np.random.default_rng(9)
    x = 1000 * rng.standard_normal((4, 32)).astype(np.float32)
    scale = tensor_scale_of(x, blocks.NVFP4)
    a, b = quantize(x, blocks.NVFP4, tensor_scale=scale), quantize(x.T, blocks.NVFP4, axis=0)
    got = mp.matmul(a, b, accumulator=mp.tensor_core("b200"), out_format=mp.BF16).astype(np.float64)
    exact = dequantize(a).astype(np.float64) @ dequantize(b)
    assert np.abs(got - exact).max() <= 2.0**-8 * np.abs(exact).max()
    with pytest.raises(ValueError, match="c cannot join a sum that tensor scales multiply by"):
        mp.matmul(a, b, np.float32(1), mp.tensor_core("b200"))


def test_blocks_must_run_along_the_sum():
    a = quantize(np.ones((32, 32), np.float32), blocks.MXFP8_E4M3)
    with pytest.raises(
        ValueError, match=r"the blocks of b, of shape \(32, 32\), run along axis -1, and must run along"
    ):
        mp.matmul(a, a, accumulator=mp.tensor_core("blackwell"))


def test_scales_that_do_not_fit_are_refused():
    a, b = np.ones((3, 64), ml_dtypes.float8_e4m3fn), np.ones((64, 2), ml_dtypes.float8_e4m3fn)
    scale = np.ones((3, 2), ml_dtypes.float8_e8m0fnu)
    unit = mp.tensor_core("blackwell")
    with pytest.raises(ValueError, match=r"scales of shapes \(3, 2\) and \(3, 2\) do not fit"):
        mp.matmul(a, b, accumulator=unit, scales=(scale, scale))
    with pytest.raises(ValueError, match=r"scales of shapes \(3,\) and \(2, 2\) do not fit"):
        mp.matmul(a, b, accumulator=unit, scales=(scale[:, 0], scale[:2]))
    with pytest.raises(ValueError, match="scales are float8_e8m0fnu and float32, and must be of one format"):
        mp.matmul(a, b, accumulator=unit, scales=(scale, np.ones((2, 2), np.float32)))
    with pytest.raises(ValueError, match="exact takes no scales"):
        mp.matmul(a, b, accumulator="exact", scales=(scale, scale[:2]))
    with pytest.raises(ValueError, match="with a float8_e8m0fnu scale for every 32; it multiplies"):
        mp.matmul(a, b, accumulator=mp.tensor_core("hopper"), scales=(scale, scale[:2]))
