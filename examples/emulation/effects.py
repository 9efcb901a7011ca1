"""Classical effects of 16 bits, each small enough to see at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from mp_torch import AmpEngine
from mp_torch.emulate import emulate

__all__ = ["distinct_positions", "frozen_weight", "losses_inside_one_autocast", "losses_of_the_engine"]


def frozen_weight(master_weights: Literal["fp32", "none"], lr: float = 1.9e-3, steps: int = 200) -> float:
    """A weight that starts at 1.0 and always has gradient 1: where Adam leaves it.

    The step is less than half the distance from 1.0 to the next smaller bf16 number, so a weight that is nothing but
    bf16 rounds back to 1.0 every time.
    """

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self) -> torch.Tensor:
            return self.weight.sum()

    model = One()
    engine = AmpEngine(
        model, torch.optim.Adam(model.parameters(), lr), precision="bf16-true",
        master_weights=master_weights, max_grad_norm=None,
    )  # fmt: skip
    for _ in range(steps):
        with engine.autocast():
            loss = model()
        engine.backward(loss)
        engine.step()
    return model.weight.item()


def _problem() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 1), torch.randn(8, 4), torch.randn(8, 1)


def losses_inside_one_autocast(steps: int = 4) -> list[float]:
    """A training loop inside one autocast region: its cached weight casts go stale, and the loss stands still."""
    model, x, y = _problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with emulate("cuda", precision="bf16-mixed"):
        for _ in range(steps):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


def losses_of_the_engine(steps: int = 4) -> list[float]:
    """The same loop with the engine, inside the same outer autocast region: every forward sees the new weights."""
    model, x, y = _problem()
    losses = []
    with emulate("cuda", precision="bf16-mixed"):
        engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 0.1), precision="bf16-mixed", max_grad_norm=None)
        for _ in range(steps):
            with engine.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def distinct_positions(dtype: torch.dtype, length: int = 4096) -> int:
    """How many of a sequence's positions stay apart in a dtype: rotary embeddings of equal positions are equal."""
    return len(set(torch.arange(length).to(dtype).tolist()))
