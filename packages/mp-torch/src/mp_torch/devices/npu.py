"""Ascend NPUs, through torch_npu: hardware that may saturate instead of overflowing.

The 910A always computes in saturation mode, and later chips do where INF_NAN mode is switched off: an overflow gives
the largest finite value and a NaN gives 0. No gradient shows either; the hardware raises a sticky status flag instead,
which is what this module reads. With torch_npu loaded, torch offers it as ``torch.npu`` and its operators as
``torch.ops.npu``, so that nothing here needs to import it.
"""

from __future__ import annotations

from typing import Any

import torch

from mp_torch.devices.base import Device, module_name

__all__ = ["NPUDevice"]


class NPUDevice(Device):
    """An Ascend NPU.

    Source: torch_npu 2.13, ``npu/utils.py`` (``is_support_inf_nan``, ``npu_get_float_status``); CANN, environment
    variable INF_NAN_MODE_ENABLE.

    >>> NPUDevice(torch.device("cpu")).supports_float64
    True
    """

    @property
    def name(self) -> str:
        """The SoC's name, such as ``Ascend910B1``."""
        return module_name(self.device, "get_device_name", "npu")

    @property
    def reads_overflow(self) -> bool:
        """True in saturation mode, where the status flag is the only witness of an overflow."""
        utils: Any = getattr(torch.get_device_module(self.device), "utils", None)
        return utils is not None and not utils.is_support_inf_nan()

    def clear_overflow_(self) -> None:
        """Clear the stream's float status; in INF_NAN mode there is none."""
        if self.reads_overflow:
            torch.ops.npu.npu_clear_float_status(self._status())

    def overflow(self) -> torch.Tensor | None:
        """The stream's float status since the last clear, or ``None`` in INF_NAN mode."""
        if not self.reads_overflow:
            return None
        status: torch.Tensor = torch.ops.npu.npu_get_float_status(self._status())
        return (status[0] != 0).float()

    def _status(self) -> torch.Tensor:
        return torch.zeros(8, device=self.device)  # the operators want eight words and use the first
