"""Apple GPUs through Metal: no float64."""

from __future__ import annotations

from typing import Any

import torch

from mp_torch.devices.base import Device

__all__ = ["MPSDevice"]


class MPSDevice(Device):
    """An Apple GPU.

    Source: torch's MPS backend, which refuses float64 tensors.

    >>> MPSDevice(torch.device("mps")).supports_float64
    False
    """

    @property
    def supports_float64(self) -> bool:
        """Metal has none."""
        return False

    def synchronize(self) -> None:
        """Metal has one device and one stream."""
        torch.mps.synchronize()

    def _recorded_event(self) -> Any:
        event = torch.mps.Event()
        event.record()
        return event

    @property
    def name(self) -> str:
        """``"Apple GPU"``: Metal's rates differ by chip, the formats do not."""
        return "Apple GPU"
