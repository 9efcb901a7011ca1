"""Results and flags against Berkeley SoftFloat, in all of its modes."""

from __future__ import annotations

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import arithmetic
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.exceptions import exception_flags
from mp_reference.numerics.ordering import UNORDERED, compare

sf = pytest.importorskip("softfloatpy", reason="Berkeley SoftFloat comes with the test extra: pip install softfloatpy")

MODES = {
    "nearest-even": sf.RoundingMode.NEAR_EVEN,
    "nearest-away": sf.RoundingMode.NEAR_MAX_MAG,
    "toward-zero": sf.RoundingMode.MIN_MAG,
    "toward-positive": sf.RoundingMode.MAX,
    "toward-negative": sf.RoundingMode.MIN,
}
OPERATIONS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "rem": 2, "sqrt": 1, "fma": 3}
TYPES = {"fp16": (sf.Float16, "f16", np.float16, ">u2"), "fp32": (sf.Float32, "f32", np.float32, ">u4")}


def drawn(dtype, size, rng):
    """Codes of all kinds, many near one, near zero, near overflow, and special."""
    width = 8 * np.dtype(dtype).itemsize
    fmt = mp.FP16 if width == 16 else mp.FP32
    codes = rng.integers(0, 2**width, size, dtype=np.uint64)
    one = (fmt.bias << fmt.mantissa_bits) + rng.integers(-40, 40, size)
    top = (((1 << fmt.exponent_bits) - 2) << fmt.mantissa_bits) + rng.integers(0, 1 << fmt.mantissa_bits, size)
    low = rng.integers(0, 3 << fmt.mantissa_bits, size)
    special = rng.choice([0, ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits, 1], size)
    choice = rng.integers(0, 8, size)
    near = np.select([choice == 0, choice == 1, choice == 2, choice == 3], [one, top, low, special], codes)
    sign = rng.integers(0, 2, size).astype(np.uint64) << np.uint64(width - 1)
    return (near.astype(np.uint64) ^ sign).astype(f"u{width // 8}").view(dtype)


def to_softfloat(values, name):
    kind, _, _, order = TYPES[name]
    codes = values.view(f"u{values.dtype.itemsize}").astype(order).tobytes()
    width = values.dtype.itemsize
    return [kind.from_bytes(codes[i : i + width]) for i in range(0, len(codes), width)]


def softfloat(name, operation, operands):
    """Codes and flags of SoftFloat, one element at a time."""
    _, prefix, dtype, order = TYPES[name]
    function = getattr(sf, f"{prefix}_{'mul_add' if operation == 'fma' else operation}")
    results, flags = [], []
    for row in zip(*(to_softfloat(operand, name) for operand in operands), strict=True):
        sf.set_exception_flags(0)
        results.append(function(*row).to_bytes())
        flags.append(int(sf.get_exception_flags()))
    codes = np.frombuffer(b"".join(results), order).astype(f"u{np.dtype(dtype).itemsize}")
    return codes.view(dtype), np.array(flags, np.uint8)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", TYPES)
def test_results_and_flags_are_those_of_softfloat(name, operation, rounding):
    dtype = TYPES[name][2]
    rng = np.random.default_rng([len(operation), len(rounding), len(name), ord(operation[0])])
    operands = [drawn(dtype, 2000, rng) for _ in range(OPERATIONS[operation])]
    if operation == "fma":  # a quarter of them cancel
        with np.errstate(all="ignore"):
            operands[2][::4] = -(operands[0] * operands[1])[::4]
    sf.set_rounding_mode(MODES[rounding])
    rounding_argument = {} if operation == "rem" else {"rounding": rounding}
    for tininess in ("after", "before"):
        mode = sf.TininessMode.AFTER_ROUNDING if tininess == "after" else sf.TininessMode.BEFORE_ROUNDING
        sf.set_tininess_mode(mode)
        results, flags = softfloat(name, operation, operands)
        assert differing_bits(getattr(arithmetic, operation)(*operands, **rounding_argument), results) == 0
        ours = exception_flags(operation, *operands, rounding=rounding, tininess=tininess)
        differ = np.flatnonzero(ours != flags)
        assert differ.size == 0, [(*(o[i] for o in operands), ours[i], flags[i]) for i in differ[:3]]


@pytest.mark.parametrize("rounding", MODES)
def test_float32_rounds_to_fp16_as_softfloat_does(rounding, edges):
    x = np.random.default_rng(1).choice(edges(mp.FP16), 5000)
    sf.set_rounding_mode(MODES[rounding])
    theirs = b"".join(sf.f32_to_f16(value).to_bytes() for value in to_softfloat(x, "fp32"))
    theirs = np.frombuffer(theirs, ">u2").astype(np.uint16).view(np.float16)
    assert differing_bits(mp.cast(x, mp.FP16, rounding), theirs) == 0


@pytest.mark.parametrize("rounding", MODES)
def test_int64_rounds_to_fp32_as_softfloat_does(rounding):
    rng = np.random.default_rng(2)
    x = rng.integers(-(2**63), 2**63 - 1, 3000) >> rng.integers(0, 60, 3000)
    sf.set_rounding_mode(MODES[rounding])
    values = [sf.Int64.from_bytes(int(value).to_bytes(8, "big", signed=True)) for value in x]
    theirs = np.frombuffer(b"".join(sf.i64_to_f32(value).to_bytes() for value in values), ">u4")
    assert differing_bits(mp.cast(x, mp.FP32, rounding), theirs.astype(np.uint32).view(np.float32)) == 0


@pytest.mark.parametrize("name", TYPES)
def test_comparisons_are_those_of_softfloat(name):
    _, prefix, dtype, _ = TYPES[name]
    rng = np.random.default_rng(3)
    a, b = drawn(dtype, 4000, rng), drawn(dtype, 4000, rng)
    b[::5] = a[::5]
    order = compare(a, b)
    for position, (x, y) in enumerate(zip(to_softfloat(a, name), to_softfloat(b, name), strict=True)):
        assert getattr(sf, f"{prefix}_eq")(x, y) == (order[position] == 0)
        assert getattr(sf, f"{prefix}_lt_quiet")(x, y) == (order[position] == -1)
        assert getattr(sf, f"{prefix}_le_quiet")(x, y) == (order[position] <= 0)
        assert (x.is_nan() or y.is_nan()) == (order[position] == UNORDERED)
