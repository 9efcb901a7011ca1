"""What the engine asks of the device that holds the parameters.

One class per kind of device answers the same few questions; everything that differs between two devices lives behind
them, so that nothing else in the package asks for a device's name.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from mp_torch.errors import UnsupportedDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["Device", "Probe"]

HalfOverflow = Literal["inf", "saturate", "missing"]
"""What 65504 * 2 gives in fp16: infinity (IEEE 754), 65504 (saturating hardware), or an error (no fp16 kernels)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a handful of tiny kernels showed about a device.

    Args:
        half_overflow: result of 65504 * 2 in fp16; ``"missing"`` where there is no such kernel.
        subnormals: 2**-14 * 0.5 survives in fp16 as the subnormal 2**-15 instead of becoming 0.
        bf16: 3 * 1 is 3 in bf16, in hardware or emulated.
        finite_check: ``torch.isfinite`` tells 1, infinity and NaN apart in fp32.
        foreach_norm: one norm over a list of tensors in one kernel is offered, and right.
        fused_optimizers: torch's fused SGD and AdamW kernels are offered, divide by ``grad_scale`` and change nothing
            where ``found_inf`` is set, so that ``update="auto"`` may take them.

    Source: measured, at construction of the engine.

    >>> Probe(half_overflow="saturate", subnormals=True, bf16=False, finite_check=True).saturates
    True
    """

    half_overflow: HalfOverflow
    subnormals: bool
    bf16: bool
    finite_check: bool
    foreach_norm: bool = False
    fused_optimizers: bool = False

    @property
    def saturates(self) -> bool:
        """An overflow stays finite, so that no gradient will ever show it."""
        return self.half_overflow == "saturate"


@dataclass(frozen=True)
class Device:
    """The one device that an engine works on.

    Args:
        device: where the parameters live, as torch names it.

    Source: torch's device modules; what differs is in the subclass of each kind.

    >>> Device(torch.device("cpu")).type
    'cpu'
    """

    device: torch.device

    @property
    def type(self) -> str:
        """The word that ``torch.autocast`` wants."""
        return self.device.type

    @property
    def name(self) -> str:
        """The hardware's own name, which ``mp_reference.spec.hardware`` knows rows by."""
        return self.type

    @property
    def reads_are_free(self) -> bool:
        """Whether reading a value waits for nothing, so that decisions may be taken on the host at once."""
        return False

    @property
    def supports_float64(self) -> bool:
        """Whether float64 tensors exist there; otherwise sums that need them are done on the CPU."""
        return True

    @property
    def compute_capability(self) -> str | None:
        """NVIDIA's architecture number such as ``"9.0"``, ``None`` elsewhere."""
        return None

    @property
    def reads_overflow(self) -> bool:
        """Whether an overflow has to be, and can be, read from a status flag of the hardware."""
        return False

    def clear_overflow_(self) -> None:
        """Forget the overflows up to now; does nothing where the hardware has no flag to read."""

    def overflow(self) -> torch.Tensor | None:
        """The hardware's sticky flag since the last ``clear_overflow_``.

        Returns:
            fp32 scalar tensor on the device, 1.0 if any kernel overflowed and 0.0 otherwise, without a host sync;
            ``None`` where overflows show as infinities and the finite check sees them.
        """
        return None

    def later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to bring values to the host without waiting for them.

        Args:
            values: one-dimensional, on the device.

        Returns:
            What gives them; waits until the device has come as far as this call.

        >>> Device(torch.device("cpu")).later(torch.tensor([1.0, 2.0]))()
        [1.0, 2.0]
        """
        host = values.detach().to("cpu", non_blocking=True)  # torch takes pinned memory for it
        event = self._recorded_event()

        def wait() -> list[float]:
            event.synchronize()
            return [float(value) for value in host.tolist()]

        return wait

    def _recorded_event(self) -> Any:
        module: Any = torch.get_device_module(self.device)
        event = module.Event()
        event.record(module.current_stream(self.device))  # of this device, which need not be the current one
        return event

    def tf32(self) -> AbstractContextManager[None]:
        """While it is open, fp32 matmuls and convolutions may use tensor cores, where there are any."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        torch.get_device_module(self.device).synchronize(self.device)

    def probe(self) -> Probe:
        """Run a handful of tiny kernels and say what they showed; takes one host sync each.

        Returns:
            The ``Probe``. A kernel that does not exist counts as a ``False`` or ``"missing"``, it never raises.

        Raises:
            UnsupportedDeviceError: 65504 * 2 in fp16 is neither infinity nor 65504: no rule for overflow holds there.

        >>> Device(torch.device("cpu")).probe().half_overflow
        'inf'
        """
        result = Probe(
            half_overflow=self._half_overflow(),
            subnormals=self._gives(lambda: self._tensor([2.0**-14], torch.float16) * 0.5, [2.0**-15]),
            bf16=self._gives(lambda: self._tensor([3.0], torch.bfloat16) * 1.0, [3.0]),
            finite_check=self._gives(
                lambda: torch.isfinite(self._tensor([1.0, float("inf"), float("nan")], torch.float32)), [1.0, 0.0, 0.0]
            ),
            foreach_norm=self._gives(
                lambda: torch.nn.utils.get_total_norm(
                    [self._tensor([3.0], torch.float32), self._tensor([4.0], torch.float32)], foreach=True
                ),
                [5.0],
            ),
            fused_optimizers=self._gives(self._fused_updates, [0.5, 2.0, 0.0]),
        )
        self.clear_overflow_()  # the probe's own overflow is nobody's
        return result

    def require(self, precision: str, probe: Probe) -> None:
        """Refuse a precision that this device cannot honour.

        Args:
            precision: a precision name; its format is the part before the dash.
            probe: what ``probe()`` returned.

        Raises:
            UnsupportedDeviceError: fp16 or bf16 kernels are missing; or fp16 saturates there and no status flag tells.
                The finite check does not work, in any precision, and no status flag stands in for it.

        >>> cpu = Device(torch.device("cpu"))
        >>> cpu.require("bf16-mixed", cpu.probe())
        """
        half, brain = precision.startswith("fp16"), precision.startswith("bf16")
        if not (probe.finite_check or self.reads_overflow):
            fault = "torch.isfinite does not tell 1, inf and NaN apart there, so that no update could be checked"
            way_out = "train on another device"
        elif half and probe.half_overflow == "missing":
            fault, way_out = "it cannot multiply in fp16", "use 'bf16-mixed' or 'fp32'"
        elif brain and not probe.bf16:
            fault, way_out = "it cannot multiply in bf16", "use 'fp16-mixed' or 'fp32'"
        elif half and probe.saturates and not self.reads_overflow:
            fault = "65504 * 2 gives 65504 there and no status flag tells of it, so that overflows would go unseen"
            way_out = "use 'bf16-mixed' or 'fp32'"
        else:
            return
        raise UnsupportedDeviceError(f"precision={precision!r} on {self.device}: {fault}; {way_out}")

    def _fused_updates(self) -> torch.Tensor:
        """AdamW from 1 with the rate 0.5, its first moment, and SGD; each applied once and once told to do nothing."""
        weight, other, m, v, step, scale = (self._tensor([x], torch.float32) for x in (1.0, 1.0, 0.0, 0.0, 1.0, 2.0))
        for found in (0.0, 1.0):
            found_inf = self._tensor([found], torch.float32)
            torch._fused_adamw_(
                [weight], [self._tensor([4.0], torch.float32)], [m], [v], [], [step], lr=0.5, beta1=0.0, beta2=0.0,
                weight_decay=0.0, eps=0.0, amsgrad=False, maximize=False, grad_scale=scale, found_inf=found_inf,
            )  # fmt: skip
            torch._fused_sgd_(
                [other], [self._tensor([4.0], torch.float32)], [], lr=0.5, momentum=0.0, weight_decay=0.0,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=True, grad_scale=scale,
                found_inf=found_inf,
            )  # fmt: skip
        return torch.cat((weight, m, other))

    def _half_overflow(self) -> HalfOverflow:
        values = self._values(lambda: self._tensor([65504.0], torch.float16) * 2)
        outcomes: dict[float, HalfOverflow] = {float("inf"): "inf", 65504.0: "saturate"}
        if values is None:
            return "missing"
        if values[0] not in outcomes:
            raise UnsupportedDeviceError(
                f"fp16 on {self.device}: 65504 * 2 gives {values[0]!r}, which is neither infinity (IEEE 754) nor 65504 "
                "(saturation); its overflows follow no rule that could be watched, train on another device"
            )
        return outcomes[values[0]]

    def _gives(self, kernel: Callable[[], torch.Tensor], expected: list[float]) -> bool:
        return self._values(kernel) == expected

    def _values(self, kernel: Callable[[], torch.Tensor]) -> list[float] | None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                return [float(value) for value in kernel().cpu().double().reshape(-1)]
        except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError; mps raises TypeError for a dtype
            return None

    def _tensor(self, values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


def module_name(device: torch.device, function: str, default: str) -> str:
    """Ask a device module for the hardware's name, which some builds cannot give.

    Args:
        device: whose name.
        function: the module's function that gives it.
        default: what to say where the module has no such function or it fails.

    Returns:
        The name.

    >>> module_name(torch.device("cpu"), "get_device_name", "a CPU")
    'a CPU'
    """
    get: Any = getattr(torch.get_device_module(device), function, None)
    if get is None:
        return default
    try:
        return str(get(device))
    except RuntimeError:
        return default
