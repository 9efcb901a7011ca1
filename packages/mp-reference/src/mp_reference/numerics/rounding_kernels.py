"""The kernels of ``rounding``: one chunk in, the same chunk rounded, nothing allocated on the way.

Two ways to round, chosen once for each format, rounding and carrier:

- *scaled*: ``x / ulp(x)`` is exact, is rounded to an integer, and is multiplied back. Every format and rounding.
- *patterns*: integer arithmetic on the float32 pattern, for formats with float32's own exponents (bf16, tf32).

What a format does past its largest number and below its smallest is done afterwards, where a chunk has such elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mp_reference.spec.formats import FloatFormat

__all__ = ["CHUNK", "Kernel", "Workspace", "kernel_for"]

CHUNK = 65536
"""Elements a chunk: five buffers of them fit the second-level cache, and a ufunc call costs little against them."""

_UNSIGNED: dict[str, Any] = {"float32": np.uint32, "float64": np.uint64}
_STORED_BITS = {"float32": 23, "float64": 52}
_BIAS = {"float32": 127, "float64": 1023}


class Workspace:
    """The scratch buffers of one call, each ``size`` elements; pages that no kernel touches cost nothing."""

    __slots__ = ("carried", "index", "mask", "power", "scale", "scaled", "second_mask")

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self.power, self.scale, self.scaled, self.carried = (np.empty(size, dtype) for _ in range(4))
        self.mask, self.second_mask = np.empty(size, np.bool_), np.empty(size, np.bool_)
        self.index = np.empty(size, np.intp)

    def first(self, size: int) -> Workspace:
        """The same buffers cut to ``size`` elements."""
        if size == self.mask.size:
            return self
        part = object.__new__(Workspace)
        for name in self.__slots__:
            setattr(part, name, getattr(self, name)[:size])
        return part


@lru_cache(maxsize=256)
def kernel_for(
    fmt: FloatFormat, rounding: str, overflow: str, flush: Literal["", "before", "after"], carrier: str
) -> Kernel:
    """Choose the kernel of a format, a rounding and a carrier.

    Args:
        fmt: the target format.
        rounding: one of ``rounding.ROUNDINGS``.
        overflow: ``ieee`` or ``saturate``.
        flush: ``""`` keeps subnormals; ``before`` or ``after`` rounding says when they become zero.
        carrier: ``float32`` or ``float64``.

    Returns:
        A callable ``(x, out, work, random, width)`` on one-dimensional chunks; ``out`` may be ``x``.

    Source: this module.

    >>> from mp_reference.spec.formats import BF16
    >>> type(kernel_for(BF16, "nearest-even", "ieee", "", "float32")).__name__
    'PatternKernel'
    """
    if carrier == "float32":
        if fmt.exponent_bits == 8 and fmt.bias == 127 and fmt.specials == "ieee":
            return PatternKernel(fmt, rounding, overflow, flush, carrier)
        lowest, highest = fmt.min_exponent - fmt.mantissa_bits, max(fmt.max_exponent + 1, fmt.mantissa_bits)
        if lowest < -126 or highest > 126 or fmt.mantissa_bits - fmt.min_exponent > 127:
            return WidenedKernel(fmt, rounding, overflow, flush, carrier)
    return ScaledKernel(fmt, rounding, overflow, flush, carrier)


class Kernel(ABC):
    """What every kernel shares: the constants of a format in a carrier, and the rules past its ends."""

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        self.fmt, self.rounding = fmt, rounding
        self.flush = flush if fmt.has_zero else ""  # what has no zero has no subnormals either
        self.saturate = overflow == "saturate" or fmt.specials == "finite"
        self.real = np.dtype(carrier).type
        self.unsigned = _UNSIGNED[carrier]
        self.stored_bits, self.bias = _STORED_BITS[carrier], _BIAS[carrier]
        self.max = self.real(fmt.max)
        self.min_normal = self.real(fmt.min_normal)
        self.past_max = self.real(np.inf if fmt.has_inf else np.nan)

    def __call__(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round the chunk ``x`` into ``out``."""
        work = work.first(x.size)
        tiny = self._below_min_normal(x, work) if self.flush == "before" else None
        self.round(x, out, work, random, width)
        if self.flush == "after":
            tiny = self._below_min_normal(out, work)
        if tiny is not None and tiny.any():
            out[tiny] = np.copysign(self.real(0), out[tiny])
        if not self.fmt.has_negative_zero:
            np.add(out, self.real(0), out=out)  # -0 + 0 is +0

    @abstractmethod
    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round as if subnormals were kept and zero had two signs."""

    def _below_min_normal(self, x: NDArray[Any], work: Workspace) -> NDArray[np.bool_]:
        np.abs(x, out=work.power)
        np.less(work.power, self.min_normal, out=work.second_mask)
        return work.second_mask

    def _overflow(self, out: NDArray[Any], work: Workspace) -> None:
        """Apply the overflow rule to ``out``, rounded as if the exponent had no upper end."""
        if self.saturate:
            np.clip(out, -self.max, self.max, out=out)
            return
        np.abs(out, out=work.power)
        np.greater(work.power, self.max, out=work.mask)
        if not work.mask.any():
            return
        where = np.flatnonzero(work.mask)
        past = out[where]
        finite = np.isfinite(past)
        to_max = {
            "toward-zero": finite, "to-odd": finite, "toward-positive": finite & (past < 0),
            "toward-negative": finite & (past > 0),
        }.get(self.rounding, np.zeros_like(finite))  # fmt: skip
        out[where] = np.copysign(np.where(to_max, self.max, self.past_max), past)


class ScaledKernel(Kernel):
    """Scale each element by its own power of two so that an ulp is 1, round to an integer, scale back."""

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        super().__init__(fmt, rounding, overflow, flush, carrier)
        unsigned = self.unsigned
        exponent_field = (1 << (np.dtype(carrier).itemsize * 8 - 1 - self.stored_bits)) - 1
        self.exponent_mask = unsigned(exponent_field << self.stored_bits)
        self.top_binade = unsigned((fmt.max_exponent + self.bias) << self.stored_bits)
        self.highest = self.real(2.0 ** max(fmt.max_exponent + 1, fmt.mantissa_bits))
        self.scale_pattern = unsigned((2 * self.bias + fmt.mantissa_bits) << self.stored_bits)
        self.ulp_of_one = self.real(fmt.epsilon)
        self.to_integers = _INTEGER_ROUNDINGS[rounding]

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round by scaling; exact but for the one rounding to an integer."""
        unsigned, power, scale, scaled = self.unsigned, work.power, work.scale, work.scaled
        fields = power.view(unsigned)
        np.bitwise_and(x.view(unsigned), self.exponent_mask, out=fields)
        near_max = x.size > 0 and fields.max() >= self.top_binade
        np.clip(power, self.min_normal, self.highest, out=power)
        np.subtract(self.scale_pattern, fields, out=scale.view(unsigned))  # 2**mantissa_bits / power
        np.multiply(x, scale, out=scaled)
        self.to_integers(scaled, scale, work.mask, random, width)
        np.multiply(power, self.ulp_of_one, out=power)
        if self.fmt.has_zero:
            np.multiply(scaled, power, out=out)
        else:
            self._positive_only(x, scaled, out, work)
        if near_max:
            self._overflow(out, work)

    def _positive_only(self, x: NDArray[Any], scaled: NDArray[Any], out: NDArray[Any], work: Workspace) -> None:
        """Formats without zero and sign: what is not positive is NaN, what is too small is the smallest."""
        np.less_equal(x, 0, out=work.mask)
        np.multiply(scaled, work.power, out=out)
        np.maximum(out, self.real(self.fmt.min_normal), out=out)
        out[work.mask] = np.nan


