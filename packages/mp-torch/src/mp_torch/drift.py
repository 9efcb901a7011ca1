"""What was admitted must stay so: parameters, their dtypes, the optimizers' groups and hyperparameters."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.errors import AmpStateError
from mp_torch.guards import step_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from mp_torch.assembly import Part

__all__ = ["Admitted"]

_NUMBERS = ("lr", "betas", "weight_decay", "momentum", "dampening", "eps")


class Admitted:
    """Model and optimizers as the engine was built on them.

    Args:
        model: whose parameters train.
        optimizers: with the engine's own parameters in their groups.
        parts: every trained parameter.

    >>> import torch
    >>> Admitted(torch.nn.Linear(1, 1), [], []).check()
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], parts: Sequence[Part]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._trained = [part.weight.trained for part in parts]
        self._parts = [(part.weight.parameter, part.weight.parameter.dtype, part) for part in parts]
        self._hooked = [step_hooks(one) for one in optimizers]
        self._limited = [["max_grad_norm" in group for group in one.param_groups] for one in optimizers]
        self._found_unused: set[int] = set()

    def check(self) -> None:
        """Compare with what is there now; costs no host sync.

        Raises:
            AmpStateError: a parameter group was added or changed, a parameter was cast or replaced by another, a
                hyperparameter is not finite, step hooks were added. Nothing was changed.
        """
        held: list[torch.Tensor] = []
        for place, optimizer in enumerate(self._optimizers):
            if step_hooks(optimizer) != self._hooked[place]:
                raise AmpStateError(
                    f"{type(optimizer).__name__} {place} got step hooks after the engine was built, which would never "
                    "be called; register them before building it"
                )
            for at, group in enumerate(optimizer.param_groups):
                held += group["params"]
                if "max_grad_norm" in group and not self._limited[place][at]:
                    raise AmpStateError(
                        f"parameter group {at} of {type(optimizer).__name__} {place} got a max_grad_norm after the "
                        "engine was built, which would never clip; give it one before, None for none, and change it"
                    )
                _check_numbers(group, f"parameter group {at} of {type(optimizer).__name__} {place}")
        if len(held) != len(self._trained) or not all(map(operator.is_, held, self._trained)):
            raise AmpStateError(
                f"the optimizers' parameter groups hold {len(held)} parameters that are not the {len(self._trained)} "
                "which the engine was built on; add parameter groups before building it, or build a new engine"
            )
        self.check_dtypes()
        for parameter, _, part in self._parts:
            if parameter.grad is None and part.key not in self._found_unused and parameter.requires_grad:
                self._check_unused(part)

    def check_dtypes(self) -> None:
        """Compare the parameters' dtypes alone.

        Raises:
            AmpStateError: a parameter was cast.
        """
        for parameter, dtype, part in self._parts:
            if parameter.dtype is not dtype:
                raise AmpStateError(
                    f"parameter {part.weight.name!r} was {dtype} when the engine was built and is {parameter.dtype} "
                    "now; leave casts to the engine's precision, or build the engine after them"
                )

    def _check_unused(self, part: Part) -> None:
        """A parameter without a gradient: is it still the model's?"""
        if all(one is not part.weight.parameter for one in self._model.parameters()):
            raise AmpStateError(
                f"the model's parameter {part.weight.name!r} was replaced by another after the engine was built, which "
                "would never train; change parameters in place, or build the engine afterwards"
            )
        self._found_unused.add(part.key)


def _check_numbers(group: dict[str, Any], where: str) -> None:
    for name in _NUMBERS:
        value = group.get(name)
        if type(value) is float:
            fine = math.isfinite(value)
        elif type(value) is tuple:
            fine = all(math.isfinite(one) for one in value if type(one) is float)
        else:
            fine = not isinstance(value, torch.Tensor) or not value.is_cpu or bool(value.isfinite().all())
        if not fine:
            raise AmpStateError(
                f"{name}={value!r} in {where} is not finite and would be written into every parameter; look at the "
                "scheduler that set it"
            )
