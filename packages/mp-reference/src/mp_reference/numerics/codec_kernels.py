"""The encoders and decoders of ``codec``: one chunk of float32 to codes, one chunk of codes to float32."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mp_reference.numerics.rounding_kernels import kernel_for
from mp_reference.numerics.workspace import Workspace
from mp_reference.spec.formats import BF16, FP16, FloatFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Encoder: TypeAlias = Callable[[NDArray[np.float32], NDArray[Any], Workspace], None]
    Decoder: TypeAlias = Callable[[NDArray[Any], NDArray[np.float32]], None]

__all__ = ["assembled", "code_dtype", "decoder_for", "disassembled", "encoder_for", "half_special", "nan_code"]


def code_dtype(fmt: FloatFormat) -> np.dtype[Any]:
    """The unsigned integers that hold a format's codes.

    Args:
        fmt: any format.

    Returns:
        uint8 up to 8 bits, uint16 up to 16, uint32 above.

    Source: this module's choice; the dtypes of NumPy and ml_dtypes have the same widths.

    >>> from mp_reference.spec.formats import E2M1FN
    >>> code_dtype(E2M1FN)
    dtype('uint8')
    """
    return np.dtype(np.uint8 if fmt.bits <= 8 else np.uint16 if fmt.bits <= 16 else np.uint32)


def nan_code(fmt: FloatFormat) -> int:
    """The code that this project writes for NaN: quiet, positive where there is a choice.

    Args:
        fmt: a format that has a NaN.

    Returns:
        The code.

    Raises:
        ValueError: the format has no NaN.

    Source: IEEE 754-2019, 6.2.1 for ``ieee``; else the only NaN of ``fmt.source``.

    >>> from mp_reference.spec.formats import E4M3FN, FP16
    >>> hex(nan_code(FP16)), hex(nan_code(E4M3FN))
    ('0x7e00', '0x7f')
    """
    if not fmt.has_nan:
        raise ValueError(f"{fmt.name} has no NaN; replace NaN first, for example with np.nan_to_num")
    if fmt.specials == "ieee":
        field = (1 << fmt.exponent_bits) - 1
        return field << fmt.mantissa_bits | 1 << (fmt.mantissa_bits - 1)
    if fmt.specials == "fnuz":
        return 1 << (fmt.bits - 1)
    return (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1


_EXPONENT, _DROPPED = np.uint32(0x7F800000), np.uint32(13)  # fp16 drops 13 of float32's fraction bits
_LEAST, _PAST = np.float32(2.0**-14).view(np.uint32), np.float32(2.0**16).view(np.uint32)
_ABOVE, _OFFSET, _NEGATIVE = np.float32(1.5 * 2.0**13), np.uint16((126 << 10) + 0x200 & 0xFFFF), np.uint16(0x8001)
_WIDER, _FIELDS, _BIAS_MOVED = np.int32(_DROPPED), np.uint32(0x8FFFE000), np.float32(2.0**112)
_LEAST_UNIT = 2.0**-131  # below it float32's upper half has no room for a midpoint and one bit more


@lru_cache(maxsize=256)
def encoder_for(fmt: FloatFormat, rounding: str, overflow: str = "ieee", flush: Any = "") -> Encoder | None:
    """The function that rounds and encodes a float32 chunk in one go, where there is a fast one.

    Args:
        fmt: the target format.
        rounding: one of ``rounding.ROUNDINGS`` but ``stochastic``.
        overflow: ``ieee`` or ``saturate``.
        flush: as ``rounding_kernels.kernel_for``.

    Returns:
        A callable ``(x, out, work)`` on one-dimensional chunks, or None. It does not look for NaN in formats that have
        none.

    Source: this module.

    >>> out = np.empty(1, np.uint16)
    >>> encoder_for(FP16, "toward-zero")(np.float32([1.9999999]), out, Workspace(1, np.dtype(np.float32)))
    >>> hex(out[0])
    '0x3fff'
    """
    if fmt == FP16:
        return _HalfEncoder(rounding, overflow, flush)
    if fmt == BF16:
        return _UpperHalfEncoder(rounding, overflow, flush)
    if fmt.bits <= 8 and fmt.mantissa_bits <= 5 and fmt.min_subnormal >= _LEAST_UNIT:
        return _TableEncoder(fmt, rounding, overflow, flush)
    return None


class _HalfEncoder:
    """float32 to fp16: adding 1.5 * 2**13 times the power of two leaves rounded steps in the low bits, ties to even.

    With e the exponent, -14 at least, a step is 2**(e - 10), and their number is in two's complement. The upper bits of
    the sum are ``(e + 140) << 10 | 0x200``, less one where x is negative; without that one, the lesser of ``steps`` and
    ``0x8001 - steps`` is in sign and magnitude, and ``(e + 14) << 10`` more are the code. All of it lies in the low 16
    bits, and goes on there at half the cost.
    """

    def __init__(self, rounding: str, overflow: str, flush: Any) -> None:
        nearest = rounding == "nearest-even" and overflow == "ieee" and not flush
        self.before = None if nearest else kernel_for(FP16, rounding, overflow, flush, "float32")

    def __call__(self, x: NDArray[np.float32], out: NDArray[np.uint16], work: Workspace) -> None:
        """Write the codes of ``x`` into ``out``."""
        if self.before is not None:
            self.before(x, work.carried, work, None, 0)
            x = work.carried
        if not x.size:
            return
        pattern, power, halves = x.view(np.uint32), work.power, work.scale.view(np.uint16)
        sums, steps, exponents = power.view(np.uint32), halves[: x.size], halves[x.size :]
        np.bitwise_and(pattern, _EXPONENT, out=sums)
        largest = sums[sums.argmax()]
        sums.clip(_LEAST, _EXPONENT, out=sums)  # a third of the time of np.maximum, which is slow with a scalar
        np.multiply(power, _ABOVE, out=power)
        np.add(x, power, out=power)
        np.copyto(steps, sums, casting="unsafe")
        np.right_shift(sums, _DROPPED, out=sums)
        np.copyto(exponents, sums, casting="unsafe")
        np.subtract(exponents, _OFFSET, out=exponents)
        np.subtract(_NEGATIVE, steps, out=out)
        np.minimum(steps, out, out=out)
        if out[out.argmin()] == 0:  # two's complement has one zero
            np.right_shift(pattern, np.uint32(16), out=sums)
            np.copyto(steps, sums, casting="unsafe")
            np.bitwise_and(steps, np.uint16(0x8000), out=steps)
            np.bitwise_or(out, steps, out=out)
        np.add(out, exponents, out=out)
        if largest >= _PAST:
            where = np.flatnonzero(~(np.abs(x, out=power) < 65536.0))
            infinite = np.where(np.isnan(x[where]), 0x7E00, 0x7C00)
            out[where] = infinite | (pattern[where] >> 16 & 0x8000)


class _UpperHalfEncoder:
    """float32 to bf16: round, then take the upper half of the pattern."""

    def __init__(self, rounding: str, overflow: str, flush: Any) -> None:
        self.round = kernel_for(BF16, rounding, overflow, flush, "float32")

    def __call__(self, x: NDArray[np.float32], out: NDArray[np.uint16], work: Workspace) -> None:
        """Write the codes of ``x`` into ``out``."""
        rounded = work.scale
        self.round(x, rounded, work, None, 0)
        pattern = rounded.view(np.uint32)
        np.right_shift(pattern, np.uint32(16), out=pattern)
        np.copyto(out, pattern, casting="unsafe")


class _TableEncoder:
    """float32 to at most 8 bits: to odd at 16 bits, which no rounding to 6 bits or fewer can see, then look up."""

    def __init__(self, fmt: FloatFormat, rounding: str, overflow: str, flush: Any) -> None:
        sixteen = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
        rounded = np.empty_like(sixteen)
        with np.errstate(all="ignore"):
            kernel_for(fmt, rounding, overflow, flush, "float32")(
                sixteen, rounded, Workspace(65536, rounded.dtype), None, 0
            )
        self.table = assembled(rounded, fmt)

    def __call__(self, x: NDArray[np.float32], out: NDArray[np.uint8], work: Workspace) -> None:
        """Write the codes of ``x`` into ``out``."""
        pattern, odd = x.view(np.uint32), work.scale.view(np.uint32)
        np.bitwise_and(pattern, np.uint32(0xFFFF), out=odd)
        np.add(odd, np.uint32(0xFFFF), out=odd)
        np.bitwise_or(odd, pattern, out=odd)
        np.right_shift(odd, np.uint32(16), out=odd)
        np.copyto(work.index, odd)
        np.take(self.table, work.index, out=out, mode="clip")


def assembled(values: NDArray[np.float32], fmt: FloatFormat) -> NDArray[Any]:
    """Put sign, exponent and fraction together, field by field: the plain way, for custom formats.

    Args:
        values: float32, any shape, every element representable in ``fmt`` or NaN.
        fmt: the format.

    Returns:
        ``code_dtype(fmt)``, the same shape; NaN becomes ``nan_code(fmt)``, 0 where the format has none.

    Source: IEEE 754-2019, 3.4; ``fmt.source`` for the formats that it does not know.

    >>> assembled(np.float32([1.5, -np.inf]), FP16).tolist()
    [15872, 64512]
    """
    finite = np.isfinite(values)
    magnitude = np.where(finite, np.abs(values), 0).astype(np.float64)
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, fmt.min_exponent), fmt.min_exponent)
    steps = np.ldexp(magnitude, fmt.mantissa_bits - exponent).astype(np.int64)  # ulps, the hidden bit among them
    lowest_field = 0 if fmt.specials == "exponent-only" else 1
    hidden = 1 << fmt.mantissa_bits
    code = ((exponent - fmt.min_exponent + lowest_field) << fmt.mantissa_bits) + steps - hidden
    if fmt.has_inf:
        code = np.where(np.isinf(values), ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits, code)
    if fmt.signed:
        code = np.where(np.signbit(values), code | 1 << (fmt.bits - 1), code)
    if fmt.has_nan:
        code = np.where(np.isnan(values), nan_code(fmt), code)
    codes: NDArray[Any] = code.astype(code_dtype(fmt))
    return codes


@lru_cache(maxsize=256)
def decoder_for(fmt: FloatFormat) -> Decoder | None:
    """The function that decodes a chunk, where there is a fast one.

    Args:
        fmt: the format.

    Returns:
        A callable ``(codes, out)`` on chunks of one shape, ``out`` contiguous, codes of ``code_dtype(fmt)``; or None.

    Source: this module.

    >>> out = np.empty(1, np.float32)
    >>> decoder_for(BF16)(np.uint16([0x3F80]), out)
    >>> out
    array([1.], dtype=float32)
    """
    if fmt == FP16:
        return _read_half
    if fmt.exponent_bits == 8 and fmt.bias == 127 and fmt.specials == "ieee":
        return _UpperBitsDecoder(32 - fmt.bits)
    return _TableDecoder(fmt) if fmt.bits <= 16 else None


def half_special(codes: NDArray[np.uint16]) -> bool:
    """Whether there is an infinity or NaN among codes of fp16.

    Args:
        codes: uint16, any shape.

    Returns:
        The answer, from the largest code of either sign: found by its place, which costs half of a reduction.

    Source: IEEE 754-2019, 3.4.

    >>> half_special(np.uint16([0x3C00, 0xFBFF])), half_special(np.uint16([0x3C00, 0xFC00]))
    (False, True)
    """
    if not codes.size:
        return False
    signed = codes.view(np.int16)
    return bool(signed.item(signed.argmax()) >= 0x7C00 or codes.item(codes.argmax()) >= 0xFC00)


def _read_half(codes: NDArray[Any], out: NDArray[np.float32]) -> None:
    """fp16 to float32: shift the fields into place, then move the bias by a multiplication, subnormals included."""
    signed, pattern, unsigned = codes.view(np.int16), out.view(np.int32), out.view(np.uint32)
    np.copyto(pattern, signed)  # the sign spreads into the upper half
    np.left_shift(pattern, _WIDER, out=pattern)
    np.bitwise_and(unsigned, _FIELDS, out=unsigned)
    np.multiply(out, _BIAS_MOVED, out=out)
    if half_special(codes):
        special = np.abs(out) >= 65536
        unsigned[special] |= _EXPONENT


class _UpperBitsDecoder:
    """Formats that are the upper bits of float32."""

    def __init__(self, dropped: int) -> None:
        self.dropped = np.uint32(dropped)

    def __call__(self, codes: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Shift the codes up."""
        pattern = out.view(np.uint32)
        np.copyto(pattern, codes)
        np.left_shift(pattern, self.dropped, out=pattern)


