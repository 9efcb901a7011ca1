"""Autocast for NumPy arrays: the op rules of a device, interpreted."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.codec import cast
from mp_reference.spec.formats import FORMATS, FP16, FP32, FloatFormat
from mp_reference.spec.op_rules import (
    AUTOCAST_FORMATS,
    BANNED_MESSAGES,
    DEVICES,
    PROMOTING_ARGUMENTS,
    overload_of,
    rule_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

__all__ = ["OpCall", "active_autocast", "autocast", "eligible"]

_ENTERED: ContextVar[tuple[autocast, ...]] = ContextVar("mp_reference_autocast", default=())
_FLOATING = frozenset(fmt.dtype for fmt in FORMATS.values())  # every floating dtype but float64


def eligible(x: object, array_device: str, device: str) -> bool:
    """Whether the autocast of ``device`` may cast ``x``: a floating array, on that device, not float64.

    Args:
        x: anything; what is no array is not eligible.
        array_device: the device type that ``x`` is taken to lie on.
        device: the device type of the autocast.

    Returns:
        True where all three hold.

    Source: ATen/autocast_mode.h, ``is_eligible``.

    >>> x = np.ones(2, np.float32)
    >>> eligible(x, "cuda", "cuda"), eligible(x, "cpu", "cuda"), eligible(x.astype(np.float64), "cuda", "cuda")
    (True, False, False)
    """
    return isinstance(x, np.ndarray | np.generic) and array_device == device and x.dtype in _FLOATING


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op's arguments after its rule: what the kernel is given.

    Args:
        op: the overload's full name; for a rule that calls another overload, still the one asked for.
        rule: the rule that was applied; None where the op has none, or autocast is off.
        args: the arguments, arrays cast.
        dtype: the op's ``dtype`` argument, set by the rule where the caller gave none.
    """

    op: str
    rule: str | None
    args: tuple[Any, ...]
    dtype: np.dtype[Any] | None


@dataclass(frozen=True)
class autocast:  # noqa: N801  # used as a verb, as torch's is
    """The op rules of one device in force: ``with mp.autocast("cuda", mp.FP16): ...``.

    The innermost region of a device decides; ``enabled=False`` turns it off inside. Arrays are never cached, so a
    weight that changed is cast anew.

    Args:
        device: a device type that has op rules.
        fmt: the format that ``lower_precision_fp`` casts to.
        enabled: False for a region without casts.

    Raises:
        ValueError: no rules for this device, or its autocast does not take this format.

    Source: ``mp_reference.spec.op_rules``.

    >>> w = np.ones((2, 2), np.float32)
    >>> with autocast("cuda", FP16) as amp:
    ...     [amp.prepare(op, w).args[0].dtype.name for op in ("mm", "exp", "relu")]
    ['float16', 'float32', 'float32']
    """

    device: str
    fmt: FloatFormat = FP16
    enabled: bool = True

    def __post_init__(self) -> None:
        """Check device and format."""
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} has no op rules; autocast knows {', '.join(DEVICES)}")
        if self.fmt.name not in AUTOCAST_FORMATS[self.device]:
            raise ValueError(
                f"autocast on {self.device} does not take {self.fmt.name}; use "
                f"{' or '.join(name.upper() for name in AUTOCAST_FORMATS[self.device])}, or round_to for other formats"
            )

    def __enter__(self) -> autocast:
        """Put these rules in force in this context (thread or task)."""
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the rules from before."""
        _ENTERED.set(_ENTERED.get()[:-1])

    def prepare(
        self, op: str, *args: Any, dtype: np.dtype[Any] | None = None, devices: Sequence[str] | None = None
    ) -> OpCall:
        """Apply the rule of ``op`` to its arguments.

        Args:
            op: an overload's name, with or without ``aten::``; a bare name finds its only listed overload.
            *args: the op's arguments in order; arrays, sequences of arrays, anything else.
            dtype: the ``dtype`` argument that the caller gives the op, if any; the rules never override it.
            devices: the device type that each argument lies on; all on the autocast's device unless given.

        Returns:
            The arguments to call the op with. Without a rule, or with ``enabled=False``, they are unchanged.

        Raises:
            RuntimeError: the op is banned, or promotes and was given the other 16-bit format.
            ValueError: ``devices`` has not one entry an argument.

        Source: ATen/autocast_mode.h, ``WrapFunction_``.

        >>> half = np.ones(3, np.float16)
        >>> call = autocast("cuda", FP16).prepare("aten::softmax.int", half)
        >>> call.args[0].dtype.name, call.dtype.name
        ('float16', 'float32')
        """
        places = tuple(devices) if devices is not None else (self.device,) * len(args)
        if len(places) != len(args):
            raise ValueError(
                f"{op}: devices has {len(places)} entries for {len(args)} arguments; give one device type an argument"
            )
        name = overload_of(op, self.device)
        rule = rule_of(name, self.device) if self.enabled else None
        if rule == "banned":
            raise RuntimeError(BANNED_MESSAGES[name])
        if rule == "lower_precision_fp":
            return OpCall(name, rule, self._cast(args, places, self.fmt), dtype)
        if rule == "fp32":
            return OpCall(name, rule, self._cast(args, places, FP32), dtype)
        if rule == "promote":
            return OpCall(name, rule, self._cast(args, places, self._widest(name, args, places)), dtype)
        if rule is not None and dtype is None:  # the two rules that speak of the output only
            if eligible(args[0], places[0], self.device):
                dtype = FP32.dtype
            elif rule == "fp32_append_dtype":
                dtype = args[0].dtype
        return OpCall(name, rule, args, dtype)

    def _cast(self, args: tuple[Any, ...], places: tuple[str, ...], fmt: FloatFormat) -> tuple[Any, ...]:
        """Every eligible array in ``fmt``."""

        def to(x: Any, place: str) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(to(item, place) for item in x)
            return cast(x, fmt) if eligible(x, place, self.device) and x.dtype != fmt.dtype else x

        return tuple(to(x, place) for x, place in zip(args, places, strict=True))

    def _widest(self, op: str, args: tuple[Any, ...], places: tuple[str, ...]) -> FloatFormat:
        """The widest format among the arguments that take part, in their order."""
        counted = PROMOTING_ARGUMENTS.get(op, len(args))
        widest = self.fmt
        for x in _arrays(args[:counted], places, self.device):
            if FP32.dtype in (widest.dtype, x.dtype):
                widest = FP32
            elif x.dtype != self.fmt.dtype:
                raise RuntimeError(
                    f"{op} promotes to the widest input, and {x.dtype.name} beside {self.fmt.name} has no widest; "
                    f"cast the input to {self.fmt.name} or to fp32 first"
                )
        return widest


def _arrays(args: Sequence[Any], places: Sequence[str], device: str) -> Iterator[Any]:
    """The eligible arrays, those inside sequences too, in order."""
    for x, place in zip(args, places, strict=False):
        if isinstance(x, list | tuple):
            yield from _arrays(x, (place,) * len(x), device)
        elif eligible(x, place, device):
            yield x


def active_autocast(device: str | None = None) -> autocast | None:
    """The region in force here.

    Args:
        device: ask for this device's region only; None takes the innermost region whatever its device.

    Returns:
        The innermost region, or None where there is none or it says ``enabled=False``.

    Source: as in torch, each device keeps its own state and the innermost region decides.

    >>> with autocast("cuda"), autocast("cuda", enabled=False):
    ...     print(active_autocast("cuda"))
    None
    """
    for region in reversed(_ENTERED.get()):
        if device in (None, region.device):
            return region if region.enabled else None
    return None
