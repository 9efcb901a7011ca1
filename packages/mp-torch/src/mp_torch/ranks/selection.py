"""Who trains together, told from the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed

from mp_torch.ranks.local import LocalRanks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from mp_torch.ranks.base import Ranks

__all__ = ["ranks_of"]


def ranks_of(model: nn.Module, parameters: Mapping[str, Tensor], *, reduce_dtype: str, divide: str) -> Ranks:
    """The ranks that hold parts of a model.

    A model in ``DistributedDataParallel`` has its group's ranks, one with DTensor parameters those of their meshes. Any
    other model is this process's own, also where ``torch.distributed`` runs: ``engine.shard()`` and
    ``engine.scale_fn()`` say otherwise. Collective where there are several.

    Args:
        model: wrapped or sharded already, or plain.
        parameters: those that are trained, by name.
        reduce_dtype: what gradients travel in under ``DistributedDataParallel``.
        divide: where their sum is divided.

    >>> import torch
    >>> ranks_of(torch.nn.Linear(1, 1), {}, reduce_dtype="fp32", divide="before").count
    1
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return LocalRanks()
    from torch.distributed.tensor import DTensor  # slow to import, and only ever needed here
    from torch.nn.parallel import DistributedDataParallel

    from mp_torch.ranks.ddp import DataParallelRanks
    from mp_torch.ranks.fsdp2 import ShardedRanks, group_of

    if isinstance(model, DistributedDataParallel):
        return DataParallelRanks(model, parameters, reduce_dtype=reduce_dtype, divide=divide)
    if any(isinstance(one, DTensor) for one in parameters.values()):
        return ShardedRanks(model, parameters, group_of(list(parameters.values())))
    return LocalRanks()
