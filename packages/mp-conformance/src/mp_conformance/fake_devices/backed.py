"""A device that computes on the CPU: tensors that say ``npu`` or ``cuda`` and hold a CPU tensor.

Everything above the kernels is the real thing (dispatcher, autograd, autocast, optimizers, ``torch.accelerator``); the
kernels are the CPU's. What a chip does differently is a function that sees each kernel's results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _disabled_torch_function_impl
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackedDevice", "BackedEvent", "BackedTensor"]

_HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::unique")
"""Operators whose result the host needs before it can go on."""

_CONVERSION = torch.ops.aten._to_copy.default  # noqa: SLF001  # the operator behind Tensor.to
_with_views: Any = _python_dispatch.return_and_correct_aliasing  # torch leaves it untyped


class BackedTensor(torch.Tensor):
    """A tensor of the backed device: shape, strides and dtype of the CPU tensor that it holds.

    Source: torch's wrapper subclasses (``Tensor._make_wrapper_subclass``).
    """

    backing: BackedDevice  # set on the subclass that each device makes for itself
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> BackedTensor:
        """Wrap a CPU tensor without copying it."""
        made: BackedTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # the way torch offers
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=cls.backing.device,
            requires_grad=requires_grad,
        )  # fmt: skip
        made.raw = raw
        return made

    __torch_function__: Any = _disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history, as in torch."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]  # a slot of C

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take another tensor's place, the held one too."""
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a slot of C
        self.raw = self.backing.held(value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # its keyword is torch's own affair
        """Where it pretends to be, and what it holds."""
        return f"BackedTensor({self.raw!r}, device='{self.device}')"

    def tolist(self) -> Any:
        """The values, which the host waits for; torch has no such method for subclasses."""
        self.backing.host_syncs.append("tolist")
        return self.raw.tolist()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Let compilers see the held tensor."""
        return ["raw"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: object, size: object, stride: object) -> Any:
        """Undo ``__tensor_flatten__``."""
        return cls(inner["raw"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own signature lacks the defaults
        """Run the CPU's kernel on the held tensors."""
        return cls.backing.perform(func, args, kwargs or {})


class BackedEvent:
    """A point in the work of the device that the host can wait for.

    Args:
        host_syncs: where a wait is recorded.
    """

    def __init__(self, host_syncs: list[str]) -> None:
        self._host_syncs = host_syncs

    def record(self, stream: object = None) -> None:
        """Mark the point; kernels on the CPU are done when they return."""

    def query(self) -> bool:
        """Whether the device has come this far."""
        return True

    def synchronize(self) -> None:
        """Wait, which a device that works on its own would make the host do."""
        self._host_syncs.append("Event.synchronize")


class BackedDevice:
    """One fake device of this process: what its kernels do, and how often the host waited for it.

    Args:
        device: what the tensors say, such as ``torch.device("npu", 0)``.
        dispatch_key: the key that kernels of this device are registered under, ``"PrivateUse1"`` or ``"CUDA"``.
        effect: called with (operator, tensor) for every CPU tensor that a kernel wrote; may change it in place.
        substitutes: operators that the CPU lacks, by name, as functions of CPU tensors.

    Raises:
        RuntimeError: kernels for this key were registered already, since that can be done once a process.

    Source: torch.library; the list of operators that a backend must bring is torch's, three of them.
    """

    def __init__(
        self,
        device: torch.device,
        dispatch_key: str,
        effect: Callable[[Any, torch.Tensor], None] | None = None,
        substitutes: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.device = device
        self.effect = effect
        self.substitutes = substitutes or {}
        self.host_syncs: list[str] = []
        self.tensor: type[BackedTensor] = type("BackedTensor", (BackedTensor,), {"backing": self})
        library: Any = torch.library.Library
        self._library = library("aten", "IMPL")
        for name in ("empty.memory_format", "empty_strided"):
            self._library.impl(name, self._factory(name), dispatch_key)
        self._library.impl("_copy_from", self._copy_from, dispatch_key)
        if dispatch_key != "PrivateUse1":  # whose copies end in _copy_from; others look for a kernel of their own
            self._library.impl("copy_", self._copy, dispatch_key)

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on the held CPU tensors and wrap what comes out.

        Args:
            func: the operator's overload.
            args: its arguments, some of them ``BackedTensor``.
            kwargs: the same by name; ``device`` decides where a new tensor lands.

        Returns:
            What the operator returns, with tensors of this device.
        """
        name = func.name().split(".")[0]
        target = kwargs.get("device")
        lands_here = target is None or torch.device(target).type == self.device.type
        arrives = not lands_here or (name == "aten::copy_" and not isinstance(args[0], BackedTensor))
        if name in _HOST_READS or (arrives and not kwargs.get("non_blocking")):
            self.host_syncs.append(name)
        on_cpu = {**kwargs, "device": "cpu"} if target is not None else kwargs
        raw_args, raw_kwargs = tree_map(self.held, args), tree_map(self.held, on_cpu)
        result = self.substitutes.get(name, func)(*raw_args, **raw_kwargs)
        self._take_effect(func, raw_args, raw_kwargs, result)
        if not lands_here or name == "aten::_local_scalar_dense":
            return result
        wrapped = tree_map_only(torch.Tensor, self._wrap, result)
        return _with_views(func, args, kwargs, wrapped)

    def _take_effect(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self.effect is None or func.is_view:
            return
        if func is _CONVERSION and result.dtype == args[0].dtype:
            return  # a move
        written = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            func = _CONVERSION
        for tensor in written:
            self.effect(func, tensor)

    def held(self, value: Any) -> Any:
        """The CPU tensor behind a tensor of this device; anything else as it is."""
        return value.raw if isinstance(value, BackedTensor) else value

    def _wrap(self, value: torch.Tensor) -> torch.Tensor:
        return value if isinstance(value, BackedTensor) else self.tensor(value)

    def _factory(self, name: str) -> Callable[..., torch.Tensor]:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self.tensor(operator(*args, **{**kwargs, "device": "cpu", "pin_memory": False}))

        return make

    def _copy_from(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        del non_blocking  # the CPU copies at once
        self.held(target).copy_(self.held(source))
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return self._copy_from(source, target, non_blocking)
