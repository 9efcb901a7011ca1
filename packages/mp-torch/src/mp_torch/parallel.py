"""How an engine goes over to many ranks: replicas, shards, pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mp_torch import sharded_checkpoint
from mp_torch.errors import AmpConfigError, AmpStateError
from mp_torch.ranks import Sharding, pipelined, ranks_of, replicated, sharded_
from mp_torch.scaling import MovingScale

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor, nn

    from mp_torch.assembly import Assembly
    from mp_torch.config import AmpConfig
    from mp_torch.devices import Device
    from mp_torch.engine import AmpEngine
    from mp_torch.phase import Phase
    from mp_torch.ranks import Ranks
    from mp_torch.ranks.base import DeviceMesh, ProcessGroup

__all__ = ["ManyRanks"]

_LOWERED_OPS = ("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
                "conv_transpose3d", "multi_head_attention_forward")  # fmt: skip
"""What modules call that travel in 16 bits; a rule of the user's for one of them lets all travel as stored."""


class ManyRanks:
    """The part of an engine that knows how its model is spread."""

    assembly: Assembly
    config: AmpConfig
    device: Device
    model: nn.Module
    phase: Phase
    ranks: Ranks
    scale: MovingScale
    update_index: int

    def replicate(self, group: ProcessGroup | None = None, **options: Any) -> nn.Module:
        """Train a replica on every rank, by ``DistributedDataParallel``.

        Gradients are averaged in ``config.reduce_dtype`` and divided where ``config.divide`` says, in the last
        micro-step of a window only. Collective.

        Args:
            group: the ranks; all unless given.
            options: of ``DistributedDataParallel``, such as ``find_unused_parameters``.

        Returns:
            The wrapped model, to be called in the model's place.

        Raises:
            AmpStateError: the engine has stepped already, or torch.distributed does not run.
        """
        self._require_fresh("replicate()")
        wrapped: nn.Module = replicated(self.model, group, **options)
        self._meet_ranks(wrapped)
        for part in self.assembly.parts:  # the wrapper gave every rank the first one's parameters
            self.ranks.broadcast_(list(part.weight.state().values()))
            part.weight.touch()
        return wrapped

    def shard(
        self,
        mesh: DeviceMesh | None = None,
        *,
        param_dtype: str | None = "auto",
        reduce_dtype: str | None = None,
        blocks: Collection[str] | None = None,
        offload: bool = False,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """Shard the model in place by FSDP2, with masters and moments.

        Modules whose parameters autocast casts before each use, such as linears, travel in the compute dtype: the same
        bits are computed with half the traffic. Norms, embeddings and what the engine's rules keep in fp32 travel as
        stored. Inputs are not cast. Gradients are kept in the parameters' dtype. Collective.

        Args:
            mesh: one dimension to shard over, two to replicate over the first and shard over the second; all ranks
                unless given. Parameters that tensor parallelism laid out already keep that layout as well.
            param_dtype: "auto" as described, ``None`` for everything as stored.
            reduce_dtype: what gradients travel in; ``config.reduce_dtype`` unless given. A 16-bit one is added in fp32,
                and replicas of a mesh of two dimensions exchange fp32.
            blocks: names of modules that are gathered as one; the model's layers unless given.
            offload: keep shards, masters and moments in host memory.
            reshard_after_forward: ``True`` frees gathered parameters after forward and gathers them again for backward
                (ZeRO-3), ``False`` keeps them until backward is over (ZeRO-2); unless given all are freed but the
                outermost, which backward needs at once.

        Raises:
            AmpStateError: the engine has stepped already, or torch.distributed does not run.
            AmpConfigError: a dtype that the compute dtype contradicts, or no module of such a name.
        """
        self._require_fresh("shard()")
        how = Sharding(
            lower=self._travelling(param_dtype),
            kept=set(self.assembly.kept),
            blocks=None if blocks is None else self._known_modules(blocks),
            reduce_dtype=self.config.reduce_dtype if reduce_dtype is None else reduce_dtype,
            divide=self.config.divide,
            offload=offload,
            reshard=reshard_after_forward,
        )
        sharded_(self.model, mesh, how)
        self.assembly.relayout_()
        self.device = self.assembly.device
        state, self.scale = self.scale.state, MovingScale(self.scale.policy, self.device)
        self.scale.resume_(state)
        self._meet_ranks(self.model)

    def scale_fn(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        stage: int | None = None,
        group: ProcessGroup | None = None,
    ) -> Callable[[Any, Any], Tensor]:
        """The loss function for a schedule of ``torch.distributed.pipelining``, whose gradients are scaled.

        Every stage calls this, also those that compute no loss: the engine then decides with all stages and moves one
        loss scale with them. The schedule's ``step()`` runs inside ``engine.autocast()``; ``engine.step()`` follows it.
        Collective.

        Args:
            loss_fn: of output and target.
            stage: this rank's place in the pipeline; its rank in ``group`` unless given.
            group: the ranks that decide together; all unless given.

        Returns:
            The same losses, whose gradient starts with the loss scale.

        Raises:
            AmpStateError: the engine has stepped already, or torch.distributed does not run.
        """
        self._require_fresh("scale_fn()")
        parameters = self.assembly.named
        self.ranks = ranks = pipelined(self.model, parameters, group, stage)
        ranks.require_same(self.config.to_dict())
        for part, place in zip(self.assembly.parts, ranks.layout.places(list(parameters.values())), strict=True):
            part.key = place  # random bits go by the parameter's place in the whole pipeline

        def scaled(output: Any, target: Any) -> Tensor:
            loss = loss_fn(output, target).float()
            return ranks.scaled(loss, self.scale.seed(loss, None, 1.0))

        return scaled

    def save_sharded(self, folder: str | Path) -> None:
        """Write model and engine through ``torch.distributed.checkpoint``, each rank its own parts. Collective.

        The last whole checkpoint of the folder stays until the new one is whole.

        Args:
            folder: of the run's checkpoints.
        """
        sharded_checkpoint.save(cast("AmpEngine", self), Path(folder))

    def load_sharded(self, folder: str | Path) -> None:
        """Read what any number of ranks saved, also in one process: parameters, masters, moments, loss scale.

        Args:
            folder: as for ``save_sharded``.

        Raises:
            CheckpointError: there is no whole checkpoint, or it is of another run; nothing was changed.
        """
        sharded_checkpoint.load_(cast("AmpEngine", self), Path(folder))

    def _require_fresh(self, action: str) -> None:
        stepped = self.update_index or self.phase.open or any(one.state for one in self.assembly.optimizers)
        if stepped:
            raise AmpStateError(
                f"{action} after {self.update_index} updates: masters and moments are laid out already; call it right "
                "after the engine is built, and load checkpoints after it"
            )

    def _meet_ranks(self, model: nn.Module) -> None:
        self.ranks = ranks_of(
            model, self.assembly.named, reduce_dtype=self.config.reduce_dtype, divide=self.config.divide
        )
        self.ranks.require_same(self.config.to_dict())

    def _travelling(self, param_dtype: str | None) -> torch.dtype | None:
        """The dtype of what autocast casts anyway; ``None`` where all travel as stored."""
        row = self.assembly.row
        if param_dtype is None or row.parameter != torch.float32 or row.compute is None:
            return None
        named = {"auto": row.compute, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        if named.get(param_dtype) not in (row.compute, torch.float32):
            raise AmpConfigError(
                f"param_dtype={param_dtype!r} with precision={row.name!r}: modules compute in {row.compute}, and "
                "parameters that travel in another 16-bit dtype would be rounded twice; use 'auto', or None for fp32"
            )
        ruled = [op for op in self.config.op_rules if op in _LOWERED_OPS]
        return None if ruled or param_dtype == "fp32" else row.compute

    def _known_modules(self, names: Collection[str]) -> Collection[str]:
        known = dict(self.model.named_modules())
        for name in names:
            if name not in known:
                raise AmpConfigError(
                    f"blocks: {name!r} names no module of {type(self.model).__name__}; its modules are "
                    f"{', '.join(one for one in known if one)}"
                )
        return names
