"""The kernels of ``rounding``: one chunk in, the same chunk rounded, nothing allocated on the way.

Ways to round, chosen once for each format, rounding and carrier:

- *scaled*: ``x / ulp(x)`` is exact, is rounded to an integer, and is multiplied back. Every format and rounding.
- *nearest*: a large number is added and subtracted, whose unit is the ulp of ``x``.
- *stochastic*: ``x / ulp(x)`` in fixed point, plus random bits below its unit.
- *patterns*: integer arithmetic on the float32 pattern, for formats with float32's own exponents (bf16, tf32).
- *normal*: that too where a chunk lies within the format's normal range, one of the others for what does not.

What a format does past its largest number and below its smallest is done afterwards, where a chunk has such elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mp_reference.numerics.integer_roundings import INTEGER_ROUNDINGS
from mp_reference.numerics.pattern_roundings import carry_out
from mp_reference.numerics.workspace import CHUNK, Workspace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mp_reference.spec.formats import FloatFormat

__all__ = ["CHUNK", "Kernel", "NearestKernel", "Workspace", "kernel_for"]

_UNSIGNED: dict[str, Any] = {"float32": np.uint32, "float64": np.uint64}
_STORED_BITS = {"float32": 23, "float64": 52}
_BIAS = {"float32": 127, "float64": 1023}
_MANY = 2  # zeros of a chunk whose signs are sooner set all at once


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
        if fmt.exponent_bits == 8 and fmt.bias == 127 and fmt.specials == "ieee" and fmt.mantissa_bits:
            return PatternKernel(fmt, rounding, overflow, flush, carrier)
        lowest, highest = fmt.min_exponent - fmt.mantissa_bits, max(fmt.max_exponent + 1, fmt.mantissa_bits)
        if lowest < -126 or highest > 126 or fmt.mantissa_bits - fmt.min_exponent > 127:
            return WidenedKernel(fmt, rounding, overflow, flush, carrier)
    if not fmt.has_zero:
        return ScaledKernel(fmt, rounding, overflow, flush, carrier)
    if rounding.startswith("nearest") and NearestKernel.suits(fmt, carrier):
        return NearestKernel(fmt, rounding, overflow, flush, carrier)
    kind = StochasticKernel if rounding == "stochastic" else ScaledKernel
    general = kind(fmt, rounding, overflow, flush, carrier)
    return NormalKernel(general) if NormalKernel.suits(fmt, rounding, carrier) else general


class Kernel(ABC):
    """What every kernel shares: the constants of a format in a carrier, and the rules past its ends."""

    long_calls = False
    """Whether few buffers are needed, so that chunks may be long and threads seldom wait for the interpreter."""

    in_place = False
    """Whether chunks of long arrays are copied to where results go, and rounded there: less cache, fewer waits."""

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        self.fmt, self.rounding, self.one_zero = fmt, rounding, not fmt.has_negative_zero
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
        if self.one_zero:
            np.add(out, self.real(0), out=out)  # -0 + 0 is +0

    @abstractmethod
    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round as if subnormals were kept and zero had two signs."""

    @staticmethod
    def _largest(x: NDArray[Any]) -> Any:
        """The largest element, or NaN: found by its place, which costs half of a reduction in short chunks."""
        return x[x.argmax()] if x.size else 0

    def _below_min_normal(self, x: NDArray[Any], work: Workspace) -> NDArray[np.bool_]:
        np.abs(x, out=work.power)
        np.less(work.power, self.min_normal, out=work.second_mask)
        return work.second_mask

    def _overflow(self, out: NDArray[Any], work: Workspace) -> None:
        """Apply the overflow rule to ``out``, rounded as if the exponent had no upper end."""
        if self.saturate:
            out.clip(-self.max, self.max, out=out)
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
        self.trace = self.real(fmt.min_subnormal * 2.0**-70)  # below what 64 random bits tell from zero
        self.to_integers = INTEGER_ROUNDINGS[rounding]

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round by scaling; exact but for the one rounding to an integer."""
        if self.fmt.min_subnormal > 1:  # scaling down must leave something of what is not zero
            tiny = (x != 0) & (np.abs(x) < self.trace)
            x = np.where(tiny, np.copysign(self.trace, x), x)
        unsigned, power, scaled = self.unsigned, work.power, work.scaled
        fields = power.view(unsigned)
        np.bitwise_and(x.view(unsigned), self.exponent_mask, out=fields)
        near_max = self._largest(fields) >= self.top_binade
        power.clip(self.min_normal, self.highest, out=power)  # the method: np.clip costs a microsecond more a call
        np.subtract(self.scale_pattern, fields, out=scaled.view(unsigned))  # 2**mantissa_bits / power
        np.multiply(x, scaled, out=scaled)
        self.to_integers(scaled, work, random, width)
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


class NearestKernel(ScaledKernel):
    """To nearest without scaling: adding and subtracting 1.5 * 2**k leaves ``x`` rounded at the unit of 2**k.

    That rounds ties to even. With its last bit set a number is no tie any more, and on the same side of every other
    one: so ties go away from zero.
    """

    @staticmethod
    def suits(fmt: FloatFormat, carrier: str) -> bool:
        """Whether what is added stays in the carrier and leaves its own last bit alone."""
        dropped = _STORED_BITS[carrier] - fmt.mantissa_bits
        return dropped > 1 and fmt.max_exponent + dropped + 2 < _BIAS[carrier]

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        super().__init__(fmt, rounding, overflow, flush, carrier)
        if rounding == "nearest-even":  # the other one writes there at once
            self.in_place = True
        self.above = self.real(1.5 * 2.0 ** (self.stored_bits - fmt.mantissa_bits))
        self.may_vanish = self.real(fmt.min_subnormal / 2).view(self.unsigned)
        self.least_normal = self.min_normal.view(self.unsigned)
        self.sign_bit = self.unsigned(1 << (8 * np.dtype(carrier).itemsize - 1))

    def bounded(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """To even, for finite ``x`` below half of ``fmt.max``, where the sign of a zero is of no account: no checks."""
        del random, width
        anchor = work.power[: x.size]
        np.bitwise_and(x.view(self.unsigned), self.exponent_mask, out=anchor.view(self.unsigned))
        self._round_at(anchor, x, out)

    def _round_at(self, anchor: NDArray[Any], x: NDArray[Any], out: NDArray[Any]) -> None:
        """Add and subtract what belongs to the powers of two in ``anchor``."""
        anchor.clip(self.min_normal, self.highest, out=anchor)
        np.multiply(anchor, self.above, out=anchor)
        np.add(x, anchor, out=out)
        np.subtract(out, anchor, out=out)

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round by adding; where a result may be zero, give it the sign of ``x``."""
        unsigned, anchor = self.unsigned, work.power
        pattern, fields = x.view(unsigned), anchor.view(unsigned)
        np.bitwise_and(pattern, self.exponent_mask, out=fields)
        near_max = self._largest(fields) >= self.top_binade
        near_zero = self._near_zero(fields)
        if len(near_zero) == _MANY:
            sign, rounded = work.scale.view(unsigned), out.view(unsigned)
            np.bitwise_and(pattern, self.sign_bit, out=sign)
        elif near_zero:
            signed = x[near_zero]
        if self.rounding == "nearest-away":
            if near_max:  # infinity must not get its last bit set
                super().round(x, out, work, random, width)
                return
            np.bitwise_or(pattern, unsigned(1), out=out.view(unsigned))
            x = out
        self._round_at(anchor, x, out)
        if len(near_zero) == _MANY:
            np.bitwise_or(rounded, sign, out=rounded)
        elif near_zero:
            out[near_zero] = np.copysign(out[near_zero], signed)
        if near_max:
            self._overflow(out, work)

    def _near_zero(self, fields: NDArray[Any]) -> list[int]:
        """Where results may be zero, ``_MANY`` places at most; their fields become the least normal number's."""
        places: list[int] = []
        while fields.size and len(places) < _MANY:
            place = int(fields.argmin())
            if fields[place] > self.may_vanish:
                break
            places.append(place)
            fields[place] = self.least_normal
        return places


