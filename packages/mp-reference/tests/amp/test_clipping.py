"""Clipping: the norm against exact rational arithmetic, and what large, empty and non-finite gradients do."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mp_reference.amp.clipping import (
    clip_by_norm,
    clip_by_value,
    clip_coefficient,
    gradient_norm,
    rounded_sqrt,
    tree_sum,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def f32(values: list[Any]) -> NDArray[np.float32]:
    """An array of float32."""
    return np.array(values, np.float32)


FP32_MAX = float(np.finfo(np.float32).max)
MIDPOINT = (1.0 + float(np.nextafter(np.float32(1), np.float32(2)))) / 2


def nearest_fp32_root(square: float) -> float:
    """The fp32 value nearest to the exact root, by comparing exact squares of neighbouring midpoints."""
    value = np.float32(math.sqrt(square))
    below, above = np.nextafter(value, np.float32(-1)), np.nextafter(value, np.float32(math.inf))
    low, high = (
        (Fraction(float(value)) + Fraction(float(below))) / 2,
        (Fraction(float(value)) + Fraction(float(above))) / 2,
    )
    exact = Fraction(square)
    if exact < low * low or (exact == low * low and value.view(np.uint32) & 1):
        return float(below)
    if exact > high * high or (exact == high * high and value.view(np.uint32) & 1):
        return float(above)
    return float(value)


@given(root=st.floats(2.0**-60, 2.0**60, width=32), ulps=st.integers(-3, 3), half=st.booleans())
@example(root=1.0, ulps=1, half=True)
@example(root=1.0, ulps=-1, half=True)
@example(root=1.0, ulps=0, half=True)
def test_the_root_is_correctly_rounded_also_beside_the_squares_of_midpoints(root: float, ulps: int, half: bool) -> None:
    square = root * root
    if half:
        square = ((root + float(np.nextafter(np.float32(root), np.float32(math.inf)))) / 2) ** 2
    for _ in range(abs(ulps)):
        square = math.nextafter(square, math.inf if ulps > 0 else 0.0)
    assert rounded_sqrt(square) == nearest_fp32_root(square)


def test_a_root_beyond_fp32_stays_in_float64() -> None:
    assert rounded_sqrt(1e80) == 1e40
    assert rounded_sqrt(FP32_MAX**2) == FP32_MAX
    assert math.isinf(rounded_sqrt(math.inf))
    assert math.isnan(rounded_sqrt(math.nan))
    assert rounded_sqrt(0.0) == 0.0


@given(values=hnp.arrays(np.float64, st.integers(0, 40), elements=st.floats(0, 1e6)))
def test_the_tree_sum_adds_halves(values: Any) -> None:
    def halves(part: list[float]) -> float:
        return (
            part[0]
            if len(part) == 1
            else halves([a + b for a, b in zip(part[: len(part) // 2], part[len(part) // 2 :], strict=True)])
        )

    size = 1 << max(len(values) - 1, 0).bit_length()
    assert tree_sum(values) == halves([*values.tolist(), *[0.0] * (size - len(values))])


def test_the_tree_sum_differs_from_a_running_sum() -> None:
    values = np.array([1.0, 2.0**-53, 2.0**-53, 2.0**-53])
    assert tree_sum(values) == 1.0 + 2.0**-52
    assert sum(values.tolist()) == 1.0


def test_the_norm_of_large_finite_gradients_is_finite_and_clipping_does_not_erase_them() -> None:
    gradients = [np.full(100, 3e38, np.float32)]
    clipped = clip_by_norm(gradients, max_norm=1.0)
    assert clipped.norm == math.sqrt(100 * float(np.float32(3e38)) ** 2) > FP32_MAX
    assert 0.0 < clipped.coefficient < 1.0
    assert clipped.gradients[0][0] == np.float32(3e38) * np.float32(1 / clipped.norm)
    # the coefficient is a subnormal fp32 number: half of its ulp is the relative error
    assert gradient_norm(clipped.gradients) == pytest.approx(1.0, rel=2.0**-149 / clipped.coefficient)


def test_a_norm_of_fp16_gradients_does_not_overflow_as_it_would_in_fp16() -> None:
    gradients = [np.full(4, 40000, np.float16).astype(np.float32)]
    clipped = clip_by_norm(gradients, max_norm=1.0)
    assert clipped.norm == 80000.0
    assert np.all(clipped.gradients[0] > 0.49)


def test_an_infinite_bound_measures_and_clips_nothing_however_large_the_norm() -> None:
    gradients = [np.full(100, 3e38, np.float32)]
    clipped = clip_by_norm(gradients, max_norm=math.inf)
    assert clipped.coefficient == 1.0
    assert clipped.gradients[0] is gradients[0]
    assert clip_coefficient(5.0, math.inf) == 1.0


def test_gradients_within_the_bound_keep_their_bits() -> None:
    gradients = [f32([0.3, -0.4])]
    assert clip_by_norm(gradients, max_norm=1.0).gradients[0] is gradients[0]


def test_the_infinity_norm_is_the_largest_magnitude_over_all_tensors() -> None:
    gradients = [f32([1.0, -7.0]), np.zeros(0, np.float32), f32([[3.0]])]
    assert gradient_norm(gradients, math.inf) == 7.0
    assert clip_by_norm(gradients, 3.5, math.inf).gradients[0][1] == -np.float32(clip_coefficient(7.0, 3.5)) * 7


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_no_gradients_have_norm_zero(norm_type: float) -> None:
    assert gradient_norm([], norm_type) == 0.0
    assert gradient_norm([np.zeros((0, 3), np.float32)], norm_type) == 0.0
    assert clip_coefficient(0.0, 1.0) == 1.0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_says_inf_or_nan_where_the_gradients_do(norm_type: float) -> None:
    assert gradient_norm([f32([math.inf, 1.0])], norm_type) == math.inf
    assert math.isnan(gradient_norm([f32([math.nan, 1.0]), f32([math.inf])], norm_type))


def test_clipping_by_value_limits_each_element_and_keeps_signed_zeros() -> None:
    (clipped,) = clip_by_value([f32([5.0, -5.0, -0.0, 0.25])], 0.5)
    assert clipped.tobytes() == f32([0.5, -0.5, -0.0, 0.25]).tobytes()


@pytest.mark.parametrize("bound", [-1.0, 0.0, math.nan, True, 1e-60])
def test_a_bound_that_is_not_a_positive_number_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match=r"max_norm=.* must be a number above 0; to clip nothing use max_norm=None"):
        clip_by_norm([f32([3.0, 4.0])], bound)
    with pytest.raises(ValueError, match=r"clip_value=.* must be a number above 0; to clip nothing use clip_v"):
        clip_by_value([f32([3.0, 4.0])], bound)


def test_a_norm_whose_roundings_are_not_stated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"norm_type=1\.0 must be 2\.0 or math\.inf"):
        gradient_norm([], 1.0)
