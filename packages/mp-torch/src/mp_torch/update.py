"""The update itself: torch's fused kernels, separately rounded operations, or the optimizer's own step.

All three keep their state where torch's optimizers keep it, under torch's names, so that ``optimizer.state_dict()``
means the same whoever made the update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.errors import AmpConfigError
from mp_torch.guards import step_hooks
from mp_torch.ranks import like

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "Updater", "updater_for"]


@dataclass(slots=True, eq=False)  # tensors do not compare as one
class Entry:
    """One parameter's part in an update.

    Args:
        trained: what the optimizer's group holds, the key of its state.
        value: fp32, updated in place.
        gradient: fp32; the fused kernels get it as stored, the others unscaled and clipped.
    """

    trained: Tensor
    value: Tensor
    gradient: Tensor


class Updater(ABC):
    """Applies one optimizer's rule to fp32 values.

    Args:
        optimizer: the user's; its groups' hyperparameters are read at every step, its state is kept in it.
    """

    folds_scale = False
    """Whether ``update_`` divides by the scale itself, so that nobody has to write unscaled gradients."""

    takes_sparse = False
    """Whether ``update_`` wants sparse gradients as they are; else it gets them dense."""

    stepping = False
    """Whether the optimizer's own ``step()`` runs now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._fresh: list[tuple[Tensor, str]] = []

    def state_of(self, one: Entry, slot: str) -> Tensor:
        """The optimizer's tensor of this name for a parameter; zeros on first use, forgotten if that use is skipped.

        Args:
            one: the parameter.
            slot: torch's name for the tensor.
        """
        state = self.optimizer.state[one.trained]
        if state.get(slot) is None:
            state[slot] = torch.zeros_like(one.value)
            self._fresh.append((one.trained, slot))
        elif not _alike(state[slot], one.value):  # it was loaded, or the model moved to another layout
            state[slot] = torch.empty_like(one.value).copy_(state[slot])
        found: Tensor = state[slot]
        return found

    def _moments(self, one: Entry, amsgrad: bool) -> list[Tensor]:
        slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
        return [self.state_of(one, slot) for slot in slots]

    def _count(self, one: Entry, device: torch.device) -> Tensor:
        """Updates of a parameter so far: fp32, as torch's optimizers keep it, where this update wants it."""
        state = self.optimizer.state[one.trained]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            self._fresh.append((one.trained, "step"))
        elif state["step"].device != device:
            state["step"] = state["step"].to(device)
        found: Tensor = state["step"]
        return found

    @abstractmethod
    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """Update the values of one parameter group in place.

        Args:
            group: the optimizer's, with its hyperparameters.
            entries: its parameters that have a gradient.
            scale: fp32 scalar that the fused kernels divide gradients by; ``None`` for the others, or for 1.
            skipped: on an accelerator, fp32 scalar, 1.0 where nothing may change; ``None`` where something may.
        """

    def conclude_(self, applied: bool) -> None:
        """Learn, after all groups, whether the update happened; on an accelerator that is known later."""
        if not applied:
            for trained, slot in self._fresh:
                state = self.optimizer.state[trained]
                del state[slot]
                if not state:
                    del self.optimizer.state[trained]
        self._fresh.clear()


class FusedUpdater(Updater):
    """torch's fused kernels: one pass over value, gradient and moments.

    Source: ``torch._fused_sgd_``, ``_fused_adam_``, ``_fused_adamw_``; what they compute on the CPU to the bit is
    ``mp_reference.amp.fused``.
    """

    folds_scale = True

    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """One kernel call for each group (two where a momentum buffer is new)."""
        rule = self._sgd_ if isinstance(self.optimizer, torch.optim.SGD) else self._adam_
        lent = [_in_a_row(one) for one in entries]
        rule(group, lent, scale, skipped)
        for one, row in zip(entries, lent, strict=True):
            if row.value is not one.value:
                one.value.copy_(row.value)

    def _adam_(self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None) -> None:
        moments = [self._moments(one, group["amsgrad"]) for one in entries]
        steps = [self._count(one, one.value.device) for one in entries]
        torch._foreach_add_(steps, 1)
        kernel = torch._fused_adamw_ if _decoupled(self.optimizer, group) else torch._fused_adam_
        kernel(
            [one.value for one in entries],
            [one.gradient for one in entries],
            [one[0] for one in moments],
            [one[1] for one in moments],
            [one[2] for one in moments if len(one) == 3],
            steps,
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=scale,
            found_inf=skipped,
        )
        if skipped is not None:
            torch._foreach_sub_(steps, [skipped] * len(steps))

    def _sgd_(self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None) -> None:
        momentum = group["momentum"] != 0
        states = self.optimizer.state
        for first in (True, False) if momentum else (False,):
            some = [
                one for one in entries if not momentum or (states[one.trained].get("momentum_buffer") is None) == first
            ]
            if not some:
                continue
            torch._fused_sgd_(
                [one.value for one in some],
                [one.gradient for one in some],
                [self.state_of(one, "momentum_buffer") for one in some] if momentum else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=first,
                grad_scale=scale,
                found_inf=skipped,
            )
            entries = [one for one in entries if one not in some]


