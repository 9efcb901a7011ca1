"""Another device's op rules on this device's tensors, as kernels of an autocast dispatch key.

The kernels sit where torch's own autocast kernels sit, so that calls made inside C++ composites meet them as well, and
autograd records the casts. Nothing else of the dispatcher is touched, and taking the kernels out restores it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch

from mp_reference.spec.op_rules import BANNED_MESSAGES
from mp_torch.emulate.dispatcher import Overrides, arguments_of, below, excluding, key_set, op_overload, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mp_torch.emulate.dispatcher import DispatchKeySet

__all__ = ["EmulationWarning", "install_rules"]


class EmulationWarning(UserWarning):
    """An emulation cannot be as faithful as it looks; the message says where and what to do."""


_CASTABLE = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
) - {torch.float64}


class Casts:
    """What every kernel of one dispatch key needs: which tensors are eligible, and how they are cast.

    A weight that is cast twice in one autocast region is cast once, as torch's cache has it: its gradients then add
    up in 16 bits, which decides bits of the result. A cached cast of a weight that changed since is never used.

    Args:
        device_type: the device whose tensors are cast, and whose autocast dtype is the low one.
        dispatch_key: the autocast key that the kernels are registered for.
    """

    def __init__(self, device_type: str, dispatch_key: str) -> None:
        self.device_type = device_type
        self.excluded = key_set(dispatch_key)
        self._cached: dict[int, tuple[ReferenceType[torch.Tensor], int, torch.Tensor]] = {}

    def low(self) -> torch.dtype:
        """The dtype that the region in force casts to."""
        return torch.get_autocast_dtype(self.device_type)

    def eligible(self, x: Any) -> bool:
        """Whether autocast may cast ``x``."""
        return isinstance(x, torch.Tensor) and x.dtype in _CASTABLE and x.device.type == self.device_type

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        """``x`` in ``dtype`` if it is eligible; sequences element by element."""
        if isinstance(x, torch.Tensor):
            if x.dtype is dtype or x.dtype not in _CASTABLE or x.device.type != self.device_type:
                return x
            return self._cast_weight(x, dtype) if x.requires_grad and x.is_leaf else x.to(dtype)
        if isinstance(x, list | tuple):
            return [self.cast(item, dtype) for item in x]
        return x

    def _cast_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not (
            weight.dtype is torch.float32
            and dtype is self.low()
            and torch.is_autocast_cache_enabled()
            and torch.is_grad_enabled()
        ):
            return weight.to(dtype)
        found = self._cached.get(id(weight))
        if found is None or found[0]() is not weight or found[1] != version_of(weight):
            found = (ref(weight), version_of(weight), weight.to(dtype))
            self._cached[id(weight)] = found
        return found[2]

    def forget(self) -> None:
        """Drop the cached casts: the outermost autocast region has ended."""
        self._cached.clear()


def _casting(name: str, casts: Casts, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Cast every eligible argument: to ``dtype``, or to the region's low dtype where it is None."""
    op, excluded, cast = op_overload(name), casts.excluded, casts.cast

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluding(excluded):
            target = casts.low() if dtype is None else dtype
            positional = [cast(x, target) for x in args]
            if not kwargs:
                return op(*positional)
            return op(*positional, **{key: cast(x, target) for key, x in kwargs.items()})

    return kernel


def _promoting(name: str, casts: Casts) -> Callable[..., Any]:
    """Cast every eligible argument to the widest among those that take part: tensors and lists of tensors."""
    op = op_overload(name)
    names = [argument for argument, _ in arguments_of(op)]
    counted = {argument for argument, kind in arguments_of(op) if kind in ("Tensor", "List[Tensor]")}

    def widest(arguments: Iterable[tuple[str, Any]]) -> torch.dtype:
        low = found = casts.low()
        for argument, value in arguments:
            for x in (value if isinstance(value, list | tuple) else (value,)) if argument in counted else ():
                if not casts.eligible(x):
                    continue
                if torch.float32 in (found, x.dtype):
                    found = torch.float32
                elif x.dtype is not low:
                    raise RuntimeError(
                        f"Unexpected floating ScalarType: {name} promotes to the widest input, and {x.dtype} "
                        f"beside {low} has no widest; cast the input to {low} or to torch.float32 first"
                    )
        return found

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluding(casts.excluded):
            target = widest([*zip(names, args, strict=False), *kwargs.items()])
            return op(
                *[casts.cast(x, target) for x in args], **{name: casts.cast(x, target) for name, x in kwargs.items()}
            )

    return kernel


