"""Who trains together, told from the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mp_torch.errors import AmpStateError
from mp_torch.ranks.local import LocalRanks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from mp_torch.ranks.base import Ranks
    from mp_torch.ranks.pipeline import PipelineRanks

__all__ = ["Sharding", "pipelined", "ranks_of", "replicated", "sharded_", "unwrapped", "why_fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is sharded.

    Args:
        lower: dtype in which modules travel that autocast casts anyway; ``None``: all travel as stored.
        kept: modules that compute in fp32 by the engine's rules.
        blocks: modules gathered as one; ``None`` finds the model's layers.
        reduce_dtype: dtype in which gradients travel, a key of ``mp_torch.ranks.average.WIRE``.
        divide: where their sum is divided.
        offload: keep shards in host memory.
        reshard: free gathered parameters after forward; ``None`` frees all but the model's own.
    """

    lower: torch.dtype | None
    kept: Collection[str]
    blocks: Collection[str] | None
    reduce_dtype: str
    divide: str
    offload: bool
    reshard: bool | None = None


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

    from mp_torch.ranks.ddp import DataParallelRanks
    from mp_torch.ranks.fsdp2 import ShardedRanks, group_of

    if isinstance(model, DistributedDataParallel):
        return DataParallelRanks(model, parameters, reduce_dtype=reduce_dtype, divide=divide)
    if any(isinstance(one, DTensor) for one in parameters.values()):
        return ShardedRanks(model, parameters, group_of(list(parameters.values())))
    return LocalRanks()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that ``DistributedDataParallel`` wraps, whose names a checkpoint of any layout has.

    >>> from torch import nn
    >>> unwrapped(nn.Linear(1, 1))
    Linear(in_features=1, out_features=1, bias=True)
    """
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def why_fixed(model: nn.Module) -> str | None:
    """Why the parameters of a model cannot change their dtype any more, and the way out; ``None`` if they can.

    >>> from torch import nn
    >>> why_fixed(nn.Linear(1, 1)) is None
    True
    """
    if isinstance(model, DistributedDataParallel):
        return (
            "DistributedDataParallel has made its buckets; give the plain model to the engine and call the one that "
            "engine.replicate() returns"
        )
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        return "FSDP has made its shards; give the plain model to the engine and call engine.shard()"
    return None


def replicated(model: nn.Module, group: ProcessGroup | None, **options: Any) -> DistributedDataParallel:
    """The model in ``DistributedDataParallel``, which is to be called in its place."""
    _require_running("replicate()")
    options.setdefault("gradient_as_bucket_view", True)  # else every gradient is held twice
    return DistributedDataParallel(model, process_group=group, **options)


def sharded_(model: nn.Module, mesh: DeviceMesh | None, how: Sharding) -> None:
    """Shard a model in place by FSDP2.

    Args:
        model: whole, the same on every rank.
        mesh: ``None`` shards over all ranks.
        how: what travels how.
    """
    _require_running("shard()")
    from torch.distributed.device_mesh import init_device_mesh

    from mp_torch.ranks.average import WIRE
    from mp_torch.ranks.fsdp2 import shard_
    from mp_torch.ranks.sharding import default_blocks, plan

    if mesh is None:
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (distributed.get_world_size(),))
    blocks = default_blocks(model) if how.blocks is None else how.blocks
    units = plan(model, lower=how.lower, kept=how.kept, blocks=blocks)
    shard_(
        model,
        mesh,
        units,
        reduce_dtype=WIRE[how.reduce_dtype],
        divide=how.divide,
        offload=how.offload,
        reshard=how.reshard,
    )


def pipelined(
    model: nn.Module, parameters: Mapping[str, Tensor], group: ProcessGroup | None, stage: int | None
) -> PipelineRanks:
    """The ranks of a pipeline, of which this one is ``stage``: its rank in the group unless given."""
    _require_running("scale_fn()")
    from mp_torch.ranks.pipeline import PipelineRanks

    place = distributed.get_rank(group) if stage is None else stage
    return PipelineRanks(model, parameters, group, place)


def _require_running(asked: str) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise AmpStateError(
            f"{asked} needs torch.distributed to run; start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
