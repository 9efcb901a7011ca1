"""``mp_torch.emulate``: CPU tensors under another device's op rules and matmul arithmetic."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import mp_reference as mp
from mp_reference.spec.op_rules import DEVICES, op_rules
from mp_reference.spec.tensor_cores import ARCHITECTURES
from mp_torch.devices import follow_rules
from mp_torch.emulate.arithmetic import LOW_DTYPES, EmulatedArithmetic, FastArithmetic
from mp_torch.emulate.dispatcher import exists, registered
from mp_torch.emulate.kernels import install_arithmetic, install_kernels
from mp_torch.emulate.outputs import OutputMode
from mp_torch.emulate.recurrent import PACKED, install_recurrent
from mp_torch.emulate.rules import install_rules
from mp_torch.errors import AmpConfigError, AmpStateError, UnsupportedDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from torch import nn

    from mp_torch.emulate.arithmetic import Arithmetic

__all__ = ["ARITHMETICS", "Emulation", "emulate"]

ARITHMETICS = ("fast", "tensor-core", "fp16-accumulate", "exact")
"""How 16-bit matrices can be multiplied."""

_AUTOCAST_DTYPES = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_LOWER = "lower_precision_fp"
PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")


def _one_of(name: str, value: object, known: tuple[str, ...], error: type[Exception] = AmpConfigError) -> None:
    if value not in known:
        raise error(f"emulate: {name}={value!r} is not one of {', '.join(known)}; choose one of these")


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What is emulated; a context manager that puts it in force in the whole process and takes it back.

    Entering it again while it is in force is harmless; entering another one is refused, because both would want the
    same kernels. The kernels serve every thread; ``precision`` and the imitation of saturating or flushing hardware
    belong to the entering thread.

    Args:
        device: whose op rules CPU tensors follow.
        arch: the architecture whose accumulator ``arithmetic="tensor-core"`` uses.
        precision: what autocast to enter besides, by precision name; None enters none.
        arithmetic: how the matmul family multiplies 16-bit operands.
        overflow: "ieee" overflows to infinity; "saturate" to the largest finite value, and NaN becomes 0.
        subnormals: False flushes subnormal 16-bit results to zeros of the same sign.
        kernels: NumPy functions for further ops, as for ``install_kernels``; None leaves them to torch.

    Raises:
        UnsupportedDeviceError: a device without op rules.
        AmpConfigError: any other argument that is not one of the known ones.

    >>> Emulation(device="npu", precision="fp16-mixed", overflow="saturate").arithmetic
    'fast'
    """

    device: str = "cuda"
    arch: str | None = None
    precision: str | None = None
    arithmetic: str = "fast"
    overflow: str = "ieee"
    subnormals: bool = True
    kernels: Mapping[str, Callable[..., Any]] | None = field(default=None, repr=False)
    _entries: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every argument against the known ones."""
        _one_of("device", self.device, DEVICES, UnsupportedDeviceError)
        _one_of("arithmetic", self.arithmetic, ARITHMETICS)
        _one_of("overflow", self.overflow, ("ieee", "saturate"))
        if self.precision is not None:
            _one_of("precision", self.precision, PRECISIONS)
        if self.arch is None and self.arithmetic == "tensor-core":
            raise AmpConfigError(
                f"emulate: arithmetic='tensor-core' needs arch, one of {', '.join(ARCHITECTURES)}; "
                "or take arithmetic='fast', which has no architecture"
            )
        self._accumulators()

    def __enter__(self) -> Emulation:
        """Put the emulation in force."""
        with ExitStack() as stack:
            _enter(self)
            stack.callback(_leave, self)
            if self.precision in _AUTOCAST_DTYPES:
                stack.enter_context(torch.autocast("cpu", dtype=_AUTOCAST_DTYPES[self.precision]))
            if self.overflow == "saturate" or not self.subnormals:
                mode = OutputMode(saturate=self.overflow == "saturate", flush=not self.subnormals)
                stack.enter_context(mode)
            self._exits().append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the process as it was before."""
        self._exits().pop().__exit__(kind, error, trace)

    def _exits(self) -> list[ExitStack]:
        """What this thread's entries have to undo, the last one last."""
        found: list[ExitStack] = self._entries.__dict__.setdefault("exits", [])
        return found

    def install(self, stack: ExitStack) -> None:
        """Change the process; each change has its way back on ``stack``."""
        stack.callback(install_rules(**self._rules()))
        stack.callback(follow_rules("cpu", self.device))
        if self.device != "cpu":
            stack.callback(install_recurrent())
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)  # off under autocast on every other device
        stack.callback(install_arithmetic(self._multiplier()))
        if self.kernels is not None:
            stack.callback(install_kernels(self.kernels))

    def _rules(self) -> dict[str, Any]:
        """Which kernels to put in, over, or out of the way of what this torch has registered for the CPU."""
        wanted = {op: row.rule for op, row in op_rules(self.device).items() if exists(op)}
        own = {op: row.rule for op, row in op_rules("cpu").items()}
        here = registered("AutocastCPU")
        elsewhere = {op for device in DEVICES for op, row in op_rules(device).items() if row.rule == _LOWER}
        bare = {op.split(".")[0] for op in wanted}
        warned = {op for op in elsewhere - wanted.keys() if exists(op) and op.split(".")[0] not in bare}
        return {
            "rules": {op: rule for op, rule in wanted.items() if own.get(op) != rule or op not in here},
            "absent": here - wanted.keys() - warned - set(PACKED),
            "warned": dict.fromkeys(warned, f"has no op rule on {self.device} and runs in fp32 there")
            | ({} if self.device == "cpu" else dict.fromkeys(PACKED, "takes a packed sequence, which is not emulated")),
        }

    def _accumulators(self) -> dict[torch.dtype, Any]:
        """What products accumulate in, by operand dtype; empty where torch's own fp32 products serve."""
        fp16_unit = self.arithmetic == "fp16-accumulate"
        try:
            unit = None if self.arch is None else mp.tensor_core(self.arch, result=mp.FP16 if fp16_unit else mp.FP32)
            if unit is not None and self.arithmetic == "tensor-core" and self.precision in ("bf16-mixed", "bf16-true"):
                unit.row_for(mp.BF16, mp.BF16)
        except ValueError as error:
            raise AmpConfigError(f"emulate: arch={self.arch!r} cannot be emulated: {error}") from error
        if self.arithmetic == "fast":
            return {}
        if self.arithmetic == "exact":
            return dict.fromkeys(LOW_DTYPES, "exact")
        if fp16_unit:
            return {torch.float16: unit or mp.FP16, torch.bfloat16: mp.BF16}
        dtypes = (*LOW_DTYPES, torch.float32) if self.precision == "tf32" else LOW_DTYPES
        return dict.fromkeys(dtypes, unit)

    def _multiplier(self) -> Arithmetic:
        """What multiplies matrices."""
        if self.arithmetic == "fast":
            return FastArithmetic(tf32=self.precision == "tf32")
        return EmulatedArithmetic(self._accumulators())


