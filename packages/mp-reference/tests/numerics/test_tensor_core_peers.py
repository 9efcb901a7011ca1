"""FP8 products against mmaemu, which was recorded on an H100 PCIe and an RTX 4060: same bits, same plan of K."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mp_reference as mp

mmaemu = pytest.importorskip("mmaemu", reason="the peer mmaemu is not installed: pip install mmaemu (brings torch)")
torch = pytest.importorskip("torch", reason="mmaemu needs torch")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
FORMATS = ["float8_e4m3fn", "float8_e5m2"]


def as_torch(x):
    return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).view(getattr(torch, x.dtype.name))


def theirs(a, b, profile, **plan):
    return mmaemu.accumulate(as_torch(a), as_torch(b.T), profile=profile, **plan).numpy()


def drawn(kind, a_format, b_format, shape, rng):
    m, k, n = shape
    if kind == "codes":
        a, b = rng.integers(0, 256, (m, k)).astype(np.uint8), rng.integers(0, 256, (k, n)).astype(np.uint8)
        return a.view(getattr(ml_dtypes, a_format)), b.view(getattr(ml_dtypes, b_format))
    values = [rng.standard_normal(s) * 2.0 ** rng.integers(-7, 7, s) for s in ((m, k), (k, n))]
    if kind == "sparse":
        values = [x * (rng.random(x.shape) < 0.2) for x in values]
    with np.errstate(all="ignore"):
        return values[0].astype(getattr(ml_dtypes, a_format)), values[1].astype(getattr(ml_dtypes, b_format))


@pytest.mark.parametrize("profile", ["ada", "hopper"])
@pytest.mark.parametrize("kind", ["normal", "sparse", "codes"])
def test_no_fp8_product_differs_from_mmaemu(profile, kind):
    rng = np.random.default_rng(17)
    unit = mp.tensor_core(profile)
    for a_format in FORMATS:
        for b_format in FORMATS:
            a, b = drawn(kind, a_format, b_format, (24, 300, 20), rng)
            fast = mp.matmul(a, b, accumulator=unit)
            assert (fast.view(np.uint32) == theirs(a, b, profile, use_fast_accum=True, splitk=1).view(np.uint32)).all()
            slow = mp.matmul(a, b, accumulator=mp.blocked(unit, 128))
            wanted = theirs(a, b, profile, use_fast_accum=False, splitk=1)
            assert ((slow == wanted) | (np.isnan(slow) & np.isnan(wanted))).all()


@pytest.mark.parametrize("splits", [2, 3, 4, 5])
def test_split_k_deals_and_combines_as_cublaslt_does(splits):
    rng = np.random.default_rng(splits)
    a, b = drawn("normal", *FORMATS, (16, 1000, 12), rng)
    for profile, scheme, row in (
        ("hopper", "contiguous", mp.split_k(splits, mp.tensor_core("hopper"), tile=128)),
        ("ada", "serial", mp.split_k(splits, mp.tensor_core("ada"), tile=64, layout="interleaved")),
        ("ada", "pairwise",
         mp.split_k(splits, mp.tensor_core("ada"), tile=64, layout="interleaved", combine="halves")),
    ):  # fmt: skip
        wanted = theirs(a, b, profile, use_fast_accum=True, splitk=mmaemu.SplitK(splits, scheme))
        assert (mp.matmul(a, b, accumulator=row) == wanted).all(), (profile, scheme)
