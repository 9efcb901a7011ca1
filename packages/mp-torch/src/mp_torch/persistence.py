"""How an engine is saved and taken back: states, files, other scalers' states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from mp_torch import checkpoint, checkpoint_file, scaler_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mp_torch.engine import AmpEngine
    from mp_torch.scaling import MovingScale

__all__ = ["Persistent"]


class Persistent:
    """The part of an engine that outlives the process."""

    scale: MovingScale

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
            AmpConfigError: another kind.
            CheckpointError: a missing or unknown key, or a scale that is not finite and above 0.
        """
        cast("AmpEngine", self).settle()
        self.scale.resume_(scaler_states.import_state(kind, self.scale.policy, state))
