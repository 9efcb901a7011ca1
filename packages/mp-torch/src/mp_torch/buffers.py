"""Buffers such as BatchNorm's statistics: what a rejected window did to them is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["BufferSnapshot"]


class BufferSnapshot:
    """The model's buffers as they were when the window opened.

    Version counters cannot tell which buffers a forward pass changed (batch normalisation writes its statistics without
    counting), so all of them are copied, into memory that is allocated once.

    Args:
        model: whose buffers; none are added later.
        enabled: ``False`` does nothing at all.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> snapshot = BufferSnapshot(norm, enabled=True)
    >>> snapshot.take_()
    >>> _ = norm(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> snapshot.restore_()
    >>> norm.running_mean
    tensor([0., 0.])
    """

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._buffers: list[Tensor] = list(model.buffers()) if enabled else []
        self._copies = [one.detach().clone() for one in self._buffers]
        self.taken = False

    @property
    def copies(self) -> list[Tensor]:
        """What would be restored, for a checkpoint within a window."""
        return self._copies

    def take_(self) -> None:
        """Copy every buffer."""
        self.taken = True
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)

    def restore_(self, skipped: Tensor | None = None) -> None:
        """Give every buffer its bits back.

        Args:
            skipped: on an accelerator, fp32 scalar, 1.0 where they are to be given back; ``None`` means yes.
        """
        if not self.taken:
            return
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            buffer.copy_(copy if skipped is None else torch.where(skipped != 0, copy, buffer))

    def load_(self, copies: list[Tensor]) -> None:
        """Take back a snapshot from a checkpoint within a window."""
        self.taken = True
        for copy, saved in zip(self._copies, copies, strict=True):
            copy.copy_(saved)

    @property
    def needed(self) -> bool:
        """Whether there is anything to restore."""
        return bool(self._buffers)
