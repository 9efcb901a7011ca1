"""Software accumulators against a scalar model that rounds exact numbers step by step."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.bits import same_bits
from mp_reference.numerics.chains import Factors, run_chain
from mp_reference.numerics.products import widened
from mp_reference.numerics.rounding import round_to
from mp_reference.numerics.rounding_kernels import NearestKernel, Workspace, kernel_for
from mp_reference.spec.accumulators import Blocked, Kahan, Lanes, Pairwise, Sequential, SplitK, lanes

E5M10 = mp.FloatFormat("e8m10", exponent_bits=8, mantissa_bits=10)
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
FORMATS = [mp.FP16, mp.BF16, mp.FP32, mp.TF32, mp.E5M2, mp.E4M3FN, mp.E2M1FN, E5M10]


def once(value, fmt, rounding="nearest-even"):
    return exact.round_exact(value, fmt, rounding)


class Scalar:
    """One output of one accumulator, on Python floats; every method is the definition written down."""

    def __init__(self, a, b):
        self.a, self.b = [float(x) for x in a], [float(x) for x in b]

    def run(self, row, start=0.0):
        return getattr(self, type(row).__name__.lower())(row, start)

    def sequential(self, row, start):
        total, down = start, row.rounding == "toward-negative"
        for x, y in zip(self.a, self.b, strict=True):
            if row.fused:
                total = once(exact.fma(x, y, total, downward=down), row.format, row.rounding)
            else:
                product = once(exact.mul(x, y), row.format, row.rounding)
                total = once(exact.add(total, product, downward=down), row.format, row.rounding)
        return total

    def products(self, fmt):
        return [once(exact.mul(x, y), fmt) for x, y in zip(self.a, self.b, strict=True)]

    def pairwise(self, row, start):
        def tree(terms):
            if len(terms) <= row.base:
                total = terms[0]
                for term in terms[1:]:
                    total = once(exact.add(total, term), row.format)
                return total
            half = len(terms) - len(terms) // 2
            return once(exact.add(tree(terms[:half]), tree(terms[half:])), row.format)

        terms = self.products(row.format)
        return once(exact.add(start, tree(terms)), row.format) if terms else start

    def kahan(self, row, start):
        def minus(x, y):
            return once(exact.sub(x, y), row.format)

        total, excess = start, 0.0
        for product in self.products(row.format):
            term = minus(product, excess)
            grown = once(exact.add(total, term), row.format)
            excess = minus(minus(grown, total), term)
            total = grown
        return total

    def lanes(self, row, start):
        def plain(total, k):
            product = once(exact.mul(self.a[k], self.b[k]), mp.FP32)
            return once(exact.add(total, product), mp.FP32)

        body = len(self.a) // row.width * row.width
        lane = [0.0] * row.width
        for k in range(body):
            lane[k % row.width] = plain(lane[k % row.width], k)
        total = start
        for value in lane:
            total = once(exact.add(total, value), mp.FP32)
        unrolled = body + (len(self.a) - body) // row.tail * row.tail
        for k in range(body, unrolled):
            total = plain(total, k)
        for k in range(unrolled, len(self.a)):
            total = once(exact.fma(self.a[k], self.b[k], total), mp.FP32)
        return total

    def some(self, row, indices, outer):
        part = Scalar([self.a[k] for k in indices], [self.b[k] for k in indices])
        return once(part.run(row.inner), outer)

    def blocked(self, row, start):
        total = start
        for first in range(0, len(self.a), row.block):
            part = self.some(row, range(first, min(first + row.block, len(self.a))), row.outer)
            total = once(exact.add(total, part), row.outer)
        return total

    def splitk(self, row, start):
        length = len(self.a)
        tiles = [range(i, min(i + row.tile, length)) for i in range(0, length, row.tile)]
        if row.layout == "contiguous":
            run = math.ceil(len(tiles) / row.splits)
            dealt = [tiles[i * run : (i + 1) * run] for i in range(row.splits)]
        else:
            dealt = [tiles[i :: row.splits] for i in range(row.splits)]
        parts = [self.some(row, [k for tile in mine for k in tile], row.outer) for mine in dealt]

        def plus(x, y):
            return once(exact.add(x, y), row.outer)

        if row.combine == "halves" and row.splits > 1:
            half = math.ceil(row.splits / 2)
            slots = [
                plus(parts[i], parts[i + half]) if i + half < row.splits - 1 else parts[i]
                for i in range(min(half, row.splits - 1))
            ]
            parts = [parts[-1], *slots]
        total = start
        for part in parts:
            total = plus(total, part)
        return total


@st.composite
def factors(draw, dtype, most=9):
    """Factors near each other's exponents, of every kind of size, some special; and the length of the sum."""
    length = draw(st.integers(0, most))
    fmt_bits = np.dtype(dtype).itemsize * 8
    code = st.integers(0, 2**fmt_bits - 1)
    kind = draw(st.sampled_from(["any", "near", "near", "tiny", "few"]))

    def values(count):
        if kind == "any":
            codes = draw(st.lists(code, min_size=count, max_size=count))
            return np.array(codes, f"u{fmt_bits // 8}").view(dtype)
        spread = {"near": (-2, 2), "tiny": (-12, -4), "few": (0, 0)}[kind]
        parts = draw(
            st.lists(st.tuples(st.integers(-2048, 2048), st.integers(*spread)), min_size=count, max_size=count)
        )
        with np.errstate(all="ignore"):
            return np.array([np.ldexp(m / 1024, e) for m, e in parts]).astype(dtype)

    return values(length), values(length)


