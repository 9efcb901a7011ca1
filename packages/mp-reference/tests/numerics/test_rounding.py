"""Rounding against the oracle, where it changes its mind, in every mode."""

from __future__ import annotations

import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.numerics import exact
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.rounding import ROUNDINGS, check_rounding, round_to
from mp_reference.spec.formats import FORMATS, FloatFormat

DETERMINISTIC = [rounding for rounding in ROUNDINGS if rounding != "stochastic"]
SMALL = [fmt for fmt in FORMATS.values() if fmt.bits <= 8]
FLUSHES = [True, "flush-after", "flush-before"]


def assert_rounds_like_the_oracle(x, got, wanted):
    differ = differing_bits(got.astype(np.float64), wanted)
    if differ:
        where = np.flatnonzero((got.astype(np.float64) != wanted) & ~(np.isnan(got) & np.isnan(wanted)))[:3]
        examples = [(float(x[i]).hex(), float(got[i]), float(wanted[i])) for i in where]
        raise AssertionError(f"{differ} of {x.size} differ, (input, got, wanted): {examples}")


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_every_edge_of_a_small_format_rounds_like_the_oracle(fmt, rounding, overflow, edges, oracle):
    x = edges(fmt)
    for subnormals in FLUSHES:
        wanted = oracle(x, fmt, rounding=rounding, overflow=overflow, subnormals=subnormals)
        for carrier in (np.float32, np.float64):
            got = round_to(x.astype(carrier), fmt, rounding, overflow, subnormals)
            assert got.dtype == carrier
            assert_rounds_like_the_oracle(x, got, wanted)


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.TF32], ids=lambda fmt: fmt.name)
def test_edges_of_the_wide_formats_round_like_the_oracle(fmt, rounding, edges, oracle):
    x = edges(fmt, every=251 if fmt.bits == 16 else 1601)
    for overflow in ("ieee", "saturate"):
        for subnormals in FLUSHES:
            wanted = oracle(x, fmt, rounding=rounding, overflow=overflow, subnormals=subnormals)
            for carrier in (np.float32, np.float64):
                got = round_to(x.astype(carrier), fmt, rounding, overflow, subnormals)
                assert_rounds_like_the_oracle(x, got, wanted)


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_float64_rounds_to_fp32_once(rounding, oracle):
    rng = np.random.default_rng(5)
    with np.errstate(over="ignore", invalid="ignore"):
        near = rng.integers(0, 2**32, 600, dtype=np.uint32).view(np.float32).astype(np.float64)
        x = np.concatenate([near * (1 + step) for step in (0, 2.0**-24, 2.0**-24 + 2.0**-50, -(2.0**-25))])
    assert_rounds_like_the_oracle(x, round_to(x, mp.FP32, rounding), oracle(x, mp.FP32, rounding=rounding))


def test_every_fp16_midpoint_and_its_neighbours_round_like_numpy(edges):
    x = edges(mp.FP16)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16).astype(np.float32)
    assert differing_bits(round_to(x, mp.FP16), wanted) == 0
    assert x.size > 300_000


def test_every_bf16_midpoint_and_its_neighbours_round_like_ml_dtypes(edges):
    x = edges(mp.BF16)
    wanted = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert differing_bits(round_to(x, mp.BF16), wanted) == 0
    assert x.size > 300_000


@st.composite
def custom_formats(draw):
    exponent_bits = draw(st.integers(1, 8))
    specials = draw(st.sampled_from(["ieee", "fn", "fnuz", "finite"]))
    mantissa_bits = draw(st.integers(0, 23))
    middle = 2 ** (exponent_bits - 1) - 1
    try:
        return FloatFormat(
            "custom", exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, specials=specials,
            bias=middle + draw(st.integers(-20, 20)),
        )  # fmt: skip
    except ValueError:
        return FloatFormat("custom", exponent_bits=5, mantissa_bits=mantissa_bits, specials=specials)


