"""Which module an op belongs to: the one that runs, or in the backward the one whose op is differentiated."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from mp_torch.emulate.dispatcher import current_node_number, next_node_number

if TYPE_CHECKING:
    from torch import nn

__all__ = ["OUTSIDE", "Places"]

OUTSIDE = "(outside the model)"
_KEPT = 200_000


class Places:
    """Follows a model's modules by hooks.

    Autograd numbers its nodes in the order of the forward, so the numbers at which a module begins and ends tell which
    nodes are its own.

    Args:
        model: the model.

    >>> import torch
    >>> layer = torch.nn.Linear(1, 1)
    >>> places = Places(layer)
    >>> places.now()
    ('(outside the model)', False)
    >>> places.remove()
    """

    def __init__(self, model: nn.Module) -> None:
        self._running: list[str] = []
        self._starts: list[int] = []
        self._names: list[str] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            label = name or type(model).__name__
            self._handles.append(module.register_forward_pre_hook(self._entering(label)))
            self._handles.append(module.register_forward_hook(self._left, always_call=True))

    def _entering(self, label: str) -> Any:
        def hook(*_: Any) -> None:
            self._running.append(label)
            self._mark()

        return hook

    def _left(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
            self._mark()

    def _mark(self) -> None:
        self._starts.append(next_node_number())
        self._names.append(self._running[-1] if self._running else OUTSIDE)
        if len(self._starts) > 2 * _KEPT and not self._running:
            del self._starts[:_KEPT], self._names[:_KEPT]

    def now(self) -> tuple[str, bool]:
        """The module that the op at hand belongs to, and whether it is part of a backward."""
        number = current_node_number()
        if number is None:
            return (self._running[-1] if self._running else OUTSIDE), False
        if self._running:  # a checkpoint recomputes its forward inside the backward
            return self._running[-1], False
        index = bisect_right(self._starts, number) - 1
        return (self._names[index] if index >= 0 else OUTSIDE), True

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