def start_in(fmt, draw_start):
    return None if draw_start is None else once(float(draw_start), fmt)


@st.composite
def rows(draw, depth=1):
    fmt = draw(st.sampled_from(FORMATS))
    kind = draw(st.sampled_from([Sequential, Sequential, Pairwise, Kahan, Lanes, Blocked, SplitK][: 7 if depth else 5]))
    if kind is Sequential:
        roundings = ["nearest-even"] * 5 + ["toward-negative", "toward-zero", "to-odd", "nearest-away"]
        return mp.sequential(fmt, fused=draw(st.booleans()), rounding=draw(st.sampled_from(roundings)))
    if kind is Pairwise:
        return mp.pairwise(fmt, draw(st.integers(1, 4)))
    if kind is Kahan:
        return mp.kahan(fmt)
    if kind is Lanes:
        return lanes(draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    inner = draw(rows(depth=0))
    if kind is Blocked:
        return mp.blocked(inner, draw(st.integers(1, 5)), fmt)
    layout, combine = draw(st.sampled_from(["contiguous", "interleaved"])), draw(st.sampled_from(["serial", "halves"]))
    splits, tile = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return mp.split_k(splits, inner, outer=fmt, tile=tile, layout=layout, combine=combine)


def own(row):
    if isinstance(row, Blocked | SplitK):
        return row.outer
    return mp.FP32 if isinstance(row, Lanes) else row.format


def assert_like_the_model(a, b, row, start):
    fmt = own(row)
    begin = None if start is None else once(float(start), fmt)
    wanted = Scalar(widened(a), widened(b)).run(row, 0.0 if begin is None else begin)
    c = None if begin is None else np.float32([[begin]])
    got = mp.matmul(a[np.newaxis], b[:, np.newaxis], c, row, out_format=mp.FP32)
    assert same_bits(got, np.float32([[wanted]])).all(), (row.name, got, wanted)
    tiled = mp.matmul(np.tile(a, (20, 1)), np.tile(b[:, np.newaxis], (1, 20)), c, row, out_format=mp.FP32)
    assert same_bits(tiled, np.full((20, 20), np.float32(wanted))).all(), (row.name, tiled[0, 0], wanted)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    row=rows(),
    start=st.none() | st.sampled_from([0.0, -0.0, 1.0, 1e-7, -3e4]),
)
def test_an_accumulator_adds_as_its_scalar_definition_does(data, dtype, row, start):
    a, b = data.draw(factors(dtype))
    assert_like_the_model(a, b, row, start)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_long_chain_on_a_tile_equals_the_chain_of_each_output(dtype, fused):
    rng = np.random.default_rng(7)
    a = np.ldexp(rng.standard_normal((17, 24)), rng.integers(-9, 3, (17, 24))).astype(dtype)
    b = np.ldexp(rng.standard_normal((24, 16)), rng.integers(-9, 3, (24, 16))).astype(dtype)
    for fmt in (mp.FP16, mp.BF16, mp.FP32):
        row = mp.sequential(fmt, fused=fused)
        got = mp.matmul(a, b, accumulator=row, out_format=mp.FP32)
        wanted = [[Scalar(x, y).run(row) for y in widened(b).T] for x in widened(a)]
        assert same_bits(got, np.array(wanted, np.float32)).all(), fmt.name


def test_tiny_fused_negatives_keep_the_sign_of_the_zero_they_round_to():
    a = np.full((20, 1), -(2.0**-24), np.float16)
    got = mp.matmul(a, np.full((1, 20), 2.0**-14, np.float16), accumulator=mp.sequential(mp.FP16, fused=True))
    assert np.signbit(got).all()
    mixed = np.ones((20, 20), np.float16)
    mixed[0, 0] = -(2.0**-24)
    b = np.full((20, 20), 1.0, np.float16)
    b[:, 0] = -0.0
    b[0, 0] = 2.0**-14
    assert np.signbit(mp.matmul(mixed, b, accumulator=mp.sequential(mp.FP16, fused=True))[0, 0])


