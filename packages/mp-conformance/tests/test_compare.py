"""Each comparator can fail, and says what is needed to see why."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from mp_conformance.compare import (
    Bits,
    Bound,
    DisagreementError,
    Tally,
    Ulp,
    Worst,
    assert_same_bits,
    assert_within_bound,
    assert_within_ulps,
    shown,
    ulp_distance,
)


def test_one_flipped_bit_is_reported_in_hex_with_both_sides_the_input_and_the_verdict() -> None:
    x = np.float32([1.0, 1.00390625])
    with pytest.raises(DisagreementError) as caught:
        assert_same_bits(
            x.astype(ml_dtypes.bfloat16), np.array([1.0, 1.0078125], ml_dtypes.bfloat16), inputs=(x,),
            verdict=lambda index: f"element {index} is a tie",
        )  # fmt: skip
    assert str(caught.value) == (
        "1 of 2 values differ; first at flat index 1: float32 0x3f808000 (1.00390625) -> subject bfloat16 0x3f80 (1.0)"
        ", expected bfloat16 0x3f81 (1.0078125); exact oracle: element 1 is a tie"
    )


def test_without_a_verdict_the_expected_value_is_named_as_the_oracles() -> None:
    with pytest.raises(
        DisagreementError, match=r"exact oracle: expected is the oracle's own value, float16 0x3c00 \(1.0\)$"
    ):
        assert_same_bits(np.float16([2.0]), np.float16([1.0]))


def test_the_sign_of_a_zero_is_a_difference() -> None:
    with pytest.raises(DisagreementError, match=r"0x8000 \(-0.0\), expected float16 0x0000"):
        assert_same_bits(np.float16([-0.0]), np.float16([0.0]))


def test_two_nans_of_other_payloads_and_signs_agree() -> None:
    codes = np.array([0x7E00, 0xFE01], np.uint16).view(np.float16)
    assert assert_same_bits(codes, codes[::-1].copy()).compared == 2


def test_a_nan_and_a_number_differ() -> None:
    with pytest.raises(DisagreementError, match="1 of 1 values differ"):
        assert_same_bits(np.float16([np.nan]), np.float16([1.0]))


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ([1.0], "the subject returned list, the claim needs a NumPy array"),
        (np.float32([1.0]), "the subject returned dtype float32, the claim needs float16"),
        (np.float16([[1.0]]), r"the subject returned shape \(1, 1\), the claim needs \(1,\)"),
    ],
)
def test_another_type_dtype_or_shape_is_refused(actual: object, message: str) -> None:
    with pytest.raises(DisagreementError, match=message):
        assert_same_bits(actual, np.float16([1.0]))


def test_integers_and_booleans_are_compared_as_they_are() -> None:
    assert assert_same_bits(np.array([True, False]), np.array([True, False])).compared == 2
    with pytest.raises(DisagreementError, match="bool False, expected bool True"):
        assert_same_bits(np.array([False]), np.array([True]), inputs=(np.float32([0.5]),))


def test_one_ulp_more_than_allowed_fails_and_the_worst_is_shown() -> None:
    expected = np.float16([1.0, 2.0])
    actual = (expected.view(np.uint16) + np.uint16([1, 3])).view(np.float16)
    with pytest.raises(DisagreementError, match=r"by more than 2 ulp \(1 do\), 3 at most; first at flat index 1"):
        assert_within_ulps(actual, expected, 2)
    tally = assert_within_ulps(actual, expected, 3, inputs=(np.float16([7.0, 8.0]),))
    assert tally.histogram == {"1": 1, "3": 1}
    assert tally.worst == Worst(3.0, "float16 0x4800 (8.0)", "float16 0x4003 (2.005859375)", "float16 0x4000 (2.0)")


def test_distances_cross_zero_and_reach_infinity_but_not_nan() -> None:
    tiny = np.array([0x0001, 0x7C00, 0x7E00], np.uint16).view(np.float16)
    other = np.array([0x8001, 0x7BFF, 0x0000], np.uint16).view(np.float16)
    assert ulp_distance(tiny, other).tolist() == [2.0, 1.0, np.inf]
    scales = np.array([0x80, 0x7F], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert ulp_distance(scales, scales[::-1].copy()).tolist() == [1.0, 1.0]


def test_an_error_beyond_its_bound_fails_and_one_within_it_is_counted_in_tenths() -> None:
    exact, bound = np.array([1.0, 2.0]), np.array([0.5, 0.5])
    with pytest.raises(
        DisagreementError, match=r"by more than the bound \(2 times it at most\); first at flat index 1"
    ):
        assert_within_bound(np.float32([1.0, 3.0]), exact, bound)
    tally = assert_within_bound(np.float32([1.0, 2.25]), exact, bound, inputs=(exact,))
    assert tally.histogram == {"0.0": 1, "0.5": 1}
    assert tally.worst is not None
    assert tally.worst.distance == 0.5


def test_a_bound_refuses_nan_infinity_and_another_shape() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(DisagreementError, match="by more than the bound"):
            assert_within_bound(np.float32([bad]), np.array([1.0]), np.array([9.0]))
    with pytest.raises(DisagreementError, match=r"shape \(2,\), the claim needs \(1,\)"):
        assert_within_bound(np.float32([1, 2]), np.array([1.0]), np.array([9.0]))


def test_a_zero_bound_means_equality() -> None:
    assert assert_within_bound(np.float32([2.0]), np.array([2.0]), np.array([0.0])).compared == 1
    with pytest.raises(DisagreementError, match="inf times it at most"):
        assert_within_bound(np.float32([2.5]), np.array([2.0]), np.array([0.0]))


def test_tallies_add_up_and_keep_the_worst() -> None:
    first, second = Tally(2), Tally(3, worst=Worst(2.0, "a", "b", "c"))
    first.histogram["0"] = 2
    second.histogram["0"] = 3
    first.add(second)
    first.add(Tally(1, worst=Worst(1.0, "x", "y", "z")))
    assert (first.compared, first.histogram["0"], first.worst) == (6, 5, Worst(2.0, "a", "b", "c"))


def test_an_empty_comparison_counts_nothing() -> None:
    nothing = np.zeros(0, np.float32)
    assert assert_within_ulps(nothing, nothing, 0).compared == 0
    assert assert_within_bound(nothing, np.zeros(0), np.zeros(0)).compared == 0


def test_agreements_print_as_the_report_calls_them() -> None:
    assert [str(kind) for kind in (Bits(), Ulp(1, "one rounding"), Bound("n u"))] == ["BITS", "ULP(1)", "BOUND"]
    assert shown(np.int64(7)) == "int64 7"


def test_a_difference_in_a_grid_is_found_by_its_flat_index_with_the_inputs_of_that_place() -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    actual, inputs = expected.copy(), (np.arange(10, 16, dtype=np.float64).reshape(2, 3), np.float32([7.0]))
    actual[1, 1] = -4.0
    with pytest.raises(DisagreementError) as caught:
        assert_same_bits(actual, expected, inputs=inputs)
    assert str(caught.value) == (
        "1 of 6 values differ; first at flat index 4: float64 0x402c000000000000 (14.0), float32 0x40e00000 (7.0) -> "
        "subject float32 0xc0800000 (-4.0), expected float32 0x40800000 (4.0); exact oracle: expected is the oracle's "
        "own value, float32 0x40800000 (4.0)"
    )


def test_inputs_of_another_shape_show_their_first_value_and_empty_ones_none() -> None:
    with pytest.raises(DisagreementError, match=r"index 0: int64 5 -> subject"):
        assert_same_bits(np.float32([1.0]), np.float32([2.0]), inputs=(np.array([[5, 6]]), np.zeros(0)))
    with pytest.raises(DisagreementError, match=r"index 0: \(see the claim\) -> subject"):
        assert_same_bits(np.float32([1.0]), np.float32([2.0]))


def test_every_kind_of_count_is_exact() -> None:
    grid = np.float32([[1.0, 2.0], [3.0, 4.0]])
    assert assert_same_bits(grid, grid) == Tally(4, Counter({"0": 4}))
    assert assert_within_ulps(grid, grid, 0) == Tally(4, Counter({"0": 4}), None)
    assert assert_within_bound(grid, grid.astype(np.float64), np.zeros((2, 2))) == Tally(4, Counter({"0.0": 4}), None)


def test_the_worst_of_a_grid_is_shown_with_its_own_input() -> None:
    expected = np.float32([[1.0, 2.0], [4.0, 8.0]])
    actual = (expected.view(np.uint32) + np.uint32([[0, 1], [2, 0]])).view(np.float32)
    seen = assert_within_ulps(actual, expected, 2, inputs=(expected * 10,))
    assert seen.compared == 4
    assert seen.histogram == {"0": 2, "1": 1, "2": 1}
    assert seen.worst == Worst(2.0, "float32 0x42200000 (40.0)", shown(actual[1, 0]), shown(expected[1, 0]))
    bounded = assert_within_bound(
        np.float32([[1.0, 2.0], [4.5, 8.0]]), expected.astype(np.float64), np.ones((2, 2)), inputs=(expected * 10,)
    )
    assert bounded.worst == Worst(
        0.5, "float32 0x42200000 (40.0)", "float32 0x40900000 (4.5)", "float64 0x4010000000000000 (4.0)"
    )
    assert (bounded.compared, bounded.histogram) == (4, {"0.0": 3, "0.5": 1})


def test_too_many_ulps_in_a_grid_name_how_many_and_the_worst_place() -> None:
    expected = np.float16([[1.0, 1.0], [1.0, 1.0]])
    actual = (expected.view(np.uint16) + np.uint16([[5, 0], [9, 9]])).view(np.float16)
    with pytest.raises(DisagreementError) as caught:
        assert_within_ulps(actual, expected, 4)
    assert str(caught.value).startswith(
        "2 of 4 values differ by more than 4 ulp (3 do), 9 at most; first at flat index 2: (see the claim)"
    )


def test_distances_of_a_grid_keep_its_shape_and_one_sided_nan_is_infinite() -> None:
    a = np.float32([[1.0, np.nan], [np.nan, -1.0]])
    b = np.float32([[1.0, 1.0], [np.nan, 1.0]])
    assert ulp_distance(a, b).tolist() == [[0.0, np.inf], [0.0, 2.0 * 0x3F800000]]


def test_a_nan_on_either_side_alone_is_infinitely_far_and_two_of_any_kind_are_not_apart() -> None:
    nan, other = np.uint32([0x7FC00000, 0xFF800001]).view(np.float32)
    one = np.float32(1.0)
    distance = ulp_distance(np.float32([nan, one, nan, other]), np.array([one, nan, other, nan], np.float32))
    assert distance.tolist() == [np.inf, np.inf, 0.0, 0.0]
    for actual, expected in ((nan, one), (one, nan)):
        with pytest.raises(DisagreementError):
            assert_within_ulps(np.float32([actual]), np.float32([expected]), 2**30)


def test_strided_arrays_and_signalling_nans_are_compared_by_value() -> None:
    grid = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert assert_same_bits(grid[:, 1], grid[:, 1].copy()).compared == 4
    signalling = np.array([0x7F81], np.uint16).view(ml_dtypes.bfloat16)
    assert assert_same_bits(signalling, np.array([np.nan], ml_dtypes.bfloat16)).compared == 1


def test_narrow_values_are_shown_with_the_digits_of_their_width() -> None:
    assert shown(np.array(0.5, ml_dtypes.float8_e4m3fn)) == "float8_e4m3fn 0x30 (0.5)"
    assert shown(np.float64(2.0)) == "float64 0x4000000000000000 (2.0)"
    assert shown(np.bool_(True)) == "bool True"
    assert shown(np.array("skipped")) == "<U7 skipped"


def test_what_lies_exactly_at_the_allowance_is_kept_and_counted_apart() -> None:
    expected = np.float16([1.0, 1.0, 1.0])
    actual = (expected.view(np.uint16) + np.uint16([4, 5, 0])).view(np.float16)
    with pytest.raises(DisagreementError, match=r"by more than 4 ulp \(1 do\), 5 at most"):
        assert_within_ulps(actual, expected, 4)
    one_off = assert_within_ulps(np.float16([1.001]), np.float16([1.0]), 1)
    assert one_off.worst is not None
    assert one_off.worst.distance == 1.0
    at_bound = assert_within_bound(np.float32([2.0, 1.9375]), np.array([1.0, 1.0]), np.array([1.0, 1.0]))
    assert at_bound.histogram == {"1.0": 1, "0.9": 1}


def test_of_two_equally_bad_values_the_first_is_kept() -> None:
    tally = Tally(1, worst=Worst(1.0, "first", "b", "c"))
    tally.add(Tally(1, worst=Worst(1.0, "second", "y", "z")))
    assert tally.worst is not None
    assert tally.worst.inputs == "first"
