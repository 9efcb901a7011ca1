"""Norms: the same order of additions everywhere, the root rounded once, host and device alike."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mp_reference.amp import clipping as reference
from mp_reference.amp.fused import fused_norm
from mp_torch import clipping

FLOATS = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(st.lists(FLOATS, max_size=5))
def test_exact_squares_and_their_root_are_the_references(arrays):
    sums = clipping.exact_squares([torch.from_numpy(one) for one in arrays])
    expected = reference.gradient_norm(arrays)
    assert clipping.host_norm(clipping.fold(sums).item(), 2.0) == expected
    there = clipping.rounded_norm(clipping.fold(sums)).item()
    if expected <= float(np.finfo(np.float32).max):
        assert there == expected
    else:  # past fp32 torch's float64 root may be one ulp off on a CPU, which never takes this way
        assert there == pytest.approx(expected, rel=2.0**-52)


@given(st.floats(min_value=0.0, allow_nan=False))
def test_host_and_device_round_the_root_alike(total):
    there = clipping.device_norm(torch.tensor([total], dtype=torch.float64), 2.0).item()
    here = clipping.host_norm(total, 2.0)
    if 2.0**-1022 <= total < 1e77:  # torch's float64 root flushes subnormal totals
        assert here == there
    elif total >= 1e77:  # and past fp32 it may be one float64 ulp off on a CPU, which never takes this way
        assert here == pytest.approx(there, rel=2.0**-52)


@pytest.mark.parametrize("code", [0x3F800000, 0x3F800001, 0x40490FDB, 0x00800000, 0x7F000000])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_a_total_at_the_square_of_a_midpoint_rounds_to_the_right_side(code, side):
    low, high = (float(np.uint32(one).view(np.float32)) for one in (code, code + 1))
    square = ((low + high) / 2) ** 2
    total = square if side == 0 else math.nextafter(square, math.inf * side)
    expected = {-1: low, 1: high, 0: high if code & 1 else low}[side]
    assert clipping.host_norm(total, 2.0) == expected
    assert clipping.rounded_norm(torch.tensor(total, dtype=torch.float64)).item() == expected


@pytest.mark.parametrize("total", [math.inf, math.nan, 1e80, 1e300])
def test_what_fp32_cannot_hold_stays_in_float64(total):
    here, there = clipping.host_norm(total, 2.0), clipping.rounded_norm(torch.tensor(total, dtype=torch.float64)).item()
    assert here == pytest.approx(there, nan_ok=True, rel=1e-15)
    assert here == pytest.approx(math.sqrt(total), nan_ok=True)


@given(
    norm=st.floats(0, 1e40) | st.sampled_from([math.inf, 3.5e38, 0.0]),
    limit=st.floats(1e-40, 1e38, exclude_min=True),
)
def test_the_coefficient_is_the_same_on_host_and_device_and_in_the_reference(norm, limit):
    norm = clipping.fp32(norm) if norm < 3e38 else norm
    here = clipping.host_coefficient(norm, limit)
    assert here == clipping.clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit).item()
    if math.isfinite(norm) and clipping.fp32(limit) > 0:
        assert here == reference.clip_coefficient(norm, limit)
    assert 0.0 <= here <= 1.0


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("value", [1.0, 40000.0, 3e19, 1e-30, 3e38])
def test_no_way_to_the_squares_overflows_or_underflows(free, float64, value):
    gradients = [torch.full((4,), value), torch.zeros(3), torch.zeros(0)]
    squares = clipping.fast_squares(gradients, reads_are_free=free, float64=float64)
    assert squares.sqrt().tolist() == pytest.approx([2 * value, 0.0, 0.0], rel=1e-6)


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_squares_are_finite_exactly_where_the_gradient_is(free, float64, bad):
    gradients = [torch.tensor([1.0, bad]), torch.full((9,), 3e38)]
    squares = clipping.fast_squares(gradients, reads_are_free=free, float64=float64)
    assert squares.isfinite().tolist() == [False, True]
    assert squares[0].isnan().item() == math.isnan(bad)


def test_no_gradients_have_no_squares_and_a_norm_of_zero():
    for squares in (
        clipping.exact_squares([]),
        clipping.fast_squares([], reads_are_free=True),
        clipping.power_sums([], 3.0),
    ):
        assert clipping.host_norm(clipping.fold(squares).item(), 2.0) == 0.0
    assert clipping.magnitudes([]).numel() == 0


@pytest.mark.parametrize(("power", "expected"), [(1.0, 7.0), (3.0, 91 ** (1 / 3)), (math.inf, 4.0)])
def test_other_norms_are_what_their_definition_says(power, expected):
    total = 4.0 if power == math.inf else clipping.power_sums([torch.tensor([3.0, -4.0])], power).item()
    assert clipping.host_norm(total, power) == pytest.approx(expected)
    assert clipping.device_norm(torch.tensor([total]).double(), power).item() == pytest.approx(expected)


def test_the_order_of_additions_is_the_documented_one():
    values = torch.tensor([1.0, 2.0**-53, 2.0**-53, 2.0**-60, 1.0], dtype=torch.float64)
    expected = ((1.0 + 1.0) + 2.0**-53) + (2.0**-53 + 2.0**-60)
    assert clipping.fold(values).item() == expected


@given(st.lists(st.floats(0, 1e300), max_size=90))
def test_python_numbers_and_tensors_add_in_the_same_order(values):
    assert clipping.host_fold(values) == clipping.fold(torch.tensor(values, dtype=torch.float64)).item()


@given(st.lists(FLOATS, max_size=5))
def test_squares_as_python_numbers_are_the_tensors(arrays):
    gradients = [torch.from_numpy(one) for one in arrays]
    assert clipping.host_squares(gradients, exact=True) == clipping.exact_squares(gradients).tolist()
    assert (
        clipping.host_squares(gradients, exact=False) == clipping.fast_squares(gradients, reads_are_free=True).tolist()
    )


def test_the_norm_of_a_large_tensor_does_not_stand_still():
    """Past 2**24 equal terms a single fp32 sum adds nothing; torch's eight lanes come to that at 2**27 elements."""
    gradient = torch.full((clipping.PIECE * 5 + 3,), 1.0)
    (square,) = clipping.host_squares([gradient], exact=False)
    assert square == pytest.approx(gradient.numel(), rel=1e-6)
    huge = torch.ones(1).expand(2**27 + 2**24)
    (square,) = clipping.host_squares([huge], exact=False)
    assert square == pytest.approx(huge.numel(), rel=1e-6)


def test_a_large_tensors_norm_is_the_references_piece_by_piece():
    gradient = torch.randn(2 * clipping.PIECE + 77, generator=torch.Generator().manual_seed(0))
    (square,) = clipping.host_squares([gradient], exact=False)
    assert clipping.host_norm(square, 2.0) == fused_norm([gradient.numpy()])
