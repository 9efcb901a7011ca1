"""What an engine admits: models, optimizers, schedulers and losses that it can keep its promises with."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.errors import AmpConfigError, AmpStateError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from torch import Tensor, nn

    from mp_torch.dtypes import Precision

__all__ = [
    "check_dtypes",
    "check_optimizers",
    "check_spectral_norms",
    "checked_limit",
    "checked_losses",
    "checked_pair",
    "checked_schedulers",
    "original",
    "sparse_parameters",
]


def original(model: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``'s wrapper, which shares its parameters and calls its forward.

    >>> linear = torch.nn.Linear(1, 1)
    >>> original(torch.compile(linear, backend="eager")) is original(linear) is linear
    True
    """
    while isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
        model = inner
    return model


def checked_pair(model: nn.Module, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list, once it is sure that these are a model and optimizers.

    Raises:
        AmpConfigError: the model is no ``nn.Module``, or something that is no ``torch.optim.Optimizer`` stands for one.

    >>> checked_pair(torch.nn.Linear(1, 1), "adamw")
    Traceback (most recent call last):
    mp_torch.errors.AmpConfigError: optimizer='adamw' must be a torch.optim.Optimizer, or a sequence of them; ...
    """
    if not isinstance(model, torch.nn.Module):
        raise AmpConfigError(f"model={model!r} must be a torch.nn.Module; pass the module whose parameters train")
    for name, one in model.named_parameters():
        if torch.nn.parameter.is_lazy(one):
            raise AmpConfigError(f"parameter {name!r} has no shape yet; run one batch through the lazy model first")
        if one.is_inference():
            raise AmpConfigError(
                f"parameter {name!r} was made under torch.inference_mode(), where nothing can train; build the model "
                "outside it"
            )
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise AmpConfigError(
                f"optimizer={one!r} must be a torch.optim.Optimizer, or a sequence of them; build it from "
                "model.parameters()"
            )
    return optimizers


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> None:
    """Refuse optimizers that one decision cannot be made for.

    Args:
        optimizers: the user's.
        names: the model's parameters.

    Raises:
        AmpConfigError: none at all; one that calls a closure; a parameter that is not the model's, or has two of them.
    """
    owner: dict[int, str] = {}
    if not optimizers:
        raise AmpConfigError("optimizer=[] holds no optimizer; pass one, or a sequence of them")
    for place, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if _needs_closure(optimizer):
            raise AmpConfigError(
                f"{kind} calls a closure several times a step, and each call would need a loss scale and a decision of "
                "its own; use an optimizer with a plain step(), such as torch.optim.AdamW, or train in fp32 by hand"
            )
        _check_one_level(optimizer)
        for one in (one for group in optimizer.param_groups for one in group["params"]):
            if one not in names:
                raise AmpConfigError(
                    f"{kind} holds a parameter of shape {tuple(one.shape)} that is not the model's; build the "
                    "optimizer from model.parameters(), after the model has moved to its device"
                )
            if id(one) in owner:
                raise AmpConfigError(
                    f"parameter {names[one]!r} is in both {owner[id(one)]} and {kind} {place}; give it to one of them"
                )
            owner[id(one)] = f"{kind} {place}"


def _check_one_level(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps its state in another one inside it, where masters and checkpoints do not reach.

    Raises:
        AmpConfigError: such as ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """
    inside = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    kinds = [one.__name__ for one in type(optimizer).__mro__]  # with overlap_with_ddp the inner one is made later
    if any(one.state is not optimizer.state for one in inside) or "ZeroRedundancyOptimizer" in kinds:
        raise AmpConfigError(
            f"{type(optimizer).__name__} keeps its moments in another optimizer inside it, where neither masters nor "
            "checkpoints reach them; use a plain one such as torch.optim.AdamW(model.parameters()) with "
            "engine.shard(reshard_after_forward=False), which divides masters, moments and gradients among the ranks"
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    step = inspect.signature(type(optimizer).step).parameters
    return "closure" in step and step["closure"].default is inspect.Parameter.empty


def check_dtypes(
    row: Precision, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]
) -> None:
    """Refuse parameters that this precision cannot train.

    Args:
        row: the precision.
        optimizers: whose parameters are looked at; frozen ones outside them may have any dtype.
        names: for the message.

    Raises:
        AmpConfigError: 16-bit parameters without masters, float64, complex; each is named.
    """
    trained = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    legal = sorted({"float32", _word(row.parameter)})
    wrong = [one for one in trained if _word(one.dtype) not in legal]
    if wrong:
        listed = ", ".join(f"{names[one]!r} ({_word(one.dtype)})" for one in wrong[:8])
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise AmpConfigError(
            f"precision={row.name!r} trains {' or '.join(legal)} parameters, not {listed}{more}; use the -true "
            "precision of their dtype, which holds fp32 masters for 16-bit parameters, or model.float()"
        )


def check_spectral_norms(model: nn.Module, kept: Container[str]) -> None:
    """Refuse hooks that multiply 16-bit weights by vectors of fp32.

    Args:
        model: whose parameters become 16-bit ones.
        kept: modules that keep fp32.

    Raises:
        AmpConfigError: a module with ``torch.nn.utils.spectral_norm``; it is named.

    >>> check_spectral_norms(torch.nn.Linear(1, 1), ())
    """
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()  # noqa: SLF001  # torch gives them no public name
        if name not in kept and any(type(hook).__name__ == "SpectralNorm" for hook in hooks):
            raise AmpConfigError(
                f"the hook of torch.nn.utils.spectral_norm on {name!r} cannot multiply 16-bit weights by its fp32 "
                f"vectors; use torch.nn.utils.parametrizations.spectral_norm, or keep_fp32=[{name!r}]"
            )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sparse_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters whose gradients are sparse, because their module was built with ``sparse=True``."""
    sparse = [module for module in model.modules() if getattr(module, "sparse", False) is True]
    return {one for module in sparse for one in module.parameters(recurse=False)}


def checked_limit(value: Any) -> float | None:
    """A parameter group's own ``max_grad_norm``.

    Raises:
        AmpConfigError: it is not a finite number above 0, nor ``None``.

    >>> checked_limit(0.5)
    0.5
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise AmpConfigError(
        f"max_grad_norm={value!r} of a parameter group must be a finite number above 0; None switches clipping off"
    )


def checked_schedulers(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The learning-rate schedulers that the engine steps.

    Args:
        scheduler: ``None``, one, or several.
        optimizers: the engine's.

    Raises:
        AmpConfigError: one that needs a metric, has no ``step()``, or belongs to another optimizer.

    >>> checked_schedulers(None, [])
    []
    """
    schedulers = [] if scheduler is None else list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
    for one in schedulers:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise AmpConfigError(
                "ReduceLROnPlateau needs a metric at every step(), which the engine does not have; leave it out and "
                "call scheduler.step(metric) yourself if report.applied"
            )
        if isinstance(one, torch.optim.Optimizer) or not callable(getattr(one, "step", None)):
            raise AmpConfigError(f"scheduler={one!r} is none; pass one of torch.optim.lr_scheduler, or a list of them")
        if all(owner is not getattr(one, "optimizer", owner) for owner in optimizers):
            raise AmpConfigError(
                f"{type(one).__name__} moves the learning rate of another optimizer than the engine's; build it from "
                "the one that the engine gets"
            )
    return schedulers


def checked_losses(loss: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The losses of one micro-step.

    Raises:
        AmpStateError: none, or one that no gradient can flow from.

    >>> checked_losses(torch.ones(1))
    Traceback (most recent call last):
    mp_torch.errors.AmpStateError: backward() of a loss that needs no gradient: ...
    """
    losses: list[Any] = list(loss) if isinstance(loss, list | tuple) else [loss]
    for one in losses:
        if not isinstance(one, torch.Tensor) or not one.is_floating_point():
            what = f"{one.dtype} tensor" if isinstance(one, torch.Tensor) else repr(one)
            raise AmpStateError(f"backward() of {what}: a loss must be a floating tensor made from the model's outputs")
    if not losses:
        raise AmpStateError("backward([]) of no loss at all; pass one, or a sequence of them")
    if not all(one.requires_grad for one in losses):
        raise AmpStateError(
            "backward() of a loss that needs no gradient: it was computed under no_grad, or from frozen parameters "
            "only; compute it with gradients enabled"
        )
    return losses