def test_fp16_sums_stop_growing_at_2048_and_kahan_goes_on():
    x = np.ones((1, 4096), np.float16)
    assert mp.matmul(x, x.T, accumulator=mp.FP16).item() == 2048
    assert mp.matmul(x, x.T, accumulator=mp.kahan(mp.FP16)).item() == 4096
    assert mp.matmul(x, x.T, accumulator=mp.pairwise(mp.FP16)).item() == 4096


@pytest.mark.parametrize("fmt", [mp.FP16, mp.E4M3FN, mp.E5M2, mp.E2M1FN], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("carrier", [np.float32, np.float64])
def test_the_bounded_kernel_rounds_as_the_others_up_to_the_sign_of_zero(fmt, carrier, edges):
    x = edges(fmt, every=7 if fmt.bits == 16 else 1).astype(carrier)
    x = x[np.abs(x) < fmt.max / 2]
    got, kernel = np.empty_like(x), kernel_for(fmt, "nearest-even", "ieee", "", x.dtype.name)
    assert isinstance(kernel, NearestKernel)
    kernel.bounded(x, got, Workspace(x.size, x.dtype), None, 0)
    wanted = round_to(x, fmt)
    assert same_bits(got, np.where(wanted == 0, 0, wanted)).all()


def test_the_bounded_kernel_is_for_formats_whose_powers_the_carrier_has():
    assert not NearestKernel.suits(mp.BF16, "float32")
    assert not NearestKernel.suits(mp.FP32, "float32")
    assert NearestKernel.suits(mp.FP32, "float64")


@pytest.mark.parametrize("fmt", [mp.E4M3FN, mp.FP16], ids=lambda fmt: fmt.name)
def test_ties_go_away_from_zero_where_the_accumulator_says_so(fmt):
    a, b = np.float32([[7, 0.25]]), np.ones((2, 1), np.float32)
    if fmt == mp.FP16:
        a = np.float32([[2048, 1]])
    away = mp.matmul(a, b, accumulator=mp.sequential(fmt, rounding="nearest-away")).item()
    assert (away, mp.matmul(a, b, accumulator=fmt).item()) == ((7.5, 7.0) if fmt == mp.E4M3FN else (2050, 2048))


@pytest.mark.parametrize(
    "row",
    [mp.sequential(mp.FP16, fused=True), mp.sequential(mp.FP16), mp.kahan(mp.FP16), mp.pairwise(mp.FP16),
     mp.split_k(3, outer=mp.FP16), mp.tensor_core("mi100")],
    ids=lambda row: row.name,
)  # fmt: skip
@pytest.mark.parametrize("side", [2, 30])
def test_a_sum_of_no_terms_is_the_addend(row, side):
    none = np.ones((side, 0), np.float32)
    for start in (0.0, -0.0, 1.5):
        c = np.full((side, side), start, np.float16)
        got = mp.matmul(none, none.T, c, row, out_format=mp.FP16)
        if start == 0 and isinstance(row, SplitK):
            c = np.zeros_like(c)  # workers without terms have +0
        assert same_bits(got, c).all()
    assert same_bits(mp.matmul(none, none.T, accumulator=row, out_format=mp.FP16), np.zeros_like(c)).all()


def middles(fmt):
    """Products of two numbers of a format that lie in the middle between two others: odd integers of one bit more."""
    top = 1 << (fmt.mantissa_bits + 1)
    for u in range(top // 2 + 1, top, 2):
        for v in range(3, top, 2):
            if top <= u * v < 2 * top:
                yield u, v
                break


@pytest.mark.parametrize("rounding", ["nearest-even", "nearest-away", "toward-zero", "toward-negative"])
@pytest.mark.parametrize("fmt", [mp.BF16, mp.E5M2, mp.FP16, mp.TF32, E5M10], ids=lambda fmt: fmt.name)
def test_a_product_in_the_middle_goes_where_the_smallest_accumulator_says(fmt, rounding):
    row = Sequential(name="fused", source="this test", format=fmt, fused=True, rounding=rounding)
    smallest = fmt.min_subnormal
    for scale in (1.0, 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)):
        for u, v in [*middles(fmt)][:40] or [(3, 3)]:
            for start in (smallest, -smallest, 2.0**-20, -(2.0**-20), 0.0):
                first = once(start, fmt)
                a, b = np.float32([first, u * scale]), np.float32([1.0, v])
                total = run_chain(row, Factors(a[:, None, None], b[:, None, None], fmt.mantissa_bits + 1), None)
                assert same_bits(total.astype(np.float64), np.full((1, 1), Scalar(a, b).run(row)))
