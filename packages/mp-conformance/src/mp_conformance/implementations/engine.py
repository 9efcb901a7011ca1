"""mp_torch's engine on one device as a subject, with ``update="exact"``."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from mp_conformance.histories import StepTrace
from mp_conformance.implementations import NotOfferedError
from mp_conformance.implementations.torch_device import to_numpy, to_torch
from mp_torch import AmpEngine, LossScale
from mp_torch.scaling import ScaleState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_conformance.histories import History

__all__ = ["Emit", "EngineSubject", "GivenGradients", "Training"]

Array = np.ndarray[Any, np.dtype[Any]]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
_SLOTS = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "vmax", "momentum_buffer": "buffer"}


class EngineSubject:
    """``mp_torch.AmpEngine``, fed with given gradients.

    Args:
        device: where the parameters live.
    """

    name = "engine"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device.split(":")[0]
        self.place = device

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """The operations of training."""
        del options
        if operation == "train_fused":  # the kernels without vector instructions fuse nothing
            return self.device == "cpu" and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
        return operation in ("loss_scale", "clip", "optimizer", "fused_updates", "train", "write_back")

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it."""
        if operation == "loss_scale":
            return _loss_scale(*operands)
        if operation == "train":
            return Training(operands[0], self.place, update="exact").trace()
        if operation == "train_fused":
            return Training(operands[0], self.place, update="fused").trace()
        if operation == "write_back":
            return self._write_back(**options)
        if operation == "clip":
            return self._clip(operands[0], options["max_norm"])
        if operation == "optimizer":
            return self._optimizer(*operands, **options)
        if operation == "fused_updates":
            return Training(operands[0], self.place, update="fused").trace()
        raise NotOfferedError(f"the engine has no {operation}")

    def _write_back(self, fraction: float, seed: int, count: int) -> Array:
        """SGD whose one update is ``fraction`` of bf16's ulp at 1, rounded stochastically into the parameter."""
        model = GivenGradients([np.ones(count, np.float32)], self.place)
        optimizer = torch.optim.SGD(model.parameters(), lr=fraction * 2.0**-7)
        engine = AmpEngine(model, optimizer, precision="bf16-sr", max_grad_norm=None, seed=seed)
        engine.backward(model([np.full(count, -1.0, np.float32)]))
        engine.step()
        return to_numpy(next(iter(model.parameters()))).copy()

    def _clip(self, gradients: Sequence[Array], max_norm: float) -> tuple[float, list[Array]]:
        """SGD with a learning rate of 1 from zero parameters: what the engine subtracts is the clipped gradient."""
        model = GivenGradients([np.zeros_like(g) for g in gradients], self.place)
        engine = AmpEngine(
            model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp32", max_grad_norm=max_norm, update="exact"
        )
        engine.backward(model(gradients))
        report = engine.step()
        return float(report.grad_norm), [-to_numpy(p) for p in model.parameters()]

    def _optimizer(
        self, parameters: Sequence[Array], gradients: Sequence[Sequence[Array]], kind: str, settings: Mapping[str, Any]
    ) -> list[list[Array]]:
        model = GivenGradients(parameters, self.place)
        engine = AmpEngine(
            model, _OPTIMIZERS[kind](model.parameters(), **settings), precision="fp32", max_grad_norm=None,
            update="exact",
        )  # fmt: skip
        trail = []
        for row in gradients:
            engine.backward(model(row))
            engine.step()
            trail.append([to_numpy(p).copy() for p in model.parameters()])
        return trail


def _loss_scale(settings: Mapping[str, Any], flags: Sequence[bool]) -> list[tuple[float | str, ...]]:
    knobs = dict(settings)
    preset = knobs.pop("preset", None)
    policy = LossScale.preset(preset, **knobs) if preset else LossScale(**knobs)
    state = ScaleState.initial(policy)
    seen: list[tuple[float | str, ...]] = []
    for flag in flags:
        if flag:
            try:
                state.require_may_skip(policy, "drawn")
            except RuntimeError:
                return [*seen, ("raise",)]
        state = state.after_overflow(policy) if flag else state.after_good_step(policy)
        seen.append((state.scale, state.growth_tracker, state.hysteresis_tracker))
    return seen


