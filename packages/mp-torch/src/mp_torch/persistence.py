"""How an engine is saved and taken back: states, files, other scalers' states."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from mp_torch import checkpoint, checkpoint_file, scaler_states
from mp_torch.errors import AmpStateError
from mp_torch.guards import guard_

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mp_torch.assembly import Assembly
    from mp_torch.engine import AmpEngine
    from mp_torch.phase import Phase
    from mp_torch.scaling import MovingScale
    from mp_torch.update import Updater

__all__ = ["Persistent"]


class Persistent:
    """The part of an engine that outlives the process."""

    assembly: Assembly
    phase: Phase
    scale: MovingScale

    def _guard_(self) -> None:
        """Nobody else steps the optimizers within a window, and no load casts their moments."""
        here = weakref.ref(self)

        def barred(updater: Updater) -> bool:
            engine = here()
            return engine is not None and engine.phase.open and not updater.stepping

        for updater in self.assembly.updaters:
            guard_(updater.optimizer, partial(barred, updater))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of; waits for the last step on an accelerator."""
        cast("AmpEngine", self).settle()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled engine guards its own optimizers, whose hooks torch does not copy."""
        self.__dict__.update(state)
        self._guard_()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's own weights and buffers, copied; legal at any micro-step boundary.

        Returns:
            Plain values and tensors: format and version, config, loss scale, counters, masters or what stands for them,
            optimizer states, and within a window its gradients and buffer snapshot.
        """
        return checkpoint.engine_state(cast("AmpEngine", self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as if the saved run had never stopped; load the model's own weights first.

        Args:
            state: from ``state_dict()``, of this version or an older one.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        checkpoint.load_engine_state_(cast("AmpEngine", self), state)
        torch.clear_autocast_cache()

    def save(self, path: str | Path) -> None:
        """Write model and engine into one file, atomically: whoever reads it finds the old one or the new one whole.

        Args:
            path: a safetensors file with a checksum; no pickled code.

        Raises:
            CheckpointError: a value that the file cannot hold.
        """
        checkpoint_file.save(cast("AmpEngine", self), path)

    def load(self, path: str | Path) -> None:
        """Read what ``save`` wrote, model weights included.

        Args:
            path: the file.

        Raises:
            CheckpointError: it is truncated, altered, or of another run; nothing was changed.
        """
        checkpoint_file.load_(cast("AmpEngine", self), path)
        torch.clear_autocast_cache()

    def export_scaler(self, kind: str) -> dict[str, Any]:
        """The loss scale as another scaler's ``state_dict``.

        Args:
            kind: "torch.amp", "deepspeed", "megatron" or "torch_npu".

        Raises:
            AmpConfigError: another kind, or a policy that it cannot express.
        """
        cast("AmpEngine", self).settle()
        return scaler_states.export_state(kind, self.scale.policy, self.scale.state)

    def import_scaler(self, kind: str, state: Mapping[str, Any]) -> None:
        """Go on with the loss scale of another scaler.

        Args:
            kind: as for ``export_scaler``.
            state: its ``state_dict()``. Its policy (factors, interval) is not taken over: this engine's holds.

        Raises:
            AmpStateError: a window is open.
            AmpConfigError: another kind.
            CheckpointError: a missing or unknown key, or a scale that is not finite and above 0.
        """
        if self.phase.open:
            raise AmpStateError(
                f"import_scaler() within a window, whose {self.phase.micro_steps} micro-steps were scaled by "
                f"{self.scale.state.scale!r} and would be unscaled by another scale; call it after step()"
            )
        cast("AmpEngine", self).settle()
        self.scale.resume_(scaler_states.import_state(kind, self.scale.policy, state))
