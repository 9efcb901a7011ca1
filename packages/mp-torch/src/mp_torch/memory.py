"""How much memory training will take, by role, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from mp_reference.spec.memory import ROLES, SHARDING, bytes_per_parameter, moment_count
from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MemoryEstimate", "memory_estimate"]

_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank, by role.

    Args:
        weights: the model's parameters, the frozen ones too.
        masters: fp32 master weights, remainders or compensations; counted in the total.
        gradients: of the trained parameters.
        moments: the optimizer's state, without its step counters.
        buffers: the model's, such as BatchNorm statistics.
        parameters: how many parameters the whole model has, over all ranks.
        trained: how many of them have a gradient.

    >>> estimate = memory_estimate(1_000_000, "bf16-true", "adamw")
    >>> estimate.total, estimate.bytes_per_parameter("masters")
    (16000000, 4.0)
    """

    weights: int
    masters: int
    gradients: int
    moments: int
    buffers: int
    parameters: int
    trained: int

    @property
    def total(self) -> int:
        """All roles together. Activations, and what a kernel needs for a moment, are not in it."""
        return self.weights + self.masters + self.gradients + self.moments + self.buffers

    def bytes_per_parameter(self, role: str) -> float:
        """Bytes of one role for each parameter of the whole model.

        Args:
            role: ``"weights"``, ``"masters"``, ``"gradients"``, ``"moments"``, ``"buffers"`` or ``"total"``.

        Returns:
            The ratio, 0.0 for a model without parameters.

        >>> memory_estimate(10, "fp32", "sgd").bytes_per_parameter("total")
        8.0
        """
        return float(getattr(self, role)) / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        """A table: role, GiB, bytes a parameter."""
        head = f"{'role':<10} {'GiB':>10} {'bytes/parameter':>16}"
        return "\n".join(
            [head]
            + [
                f"{role:<10} {getattr(self, role) / _GIB:>10.3f} {self.bytes_per_parameter(role):>16.2f}"
                for role in (*ROLES, "buffers", "total")
            ]
        )


def memory_estimate(
    model_or_params: nn.Module | Iterable[torch.Tensor] | int,
    precision: str = "bf16-mixed",
    optimizer: str | torch.optim.Optimizer = "adamw",
    *,
    momentum: float = 0.0,
    amsgrad: bool = False,
    master_weights: Literal["fp32", "remainder", "none"] = "fp32",
    accumulate: Literal["fp32", "parameter"] = "parameter",
    ranks: int = 1,
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp"] = "none",
) -> MemoryEstimate:
    """Add up what a training run keeps, by role, on one rank.

    Args:
        model_or_params: a model (also on ``meta``), its parameters, or a number of trained parameters.
        precision: a precision name; the ``-true`` ones count their fp32 masters.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``, or one of torch's of these kinds with its own settings.
        momentum: of ``"sgd"`` by name.
        amsgrad: of ``"adam"`` and ``"adamw"`` by name.
        master_weights: as in ``AmpConfig``.
        accumulate: as in ``AmpConfig``; with ``"fp32"`` a window of several micro-steps holds the gradients of 16-bit
            parameters in fp32.
        ranks: how many ranks the sharded roles are divided among.
        sharding: ``"none"`` (also DDP), ``"zero1"``, ``"zero2"``, ``"zero3"`` (the flattened whole in equal parts), or
            ``"fsdp"`` (each tensor along its first dimension).

    Returns:
        The bytes of the fullest rank, every share rounded up to whole elements or rows. Scalars such as Adam's step
        counters are left out.

    Raises:
        AmpConfigError: an unknown precision, optimizer, sharding or kind of master weights; ranks below 1; a negative
            number of parameters.

    Source: ``mp_reference.spec.memory``; ZeRO, arXiv 1910.02054, section 5.

    >>> print(memory_estimate(7_500_000_000, "fp16-true", "adam", ranks=64, sharding="zero1").total / 1e9)
    31.40625
    """
    moments = _moments(optimizer, momentum, amsgrad)
    try:
        widths = dict(bytes_per_parameter(precision, moments, master_weights))
    except ValueError as error:
        raise AmpConfigError(str(error)) from error
    if sharding not in SHARDING:
        raise AmpConfigError(f"sharding={sharding!r} must be one of {', '.join(map(repr, SHARDING))}")
    if accumulate not in ("fp32", "parameter"):
        raise AmpConfigError(f"accumulate={accumulate!r} must be 'fp32' or 'parameter'")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise AmpConfigError(f"ranks={ranks!r} must be a whole number from 1 up; 1 is a single process")
    if accumulate == "fp32":
        widths["gradients"] = 4.0
    trained, frozen, buffers = _shapes(model_or_params)

    def held(shapes: list[tuple[int, ...]], role: str) -> int:
        elements = sum(map(prod, shapes))
        if role not in SHARDING[sharding]:
            return elements
        if sharding == "fsdp":
            return sum(ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1 for shape in shapes)
        return ceil(elements / ranks)

    def bytes_of(shapes: list[tuple[int, ...]], role: str) -> int:
        return int(held(shapes, role) * widths[role])

    return MemoryEstimate(
        weights=bytes_of(trained + frozen, "weights"),
        masters=bytes_of(trained, "masters"),
        gradients=bytes_of(trained, "gradients"),
        moments=bytes_of(trained, "moments"),
        buffers=buffers,
        parameters=sum(map(prod, trained + frozen)),
        trained=sum(map(prod, trained)),
    )


def _moments(optimizer: str | torch.optim.Optimizer, momentum: float, amsgrad: bool) -> int:
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__.lower()
        settings = optimizer.param_groups[0]
        momentum, amsgrad = settings.get("momentum", 0.0), settings.get("amsgrad", False)
    else:
        name = optimizer
    try:
        return moment_count(name, momentum=momentum, amsgrad=amsgrad)
    except ValueError as error:
        raise AmpConfigError(str(error)) from error


def _shapes(
    model_or_params: nn.Module | Iterable[torch.Tensor] | int,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Shapes of trained and of frozen parameters, each tied one once, and bytes of buffers."""
    if isinstance(model_or_params, int):
        if model_or_params < 0:
            raise AmpConfigError(f"{model_or_params} parameters: the number must be 0 or more")
        return [(model_or_params,)], [], 0
    if isinstance(model_or_params, nn.Module):
        parameters: list[torch.Tensor] = list(model_or_params.parameters())
        buffers = sum(one.numel() * one.element_size() for one in model_or_params.buffers())
    else:
        parameters, buffers = list({id(one): one for one in model_or_params}.values()), 0
    trained = [tuple(one.shape) for one in parameters if one.requires_grad]
    frozen = [tuple(one.shape) for one in parameters if not one.requires_grad]
    return trained, frozen, buffers
