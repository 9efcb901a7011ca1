"""Speed of training on two ranks against hand-written DistributedDataParallel and GradScaler, and bytes on the wire.

Prints one ``name: value unit`` line each. Two gloo processes of one thread train the same model of 2 million
parameters in turns, so that other programs slow all alike; medians over all turns, from barrier to barrier, and of a
ratio the median of the turns' ratios. With 16 bits on the wire the engine, which adds in fp32, stands beside torch's
own hook, which adds in 16 bits. Bytes are counted at the collectives that gradients go through.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mp_torch import AmpEngine, LossScale

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, TURNS, STEPS = 2, 41, 3
WIDTH, BATCH = 512, 64
SCALE = 1024.0
RATIOS = (
    ("engine", "by hand"),
    ("engine, bf16 on the wire", "by hand"),
    ("engine, fp16 on the wire", "by hand, fp16 on the wire"),
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [module for _ in range(8) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs, and targets that no model of this size meets: gradients stay as large as in training."""
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def by_hand(hook: Callable[..., Any] | None = None) -> Callable[[], None]:
    """What people write: autocast, DDP, GradScaler, clip, fused AdamW."""
    wrapped = DistributedDataParallel(model())
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    x, y = batch()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (wrapped(x).float() - y).square().mean()
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_engine(**settings: Any) -> Callable[[], None]:
    """The same through ``AmpEngine``."""
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3, fused=True)
    engine = AmpEngine(plain, optimizer, "bf16-mixed", loss_scale=LossScale(init_scale=SCALE), **settings)
    wrapped = engine.replicate()
    x, y = batch()

    def step() -> None:
        with engine.autocast():
            loss = (wrapped(x).float() - y).square().mean()
        engine.backward(loss)
        engine.step()

    return step


SENT = {
    "all_reduce": 2 * (RANKS - 1) / RANKS,
    "all_to_all_single": (RANKS - 1) / RANKS,
    "all_gather_single": RANKS - 1,
    "all_gather_into_tensor": RANKS - 1,
}
"""What a rank sends of the bytes that it hands to a collective, by the usual ring."""


def counted(step: Callable[[], None]) -> int:
    """Bytes that this rank sends for gradients in one step; those of norms and decisions are a few hundred."""
    sent = 0.0
    real = {name: getattr(distributed, name) for name in SENT if hasattr(distributed, name)}

    def counting(name: str) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor, **options: Any) -> Any:
            nonlocal sent
            if tensors[-1].nbytes > 4096:
                splits = options.get("input_split_sizes")  # of bytes; what stays here is none of them
                sent += SENT[name] * tensors[-1].nbytes if splits is None else sum(splits)
            return real[name](*tensors, **options)

        return call

    for name in real:
        setattr(distributed, name, counting(name))
    step()
    for name, function in real.items():
        setattr(distributed, name, function)
    return round(sent)


def work(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    steps = {
        "by hand": by_hand(),
        "engine": by_engine(),
        "by hand, fp16 on the wire": by_hand(fp16_compress_hook),
        "engine, fp16 on the wire": by_engine(reduce_dtype="fp16", divide="after"),
        "engine, bf16 on the wire": by_engine(reduce_dtype="bf16", divide="after"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            distributed.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            distributed.barrier()
            if turn:
                seconds[name].append((time.perf_counter() - begun) / STEPS)
    wire = {name: counted(by_engine(reduce_dtype=name, divide="after")) for name in ("fp32", "fp16", "bf16")}
    if rank == 0:
        results.put((seconds, wire))
    distributed.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        workers = [context.Process(target=work, args=(rank, store, results)) for rank in range(RANKS)]
        for worker in workers:
            worker.start()
        seconds, wire = results.get()
        for worker in workers:
            worker.join()
    for name, values in seconds.items():
        print(f"step, {name}: {1e3 * statistics.median(values):.2f} ms")
    for name, beside in RATIOS:
        turns = [one / other for one, other in zip(seconds[name], seconds[beside], strict=True)]
        print(f"{name} / {beside}: {statistics.median(turns):.3f} ratio")
    for name, sent in wire.items():
        print(f"gradient bytes sent, {name} on the wire: {sent} bytes")


if __name__ == "__main__":
    main()
