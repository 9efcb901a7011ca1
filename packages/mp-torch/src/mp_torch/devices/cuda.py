"""NVIDIA GPUs, and AMD's through ROCm, which torch calls ``cuda`` as well."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.devices.base import Device, module_name

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    @contextmanager
    def tf32(self) -> Iterator[None]:
        """Switch torch's matmul and convolution settings to tf32, and back to what they were."""
        settings: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
        before = [one.fp32_precision for one in settings]
        try:
            for one in settings:
                one.fp32_precision = "tf32"
            yield
        finally:
            for one, value in zip(settings, before, strict=True):
                one.fp32_precision = value
