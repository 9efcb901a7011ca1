"""Speed of ``mp_torch.emulate`` against fp32 and against torch's own 16-bit CPU kernels, as ratios in one run.

Prints one `name: value unit` line each: first with the kernels that torch chooses on this CPU, then (``avx2.``) as on a
CPU without AMX and AVX512-FP16, which is had by limiting torch and oneDNN to AVX2 in a second process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from mp_torch.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIMIT = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Timed = tuple["Callable[[], object]", AbstractContextManager[object]]


def seconds(timed: Mapping[str, Timed], budget: float, rounds: int = 3) -> dict[str, float]:
    """The least CPU time of each function inside its context, in turns, so that other programs slow all alike.

    Torch runs on one thread, so CPU time is what the function would take on a machine of its own.
    """
    best = dict.fromkeys(timed, float("inf"))
    started = time.process_time()
    while rounds > 0 or time.process_time() - started < budget:
        rounds -= 1
        for name, (function, context) in timed.items():
            with context:
                begun = time.process_time()
                function()
                best[name] = min(best[name], time.process_time() - begun)
    return best


class SmallGpt(nn.Module):
    """A byte-level GPT of some three million parameters."""

    def __init__(self, width: int = 256, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (batch * length, 256)."""
        hidden = self.blocks(self.tokens(x) + self.places.weight, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits.flatten(0, 1)


def training_step(dtype: torch.dtype | None) -> Callable[[], None]:
    """One step of the GPT: forward, backward, AdamW."""
    torch.manual_seed(0)
    model = SmallGpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    text = torch.randint(0, 256, (8, 129))

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def training(prefix: str) -> None:
    for name, dtype in HALVES.items():
        found = seconds(
            {
                "fp32": (training_step(None), nullcontext()),
                "own": (training_step(dtype), nullcontext()),
                "emulated": (training_step(dtype), emulate("cuda")),
            },
            budget=6.0,
        )
        print(f"{prefix}gpt.{name}.fp32: {found['fp32'] * 1e3:.1f} ms")
        print(f"{prefix}gpt.{name}.emulated_over_fp32: {found['emulated'] / found['fp32']:.2f} x")
        print(f"{prefix}gpt.{name}.torch_autocast_over_emulated: {found['own'] / found['emulated']:.2f} x")


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """``function`` so many times, warm."""

    def many() -> None:
        for _ in range(calls):
            function()

    function()
    return many


def products(prefix: str) -> None:
    for size in (512, 1024):
        a, b = torch.randn(size, size), torch.randn(size, size)
        for name, dtype in HALVES.items():
            x, y = a.to(dtype), b.to(dtype)
            timed: dict[str, Timed] = {
                "fp32": (repeated(partial(torch.mm, a, b), 8), nullcontext()),
                "emulated": (repeated(partial(torch.mm, x, y), 8), emulate("cuda")),
            }
            found = seconds(timed, budget=2.0, rounds=5)
            own = 8 * seconds({"own": (partial(torch.mm, x, y), nullcontext())}, budget=0.3, rounds=2)["own"]
            print(f"{prefix}mm{size}.{name}.torch_over_emulated: {own / found['emulated']:.1f} x")
            print(f"{prefix}mm{size}.{name}.emulated_over_fp32: {found['emulated'] / found['fp32']:.2f} x")


def overhead(prefix: str) -> None:
    """What the emulation adds to one op on 8 x 8 matrices, beyond the casts that the rule asks for."""
    half, double = torch.randn(8, 8).half(), torch.randn(8, 8).double()
    calls = 2000
    by_hand_and_emulated: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "mm": (lambda: torch.mm(half.float(), half.float()).half(), lambda: torch.mm(half, half)),
        "exp": (lambda: torch.exp(half.float()), lambda: torch.exp(half)),
        "softmax": (lambda: torch.softmax(half, -1, dtype=torch.float32), lambda: torch.softmax(half, -1)),
        "add": (lambda: torch.add(half, half), lambda: torch.add(half, half)),
        "mm_fp64": (lambda: torch.mm(double, double), lambda: torch.mm(double, double)),
    }  # fmt: skip

    with torch.no_grad():
        for name, (by_hand, emulated) in by_hand_and_emulated.items():
            timed: dict[str, Timed] = {
                "hand": (repeated(by_hand, calls), nullcontext()),
                "emulated": (repeated(emulated, calls), emulate("cuda", precision="fp16-mixed")),
            }
            found = seconds(timed, budget=1.0, rounds=5)
            print(f"{prefix}overhead.{name}: {(found['emulated'] - found['hand']) / calls * 1e6:.1f} us")


def main() -> None:
    torch.set_num_threads(1)
    prefix = "avx2." if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" else ""
    print(f"{prefix}torch_kernels: {torch.backends.cpu.get_cpu_capability()}")
    products(prefix)
    training(prefix)
    overhead(prefix)
    if not prefix:
        subprocess.run([sys.executable, __file__], env={**os.environ, **LIMIT}, check=True)


if __name__ == "__main__":
    main()
