"""Intel GPUs: some of them have no float64."""

from __future__ import annotations

from typing import Any

import torch

from mp_torch.devices.base import Device, module_name

__all__ = ["XPUDevice"]


class XPUDevice(Device):
    """An Intel GPU.

    Source: ``torch.xpu``.

    >>> XPUDevice(torch.device("xpu", 0)).type
    'xpu'
    """

    @property
    def name(self) -> str:
        """The driver's name."""
        return module_name(self.device, "get_device_name", "xpu")

    @property
    def supports_float64(self) -> bool:
        """Whether the chip has float64 units; Arc has none."""
        properties: Any = torch.get_device_module(self.device).get_device_properties(self.device)
        return bool(properties.has_fp64)
