"""The oracle is independent of what it judges, and right where a person can tell."""

from __future__ import annotations

import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from mp_conformance import oracle, training_oracle
from mp_conformance.elementary_oracle import FUNCTIONS, every_input, expected
from mp_conformance.implementations import subject_named
from mp_reference.spec.formats import BF16, E4M3FN, E8M0FNU, FORMATS, FP16, FP32, FloatFormat


def test_the_oracle_loads_no_code_that_rounds() -> None:
    code = (
        "import sys, mp_conformance.oracle, mp_conformance.training_oracle\n"
        "import mp_reference.numerics.exact\n"
        "bad = [m for m in sys.modules if m.startswith('mp_reference') and m.split('.')[-1] in "
        "('rounding', 'rounding_kernels', 'codec', 'arithmetic', 'odd', 'step', 'optimizers', 'clipping')"
        " and '.spec.' not in m]\n"
        "print(bad)"
    )
    out = subprocess.run(
        [sys.executable, "-c", "import types, sys; sys.modules['mp_conformance'] = types.ModuleType('mp_conformance');"
         f"sys.modules['mp_conformance'].__path__ = [{str(__import__('mp_conformance').__path__[0])!r}]\n" + code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("value", "fmt", "answer"),
    [
        (1 + 2**-8 + 2**-40, BF16, 1.0078125),
        (1 + 2**-11 + 2**-40, FP16, 1.0009765625),
        (16973823, BF16, 16908288.0),
        (-431.99999999999994, E4M3FN, -416.0),
        (464.0, E4M3FN, 448.0),
        (65519.99, FP16, 65504.0),
        (65520.0, FP16, math.inf),
        (0.75, E8M0FNU, 1.0),
    ],
)
def test_known_traps_come_out_as_published(value: float, fmt: FloatFormat, answer: float) -> None:
    x = np.array([value], np.int64 if isinstance(value, int) else np.float64)
    assert float(oracle.cast(x, fmt)[0]) == answer


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.bits <= 16 and f.signed], ids=lambda fmt: fmt.name)
def test_the_fast_cast_by_midpoints_agrees_with_fractions_at_ties_and_their_neighbours(fmt: FloatFormat) -> None:
    _, edges = oracle.midpoints_of(fmt)
    ties = edges[:: max(1, len(edges) // 700)].astype(np.float32)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    specials = np.float32([0.0, -0.0, np.inf, -np.inf, 1e30, *([np.nan] if fmt.has_nan else [])])
    x = np.concatenate([x, -x, specials])
    fast, slow = oracle.cast_by_midpoints(x, fmt), oracle.cast(x, fmt)
    both_nan = np.isnan(fast.astype(np.float64)) & np.isnan(slow.astype(np.float64))
    same = (oracle.code_of(fast) == oracle.code_of(slow)) | both_nan
    assert same.all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda fmt: fmt.name)
def test_runs_of_float32_patterns_are_cast_as_their_numbers_are(fmt: FloatFormat) -> None:
    ties = [0xFFE, 0x2FFE, 0x7FFE, 0x17FFE]  # two patterns before one to the even code below, and one to that above
    binades = [(field << 23) + offset for field in range(0, 512, 5) for offset in (0, *ties)]
    borders = [0, 0x477F0000, 0x477FE000, 0x7F7F0000, 0x7F800000, 0x7FFF0000, 0x80000000, 0xC77F0000, 0xFF7FC000]
    for start in [*binades, *borders]:
        for count in (1, 5, 1 << 14):
            numbers = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32).view(np.float32)
            run = oracle.cast_float32_patterns(start, count, fmt)
            np.testing.assert_array_equal(run.view(np.uint16), oracle.cast_by_midpoints(numbers, fmt).view(np.uint16))


def test_codes_and_values_go_round() -> None:
    x = np.array([1.5, -0.0, np.inf], ml_dtypes.bfloat16)
    assert oracle.encode(oracle.values_of(x), BF16).view(np.uint16).tolist() == x.view(np.uint16).tolist()
    assert oracle.values_of(np.array([3, -4])) == [3, -4]
    with pytest.raises(KeyError):
        oracle.encode([1.0001], BF16)
    assert oracle.encode([1.5], FP32).dtype == np.float32