@given(data=st.data(), fmt=custom_formats(), rounding=st.sampled_from(DETERMINISTIC))
def test_custom_formats_round_like_the_oracle(data, fmt, rounding):
    exponents = st.integers(fmt.min_exponent - fmt.mantissa_bits - 2, fmt.max_exponent + 1)
    drawn = data.draw(st.lists(st.tuples(exponents, st.integers(0, 2 ** (fmt.mantissa_bits + 2)), st.booleans())))
    scale = 2.0 ** -(fmt.mantissa_bits + 2)
    x = np.array([np.ldexp((1 + f * scale) * (-1) ** s, e) for e, f, s in drawn], np.float64)
    overflow, subnormals = data.draw(st.sampled_from(["ieee", "saturate"])), data.draw(st.sampled_from(FLUSHES))
    how = {"rounding": rounding, "overflow": overflow, "subnormals": subnormals}
    wanted = np.array([exact.round_exact(float(v), fmt, **how) for v in x], np.float64)
    assert_rounds_like_the_oracle(x, round_to(x, fmt, **how), wanted)
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float32)
    wanted = np.array([exact.round_exact(float(v), fmt, **how) for v in narrow], np.float64)
    assert_rounds_like_the_oracle(narrow, round_to(narrow, fmt, **how), wanted)


@pytest.mark.parametrize(
    ("value", "fmt", "wanted"),
    [
        (np.float64(1 + 2**-8 + 2**-40), mp.BF16, 1.0078125),
        (np.float64(1 + 2**-11 + 2**-40), mp.FP16, 1.0009765625),
        (np.int64(16973823), mp.BF16, 16908288.0),
        (np.float64(-431.99999999999994), mp.E4M3FN, -416.0),
        (np.int64(2**62 + 2**38 + 1), mp.FP32, 2.0**62 + 2.0**39),
        (np.uint64(2**64 - 1), mp.FP32, 2.0**64),
        (np.int64(-(2**63)), mp.BF16, -(2.0**63)),
        (np.uint8(201), mp.E4M3FN, 208.0),
        (True, mp.FP16, 1.0),
        (Fraction(1, 3), mp.FP16, 0.333251953125),
        (-Fraction(1, 10**60), mp.FP16, -0.0),
        (Fraction(10) ** 60, mp.FP16, np.inf),
        (Fraction(2**70 + 2**59 + 1), mp.FP16, np.inf),
        (Fraction(2049, 1) + Fraction(1, 2**90), mp.FP16, 2050.0),
        (Fraction(2**24 + 1), mp.FP32, 2.0**24),
    ],
)
def test_wide_inputs_are_rounded_once(value, fmt, wanted):
    got = round_to(value, fmt)
    assert got.dtype == np.float64
    assert got == wanted
    assert np.signbit(got) == np.signbit(wanted)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.sampled_from(DETERMINISTIC))
def test_int64_rounds_like_the_oracle(values, rounding):
    got = round_to(np.array(values, np.int64), mp.FP32, rounding)
    wanted = [exact.round_exact(Fraction(value), mp.FP32, rounding) for value in values]
    assert got.tolist() == wanted


@given(
    st.lists(st.fractions(), min_size=1), st.sampled_from(DETERMINISTIC), st.sampled_from([mp.FP32, mp.FP16, mp.E5M2])
)
def test_fractions_round_like_the_oracle(values, rounding, fmt):
    got = round_to(np.array(values, object), fmt, rounding)
    wanted = np.array([exact.round_exact(value, fmt, rounding) for value in values])
    assert differing_bits(got, wanted) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn])
def test_narrow_inputs_are_widened_exactly(dtype):
    x = np.arange(1 << (8 * np.dtype(dtype).itemsize)).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    got = round_to(x, mp.E3M2FN)
    assert got.dtype == np.float32
    assert differing_bits(got, round_to(x.astype(np.float32), mp.E3M2FN)) == 0


@pytest.mark.parametrize("width", [1, 3, 8, 13, 16, 22, 24, 32])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.E4M3FN, mp.E8M0FNU], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_obeys_its_definition(fmt, width, edges):
    rng = np.random.default_rng(width)
    x = rng.choice(edges(fmt, every=37 if fmt.bits == 16 else 5), 400)
    random = rng.integers(0, 2**width, x.shape, dtype=np.uint32)
    random[:100] = 2**width - 1
    random[100:200] = 0
    wanted = np.array(
        [
            exact.round_exact(float(v), fmt, "stochastic", random_bits=int(r), random_width=width)
            for v, r in zip(x, random, strict=True)
        ]
    )
    for carrier in (np.float32, np.float64):
        got = round_to(x.astype(carrier), fmt, "stochastic", random_bits=random, random_width=width)
        assert_rounds_like_the_oracle(x, got, wanted)


