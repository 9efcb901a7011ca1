"""One small training, in every layout over ranks: what the tests of equivalence and of checkpoints compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mp_torch import AmpEngine, LossScale

LAYOUTS = {"one": 1, "ddp": 2, "ddp4": 4, "fsdp": 2, "fsdp4": 4, "hsdp4": 4, "tp": 2, "pp": 2, "tp+fsdp4": 4}
"""Name of a layout and its number of ranks."""

WIDTH, BATCH, GRID = 4, 8, 2.0**-6
DECISION = ("applied", "skipped", "loss_scale", "next_loss_scale", "update_index")
FIELDS = (*DECISION, "grad_norm", "clip_coef", "nonfinite_kind")


class Net(nn.Module):
    """Two layers whose gradients are exact where inputs are small whole numbers: sums in any order agree."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=GENERATOR) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * 1.0  # no view: FSDP warns of in-place changes to one


GENERATOR = torch.Generator()


@dataclass
class Trace:
    """What a training did: its reports, and the parameters at its end."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class Training:
    """The model and its engine, laid out; ``step`` feeds the same global batch whatever the layout."""

    def __init__(self, layout: str, precision: str = "fp32", lr: float = 1.0, **settings: Any) -> None:
        GENERATOR.manual_seed(0)
        self.layout, self.net = layout, Net()
        self.rank = 0 if layout == "one" else distributed.get_rank()
        self.world = LAYOUTS[layout]
        self.shares, self.share = (1, 0) if layout in ("one", "tp", "pp") else (self.world, self.rank)
        self.model: nn.Module = self.net
        mesh = None
        if layout.startswith("tp"):
            mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "pp":
            self.model = (
                nn.ModuleDict({"up": self.net.up}) if self.rank == 0 else nn.ModuleDict({"down": self.net.down})
            )
        # Each element is clamped to one value of either sign, so that parameters stay on a coarse grid and every sum
        # that training makes is exact, in any order; clipping by norm would multiply by something odd.
        settings.setdefault("max_grad_norm", None)
        if settings["max_grad_norm"] is None:
            settings.setdefault("clip_value", GRID)
        settings.setdefault("loss_scale", LossScale(init_scale=2.0**4, growth_interval=3))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.engine = AmpEngine(self.model, optimizer, precision, update="exact", **settings)
        self.call: Any = self.net
        if layout.startswith("ddp"):
            self.call = self.engine.replicate()
        elif layout.startswith("fsdp"):
            self.engine.shard()
        elif layout == "hsdp4":
            self.engine.shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        elif layout == "tp+fsdp4":
            assert mesh is not None
            self.engine.shard(mesh["dp"])
            self.shares, self.share = 2, mesh["dp"].get_local_rank()
        elif layout == "pp":
            stage = PipelineStage(next(iter(self.model.values())), self.rank, 2, torch.device("cpu"))
            self.schedule = Schedule1F1B(stage, 2, loss_fn=self.engine.scale_fn(loss_of))

    def step(self, x: torch.Tensor, overflow_on: int | None = None) -> Any:
        """One update; ``overflow_on`` puts an infinity into one gradient of that rank, after backward."""
        if self.layout == "pp":
            with self.engine.autocast():
                if self.rank == 0:
                    self.schedule.step(x)
                else:
                    self.schedule.step(target=x)
        else:
            mine = x.chunk(self.shares)[self.share]
            with self.engine.autocast():
                loss = loss_of(self.call(mine), mine)
            self.engine.backward(loss)
        if overflow_on is not None and overflow_on % self.world == self.rank:
            spoil(self.model)
        return self.engine.step()

    def whole(self) -> dict[str, torch.Tensor]:
        """The model's parameters, gathered, by the names of the whole model."""
        found = {}
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach()
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()
        return found


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is a small multiple of a power of two."""
    return BATCH * (output * target).float().sum(-1).mean()


def spoil(model: nn.Module) -> None:
    """Put an infinity where this rank holds something."""
    for parameter in model.parameters():
        gradient = parameter.grad
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if part is not None and part.numel():
            part.view(-1)[0] = torch.inf
            return


def batches(count: int, seed: int = 7) -> list[torch.Tensor]:
    """Small whole numbers: every sum that training makes of them is exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-2, 3, (BATCH, WIDTH), generator=generator).float() for _ in range(count)]


def trace(layout: str, overflows: list[int | None], precision: str = "fp32", **settings: Any) -> Trace:
    """Train through a history of overflows and say what happened."""
    training = Training(layout, precision, **settings)
    found = Trace()
    for x, overflow in zip(batches(len(overflows)), overflows, strict=True):
        report = training.step(x, overflow)
        found.reports.append({name: repr(getattr(report, name)) for name in FIELDS})
    found.parameters = training.whole()
    return found