class _TableDecoder:
    """Formats of at most 16 bits: look up."""

    def __init__(self, fmt: FloatFormat) -> None:
        self.table = disassembled(np.arange(1 << fmt.bits, dtype=np.uint32), fmt)

    def __call__(self, codes: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Take each code's number."""
        np.take(self.table, codes, out=out, mode="clip")


def disassembled(codes: NDArray[Any], fmt: FloatFormat) -> NDArray[np.float32]:
    """Take sign, exponent and fraction apart, field by field.

    Args:
        codes: unsigned integers, any shape.
        fmt: the format.

    Returns:
        float32, the same shape.

    Source: IEEE 754-2019, 3.4; ``fmt.source`` for the formats that it does not know.

    >>> disassembled(np.uint16([15872, 64512]), FP16)
    array([ 1.5, -inf], dtype=float32)
    """
    code = codes.astype(np.int64)
    field = code >> fmt.mantissa_bits & ((1 << fmt.exponent_bits) - 1)
    fraction = code & ((1 << fmt.mantissa_bits) - 1)
    negative = (code >> (fmt.bits - 1) & 1).astype(bool) if fmt.signed else np.zeros(code.shape, bool)
    normal = (field > 0) | (fmt.specials == "exponent-only")
    steps = fraction + np.where(normal, 1 << fmt.mantissa_bits, 0)
    exponent = np.where(normal, field, 1) - fmt.bias - fmt.mantissa_bits
    with np.errstate(over="ignore"):  # the all-ones field of an 8-bit exponent, replaced below
        value = np.ldexp(steps.astype(np.float32), exponent)
    magnitude = code & ((1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1)
    if fmt.specials == "ieee":
        top = field == (1 << fmt.exponent_bits) - 1
        value = np.where(top, np.where(fraction == 0, np.float32(np.inf), np.float32(np.nan)), value)
    elif fmt.specials in ("fn", "exponent-only"):
        value = np.where(magnitude == nan_code(fmt), np.float32(np.nan), value)
    elif fmt.specials == "fnuz":
        value = np.where(code == nan_code(fmt), np.float32(np.nan), value)
    signed: NDArray[np.float32] = np.copysign(value, np.where(negative, np.float32(-1), np.float32(1)))
    return signed
