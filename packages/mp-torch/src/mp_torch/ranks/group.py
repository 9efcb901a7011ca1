"""Several ranks that decide together: every sum counts each logical number once, every flag is raised for all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from mp_torch.errors import AmpConfigError
from mp_torch.ranks.failure import Alarm
from mp_torch.ranks.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["GroupRanks"]

SUM, MAX = distributed.ReduceOp.SUM, distributed.ReduceOp.MAX


class GroupRanks:
    """The ranks of a process group. Making one is collective: the ranks exchange who holds what.

    Args:
        parameters: the parameters that this rank trains, by the model's names.
        group: the ranks that decide together; all ranks unless given.
        stage: this rank's stage of a pipeline.
    """

    def __init__(self, parameters: Mapping[str, Tensor], group: ProcessGroup | None = None, stage: int = 0) -> None:
        chosen = distributed.group.WORLD if group is None else group
        assert chosen is not None, "torch.distributed runs"
        self.group: ProcessGroup = chosen
        self.stage = stage
        self.layout = Layout(parameters, self.group, stage)
        self.alarm = Alarm(distributed.get_rank())

    prefix = ""
    """Ranks hold the same names; a checkpoint needs nothing before them."""

    sums_tell_all = True
    """Ranks have gradients for the same logical tensors."""

    opens_windows = False
    """``backward()`` is the engine's."""

    sums_apart = False
    """What is kept beside the gradients was exchanged before."""

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002  # nothing is exchanged here
        """Gradients stay as backward made them."""
        with self.alarm.around("backward()"):
            yield

    def average_(self, sums: Sequence[Tensor]) -> None:
        """They are averaged already."""

    def around(self, action: str) -> AbstractContextManager[None]:
        """Watched over by the alarm."""
        return self.alarm.around(action)

    def tensor_sums(self, sums: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Add what the ranks hold of each logical tensor; a part that several hold counts once. One collective."""
        sums = sums.to(self.layout.device)  # where there is no gradient they are made anywhere
        total = self._reduced(self.layout.spread(sums, parameters), SUM)
        self.alarm.agreed = self.sums_tell_all
        return total[self.layout.places(parameters)]

    def tensor_maxima(self, maxima: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The largest over each logical tensor; NaN if a part of it is. One collective."""
        maxima = maxima.to(self.layout.device)
        unknown = maxima.isnan()
        pair = [self.layout.spread(one, parameters) for one in (torch.where(unknown, 0.0, maxima), unknown.to(maxima))]
        agreed = self._reduced(torch.stack(pair), MAX)
        self.alarm.agreed = self.sums_tell_all
        peak, nan = agreed[:, self.layout.places(parameters)].unbind()
        return torch.where(nan != 0, torch.nan, peak)

    def first_nonfinite(
        self, finite: Tensor, sums: Tensor, parameters: Sequence[Tensor]
    ) -> Callable[[], tuple[str | None, str | None]] | None:
        """Every rank can tell from what it knows."""
        del finite, sums, parameters
        return None

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the first one's values. Collective."""
        for one in tensors:
            distributed.broadcast(one.view(torch.uint8) if one.dim() else one, group=self.group, group_src=0)

    def require_same(self, what: Mapping[str, Any]) -> None:
        """Refuse to train with ranks that were told different things. Collective.

        Args:
            what: the settings.

        Raises:
            AmpConfigError: on every rank, with the first difference.
        """
        everybody: list[Mapping[str, Any]] = self.everybody(dict(what))
        for rank, other in enumerate(everybody):
            for key, value in everybody[0].items():
                if other.get(key) != value:
                    raise AmpConfigError(
                        f"{key}={value!r} on rank 0 and {key}={other.get(key)!r} on rank {rank}: ranks that decide "
                        "together need the same settings; build every engine from one config"
                    )

    def everybody(self, value: Any) -> list[Any]:
        """What each rank says, in their order. Collective."""
        said: list[Any] = [None] * self.count
        distributed.all_gather_object(said, value, group=self.group)
        return said

    def totals(self, totals: Tensor) -> Tensor:
        """Add the stages' totals; where there is one stage they are complete."""
        if self.layout.stages == 1:
            return totals
        mine = totals if self.layout.first_of_stage else torch.zeros_like(totals)
        return self._reduced(mine, SUM)

    def total_maxima(self, maxima: Tensor) -> Tensor:
        """The largest over the stages."""
        return maxima if self.layout.stages == 1 else self._reduced(maxima, MAX)

    def any(self, flags: Tensor) -> Tensor:
        """Which flags are set on any rank. One collective."""
        flags = self._reduced(flags, MAX)
        self.alarm.agreed = True
        return flags

    def any_gradient(self, here: bool) -> bool:
        """Whether any rank has a gradient. One collective, and the host waits for it."""
        flag = torch.tensor(float(here), device=self.layout.device)
        return bool(self._reduced(flag, MAX).item())

    def _reduced(self, values: Tensor, op: distributed.ReduceOp.RedOpType) -> Tensor:
        values = values.clone()
        distributed.all_reduce(values, op=op, group=self.group)
        return values
