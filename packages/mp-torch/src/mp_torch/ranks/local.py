"""One process: everything it knows is already agreed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["LocalRanks"]


class LocalRanks:
    """A single process.

    >>> LocalRanks().count
    1
    """

    @property
    def count(self) -> int:
        """One."""
        return 1

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  # nobody to exchange with
        """Nothing to hold back."""
        return nullcontext()

    def tensor_sums(self, sums: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """The sums themselves."""
        return sums

    def tensor_maxima(self, maxima: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """The maxima themselves."""
        return maxima

    def totals(self, totals: torch.Tensor) -> torch.Tensor:
        """The totals themselves."""
        return totals

    def total_maxima(self, maxima: torch.Tensor) -> torch.Tensor:
        """The maxima themselves."""
        return maxima

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """The flags themselves."""
        return flags

    def any_gradient(self, here: bool) -> bool:
        """What is so here."""
        return here
