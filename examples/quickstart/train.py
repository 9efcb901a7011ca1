"""One training run through ``AmpEngine``, with everything kept that its replay and its picture need."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from examples.quickstart.model import ByteGPT, Size, next_byte_loss
from mp_torch import AmpEngine, StepReport
from mp_torch.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from examples.quickstart.corpus import Corpus
    from examples.quickstart.recipes import Recipe

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
MAX_GRAD_NORM = 1.0
HELD_OUT_BATCHES = 8

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """What one update read and what it wrote."""

    gradients: Tensors
    parameters: Tensors  # after the step, in the model's dtype
    masters: Tensors  # after the step; the parameters themselves where these are fp32


@dataclass
class Run:
    """One precision's training: the curves, the costs, and every update."""

    recipe: Recipe
    initial: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)  # large: the replay empties it
    seconds: float = 0.0
    held_out: float = float("nan")
    zeros: int = 0
    numbers: int = 0
    bytes_per_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def loss_scales(self) -> list[float]:
        """The loss scale of each step."""
        return [report.loss_scale for report in self.reports]

    def count_zeros(self, gradients: Tensors) -> None:
        """Note how many elements of the gradients are exactly zero: what underflow leaves, and what never was."""
        self.zeros += sum(int((gradient == 0).sum()) for gradient in gradients.values())
        self.numbers += sum(gradient.numel() for gradient in gradients.values())

    @property
    def skips(self) -> Counter[str]:
        """Why steps were skipped, and how often."""
        return Counter(str(report.nonfinite_kind) for report in self.reports if report.skipped)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a CPU, CUDA's op rules and matmul arithmetic: fp16 means there what it means on a GPU."""
    return emulate("cuda", arithmetic="fast") if device.type == "cpu" else contextlib.nullcontext()


def copies(tensors: Tensors) -> Tensors:
    """Copies on the CPU that later steps cannot change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def train(recipe: Recipe, corpus: Corpus, size: Size, *, steps: int, device: torch.device, seed: int,
          tick: Callable[[StepReport, float], None]) -> Run:  # fmt: skip
    """Train the model once.

    Args:
        recipe: the precision.
        corpus: the text.
        size: the model.
        steps: how many updates.
        device: where.
        seed: of the initial weights and of the order of the text: the same for every precision.
        tick: told of each step's report and loss.
    """
    torch.manual_seed(seed)
    model = ByteGPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY)
    engine = AmpEngine(model, optimizer, precision=recipe.precision, max_grad_norm=MAX_GRAD_NORM, update="exact",
                       **recipe.options)  # fmt: skip
    run = Run(recipe, initial=copies(engine.masters()))
    generator = torch.Generator().manual_seed(seed)
    with on(device):
        for _ in range(steps):
            tokens, targets = (part.to(device) for part in corpus.batch(generator, size.batch_size, size.context))
            started = time.perf_counter()
            with engine.autocast():
                loss = next_byte_loss(model(tokens), targets)
            engine.backward(loss)
            run.seconds += time.perf_counter() - started
            gradients = copies(engine.gradients())
            run.count_zeros(gradients)
            started = time.perf_counter()
            report = engine.step()
            run.losses.append(loss.item())
            run.seconds += time.perf_counter() - started
            run.reports.append(report)
            run.updates.append(Update(gradients, copies(dict(model.named_parameters())), copies(engine.masters())))
            tick(report, run.losses[-1])
        run.held_out = held_out_loss(engine, model, corpus, size, device)
    run.bytes_per_parameter = bytes_per_parameter(model, optimizer, run.updates[-1].gradients)
    return run


@torch.no_grad()
def held_out_loss(engine: AmpEngine, model: ByteGPT, corpus: Corpus, size: Size, device: torch.device) -> float:
    """Mean loss on text that training never saw, in nats per byte."""
    losses = []
    for tokens, targets in corpus.held_out_batches(HELD_OUT_BATCHES, size.batch_size, size.context):
        with engine.autocast():
            losses.append(next_byte_loss(model(tokens.to(device)), targets.to(device)).item())
    return sum(losses) / len(losses)


def bytes_per_parameter(model: ByteGPT, optimizer: torch.optim.Optimizer, gradients: Tensors) -> dict[str, float]:
    """Bytes that training holds per parameter, by what they are for, counted on the tensors themselves."""
    weights: list[torch.Tensor] = list(model.parameters())
    trained: list[torch.Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
    own = {weight.data_ptr() for weight in weights}
    state = [value for row in optimizer.state.values() for value in row.values() if torch.is_tensor(value)]
    roles: dict[str, list[torch.Tensor]] = {
        "weights": weights,
        "masters": [one for one in trained if one.data_ptr() not in own],
        "gradients": list(gradients.values()),
        "moments": [value for value in state if value.dim()],
    }
    count = sum(weight.numel() for weight in weights)
    return {role: sum(tensor.nbytes for tensor in tensors) / count for role, tensors in roles.items()}
