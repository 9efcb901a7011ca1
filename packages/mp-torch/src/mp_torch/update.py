"""The update itself: torch's fused kernels, separately rounded operations, or the optimizer's own step.

All three keep their state where torch's optimizers keep it, under torch's names, so that ``optimizer.state_dict()``
means the same whoever made the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Entry", "Updater", "updater_for"]


@dataclass(slots=True)
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


class Updater:
    """Applies one optimizer's rule to fp32 values.

    Args:
        optimizer: the user's; its groups' hyperparameters are read at every step, its state is kept in it.
    """

    folds_scale = False
    """Whether ``update_`` divides by the scale itself, so that nobody has to write unscaled gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

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
        raise NotImplementedError

    def conclude_(self, applied: bool) -> None:
        """Learn, after all groups, whether the update happened; on an accelerator that is known later."""


class FusedUpdater(Updater):
    """torch's fused kernels: one pass over value, gradient and moments.

    Source: ``torch._fused_sgd_``, ``_fused_adam_``, ``_fused_adamw_``; what they compute on the CPU to the bit is
    ``mp_reference.amp.fused``.
    """

    folds_scale = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._fresh: list[Tensor] = []

    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """One kernel call for each group (two in the first steps of a momentum buffer)."""
        if isinstance(self.optimizer, torch.optim.SGD):
            self._sgd_(group, entries, scale, skipped)
        else:
            self._adam_(group, entries, scale, skipped)

    def _adam_(self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None) -> None:
        states = [_adam_state(self.optimizer, one, group["amsgrad"], on_device=True) for one in entries]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)  # as torch.optim does
        kernels = (torch._fused_adam_, torch._fused_adamw_)  # as torch.optim does
        kernel = kernels[_decoupled(self.optimizer, group)]
        kernel(
            [one.value for one in entries],
            [one.gradient for one in entries],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
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
            torch._foreach_sub_(steps, [skipped] * len(steps))  # as torch.optim does

    def _sgd_(self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None) -> None:
        if group["momentum"] == 0:
            self._sgd_kernel(group, entries, [], scale, skipped, first=False)
            return
        state = self.optimizer.state
        fresh = [one for one in entries if state[one.trained].get("momentum_buffer") is None]
        later = [one for one in entries if state[one.trained].get("momentum_buffer") is not None]
        for one in fresh:
            state[one.trained]["momentum_buffer"] = torch.zeros_like(one.value)
            self._fresh.append(one.trained)
        for some, first in ((fresh, True), (later, False)):
            if some:
                buffers = [state[one.trained]["momentum_buffer"] for one in some]
                self._sgd_kernel(group, some, buffers, scale, skipped, first=first)

    def _sgd_kernel(
        self,
        group: dict[str, Any],
        entries: list[Entry],
        buffers: list[Tensor],
        scale: Tensor | None,
        skipped: Tensor | None,
        *,
        first: bool,
    ) -> None:
        torch._fused_sgd_(  # as torch.optim does
            [one.value for one in entries],
            [one.gradient for one in entries],
            buffers,
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

    def conclude_(self, applied: bool) -> None:
        """A buffer whose first step was skipped was never filled."""
        if not applied:
            for trained in self._fresh:
                self.optimizer.state[trained].pop("momentum_buffer")
        self._fresh.clear()


class ExactUpdater(Updater):
    """Every operation is one IEEE operation in fp32: the same bits on every device.

    Hyperparameters are Python floats, combined in double and rounded once where they meet a tensor. The square root
    goes through float64, because torch's fp32 one is not correctly rounded on the CPU. A divisor is a tensor on the
    device, because GPUs multiply by the reciprocal of a Python number.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._counted: list[Tensor] = []
        self._fresh: list[Tensor] = []

    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """One parameter after the other."""
        del scale  # gradients come unscaled
        rule: Callable[[dict[str, Any], Entry, Tensor | None], None] = (
            self._sgd_ if isinstance(self.optimizer, torch.optim.SGD) else self._adam_
        )
        for one in entries:
            rule(group, one, skipped)

    def _sgd_(self, group: dict[str, Any], one: Entry, skipped: Tensor | None) -> None:
        w, g = one.value, -one.gradient if group["maximize"] else one.gradient
        if group["weight_decay"] != 0:
            g = g + w * group["weight_decay"]
        if group["momentum"] != 0:
            state = self.optimizer.state[one.trained]
            if state.get("momentum_buffer") is None:
                buffer = state["momentum_buffer"] = g.clone()
                self._fresh.append(one.trained)
            else:
                buffer = state["momentum_buffer"] * group["momentum"] + g * (1 - group["dampening"])
                buffer = _write(state["momentum_buffer"], buffer, skipped)
            g = g + buffer * group["momentum"] if group["nesterov"] else buffer
        _write(w, w - g * float(group["lr"]), skipped)

    def _adam_(self, group: dict[str, Any], one: Entry, skipped: Tensor | None) -> None:
        state = _adam_state(self.optimizer, one, group["amsgrad"], on_device=False)
        t, lr = int(state["step"].item()) + 1, float(group["lr"])
        self._counted.append(state["step"])
        beta1, beta2 = group["betas"]
        w, g = one.value, -one.gradient if group["maximize"] else one.gradient
        if _decoupled(self.optimizer, group):
            decayed = w * (1 - lr * group["weight_decay"])
        else:
            decayed = w
            g = g + w * group["weight_decay"] if group["weight_decay"] != 0 else g
        m = state["exp_avg"] + (g - state["exp_avg"]) * (1 - beta1)
        v = state["exp_avg_sq"] * beta2 + (g * (1 - beta2)) * g
        m, v = _write(state["exp_avg"], m, skipped), _write(state["exp_avg_sq"], v, skipped)
        if group["amsgrad"]:
            v = _write(state["max_exp_avg_sq"], torch.maximum(state["max_exp_avg_sq"], v), skipped)
        root = v.double().sqrt_().float()
        denominator = root / root.new_tensor(math.sqrt(1 - beta2**t)) + group["eps"]
        _write(w, decayed - (m * (lr / (1 - beta1**t))) / denominator, skipped)

    def conclude_(self, applied: bool) -> None:
        """Count the step where it was one; drop what only a skipped first step made."""
        for step in self._counted:
            step += float(applied)
        if not applied:
            for trained in self._fresh:
                self.optimizer.state[trained].pop("momentum_buffer")
        self._counted.clear()
        self._fresh.clear()


class OwnUpdater(Updater):
    """The optimizer's own ``step()``, whatever it computes, on unscaled and clipped gradients."""

    def update_(
        self, group: dict[str, Any], entries: list[Entry], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """Hand the gradients over; ``conclude_`` steps once for all groups."""
        del group, scale, skipped
        for one in entries:
            one.trained.grad = one.gradient

    def conclude_(self, applied: bool) -> None:
        """Step."""
        if applied:
            self.optimizer.step()


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
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True needs the optimizer's own step"
    return None


def _decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def _adam_state(optimizer: torch.optim.Optimizer, one: Entry, amsgrad: bool, *, on_device: bool) -> dict[str, Any]:
    """The optimizer's state of a parameter, made on first use as torch makes it."""
    state: dict[str, Any] = optimizer.state[one.trained]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=one.value.device if on_device else "cpu")
        state["exp_avg"] = torch.zeros_like(one.value)
        state["exp_avg_sq"] = torch.zeros_like(one.value)
    if amsgrad and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = torch.zeros_like(one.value)
    wanted = one.value.device if on_device else torch.device("cpu")
    if state["step"].device != wanted:
        state["step"] = state["step"].to(wanted)
    return state


def _write(target: Tensor, value: Tensor, skipped: Tensor | None) -> Tensor:
    """Overwrite ``target``, unless the step is skipped."""
    return target.copy_(value if skipped is None else torch.where(skipped != 0, target, value))
