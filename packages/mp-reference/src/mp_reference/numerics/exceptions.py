"""The five exceptions of IEEE 754, per element and counted, for the arithmetic of ``arithmetic``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from mp_reference.numerics.bits import codes_of
from mp_reference.numerics.elementwise import operands_of
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.rounding import check_rounding, round_to

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.rounding import Rounding
    from mp_reference.spec.formats import FloatFormat

__all__ = ["ExceptionCounts", "ExceptionFlag", "Tininess", "count_exceptions", "exception_flags"]

Tininess = Literal["after", "before"]
_OPERANDS = {"sqrt": 1, "rsqrt": 1, "fma": 3}  # all others take two


class ExceptionFlag(IntFlag):
    """The flags, with the bits that Berkeley SoftFloat gives them."""

    INEXACT = 1
    UNDERFLOW = 2
    OVERFLOW = 4
    DIVIDE_BY_ZERO = 8
    INVALID = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionCounts:
    """How many elements raised each exception.

    Args:
        invalid: no useful result is definable: ``0 * inf``, ``inf - inf``, ``0 / 0``, a root of a negative number, a
            signalling NaN.
        divide_by_zero: an exact infinity from finite operands.
        overflow: the rounded result would be past the largest number.
        underflow: tiny and inexact.
        inexact: the result is not the exact one.

    Source: IEEE 754-2019, 7.

    >>> ExceptionCounts(invalid=0, divide_by_zero=1, overflow=0, underflow=0, inexact=2).inexact
    2
    """

    invalid: int
    divide_by_zero: int
    overflow: int
    underflow: int
    inexact: int


def exception_flags(
    name: str, *operands: ArrayLike, rounding: Rounding = "nearest-even", tininess: Tininess = "after"
) -> NDArray[np.uint8]:
    """The exceptions that each element of an operation raises.

    Args:
        name: ``add``, ``sub``, ``mul``, ``div``, ``sqrt``, ``rsqrt``, ``fma`` or ``rem``.
        operands: arrays of float32, float16, bfloat16 or float8_e5m2, of one dtype, broadcastable.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.
        tininess: whether a result counts as tiny ``after`` or ``before`` it is rounded.

    Returns:
        uint8, the broadcast shape, bits as in ``ExceptionFlag``.

    Raises:
        TypeError: too few or too many operands, dtypes that differ, or a format without infinity, which has no IEEE
            exceptions.
        ValueError: an unknown operation, rounding or tininess.

    Source: IEEE 754-2019, 7.2 to 7.6; ``fma(0, inf, nan)`` is invalid, as 7.2 allows.

    >>> flags = exception_flags("div", np.float16([1, 1]), np.float16([0, 3]))
    >>> [ExceptionFlag(flag).name for flag in flags.tolist()]
    ['DIVIDE_BY_ZERO', 'INEXACT']
    """
    if name not in ODD:
        raise ValueError(f"operation {name!r} must be one of {', '.join(ODD)}")
    if tininess not in get_args(Tininess):
        raise ValueError(f"tininess={tininess!r} must be 'after' or 'before' (rounding)")
    if rounding == "stochastic":
        raise ValueError("stochastic rounding raises no IEEE exceptions; choose one of the other six")
    check_rounding(rounding)
    if len(operands) != (wanted := _OPERANDS.get(name, 2)):
        raise TypeError(f"{name} takes {wanted} operands, got {len(operands)}; pass as many arrays of one dtype")
    fmt, values = operands_of(name, *operands)
    if not fmt.has_inf:
        raise TypeError(f"{fmt.name} has no infinity, so IEEE exceptions are not defined for it; use an ieee format")
    values = list(np.broadcast_arrays(*values))
    with np.errstate(all="ignore"):
        wide = [value.astype(np.float64) for value in values]
        exact = ODD[name](*wide, downward=rounding == "toward-negative")
        rounded = round_to(exact, fmt, rounding)
        flags = _rounding_flags(exact, rounded, fmt, rounding, tininess)
        finite = np.all([np.isfinite(operand) for operand in wide], axis=0)
        flags = np.where(finite & np.isinf(exact), np.uint8(ExceptionFlag.DIVIDE_BY_ZERO), flags)
        flags = np.where(_invalid(name, values, wide, exact, fmt), np.uint8(ExceptionFlag.INVALID), flags)
    return flags.astype(np.uint8)


def _rounding_flags(
    exact: NDArray[np.float64], rounded: NDArray[np.float64], fmt: FloatFormat, rounding: Rounding, tininess: Tininess
) -> NDArray[np.uint8]:
    """Overflow, underflow and inexact: compare with the rounding that an unbounded exponent would give."""
    magnitude = np.abs(exact)
    finite = np.isfinite(exact)
    lowered = np.abs(round_to(exact * 2.0**-8, fmt, rounding)) * 2.0**8  # far from overflow
    overflow = finite & (magnitude >= 2.0**fmt.max_exponent) & (lowered > fmt.max)
    raised = np.abs(round_to(exact * 2.0**8, fmt, rounding)) * 2.0**-8  # far enough from the subnormals
    tiny = magnitude < fmt.min_normal
    if tininess == "after":  # what an unbounded exponent would round up to the smallest normal number is not tiny
        tiny &= raised < fmt.min_normal
    inexact = finite & ((exact != rounded) | overflow)
    flags = np.where(inexact, int(ExceptionFlag.INEXACT), 0)
    flags |= np.where(overflow, int(ExceptionFlag.OVERFLOW), 0)
    flags |= np.where(inexact & tiny & (magnitude > 0), int(ExceptionFlag.UNDERFLOW), 0)
    return flags.astype(np.uint8)


def _invalid(
    name: str,
    values: list[NDArray[Any]],
    wide: list[NDArray[np.float64]],
    exact: NDArray[np.float64],
    fmt: FloatFormat,
) -> NDArray[np.bool_]:
    """A NaN out of numbers, a signalling NaN in, or ``0 * inf + nan``."""
    nan = np.any([np.isnan(operand) for operand in wide], axis=0)
    invalid = np.isnan(exact) & ~nan
    quiet = 1 << (fmt.mantissa_bits - 1)
    for value, operand in zip(values, wide, strict=True):
        invalid |= np.isnan(operand) & (codes_of(value) & codes_of(value).dtype.type(quiet) == 0)
    if name == "fma":
        invalid |= np.isnan(wide[0] * wide[1]) & ~np.isnan(wide[0]) & ~np.isnan(wide[1])
    return np.asarray(invalid)


def count_exceptions(
    name: str, *operands: ArrayLike, rounding: Rounding = "nearest-even", tininess: Tininess = "after"
) -> ExceptionCounts:
    """Count the exceptions that an operation raises.

    Args:
        name: as ``exception_flags``.
        operands: as ``exception_flags``.
        rounding: as ``exception_flags``.
        tininess: as ``exception_flags``.

    Returns:
        One count for each exception.

    Raises:
        TypeError: as ``exception_flags``.
        ValueError: as ``exception_flags``.

    Source: IEEE 754-2019, 7.

    >>> count_exceptions("mul", np.float16([300, 1e-4, 2]), np.float16([300, 1e-4, 3]))
    ExceptionCounts(invalid=0, divide_by_zero=0, overflow=1, underflow=1, inexact=2)
    """
    flags = exception_flags(name, *operands, rounding=rounding, tininess=tininess)
    return ExceptionCounts(
        **{flag.name.lower(): int(np.count_nonzero(flags & flag)) for flag in ExceptionFlag if flag.name}
    )
