"""What runs in which precision: autocast that cannot go stale, rules by op, rules by module.

Autocast's cache of cast weights is switched off: a cast weight that is kept goes stale as soon as anybody changes the
weight, and without it no forward under ``no_grad`` can poison the next one. Each use of a weight casts it; most models
use each weight once.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import re
import threading
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from mp_torch.dtypes import nearest
from mp_torch.errors import AmpConfigError
from mp_torch.notices import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = [
    "JOINING_OPS",
    "SAFE_MODULES",
    "SAFE_OPS",
    "STATISTICS",
    "Depth",
    "OpRules",
    "Region",
    "functions_named",
    "leave_region_",
    "matching",
    "run_backward",
    "run_in_region_",
    "uncompiled",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

SAFE_OPS = (
    "softmax", "softmin", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "group_norm", "instance_norm",
    "gumbel_softmax", "normalize", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip
"""Functions that lose too much in 16 bits: sums over many terms, and losses."""

JOINING_OPS = ("cat", "stack", "bilinear")
"""Functions that refuse inputs of several dtypes; here the result is wide enough for all."""

SAFE_MODULES = ("re:class .*(Rotary|RoPE|Positional?Enc|Position.*Embed|Sinusoid)", r"re:class .*\._SpectralNorm$")
"""Modules that compute in fp32: positions, which bf16 mixes up past 256; spectral norms, whose vectors are fp32."""

_OPERATORS = {
    "pow": ("__pow__", "__rpow__"), "sub": ("__rsub__",), "div": ("__rdiv__",), "matmul": ("__rmatmul__",),
    "remainder": ("__rmod__",), "floor_divide": ("__floordiv__", "__rfloordiv__"),
}  # fmt: skip
"""Operators that are functions of their own; the others call the method."""

STATISTICS = ("re:class .*BatchNorm",)
"""Modules whose parameters stay in fp32 beside their statistics; the kernels take 16-bit inputs and add up in fp32."""

_HOMES = (torch, torch.nn.functional, torch.Tensor, torch.special, torch.linalg)


def functions_named(name: str) -> list[Callable[..., Any]]:
    """Every function of torch that has this name: as a function, as a method, in ``torch.nn.functional``.

    Args:
        name: such as "softmax".

    Returns:
        At least one function.

    Raises:
        AmpConfigError: torch has none.

    >>> len(functions_named("softmax")) >= 3
    True
    """
    found = [function for home in _HOMES if callable(function := getattr(home, name, None))]
    found += [getattr(torch.Tensor, operator) for operator in _OPERATORS.get(name, ())]
    if not found:
        known = {one for home in _HOMES for one in dir(home) if not one.startswith("_")}
        raise AmpConfigError(
            f"op_rules[{name!r}]: torch, torch.nn.functional, torch.Tensor, torch.special and torch.linalg have no "
            f"function {name!r}{nearest(name, known)}"
        )
    return found


class OpRules(TorchFunctionMode):
    """Runs functions of torch by name in the precision that a rule says.

    A rule holds for the call that Python code makes; a function that computes a softmax inside is its own function. It
    takes part in tracing by ``torch.compile``, and autograd carries it into recomputation.

    Args:
        rules: name -> "fp32", "lower_precision_fp" or "promote".
        device_type: whose autocast the rules stand above.
        lower: the 16-bit dtype.
        alone: what a rule here decided no rule outside decides again.

    >>> with OpRules({"softmax": "fp32"}, device_type="cpu", lower=torch.bfloat16):
    ...     torch.softmax(torch.zeros(2, dtype=torch.bfloat16), -1).dtype
    torch.float32
    """

    def __init__(self, rules: Mapping[str, str], *, device_type: str, lower: torch.dtype, alone: bool = False) -> None:
        super().__init__()
        self.rules = dict(rules)
        self.alone = alone
        self.warned = False
        self.table = {function: rule for name, rule in rules.items() for function in functions_named(name)}
        self.device_type = device_type
        self.lower = lower

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Cast and run with autocast off if a rule names the function; else just run."""
        rule = self.table.get(func)
        if rule is None:
            if func is torch.autograd.backward:  # a recomputation that differentiates: the rules hold inside it as well
                with self:
                    return run_backward(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))
        if not (self.warned or torch.compiler.is_compiling()):
            self._warn_of_inner_autocast()
        dtype = self._dtype(rule, args)
        if self.alone:
            with torch._C.DisableTorchFunction():  # noqa: SLF001  # torch gives it no public name
                return _run(func, args, kwargs or {}, self.device_type, dtype)
        return _run(func, args, kwargs or {}, self.device_type, dtype)

    def __reduce__(self) -> Any:
        """Made anew from its arguments, since functions of torch have no place in a pickle."""
        again = functools.partial(OpRules, device_type=self.device_type, lower=self.lower, alone=self.alone)
        return again, (self.rules,)

    def _warn_of_inner_autocast(self) -> None:
        inner = torch.get_autocast_dtype(self.device_type)
        if torch.is_autocast_enabled(self.device_type) and inner != self.lower:
            self.warned = True
            warn(
                f"torch.autocast of {inner} inside engine.autocast() of {self.lower}: within it {inner} holds, but for "
                "functions and modules that the engine's rules name"
            )

    def _dtype(self, rule: str, args: tuple[Any, ...]) -> torch.dtype:
        if rule == "fp32":
            return torch.float32
        if rule == "lower_precision_fp":
            return self.lower
        widest = self.lower
        for one in _tensors(args):
            widest = torch.promote_types(widest, one.dtype)
        return widest


