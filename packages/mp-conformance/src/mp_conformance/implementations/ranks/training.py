"""What one rank does: its process group, its part of the model, its share of every window."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mp_conformance.implementations.engine import Emit, GivenGradients, Training
from mp_conformance.implementations.torch_device import to_torch
from mp_conformance.layouts import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mp_conformance.histories import History, StepTrace
    from mp_conformance.layouts import Layout

__all__ = ["train"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where this process stands: its layout, rank and device, and the meshes that the layout needs."""

    layout: Layout
    rank: int
    device: str
    shares: DeviceMesh | None
    tensor: DeviceMesh | None


def train(
    name: str, rank: int, device: str, backend: str, store: str, histories: Sequence[History]
) -> list[list[StepTrace]]:
    """Run histories as one rank of a process group that is made for them.

    Args:
        name: of the layout.
        rank: this process's.
        device: type of the devices.
        backend: what the ranks talk through.
        store: address of a file that the ranks meet at.
        histories: the same on every rank.

    Returns:
        For every history, what each step left behind, of what this rank holds.
    """
    torch.set_num_threads(1)
    with _meeting(LAYOUTS[name], rank, device, backend, store) as place:
        return [_PartOfTraining(history, place).trace() for history in histories]


@contextmanager
def _meeting(layout: Layout, rank: int, device: str, backend: str, store: str) -> Iterator[_Place]:
    if layout.world == 1:
        yield _Place(layout=layout, rank=0, device=device, shares=None, tensor=None)
        return
    own = device if device == "cpu" else f"{device}:{rank}"
    if device != "cpu":
        getattr(torch, device).set_device(rank)
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=layout.world)
    try:
        shares = tensor = None
        if layout.tensor > 1:
            names = ("shares", "tensor")
            mesh = init_device_mesh(device, (layout.shares, layout.tensor), mesh_dim_names=names)
            shares, tensor = mesh["shares"], mesh["tensor"]
        elif layout.shards > 1:
            sizes = (layout.replicas, layout.shards) if layout.replicas > 1 else (layout.shards,)
            shares = init_device_mesh(device, sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
        yield _Place(layout=layout, rank=rank, device=own, shares=shares, tensor=tensor)
    finally:
        if distributed.is_initialized():  # a rank that raised the alarm has no group any more
            distributed.destroy_process_group()


class _PartOfTraining(Training):
    """A history as one rank trains it."""

    def __init__(self, history: History, place: _Place) -> None:
        self.place = place
        count = len(history.windows[0])
        accumulate = 1 if place.layout.stages > 1 else count // place.layout.shares
        super().__init__(history, place.device, "exact", accumulate)

    def build(self, parameters: Sequence[Array]) -> None:
        """Build as one process does, then spread by the engine's own methods."""
        super().build(parameters)
        layout, self.call = self.place.layout, self.model
        if layout.shards > 1:  # nothing is computed, so everything travels as it is stored
            self.engine.shard(self.place.shares, param_dtype=None)
        elif layout.replicas > 1:
            self.call = self.engine.replicate()
        elif layout.stages > 1:
            stage = PipelineStage(self.model, self.place.rank, layout.stages, torch.device(self.device))
            loss_fn = self.engine.scale_fn(lambda output, target: (output * target).sum())
            self.schedule = Schedule1F1B(stage, len(self.history.windows[0]), loss_fn=loss_fn)

    def module(self, parameters: Sequence[Array]) -> nn.Module:
        """This rank's part of the model."""
        layout, rank = self.place.layout, self.place.rank
        if layout.tensor > 1:
            assert self.place.tensor is not None
            return _Linears(parameters, self.place, self.place.tensor)
        mine = [parameters[place] for place in layout.trains(rank, len(parameters))]
        return _Stage(mine, self.device) if layout.stages > 1 else GivenGradients(mine, self.device)

    def trace(self) -> list[StepTrace]:
        """Every step, of which this rank computes its share."""
        trace = []
        for window in self.history.windows:
            if self.place.layout.stages > 1:
                self._through_the_pipeline(window)
            else:
                for micro in self.place.layout.micro_steps(self.place.rank, len(window)):
                    with self.engine.autocast():
                        loss = self.call(window[micro])
                    self.engine.backward(loss)
            trace.append(self.entry(self.engine.step()))
        return trace

    def _through_the_pipeline(self, window: tuple[tuple[Array, ...], ...]) -> None:
        """One run of the schedule: what travels is each micro-step's number, by which stages find its gradients."""
        places = self.place.layout.trains(self.place.rank, len(window[0]))
        assert isinstance(self.model, _Stage)
        self.model.window = [tuple(micro[place] for place in places) for micro in window]
        numbers = torch.arange(float(len(window)), device=self.device)[:, None]
        with self.engine.autocast():
            if self.place.rank == 0:
                self.schedule.step(numbers)
            else:
                self.schedule.step(target=torch.ones_like(numbers))


class _Stage(GivenGradients):
    """A stage of a pipeline; passes the micro-step's number on."""

    window: Sequence[tuple[Array, ...]] = ()

    def forward(self, number: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # a stage takes what is sent
        """The number, and the gradients of that micro-step for what comes back."""
        which = torch.nan_to_num(number.detach().reshape(-1)[0]).clamp(0, len(self.window) - 1)  # a trial run sends any
        return number + super().forward(self.window[int(which)])


class _Linears(nn.Module):
    """Two linears that ``parallelize_module`` splits, and a vector that no plan mentions."""

    def __init__(self, parameters: Sequence[Array], place: _Place, mesh: DeviceMesh) -> None:
        super().__init__()
        outer, inner = parameters[0].shape
        self.place = place
        self.column, self.row = nn.Linear(inner, outer), nn.Linear(outer, inner)
        self.whole = nn.ParameterList([torch.empty(parameters[4].shape)])
        self.to(place.device)
        with torch.no_grad():
            for own, given in zip(self._in_order(), parameters, strict=True):
                own.copy_(to_torch(given, place.device))
        plan = {"column": ColwiseParallel(), "row": RowwiseParallel()}
        parallelize_module(self, mesh, plan, src_data_rank=None)  # every rank has the same values already

    def _in_order(self) -> list[nn.Parameter]:
        return [self.column.weight, self.column.bias, self.row.weight, self.row.bias, self.whole[0]]

    def forward(self, gradients: Sequence[Array]) -> torch.Tensor:
        """A loss to which this rank adds its part of ``gradients``."""
        emit: Any = Emit.apply
        losses = []
        for place, (own, gradient) in enumerate(zip(self._in_order(), gradients, strict=True)):
            addend = to_torch(self.place.layout.addends(self.place.rank, place, gradient), self.place.device)
            losses.append(emit(_local(own), addend, False))
        return torch.stack(losses).sum()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part; where all have the same one, their gradients are to be added up."""
    if not isinstance(parameter, DTensor):
        return parameter
    kinds = [Partial() if kind.is_replicate() else kind for kind in parameter.placements]
    return parameter.to_local(grad_placements=kinds)