def _setting_dtype(name: str, casts: Casts) -> Callable[..., Any]:
    """Leave the inputs; ask the op for an fp32 result unless the caller asked for a dtype."""
    op = op_overload(name)
    position = [argument for argument, _ in arguments_of(op)].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluding(casts.excluded):
            given = args[position] if len(args) > position else kwargs.get("dtype")
            if given is None and casts.eligible(args[0]):
                return op(*args[:position], **{**kwargs, "dtype": torch.float32})
            return op(*args, **kwargs)

    return kernel


def _appending_dtype(name: str, casts: Casts) -> Callable[..., Any]:
    """Call the overload of ``norm`` that takes a dtype, with fp32 for eligible inputs."""
    norm = torch.ops.aten.norm

    def kernel(x: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        with excluding(casts.excluded):
            dtype = torch.float32 if casts.eligible(x) else x.dtype
            if name == "aten::norm.Scalar":
                return norm.ScalarOpt_dtype(x, p, dtype=dtype)
            return norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=dtype)

    return kernel


def _banned(name: str, casts: Casts) -> Callable[..., Any]:  # noqa: ARG001  # one signature for all rules
    """Refuse the op."""

    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(BANNED_MESSAGES[name])

    return kernel


_KERNELS: dict[str, Callable[[str, Casts], Callable[..., Any]]] = {
    "lower_precision_fp": lambda name, casts: _casting(name, casts, None),
    "fp32": lambda name, casts: _casting(name, casts, torch.float32),
    "promote": _promoting,
    "fp32_set_opt_dtype": _setting_dtype,
    "fp32_append_dtype": _appending_dtype,
    "banned": _banned,
}


def _warning(name: str, why: str, casts: Casts, dispatch_key: str) -> Callable[..., Any]:
    """Run an op that nothing lowers here, though it is lowered elsewhere, and say so once if it runs in fp32."""
    op, rest = op_overload(name), below(dispatch_key)
    said: list[bool] = []

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not said and any(casts.eligible(x) and x.dtype is torch.float32 for x in args):
            said.append(True)
            warnings.warn(
                f"{name} {why}; cast its inputs yourself if you want it in 16 bits",
                EmulationWarning,
                stacklevel=2,
            )
        return op.redispatch(keys & rest, *args, **kwargs)

    return kernel


def install_rules(
    rules: Mapping[str, str],
    *,
    dispatch_key: str = "AutocastCPU",
    device_type: str = "cpu",
    absent: Iterable[str] = (),
    warned: Mapping[str, str] | None = None,
) -> Callable[[], None]:
    """Register a kernel for each rule at an autocast dispatch key of the whole process.

    Args:
        rules: rule names by full overload name, as ``{"aten::exp": "fp32"}``.
        dispatch_key: the autocast key of ``device_type``.
        device_type: the type of the tensors that the rules are for.
        absent: ops with a kernel at this key that shall have none.
        warned: ops that warn once when they run in fp32, each with the reason why they do.

    Returns:
        A function that takes the kernels out again and leaves the dispatcher as it was; calling it twice is harmless.

    Raises:
        KeyError: an unknown rule.

    Source: ATen/autocast_mode.h, ``WrapFunction_``.

    >>> remove = install_rules({"aten::exp": "fp32"})
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     torch.exp(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    >>> remove()
    """
    casts = Casts(device_type, dispatch_key)
    kernels = Overrides()
    for name, rule in rules.items():
        kernels.put(name, _KERNELS[rule](name, casts), dispatch_key)
    for name in absent:
        kernels.skip(name, dispatch_key)
    for name, why in (warned or {}).items():
        kernel = _warning(name, why, casts, dispatch_key)
        kernels.put(name, kernel, dispatch_key, with_keys=True)
    _follow(casts)

    def remove() -> None:
        _unfollow(casts)
        kernels.remove()

    return remove


_native_clear = torch.clear_autocast_cache
_followed: list[Casts] = []  # whose casts end with the outermost autocast region


def _clear_all() -> None:
    """What torch calls when the outermost region has ended: the only sign of it."""
    for casts in _followed:
        casts.forget()
    _native_clear()


def _follow(casts: Casts) -> None:
    _followed.append(casts)
    torch.clear_autocast_cache = _clear_all


def _unfollow(casts: Casts) -> None:
    if casts in _followed:
        _followed.remove(casts)
    if not _followed:
        torch.clear_autocast_cache = _native_clear