class WidenedKernel(Kernel):
    """float32 carriers whose scale would leave float32's range: through float64, exactly."""

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        super().__init__(fmt, rounding, overflow, flush, carrier)
        self.inner = ScaledKernel(fmt, rounding, overflow, flush, "float64")

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Widen, round, narrow; only the middle one rounds."""
        del work  # the buffers of the other carrier
        wide = x.astype(np.float64)
        self.inner.round(wide, wide, Workspace(x.size, wide.dtype), random, width)
        np.copyto(out, wide, casting="same_kind")


class PatternKernel(Kernel):
    """Round the float32 pattern as an integer: the carry into the exponent is the next binade, at the top infinity."""

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        super().__init__(fmt, rounding, overflow, flush, carrier)
        self.dropped = self.stored_bits - fmt.mantissa_bits
        self.low = np.uint32((1 << self.dropped) - 1)
        self.keep = np.uint32(0xFFFFFFFF ^ int(self.low))

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round the patterns, NaN aside."""
        largest = x.max() if x.size else self.real(0)
        nan = np.flatnonzero(np.isnan(x)) if np.isnan(largest) else None
        if self.dropped == 0:
            np.copyto(out, x)
        else:
            self._carry(x.view(np.uint32), work.power.view(np.uint32), random, width)
            np.bitwise_and(work.power.view(np.uint32), self.keep, out=out.view(np.uint32))
        if nan is not None:
            out[nan] = np.nan
        if self.saturate:
            np.clip(out, -self.max, self.max, out=out)

    def _carry(self, pattern: NDArray[Any], total: NDArray[Any], random: NDArray[Any] | None, width: int) -> None:
        """``total`` gets the pattern plus what makes it carry out of the dropped bits where it must go up."""
        dropped, low, rounding = np.uint32(self.dropped), self.low, self.rounding
        if rounding == "toward-zero":
            np.copyto(total, pattern)
            return
        if rounding == "to-odd":
            np.bitwise_and(pattern, low, out=total)
            np.add(total, low, out=total)  # carries where anything was dropped
            np.bitwise_or(total, pattern, out=total)
            return
        if rounding == "nearest-even":
            np.right_shift(pattern, dropped, out=total)
            np.bitwise_and(total, np.uint32(1), out=total)
            np.add(total, np.uint32(int(low) >> 1), out=total)
        elif rounding == "nearest-away":
            np.add(pattern, np.uint32((int(low) >> 1) + 1), out=total)
            return
        elif rounding == "stochastic":
            assert random is not None
            _aligned_random(random, width, self.dropped, total)
        else:
            np.right_shift(pattern.view(np.int32), np.int32(31), out=total.view(np.int32))  # all ones if negative
            if rounding == "toward-positive":
                np.invert(total, out=total)
            np.bitwise_and(total, low, out=total)
        np.add(total, pattern, out=total)


