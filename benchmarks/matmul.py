"""How fast products under a named accumulator are, beside the peers that install as wheels.

Prints ``name: value unit`` and ratios, one line each: medians of process time on one thread, everything in turn in
one process. ``python benchmarks/matmul.py [n] [repeats]``; a peer that is not installed is left out and named.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

import mp_reference as mp

Call = Callable[[], object]


def cases(n: int) -> dict[str, Call]:
    """What is timed, by name."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(np.float16) for _ in range(2))
    eighth = [x.astype(ml_dtypes.float8_e4m3fn) for x in (a, b)]
    brain = [x.astype(ml_dtypes.bfloat16) for x in (a, b)]
    single = [x.astype(np.float32) for x in (a, b)]

    def ours(accumulator: Any, factors: Any = (a, b), **options: Any) -> Call:
        return lambda: mp.matmul(factors[0], factors[1], None, accumulator, **options)

    return {
        "sgemm (numpy)": lambda: np.matmul(*single),
        "half in, fp32 accumulator, half out": ours("fp32"),
        "half in, fp32 accumulator, fp32 out": ours("fp32", out_format=mp.FP32),
        "exact": ours("exact"),
        "sequential fp16": ours(mp.sequential(mp.FP16)),
        "sequential fp16, fused": ours(mp.sequential(mp.FP16, fused=True)),
        "sequential bf16": ours(mp.sequential(mp.BF16), brain),
        "sequential fp32": ours(mp.sequential(mp.FP32)),
        "kahan fp16": ours(mp.kahan(mp.FP16)),
        "hopper fp16": ours(mp.tensor_core("hopper")),
        "hopper fp16, fp16 result": ours(mp.tensor_core("hopper", result=mp.FP16)),
        "hopper bf16": ours(mp.tensor_core("hopper"), brain),
        "ampere fp16": ours(mp.tensor_core("ampere")),
        "hopper fp8": ours(mp.tensor_core("hopper"), eighth),
        "ada fp8": ours(mp.tensor_core("ada"), eighth),
        "exact (wall)": ours("exact"),
        "exact, threads=2 (wall)": ours("exact", threads=2),
        **peers(eighth),
    }


def peers(factors: list[Any]) -> dict[str, Call]:
    """The peers that are installed."""
    try:
        import mmaemu
        import torch
    except ImportError as missing:
        print(f"left out: mmaemu ({missing})")
        return {}
    torch.set_num_threads(1)
    a, b = (
        torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).view(torch.float8_e4m3fn)
        for x in (factors[0], factors[1].T)
    )

    def theirs(profile: str) -> Call:
        return lambda: mmaemu.accumulate(a, b, use_fast_accum=True, profile=profile, splitk=1)

    return {"mmaemu hopper fp8": theirs("hopper"), "mmaemu ada fp8": theirs("ada")}


_TURN = 0.02  # seconds that a turn lasts at least


def measured(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of each call, all in turn ``repeats`` times; short ones several times a turn, the first aside."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            often = max(1, round(_TURN / _seconds(name, call, 1)))
            seconds[name].append(_seconds(name, call, often))
    return {name: median(values) for name, values in seconds.items()}


def _seconds(name: str, call: Call, often: int) -> float:
    """Seconds of one call, the mean of several."""
    clock = time.perf_counter if "wall" in name else time.process_time
    begun = clock()
    for _ in range(often):
        call()
    return (clock() - begun) / often


RATIOS = [
    ("half in, fp32 accumulator, half out", "sgemm (numpy)"),
    ("half in, fp32 accumulator, fp32 out", "sgemm (numpy)"),
    ("hopper fp8", "mmaemu hopper fp8"),
    ("ada fp8", "mmaemu ada fp8"),
    ("exact, threads=2 (wall)", "exact (wall)"),
]


def on_one_thread() -> None:
    """Start over with BLAS on one thread, which it decides when it is loaded."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | one)


def main(n: int = 512, repeats: int = 5) -> None:
    """Measure and print."""
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, numpy {np.__version__}, n = {n}")
    times = measured(cases(n), repeats)
    for name, value in times.items():
        print(f"{name}: {n**3 / value / 1e9:.3f} GMAC/s")
    for ours, theirs in RATIOS:
        if theirs in times:
            print(f"ratio {ours} / {theirs}: {times[theirs] / times[ours]:.2f}")


if __name__ == "__main__":
    on_one_thread()
    main(*map(int, sys.argv[1:]))
