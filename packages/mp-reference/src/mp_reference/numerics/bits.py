"""Codes of numbers: views, comparison by bits with NaN as a class, distance in ulps."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.spec.formats import FORMATS, FloatFormat

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "codes_of",
    "differing_bits",
    "format_of",
    "from_codes",
    "hex_of",
    "is_nan",
    "native",
    "ordinals",
    "same_bits",
    "ulp_distance",
]

_UNSIGNED: dict[int, np.dtype[Any]] = {width: np.dtype(f"uint{8 * width}") for width in (1, 2, 4, 8)}
_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def format_of(dtype: Any) -> FloatFormat:
    """Look up the format that a NumPy dtype stores.

    Args:
        dtype: anything ``np.dtype`` takes: float16, float32 or a floating dtype of ml_dtypes.

    Returns:
        The row of ``spec.formats``; float32 is fp32, never tf32.

    Raises:
        TypeError: the dtype stores no named format; the message says what to cast to.

    Source: the names are ml_dtypes' grammar.

    >>> format_of(np.float16).name
    'fp16'
    """
    return _row_of(np.dtype(dtype))


@lru_cache(maxsize=64)
def _row_of(dtype: np.dtype[Any]) -> FloatFormat:
    """The row, looked up once a dtype, as NumPy takes eight microseconds to put a dtype's name together."""
    name = dtype.name
    row = FORMATS.get(_NAMES.get(name, name))
    if row is None:
        raise TypeError(
            f"dtype {name} stores none of the named formats; use float32, float16 or an ml_dtypes dtype such as "
            "bfloat16, or widen to float32 and name the format yourself"
        )
    return row


def native(x: ArrayLike) -> NDArray[Any]:
    """An array in the byte order of this machine, in which codes can be viewed.

    Args:
        x: anything that ``np.asarray`` takes, such as an array read from a file of the other byte order.

    Returns:
        The array itself, or a copy with the same values.

    Source: NumPy's dtypes carry a byte order, formats do not.

    >>> native(np.array([1.0], ">f2")).dtype
    dtype('float16')
    """
    values = np.asarray(x)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def codes_of(x: NDArray[Any]) -> NDArray[Any]:
    """View numbers as their codes.

    Args:
        x: floating array of 1, 2, 4 or 8 bytes an element, any shape.

    Returns:
        uint8, uint16, uint32 or uint64 of the same shape, sharing memory where ``x`` has the machine's byte order;
        formats below 8 bits sit in the low bits.

    Source: IEEE 754-2019, 3.4 (interchange encodings).

    >>> codes_of(np.array([1.0, -0.0], np.float16)).tolist()
    [15360, 32768]
    """
    x = native(x)
    codes: NDArray[Any] = x.view(_UNSIGNED[x.dtype.itemsize])
    return codes


