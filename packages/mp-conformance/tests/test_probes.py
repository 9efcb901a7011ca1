"""The probe recovers orders that are known, and those of this machine, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mp_reference as mp
from mp_conformance.addition_trees import describe, evaluate, first_three, reveal_tree
from mp_conformance.implementations import subject_named
from mp_conformance.probes import find_out
from mp_reference.spec.accumulators import pairwise, sequential
from mp_reference.spec.formats import BF16, FORMATS, FP16, FP32

HUGE, UNIT = 2.0**60, 1.0


def rows(sum_one: Any) -> Any:
    return lambda x: np.array([sum_one(row.astype(np.float32)) for row in x])


def test_numpys_pairwise_sum_is_recovered_below_and_above_eight_terms() -> None:
    assert describe(reveal_tree(rows(np.sum), 7, HUGE, UNIT)) == "sequential"
    assert describe(reveal_tree(rows(np.sum), 32, HUGE, UNIT)) == "8 lanes, each in sequence, then the lanes pairwise"


def test_a_recovered_order_gives_numpys_bits_on_random_and_cancelling_numbers() -> None:
    tree = reveal_tree(rows(np.sum), 32, HUGE, UNIT)
    x = np.random.default_rng(3).standard_normal((200, 32)).astype(np.float32)
    x[100:, 16:] = -x[100:, :16][:, ::-1]
    assert np.array_equal(evaluate(tree, x.astype(np.float64)), np.array([np.sum(row) for row in x]))


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_torchs_matrix_product_is_recovered_bit_for_bit_on_this_cpu(name: str) -> None:
    torch = subject_named("torch")
    found = find_out(lambda a, b: torch.perform("matmul", a, b), FORMATS[name], "cpu")
    assert (found.differing, found.accumulates_in, found.kept_bits) == (0, "fp32", 23), found.lines()
    assert found.row
    assert found.compared == 4 * 48 * 48


@pytest.mark.parametrize(
    ("accumulator", "fmt", "order", "bits", "truncates"),
    [
        (mp.tensor_core("ampere"), FP16, "blocks of 8 added at once, in sequence", 24, True),
        (mp.tensor_core("hopper"), FP16, "blocks of 16 added at once, in sequence", 25, True),
        (mp.tensor_core("volta"), FP16, "blocks of 4 added at once, in sequence", 23, True),
        (sequential(FP16), FP16, "sequential", 10, False),
        (sequential(BF16, fused=True), BF16, "sequential", 7, False),
        (pairwise(FP32), FP32, "pairwise", 23, False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_declared_accumulator_is_told_from_the_others(
    accumulator: Any, fmt: Any, order: str, bits: int, truncates: bool
) -> None:
    found = find_out(lambda a, b: np.asarray(mp.matmul(a, b, accumulator=accumulator)), fmt, "emulated")
    assert (found.order, found.kept_bits, found.truncates) == (order, bits, truncates)
    assert accumulator.name in (found.row, *found.also)
    assert found.differing == 0


def test_an_unknown_arithmetic_is_reported_as_a_new_row() -> None:
    def drops_low_bits(a: Any, b: Any) -> Any:
        exact = a.astype(np.float64) @ b.astype(np.float64)
        return mp.cast(mp.round_to(exact, mp.FloatFormat("w", exponent_bits=8, mantissa_bits=4)), FP16)

    found = find_out(drops_low_bits, FP16, "odd")
    assert found.row == ""
    assert found.differing > 0
    assert "none of the known ones; a new row would hold the above" in "\n".join(found.lines())


def test_flushed_subnormals_are_noticed() -> None:
    def flushes(a: Any, b: Any) -> Any:
        a, b = (np.where(np.abs(x.astype(np.float32)) < 2.0**-14, 0, x).astype(np.float16) for x in (a, b))
        out = mp.matmul(a, b)
        return np.where(np.abs(out.astype(np.float32)) < 2.0**-14, 0, out).astype(np.float16)

    found = find_out(flushes, FP16, "flushing")
    assert (found.subnormal_inputs, found.subnormal_outputs) == (False, False)


def test_a_device_that_flushes_is_no_row_that_keeps_subnormals() -> None:
    def flushes(a: Any, b: Any) -> Any:
        a, b = (np.where(np.abs(x.astype(np.float32)) < 2.0**-14, 0, x).astype(np.float16) for x in (a, b))
        return mp.cast(mp.matmul(a, b, accumulator=sequential(FP32)), FP16)

    found = find_out(flushes, FP16, "flushing")
    assert found.row.endswith("subnormal inputs flushed")
    assert "sequential(fp32)" not in (found.row, *found.also)


@pytest.mark.parametrize("unit", ["volta", "ampere", "ada", "hopper", "blackwell-rtx", "cdna1", "cdna2", "cdna3"])
def test_every_tensor_core_is_known_by_its_own_name_also_behind_a_library_that_returns_fp16(unit: str) -> None:
    core = mp.tensor_core(unit)
    found = find_out(lambda a, b: np.asarray(mp.cast(mp.matmul(a, b, accumulator=core), FP16)), FP16, "library")
    assert core.name in (found.row, *found.also), found.lines()


def test_a_device_that_answers_twice_in_two_ways_is_told() -> None:
    rng = np.random.default_rng(0)

    def shuffles(a: Any, b: Any) -> Any:
        order = rng.permutation(a.shape[1])
        return np.asarray(mp.matmul(a[:, order], b[order], accumulator=sequential(FP32)))

    assert "two calls with the same operands differ" in find_out(shuffles, FP32, "shuffling").notes


def test_a_kernel_for_small_matrices_is_not_mistaken_for_the_one_that_is_probed() -> None:
    def by_size(a: Any, b: Any) -> Any:
        small = len(a) * b.shape[1] < 48 * 48
        return np.asarray(mp.matmul(a, b, accumulator=sequential(FP32) if small else pairwise(FP32)))

    found = find_out(by_size, FP32, "library")
    assert (found.order, found.row) == ("pairwise", pairwise(FP32).name)


def test_kept_bits_are_measured_within_a_lane() -> None:
    def two_lanes(a: Any, b: Any) -> Any:
        even, odd = (mp.matmul(a[:, i::2].copy(), b[i::2].copy(), accumulator=sequential(FP32)) for i in (0, 1))
        return np.asarray(even) + np.asarray(odd)

    found = find_out(two_lanes, FP32, "lanes")
    assert (found.order, found.kept_bits) == ("2 lanes, each in sequence, then the lanes pairwise", 23)
    assert first_three(((0, 2), (1, 3))) == (0, 2, 1)


@pytest.mark.parametrize("name", ["tf32", "float8_e4m3fn", "float4_e2m1fn"])
def test_a_format_whose_own_results_show_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be probed by .*; choose among fp16, bf16, fp32"):
        find_out(lambda a, b: a @ b, FORMATS[name], "cpu")


def test_a_sum_that_is_no_tree_is_refused_with_the_places() -> None:
    with pytest.raises(ValueError, match=r"places 0 and 1 leave .* units of 2; the sum does not absorb units"):
        reveal_tree(lambda x: x[:, 0] * 0 + 0.5, 4, HUGE, UNIT)
    with pytest.raises(ValueError, match="never come together"):
        reveal_tree(lambda x: np.full(len(x), 2.0), 4, HUGE, UNIT)


def test_orders_are_described_in_words_and_evaluated_two_at_a_time() -> None:
    blocks = (((((0, 1), 2), 3), (((4, 5), 6), 7)), (((8, 9), 10), 11))
    assert describe(blocks) == "blocks of 4, each in sequence, then the blocks in sequence"
    assert describe((((3, 2), 1), 0)) == "sequential, from the last term to the first"
    assert describe(((0, 2), (1, (3, 4)))) == "as ((0, 2), (1, (3, 4)))"
    assert reveal_tree(lambda x: x[:, 0], 1, HUGE, UNIT) == 0
    with pytest.raises(ValueError, match=r"3 terms are added at once; compare with a row of spec\.tensor_cores"):
        evaluate((0, 1, 2), np.ones(3))
