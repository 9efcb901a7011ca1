"""What an engine hangs on optimizers: nobody else steps them within a window, and no load casts their moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mp_torch.errors import AmpStateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["guard_", "step_hooks"]


class _StepBar:
    """Refuses ``optimizer.step()`` where only the engine may step, on gradients that are still scaled."""

    def __init__(self, is_barred: Callable[[], bool]) -> None:
        self._is_barred = is_barred

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_barred():
            kind = type(optimizer).__name__
            raise AmpStateError(
                f"{kind}.step() was called by hand after engine.backward(), on gradients that are still multiplied by "
                f"the loss scale; leave it to engine.step(), which checks, unscales, clips and steps {kind}"
            )


class _UncastMoments:
    """Puts the moments that ``load_state_dict`` was given where torch has cast them to a 16-bit parameter's dtype."""

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}

    def before(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._given = state_dict

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        given, self._given = self._given, {}
        places = [place for group in given["param_groups"] for place in group["params"]]
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        for place, one in zip(places, trained, strict=True):
            for key, value in given["state"].get(place, {}).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    optimizer.state[one][key] = value.detach().to(one.device, torch.float32, copy=True)


def guard_(optimizer: torch.optim.Optimizer, is_barred: Callable[[], bool]) -> None:
    """Hang both on an optimizer, the bar in place of that of an engine before.

    Args:
        optimizer: an engine's.
        is_barred: whether its own ``step()`` would be wrong now.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)])
    >>> guard_(optimizer, lambda: True)
    >>> optimizer.step()
    Traceback (most recent call last):
    mp_torch.errors.AmpStateError: SGD.step() was called by hand after engine.backward(), on gradients that are ...
    """
    hooks = optimizer._optimizer_step_pre_hooks  # noqa: SLF001  # torch gives them no public name
    for key in [key for key, hook in hooks.items() if isinstance(hook, _StepBar)]:
        del hooks[key]
    optimizer.register_step_pre_hook(_StepBar(is_barred))
    loaded = optimizer._optimizer_load_state_dict_post_hooks.values()  # noqa: SLF001
    if any(isinstance(getattr(hook, "__self__", None), _UncastMoments) for hook in loaded):
        return
    moments = _UncastMoments()
    optimizer.register_load_state_dict_pre_hook(moments.before)
    optimizer.register_load_state_dict_post_hook(moments.after)


def step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks of the user's wait for the optimizer's own step.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)])
    >>> guard_(optimizer, lambda: False)
    >>> step_hooks(optimizer)
    0
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    return len(after) + sum(not isinstance(hook, _StepBar) for hook in before.values())
