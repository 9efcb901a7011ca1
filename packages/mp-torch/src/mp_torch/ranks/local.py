"""One process: everything it knows is already agreed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

__all__ = ["LocalRanks", "cast_", "like", "local", "place_of"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds; a plain tensor is its own.

    >>> import torch
    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # only sharded tensors know the word


def place_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a tensor begins, and the whole's shape.

    >>> import torch
    >>> place_of(torch.ones(2, 3))
    ((0, 0), (2, 3))
    """
    if not hasattr(tensor, "to_local"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from mp_torch.ranks.layout import piece_of  # DTensor is slow to import, and was imported if this is one

    piece = piece_of("", tensor)
    return piece.offset, piece.whole


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is laid out over the ranks as the parameter is, from this rank's part of it.

    >>> import torch
    >>> like(torch.ones(2), torch.zeros(2))
    tensor([0., 0.])
    """
    if not hasattr(parameter, "to_local"):
        return part
    from mp_torch.ranks.layout import spread_like

    return spread_like(parameter, part)  # type: ignore[arg-type]  # it has to_local


def cast_(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter in place; whoever holds it goes on holding it.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> cast_(parameter, torch.bfloat16)
    >>> parameter.dtype
    torch.bfloat16
    """
    if not hasattr(parameter, "to_local"):
        parameter.data = parameter.data.to(dtype)
        return
    import torch

    cast = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
    # A sharded tensor keeps its dtype whatever its data become.
    torch.utils.swap_tensors(parameter, cast)  # type: ignore[no-untyped-call]  # torch's own


class LocalRanks:
    """A single process.

    >>> LocalRanks().count
    1
    """

    prefix = ""
    """Nothing stands before the names of a checkpoint."""

    sums_tell_all = True
    """There is nobody else."""

    opens_windows = False
    """``backward()`` is the engine's."""

    sums_apart = False
    """There is one sum."""

    @property
    def count(self) -> int:
        """One."""
        return 1

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  # nobody to exchange with
        """Nothing to hold back."""
        return nullcontext()

    def average_(self, sums: Sequence[torch.Tensor]) -> None:
        """They are the mean."""

    def around(self, action: str) -> AbstractContextManager[None]:  # noqa: ARG002  # nobody to warn
        """Nobody waits for this one."""
        return nullcontext()

    def tensor_sums(self, sums: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """The sums themselves."""
        return sums

    def tensor_maxima(self, maxima: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """The maxima themselves."""
        return maxima

    def first_nonfinite(
        self, finite: torch.Tensor, sums: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Callable[[], tuple[str | None, str | None]] | None:
        """This process can tell from what it knows."""
        del finite, sums, parameters
        return None

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are the first one's."""

    def require_same(self, what: Mapping[str, object]) -> None:
        """Nobody could differ."""

    def everybody(self, value: Any) -> list[Any]:
        """What this one says."""
        return [value]

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
