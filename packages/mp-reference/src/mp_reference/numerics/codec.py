"""Codes of a format from numbers, and numbers from codes, for every format and rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.codec_kernels import (
    assembled,
    code_dtype,
    decoder_for,
    disassembled,
    encoder_for,
    half_special,
    nan_code,
)
from mp_reference.numerics.rounding import check_rounding, flush_of, round_to
from mp_reference.numerics.workspace import BUFFER_BYTES, CHUNK, borrowed
from mp_reference.spec.formats import BF16, FP16, FP32, FloatFormat, require_format

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.arguments import RandomBits
    from mp_reference.numerics.rounding import Overflow, Rounding, Subnormals

__all__ = [
    "cast", "code_dtype", "decode", "decoder_for", "encode", "encode_into", "encode_representable", "encoder_for",
    "nan_code", "refuse_nan",
]  # fmt: skip


_ENCODED = BUFFER_BYTES // 4  # numbers a chunk, in float32
_DECODED = 2 * CHUNK  # nothing but codes and numbers need fit the cache
_LIBRARY_SOONER = 10240
"""Elements below which NumPy's scalar conversion to fp16 beats a dozen calls."""


def encode(
    x: ArrayLike,
    fmt: FloatFormat,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "ieee",
    subnormals: Subnormals = True,
    random_bits: RandomBits | None = None,
    *,
    random_width: int | None = None,
) -> NDArray[Any]:
    """Round numbers once into a format and give their codes.

    Args:
        x: whatever ``round_to`` takes, any shape.
        fmt: the target format.
        rounding: as ``round_to``.
        overflow: as ``round_to``.
        subnormals: as ``round_to``.
        random_bits: as ``round_to``.
        random_width: as ``round_to``.

    Returns:
        ``code_dtype(fmt)``, shape of ``x``; NaN becomes ``nan_code(fmt)``, in fp16, bf16, fp32 with its sign.

    Raises:
        TypeError: as ``round_to``.
        ValueError: as ``round_to``; or a NaN for a format that has none.

    Source: IEEE 754-2019, 3.4; ``fmt.source`` for the formats that it does not know.

    >>> from mp_reference.spec.formats import E4M3FN
    >>> encode(np.array([1.0, -0.0, 448.0, 1000.0]), E4M3FN).tolist()
    [56, 128, 126, 127]
    """
    check_rounding(rounding, overflow, subnormals)
    require_format(fmt)
    values = np.asarray(x)
    drawn = rounding == "stochastic" or random_bits is not None or random_width is not None
    if values.dtype == np.float32 and not drawn:
        contiguous = values.flags.c_contiguous
        plain = rounding == "nearest-even" and overflow == "ieee" and subnormals is True
        if plain and (fmt == BF16 or (fmt == FP16 and (values.size < _LIBRARY_SOONER or not contiguous))):
            return _library_codes(values, fmt)
        how = (rounding, overflow, flush_of(subnormals))
        if contiguous and encoder_for(fmt, *how) is not None:
            refuse_nan(values, fmt)
            codes = np.empty(values.shape, code_dtype(fmt))
            encode_into(values, fmt, codes, *how)
            return codes
    rounded = round_to(values, fmt, rounding, overflow, subnormals, random_bits, random_width=random_width)
    return encode_representable(rounded, fmt)


def _library_codes(x: NDArray[np.float32], fmt: FloatFormat) -> NDArray[np.uint16]:
    """Where NumPy's or ml_dtypes' cast from float32 is faster: it rounds once too. Only NumPy's NaNs are made ours."""
    with np.errstate(over="ignore", invalid="ignore"):
        codes: NDArray[np.uint16] = x.astype(fmt.dtype, order="C").view(np.uint16)
        if fmt == FP16 and half_special(codes):  # ml_dtypes writes what we do
            nan = np.isnan(x)
            codes[nan] = np.where(np.signbit(x[nan]), 0x8000 | nan_code(fmt), nan_code(fmt))
    return codes


def encode_representable(rounded: NDArray[Any], fmt: FloatFormat) -> NDArray[Any]:
    """Codes of numbers that the format represents; nothing is rounded here.

    Args:
        rounded: float32 or float64, any shape, every element representable in ``fmt`` or NaN.
        fmt: the format.

    Returns:
        ``code_dtype(fmt)``, the same shape.

    Raises:
        ValueError: a NaN for a format that has none.

    Source: as ``encode``.

    >>> encode_representable(np.array([1.5]), FP16)
    array([15872], dtype=uint16)
    """
    refuse_nan(rounded, fmt)
    narrow = np.ascontiguousarray(rounded, np.float32).reshape(rounded.shape)  # exact: float32 holds every format
    if encoder_for(fmt, "toward-zero") is not None:
        codes = np.empty(narrow.shape, code_dtype(fmt))
        encode_into(narrow, fmt, codes, "toward-zero")
        return codes
    pattern = narrow.view(np.uint32)
    if fmt == FP32:
        return pattern.copy()
    return assembled(narrow, fmt)