@pytest.mark.parametrize("fmt", [mp.FP16, mp.E5M2])
def test_64_random_bits_are_all_used(fmt):
    x = np.full(4, 1 + fmt.epsilon / 2)
    random = np.uint64([2**63, 2**63 - 1, 2**64 - 1, 0])
    up = round_to(x, fmt, "stochastic", random_bits=random) > 1
    assert up.tolist() == [True, False, True, False]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.E4M3FN], ids=lambda fmt: fmt.name)
def test_over_all_random_bits_the_chance_of_going_up_is_the_fraction(fmt, dtype):
    every = np.arange(np.iinfo(dtype).max + 1, dtype=dtype)
    for low in (1.0, fmt.min_subnormal, 0.0):
        step = fmt.min_subnormal if low < 1 else fmt.epsilon
        for fraction in (0.0, 0.25, 0.5, 0.75):
            x = np.float32(low + fraction * step)
            up = round_to(np.full(every.shape, x), fmt, "stochastic", random_bits=every) > np.float32(low)
            assert up.mean() == fraction


def test_near_overflow_the_chance_of_infinity_is_the_fraction():
    every = np.arange(65536, dtype=np.uint16)
    rounded = round_to(np.full(65536, 65512, np.float32), mp.FP16, "stochastic", random_bits=every)
    assert np.isinf(rounded).mean() == 0.25
    assert rounded.min() == 65504.0


def test_a_generator_gives_unbiased_bits_and_the_same_ones_for_the_same_seed():
    x = np.full(200_000, 1 + 0.3 * 2**-10, np.float32)
    first, again = (round_to(x, mp.FP16, "stochastic", random_bits=np.random.default_rng(3)) for _ in range(2))
    assert differing_bits(first, again) == 0
    assert abs((first > 1).mean() - 0.3) < 0.005  # five standard deviations of 200,000 draws


def test_rounding_works_in_place(edges):
    for fmt in (mp.FP16, mp.BF16, mp.E4M3FN, mp.E8M0FNU):
        x = edges(fmt, every=64 if fmt.bits == 16 else 1)
        for rounding in DETERMINISTIC:
            wanted = round_to(x, fmt, rounding, subnormals="flush-before")
            there = x.copy()
            assert round_to(there, fmt, rounding, subnormals="flush-before", out=there) is there
            assert differing_bits(there, wanted) == 0


def test_rounding_works_in_place_where_nothing_becomes_zero():
    x = np.float32([1.1, -2.3, 65519.0])
    round_to(x, mp.FP16, out=x)
    assert x.tolist() == [1.099609375, -2.30078125, 65504.0]


def test_overlapping_memory_is_rounded_as_if_it_did_not_overlap():
    memory = np.linspace(0, 1, 200_001, dtype=np.float32)
    wanted = round_to(memory[:-1].copy(), mp.E4M3FN)
    round_to(memory[:-1], mp.E4M3FN, out=memory[1:])
    assert differing_bits(memory[1:], wanted) == 0


def test_random_bits_are_read_before_the_result_is_written_over_them():
    x = np.random.default_rng(4).standard_normal(200_000).astype(np.float32)
    memory = np.random.default_rng(5).integers(0, 2**32, 201_000, dtype=np.uint32)
    bits, target = memory[:-1000], memory[1000:].view(np.float32)  # a chunk's result lies where the next one's bits do
    wanted = round_to(x, mp.E4M3FN, "stochastic", random_bits=bits.copy())
    round_to(x, mp.E4M3FN, "stochastic", random_bits=bits, out=target)
    assert differing_bits(target, wanted) == 0