class Emit(torch.autograd.Function):
    """A loss of zero whose gradient is given: what reaches the parameter is the loss's own gradient times it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor, as_stored: bool) -> torch.Tensor:
        """Zero, in fp32."""
        ctx.save_for_backward(gradient)
        ctx.dtype, ctx.as_stored = parameter.dtype, as_stored
        return torch.zeros((), dtype=torch.float32, device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The given gradient, times the upstream one in fp32 unless it is as stored, in the parameter's dtype."""
        (gradient,) = ctx.saved_tensors
        return (gradient if ctx.as_stored else upstream[0].float() * gradient).to(ctx.dtype), None, None


class GivenGradients(torch.nn.Module):
    """Parameters whose gradients are given to ``forward``."""

    def __init__(self, parameters: Sequence[Array], device: str) -> None:
        super().__init__()
        self.device = device
        self.values = torch.nn.ParameterList(torch.nn.Parameter(to_torch(p, device)) for p in parameters)

    def forward(self, gradients: Sequence[Array], as_stored: bool = False) -> torch.Tensor:
        """A loss whose gradients are ``gradients``."""
        emit: Any = Emit.apply
        losses = [emit(p, to_torch(g, self.device), as_stored) for p, g in zip(self.values, gradients, strict=True)]
        total: torch.Tensor = torch.stack(losses).sum()
        return total


class Training:
    """One history through the engine; a resume rebuilds everything from other parameters and loads."""

    def __init__(self, history: History, device: str, update: Literal["exact", "fused"], accumulate: int = 0) -> None:
        self.history, self.device, self.update = history, device, update
        self.accumulate = accumulate or history.accumulate
        self.build(history.parameters)

    def build(self, parameters: Sequence[Array]) -> None:
        """A model, an optimizer and an engine that have seen nothing."""
        h = self.history
        self.model = self.module(parameters)
        self.optimizer = optimizer = _OPTIMIZERS[h.optimizer](self.model.parameters(), **h.settings)
        self.engine = AmpEngine(
            self.model, optimizer, precision=h.precision, max_grad_norm=h.max_grad_norm, update=self.update,
            loss_scale=LossScale(**h.loss_scale) if h.loss_scale else LossScale.off(), accumulate_steps=self.accumulate,
            seed=h.seed, reduce_dtype=h.reduce_dtype,
        )  # fmt: skip

    def module(self, parameters: Sequence[Array]) -> torch.nn.Module:
        """The model, whose ``forward`` takes a micro-step's gradients."""
        return GivenGradients(parameters, self.device)

    def resume(self) -> None:
        """Save, forget, rebuild, load."""
        saved = copy.deepcopy((self.model.state_dict(), self.engine.state_dict()))
        self.build([np.full_like(p, 0.5) for p in self.history.parameters])
        self.model.load_state_dict(saved[0])
        self.engine.load_state_dict(saved[1])

    def trace(self) -> list[StepTrace]:
        """Every step of the history; a weight that it carries past fp16 is meant."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* past fp16's largest", UserWarning)
            return self._trace()

    def _trace(self) -> list[StepTrace]:
        trace, done = [], 0
        for window in self.history.windows:
            for index, micro in enumerate(window):
                with self.engine.autocast():
                    loss = self.model(micro, self.history.as_stored)
                self.engine.backward(loss, boundary=index == len(window) - 1)
                done += 1
                if done in self.history.resume_after:
                    self.resume()
            report = self.engine.step()
            trace.append(self.entry(report))
        return trace

    def entry(self, report: Any) -> StepTrace:
        """What a step left behind."""
        asked = report.applied and self.history.max_grad_norm is not None
        masters = self.engine.masters()
        slots = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = self.optimizer.state.get(p, {})
                held = {short: _part(state[name]) for name, short in _SLOTS.items() if _held(state, name)}
                slots.append(held)
        return StepTrace(
            applied=report.applied, loss_scale=report.loss_scale, next_loss_scale=report.next_loss_scale,
            grad_norm=float(report.grad_norm) if asked else None,
            parameters=tuple(_part(p) for p in self.model.parameters()),
            masters=tuple(_part(masters[name]) for name, _ in self.model.named_parameters()),
            slots=tuple(slots), report=repr(report),
        )  # fmt: skip


def _held(state: Mapping[str, Any], name: str) -> bool:
    return isinstance(state.get(name), torch.Tensor)


def _part(tensor: torch.Tensor) -> Array:
    """A copy of what this process holds of a tensor."""
    return to_numpy(tensor.to_local() if hasattr(tensor, "to_local") else tensor).copy()
