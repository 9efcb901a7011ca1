"""One training in fp32, fp16, bf16, and fp16 without loss scaling, all under the emulated device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mp_torch import AmpConfig, AmpEngine, LossScale
from mp_torch.emulate import NumericsReport, emulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from examples.emulation.data import Batches

__all__ = ["RECIPES", "Outcome", "compare", "look", "train"]

RECIPES: dict[str, AmpConfig] = {
    "fp32": AmpConfig(precision="fp32"),
    "fp16": AmpConfig(precision="fp16-mixed"),
    "bf16": AmpConfig(precision="bf16-mixed"),
    "fp16 unscaled": AmpConfig(precision="fp16-mixed", loss_scale=LossScale.off()),
}


@dataclass(frozen=True)
class Outcome:
    """How one training went: mean loss of the first and last steps, skipped steps, the last loss scale."""

    first: float
    last: float
    skipped: int
    loss_scale: float


def train(
    make: Callable[[], nn.Module],
    batches: Batches,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    config: AmpConfig,
    lr: float,
) -> Outcome:
    """Train from one seed under the op rules of CUDA, one step a batch."""
    torch.manual_seed(0)
    model = make()
    losses, skipped = [], 0
    with emulate("cuda"):
        engine = AmpEngine(model, torch.optim.AdamW(model.parameters(), lr, eps=1e-12), config=config)
        for x, y in batches:
            with engine.autocast():
                loss = loss_function(model(x), y)
            engine.backward(loss)
            skipped += not engine.step().applied
            losses.append(loss.item())
    window = max(1, len(losses) // 8)
    first, last = sum(losses[:window]) / window, sum(losses[-window:]) / window
    return Outcome(first, last, skipped, float(engine.loss_scale))


def compare(
    name: str,
    make: Callable[[], nn.Module],
    batches: Batches,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    lr: float,
) -> dict[str, Outcome]:
    """Every recipe, printed as a table."""
    print(f"\n{name}\n{'recipe':<15}{'first loss':>12}{'last loss':>12}{'skipped':>9}{'loss scale':>12}")
    outcomes = {}
    for recipe, config in RECIPES.items():
        found = outcomes[recipe] = train(make, batches, loss_function, config, lr)
        print(f"{recipe:<15}{found.first:>12.6g}{found.last:>12.6g}{found.skipped:>9}{found.loss_scale:>12g}")
    return outcomes


def look(
    make: Callable[[], nn.Module],
    batches: Batches,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> NumericsReport:
    """Watch one step in bf16, which loses no magnitudes, and judge fp16."""
    torch.manual_seed(0)
    model = make()
    x, y = batches[0]
    with emulate("cuda", precision="bf16-mixed"), NumericsReport(model, precision="fp16-mixed") as report:
        loss_function(model(x), y).backward()  # type: ignore[no-untyped-call]
    return report