def test_any_strides_are_rounded():
    x = np.random.default_rng(0).standard_normal((7, 300, 11)).astype(np.float32)
    wanted = round_to(x, mp.FP16)
    assert differing_bits(round_to(x[::-1, ::3, ::-2], mp.FP16), wanted[::-1, ::3, ::-2]) == 0
    assert differing_bits(round_to(x.T, mp.FP16), wanted.T) == 0
    target = np.zeros((14, 300, 11), np.float32)
    round_to(x, mp.FP16, out=target[::2])
    assert differing_bits(target[::2], wanted) == 0
    assert not target[1::2].any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_no_elements_and_one_element_without_axes_are_legal(fmt):
    assert round_to(np.zeros((0, 3), np.float32), fmt).shape == (0, 3)
    assert round_to(np.float32(2), fmt).shape == ()
    assert round_to(2.0, fmt) == 2.0


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.E4M3FN, mp.E8M0FNU, mp.FP32], ids=lambda fmt: fmt.name)
def test_a_long_array_stays_as_it_was_and_gives_what_its_parts_give(fmt, rounding):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(100_003) * 2.0 ** rng.integers(-30, 18, 100_003)).astype(np.float32)
    x[[0, 1, 50_000, -1]] = 0.0, -0.0, np.inf, np.nan
    bits = rng.integers(0, 2**16, x.shape, np.uint16) if rounding == "stochastic" else None
    before = x.copy()
    parts = [slice(start, start + 999) for start in range(0, x.size, 999)]
    wanted = [round_to(x[i], fmt, rounding, random_bits=None if bits is None else bits[i]) for i in parts]
    assert differing_bits(round_to(x, fmt, rounding, random_bits=bits), np.concatenate(wanted)) == 0
    assert differing_bits(x, before) == 0
    assert differing_bits(round_to(x, fmt, rounding, random_bits=bits, out=x), np.concatenate(wanted)) == 0


def test_chunks_meet_without_a_seam():
    x = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    with np.errstate(over="ignore"):
        assert differing_bits(round_to(x, mp.FP16), x.astype(np.float16).astype(np.float32)) == 0


