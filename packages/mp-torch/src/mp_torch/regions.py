"""Modules that compute in a precision of their own: which they are, and what their ``forward`` becomes."""

from __future__ import annotations

import fnmatch
import functools
import re
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.precision import SAFE_OPS, OpRules, in_dtype, run_in_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

__all__ = ["SAFE_MODULES", "STATISTICS", "leave_region_", "matching", "run_in_region_"]

SAFE_MODULES = ("re:class .*(Rotary|RoPE|Positional?Enc|Position.*Embed|Sinusoid)", r"re:class .*\._SpectralNorm$")
"""Modules that compute in fp32: positions, which bf16 mixes up past 256; spectral norms, whose vectors are fp32."""

STATISTICS = ("re:class .*BatchNorm",)
"""Modules whose parameters stay in fp32 beside their statistics; the kernels take 16-bit inputs and add up in fp32."""


def matching(model: nn.Module, patterns: Iterable[str]) -> dict[str, str]:
    """Which modules the patterns name.

    Args:
        model: the whole.
        patterns: a glob over dotted names, ``re:...`` over name or ``"class module.Name"``, ``class:module.Name``.

    Returns:
        Module name, of a shared module its first, -> the pattern that matched first.

    >>> matching(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.LayerNorm(1)), ["re:class .*Norm"])
    {'1': 're:class .*Norm'}
    """

    def hit(pattern: str, name: str, module: nn.Module) -> bool:
        classes = [f"{one.__module__}.{one.__qualname__}" for one in type(module).__mro__]
        if pattern.startswith("class:"):
            return pattern.removeprefix("class:") in classes
        if pattern.startswith("re:"):
            regex = re.compile(pattern.removeprefix("re:"))
            return bool(regex.search(name) or regex.match("class " + classes[0]))
        return fnmatch.fnmatchcase(name, pattern)

    found: dict[str, str] = {}
    first: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared module answers to all its names
        first.setdefault(module, name)
        for pattern in patterns:
            if first[module] not in found and hit(pattern, name, module):
                found[first[module]] = pattern
    return found


def run_in_region_(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Make a module compute in one dtype, whatever surrounds it.

    In fp32 its ``forward`` gets floating inputs cast, and runs with autocast off. In the lower dtype autocast goes on
    casting weights, and every function that is kept in fp32 elsewhere is not kept here. Survives ``copy.deepcopy``,
    pickling and tracing by ``torch.compile``.

    Args:
        module: changed in place.
        device_type: whose autocast is meant.
        dtype: fp32, or the lower one.

    >>> linear = torch.nn.Linear(2, 2)
    >>> run_in_region_(linear, "cpu", torch.float32)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     linear(torch.zeros(1, 2)).dtype
    torch.float32
    """
    rules = None
    if dtype != torch.float32:
        lowered = dict.fromkeys(SAFE_OPS, "lower_precision_fp")
        rules = OpRules(lowered, device_type=device_type, lower=dtype, alone=True)
    leave_region_(module)
    module.mp_region = (device_type, dtype, rules)  # type: ignore[assignment]
    if "forward" in module.__dict__:
        module.mp_own_forward = module.__dict__["forward"]
    module.forward = functools.partial(_region_forward, module)  # a bound method would not be found when unpickled


def leave_region_(module: nn.Module) -> None:
    """Make a module compute as what surrounds it again; one without a region stays as it is.

    >>> linear = torch.nn.Linear(2, 2)
    >>> run_in_region_(linear, "cpu", torch.float32)
    >>> leave_region_(linear)
    >>> "forward" in linear.__dict__
    False
    """
    held, forward = module.__dict__, module.__dict__.get("forward")
    if held.pop("mp_region", None) is None or getattr(forward, "func", None) is not _region_forward:
        return
    del held["forward"]
    if "mp_own_forward" in held:  # somebody gave this one module a forward of its own
        held["forward"] = held.pop("mp_own_forward")


def _region_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    device_type, dtype, rules = module.mp_region
    forward, args = type(module).forward, (module, *args)
    if hasattr(module, "mp_own_forward"):
        forward, args = module.mp_own_forward, args[1:]
    if rules is None:
        return run_in_dtype(forward, args, kwargs, device_type, dtype)
    with rules:
        return forward(*in_dtype(args, dtype), **in_dtype(kwargs, dtype))