def _aligned_random(random: NDArray[Any], width: int, dropped: int, total: NDArray[Any]) -> None:
    """``width`` random bits, put just below the last kept one; half of their last unit added if some places stay."""
    kind = random.dtype.type
    if width < 8 * random.dtype.itemsize:
        random = random & kind((1 << width) - 1)
    if width > dropped:
        random = random >> kind(width - dropped)
    np.copyto(total, random, casting="same_kind")
    if width < dropped:
        np.left_shift(total, np.uint32(dropped - width), out=total)
        np.bitwise_or(total, np.uint32(1 << (dropped - width - 1)), out=total)


def _to_nearest_even(y: NDArray[Any], *_: Any) -> None:
    np.rint(y, out=y)


def _to_zero(y: NDArray[Any], *_: Any) -> None:
    np.trunc(y, out=y)


def _up(y: NDArray[Any], *_: Any) -> None:
    np.ceil(y, out=y)


def _down(y: NDArray[Any], *_: Any) -> None:
    np.floor(y, out=y)


def _to_nearest_away(y: NDArray[Any], spare: NDArray[Any], *_: Any) -> None:
    just_below_half = np.nextafter(y.dtype.type(0.5), y.dtype.type(0))  # 0.5 itself would lift 0.49999997 to 1
    np.copysign(just_below_half, y, out=spare)
    np.add(y, spare, out=y)
    np.trunc(y, out=y)


def _to_odd(y: NDArray[Any], spare: NDArray[Any], mask: NDArray[np.bool_], *_: Any) -> None:
    np.trunc(y, out=spare)
    np.not_equal(spare, y, out=mask)
    if mask.any():
        inexact = y[mask]
        y[mask] = 2 * np.trunc(inexact / 2) + np.copysign(y.dtype.type(1), inexact)


def _stochastic(
    y: NDArray[Any], spare: NDArray[Any], mask: NDArray[np.bool_], random: NDArray[Any], width: int
) -> None:
    """Up in magnitude where the fraction f has ``f >= 1 - (R + 1/2) / 2**width``; both sides are exact."""
    if width < 8 * random.dtype.itemsize:
        random = random & random.dtype.type((1 << width) - 1)
    magnitude = np.abs(y)
    whole = np.trunc(magnitude, out=spare)
    np.subtract(magnitude, whole, out=magnitude)
    if width < (24 if y.dtype == np.float32 else 53):
        threshold = random.astype(y.dtype)
        np.multiply(threshold, y.dtype.type(-(2.0**-width)), out=threshold)
        np.add(threshold, y.dtype.type(1 - 2.0 ** -(width + 1)), out=threshold)
        np.greater_equal(magnitude, threshold, out=mask)
    else:
        np.copyto(mask, _carries(magnitude, random, width))
    np.add(whole, mask, out=whole)
    np.copysign(whole, y, out=y)


def _carries(fraction: NDArray[Any], random: NDArray[Any], width: int) -> NDArray[np.bool_]:
    """Whether ``fraction * 2**width + R + 1/2`` reaches ``2**width``, for widths that no float holds beside the 1/2."""
    shifted = np.ldexp(fraction.astype(np.float64), width)
    whole = np.trunc(shifted)
    whole += shifted - whole >= 0.5
    ups = whole.astype(np.uint64)  # so many of the 2**width values of R carry
    first = np.uint64((1 << width) % (1 << 64)) - ups
    carries: NDArray[np.bool_] = (random.astype(np.uint64) >= first) & (ups != 0)
    return carries


_INTEGER_ROUNDINGS: dict[str, Any] = {
    "nearest-even": _to_nearest_even,
    "nearest-away": _to_nearest_away,
    "toward-zero": _to_zero,
    "toward-positive": _up,
    "toward-negative": _down,
    "to-odd": _to_odd,
    "stochastic": _stochastic,
}