def test_minimum_and_maximum_order_the_zeros_and_pass_nan_on() -> None:
    a, b = np.float16([0.0, 1.0, np.nan]), np.float16([-0.0, 2.0, 0.0])
    assert np.signbit(oracle.arithmetic("minimum", (a, b), FP16))[0]
    assert not np.signbit(oracle.arithmetic("maximum", (a, b), FP16))[0]
    assert np.isnan(oracle.arithmetic("maximum", (a, b), FP16)[2])
    assert oracle.arithmetic("less", (a, b), FP16).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("operation", "operands", "raised"),
    [
        ("add", (1.0, 1.0), set()),
        ("add", (1.0, 2.0**-20), {"inexact"}),
        ("add", (math.inf, -math.inf), {"invalid"}),
        ("mul", (60000.0, 60000.0), {"overflow", "inexact"}),
        ("mul", (2.0**-14, 2.0**-11 * 1.5), {"underflow", "inexact"}),
        ("mul", (2.0**-14, 0.5), set()),
        ("div", (1.0, 0.0), {"infinite"}),
        ("div", (math.inf, 0.0), set()),
        ("div", (0.0, 0.0), {"invalid"}),
        ("sqrt", (-1.0,), {"invalid"}),
        ("sqrt", (math.nan,), set()),
        ("fma", (0.0, math.inf, math.nan), {"invalid"}),
    ],
)
def test_flags_are_those_of_the_standard(operation: str, operands: tuple[float, ...], raised: set[str]) -> None:
    arrays = tuple(np.float16([value]) for value in operands)
    assert oracle.flags(operation, arrays, FP16) == [frozenset(raised)]


def test_a_signalling_nan_is_invalid() -> None:
    signalling = np.array([0x7C01], np.uint16).view(np.float16)
    assert oracle.flags("add", (signalling, np.float16([1.0])), FP16) == [frozenset({"invalid"})]


def test_fp32_scalars_round_every_operation() -> None:
    one, third = training_oracle.F32(1.0), training_oracle.F32(1.0) / training_oracle.F32(3.0)
    assert third.value == float(np.float32(1) / np.float32(3))
    assert (-(one - third)).value == -float(np.float32(1) - np.float32(third.value))
    assert training_oracle.F32(2.0).sqrt().value == float(np.sqrt(np.float32(2)))
    assert math.isnan(training_oracle.F32(math.nan).max(one).value)


def test_a_norm_beyond_fp32_stays_finite_and_bad_gradients_show() -> None:
    assert training_oracle.norm_of([[3e38, 3e38]]) == pytest.approx(math.sqrt(2) * 3e38)
    assert training_oracle.norm_of([]) == 0.0
    assert training_oracle.norm_of([[math.inf]]) == math.inf
    assert math.isnan(training_oracle.norm_of([[math.nan, 1.0]]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_elementary_oracle_agrees_with_three_hundred_bits_on_a_sample(function: str) -> None:
    import mpmath

    x, wanted = every_input(FP16), expected(function, FP16)
    with mpmath.workprec(300):
        for code in range(0, 65536, 257):
            value = float(x[code])
            if not math.isfinite(value) or not math.isfinite(float(wanted[code])):
                continue
            exact = FUNCTIONS[function][1](mpmath.mpf(value)) if value else None
            if exact is None or isinstance(exact, mpmath.mpc) or exact == 0:
                continue
            near = float(wanted[code])
            step = 2.0 ** (max(math.frexp(near)[1] - 1, -14) - 10)
            assert abs(exact - near) <= step / 2 * (1 + 1e-6), (function, hex(code))


def test_two_independent_witnesses_agree_with_the_oracle_on_the_same_operands() -> None:
    pytest.importorskip("softfloatpy", reason="the extra softfloat is not installed")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 65536, 500).astype(np.uint16).view(np.float16) for _ in range(2))
    ours = oracle.arithmetic("mul", (a, b), FP16)
    theirs = subject_named("softfloat").perform("mul", a, b)
    assert ((oracle.code_of(ours) == oracle.code_of(theirs)) | np.isnan(ours)).all()


@pytest.mark.parametrize(
    ("operands", "rounding", "raised"),
    [
        (((65504.0, 65504.0)), "toward-zero", {"overflow", "inexact"}),  # gives 65504, and yet it overflowed
        (((65504.0, 8.0)), "toward-zero", {"inexact"}),
        (((65504.0, 8.0)), "toward-positive", {"overflow", "inexact"}),
        (((-65504.0, -8.0)), "toward-positive", {"inexact"}),
        (((65504.0, 16.0)), "nearest-away", {"overflow", "inexact"}),
    ],
)
def test_overflow_depends_on_the_rounding(operands: tuple[float, float], rounding: str, raised: set[str]) -> None:
    arrays = tuple(np.float16([x]) for x in operands)
    assert oracle.flags("add", arrays, FP16, rounding) == [frozenset(raised)]


def test_a_product_just_below_the_normal_range_is_tiny_unless_the_rounding_lifts_it() -> None:
    arrays = np.float16([2.0**-14 * (1 + 2**-10)]), np.float16([1 - 2.0**-11])  # 2**-14 less a little
    just_below = {"underflow", "inexact"}
    assert oracle.flags("mul", arrays, FP16, "toward-zero") in ([frozenset(just_below)], [frozenset({"inexact"})])
    tiny = np.float16([2.0**-14]), np.float16([1 - 2.0**-11])  # exactly between two subnormals
    assert oracle.flags("mul", tiny, FP16, "toward-zero") == [frozenset(just_below)]
    assert oracle.flags("mul", tiny, FP16, "toward-positive") == [frozenset(just_below)]