class ExactUpdater(Updater):
    """Every operation is one IEEE operation in fp32: the same bits on every device.

    Hyperparameters are Python floats, combined in double and rounded once where they meet a tensor. The square root
    goes through float64, because torch's fp32 one is not correctly rounded on the CPU. A divisor is a tensor on the
    device, because GPUs multiply by the reciprocal of a Python number.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._counted: list[Tensor] = []

    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """One parameter after the other."""
        del scale  # gradients come unscaled
        rule = self._sgd_ if isinstance(self.optimizer, torch.optim.SGD) else self._adam_
        for one in entries:
            rule(group, one, skipped)

    def _sgd_(self, group: dict[str, Any], one: Entry, skipped: Tensor | None) -> None:
        w, g = one.value, -one.gradient if group["maximize"] else one.gradient
        if group["weight_decay"] != 0:
            g = g + w * group["weight_decay"]
        if group["momentum"] != 0:
            if self.optimizer.state[one.trained].get("momentum_buffer") is not None:
                before = self.state_of(one, "momentum_buffer")
                buffer = _write(before, before * group["momentum"] + g * (1 - group["dampening"]), skipped)
            else:
                buffer = self.state_of(one, "momentum_buffer").copy_(g)
            g = g + buffer * group["momentum"] if group["nesterov"] else buffer
        _write(w, w - g * float(group["lr"]), skipped)

    def _adam_(self, group: dict[str, Any], one: Entry, skipped: Tensor | None) -> None:
        count = self._count(one, torch.device("cpu"))
        self._counted.append(count)
        t, lr, (beta1, beta2) = int(count.item()) + 1, float(group["lr"]), group["betas"]
        moments = self._moments(one, group["amsgrad"])
        w, g = one.value, -one.gradient if group["maximize"] else one.gradient
        if _decoupled(self.optimizer, group):
            decayed = w * (1 - lr * group["weight_decay"])
        else:
            decayed = w
            g = g + w * group["weight_decay"] if group["weight_decay"] != 0 else g
        m = _write(moments[0], moments[0] + (g - moments[0]) * (1 - beta1), skipped)
        v = _write(moments[1], moments[1] * beta2 + (g * (1 - beta2)) * g, skipped)
        if group["amsgrad"]:
            v = _write(moments[2], torch.maximum(moments[2], v), skipped)
        root = v.double().sqrt_().float()
        denominator = root / root.new_full((), math.sqrt(1 - beta2**t)) + group["eps"]
        _write(w, decayed - (m * (lr / (1 - beta1**t))) / denominator, skipped)

    def conclude_(self, applied: bool) -> None:
        """Count the step where it was one."""
        for count in self._counted:
            count += float(applied)
        self._counted.clear()
        super().conclude_(applied)


class OwnUpdater(Updater):
    """The optimizer's own ``step()``, whatever it computes, on unscaled and clipped gradients."""

    takes_sparse = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._handed: list[Tensor] = []

    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """Hand the gradients over; ``conclude_`` steps once for all groups."""
        del group, scale, skipped
        for one in entries:
            one.trained.grad = like(one.trained, one.gradient)
            self._handed.append(one.trained)

    def conclude_(self, applied: bool) -> None:
        """Step."""
        super().conclude_(applied)
        self.stepping = True
        try:
            if applied:
                self.optimizer.step()
        finally:
            self.stepping = False
            for one in self._handed:
                one.grad = None  # a master keeps its own, which the next window must not find
            self._handed.clear()


def updater_for(optimizer: torch.optim.Optimizer, update: str, *, fused: bool, dense: bool) -> Updater:
    """The way to make this optimizer's update.

    Args:
        optimizer: the user's.
        update: "auto", "fused" or "exact".
        fused: the device has torch's fused kernels.
        dense: all its gradients are dense.

    Returns:
        An updater.

    Raises:
        AmpConfigError: "fused" or "exact" was asked for and this optimizer, or a setting of it, has no such form.

    >>> type(updater_for(torch.optim.AdamW([torch.zeros(1)]), "auto", fused=True, dense=True)).__name__
    'FusedUpdater'
    """
    obstacle = _obstacle(optimizer, dense)
    if obstacle is not None and update != "auto":
        raise AmpConfigError(f"update={update!r} with {type(optimizer).__name__}: {obstacle}; use update='auto'")
    if update == "fused" and not fused:
        raise AmpConfigError("update='fused': the device has no fused optimizer kernels; use update='auto' or 'exact'")
    if obstacle is not None:
        return OwnUpdater(optimizer)
    if update == "exact":
        return ExactUpdater(optimizer)
    return FusedUpdater(optimizer) if fused else ExactUpdater(optimizer)


def _obstacle(optimizer: torch.optim.Optimizer, dense: bool) -> str | None:
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return "only torch.optim.SGD, Adam and AdamW have this form"
    if not dense:
        return "a module with sparse=True gives it sparse gradients"
    if step_hooks(optimizer):
        return "its step hooks are called by its own step"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True needs the optimizer's own step"
    return None


def _alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape lie alike in memory."""
    return (tensor.is_contiguous() and other.is_contiguous()) or tensor.stride() == other.stride()


def _in_a_row(one: Entry) -> Entry:
    """The entry as the fused kernels need it, which read memory in a row, whatever strides say.

    A value with gaps is lent a copy without; a gradient in another layout than the value's is copied into it.
    """
    value, gradient = one.value, one.gradient
    if not value.is_contiguous() and torch.empty_like(value).stride() != value.stride():
        value = value.clone(memory_format=torch.contiguous_format)
    if not _alike(gradient, value):
        gradient = torch.empty_like(value).copy_(gradient)
    return one if value is one.value and gradient is one.gradient else Entry(one.trained, value, gradient)


def _decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def _write(target: Tensor, value: Tensor, skipped: Tensor | None) -> Tensor:
    """Overwrite ``target``, unless the step is skipped."""
    return target.copy_(value if skipped is None else torch.where(skipped != 0, target, value))
