"""How much memory training will take, by role, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from mp_reference.spec.memory import ROLES, SHARDING, bytes_per_parameter, moment_count
from mp_torch.errors import AmpConfigError
from mp_torch.regions import SAFE_MODULES, STATISTICS, matching

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        model_or_params: a model (also on ``meta``), whose modules that keep fp32 by default are counted so; its
            parameters; or a number of trained parameters.
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
    kept = dict(bytes_per_parameter("fp32", moments, "fp32"))
    held, buffers = _held(model_or_params, widths, kept)

    def bytes_of(role: str) -> int:
        by_width: dict[float, list[tuple[int, ...]]] = {}
        for one in held:
            by_width.setdefault(one.widths.get(role, 0.0), []).append(one.shape)
        divided = sharding if role in SHARDING[sharding] else "none"
        return int(sum(width * _elements(shapes, divided, ranks) for width, shapes in by_width.items()))

    return MemoryEstimate(
        **{role: bytes_of(role) for role in ROLES},
        buffers=buffers,
        parameters=sum(prod(one.shape) for one in held),
        trained=sum(prod(one.shape) for one in held if "moments" in one.widths),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """One parameter: its shape, and bytes an element for each role that it has."""

    shape: tuple[int, ...]
    widths: Mapping[str, float]


def _elements(shapes: list[tuple[int, ...]], sharding: str, ranks: int) -> int:
    """Elements on the fullest rank."""
    if sharding == "none":
        return sum(map(prod, shapes))
    if sharding == "fsdp":
        return sum(ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1 for shape in shapes)
    return ceil(sum(map(prod, shapes)) / ranks)


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


def _held(
    model_or_params: nn.Module | Iterable[torch.Tensor] | int, widths: Mapping[str, float], kept: Mapping[str, float]
) -> tuple[list[_Held], int]:
    """Every parameter, each tied one once, and bytes of buffers.

    Args:
        model_or_params: as for ``memory_estimate``.
        widths: bytes an element by role, in the precision.
        kept: the same where a module keeps fp32 by default, as batch normalisation does.
    """
    if isinstance(model_or_params, int) and not isinstance(model_or_params, bool):
        if model_or_params < 0:
            raise AmpConfigError(f"{model_or_params} parameters: the number must be 0 or more")
        return [_Held((model_or_params,), widths)], 0
    in_fp32: set[torch.Tensor] = set()
    buffers = 0
    if isinstance(model_or_params, nn.Module):
        modules = dict(model_or_params.named_modules())
        for name in matching(model_or_params, (*STATISTICS, *SAFE_MODULES)):
            in_fp32 |= set(modules[name].parameters())
        parameters: list[Any] = list(model_or_params.parameters())
        buffers = sum(one.numel() * one.element_size() for one in model_or_params.buffers())
    else:
        parameters = list(model_or_params) if isinstance(model_or_params, Iterable) else [model_or_params]
        parameters = list({id(one): one for one in parameters}.values())
    for one in parameters:
        if not isinstance(one, torch.Tensor):
            raise AmpConfigError(f"{model_or_params!r} must be a model, its parameters, or how many there are")

    def widths_of(one: torch.Tensor) -> Mapping[str, float]:
        here = kept if one in in_fp32 else widths
        if one.requires_grad:
            return here
        return {"weights": here["weights"] if one.dtype == torch.float32 else float(one.element_size())}

    return [_Held(tuple(one.shape), widths_of(one)) for one in parameters], buffers
