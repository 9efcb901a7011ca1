"""Devices: the one place that knows what is special about each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mp_torch.devices.base import Device, Probe
from mp_torch.devices.cpu import CPUDevice
from mp_torch.devices.cuda import CUDADevice
from mp_torch.devices.mps import MPSDevice
from mp_torch.devices.npu import NPUDevice
from mp_torch.devices.rules import follow_rules, rules_followed
from mp_torch.devices.xpu import XPUDevice
from mp_torch.errors import AmpConfigError, UnsupportedDeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Device", "Probe", "device_named", "device_of", "follow_rules", "rules_followed"]

_KINDS: dict[str, type[Device]] = {
    "cpu": CPUDevice,
    "cuda": CUDADevice,
    "mps": MPSDevice,
    "npu": NPUDevice,
    "xpu": XPUDevice,
}


def device_named(device: str | torch.device) -> Device:
    """The device of this name.

    Args:
        device: as torch writes it: ``"cpu"``, ``"cuda:1"``, ``torch.device("npu")``.

    Returns:
        The ``Device`` of its kind.

    Raises:
        UnsupportedDeviceError: torch has no such device, or this package no kind for it; the known ones are listed.

    Source: torch's device types.

    >>> device_named("cpu").supports_float64
    True
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedDeviceError(_unknown(str(device))) from error
    if found.type not in _KINDS:
        raise UnsupportedDeviceError(_unknown(str(device)))
    return _KINDS[found.type](found)


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """The one device that all these tensors live on.

    Args:
        tensors: the parameters of a model, at least one; DTensors count by their local device.

    Returns:
        The ``Device``.

    Raises:
        AmpConfigError: there is no tensor, or they are spread over several devices.
        UnsupportedDeviceError: they are on ``meta`` or on a kind of device that is not known.

    Source: torch's ``Tensor.device``.

    >>> device_of(torch.nn.Linear(2, 2).parameters()).type
    'cpu'
    """
    found = sorted({str(tensor.device) for tensor in tensors})
    if not found:
        raise AmpConfigError("the model has no parameters, so there is no device to work on; pass the one that trains")
    if len(found) > 1:
        raise AmpConfigError(
            f"the model's parameters are on {len(found)} devices ({', '.join(found)}), an engine works on one; move "
            "them with model.to(device), or build one engine for each part"
        )
    if found[0] == "meta":
        raise UnsupportedDeviceError(
            "the model's parameters are on 'meta', where there is nothing to train; fill them first, with "
            "model.to_empty(device=...) and an initialisation"
        )
    return device_named(found[0])


def _unknown(device: str) -> str:
    return (
        f"device {device!r} is not one of {', '.join(_KINDS)}; move the model to one of these (npu needs torch_npu "
        "to be imported first)"
    )
