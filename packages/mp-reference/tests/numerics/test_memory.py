"""Nothing larger than the output and a workspace of fixed size is made on the way, as the allocator counts it."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import fast_product, matmul, rounding
from mp_reference.numerics.bits import same_bits
from mp_reference.numerics.codec import decode, encode
from mp_reference.numerics.rounding_kernels import kernel_for

MIB = 2**20
ROOM = {"rounding": MIB, "codes": 3 * MIB, "product": 20 * MIB, "sum": 24 * MIB}  # besides a call's output
HALF = np.float16


def peak_besides(call):
    """Most bytes that were held at once, the output aside; the first of two calls, so that scratch memory counts."""
    tracemalloc.start()
    out = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - out.nbytes


def big(shape, dtype=HALF):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["nearest-even", "toward-zero", "stochastic"])
def test_rounding_holds_its_chunks_alone(mode, threads):
    x = np.linspace(-4, 4, 9_000_000, dtype=np.float32)
    random = np.zeros(x.shape, np.uint16) if mode == "stochastic" else None
    shared = kernel_for(mp.FP16, mode, "ieee", "", "float32").long_calls
    widest = 14  # bytes an element: magnitudes, a mask, random bits as they are and as they are added, subnormals
    room = ROOM["rounding"] + (threads * widest * rounding._SHARED if shared and threads > 1 else 0)
    assert peak_besides(lambda: mp.round_to(x, mp.FP16, mode, random_bits=random, threads=threads)) < room < x.nbytes
    assert peak_besides(lambda: mp.round_to(x[::2], mp.FP16, mode, random_bits=None if random is None else random[::2],
                                            threads=threads)) < ROOM["rounding"]  # fmt: skip


@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16, mp.E4M3FN], ids=lambda fmt: fmt.name)
def test_codes_hold_their_chunks_alone(fmt):
    x = np.linspace(-4, 4, 6_000_000, dtype=np.float32)
    assert peak_besides(lambda: encode(x, fmt)) < ROOM["codes"]
    codes = encode(x, fmt)
    assert peak_besides(lambda: decode(codes, fmt)) < ROOM["codes"]


@pytest.mark.parametrize(("dtype", "out_format"), [(HALF, mp.FP16), (ml_dtypes.float8_e4m3fn, mp.FP32)])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(8, 2**20, 8), (3000, 1, 3000), (1, 2**12, 2**12), (2**12, 2**12, 1), (1500, 2500, 1100)]
)
def test_the_fast_product_widens_panels_alone(m, k, n, dtype, out_format):
    a, b = big((m, k), dtype), big((k, n), dtype)
    assert peak_besides(lambda: mp.matmul(a, b, out_format=out_format)) < ROOM["product"]


@pytest.mark.parametrize(
    "row", [mp.FP16, mp.sequential(mp.FP16, fused=True), mp.tensor_core("hopper")], ids=lambda row: row.name
)
def test_chained_sums_widen_parts_of_k_alone(row, monkeypatch):
    a, b = big((64, 4096)), big((4096, 32))
    monkeypatch.setattr(matmul, "_WIDENED", 1)
    peaks = []
    for depth in (4096, 512):
        monkeypatch.setattr(matmul, "_DEPTH", depth)
        peaks.append(peak_besides(lambda: mp.matmul(a, b, accumulator=row, out_format=mp.FP32)))
    assert peaks[0] > 4 * (a.size + b.size)
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("shape", [(2**24,), (2**20, 4), (4, 2**22)])
def test_sums_hold_a_part_of_their_terms_alone(shape):
    x = big(shape, ml_dtypes.float8_e5m2)
    assert peak_besides(lambda: mp.sum(x, axis=-1)) < ROOM["sum"]


def test_sums_step_by_step_hold_a_part_of_their_terms_alone():
    x = big(2**23, ml_dtypes.float8_e5m2)
    assert peak_besides(lambda: mp.sum(x, mp.BF16)) < ROOM["sum"] < 4 * x.size


def test_panels_and_parts_of_k_change_no_bit_that_is_promised(monkeypatch):
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((9, 300)).astype(HALF), rng.standard_normal((300, 7)).astype(HALF)
    c = rng.standard_normal((9, 7)).astype(HALF)
    integers = [np.rint(4 * x).astype(HALF) for x in (a, b, c)]  # whose sums are exact in any order
    rows = [mp.FP16, mp.BF16, mp.sequential(mp.FP16, fused=True), mp.sequential(mp.E5M2, rounding="toward-zero"),
            *(mp.tensor_core(name) for name in ("volta", "turing", "hopper", "cdna1", "cdna2", "cdna3")),
            mp.tensor_core("hopper", result=mp.FP16), mp.tensor_core("h100", family="mma")]  # fmt: skip
    whole = [mp.matmul(a, b, c.astype(row_format(row)), row, out_format=mp.FP32) for row in rows]
    exact = mp.matmul(*integers, out_format=mp.FP32)
    stacked = mp.matmul(np.stack([integers[0]] * 3), integers[1], out_format=mp.BF16)
    monkeypatch.setattr(matmul, "_DEPTH", 128)
    monkeypatch.setattr(matmul, "_WIDENED", 1)
    monkeypatch.setattr(fast_product, "_SIDE", 4)
    for row, wanted in zip(rows, whole, strict=True):
        assert same_bits(mp.matmul(a, b, c.astype(row_format(row)), row, out_format=mp.FP32), wanted).all(), row.name
    for threads in (1, 3):
        assert same_bits(mp.matmul(*integers, out_format=mp.FP32, threads=threads), exact).all()
        got = mp.matmul(np.stack([integers[0]] * 3), integers[1], out_format=mp.BF16, threads=threads)
        assert same_bits(got, stacked).all()


def row_format(row):
    """A dtype whose numbers the accumulator has."""
    return HALF if row is not mp.BF16 and getattr(row, "format", mp.FP16) != mp.E5M2 else ml_dtypes.float8_e5m2


def test_float32_factors_are_used_as_they_are():
    a, b, c = np.float32([[1.5, 2]]), np.float32([[2], [0.25]]), np.float32([[1]])
    for out_format in (mp.FP32, mp.FP16, mp.E4M3FN):
        assert mp.matmul(a, b, out_format=out_format).astype(float).item() == 3.5
        assert mp.matmul(a, b, c, out_format=out_format).astype(float).item() == 4.5