def test_no_temporary_exceeds_the_output_and_a_workspace():
    import tracemalloc

    x = np.zeros(4_000_000, np.float32)
    tracemalloc.start()
    round_to(x, mp.FP16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes + 4 * 2**20


def test_threads_change_nothing_but_the_time():
    x = np.random.default_rng(7).standard_normal((1000, 1100)).astype(np.float32)
    random = np.random.default_rng(8).integers(0, 65536, x.shape, dtype=np.uint16)
    for arguments in ({}, {"rounding": "stochastic", "random_bits": random}):
        assert differing_bits(round_to(x, mp.FP16, threads=3, **arguments), round_to(x, mp.FP16, **arguments)) == 0
    assert differing_bits(round_to(x.T, mp.FP16, threads=2), round_to(x, mp.FP16).T) == 0
    drawn = [
        round_to(x, mp.FP16, "stochastic", random_bits=np.random.default_rng(9), threads=threads) for threads in (1, 2)
    ]
    assert differing_bits(*drawn) == 0


def test_more_random_bits_than_asked_for_are_cut_off():
    x = np.random.default_rng(10).standard_normal(500).astype(np.float32)
    random = np.random.default_rng(11).integers(0, 2**32, 500, dtype=np.uint32)
    for width in (3, 12):
        low = (random & np.uint32(2**width - 1)).astype(np.uint16)
        wanted = round_to(x, mp.FP16, "stochastic", random_bits=low, random_width=width)
        assert differing_bits(round_to(x, mp.FP16, "stochastic", random_bits=random, random_width=width), wanted) == 0
        assert (
            differing_bits(
                round_to(x, mp.BF16, "stochastic", random_bits=random, random_width=width),
                round_to(x, mp.BF16, "stochastic", random_bits=low, random_width=width),
            )
            == 0
        )
    full = random.astype(np.uint8)
    assert (
        differing_bits(
            round_to(x, mp.FP16, "stochastic", random_bits=full),
            round_to(x, mp.FP16, "stochastic", random_bits=random, random_width=8),
        )
        == 0
    )


def test_rounding_leaves_its_input_alone():
    x = np.float32([0.1, np.nan, -1e9])
    before = x.copy()
    round_to(x, mp.FP16, "to-odd", "saturate", "flush-before")
    assert differing_bits(x, before) == 0


REFUSED = {
    "rounding": (
        lambda: round_to(1.0, mp.FP16, "up"),
        ValueError,
        "rounding='up' must be one of 'nearest-even', 'nearest-away', 'toward-zero', 'toward-positive', "
        "'toward-negative', 'to-odd', 'stochastic'",
    ),
    "overflow": (
        lambda: round_to(1.0, mp.FP16, overflow="wrap"),
        ValueError,
        "overflow='wrap' must be one of 'ieee', 'saturate'",
    ),
    "subnormals": (
        lambda: round_to(1.0, mp.FP16, subnormals="no"),
        ValueError,
        "subnormals='no' must be True, False, 'flush-before' or 'flush-after'",
    ),
    "subnormals by name": (
        lambda: check_rounding("nearest-even", "ieee", 2),
        ValueError,
        "subnormals=2 must be True, False, 'flush-before' or 'flush-after'",
    ),
    **{
        kind: (
            lambda x=x: round_to(x, mp.FP16),
            TypeError,
            f"round_to takes float32, float64, integers, float16, ml_dtypes or Fraction, got {np.asarray(x).dtype}; "
            "convert exactly first, for example [Fraction(v) for v in x]",
        )
        for kind, x in {"complex": 1j, "text": "1", "long double": np.longdouble(1), "int4": ml_dtypes.int4(1)}.items()
    },
    "no random bits": (
        lambda: round_to(1.0, mp.FP16, "stochastic"),
        ValueError,
        "rounding='stochastic' needs random_bits: unsigned integers of the shape of x, or a generator such as "
        "np.random.default_rng(seed)",
    ),
    "needless random bits": (
        lambda: round_to(1.0, mp.FP16, random_bits=np.uint8(1)),
        ValueError,
        "random_bits are for rounding='stochastic', not 'nearest-even'; leave them out",
    ),
    "needless width": (
        lambda: round_to(1.0, mp.FP16, "to-odd", random_width=3),
        ValueError,
        "random_bits are for rounding='stochastic', not 'to-odd'; leave them out",
    ),
    "signed random bits": (
        lambda: round_to(1.0, mp.FP16, "stochastic", random_bits=np.int32(1)),
        TypeError,
        "random_bits must be unsigned integers, got int32; draw with dtype=np.uint32",
    ),
    "too wide": (
        lambda: round_to(1.0, mp.FP16, "stochastic", random_bits=np.uint8(1), random_width=9),
        ValueError,
        "random_width=9 must lie in 1..8, the width of the random bits given",
    ),
    "no width": (
        lambda: round_to(1.0, mp.FP16, "stochastic", random_bits=np.uint64(1), random_width=0),
        ValueError,
        "random_width=0 must lie in 1..64, the width of the random bits given",
    ),
    "wider than a generator's": (
        lambda: round_to(1.0, mp.FP16, "stochastic", random_bits=np.random.default_rng(0), random_width=24),
        ValueError,
        "random_width=24 must lie in 1..23, the width of the random bits given",
    ),
    "out of another dtype": (
        lambda: round_to(np.zeros(2), mp.FP16, out=np.zeros(2, np.float32)),
        ValueError,
        "out is float32[2] and must be float64[2], the carrier and shape of x; allocate it with np.empty",
    ),
    "out of another shape": (
        lambda: round_to(np.zeros(2, np.float16), mp.FP16, out=np.zeros((3, 1), np.float32)),
        ValueError,
        "out is float32[3, 1] and must be float32[2], the carrier and shape of x; allocate it with np.empty",
    ),
    "no threads": (
        lambda: round_to(1.0, mp.FP16, threads=0),
        ValueError,
        "threads=0 must be a whole number of at least 1; threads=1 starts none",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_with_the_way_out(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_the_roundings_are_named_as_documented():
    assert re.fullmatch(r"(nearest-even|nearest-away|toward-\w+|to-odd|stochastic| )+", " ".join(ROUNDINGS))
    assert len(ROUNDINGS) == 7
