"""The CPU: every format works; what differs is which of them the instruction set multiplies natively."""

from __future__ import annotations

import torch

from mp_torch.devices.base import Device

__all__ = ["CPUDevice"]


class CPUDevice(Device):
    """The CPU.

    Source: ``torch.cpu.get_capabilities`` (cpuinfo), measured at run time.

    >>> CPUDevice(torch.device("cpu")).synchronize()
    """

    @property
    def reads_are_free(self) -> bool:
        """Values are on the host already."""
        return True

    @property
    def name(self) -> str:
        """``"CPU with AMX"``, ``"CPU with AVX512-BF16"`` or ``"CPU"``: the rows of ``spec.hardware``."""
        has = cpu_capabilities()
        if has.get("amx_bf16"):
            return "CPU with AMX"
        return "CPU with AVX512-BF16" if has.get("avx512_bf16") else "CPU"


def cpu_capabilities() -> dict[str, bool]:
    """Which low-precision instructions this CPU has, and torch will use.

    Returns:
        ``{"avx512_bf16": ..., "amx_bf16": ...}``. Both are ``False`` where torch was told to stay below AVX512
        (``ATEN_CPU_CAPABILITY=avx2``), since no kernel then uses them.

    Source: ``torch.cpu.get_capabilities``; torch versions without it are asked through oneDNN.

    >>> sorted(cpu_capabilities())
    ['amx_bf16', 'avx512_bf16']
    """
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return {key: wide and bool(capabilities.get(key, False)) for key in ("avx512_bf16", "amx_bf16")}
