"""How a tape computes: what its operations round to and add in, and what is cast before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.numerics.rounding import Overflow, Rounding, check_rounding, round_to
from mp_reference.spec.accumulators import Accumulator, accumulator_named
from mp_reference.spec.formats import FP16, FP32, FloatFormat
from mp_reference.spec.op_rules import DEVICES, RULES, overload_of, rule_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Arithmetic", "Rules"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a tape rounds and adds.

    Args:
        accumulator: of every matrix product: "fp32" (the machine's BLAS), "exact", or any row or format that
            ``mp.matmul`` takes.
        rounding: of every result into its format; "stochastic" needs ``random``.
        overflow: "ieee" or "saturate".
        subnormals: False flushes them to zero.
        random: where stochastic rounding takes its bits from.
        tf32: round fp32 operands of products to TF32 first, as a device does that was told to.

    Raises:
        ValueError: an unknown name, or stochastic rounding without ``random``.

    Source: ``mp_reference.numerics``.

    >>> Arithmetic(rounding="toward-zero").accumulator.name
    'fp32'
    """

    accumulator: str | FloatFormat | Accumulator = "fp32"
    rounding: Rounding = "nearest-even"
    overflow: Overflow = "ieee"
    subnormals: bool = True
    random: np.random.Generator | None = None
    tf32: bool = False

    def __post_init__(self) -> None:
        """Refuse what the first operation would refuse."""
        check_rounding(self.rounding, self.overflow, self.subnormals)
        object.__setattr__(self, "accumulator", accumulator_named(self.accumulator))
        if (self.rounding == "stochastic") != (self.random is not None):
            raise ValueError(
                f"rounding={self.rounding!r} with random {'missing' if self.random is None else 'given'}; stochastic "
                "rounding takes random=np.random.default_rng(seed), the others take none"
            )

    def rounded(self, carrier: Array, fmt: FloatFormat | None) -> Array:
        """A carrier with every value in ``fmt``; None is float64 or integers, which stay as they are.

        A float64 argument for a format is an exact result rounded to odd, and is rounded from there.
        """
        if fmt is None or (fmt == FP32 and carrier.dtype == np.float32):
            return carrier
        rounded = round_to(carrier, fmt, self.rounding, self.overflow, self.subnormals, self.random)
        return rounded.astype(np.float32, copy=False)  # exact: every value is in the format


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A device's op rules for a tape, in any format, with some of them changed.

    Args:
        device: a device type that has op rules.
        fmt: the format that "lower_precision_fp" casts to; any format, a custom one too.
        overrides: op name -> rule, or "none" for no cast.

    Raises:
        ValueError: an unknown device or rule.

    Source: ``mp_reference.spec.op_rules``.

    >>> Rules(device="cuda", fmt=FP16, overrides={"softmax": "none"}).rule("softmax")
    """

    device: str = "cuda"
    fmt: FloatFormat = FP16
    overrides: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Check the names."""
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} has no op rules; the tables cover {', '.join(DEVICES)}")
        for op, rule in self.overrides.items():
            if rule not in (*RULES, "none"):
                raise ValueError(f"overrides[{op!r}]={rule!r} must be one of {', '.join(RULES)}, none")

    def rule(self, op: str) -> str | None:
        """The rule of an op, or None."""
        if op in self.overrides:
            return None if self.overrides[op] == "none" else self.overrides[op]
        return rule_of(overload_of(op, self.device), self.device)
