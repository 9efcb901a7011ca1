"""The mean of all ranks' gradients: what travels, in which dtype, and where it is divided.

With a 16-bit wire the numbers travel in 16 bits and are added in fp32, by the rank that owns their part, in the order
of the ranks. So 40000 on each of two ranks is 40000 on average, where an fp16 sum would be infinite, and 2**-24 stays
2**-24, where halves of it would be lost.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import distributed

from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.futures import Future

__all__ = [
    "DIVIDE",
    "WIRE",
    "Exchange",
    "Room",
    "exchange_of",
    "factors",
    "mean_",
    "scattered_mean",
    "wide_mean_in_future",
]

WIRE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What gradients may travel in."""

DIVIDE = ("before", "after", "split")
"""Where the sum over ranks is divided by their number."""


def factors(divide: str, count: int) -> tuple[float, float]:
    """What gradients are divided by before and after they are added.

    Args:
        divide: "before" keeps sums small; "after" keeps small gradients; "split" divides by a power of two near the
            square root of the number of ranks before, and by the rest after.
        count: ranks.

    Returns:
        Two factors whose product is ``count``.

    Raises:
        AmpConfigError: no such way.

    >>> factors("before", 8), factors("after", 8), factors("split", 8)
    ((8.0, 1.0), (1.0, 8.0), (2.0, 4.0))
    """
    if divide not in DIVIDE:
        raise AmpConfigError(
            f"divide={divide!r} must be one of {', '.join(map(repr, DIVIDE))}; 'after' loses nothing unless sums "
            "overflow fp32"
        )
    before = {"before": float(count), "after": 1.0, "split": 2.0 ** (int(math.log2(count)) // 2)}[divide]
    return before, count / before


def scattered_mean(parts: Tensor, group: ProcessGroup, wire: torch.dtype, divide: str) -> Tensor:
    """This rank's part of the mean.

    Args:
        parts: ``[ranks, n]``, what this rank has for each rank's part.
        group: the ranks.
        wire: dtype that travels.
        divide: as ``factors``.

    Returns:
        fp32 ``[n]``: row ``rank`` of everybody's ``parts``, widened to fp32, added in the order of the ranks, divided.
    """
    before, after = factors(divide, parts.shape[0])
    sent = (parts / before if before != 1 else parts).to(wire).contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    return _added(received, after, torch.empty(parts.shape[1], dtype=torch.float32, device=parts.device))


def _added(received: Tensor | tuple[Tensor, ...], after: float, total: Tensor) -> Tensor:
    """What each rank sent, in the order of the ranks, each widened to fp32, added into ``total`` and divided."""
    total.copy_(received[0])
    for one in received[1:]:
        total.add_(one)
    return total.div_(after) if after != 1 else total


def mean_(flat: Tensor, group: ProcessGroup, wire: torch.dtype, divide: str) -> None:
    """Overwrite a tensor by its mean over the ranks.

    Args:
        flat: floating, one-dimensional; keeps its dtype whatever travels.
        group: the ranks.
        wire: dtype that travels, both to the rank that adds and back.
        divide: as ``factors``.
    """
    if wire == torch.float32:
        wide_mean_in_future(flat, group, divide).wait()
        return
    exchange = exchange_of(flat, group, divide, Room(wire))
    exchange.add()
    exchange.finish()


def wide_mean_in_future(flat: Tensor, group: ProcessGroup, divide: str) -> Future[Tensor]:
    """As ``mean_`` in fp32, but the exchange goes on while the caller computes; the future holds ``flat``."""
    before, after = factors(divide, group.size())
    wide = flat if flat.dtype == torch.float32 else flat.float()
    if before != 1:
        wide.div_(before)
    exchange = distributed.all_reduce(wide, group=group, async_op=True).get_future()

    def finished(summed: Future[list[Tensor]]) -> Tensor:
        summed.value()  # raises what went wrong
        if after != 1:
            wide.div_(after)
        return flat if wide is flat else flat.copy_(wide)

    whole: Future[Tensor] = exchange.then(finished)
    return whole


class Room:
    """Memory for one exchange after another: on the CPU new memory costs more than what is done in it.

    Args:
        wire: 16-bit dtype that travels.
    """

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire
        self._kept: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, count: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """``count`` numbers of the wire's dtype, or of another, that hold anything."""
        kept = self._kept.get((name, device))
        if kept is None or kept.numel() < count:
            kept = self._kept[name, device] = torch.empty(count, dtype=dtype or self.wire, device=device)
        return kept[:count]


class Exchange:
    """One tensor on its way to its mean, in 16 bits: each rank adds one part of everybody's numbers.

    Making one sends the parts to the ranks that add them; ``add`` adds and sends the sums to all; ``finish`` writes the
    mean. Between these the caller computes. Collective, all three.

    Args:
        flat: floating, one-dimensional; keeps its dtype.
        group: the ranks.
        divide: as ``factors``.
        room: nobody else's until ``finish``.
    """

    def __init__(self, flat: Tensor, group: ProcessGroup, divide: str, room: Room) -> None:
        self._flat, self._group, self._room = flat, group, room
        before, self._after = factors(divide, group.size())
        self._parts, self._splits = self._divided(flat.numel())
        count = math.prod(self._parts)
        self._sent, self._received = (room.take(name, count, flat.device) for name in ("sent", "received"))
        self._sent[: flat.numel()].copy_(flat.div_(before) if before != 1 else flat)
        self._sent[flat.numel() :].zero_()
        self._work = distributed.all_to_all_single(
            self._received.view(torch.uint8),
            self._sent.view(torch.uint8),
            output_split_sizes=self._splits,
            input_split_sizes=self._splits,
            group=group,
            async_op=True,
        )

    def _divided(self, count: int) -> tuple[tuple[int, int], list[int] | None]:
        """Parts and their length, and how many bytes go to each rank if not as many to all."""
        return (self._group.size(), -(-count // self._group.size())), None

    def add(self) -> None:
        """Add this rank's part and send it to all."""
        self._work.wait()
        total = self._room.take("total", self._parts[1], self._flat.device, torch.float32)
        mine = self._sent.view(self._parts)[self._group.rank()]
        mine.copy_(_added(self._received.view(self._parts), self._after, total))
        gather = (
            getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        )  # renamed in 2.13
        self._work = gather(self._sent.view(torch.uint8), mine.view(torch.uint8), group=self._group, async_op=True)

    def finish(self) -> Tensor:
        """The tensor, which holds the mean now."""
        self._work.wait()
        return self._flat.copy_(self._sent[: self._flat.numel()])


class PairExchange(Exchange):
    """Between two ranks: each sends all it has and adds both, which takes as many bytes and half the time.

    The sum of two numbers does not depend on their order, and is not rounded to 16 bits for a way back.
    """

    def _divided(self, count: int) -> tuple[tuple[int, int], list[int] | None]:
        splits = [count * self._room.wire.itemsize] * 2
        splits[self._group.rank()] = 0
        return (1, count), splits

    def add(self) -> None:
        """Nothing to send back."""

    def finish(self) -> Tensor:
        """The tensor, which holds the mean now."""
        self._work.wait()
        flat = self._flat
        narrow = flat.dtype != torch.float32
        total = self._room.take("total", flat.numel(), flat.device, torch.float32) if narrow else flat
        total = _added((self._sent, self._received), self._after, total)
        return flat.copy_(total) if narrow else total


def exchange_of(flat: Tensor, group: ProcessGroup, divide: str, room: Room) -> Exchange:
    """Begin the exchange that suits the number of ranks; arguments as of ``Exchange``."""
    return (PairExchange if group.size() == 2 else Exchange)(flat, group, divide, room)
