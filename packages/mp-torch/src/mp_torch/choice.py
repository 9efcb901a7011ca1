"""Which precision to take on which hardware, with the reason in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from mp_reference.spec.hardware import HARDWARE, Hardware, hardware_named
from mp_torch.devices import Device, device_named
from mp_torch.errors import AmpConfigError, UnsupportedDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PrecisionChoice", "select_precision"]

Workload = Literal["pretrain", "finetune", "inference"]

_RECOMMENDED: dict[str, Callable[[Hardware], str]] = {
    "pretrain": lambda row: row.pretrain,
    "finetune": lambda row: row.finetune,
    "inference": lambda row: row.inference,
}


class PrecisionChoice(str):
    """The name of a precision, which may be passed on as it is, with the reason why it was chosen.

    Args:
        precision: the name.
        reason: one or two sentences.
        hardware: the row that decided.

    >>> choice = select_precision("A100")
    >>> choice, choice.hardware.name
    ('bf16-mixed', 'A100')
    """

    __slots__ = ("hardware", "reason")

    hardware: Hardware
    reason: str

    def __new__(cls, precision: str, reason: str, hardware: Hardware) -> PrecisionChoice:
        """A string with two more attributes."""
        made = super().__new__(cls, precision)
        made.reason = reason
        made.hardware = hardware
        return made


def select_precision(device: str | torch.device | None = None, workload: Workload = "pretrain") -> PrecisionChoice:
    """Choose a precision by what the hardware multiplies natively.

    Args:
        device: a device of torch (``"cuda:1"``), or hardware that need not be here, by the name of its row
            (``"H100"``) or as its driver calls it (``"NVIDIA L4"``); by default the accelerator that torch finds, else
            the CPU.
        workload: ``"pretrain"``, ``"finetune"`` or ``"inference"``; without gradients there is nothing for fp32 weights
            to accumulate, so that inference stores 16 bits.

    Returns:
        The precision's name, a ``str`` with ``reason`` and ``hardware``. On a device of torch the choice is one that
        the device also proved, with tiny kernels, to compute in; if it did not, the next of bf16, fp16 and fp32.

    Raises:
        AmpConfigError: an unknown workload.
        UnsupportedDeviceError: an unknown device, one that is not here, or hardware that is in no row; the known ones
            are listed.

    Source: ``mp_reference.spec.hardware``.

    >>> print(select_precision("V100", "finetune").reason)
    V100: fp16-mixed for finetune. Its matrix units multiply fp16 and not bf16, so that gradients need a loss scale; ...
    """
    if workload not in _RECOMMENDED:
        raise AmpConfigError(f"workload={workload!r} must be one of {', '.join(map(repr, _RECOMMENDED))}")
    here = _device_here(device)
    row = _row_of(device, here)
    precision, caveat = _RECOMMENDED[workload](row), ""
    if here is not None:
        precision, caveat = _proven(here, precision)
    return PrecisionChoice(precision, _reason(row, precision, workload, here) + caveat, row)


def _device_here(device: str | torch.device | None) -> Device | None:
    """The device of torch that was meant, or ``None`` if a row of the table was."""
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return device_named(found or "cpu")
    if isinstance(device, str) and device != "cpu" and device.lower() in {name.lower() for name in HARDWARE}:
        return None  # hardware by name; "cpu" is the one here, "CPU" the row
    try:
        meant = device_named(device)
    except UnsupportedDeviceError as error:
        if _is_hardware(str(device)):
            return None
        raise UnsupportedDeviceError(f"{error}; or name hardware: {', '.join(HARDWARE)}") from error
    try:
        torch.empty(0, device=meant.device)
    except (AssertionError, RuntimeError) as error:  # torch raises either
        raise UnsupportedDeviceError(
            f"device {str(device)!r} is not here ({str(error).splitlines()[0]}); leave it out to take what there is, "
            f"or name hardware: {', '.join(HARDWARE)}"
        ) from error
    return meant


def _is_hardware(name: str) -> bool:
    """Whether a row knows it, as a driver calls it."""
    try:
        hardware_named(name)
    except ValueError:
        return False
    return True


def _row_of(device: str | torch.device | None, here: Device | None) -> Hardware:
    if here is None:
        return hardware_named(str(device))
    try:
        return hardware_named(here.name, here.compute_capability)
    except ValueError as error:
        raise UnsupportedDeviceError(f"{here.device} is {here.name!r}: {error}") from error


def _proven(device: Device, precision: str) -> tuple[str, str]:
    """The first precision, from the recommended one down, that the device computes in, and what was passed over."""
    probe, passed = device.probe(), ""
    storage = precision.split("-")[-1]
    for candidate in (precision, f"bf16-{storage}", f"fp16-{storage}", "fp32"):
        try:
            device.require(candidate, probe)
        except UnsupportedDeviceError as error:
            passed = f" Passed over: {error}."
        else:
            return candidate, passed
    raise UnsupportedDeviceError(f"no precision can be honoured on {device.device}.{passed}")


def _reason(row: Hardware, precision: str, workload: str, here: Device | None) -> str:
    where = row.name if here is None else f"{here.device} is {here.name!r}, a {row.name}"
    why = row.why[0].upper() + row.why[1:]
    ratio = row.ratio(precision.split("-")[0])
    rate = (
        ""
        if ratio is None or ratio == 1.0
        else f"; {precision.split('-')[0]} runs at {ratio:.3g} times the rate of fp32"
    )
    weights = ". Without gradients, weights need no more than 16 bits" if precision.endswith("-true") else ""
    risk = ""
    if workload == "finetune" and precision.startswith("fp16"):
        risk = ". A checkpoint trained in bf16 may overflow in fp16's forward pass: if steps are skipped, use fp32"
    return f"{where}: {precision} for {workload}. {why}{rate}{weights}{risk}."
