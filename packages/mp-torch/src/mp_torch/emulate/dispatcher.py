"""Torch's dispatcher: kernels put in and taken out, and the few private names that this needs, all of them here."""

# ruff: noqa: SLF001  # torch offers no public way to exclude a key or to remove a kernel

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DispatchKeySet",
    "Overrides",
    "arguments_of",
    "below",
    "current_node_number",
    "excluding",
    "key_set",
    "native",
    "next_node_number",
    "op_overload",
    "version_of",
]  # fmt: skip

DispatchKeySet = torch._C.DispatchKeySet
excluding = torch._C._ExcludeDispatchKeyGuard
"""A context: calls made inside pass over the keys of its argument, a ``key_set``."""


def key_set(dispatch_key: str) -> DispatchKeySet:
    """The set of one key, by its name such as ``AutocastCPU``."""
    return DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))


def below(dispatch_key: str) -> DispatchKeySet:
    """Every key that comes after this one, to redispatch a call to them."""
    found: DispatchKeySet = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, dispatch_key))
    return found


def version_of(x: torch.Tensor) -> int:
    """How often ``x`` was written in place."""
    return x._version


def next_node_number() -> int:
    """The number that autograd gives the next node of this thread's graph."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def current_node_number() -> int | None:
    """The number of the node whose backward runs in this thread; None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def exists(name: str) -> bool:
    """Whether this torch has an op of this full overload name.

    >>> exists("aten::mm"), exists("aten::no_such_op")
    (True, False)
    """
    return bool(torch._C._dispatch_has_kernel(name))


def registered(dispatch_key: str) -> set[str]:
    """The full overload names that have a kernel at a key.

    >>> "aten::mm" in registered("AutocastCPU")
    True
    """
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(dispatch_key))


def op_overload(name: str) -> OpOverload:
    """The overload object of a name such as ``aten::softmax.int``.

    Args:
        name: a full overload name.

    Returns:
        The callable that dispatches to it.

    Raises:
        AttributeError: this torch has no such op.

    Source: torch.ops.

    >>> op_overload("aten::mm")
    <OpOverload(op='aten.mm', overload='default')>
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    assert isinstance(found, OpOverload)
    return found


def arguments_of(op: OpOverload) -> list[tuple[str, str]]:
    """Name and type of each argument of an op, as its schema has them.

    >>> arguments_of(op_overload("aten::bilinear"))[2:]
    [('weight', 'Tensor'), ('bias', 'Optional[Tensor]')]
    """
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def native(name: str) -> Callable[..., Any]:
    """The kernel that an op has for CPU tensors now, below every override made later.

    Args:
        name: a full overload name.

    Returns:
        A function of the op's arguments.

    Raises:
        RuntimeError: this torch has no kernel of this name for CPU tensors.

    Source: torch.library.get_kernel.

    >>> native("aten::mm")(torch.eye(2), torch.ones(2, 1)).tolist()
    [[1.0], [1.0]]
    """
    call, cpu = torch.library.get_kernel(name, "CPU").call_boxed, key_set("CPU")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call(cpu, *args, **kwargs)

    return kernel


class Overrides:
    """Kernels of one library: whatever is put in comes out again together.

    >>> kernels = Overrides()
    >>> kernels.put("aten::relu", lambda x: x.clone(), "CPU")
    >>> torch.relu(torch.tensor(-1.0)).item()
    -1.0
    >>> kernels.remove()
    >>> torch.relu(torch.tensor(-1.0)).item()
    0.0
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def put(self, name: str, kernel: Callable[..., Any], dispatch_key: str, *, with_keys: bool = False) -> None:
        """Register ``kernel`` for an op at a key, over any kernel that is there.

        Args:
            name: a full overload name of the aten namespace.
            kernel: takes the op's arguments; after the keys of the call if ``with_keys``.
            dispatch_key: the key's name.
            with_keys: whether the kernel wants the keys, to redispatch.
        """
        with warnings.catch_warnings():  # that a kernel is replaced is meant here
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            self._library.impl(  # type: ignore[no-untyped-call]
                name.removeprefix("aten::"), kernel, dispatch_key, with_keyset=with_keys, allow_override=True
            )

    def skip(self, name: str, dispatch_key: str) -> None:
        """Let calls of an op pass over a key as if it had no kernel there."""
        self.put(name, torch.library.fallthrough_kernel, dispatch_key)

    def remove(self) -> None:
        """Take every kernel out; the dispatcher's tables are as before. Twice is harmless."""
        self._library._destroy()  # type: ignore[no-untyped-call]
