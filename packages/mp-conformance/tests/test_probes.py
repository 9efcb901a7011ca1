"""The probe recovers orders that are known, and those of this machine, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mp_reference as mp
from mp_conformance.implementations import subject_named
from mp_conformance.probes import describe, evaluate, find_out, reveal_tree
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
    assert found.compared == 2 * 48 * 48


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
    assert found.row == accumulator.name
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


def test_a_sum_that_is_no_tree_is_refused_with_the_places() -> None:
    with pytest.raises(ValueError, match=r"places 0 and 1 leave .* units of 2; the sum does not absorb units"):
        reveal_tree(lambda x: x[:, 0] * 0 + 0.5, 4, HUGE, UNIT)
    with pytest.raises(ValueError, match="never come together"):
        reveal_tree(lambda x: np.full(len(x), 2.0), 4, HUGE, UNIT)


def test_orders_are_described_in_words_and_evaluated_two_at_a_time() -> None:
    assert describe((((3, 2), 1), 0)) == "sequential, from the last term to the first"
    assert describe(((0, 2), (1, (3, 4)))) == "as ((0, 2), (1, (3, 4)))"
    assert reveal_tree(lambda x: x[:, 0], 1, HUGE, UNIT) == 0
    with pytest.raises(ValueError, match=r"3 terms are added at once; compare with a row of spec\.tensor_cores"):
        evaluate((0, 1, 2), np.ones(3))
