"""DistributedDataParallel: the same gradients on every rank, exchanged in the dtype and divided where the user says."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.futures import Future

from mp_torch.errors import AmpConfigError, AmpStateError
from mp_torch.ranks.average import WIRE, Exchange, Room, exchange_of, factors, mean_, wide_mean_in_future
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
        self._rooms = deque((Room(self._wire), Room(self._wire)))
        self._under_way: deque[tuple[Exchange, Future[Tensor]]] = deque()
        self._wrapper = weakref.ref(model)  # it holds the hook: in a circle the group's connections would not close
        self._met, self._ever_met = False, False
        try:
            model.register_comm_hook(None, lambda state, bucket: self._hooked(bucket))  # noqa: ARG005  # torch asks
        except RuntimeError as error:
            raise AmpConfigError(
                "the model has a communication hook of its own, and DistributedDataParallel takes one; leave it to the "
                "engine (reduce_dtype='fp16', divide='after'), or wrap the model anew"
            ) from error

    def _hooked(self, bucket: GradBucket) -> Future[Tensor]:
        self._ever_met = True
        if self._exchange:
            self._met = True
            bucket.buffer()[:1].add_(0.0)  # no minus zero, which says that there is no gradient at all
        return self._exchanged(bucket)

    def _exchanged(self, bucket: GradBucket) -> Future[Tensor]:
        if self._exchange and self._wire == torch.float32:
            return wide_mean_in_future(bucket.buffer(), self.group, self._divide)
        done: Future[Tensor] = Future()
        if not self._exchange:
            done.set_result(bucket.buffer())
            return done
        if self._under_way:  # what the last bucket waits for had time to come while this one was made
            self._under_way[-1][0].add()
        if len(self._under_way) == len(self._rooms):
            self._finish_first()
        self._rooms.rotate()
        self._under_way.append((exchange_of(bucket.buffer(), self.group, self._divide, self._rooms[0]), done))
        if bucket.is_last():
            self._under_way[-1][0].add()
            while self._under_way:
                self._finish_first()
        return done

    def _finish_first(self) -> None:
        exchange, done = self._under_way.popleft()
        done.set_result(exchange.finish())

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Exchange gradients in the last micro-step only; in the others they are added up on their rank."""
        self._exchange = last
        if all(one.grad is None for one in self._model().module.parameters()):  # else another loss of a window that met
            self._met = False
        self._under_way.clear()  # a window that failed may have left some
        with super().micro_step(last=last):
            yield
            if last and not self._met:
                self._take_part()

    def _model(self) -> DistributedDataParallel:
        model = self._wrapper()
        if model is None:
            raise AmpStateError(
                "the wrapped model is gone, and with it what exchanges gradients between ranks; keep what "
                "engine.replicate() returns and call it in the model's place"
            )
        return model

    def _take_part(self) -> None:
        """Meet the other ranks where the loss touched no parameter here, with what earlier micro-steps left or zeros.

        Where there is nothing at all they are minus zeros: only if all ranks send them their mean is minus zero, and
        nobody has a gradient.
        """
        reducer = self._model().reducer
        buckets = reducer._get_zeros_like_grad_buckets()  # noqa: SLF001  # as torch's own Join
        here = False
        for bucket in buckets:
            bucket.buffer().fill_(-0.0)
            for one, room in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if one.grad is not None:
                    here = True
                    room.copy_(one.grad)
            if here:
                bucket.buffer()[:1].add_(0.0)
        for future in [self._exchanged(bucket) for bucket in buckets]:
            future.wait()
        used = self._used()
        if not here and all(bool((one.buffer().signbit() & (one.buffer() == 0)).all()) for one in buckets):
            return
        for bucket in buckets:
            for one, mean in zip(bucket.parameters(), bucket.gradients(), strict=True):
                one.grad = mean if used is None or id(one) in used else one.grad
        if not self._ever_met:  # the next forward makes the buckets anew, for which no backward may be awaited here
            reducer._reset_state()  # noqa: SLF001
            reducer._push_all_rebuilt_params()  # noqa: SLF001
        self._ever_met = True

    def _used(self) -> set[int] | None:
        """Parameters that any rank's loss touched, where the wrapper looks for those that none did."""
        if not self._model().find_unused_parameters:
            return None
        counts = self._model().reducer._get_local_used_map().zero_()  # noqa: SLF001
        distributed.all_reduce(counts, group=self.group)
        trained = [one for one in self._model().module.parameters() if one.requires_grad]
        return {id(one) for one, count in zip(trained, counts.tolist(), strict=True) if count}

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
