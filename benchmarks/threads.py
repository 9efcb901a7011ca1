"""What a second thread is worth in rounding long arrays, and in products with an fp32 accumulator.

Prints a line for each format and rounding: milliseconds of one thread, and how many times as fast two are, first into a
new array, then into one that was written before (``out=``). Wall time, medians, one and two in turn in one process with
BLAS on one thread; two idle cores are needed. ``python benchmarks/threads.py [elements] [repeats]``.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from matmul import on_one_thread

import mp_reference as mp
from mp_reference.numerics.rounding import ROUNDINGS

FORMATS = (mp.FP16, mp.BF16, mp.E4M3FN, mp.E5M2)
SIDE = 2048  # of the square factors: four tiles
THREADS = (1, 2)


def main(n: int = 2**24, repeats: int = 11) -> None:
    """Measure and print."""
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, numpy {np.__version__}, {n} elements")
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n).astype(np.float32)
    bits = rng.integers(0, 65536, n, dtype=np.uint16)
    kept = np.zeros_like(x)
    for fmt in FORMATS:
        for rounding in ROUNDINGS:
            random = bits if rounding == "stochastic" else None
            call = partial(mp.round_to, x, fmt, rounding, random_bits=random)
            new, old = compared(call, repeats), compared(partial(call, out=kept), repeats)
            print(f"round {fmt.name} {rounding}, new array: {new}; out=: {old}", flush=True)
    a, b = (rng.standard_normal((SIDE, SIDE)).astype(np.float16) for _ in range(2))
    product = partial(mp.matmul, a, b, out_format=mp.FP32)
    print(f"half in, fp32 accumulator, fp32 out, n = {SIDE}: {compared(product, repeats)}")


def compared(call: Any, repeats: int) -> str:
    """Milliseconds of one thread, and the ratio to two."""
    seconds: dict[int, list[float]] = {threads: [] for threads in THREADS}
    for _ in range(repeats):
        for threads, times in seconds.items():
            begun = time.perf_counter()
            call(threads=threads)
            times.append(time.perf_counter() - begun)
    one, two = (median(seconds[threads]) for threads in THREADS)
    return f"{one * 1e3:.1f} ms, threads=2 {one / two:.2f} times as fast"


if __name__ == "__main__":
    on_one_thread()
    main(*map(int, sys.argv[1:]))
