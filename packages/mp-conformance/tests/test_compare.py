"""Each comparator can fail, and says what is needed to see why."""

from __future__ import annotations

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
