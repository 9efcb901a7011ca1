"""What the engine asks of the processes that train together: agree on norms, on finiteness, on every decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed import ProcessGroup as ProcessGroup  # this package is the only one to name them
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

__all__ = ["Ranks"]


class Ranks(Protocol):
    """All processes that hold a part of the model.

    Every method is collective: all ranks call it at the same place with tensors of the same shape, also a rank that has
    no gradient. None of them reads a value on the host. What they return is equal on all ranks, so that whatever is
    decided from it is decided once.
    """

    prefix: str
    """What stands before this rank's names in a checkpoint of all ranks."""

    sums_tell_all: bool
    """Whether ranks that agree on the tensors' sums agree on everything but a device's own overflow flag."""

    opens_windows: bool
    """Whether ``step()`` ends a micro-step whose backward somebody else ran."""

    sums_apart: bool
    """Whether every rank adds up micro-steps by itself, so that sums kept beside the gradients must be averaged."""

    @property
    def count(self) -> int:
        """How many ranks there are."""

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-step.

        Args:
            last: gradients are exchanged in this one; in the others they stay on their rank.
        """

    def average_(self, sums: Sequence[torch.Tensor]) -> None:
        """Overwrite sums of a window, which ``sums_apart`` kept beside the gradients, by their mean over the ranks.

        Args:
            sums: fp32, of the same shapes on every rank.
        """

    def around(self, action: str) -> AbstractContextManager[None]:
        """Around a part of the training loop: a rank that raises there tells the others, who raise as well.

        Args:
            action: what is done, for the message.
        """

    def tensor_sums(self, sums: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add what the ranks hold of each logical tensor; one that is replicated counts once.

        Args:
            sums: float64, one sum of powers for each of ``parameters``, local.
            parameters: their parameters, which tell how they are laid out.

        Returns:
            float64, the sums over the whole tensors.
        """

    def tensor_maxima(self, maxima: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """As ``tensor_sums``, for the largest magnitude."""

    def first_nonfinite(
        self, finite: torch.Tensor, sums: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Callable[[], tuple[str | None, str | None]] | None:
        """Where ranks know different parameters: agree on the first that is not finite.

        Args:
            finite: one for each parameter.
            sums: their sums, NaN or infinite where not finite.
            parameters: this rank's.

        Returns:
            Reads its name and "NaN" or "Inf" from the device; ``None`` where every rank can tell by itself.
        """

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the first one's values."""

    def require_same(self, what: Mapping[str, object]) -> None:
        """Refuse to train with ranks that were told different things.

        Args:
            what: the settings.

        Raises:
            AmpConfigError: on every rank.
        """

    def everybody(self, value: Any) -> list[Any]:
        """What each rank says, in their order.

        Args:
            value: this rank's; plain Python.
        """

    def totals(self, totals: torch.Tensor) -> torch.Tensor:
        """Add totals over ranks that hold different tensors (pipeline stages).

        Args:
            totals: float64, one for each set of tensors that is clipped together.
        """

    def total_maxima(self, maxima: torch.Tensor) -> torch.Tensor:
        """As ``totals``, for the largest magnitude."""

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Which flags are set on any rank.

        Args:
            flags: fp32, 0.0 or 1.0.
        """

    def any_gradient(self, here: bool) -> bool:
        """Whether any rank has a gradient at all; decides whether a step has anything to do."""