_lock = threading.Lock()
_entered: list[Emulation] = []  # the dispatcher has one table a process, so there is one emulation a process
_installed = ExitStack()


def _enter(emulation: Emulation) -> None:
    """Count one more entry, and install the kernels at the first; another emulation in force is refused."""
    with _lock:
        if _entered and _entered[0] != emulation:
            raise AmpStateError(
                f"{emulation} cannot be entered while {_entered[0]} is in force: the process has one dispatcher; leave "
                "the other emulation first"
            )
        if not _entered:
            with ExitStack() as stack:
                emulation.install(stack)
                _installed.push(stack.pop_all())
        _entered.append(emulation)


def _leave(emulation: Emulation) -> None:
    """Count one entry less, and take the kernels out at the last."""
    with _lock:
        _entered.remove(emulation)
        if not _entered:
            _installed.close()


def emulate(
    device: str = "cuda",
    arch: str | None = None,
    *,
    precision: str | None = None,
    arithmetic: str = "fast",
    overflow: str = "ieee",
    subnormals: bool = True,
    model: nn.Module | None = None,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> Emulation:
    """Let CPU tensors follow another device's op rules and matmul arithmetic, inside a ``with``.

    Args:
        device: whose op rules to follow: cuda, cpu, xpu, mps, mtia, maia, npu.
        arch: the architecture whose accumulators ``arithmetic="tensor-core"`` uses.
        precision: enter the autocast of this precision as well; None leaves that to the program (or to AmpEngine).
        arithmetic: "fast" (fp32 inside, one rounding), "tensor-core" (bit-exact), "fp16-accumulate" (every partial sum
            rounded to 16 bits), "exact" (correctly rounded).
        overflow: "ieee", or "saturate" for hardware that has no infinity.
        subnormals: False for hardware that flushes subnormal results.
        kernels: NumPy functions that compute further ops, by name; as for ``mp_torch.emulate.kernels.install_kernels``.
        model: if given, it is checked to lie on the CPU, where alone it can be emulated.

    Returns:
        A context manager; after it, also after an exception, the process is as before.

    Raises:
        UnsupportedDeviceError: an unknown device, or a model that is not on the CPU.
        AmpConfigError: an unknown arch, precision, arithmetic or overflow; the message lists the known ones.
        AmpStateError: on entering, another emulation is in force.

    Source: the tables of ``mp_reference.spec.op_rules`` and ``mp_reference.spec.accumulators``.

    >>> with emulate("cuda"), torch.autocast("cpu", dtype=torch.float16):
    ...     x = torch.full((1,), 300.0, dtype=torch.float16)
    ...     (x**2).item(), torch.softmax(x, 0).dtype
    (90000.0, torch.float32)
    """
    if model is not None:
        _require_cpu(model)
    return Emulation(
        device=device,
        arch=arch,
        precision=precision,
        arithmetic=arithmetic,
        overflow=overflow,
        subnormals=subnormals,
        kernels=kernels,
    )


def _require_cpu(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise UnsupportedDeviceError(
                f"emulate: {name} is on {tensor.device}, and only CPU tensors can be emulated; move the model with "
                "model.cpu(), or use the real device without emulate"
            )
