"""Pipeline stages: every rank trains parameters of its own, and all of them move one loss scale by one decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from mp_torch.ranks.fsdp2 import ShardedRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

__all__ = ["PipelineRanks", "ScaledGradient"]

_NONE = 2**62  # above every code


class ScaledGradient(torch.autograd.Function):
    """The loss as it is, whose gradient starts with the loss scale instead of one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, seed: Tensor) -> Tensor:
        """The loss itself, so that what a schedule reports needs no unscaling."""
        ctx.save_for_backward(seed)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """What the schedule asks for, times the scale, in fp32."""
        (seed,) = ctx.saved_tensors
        return gradients[0] * seed, None


class PipelineRanks(ShardedRanks):
    """The ranks of a pipeline; within a stage parameters may be sharded.

    Args:
        model: this rank's stages.
        parameters: the parameters that are trained here, by name.
        group: the ranks that decide together; all ranks unless given.
        stage: this rank's place in the pipeline; ranks that hold the same stage have the same.
    """

    sums_tell_all = False
    """Stages have gradients of their own."""

    opens_windows = True
    """Schedules run backward themselves; ``step()`` is the end of a micro-step."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Tensor], group: ProcessGroup | None, stage: int
    ) -> None:
        super().__init__(model, parameters, group, stage)
        self.prefix = f"stage {stage}/"
        self._plain = []  # a stage's parameters are its own

    def scaled(self, loss: Tensor, seed: Tensor) -> Tensor:
        """The loss, whose gradient starts with ``seed``."""
        scaled: Tensor = ScaledGradient.apply(loss, seed)  # type: ignore[no-untyped-call]  # torch's own
        return scaled

    def first_nonfinite(
        self, finite: Tensor, sums: Tensor, parameters: Sequence[Tensor]
    ) -> Callable[[], tuple[str | None, str | None]]:
        """Agree on the first parameter that is not finite, over all stages. One collective, no host sync."""
        places = torch.tensor(self.layout.places(parameters), dtype=torch.int64, device=sums.device)
        codes = torch.where(finite, _NONE, 2 * places + (~sums.isnan()).long())  # odd: infinite
        code = torch.cat((codes, codes.new_full((1,), _NONE))).amin()
        distributed.all_reduce(code, op=distributed.ReduceOp.MIN, group=self.group)

        def read() -> tuple[str | None, str | None]:
            value = int(code)
            if value == _NONE:
                return None, None
            return self.layout.names[value // 2], "Inf" if value % 2 else "NaN"

        return read
