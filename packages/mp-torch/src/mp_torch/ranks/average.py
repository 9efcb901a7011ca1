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
from torch.futures import Future

from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["DIVIDE", "WIRE", "factors", "mean_", "mean_in_future", "scattered_mean"]

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
    total = received[0].float()
    for one in received[1:]:
        total = total + one.float()
    return total / after if after != 1 else total


def mean_(flat: Tensor, group: ProcessGroup, wire: torch.dtype, divide: str) -> None:
    """Overwrite a tensor by its mean over the ranks.

    Args:
        flat: floating, one-dimensional; keeps its dtype whatever travels.
        group: the ranks.
        wire: dtype that travels, both to the rank that adds and back.
        divide: as ``factors``.
    """
    mean_in_future(flat, group, wire, divide).wait()


def mean_in_future(flat: Tensor, group: ProcessGroup, wire: torch.dtype, divide: str) -> Future[Tensor]:
    """As ``mean_``, but in fp32 the exchange goes on while the caller computes; the future holds ``flat``."""
    before, after = factors(divide, group.size())
    if wire == torch.float32:
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
    done: Future[Tensor] = Future()
    done.set_result(_mean_of_halves_(flat, group, wire, divide))
    return done


def _mean_of_halves_(flat: Tensor, group: ProcessGroup, wire: torch.dtype, divide: str) -> Tensor:
    """Each rank adds one part of everybody's numbers and sends it to all."""
    count = group.size()
    length = -(-flat.numel() // count)
    parts = torch.nn.functional.pad(flat, (0, count * length - flat.numel())).view(count, length)
    mine = scattered_mean(parts, group, wire, divide).to(wire)
    whole = torch.empty(count * length, dtype=wire, device=flat.device)
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # renamed in 2.13
    gather(whole.view(torch.uint8), mine.view(torch.uint8), group=group)
    return flat.copy_(whole[: flat.numel()])
