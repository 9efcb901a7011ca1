"""How a model's parameters and a window's micro-steps are dealt to ranks: the geometry alone, without a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["LAYOUTS", "PARAMETERS", "Layout"]

Array = np.ndarray[Any, np.dtype[Any]]

PARAMETERS = ("column.weight", "column.bias", "row.weight", "row.bias", "gain")
"""The model of every layout: two linears as tensor parallelism splits them, and a vector that it leaves whole."""

_SPLIT: tuple[int | None, ...] = (0, 0, 1, None, None)
"""The dimension along which tensor parallelism splits each parameter."""

_PARTIAL = PARAMETERS.index("row.bias")
"""A parameter of which tensor parallel ranks hold copies, each with a part of the gradient's sum."""

_STAGE = (0, 0, 1, 1, 1)
"""The stage of a pipeline of two that trains each parameter."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread training over ranks.

    Ranks count through tensor parallelism first, then shards, then replicas, then stages.

    Args:
        name: as in the claims' ids.
        replicas: ranks, or sets of shards, with a copy each and a share of every window.
        shards: ranks with a shard each and a share of every window.
        tensor: ranks that split the linears between them and see the same micro-steps.
        stages: of a pipeline.
    """

    name: str
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    stages: int = 1

    @property
    def shares(self) -> int:
        """Into how many shares a window's micro-steps are dealt."""
        return self.replicas * self.shards

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.shares * self.tensor * self.stages

    def micro_steps(self, rank: int, count: int) -> range:
        """Which of a window's ``count`` micro-steps a rank computes.

        >>> LAYOUTS["fsdp2-2"].micro_steps(1, 4)
        range(2, 4)
        """
        length, share = count // self.shares, rank // self.tensor % self.shares
        return range(share * length, (share + 1) * length)

    def trains(self, rank: int, count: int = len(PARAMETERS)) -> list[int]:
        """The places of the parameters, among ``count``, of which a rank holds something, or an empty part.

        >>> LAYOUTS["pp-2"].trains(0)
        [0, 1]
        """
        stage = rank // (self.shares * self.tensor)
        return [place for place in range(count) if self.stages == 1 or _STAGE[place] == stage]

    def computed(self, rank: int, place: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of a parameter for which a rank's backward gives a gradient.

        >>> LAYOUTS["tp-2"].computed(1, 2, (3, 4))
        (slice(0, 3, None), slice(2, 4, None))
        """
        cut = [slice(0, size) for size in shape]
        dimension = _SPLIT[place] if self.tensor > 1 else None
        if dimension is not None:
            cut[dimension] = _chunk(cut[dimension], self.tensor, rank % self.tensor)
        return tuple(cut)

    def held(self, rank: int, place: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of a parameter that a rank holds between steps.

        >>> LAYOUTS["tp-fsdp2-4"].held(3, 0, (4, 3))
        (slice(3, 4, None), slice(0, 3, None))
        """
        first, *rest = self.computed(rank, place, shape)
        return (_chunk(first, self.shards, rank // self.tensor % self.shards), *rest)

    def addends(self, rank: int, place: int, gradient: Array) -> Array:
        """What a rank's backward adds to a parameter's gradient, given the whole one.

        Ranks that hold copies of ``row.bias`` compute its elements in turn; their gradients are to be added up.

        >>> [LAYOUTS["tp-2"].addends(rank, 3, np.float32([1, 2, 3])).tolist() for rank in range(2)]
        [[1.0, 0.0, 3.0], [0.0, 2.0, 0.0]]
        """
        if self.tensor > 1 and place == _PARTIAL:
            return np.where(np.arange(gradient.size) % self.tensor == rank % self.tensor, gradient, np.float32(0))
        return gradient[self.computed(rank, place, gradient.shape)]

    def computes(self, rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
        """Every (place, flat element) whose gradient this rank computes and no other one of its share does alone.

        >>> LAYOUTS["tp-2"].computes(1, ((2, 1), (2,), (1, 2), (1,), (1,)))
        [(0, 1), (1, 1), (2, 1)]
        """
        found = []
        for place in self.trains(rank):
            if self.tensor > 1 and _SPLIT[place] is None and place != _PARTIAL:
                continue
            numbers = np.arange(1, int(np.prod(shapes[place])) + 1).reshape(shapes[place])
            found += [(place, int(one) - 1) for one in self.addends(rank, place, numbers).reshape(-1) if one]
        return found


def _chunk(of: slice, count: int, place: int) -> slice:
    """``torch.chunk``'s rule: parts of one size from the front, the last ones shorter or empty."""
    size = -(-(of.stop - of.start) // count)
    return slice(min(of.start + place * size, of.stop), min(of.start + (place + 1) * size, of.stop))


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(name="one-process"),
        Layout(name="ddp-2", replicas=2),
        Layout(name="fsdp2-2", shards=2),
        Layout(name="fsdp2-4", shards=4),
        Layout(name="hsdp-4", replicas=2, shards=2),
        Layout(name="tp-2", tensor=2),
        Layout(name="pp-2", stages=2),
        Layout(name="tp-fsdp2-4", shards=2, tensor=2),
    )
}
"""The layouts that claims speak about, by name."""
