"""What runs in which precision: autocast that cannot go stale, and rules by op.

Autocast's cache of cast weights is switched off: a cast weight that is kept goes stale as soon as anybody changes the
weight, and without it no forward under ``no_grad`` can poison the next one. Each use of a weight casts it; most models
use each weight once.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from mp_torch.dtypes import nearest
from mp_torch.errors import AmpConfigError
from mp_torch.notices import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["JOINING_OPS", "SAFE_OPS", "OpRules", "functions_named", "in_dtype", "run_backward", "run_in_dtype"]

SAFE_OPS = (
    "softmax", "softmin", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "group_norm", "instance_norm",
    "gumbel_softmax", "normalize", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip
"""Functions that lose too much in 16 bits: sums over many terms, and losses."""

JOINING_OPS = ("cat", "stack", "bilinear")
"""Functions that refuse inputs of several dtypes; here the result is wide enough for all."""

_OPERATORS = {
    "pow": ("__pow__", "__rpow__"), "sub": ("__rsub__",), "div": ("__rdiv__",), "matmul": ("__rmatmul__",),
    "remainder": ("__rmod__",), "floor_divide": ("__floordiv__", "__rfloordiv__"),
}  # fmt: skip
"""Operators that are functions of their own; the others call the method."""

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
                return run_in_dtype(func, args, kwargs or {}, self.device_type, dtype)
        return run_in_dtype(func, args, kwargs or {}, self.device_type, dtype)

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


def run_in_dtype(func: Callable[..., Any], args: Any, kwargs: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Call with floating tensors cast to ``dtype``, and autocast off so that it does not cast them back."""
    with torch.autocast(device_type, enabled=False):
        return func(*in_dtype(args, dtype), **in_dtype(kwargs, dtype))


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The value with its floating tensors cast, float64 ones excepted, through tuples, lists and dicts of any kind.

    >>> in_dtype({"x": (torch.ones(1, dtype=torch.bfloat16), 2)}, torch.float32)
    {'x': (tensor([1.]), 2)}
    """
    if isinstance(value, torch.Tensor):
        castable = value.is_floating_point() and value.dtype != torch.float64 and value.dtype != dtype
        return value.to(dtype) if castable else value
    if type(value) in (list, tuple):
        return type(value)(in_dtype(one, dtype) for one in value)
    if type(value) is dict:
        return {key: in_dtype(one, dtype) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return getattr(value, "_make", type(value))(in_dtype(one, dtype) for one in value)  # a named tuple is made so
    if isinstance(value, dict):
        same_kind = copy.copy(value)
        same_kind.update(in_dtype(dict(value), dtype))
        return same_kind
    return value


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    for one in args:
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)
