"""What a caller hands to ``round_to``, checked and brought to a floating array: numbers, random bits, an output."""

from __future__ import annotations

from fractions import Fraction
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.numerics.bits import native

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RandomBits", "carried", "carrier_of", "output_for", "random_bits_for", "require_threads"]

RandomBits = NDArray[np.unsignedinteger[Any]] | np.random.Generator

_CARRIERS = (np.dtype(np.float32), np.dtype(np.float64))
_WIDENED = ("float16", "bfloat16")  # and everything of one byte
_WHOLE = 2.0**53  # below it float64 has every integer


def carrier_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of ``dtype`` are exact: what the kernels compute in.

    Args:
        dtype: of what ``carried`` returns.

    Returns:
        float64 for float64, else float32.

    Source: every format of 16 bits or fewer is a subset of fp32.

    >>> carrier_of(np.dtype(np.float16))
    dtype('float32')
    """
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def carried(x: Any) -> NDArray[Any]:
    """Bring anything to a floating array without rounding, or with a rounding to odd that the next one cannot see.

    Args:
        x: as ``round_to``.

    Returns:
        float32, float64 or a narrower float in the machine's byte order, the shape of ``x``; ``x`` itself if it is one.

    Raises:
        TypeError: a dtype, or an element of an object array, that cannot be rounded once.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE TC 57 (2008), for rounding to odd.

    >>> carried([2**64 + 1, 0.5]).tolist()
    [1.8446744073709556e+19, 0.5]
    """
    values = native(x)
    listed = values.dtype == np.float64 and not isinstance(x, float | np.generic | np.ndarray)
    if listed and (np.abs(values) >= _WHOLE).any():  # integers among them may have been rounded already
        values = np.array(x, dtype=object)
    if values.dtype in _CARRIERS:
        return values
    if values.dtype.kind in "iub" and values.dtype.itemsize <= 4:
        return values.astype(np.float64)
    if values.dtype.kind in "iu":
        return _odd_from_integers(values)
    if values.dtype.kind == "O":
        return _odd_from_numbers(values.reshape(-1)).reshape(values.shape)
    if values.dtype.name in _WIDENED or (values.dtype.itemsize == 1 and "float" in values.dtype.name):
        return values
    raise _refusal(str(values.dtype))


def _refusal(got: str) -> TypeError:
    return TypeError(
        f"round_to takes float32, float64, integers, float16, ml_dtypes or Fraction, got {got}; convert "
        "exactly first, for example [Fraction(v) for v in x]"
    )


def _odd_from_integers(values: NDArray[Any]) -> NDArray[np.float64]:
    """64-bit integers to float64, to odd: 53 bits leave room for any rounding to 24 bits that follows."""
    pattern = values.astype(np.uint64)
    magnitude = np.where(values < 0, np.invert(pattern - np.uint64(1) * (values < 0)), pattern)
    long = magnitude >= np.uint64(2**53)
    dropped = np.uint64(2**11 - 1)  # 64 - 53 low bits may be lost
    sticky = (magnitude & ~dropped) | np.where(magnitude & dropped, np.uint64(2**11), np.uint64(0))
    exact = np.where(long, sticky, magnitude).astype(np.float64)
    return np.where(values < 0, -exact, exact)


def _odd_from_numbers(values: Iterable[Any]) -> NDArray[np.float64]:
    """Python numbers to float64: floats as they are, whatever a ``Fraction`` can be made of to odd."""
    numbers = []
    for value in values:
        number = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, float):  # signed zeros, infinities and NaN among them
            numbers.append(number)
            continue
        try:
            numbers.append(_odd_from_fraction(Fraction(number)))
        except (TypeError, ValueError, OverflowError):
            raise _refusal(f"an element of type {type(value).__name__}") from None
    return np.array(numbers, np.float64)


def _odd_from_fraction(value: Fraction) -> float:
    """A rational number to float64, to odd at 60 bits or fewer below its leading one."""
    numerator, denominator = abs(value.numerator), value.denominator
    shift = max(min(denominator.bit_length() - numerator.bit_length() + 53, 1074), -960)
    if shift >= 0:
        quotient, remainder = divmod(numerator << shift, denominator)
    else:
        quotient, remainder = divmod(numerator, denominator << -shift)
    odd = quotient if quotient.bit_length() <= 53 else (quotient >> 1 | (quotient & 1))
    scale = -shift if quotient.bit_length() <= 53 else 1 - shift
    if remainder:
        odd |= 1
    carried_value = float(np.ldexp(float(min(odd, 2**53)), scale))
    return -carried_value if value < 0 else carried_value


def random_bits_for(
    random_bits: RandomBits | None, width: int | None, rounding: str, shape: tuple[int, ...]
) -> tuple[RandomBits | None, int]:
    """Check the random bits against the rounding that wants them, or does not, and against what is rounded.

    Args:
        random_bits: as ``round_to``.
        width: as ``round_to``.
        rounding: as ``round_to``.
        shape: of what is rounded.

    Returns:
        The bits as an array, or the generator, or nothing; and how many of the low bits count.

    Raises:
        TypeError: bits that are not unsigned integers, or a width that is no integer.
        ValueError: bits missing, given without need or of another shape, or a width that they do not have.

    Source: this project's contract: an error tells the way out.

    >>> random_bits_for(np.uint8(3), None, "stochastic", (2,))
    (array(3, dtype=uint8), 8)
    """
    if rounding != "stochastic":
        if random_bits is not None or width is not None:
            raise ValueError(f"random_bits are for rounding='stochastic', not {rounding!r}; leave them out")
        return None, 0
    if random_bits is None:
        raise ValueError(
            "rounding='stochastic' needs random_bits: unsigned integers of the shape of x, or a generator such as "
            "np.random.default_rng(seed)"
        )
    bits: RandomBits = random_bits
    full = 23  # what float32 compares exactly; a generator's are drawn 32 at a time
    if not isinstance(bits, np.random.Generator):
        bits = np.asarray(random_bits)
        if bits.dtype.kind != "u":
            raise TypeError(f"random_bits must be unsigned integers, got {bits.dtype}; draw with dtype=np.uint32")
        if bits.shape != shape and not _broadcasts(bits.shape, shape):
            raise ValueError(
                f"random_bits have shape {bits.shape} and must broadcast to {shape}, that of x; draw as many"
            )
        full = 8 * bits.dtype.itemsize
    if width is None:
        return bits, full
    wanted: Any = width
    if not isinstance(wanted, Integral):
        raise TypeError(f"random_width={width!r} must be an integer; leave it out to use all bits")
    if not 1 <= int(wanted) <= full:
        raise ValueError(f"random_width={width} must lie in 1..{full}, the width of the random bits given")
    return bits, int(wanted)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    padded = (1,) * (len(to) - len(shape)) + shape
    return len(padded) == len(to) and all(n in (1, m) for n, m in zip(padded, to, strict=True))


def output_for(values: NDArray[Any], out: NDArray[Any] | None) -> NDArray[Any]:
    """Where to write: what the caller gave, if it fits, else a new array.

    Args:
        values: as ``carried`` returns them.
        out: as ``round_to``.

    Returns:
        An array of the carrier's dtype and the shape of ``values``.

    Raises:
        TypeError: ``out`` is no array.
        ValueError: ``out`` has another dtype or shape, or is read-only.

    Source: this project's contract: an error tells the way out.

    >>> output_for(np.zeros(2, np.float16), None).dtype
    dtype('float32')
    """
    dtype = carrier_of(values.dtype)
    if out is None:
        return np.empty(values.shape, dtype)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is a {type(out).__name__} and must be an array; allocate it with np.empty")
    if out.dtype != dtype or out.shape != values.shape:
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)} and must be {dtype}{list(values.shape)}, the carrier and shape of x; "
            "allocate it with np.empty"
        )
    if not out.flags.writeable:
        raise ValueError("out is read-only; leave it out, or allocate it with np.empty")
    return out


def require_threads(threads: int) -> None:
    """Refuse a number of threads that is none.

    Args:
        threads: as ``round_to``.

    Raises:
        ValueError: it is no whole number of at least 1.

    Source: this project's contract: an error tells the way out.

    >>> require_threads(2)
    """
    given: Any = threads
    if not (isinstance(given, int | Integral) and int(given) >= 1):
        raise ValueError(f"threads={threads} must be a whole number of at least 1; threads=1 starts none")
