"""FSDP2: every parameter in shards, gathered in the precision that its module computes in.

``MixedPrecisionPolicy`` is not autocast: it casts whole modules with their inputs, and wants one dtype in a group. Here
autocast goes on deciding op by op, and a policy only says in what dtype a module's parameters travel: in 16 bits where
autocast would cast them anyway, so that nothing changes but the bytes, and as they are stored everywhere else, in
groups of their own. Inputs such as positions are left alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mp_torch.errors import AmpStateError
from mp_torch.ranks.average import mean_, scattered_mean
from mp_torch.ranks.group import GroupRanks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from mp_torch.ranks.sharding import Unit

__all__ = ["ShardedRanks", "group_of", "shard_"]


class _Fp32Sum:
    """A reduce-scatter that sends 16 bits, adds in fp32, and divides by all ranks that share a gradient.

    FSDP, which is told that gradients travel in fp32, hands over and takes back fp32: the mean is not rounded to 16
    bits afterwards, and replicas (HSDP) add theirs in fp32.
    """

    def __init__(self, count: int, wire: torch.dtype, divide: str) -> None:
        self.count, self.wire, self.divide = count, wire, divide

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP's own use."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: Any) -> None:
        """FSDP, which was told to divide by one, asks for a sum."""
        mean = scattered_mean(input_tensor.view(group.size(), -1), group, self.wire, self.divide)
        replicas = self.count // group.size()
        output_tensor.copy_(mean / replicas if replicas != 1 else mean)


def shard_(
    model: nn.Module,
    mesh: DeviceMesh,
    units: Sequence[Unit],
    *,
    reduce_dtype: torch.dtype,
    divide: str,
    offload: bool,
    reshard: bool | None = None,
) -> None:
    """Shard a model in place.

    Args:
        model: whole, the same on every rank.
        mesh: one dimension to shard over, or two: replicate over the first and shard over the second (HSDP).
        units: as ``mp_torch.ranks.sharding.plan``.
        reduce_dtype: dtype in which gradients travel to the rank that adds them, in fp32; replicas exchange fp32.
        divide: as ``mp_torch.ranks.average.factors``, for 16-bit traffic; fp32 is divided on the way.
        offload: keep shards in host memory.
        reshard: free gathered parameters after forward; ``None`` frees all but the model's own.
    """
    offloading = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if offload else OffloadPolicy()
    modules = dict(model.named_modules())
    for unit in units:
        policy = MixedPrecisionPolicy(param_dtype=unit.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(
            modules[unit.name],
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offloading,
            reshard_after_forward=reshard,
        )
    if reduce_dtype != torch.float32:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(_Fp32Sum(mesh.size(), reduce_dtype, divide))  # type: ignore[arg-type]  # by shape


class ShardedRanks(GroupRanks):
    """The ranks of a model some of whose parameters are DTensors: by FSDP2, by tensor parallelism, or by both.

    Args:
        model: sharded already, by ``shard_`` or by the user.
        parameters: the parameters that are trained, by name.
        group: the ranks that decide together; all ranks unless given.
        stage: of the pipeline.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Tensor], group: ProcessGroup | None = None, stage: int = 0
    ) -> None:
        super().__init__(parameters, group, stage)
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._plain = [one for one in parameters.values() if not isinstance(one, DTensor)]
        self._laid_out = [one for one in parameters.values() if isinstance(one, DTensor)]

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Reduce-scatter in the last micro-step only; then bring every gradient to its parameter's layout.

        Raises:
            AmpStateError: FSDP reduced nothing here, because the loss touches no sharded parameter.
        """
        for module in self._sharded:
            module.set_requires_gradient_sync(last, recurse=False)
        with super().micro_step(last=last):
            yield
            if last and self._sharded and all(one.grad is None for one in self._laid_out):
                raise AmpStateError(
                    "the loss touches no sharded parameter on this rank, whose part the others wait for; let it depend "
                    "on what the model returned, such as loss + 0.0 * output.sum()"
                )
        for one in self._laid_out:
            gradient = one.grad
            if isinstance(gradient, DTensor) and gradient.placements != one.placements:
                one.grad = gradient.redistribute(placements=one.placements)
        if self._plain:
            self._average_plain()

    def _average_plain(self) -> None:
        """Parameters that nobody shards have a copy on every rank, and nobody else averages their gradients."""
        here = torch.tensor([float(one.grad is not None) for one in self._plain], device=self.layout.device)
        anywhere = self.any(here).tolist()
        used = [one for one, flag in zip(self._plain, anywhere, strict=True) if flag]
        if not used:
            return
        for one in used:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        flat = torch.cat([one.grad.reshape(-1).float() for one in used if one.grad is not None])
        mean_(flat, self.group, torch.float32, "after")
        for one, part in zip(used, torch.split(flat, [one.numel() for one in used]), strict=True):
            assert one.grad is not None
            one.grad.copy_(part.view_as(one))


def group_of(parameters: Sequence[Tensor]) -> ProcessGroup | None:
    """The ranks that hold parts of these parameters: all ranks, or a group made for them. Collective if it is made."""
    ranks: set[int] = set()
    for one in parameters:
        if isinstance(one, DTensor):
            ranks |= set(one.device_mesh._get_root_mesh().mesh.flatten().tolist())  # noqa: SLF001  # no public way up
    if len(ranks) == distributed.get_world_size():
        return None
    made: ProcessGroup = distributed.new_group(sorted(ranks), use_local_synchronization=True)
    return made
