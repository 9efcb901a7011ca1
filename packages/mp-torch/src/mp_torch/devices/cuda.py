"""NVIDIA GPUs, and AMD's through ROCm, which torch calls ``cuda`` as well."""

from __future__ import annotations

import torch

from mp_torch.devices.base import Device, module_name

__all__ = ["CUDADevice"]


class CUDADevice(Device):
    """An NVIDIA or AMD GPU.

    Source: ``torch.cuda``.

    >>> CUDADevice(torch.device("cuda", 0)).type
    'cuda'
    """

    @property
    def name(self) -> str:
        """The driver's name, such as ``NVIDIA H100 80GB HBM3``."""
        return module_name(self.device, "get_device_name", "cuda")

    @property
    def compute_capability(self) -> str | None:
        """NVIDIA's architecture number, ``None`` for AMD, where it would mean something else."""
        if torch.version.hip is not None:
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"{major}.{minor}"