def run_backward(
    tensors: Sequence[torch.Tensor],
    grad_tensors: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """``torch.autograd.backward`` that leaves op rules in force for what it computes again.

    torch's own function takes the rules off while it runs, since it is a function that rules could name.

    Args:
        tensors: what to differentiate.
        grad_tensors: their gradients; ones where there are none.
        retain_graph: as in torch.
        create_graph: as in torch.
        inputs: as in torch.

    >>> x = torch.ones(1, requires_grad=True)
    >>> run_backward([x * 3])
    >>> x.grad
    tensor([3.])
    """
    given = [None] * len(tensors) if grad_tensors is None else list(grad_tensors)
    seeds = tuple(torch.ones_like(t) if seed is None else seed for t, seed in zip(tensors, given, strict=True))
    torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001
        tuple(tensors),
        seeds,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _run(func: Callable[..., Any], args: Any, kwargs: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Call with floating tensors cast to ``dtype``, and autocast off so that it does not cast them back."""
    with torch.autocast(device_type, enabled=False):
        return func(*_cast(args, dtype), **_cast(kwargs, dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        castable = value.is_floating_point() and value.dtype != torch.float64 and value.dtype != dtype
        return value.to(dtype) if castable else value
    if type(value) in (list, tuple):
        return type(value)(_cast(one, dtype) for one in value)
    if type(value) is dict:
        return {key: _cast(one, dtype) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return getattr(value, "_make", type(value))(_cast(one, dtype) for one in value)  # a named tuple is made so
    if isinstance(value, dict):
        same_kind = copy.copy(value)
        same_kind.update(_cast(dict(value), dtype))
        return same_kind
    return value


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    for one in args:
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


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


class Region(ContextDecorator):
    """A context that is opened when it is entered: again and again, nested, or around a function.

    Args:
        open_: makes a fresh context.
        depth: counts how many are open, over all threads and all regions that share it.

    >>> region = Region(lambda: torch.autocast("cpu", torch.bfloat16))
    >>> torch.is_autocast_enabled("cpu")
    False
    >>> with region, region:
    ...     torch.is_autocast_enabled("cpu")
    True
    """

    def __init__(self, open_: Callable[[], AbstractContextManager[Any]], depth: Depth | None = None) -> None:
        self._open, self._depth = open_, Depth() if depth is None else depth

    def __enter__(self) -> None:
        """Open a fresh one."""
        fresh = self._open()
        fresh.__enter__()
        self._depth.here.contexts.append(fresh)
        self._depth.value += 1

    def __exit__(self, *problem: Any) -> bool | None:
        """Close the innermost one that this thread opened."""
        self._depth.value -= 1
        return self._depth.here.contexts.pop().__exit__(*problem)


class _Opened(threading.local):
    """What a thread has open: autocast and rules belong to their thread."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


class Depth:
    """How many regions are open, and which of them in this thread. A copy starts with none."""

    def __init__(self) -> None:
        self.value, self.here = 0, _Opened()

    def __reduce__(self) -> Any:
        return Depth, ()


def uncompiled(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let ``torch.compile`` call a function as it is instead of tracing into it, and leave any inference mode for it.

    As ``torch.compiler.disable``, which imports the whole compiler; here that waits for the first call.

    Args:
        method: what runs fused kernels, which the compiler can neither trace nor speed up.

    >>> uncompiled(abs)(-2)
    2
    """
    kept: list[Callable[_P, _T]] = []

    @functools.wraps(method)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not kept:
            kept.append(torch.compiler.disable(outside))  # type: ignore[no-untyped-call]  # torch's own
        return kept[0](*args, **kwargs)

    return call


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
        return _run(forward, args, kwargs, device_type, dtype)
    with rules:
        return forward(*_cast(args, dtype), **_cast(kwargs, dtype))
