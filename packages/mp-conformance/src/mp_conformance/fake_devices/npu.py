"""An Ascend NPU on the CPU, with infinities or in saturation mode, and with torch_npu's autocast rules.

In saturation mode no kernel gives an infinity or a NaN: it gives the largest finite value or 0 and raises the status
flag of the stream, which stays up until it is cleared. Moving data is no arithmetic and keeps every bit pattern;
float64 is computed by the chip's CPU cores and follows IEEE 754.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from mp_conformance.fake_devices.backed import BackedDevice, BackedEvent
from mp_reference.spec.op_rules import op_rules
from mp_torch.emulate.rules import install_rules

__all__ = ["FakeNPU", "install"]

_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "_foreach_copy_", "alias", "as_strided", "cat", "clone", "constant_pad_nd", "copy_", "detach", "empty_like",
        "fill_", "full_like", "gather", "index", "index_select", "lift_fresh", "masked_fill", "masked_fill_",
        "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "repeat", "roll", "stack",
        "where", "zero_", "zeros_like",
    )
)  # fmt: skip
"""Operators that only move or write given values."""


class FakeNPU(BackedDevice):
    """The installed NPU.

    Args:
        saturate: compute in saturation mode, as the 910A always does.
        flag: whether the chip tells of an overflow; ``False`` is a chip that can only be refused for fp16.

    Source: torch_npu 2.13, ``npu/utils.py``; CANN, INF_NAN_MODE_ENABLE.
    """

    def __init__(self, *, saturate: bool, flag: bool) -> None:
        self.overflowed = False
        self.saturate = saturate
        self.flag = flag
        super().__init__(torch.device("npu", 0), "PrivateUse1", effect=self._saturate if saturate else None)
        library: Any = torch.library.Library
        self._autocast_library = library("_", "IMPL")
        self._autocast_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        rules = {name: row.rule for name, row in op_rules("npu").items()}
        self._remove_rules = install_rules(rules, dispatch_key="AutocastPrivateUse1", device_type="npu")
        self._status_library = library("npu", "DEF")
        for verb, function in (("get", self._get_status), ("clear", self._clear_status)):
            self._status_library.define(f"npu_{verb}_float_status(Tensor self, int mode=0) -> Tensor")
            self._status_library.impl(f"npu_{verb}_float_status", function, "CPU")  # where every kernel runs

    def _saturate(self, func: Any, tensor: torch.Tensor) -> None:
        if func.name().split(".")[0] in _MOVES or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return
        if torch.isfinite(tensor).all():
            return
        self.overflowed = True
        limit = torch.finfo(tensor.dtype).max
        tensor.nan_to_num_(nan=0.0, posinf=limit, neginf=-limit)

    def _get_status(self, status: torch.Tensor, mode: int = 0) -> torch.Tensor:
        del mode
        return torch.full_like(status, float(self.overflowed))

    def _clear_status(self, status: torch.Tensor, mode: int = 0) -> torch.Tensor:
        del mode
        self.overflowed = False
        return torch.zeros_like(status)


class _Utils:
    """``torch.npu.utils``, as far as overflow goes."""

    def __init__(self, infinities: bool) -> None:
        self._infinities = infinities

    def is_support_inf_nan(self) -> bool:
        """Whether the chip computes in INF_NAN mode."""
        return self._infinities


class _Module(_DummyBackendModule):
    """``torch.npu``."""

    def __init__(self, name: str, infinities: bool) -> None:
        self._name = name
        self.host_syncs: list[str] = []
        self.utils = _Utils(infinities)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What ``torch.autocast`` may ask for."""
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        """Whether bf16 kernels exist."""
        del including_emulation
        return not self._name.startswith("Ascend910A")

    def get_device_name(self, device: object = None) -> str:
        """The SoC's name."""
        del device
        return self._name

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """The CPU's, which makes the numbers."""
        del device
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Likewise."""
        del device
        torch.set_rng_state(state)

    def synchronize(self, device: object = None) -> None:
        """Nothing is ever queued."""

    def current_stream(self, device: object = None) -> None:
        """There is one, and it needs no name."""

    def Event(self) -> BackedEvent:  # noqa: N802  # a class in torch's modules
        """A point in the device's work."""
        return BackedEvent(self.host_syncs)


def install(*, saturate: bool = False, flag: bool = True) -> FakeNPU:
    """Make torch believe in one NPU and give it the CPU's kernels; once a process, until its end.

    Args:
        saturate: an Ascend 910A, which computes in saturation mode; otherwise a 910B1 with infinities.
        flag: whether torch.npu offers the overflow status; without it, saturation cannot be noticed.

    Returns:
        The device.

    Source: torch's interface for backends written in Python (PrivateUse1).
    """
    module = _Module("Ascend910A" if saturate else "Ascend910B1", infinities=not (saturate and flag))
    _setup_privateuseone_for_python_backend("npu", backend_module=module)
    fake = FakeNPU(saturate=saturate, flag=flag)
    module.host_syncs = fake.host_syncs
    return fake
