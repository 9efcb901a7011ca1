"""DistributedDataParallel: the same gradients on every rank, exchanged in the dtype and divided where the user says."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.futures import Future

from mp_torch.errors import AmpConfigError
from mp_torch.ranks.average import WIRE, factors, mean_, mean_in_future
from mp_torch.ranks.group import GroupRanks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["DataParallelRanks"]


class DataParallelRanks(GroupRanks):
    """The ranks of a model that is wrapped in ``DistributedDataParallel``.

    All of them hold the same gradients once these are exchanged. Norms and the decision are exchanged all the same,
    because a rank may have changed its gradients by hand.

    Args:
        model: the wrapped model; gets a communication hook.
        parameters: the parameters that are trained, by name.
        reduce_dtype: what gradients travel in: "fp32", "fp16" or "bf16". They are kept in the parameters' dtype.
        divide: where the sum is divided by the number of ranks: "before", "after" or "split".

    Raises:
        AmpConfigError: an unknown choice, or the model has a communication hook already.
    """

    def __init__(
        self, model: DistributedDataParallel, parameters: Mapping[str, Tensor], *, reduce_dtype: str, divide: str
    ) -> None:
        if reduce_dtype not in WIRE:
            raise AmpConfigError(f"reduce_dtype={reduce_dtype!r} must be one of {', '.join(map(repr, WIRE))}")
        factors(divide, 1)
        super().__init__(parameters, model.process_group)
        self._wire, self._divide, self._exchange = WIRE[reduce_dtype], divide, True
        try:
            model.register_comm_hook(None, lambda state, bucket: self._exchanged(bucket))  # noqa: ARG005  # torch asks
        except RuntimeError as error:
            raise AmpConfigError(
                "the model has a communication hook of its own, and DistributedDataParallel takes one; leave it to the "
                "engine (reduce_dtype='fp16', divide='after'), or wrap the model anew"
            ) from error

    def _exchanged(self, bucket: GradBucket) -> Future[Tensor]:
        if not self._exchange:
            done: Future[Tensor] = Future()
            done.set_result(bucket.buffer())
            return done
        return mean_in_future(bucket.buffer(), self.group, self._wire, self._divide)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Exchange gradients in the last micro-step only; in the others they are added up on their rank."""
        self._exchange = last
        with super().micro_step(last=last):
            yield

    sums_apart = True
    """The hook sees the gradients of one micro-step."""

    def average_(self, sums: Sequence[Tensor]) -> None:
        """One exchange for all, as gradients are exchanged."""
        flat = torch.cat([one.reshape(-1) for one in sums])
        mean_(flat, self.group, self._wire, self._divide)
        for one, mean in zip(sums, torch.split(flat, [one.numel() for one in sums]), strict=True):
            one.copy_(mean.view_as(one))

    def tensor_sums(self, sums: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Every rank has the same gradients, so one that differs is not finite: the largest is the sum of each."""
        return self.tensor_maxima(sums, parameters)

    def any_gradient(self, here: bool) -> bool:
        """Once gradients are exchanged, ranks have the same ones."""
        return here
