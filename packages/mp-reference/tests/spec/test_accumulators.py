"""Rows of software accumulators: names, sources, refusals."""

from __future__ import annotations

import re

import pytest

import mp_reference as mp
from mp_reference.spec.accumulators import EXACT, NAMED, accumulator_named, lanes


def test_every_row_names_itself_and_its_source():
    rows = [
        *NAMED.values(), mp.sequential(mp.FP16), mp.pairwise(), mp.blocked("fp32", 4), mp.split_k(2), mp.kahan(),
        lanes(), mp.tensor_core("hopper"),
    ]  # fmt: skip
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.source for row in rows)


def test_names_formats_and_rows_are_all_accumulators():
    assert accumulator_named("exact") is EXACT
    assert accumulator_named(mp.BF16) == mp.sequential(mp.BF16)
    assert accumulator_named(EXACT) is EXACT


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (mp.sequential(mp.FP16, fused=True, rounding="toward-zero"), "sequential(fp16, fused, toward-zero)"),
        (mp.blocked(mp.tensor_core("hopper"), 128), "blocked(tensor_core(hopper), 128, fp32)"),
        (mp.split_k(3, "exact", tile=64, layout="interleaved", combine="halves"),
         "split_k(3, exact, tile=64, interleaved, halves)"),
        (lanes(4, 1), "lanes(4, 1)"),
        (mp.tensor_core("b200", family="mma", result=mp.FP16), "tensor_core(b200, mma, fp16)"),
    ],
)  # fmt: skip
def test_a_name_says_what_was_chosen(row, name):
    assert row.name == name


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: mp.sequential(mp.FP16, rounding="stochastic"), "rounding='stochastic' must be one of nearest-even"),
        (lambda: mp.pairwise(base=0), "base=0 must be a whole number of at least 1; base=1 adds every pair"),
        (lambda: mp.blocked("fp32", 0), "block=0 must be a whole number of at least 1; a run has at least one term"),
        (lambda: mp.split_k(0), "splits=0 must be a whole number of at least 1; one worker is splits=1"),
        (lambda: mp.split_k(2, tile=0), "tile=0 must be a whole number of at least 1; tile=1 deals out single terms"),
        (lambda: mp.split_k(2, layout="zigzag"), "layout='zigzag' must be one of 'contiguous', 'interleaved'"),
        (lambda: mp.split_k(2, combine="tree"), "combine='tree' must be one of 'serial', 'halves'"),
        (lambda: lanes(0), "width=0 must be a whole number of at least 1; a scalar machine has width=1"),
        (lambda: lanes(8, 0), "tail=0 must be a whole number of at least 1; tail=1 fuses nothing"),
        (lambda: mp.blocked("double", 4), "accumulator='double' is none of 'exact', 'fp32'"),
        (lambda: mp.blocked(mp.FP16, 2.5), "block=2.5 must be a whole number of at least 1; a run has"),
        (lambda: accumulator_named("fp16"), "pass the format itself, format_named('fp16'), or build others with"),
        (lambda: accumulator_named(["exact"]), "accumulator=['exact'] is none of 'exact', 'fp32'; build others with"),
    ],
)
def test_impossible_accumulators_are_refused_with_the_rule(build, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: mp.sequential("fp16"), "fmt='fp16' must be a FloatFormat; use format_named('fp16')"),
        (lambda: mp.pairwise("half"), "fmt='half' must be a FloatFormat; use one of FORMATS, such as FP16"),
        (lambda: mp.kahan(None), "fmt=None must be a FloatFormat; use one of FORMATS"),
        (lambda: mp.blocked(mp.FP16, 2, "fp32"), "outer='fp32' must be a FloatFormat; use format_named('fp32')"),
        (lambda: mp.split_k(2, outer="bf16"), "outer='bf16' must be a FloatFormat; use format_named('bf16')"),
    ],
)
def test_the_name_of_a_format_is_no_format(build, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        build()
