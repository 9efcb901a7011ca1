"""What a caller may hand to ``round_to``: Python numbers, other byte orders, odd outputs, random bits; and what not."""

from __future__ import annotations

import decimal
import re
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.arguments import carried
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.codec import decode, encode
from mp_reference.numerics.rounding import flush_of, round_to

ROUNDINGS = ("nearest-even", "toward-zero", "toward-positive", "to-odd")


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, int])
def test_an_integer_zero_without_axes_rounds_without_a_warning(dtype):
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        assert round_to(dtype(0), mp.FP16) == 0


@pytest.mark.parametrize("value", [-(2**63), -(2**63) + 1, -(2**53) - 1, -1, 0, 1, 2**53 + 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_integers_without_axes_round_as_in_an_array(value, rounding):
    array = np.array([value])
    wanted = exact.round_exact(value, mp.BF16, rounding)
    assert float(round_to(array, mp.BF16, rounding)[0]) == wanted
    assert float(round_to(array.dtype.type(value), mp.BF16, rounding)) == wanted


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_long_integers_in_a_list_are_rounded_once_whatever_stands_beside_them(rounding):
    long = 2**63 + 2**55 + 1  # NumPy reads the list as float64, which drops the last bit and makes a tie
    for beside in (-1, 0.5, float("inf"), float("nan"), Fraction(1, 3)):
        got = round_to([[long], [beside]], mp.BF16, rounding)
        assert float(got[0, 0]) == exact.round_exact(long, mp.BF16, rounding)
        wanted = beside if isinstance(beside, float) else exact.round_exact(beside, mp.BF16, rounding)
        assert differing_bits(got[1], np.array([wanted])) == 0


def test_objects_may_be_any_numbers_of_python():
    numbers = [
        -0.0, float("inf"), float("-inf"), float("nan"), 2**200, -1, True, Fraction(1, 3), decimal.Decimal("0.1"),
        np.float32(0.1), ml_dtypes.bfloat16(-0.0), np.int8(-3),
    ]  # fmt: skip
    wanted = [
        exact.round_exact(v if isinstance(v, float) else Fraction(v), mp.FP16)
        for v in [*numbers[:-3], float(np.float32(0.1)), -0.0, -3]
    ]
    assert differing_bits(round_to(np.array(numbers, object), mp.FP16), np.array(wanted)) == 0


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", ">i4", ">i8", ">u8"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_numbers_of_the_other_byte_order_round_alike(dtype, rounding):
    swapped = np.array([1.5, 3.0, 257.0], dtype)
    here = swapped.astype(swapped.dtype.newbyteorder("="))
    got = round_to(swapped, mp.E4M3FN, rounding)
    assert got.dtype.isnative
    assert differing_bits(got, round_to(here, mp.E4M3FN, rounding)) == 0
    assert encode(swapped, mp.E4M3FN, rounding).tolist() == encode(here, mp.E4M3FN, rounding).tolist()


@pytest.mark.parametrize("subnormals", [True, 1, np.True_])
def test_every_true_keeps_subnormals(subnormals):
    assert flush_of(subnormals) == ""
    assert round_to(1e-40, mp.BF16, subnormals=subnormals) > 0


@pytest.mark.parametrize("subnormals", [False, 0, np.False_, "flush-after"])
def test_every_false_flushes_them(subnormals):
    assert flush_of(subnormals) == "after"
    assert round_to(1e-40, mp.BF16, subnormals=subnormals) == 0


def test_random_bits_may_lie_where_the_results_go():
    x = np.linspace(-3, 3, 100_000, dtype=np.float32)
    memory = np.random.default_rng(0).integers(0, 2**32, x.size + 7, dtype=np.uint32)
    for first in (0, 7):
        room = memory.copy()
        bits, out = room[: x.size], room.view(np.float32)[first : first + x.size]
        wanted = round_to(x, mp.FP16, "stochastic", random_bits=bits.copy())
        got = round_to(x, mp.FP16, "stochastic", random_bits=bits, out=out)
        assert got is out
        assert differing_bits(got, wanted) == 0


READ_ONLY = np.zeros(2, np.float32)
READ_ONLY.flags.writeable = False
TWO = np.ones(2, np.float32)
GOT = "round_to takes float32, float64, integers, float16, ml_dtypes or Fraction, got an element of type "
WAY_OUT = "; convert exactly first, for example [Fraction(v) for v in x]"
REFUSED = {
    "no number": (lambda: round_to(None, mp.FP16), TypeError, GOT + "NoneType" + WAY_OUT),
    "an object without a number": (
        lambda: round_to(np.array([1, {}], object), mp.FP16),
        TypeError,
        GOT + "dict" + WAY_OUT,
    ),
    "a decimal NaN": (lambda: round_to(decimal.Decimal("nan"), mp.FP16), TypeError, GOT + "Decimal" + WAY_OUT),
    "the name of a format": (
        lambda: round_to(TWO, "fp16"),
        TypeError,
        "fmt='fp16' must be a FloatFormat; use format_named('fp16')",
    ),
    "a dtype": (
        lambda: mp.cast(TWO, np.float16),
        TypeError,
        "fmt=<class 'numpy.float16'> must be a FloatFormat; use one of FORMATS, such as FP16, or build one",
    ),
    "a name to encode": (
        lambda: encode(TWO, "fp16"),
        TypeError,
        "fmt='fp16' must be a FloatFormat; use format_named('fp16')",
    ),
    "a name to decode": (
        lambda: decode(np.uint8([1]), "fp8"),
        TypeError,
        "fmt='fp8' must be a FloatFormat; use one of FORMATS, such as FP16, or build one",
    ),
    "a list to write to": (
        lambda: round_to(TWO, mp.FP16, out=[0.0, 0.0]),
        TypeError,
        "out is a list and must be an array; allocate it with np.empty",
    ),
    "a read-only output": (
        lambda: round_to(TWO, mp.FP16, out=READ_ONLY),
        ValueError,
        "out is read-only; leave it out, or allocate it with np.empty",
    ),
    "half a thread": (
        lambda: round_to(TWO, mp.FP16, threads=0.5),
        ValueError,
        "threads=0.5 must be a whole number of at least 1; threads=1 starts none",
    ),
    "too few random bits": (
        lambda: round_to(TWO, mp.FP16, "stochastic", random_bits=np.zeros(3, np.uint8)),
        ValueError,
        "random_bits have shape (3,) and must broadcast to (2,), that of x; draw as many",
    ),
    "random bits of more axes": (
        lambda: round_to(TWO, mp.FP16, "stochastic", random_bits=np.zeros((1, 2), np.uint8)),
        ValueError,
        "random_bits have shape (1, 2) and must broadcast to (2,), that of x; draw as many",
    ),
    "half a random bit": (
        lambda: round_to(TWO, mp.FP16, "stochastic", random_bits=np.uint8(1), random_width=2.5),
        TypeError,
        "random_width=2.5 must be an integer; leave it out to use all bits",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_says_why_and_what_to_do(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_an_array_of_a_carrier_is_taken_as_it_is():
    assert carried(TWO) is TWO
    assert carried([0.5, 1.0]).dtype == np.float64
