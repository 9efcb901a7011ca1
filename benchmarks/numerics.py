"""How fast rounding, codes, elementwise arithmetic and fma are, beside the peers that install as wheels.

Prints ``name: value unit``, one line each: medians of process time on one thread, everything in turn in one process,
and the ratio to each peer. A turn is twice a million elements, in one call each or in many; in brackets the second
million, which finds its input in the caches and its result's pages at hand, as in a program that calls again and again.
``python benchmarks/numerics.py [elements] [repeats]``; a peer that is not installed (gfloat, qtorch, pychop, apytypes)
is left out and named. Products under a named accumulator are in ``benchmarks/matmul.py``.
"""

from __future__ import annotations

import importlib
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import mp_reference as mp
from mp_reference.numerics.codec import decode, encode
from mp_reference.numerics.rounding import ROUNDINGS

if TYPE_CHECKING:
    from mp_reference.spec.formats import FloatFormat

Call = Callable[[], object]
Group = dict[str, Call]
FORMATS = (mp.FP16, mp.BF16, mp.E4M3FN, mp.E5M2, mp.FloatFormat("e5m4", exponent_bits=5, mantissa_bits=4))
GFLOAT = {
    "nearest-even": "TiesToEven", "toward-zero": "TowardZero", "toward-positive": "TowardPositive",
    "toward-negative": "TowardNegative", "nearest-away": "TiesToAway", "stochastic": "Stochastic",
}  # fmt: skip


def peer(name: str) -> Any:
    """A peer's module, or None with a line that says so."""
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        print(f"left out: {name} ({missing})")
        return None


def gfloat_call(gfloat: Any, fmt: FloatFormat, rounding: str, x: np.ndarray, random: np.ndarray) -> Call:
    """Gfloat's rounding of an array."""
    formats = importlib.import_module("gfloat.formats")
    known = {
        "fp16": "format_info_binary16", "bf16": "format_info_bfloat16", "float8_e4m3fn": "format_info_ocp_e4m3",
        "float8_e5m2": "format_info_ocp_e5m2",
    }  # fmt: skip
    if fmt.name in known:
        info = getattr(formats, known[fmt.name])
    else:
        half = formats.format_info_binary16
        info = type(half)(**(vars(half) | {"name": "e5m4", "k": 10, "precision": 5, "num_high_nans": 15}))
    mode = getattr(gfloat.RoundMode, GFLOAT[rounding])
    wide = x.astype(np.float64)
    if rounding == "stochastic":
        bits = random.astype(np.int64)
        return partial(gfloat.round_ndarray, info, wide, mode, srbits=bits, srnumbits=16)
    return partial(gfloat.round_ndarray, info, wide, mode)