class StochasticKernel(ScaledKernel):
    """Add the random bits below the last kept one, as integers; fall back to comparing where they are too many."""

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round by ``(x * 2**(width + 1) / ulp + 2 * R + 1) >> (width + 1)``."""
        assert random is not None
        unsigned, power, scale, scaled = self.unsigned, work.power, work.scale, work.scaled
        places = 8 * x.dtype.itemsize - 1
        fields, bits = power.view(unsigned), scale.view(unsigned)
        np.bitwise_and(x.view(unsigned), self.exponent_mask, out=fields)
        near_max = self._largest(fields) >= self.top_binade
        if near_max or self.fmt.mantissa_bits + width + 3 > places:
            super().round(x, out, work, random, width)
            return
        power.clip(self.min_normal, self.highest, out=power)
        np.subtract(self.scale_pattern + unsigned((width + 1) << self.stored_bits), fields, out=bits)
        np.multiply(x, scale, out=scaled)
        np.abs(scaled, out=scaled)
        steps = work.carried.view(unsigned)
        np.copyto(steps.view(f"i{x.dtype.itemsize}"), scaled, casting="unsafe")  # the cast truncates: all bits below go
        np.copyto(bits, random, casting="same_kind")
        if width < 8 * random.dtype.itemsize:
            np.bitwise_and(bits, unsigned((1 << width) - 1), out=bits)
        np.left_shift(bits, unsigned(1), out=bits)
        np.bitwise_or(bits, unsigned(1), out=bits)
        np.add(steps, bits, out=steps)
        np.right_shift(steps, unsigned(width + 1), out=steps)
        np.copyto(scaled, steps.view(f"i{x.dtype.itemsize}"), casting="unsafe")
        np.multiply(power, self.ulp_of_one, out=power)
        np.multiply(scaled, power, out=scaled)
        np.bitwise_and(x.view(unsigned), unsigned(1 << places), out=bits)
        np.bitwise_or(scaled.view(unsigned), bits, out=out.view(unsigned))


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

    long_calls = True

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: str, carrier: str) -> None:
        super().__init__(fmt, rounding, overflow, flush, carrier)
        self.carry = carry_out(rounding, self.stored_bits - fmt.mantissa_bits)
        self.keep = np.uint32(0xFFFFFFFF << (self.stored_bits - fmt.mantissa_bits) & 0xFFFFFFFF)

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round the patterns, NaN aside."""
        nan = np.flatnonzero(np.isnan(x)) if np.isnan(self._largest(x)) else None
        quiet = None if nan is None else np.copysign(self.real(np.nan), x[nan])
        self.round_patterns(x, out, work, random, width)
        if nan is not None:
            out[nan] = quiet
        if self.saturate:
            out.clip(-self.max, self.max, out=out)

    def round_patterns(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round what is finite and at least ``fmt.min_normal``, or a zero, as if the exponent had no upper end."""
        if self.carry is None:
            np.bitwise_and(x.view(np.uint32), self.keep, out=out.view(np.uint32))
            return
        total = work.power.view(np.uint32)
        self.carry(x.view(np.uint32), total, random, width)
        np.bitwise_and(total, self.keep, out=out.view(np.uint32))


class NormalKernel(PatternKernel):
    """Patterns for the format's normal numbers, one fixed unit for a chunk's few subnormal ones.

    ``general`` is for the other chunks: with many subnormals, NaN, or anything near the largest number.
    """

    @staticmethod
    def suits(fmt: FloatFormat, rounding: str, carrier: str) -> bool:
        """Whether patterns are the sooner way, and the format's normal numbers are float32's with less precision.

        Without fraction bits the last bit of a pattern is the exponent's, and says nothing of even and odd.
        """
        sooner = rounding in ("toward-zero", "to-odd", "stochastic")
        return (
            sooner and carrier == "float32" and 0 < fmt.mantissa_bits < _STORED_BITS[carrier] and fmt.min_subnormal <= 1
        )

    def __init__(self, general: ScaledKernel) -> None:
        super().__init__(general.fmt, general.rounding, "ieee", general.flush, "float32")  # the other one overflows
        self.general = general
        self.top = self.real(2.0**self.fmt.max_exponent)  # what lies below rounds to no more than this
        self.unit, self.units = self.real(self.fmt.min_subnormal), self.real(1 / self.fmt.min_subnormal)

    def round(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round the patterns, then the subnormals among them in steps of their unit."""
        magnitude, subnormal = work.power, work.mask
        np.abs(x, out=magnitude)
        usual = self._largest(magnitude) < self.top
        np.less(magnitude, self.min_normal, out=subnormal)
        few = np.count_nonzero(subnormal)
        if not usual or few > x.size // 16:
            self.general.round(x, out, work, random, width)
            return
        if few:
            where = subnormal.nonzero()[0]
            small = x[where]
            np.multiply(small, self.units, out=small)
            self.general.to_integers(small, work.first(int(few)), None if random is None else random[where], width)
            np.multiply(small, self.unit, out=small)
        self.round_patterns(x, out, work, random, width)
        if few:
            out[where] = small
