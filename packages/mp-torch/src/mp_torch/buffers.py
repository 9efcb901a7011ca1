"""Buffers such as BatchNorm's statistics: what a rejected window did to them is undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["BufferSnapshot"]


@dataclass(slots=True, eq=False)  # tensors do not compare as one
class _Kept:
    """One buffer: the tensor that its module held when the window opened, and a copy of its bits."""

    module: nn.Module
    name: str
    tensor: Tensor
    copy: Tensor


class BufferSnapshot:
    """The model's buffers as they were when the window opened.

    Version counters cannot tell which buffers a forward pass changed (batch normalisation writes its statistics without
    counting), so all of them are copied, into memory that is allocated once. A forward pass may also put another tensor
    in a buffer's place, as ``self.center = 0.9 * self.center + ...`` does.

    Args:
        model: whose buffers.
        enabled: ``False`` does nothing at all.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> snapshot = BufferSnapshot(norm, enabled=True)
    >>> snapshot.take_()
    >>> _ = norm(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> norm.num_batches_tracked = norm.num_batches_tracked + 1
    >>> snapshot.restore_()
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._modules = [one for one in model.modules() if _slots(one)] if enabled else []
        self._kept: list[_Kept] = []
        self._absent: list[tuple[nn.Module, str]] = []
        self.take_()
        self.taken = False

    @property
    def copies(self) -> list[Tensor]:
        """What would be restored, for a checkpoint within a window."""
        return [one.copy for one in self._kept]

    def take_(self) -> None:
        """Copy every buffer."""
        self.taken = True
        present = [(module, name, one) for module in self._modules for name, one in _slots(module).items()]
        self._absent = [(module, name) for module, name, one in present if one is None]
        held = [(module, name, one) for module, name, one in present if one is not None]
        known = [kept.tensor for kept in self._kept]
        if len(held) != len(known) or any(one is not old for (_, _, one), old in zip(held, known, strict=True)):
            self._kept = [_Kept(module, name, one, one.detach().clone()) for module, name, one in held]
            return
        for kept in self._kept:
            kept.copy.copy_(kept.tensor)

    def restore_(self, skipped: Tensor | None = None) -> None:
        """Give every buffer its bits back.

        Args:
            skipped: on an accelerator, fp32 scalar, 1.0 where they are to be given back; ``None`` means yes.
        """
        if not self.taken:
            return
        for kept in self._kept:
            slots, name = _slots(kept.module), kept.name
            present = slots.get(name)
            if skipped is not None and present is not None and _alike(present, kept.copy):
                chosen = torch.where(skipped != 0, kept.copy, present)
                slots[name] = present.copy_(chosen) if present is kept.tensor else chosen
            elif skipped is None or bool(skipped != 0):  # waits, where no kernel could choose between the two
                slots[name] = kept.copy.clone() if kept.tensor.is_inference() else kept.tensor.copy_(kept.copy)
        for module, name in self._absent:
            if _slots(module).get(name) is not None and (skipped is None or bool(skipped != 0)):
                _slots(module)[name] = None

    def load_(self, copies: list[Tensor]) -> None:
        """Take back a snapshot from a checkpoint within a window."""
        self.take_()
        for kept, saved in zip(self._kept, copies, strict=True):
            kept.copy.copy_(saved)

    @property
    def needed(self) -> bool:
        """Whether there is anything to restore."""
        return bool(self._kept)


def _slots(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers  # noqa: SLF001  # names the empty ones as well


def _alike(present: Tensor, copy: Tensor) -> bool:
    return present.shape == copy.shape and present.dtype == copy.dtype