def there_and_back(x: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """A library's cast, its result in float32 again."""
    return x.astype(fmt.dtype).astype(np.float32)


def rounding_groups(n: int, peers: dict[str, Any]) -> dict[str, Group]:
    """float32 to every format and rounding, ours beside gfloat, QPyTorch and, where exact, library casts and back."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n).astype(np.float32)
    random = rng.integers(0, 65536, n, dtype=np.uint16)
    groups: dict[str, Group] = {}
    for fmt in FORMATS:
        for rounding in ROUNDINGS:
            bits = random if rounding == "stochastic" else None
            group: Group = {"ours": partial(mp.round_to, x, fmt, rounding, random_bits=bits)}
            if peers["gfloat"] and rounding in GFLOAT:
                group["gfloat"] = gfloat_call(peers["gfloat"], fmt, rounding, x, random)
            if peers["qtorch"] and rounding in ("nearest-even", "stochastic") and fmt.has_inf:
                quantize = importlib.import_module("qtorch.quant").float_quantize
                tensor = importlib.import_module("torch").from_numpy(x)
                mode = "nearest" if rounding == "nearest-even" else "stochastic"
                group["qtorch"] = partial(quantize, tensor, fmt.exponent_bits, fmt.mantissa_bits, mode)
            if rounding == "nearest-even" and fmt.dtype != np.float32:
                group["astype and back"] = partial(there_and_back, x, fmt)
            groups[f"round {fmt.name} {rounding} {n}"] = group
    return groups


def peer_rounding_groups(n: int, peers: dict[str, Any]) -> dict[str, Group]:
    """The two peers that hold codes or go through objects, on fp16 to nearest even."""
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    group: Group = {"ours": lambda: mp.round_to(x, mp.FP16)}
    if peers["apytypes"]:
        array = peers["apytypes"].APyFloatArray
        group["apytypes"] = partial(array.from_array, x, exp_bits=5, man_bits=10)
    if peers["pychop"]:
        group["pychop"] = partial(peers["pychop"].Chop(exp_bits=5, sig_bits=10, rmode=1), x)
    return {f"round fp16 nearest-even {n} (others)": group}


def code_groups(n: int) -> dict[str, Group]:
    """Codes both ways, beside NumPy's and ml_dtypes' casts."""
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    groups: dict[str, Group] = {}
    for fmt in (mp.FP16, mp.BF16, mp.E4M3FN, mp.E5M2, mp.E2M1FN):
        stored = x.astype(fmt.dtype)
        codes = stored.view(f"u{fmt.dtype.itemsize}")
        groups[f"encode {fmt.name} {n}"] = {"ours": partial(encode, x, fmt), "library": partial(x.astype, fmt.dtype)}
        groups[f"decode {fmt.name} {n}"] = {
            "ours": partial(decode, codes, fmt),
            "library": partial(stored.astype, np.float32),
        }
    return groups


def arithmetic_groups(n: int) -> dict[str, Group]:
    """Elementwise operations beside the dtype's own, and fma, which no peer has for arrays."""
    rng = np.random.default_rng(0)
    groups: dict[str, Group] = {}
    for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32):
        a, b, c = (rng.standard_normal(n).astype(np.float32).astype(dtype) for _ in range(3))
        name = np.dtype(dtype).name
        for operation, theirs in (("add", np.add), ("mul", np.multiply), ("div", np.divide)):
            ours = getattr(mp, operation)
            groups[f"{operation} {name} {n}"] = {"ours": partial(ours, a, b), "library": partial(theirs, a, b)}
            groups[f"{operation} {name} toward-zero {n}"] = {"ours": partial(ours, a, b, "toward-zero")}
        groups[f"fma {name} {n}"] = {"ours": partial(mp.fma, a, b, c)}
    return groups


def measure(groups: dict[str, Group], n: int, repeats: int) -> None:
    """Time each group in turn, twice a turn, and print elements per second and ratios."""
    for title, group in groups.items():
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in group}
        for _ in range(repeats):
            for name, call in group.items():
                times[name].append((_seconds(call, n), _seconds(call, n)))
        middle = {name: [median(seconds) for seconds in zip(*pairs, strict=True)] for name, pairs in times.items()}
        for name, (first, second) in middle.items():
            ratios = f"{first / middle['ours'][0]:.1f} ({second / middle['ours'][1]:.1f})"
            ratio = "" if name == "ours" else f", ours {ratios} times as fast"
            print(f"{title}, {name}: {n / first / 1e6:.0f} ({n / second / 1e6:.0f}) M elements/s{ratio}", flush=True)


def _seconds(call: Call, n: int) -> float:
    """Seconds of one call; of small arrays the mean of as many as make up a million elements."""
    calls = max(1, 1_000_000 // n)
    begun = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - begun) / calls


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    print(f"machine: {platform.machine()}, numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")
    peers = {name: peer(name) for name in ("gfloat", "qtorch", "apytypes", "pychop")}
    if peers["qtorch"]:
        importlib.import_module("torch").set_num_threads(1)
    with np.errstate(all="ignore"):
        measure(rounding_groups(n, peers), n, repeats)
        measure(peer_rounding_groups(n, peers), n, repeats)
        measure(code_groups(n), n, repeats)
        measure(arithmetic_groups(n), n, repeats)


if __name__ == "__main__":
    main()
