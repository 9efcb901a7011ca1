"""Gradients that are given, so that nothing rounds before the write-back: the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mp_torch import AmpEngine, LossScale

WINDOW = 4  # micro-steps on all ranks together
STEPS = 6


class Given(nn.Module):
    """Two linears whose loss is each parameter times a given number, which is then its gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.column, self.row = nn.Linear(3, 4), nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for parameter, gradient in zip(self.parameters(), given, strict=True):
            if isinstance(parameter, DTensor):
                gradient = DTensor.from_local(gradient, parameter.device_mesh).redistribute(
                    placements=parameter.placements
                )
                parameter, gradient = parameter.to_local(), gradient.to_local()
            losses.append((parameter.float() * gradient).sum())
        return torch.stack(losses).sum()


def drawn_gradients() -> list[list[list[torch.Tensor]]]:
    """For each step and micro-step, small whole numbers: bf16 holds them and every sum of them."""
    generator = torch.Generator().manual_seed(2)
    shapes = [parameter.shape for parameter in Given().parameters()]
    return [
        [[torch.randint(-15, 16, shape, generator=generator).float() for shape in shapes] for _ in range(WINDOW)]
        for _ in range(STEPS)
    ]


def trained(layout: str, precision: str) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    """Reports and whole parameters after some steps of AdamW."""
    world = 1 if layout == "one" else distributed.get_world_size()
    model = Given()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"column": ColwiseParallel(), "row": RowwiseParallel()})
    shares, share = (1, 0) if layout in ("one", "tp") else (world, distributed.get_rank())
    engine = AmpEngine(
        model, torch.optim.AdamW(model.parameters(), 0.05), precision, loss_scale=LossScale.off(), update="exact",
        max_grad_norm=1.0, accumulate_steps=WINDOW // shares, seed=5,
    )  # fmt: skip
    call: Any = model
    if layout == "ddp":
        call = engine.replicate()
    elif layout == "fsdp":
        engine.shard(param_dtype=None)
    reports = []
    for window in drawn_gradients():
        for given in window[share * WINDOW // shares : (share + 1) * WINDOW // shares]:
            with engine.autocast():
                loss = call(given)
            engine.backward(loss)
        report = engine.step()
        reports.append((report.applied, report.grad_norm, report.clip_coef, report.update_index))
    whole = {name: one.detach() for name, one in model.named_parameters()}
    return reports, {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).float() for name, one in whole.items()
    }


@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("tp", 2)])
@pytest.mark.parametrize("precision", ["bf16-sr", "bf16-true", "bf16-kahan"])
def test_after_many_steps_the_bits_are_those_of_one_process(pool, precision, layout, world):
    reports, expected = trained("one", precision)
    for others, parameters in pool.run(trained, world, layout, precision):
        assert others == reports
        for name, tensor in expected.items():
            assert torch.equal(parameters[name], tensor), name


class Experts(nn.Module):
    """Three parameters, of which each micro-step uses one and none the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([torch.ones(3), torch.ones(3), torch.ones(3)])

    def forward(self, micro: int) -> torch.Tensor:
        return (self.experts[micro // 2].float() * (micro + 1.0)).sum()


def experts_trained(layout: str) -> dict[str, torch.Tensor]:
    """Parameters after a window of four micro-steps, the first two of which use the first expert."""
    model = Experts()
    shares, share = (1, 0) if layout == "one" else (distributed.get_world_size(), distributed.get_rank())
    engine = AmpEngine(
        model, torch.optim.AdamW(model.parameters(), 0.5, weight_decay=0.5), "bf16-true", update="exact",
        max_grad_norm=None, accumulate_steps=WINDOW // shares,
    )  # fmt: skip
    call = model if layout == "one" else engine.replicate(find_unused_parameters=True)
    for micro in range(share * WINDOW // shares, (share + 1) * WINDOW // shares):
        engine.backward(call(micro))
    assert engine.step().applied
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def test_what_one_replica_alone_used_is_averaged_and_what_none_used_is_left_alone(pool):
    expected = experts_trained("one")
    assert torch.equal(expected["experts.2"], torch.ones(3, dtype=torch.bfloat16))
    assert not torch.equal(expected["experts.0"], expected["experts.2"])
    for parameters in pool.run(experts_trained, 2, "ddp"):
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
