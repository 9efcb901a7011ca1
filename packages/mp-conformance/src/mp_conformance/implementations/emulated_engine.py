"""AmpEngine on CPU tensors under ``mp_torch.emulate`` as a subject: the other of two trainings."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mp_conformance import two_trainings
from mp_conformance.implementations import NotOfferedError
from mp_reference.nn.kernels import ATEN
from mp_torch import AmpEngine, LossScale
from mp_torch.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_conformance.two_trainings import TrainedStep

__all__ = ["EmulatedEngineSubject"]


class EmulatedEngineSubject:
    """AmpEngine under ``emulate("cuda")``, with correctly rounded products or those of a tensor core."""

    name = "emulated-engine"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Whole trainings."""
        del options
        return operation == "two_trainings"

    def perform(self, operation: str, *operands: Any, **options: Any) -> list[TrainedStep]:
        """Train; with the reference's kernels for everything but products, or with torch's own."""
        del operands
        if operation != "two_trainings":
            raise NotOfferedError(f"an emulated engine has no {operation}")
        kernels = ATEN if options["kernels"] == "reference" else None
        arch = options.get("arch")
        with emulate("cuda", arch, arithmetic="tensor-core" if arch else "exact", kernels=kernels):
            return _trained(options["kind"], options["fmt"], options.get("steps", two_trainings.STEPS))


def _trained(kind: str, fmt: str, steps: int) -> list[TrainedStep]:
    model = _mlp() if kind == "mlp" else _Transformer()
    model.load_state_dict({name: torch.from_numpy(one.copy()) for name, one in two_trainings.start(kind).items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=two_trainings.LEARNING_RATE, weight_decay=1e-2)
    engine = AmpEngine(
        model, optimizer, precision=f"{fmt}-mixed", loss_scale=LossScale(**two_trainings.loss_scale(fmt)),
        max_grad_norm=two_trainings.MAX_NORM, update="exact",
    )  # fmt: skip
    records = []
    for batch in two_trainings.batches(kind)[:steps]:
        with engine.autocast():
            loss = _loss(kind, model, batch)
        engine.backward(loss)
        gradients = {name: one.numpy().copy() for name, one in engine.gradients().items()}
        report = engine.step()
        records.append(
            two_trainings.TrainedStep(
                loss=loss.item(),
                gradients=gradients,
                masters={name: one.detach().numpy().copy() for name, one in engine.masters().items()},
                applied=report.applied,
                loss_scale=report.loss_scale,
                next_loss_scale=report.next_loss_scale,
            )
        )
    return records


def _loss(kind: str, model: nn.Module, batch: Any) -> torch.Tensor:
    if kind == "mlp":
        return functional.cross_entropy(model(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in (batch[:, :-1], batch[:, 1:]))
    return functional.cross_entropy(model(inputs).reshape(-1, two_trainings.VOCABULARY), targets.reshape(-1))


def _mlp() -> nn.Module:
    sizes = two_trainings.KINDS["mlp"].sizes
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Block(nn.Module):
    """The block of ``mp_reference.nn.models.Transformer`` in torch's modules."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        part = width // self.heads
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, part).permute(2, 0, 3, 1, 4)
        query, key, value = (qkv[number] for number in range(3))
        scores = torch.matmul(query, key.transpose(-1, -2)) * part**-0.5
        scores = torch.where(torch.ones(length, length, dtype=torch.bool).tril(), scores, float("-inf"))
        mixed = torch.matmul(torch.softmax(scores, -1), value).permute(0, 2, 1, 3).reshape(batch, length, width)
        x = x + self.out(mixed)
        grown: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return grown


class _Transformer(nn.Module):
    """``mp_reference.nn.models.Transformer`` in torch's modules, with its names."""

    def __init__(self) -> None:
        super().__init__()
        twin = two_trainings.KINDS["transformer"]
        self.tokens = nn.Embedding(twin.vocabulary, twin.width)
        self.places = nn.Embedding(twin.context, twin.width)
        self.blocks = [f"block{number}" for number in range(twin.layers)]
        for name in self.blocks:
            self.add_module(name, _Block(twin.width, twin.heads))
        self.norm, self.head = nn.LayerNorm(twin.width), nn.Linear(twin.width, twin.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for name in self.blocks:
            h = self.get_submodule(name)(h)
        logits: torch.Tensor = self.head(self.norm(h))
        return logits
