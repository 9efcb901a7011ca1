"""Speed of ``AmpEngine.step`` against torch's own recipe, as ratios in one run.

Prints one ``name: value unit`` line each: the step (check, unscale, clip, AdamW, scale update) of 30 million fp32
parameters in 60 tensors against ``GradScaler`` + ``clip_grad_norm_`` + ``AdamW``, with ``fused=True`` and with torch's
defaults; what it moves, and how that compares with the machine's copy bandwidth; and the whole iteration of a tiny
model, where Python is all there is. Repeats are interleaved, so that other programs slow all alike, and medians
compared; on the CPU, where torch gets one thread, the clock is the process's own CPU time. ``python
benchmarks/engine.py --device cuda`` runs the same on an accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from mp_torch import AmpEngine, LossScale

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

COUNT, TENSORS, REPEATS = 30_000_000, 60, 11
SCALE, MAX_NORM = 1024.0, 1.0
ELEMENT = 4
"""Bytes of an fp32 number."""

READ_BY_NORM, READ_BY_KERNEL, WRITTEN_BY_KERNEL = 1, 4, 4
"""Passes: the norm reads the gradient; AdamW reads weight, gradient and two moments, and writes all four.

A step that clips by the norm of all gradients must read them twice, so these five reads are its least.
"""

Timed = tuple["Callable[[], object]", "Callable[[], object]"]


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def medians(timed: Mapping[str, Timed], device: torch.device, repeats: int, inner: int = 1) -> dict[str, float]:
    """Median seconds of each function, in turns; its preparation is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for turn in range(repeats + 1):
        for name, (prepare, function) in timed.items():
            prepare()
            synchronize(device)
            begun = clock()
            for _ in range(inner):
                function()
            synchronize(device)
            if turn:  # the first one allocates
                seconds[name].append((clock() - begun) / inner)
    return {name: statistics.median(values) for name, values in seconds.items()}


def large_model(device: torch.device) -> tuple[nn.ParameterList, Callable[[], None]]:
    """Thirty million parameters, and what gives them fresh scaled gradients."""
    size = COUNT // TENSORS
    parameters = nn.ParameterList([nn.Parameter(torch.randn(size, device=device)) for _ in range(TENSORS)])
    gradients = [torch.empty(size, device=device) for _ in range(TENSORS)]
    source = torch.randn(size, device=device) * SCALE

    def prepare() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.copy_(source)

    return parameters, prepare


def torch_step(device: torch.device, *, fused: bool) -> Timed:
    """The recipe of torch's documentation."""
    parameters, prepare = large_model(device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=fused or None)
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.ones(1, device=device))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return prepare, step


def engine_step(device: torch.device) -> Timed:
    """The same through the engine: a backward of nothing opens the window, the gradients are the prepared ones."""
    parameters, prepare = large_model(device)
    engine = AmpEngine(
        parameters,
        torch.optim.AdamW(parameters, lr=1e-3),
        "fp16-mixed",
        loss_scale=LossScale(init_scale=SCALE),
        max_grad_norm=MAX_NORM,
    )
    nothing = nn.Parameter(torch.zeros((), device=device))

    def ready() -> None:
        engine.backward(nothing * 1)
        prepare()

    return ready, engine.step


def copy_of(device: torch.device) -> Timed:
    """A plain copy of as many numbers: the machine's bandwidth."""
    source, target = torch.randn(COUNT, device=device), torch.empty(COUNT, device=device)
    return lambda: None, lambda: target.copy_(source)


def reading_of(device: torch.device) -> Timed:
    """As many numbers, read once and not written: what no step can beat."""
    source = torch.randn(COUNT, device=device)
    return lambda: None, lambda: torch.dot(source, source)


def tiny_iteration(device: torch.device, dtype: torch.dtype, kind: str) -> Timed:
    """Forward, backward and step of a two-layer MLP, 32 wide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).to(device)
    x, y = torch.randn(16, 32, device=device), torch.randn(16, 32, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind == "fused" or None)
    half = dtype == torch.float16
    if kind == "engine":
        policy = LossScale(init_scale=SCALE) if half else None
        engine = AmpEngine(model, optimizer, "fp16-mixed" if half else "bf16-mixed", loss_scale=policy)

        def ours() -> None:
            with engine.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            engine.backward(loss)
            engine.step()

        return lambda: None, ours
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=half)

    def by_hand() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return lambda: None, by_hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    found = medians(
        {
            "engine": engine_step(device),
            "fused": torch_step(device, fused=True),
            "defaults": torch_step(device, fused=False),
            "copy": copy_of(device),
            "reading": reading_of(device),
        },
        device,
        REPEATS,
    )
    moved = (READ_BY_NORM + READ_BY_KERNEL + WRITTEN_BY_KERNEL) * ELEMENT
    copied = 2 * ELEMENT * COUNT / found["copy"]
    least = (READ_BY_NORM + READ_BY_KERNEL) * found["reading"]
    for name in ("engine", "fused", "defaults"):
        print(f"step.{name}: {1e3 * found[name]:.1f} ms")
    print(f"step.speedup_over_fused_recipe: {found['fused'] / found['engine']:.2f} x")
    print(f"step.speedup_over_default_recipe: {found['defaults'] / found['engine']:.2f} x")
    print(f"step.bytes_per_parameter: {moved} bytes")
    print(f"step.bandwidth: {moved * COUNT / found['engine'] / 1e9:.1f} GB/s")
    print(f"step.share_of_copy_bandwidth: {100 * moved * COUNT / found['engine'] / copied:.0f} %")
    print(f"step.reads_alone: {1e3 * least:.1f} ms")
    print(f"step.share_of_read_bandwidth: {100 * least / found['engine']:.0f} %")
    for dtype in (torch.float16, torch.bfloat16):
        word = "fp16" if dtype == torch.float16 else "bf16"
        kinds = ("engine", "default", "fused")
        tiny = medians({kind: tiny_iteration(device, dtype, kind) for kind in kinds}, device, 15, inner=40)
        for kind in kinds:
            print(f"tiny.{word}.{kind}: {1e6 * tiny[kind]:.0f} us")
        print(f"tiny.{word}.engine_over_hand_written: {tiny['engine'] / tiny['default']:.2f} x")
        print(f"tiny.{word}.engine_over_hand_written_fused: {tiny['engine'] / tiny['fused']:.2f} x")


if __name__ == "__main__":
    main()
