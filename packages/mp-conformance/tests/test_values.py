"""The strategies reach the places where behaviour changes; each landmark is also recognised by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from mp_conformance import Run, ask, select, training_oracle, values
from mp_conformance.histories import EVENTS, events, flags, histories, tensors
from mp_conformance.values import LANDMARKS, codes, floats_near, integers_near, landmarks, operands
from mp_reference.spec.formats import BF16, E2M1FN, E4M3FN, E8M0FNU, FORMATS, FP16, FP32, FloatFormat

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

QUIET = settings(
    max_examples=200, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def drawn(strategy: SearchStrategy[Any]) -> list[Any]:
    seen: list[Any] = []
    QUIET(given(strategy)(lambda value: seen.append(value)))()  # noqa: PLW0108  # Hypothesis needs a Python function
    return seen


@pytest.mark.parametrize("carrier", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_two_hundred_draws_visit_every_landmark_of_the_format(fmt: FloatFormat, carrier: type[Any]) -> None:
    seen = set().union(*(landmarks(x, fmt) for x in drawn(floats_near(fmt, carrier))))
    impossible: set[str] = set()
    if carrier is np.float32 and fmt.name == "fp32":  # float32 has nothing between or beyond its own numbers
        impossible = {"tie", "beside a tie", "below the subnormals", "beyond overflow"}
    if carrier is np.float32 and fmt.max_exponent == 127:
        impossible |= {"beyond overflow"}
    if carrier is np.float32 and fmt.min_exponent - fmt.mantissa_bits == -149:
        impossible |= {"below the subnormals"}
    if not fmt.has_zero:
        impossible |= {"subnormal"}
    assert seen >= set(LANDMARKS) - impossible


@pytest.mark.parametrize(
    ("value", "fmt", "expected"),
    [
        (np.float32(1 + 2**-11), FP16, {"tie"}),
        (np.nextafter(np.float32(1 + 2**-11), np.float32(2)), FP16, {"beside a tie"}),
        (np.float32(1.5), FP16, {"representable"}),
        (np.float32(2**-24), FP16, {"representable", "subnormal"}),
        (np.float32(2**-26), FP16, {"below the subnormals"}),
        (np.float32(2**-14), FP16, {"representable", "subnormal edge"}),
        (np.float32(65504), FP16, {"representable", "overflow edge"}),
        (np.float32(2**20), FP16, {"representable", "beyond overflow"}),
        (np.float32(0), BF16, {"positive zero"}),
        (np.float32(-0.0), BF16, {"negative zero"}),
        (np.float32(math.nan), BF16, {"nan"}),
        (np.float32(-math.inf), BF16, {"infinity"}),
    ],
)
def test_a_landmark_is_recognised(value: np.float32, fmt: FloatFormat, expected: set[str]) -> None:
    assert landmarks(np.array([value]), fmt) == expected


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3FN, FP32], ids=lambda fmt: fmt.name)
def test_drawn_integers_meet_ties_and_their_neighbours_of_both_signs(fmt: FloatFormat) -> None:
    seen = np.concatenate(drawn(integers_near(fmt)))
    assert (seen < 0).any()
    kinds = set()
    for value in map(abs, map(int, seen)):
        spare = value.bit_length() - fmt.mantissa_bits - 1
        if spare > 1 and value <= fmt.max:
            rest = value & ((1 << spare) - 1)
            kinds |= {"tie"} if rest == 1 << (spare - 1) else set()
            kinds |= {"beside"} if abs(rest - (1 << (spare - 1))) == 1 else set()
    assert kinds == {"tie", "beside"}


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3FN, E8M0FNU, E2M1FN, FP32], ids=lambda fmt: fmt.name)
def test_drawn_codes_hold_zeros_the_largest_number_nan_and_infinity_where_the_format_has_them(fmt: FloatFormat) -> None:
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        seen = np.concatenate(drawn(codes(fmt))).astype(np.float64)
    assert (np.abs(seen) == fmt.max).any()
    assert np.isnan(seen).any() == fmt.has_nan
    assert np.isinf(seen).any() == fmt.has_inf
    assert (np.signbit(seen) & (seen == 0)).any() == fmt.has_negative_zero


def test_drawn_fp32_codes_fill_the_whole_exponent_range() -> None:
    seen = np.concatenate(drawn(codes(FP32))).view(np.uint32)
    assert len(np.unique(seen >> 23 & 255)) > 150


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaNs and infinities are among the operands
def test_drawn_operands_cancel_tie_and_overflow() -> None:
    seen = {"cancels": 0, "ties": 0, "overflows": 0}
    for a, b in drawn(operands(FP16)):
        exact = a.astype(np.float64) + b.astype(np.float64)
        finite = np.isfinite(exact)
        seen["cancels"] += int((finite & (np.abs(exact) < np.abs(a.astype(np.float64)) / 4) & (exact != 0)).sum())
        seen["overflows"] += int((finite & (np.abs(exact) > 65520)).sum())
        _, exponent = np.frexp(np.where(finite, exact, 1.0))
        ulps = np.ldexp(np.where(finite, exact, 0.0), -np.maximum(exponent - 11, -24))
        seen["ties"] += int((np.abs(ulps % 1) == 0.5).sum())
    assert min(seen.values()) > 20, seen


def test_two_hundred_histories_hold_every_event() -> None:
    seen: set[str] = set()
    for history in drawn(histories(resume=True)):
        seen |= events(history, training_oracle.run_history(history))
    assert seen == set(EVENTS)


def test_drawn_flags_hold_long_runs_of_both_kinds() -> None:
    seen = drawn(flags())
    assert max(len(run) for run in seen) == 40
    for value in (True, False):
        assert any((value,) * 5 == run[i : i + 5] for run in seen for i in range(len(run)))


def test_drawn_tensors_are_finite_and_hold_huge_and_tiny_values() -> None:
    everything = np.concatenate([x for drawn_tensors in drawn(tensors()) for x in drawn_tensors])
    assert np.isfinite(everything).all()
    magnitude = np.abs(everything[everything != 0])
    assert magnitude.max() > 1e29
    assert magnitude.min() < 1e-40


def test_the_public_names_of_the_strategies_exist() -> None:
    assert all(hasattr(values, name) for name in values.__all__)


class ThroughFloat32:
    """The multiply-add that a unit without one of its own makes of two wider operations."""

    name, device = "through-float32", "cpu"

    def offers(self, operation: str, options: Any) -> bool:  # noqa: ARG002  # the Protocol's names
        return operation == "fma"

    def perform(self, operation: str, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG002  # as above
        return (a.astype(np.float32) * b.astype(np.float32) + c.astype(np.float32)).astype(a.dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_multiply_add_that_rounds_twice_is_found_by_the_default_number_of_draws(fmt: str, seed: int) -> None:
    result = ask(select(f"arithmetic.fma.{fmt}")[0], ThroughFloat32(), Run(200, seed, shrink=False))
    assert result.status == "broken"