def refuse_nan(values: NDArray[Any], fmt: FloatFormat) -> None:
    """Raise where a NaN meets a format that has none.

    Args:
        values: floating array, any shape.
        fmt: the format.

    Raises:
        ValueError: there is a NaN and the format has none.

    Source: contract "nothing is silent": a cast that cannot be honoured raises.

    >>> refuse_nan(np.array([np.nan]), FP16)
    """
    if not fmt.has_nan and values.size and np.isnan(values.max()):
        where = int(np.flatnonzero(np.isnan(values.reshape(-1)))[0])
        raise ValueError(
            f"element {where} is NaN and {fmt.name} has none; replace NaN first, for example with np.nan_to_num, or "
            "keep the float32 carrier of round_to"
        )


def encode_into(
    x: NDArray[np.float32], fmt: FloatFormat, out: NDArray[Any], rounding: str = "nearest-even",
    overflow: str = "ieee", flush: str = "",
) -> None:  # fmt: skip
    """Round and encode into given memory, where there is a fast encoder.

    Args:
        x: float32, contiguous, no NaN where the format has none.
        fmt: a format for which ``encoder_for`` knows one.
        out: ``code_dtype(fmt)``, contiguous, as many elements; written.
        rounding: as ``encoder_for``.
        overflow: as ``encoder_for``.
        flush: as ``encoder_for``.

    Source: this module.

    >>> out = np.empty(1, np.uint16)
    >>> encode_into(np.float32([1.5]), FP16, out)
    >>> out.tolist()
    [15872]
    """
    write = encoder_for(fmt, rounding, overflow, flush)
    assert write is not None
    source, target = x.reshape(-1), out.reshape(-1)
    with np.errstate(all="ignore"), borrowed(np.float32, _ENCODED) as work:
        for start in range(0, source.size, _ENCODED):
            part = source[start : start + _ENCODED]
            write(part, target[start : start + _ENCODED], work.first(part.size))


def decode(codes: ArrayLike, fmt: FloatFormat) -> NDArray[np.float32]:
    """Numbers of codes.

    Args:
        codes: unsigned integers, any shape, below ``2**fmt.bits``.
        fmt: the format.

    Returns:
        float32, the same shape; every code is exact, NaN codes give NaN.

    Raises:
        TypeError: the codes are not unsigned integers.
        ValueError: a code has bits that the format does not.

    Source: IEEE 754-2019, 3.4; ``fmt.source`` for the formats that it does not know.

    >>> from mp_reference.spec.formats import E4M3FN
    >>> decode(np.array([0x38, 0x7E, 0x7F], np.uint8), E4M3FN)
    array([  1., 448.,  nan], dtype=float32)
    """
    require_format(fmt)
    given = np.asarray(codes)
    if given.dtype.kind != "u":
        raise TypeError(f"codes must be unsigned integers, got {given.dtype}; use codes.astype(np.{code_dtype(fmt)})")
    if fmt.bits < 8 * given.itemsize and given.size and int(given.max()) >> fmt.bits:
        raise ValueError(f"code {int(given.max()):#x} has more than the {fmt.bits} bits of {fmt.name}; mask it first")
    if fmt == BF16 and given.dtype == np.uint16:
        with np.errstate(invalid="ignore"):  # signalling NaNs are data
            return given.view(fmt.dtype).astype(np.float32, order="C")  # exact, and in one pass
    read = decoder_for(fmt)
    if read is None:
        return disassembled(given, fmt)
    given = np.ascontiguousarray(given, code_dtype(fmt)).reshape(given.shape)
    out = np.empty(given.shape, np.float32)
    flat, target = given.reshape(-1), out.reshape(-1)
    for start in range(0, flat.size, _DECODED):  # no buffer but the output itself
        read(flat[start : start + _DECODED], target[start : start + _DECODED])
    return out


def cast(
    x: ArrayLike,
    fmt: FloatFormat,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "ieee",
    subnormals: Subnormals = True,
    random_bits: RandomBits | None = None,
    *,
    random_width: int | None = None,
) -> NDArray[Any]:
    """Round numbers once into a format and store them in its dtype.

    Args:
        x: whatever ``round_to`` takes, any shape.
        fmt: the target format.
        rounding: as ``round_to``.
        overflow: as ``round_to``.
        subnormals: as ``round_to``.
        random_bits: as ``round_to``.
        random_width: as ``round_to``.

    Returns:
        Array of ``fmt.dtype``, shape of ``x``: float32 for tf32 and custom formats. What other libraries' casts do
        where this differs is in ``spec.casts``.

    Raises:
        TypeError: as ``round_to``.
        ValueError: as ``round_to``; or a NaN for a format that has none.

    Source: contract "round once": float64 and integers go straight into the format.

    >>> from mp_reference import BF16
    >>> cast(16973823, BF16)  # through float32 it would be 16973824
    array(1.69083e+07, dtype=bfloat16)
    """
    if require_format(fmt).dtype == np.float32:
        carrier = round_to(x, fmt, rounding, overflow, subnormals, random_bits, random_width=random_width)
        return np.asarray(carrier, np.float32)
    return encode(x, fmt, rounding, overflow, subnormals, random_bits, random_width=random_width).view(fmt.dtype)
