"""Who holds which part of which parameter: the exchange that lets every logical number count once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mp_torch.ranks.local import local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["Layout", "Piece", "piece_of", "spread_like"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a logical parameter.

    Args:
        stage: of the pipeline; the same name in two stages is two parameters.
        name: the model's name for the parameter.
        offset: of the block's first element, in each dimension.
        shape: of the block; an empty block has a zero in it.
        whole: shape of the logical parameter.
    """

    stage: int
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


def piece_of(name: str, parameter: Tensor, stage: int = 0) -> Piece:
    """What this rank holds of a parameter.

    >>> piece_of("weight", torch.zeros(2, 3))
    Piece(stage=0, name='weight', offset=(0, 0), shape=(2, 3), whole=(2, 3))
    """
    whole = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Piece(stage, name, (0,) * len(whole), whole, whole)
    mesh = parameter.device_mesh
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    return Piece(stage, name, tuple(offset), tuple(shape), whole)


def spread_like(parameter: DTensor, part: Tensor) -> DTensor:
    """A DTensor of the parameter's layout from this rank's part of it."""
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class Layout:
    """The pieces of all ranks, exchanged once, and where each logical parameter stands among all.

    A piece that several ranks hold belongs to the first of them, and only its owner's sums count. Making one is
    collective.

    Args:
        parameters: this rank's, by name.
        group: the ranks that decide together.
        stage: of the pipeline.
    """

    def __init__(self, parameters: Mapping[str, Tensor], group: ProcessGroup, stage: int = 0) -> None:
        mine = {name: piece_of(name, parameter, stage) for name, parameter in parameters.items()}
        everybody: list[dict[str, Piece]] = [{} for _ in range(group.size())]
        distributed.all_gather_object(everybody, mine, group=group)
        owner: dict[Piece, int] = {}
        for rank, pieces in enumerate(everybody):
            for piece in pieces.values():
                owner.setdefault(piece, rank)
        logical = {(piece.stage, name): 0 for pieces in everybody for name, piece in pieces.items()}
        place = {key: index for index, key in enumerate(sorted(logical, key=lambda key: key[0]))}  # stable: model order
        self.count = len(place)
        names = [name for _, name in place]
        self.names = [name if names.count(name) == 1 else f"{name} of stage {stage}" for stage, name in place]
        self.stages = len({stage for stage, _ in place})
        self.pieces = {id(parameters[name]): piece for name, piece in mine.items()}
        self.device = next((local(parameter).device for parameter in parameters.values()), torch.device("cpu"))
        first = {pieces[name].stage: rank for rank, pieces in reversed(list(enumerate(everybody))) for name in pieces}
        self.first_of_stage = first.get(stage) == group.rank()
        self._place = {id(parameters[name]): place[stage, name] for name in mine}
        self._owned = {id(parameters[name]): owner[piece] == group.rank() for name, piece in mine.items()}

    def places(self, parameters: Sequence[Tensor]) -> list[int]:
        """Where these parameters stand among all logical ones."""
        return [self._place[id(parameter)] for parameter in parameters]

    def spread(self, values: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Values of this rank's parameters at their places, and zero where another rank counts.

        What is not finite counts wherever it is: a replica that overflowed alone must stop everybody.
        """
        owned = torch.tensor([self._owned[id(one)] for one in parameters], dtype=torch.bool, device=values.device)
        whole = values.new_zeros(self.count)
        whole[self.places(parameters)] = torch.where(owned | ~values.isfinite(), values, 0.0)
        return whole
