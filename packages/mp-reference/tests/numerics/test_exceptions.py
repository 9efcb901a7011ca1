"""Exception flags where SoftFloat does not reach: other formats, bad arguments, counts."""

from __future__ import annotations

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics.exceptions import ExceptionFlag, count_exceptions, exception_flags


@pytest.mark.parametrize("fmt", [mp.BF16, mp.E5M2], ids=lambda fmt: fmt.name)
def test_each_exception_is_raised_where_ieee_says(fmt):
    def values(*numbers):
        return np.array(numbers).astype(np.float32).astype(fmt.dtype)

    tiny = fmt.min_normal
    assert exception_flags("mul", values(0.0), values(np.inf)).tolist() == [ExceptionFlag.INVALID]
    assert exception_flags("div", values(-1.0), values(0.0)).tolist() == [ExceptionFlag.DIVIDE_BY_ZERO]
    assert exception_flags("rsqrt", values(-0.0, 0.0, -1.0)).tolist() == [8, 8, 16]
    over = ExceptionFlag.OVERFLOW | ExceptionFlag.INEXACT
    assert exception_flags("mul", values(fmt.max), values(2.0)).tolist() == [over]
    assert exception_flags("mul", values(fmt.max), values(2.0), rounding="toward-zero").tolist() == [over]
    under = ExceptionFlag.UNDERFLOW | ExceptionFlag.INEXACT
    assert exception_flags("mul", values(tiny * (1 + fmt.epsilon)), values(0.625)).tolist() == [under]
    assert exception_flags("mul", values(tiny), values(0.5)).tolist() == [0]
    assert exception_flags("add", values(1.0), values(fmt.epsilon / 4)).tolist() == [ExceptionFlag.INEXACT]
    assert exception_flags("sub", values(1.0), values(1.0)).tolist() == [0]


def test_tininess_before_and_after_rounding_differ_at_the_smallest_normal_number():
    a, b = np.float16([2.0**-14 * (1 + 2.0**-10)]), np.float16([1 - 2.0**-10])
    assert float(mp.mul(a, b)[0]) == 2.0**-14
    assert exception_flags("mul", a, b, tininess="before").tolist() == [ExceptionFlag.UNDERFLOW | ExceptionFlag.INEXACT]
    assert exception_flags("mul", a, b, tininess="after").tolist() == [ExceptionFlag.INEXACT]


def test_counts_are_those_of_the_flags():
    a, b = np.random.default_rng(0).integers(0, 65536, (2, 5000), dtype=np.uint16).view(np.float16)
    flags = exception_flags("div", a, b)
    counts = count_exceptions("div", a, b)
    assert counts.invalid == np.count_nonzero(flags & 16)
    assert counts.divide_by_zero == np.count_nonzero(flags & 8)
    assert counts.overflow == np.count_nonzero(flags & 4)
    assert counts.underflow == np.count_nonzero(flags & 2)
    assert counts.inexact == np.count_nonzero(flags & 1)
    assert min(counts.invalid, counts.overflow, counts.underflow, counts.inexact) > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: exception_flags("pow", x, x), ValueError, "operation 'pow' must be one of add, sub, mul"),
        (lambda x: exception_flags("add", x, x, tininess="never"), ValueError, "tininess='never' must be 'after' or"),
        (lambda x: exception_flags("add", x, x, rounding="stochastic"), ValueError, "choose one of the other six"),
        (lambda x: exception_flags("add", x, x, rounding="up"), ValueError, "rounding='up' must be one of"),
        (
            lambda x: exception_flags("add", x),
            TypeError,
            "add takes 2 operands, got 1; pass as many arrays of one dtype",
        ),
        (lambda x: count_exceptions("sqrt", x, x), TypeError, "sqrt takes 1 operands, got 2; pass as many arrays"),
        (
            lambda x: exception_flags("add", x.astype(mp.E4M3FN.dtype), x.astype(mp.E4M3FN.dtype)),
            TypeError,
            "float8_e4m3fn has no infinity, so IEEE exceptions are not defined for it; use an ieee format",
        ),
    ],
)
def test_bad_arguments_are_refused_with_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call(np.float16([1]))