def from_codes(codes: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """View codes as numbers.

    Args:
        codes: unsigned integers as wide as ``dtype``, any shape.
        dtype: a floating dtype, of NumPy or ml_dtypes.

    Returns:
        Array of ``dtype`` in the machine's byte order, sharing memory where the codes have it.

    Raises:
        TypeError: the widths differ.

    Source: IEEE 754-2019, 3.4 (interchange encodings).

    >>> from_codes(np.array([0x3C00], np.uint16), np.float16)
    array([1.], dtype=float16)
    """
    codes = native(codes)
    wanted = _UNSIGNED[np.dtype(dtype).itemsize]
    if codes.dtype != wanted:
        raise TypeError(f"codes of {np.dtype(dtype).name} are {wanted.name}, got {codes.dtype.name}; cast them first")
    return codes.view(np.dtype(dtype).newbyteorder("="))


def is_nan(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a number is NaN; a signalling one is data here, not an accident.

    Args:
        x: floating array of NumPy or ml_dtypes, any shape.

    Returns:
        bool, the same shape.

    Source: IEEE 754-2019, 5.7.2 (isNaN signals no exception).

    >>> is_nan(np.float16([np.nan, 1.0])).tolist()
    [True, False]
    """
    with np.errstate(invalid="ignore"):
        nan: NDArray[np.bool_] = np.isnan(x)
    return nan


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare by bits, all NaNs being equal to each other.

    Args:
        a: floating array.
        b: floating array of the same dtype, broadcastable against ``a``.

    Returns:
        bool, the broadcast shape: True where the codes are equal or both values are NaN. ``-0.0`` differs from ``0.0``.

    Raises:
        TypeError: the dtypes differ; cast one of them, knowing which rounding that cast does.

    Source: payloads and signs of NaNs are not fixed by IEEE 754-2019, 6.2.3.

    >>> same_bits(np.array([0.0, np.nan]), np.array([-0.0, -np.nan])).tolist()
    [False, True]
    """
    a, b = native(a), native(b)
    if a.dtype != b.dtype:
        raise TypeError(f"same_bits needs one dtype, got {a.dtype} and {b.dtype}; cast one of them explicitly")
    equal: NDArray[np.bool_] = (codes_of(a) == codes_of(b)) | (is_nan(a) & is_nan(b))
    return equal


def differing_bits(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Count the elements that ``same_bits`` finds different.

    Args:
        a: floating array.
        b: floating array of the same dtype, broadcastable against ``a``.

    Returns:
        How many elements differ; 0 means that the arrays agree to the bit.

    Raises:
        TypeError: the dtypes differ.

    Source: see ``same_bits``.

    >>> differing_bits(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
    0
    """
    return int(np.count_nonzero(~same_bits(a, b)))


def hex_of(x: NDArray[Any]) -> list[str]:
    """Write codes in hexadecimal, for messages.

    Args:
        x: floating array, any shape.

    Returns:
        One string an element, C order, as many digits as the dtype has.

    Source: IEEE 754-2019, 3.4 (interchange encodings).

    >>> hex_of(np.array([1.0, -2.0], np.float16))
    ['0x3c00', '0xc000']
    """
    codes = codes_of(x)
    return [f"0x{int(code):0{2 * codes.dtype.itemsize}x}" for code in codes.reshape(-1)]


def ulp_distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """Count the representable steps between two numbers of one format.

    Args:
        a: array of float32, float16 or an ml_dtypes dtype.
        b: array of the same dtype, broadcastable against ``a``.

    Returns:
        int64, the broadcast shape: 0 for equal values (``-0.0`` and ``0.0``, any two NaNs), infinity one step past the
        largest finite number, ``2**62`` between a NaN and a number.

    Raises:
        TypeError: the dtypes differ or store no named format.

    Source: the codes of one sign are ordered like the numbers, IEEE 754-2019, 3.4.

    >>> ulp_distance(np.array([1.0], np.float16), np.array([1.0009765625], np.float16))
    array([1])
    """
    a, b = native(a), native(b)
    if a.dtype != b.dtype:
        raise TypeError(f"ulp_distance needs one dtype, got {a.dtype} and {b.dtype}; cast one of them explicitly")
    fmt = format_of(a.dtype)
    a_nan, b_nan = is_nan(a), is_nan(b)
    distance = np.abs(ordinals(codes_of(a), fmt) - ordinals(codes_of(b), fmt))
    distance = np.where(a_nan & b_nan, 0, distance)
    return np.where(a_nan ^ b_nan, np.int64(2**62), distance)


def ordinals(codes: NDArray[Any], fmt: FloatFormat) -> NDArray[np.int64]:
    """Number the codes of a format along the number line.

    Args:
        codes: unsigned integers, any shape.
        fmt: the format.

    Returns:
        int64: 0 for both zeros, then one more for each larger number, one less for each smaller; NaN codes are numbered
        as if they were numbers.

    Source: the codes of one sign are ordered like the numbers, IEEE 754-2019, 3.4.

    >>> from mp_reference.spec.formats import FP16
    >>> ordinals(np.array([0x0000, 0x8000, 0x0001, 0x8001], np.uint16), FP16)
    array([ 0,  0,  1, -1])
    """
    wide = codes.astype(np.int64)
    if not fmt.signed:
        return wide
    magnitude = wide & ((1 << (fmt.bits - 1)) - 1)
    return np.where(wide >> (fmt.bits - 1) & 1, -magnitude, magnitude)
