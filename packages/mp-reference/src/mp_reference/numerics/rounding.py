"""Rounding into a format: the only place that rounds.

``round_to`` keeps the carrier (float32 or float64) and makes every element representable; the work is done in chunks
by the kernels of ``rounding_kernels``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mp_reference.numerics.rounding_kernels import Kernel, kernel_for
from mp_reference.numerics.workspace import CHUNK, Workspace, borrowed

if TYPE_CHECKING:
    from mp_reference.spec.formats import FloatFormat

__all__ = ["OVERFLOWS", "ROUNDINGS", "Overflow", "Rounding", "Subnormals", "check_rounding", "round_to"]

Rounding = Literal[
    "nearest-even", "nearest-away", "toward-zero", "toward-positive", "toward-negative", "to-odd", "stochastic"
]
Overflow = Literal["ieee", "saturate"]
Subnormals = bool | Literal["flush-before", "flush-after"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
RandomBits = NDArray[np.unsignedinteger[Any]] | np.random.Generator

_SHARED_CHUNK = 8 * CHUNK  # with threads: the interpreter hands over at every ufunc call, so these must be long
_CARRIERS = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}
_WIDENED = ("float16", "bfloat16")  # and everything of one byte


def round_to(
    x: ArrayLike | Fraction,
    fmt: FloatFormat,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "ieee",
    subnormals: Subnormals = True,
    random_bits: RandomBits | None = None,
    *,
    random_width: int | None = None,
    out: NDArray[Any] | None = None,
    threads: int = 1,
) -> NDArray[Any]:
    """Round each value once to one that ``fmt`` represents, and keep the carrier.

    Args:
        x: float32, float64, integers of up to 64 bits, float16 or an ml_dtypes dtype (widened exactly), or ``Fraction``
            (one, or an object array of them); any shape and strides. NaN, infinities and signed zeros are legal.
        fmt: the target format.
        rounding: one of ``ROUNDINGS``. ``stochastic`` rounds the magnitude up where the discarded fraction f of an ulp
            and the random bits R, k of them, satisfy ``f + (R + 1/2) / 2**k >= 1``: the chance is f to k bits.
        overflow: ``ieee`` gives infinity (NaN where ``fmt`` has none, the largest number where it has neither) or the
            largest number, as the direction asks; ``saturate`` gives the largest number, also for infinities.
        subnormals: ``True`` keeps them; ``False`` or ``flush-after`` makes results below ``fmt.min_normal`` zero;
            ``flush-before`` makes values below it zero even where rounding would have brought them up to it.
        random_bits: for ``stochastic``: unsigned integers that broadcast against ``x``, or a ``Generator``.
        random_width: how many low bits of ``random_bits`` count; unless given, all of the dtype's, 23 of a generator's.
        out: where to write; may be ``x`` itself.
        threads: how many threads share the work of a large contiguous array; random bits of a generator are drawn by
            one, so that they do not depend on it.

    Returns:
        The shape of ``x``: float32 for float32 and narrower floats, float64 for float64, integers and ``Fraction``.
        Signs of zeros are kept (``fnuz`` formats have only +0); NaN stays NaN in every format.

    Raises:
        TypeError: a dtype that cannot be rounded once, or random bits that are not unsigned integers.
        ValueError: an unknown name, random bits missing or given without need, or an ``out`` that does not fit.

    Source: IEEE 754-2019, 4.3 and 7.4; overflow of 8-bit formats as in ``fmt.source``.

    >>> from mp_reference import BF16, E4M3FN
    >>> round_to(np.float64(1 + 2**-8 + 2**-40), BF16)  # through float32 it would be 1.0
    array(1.0078125)
    >>> round_to(np.array([464.0, 465.0]), E4M3FN, overflow="saturate")
    array([448., 448.])
    """
    check_rounding(rounding, overflow, subnormals)
    values = _carried(x)
    bits, width = _random(random_bits, random_width, rounding)
    if out is None:
        out = np.empty(values.shape, _carrier(values.dtype))
    elif out.dtype != _carrier(values.dtype) or out.shape != values.shape:
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)} and must be {_carrier(values.dtype)}{list(values.shape)}, the "
            "carrier and shape of x; allocate it with np.empty"
        )
    kernel = kernel_for(fmt, rounding, overflow, flush_of(subnormals), _CARRIERS[out.dtype])
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    spans = _spans(values, out, bits, threads)
    if len(spans) > 1:
        with ThreadPoolExecutor(len(spans)) as pool:
            for done in [pool.submit(_run, kernel, *span, width, _SHARED_CHUNK) for span in spans]:
                done.result()
    else:
        _run(kernel, values, out, bits, width)
    return out


def _spans(
    x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None, threads: int
) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]]:
    """The array in as many equal parts as threads are worth it: none where chunks are few or strides odd."""
    if threads == 1:
        return []
    arrays = [x, out] if bits is None else [x, out, bits]
    whole = all(isinstance(a, np.ndarray) and a.flags.c_contiguous and a.shape == x.shape for a in arrays)
    if not whole or x.size < 2 * _SHARED_CHUNK:
        return []
    step = -(-x.size // (threads * _SHARED_CHUNK)) * _SHARED_CHUNK
    flat = [a.reshape(-1) for a in arrays if isinstance(a, np.ndarray)]
    parts = [[a[start : start + step] for a in flat] for start in range(0, x.size, step)]
    return [(part[0], part[1], part[2] if len(part) > 2 else None) for part in parts]


def check_rounding(rounding: str, overflow: str = "ieee", subnormals: object = True) -> None:
    """Refuse unknown names, with the list of known ones.

    Args:
        rounding: must be in ``ROUNDINGS``.
        overflow: must be in ``OVERFLOWS``.
        subnormals: must be a bool, ``flush-before`` or ``flush-after``.

    Raises:
        ValueError: one of them is unknown.

    Source: the names are this project's own.

    >>> check_rounding("up")
    Traceback (most recent call last):
    ...
    ValueError: rounding='up' must be one of 'nearest-even', 'nearest-away', 'toward-zero', 'toward-positive',
    'toward-negative', 'to-odd', 'stochastic'
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} must be one of {', '.join(map(repr, ROUNDINGS))}")
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow={overflow!r} must be one of {', '.join(map(repr, OVERFLOWS))}")
    if subnormals not in (True, False, "flush-before", "flush-after"):
        raise ValueError(f"subnormals={subnormals!r} must be True, False, 'flush-before' or 'flush-after'")


def flush_of(subnormals: Subnormals) -> Literal["", "before", "after"]:
    """The kernels' word for what happens to subnormals.

    Args:
        subnormals: the public choice.

    Returns:
        Nothing for keeping them, else when they are flushed.

    Source: this module.

    >>> flush_of(False)
    'after'
    """
    if subnormals is True:
        return ""
    return "before" if subnormals == "flush-before" else "after"


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of ``dtype`` are exact: what the kernels compute in."""
    if dtype.kind == "f" and dtype.itemsize == 8:
        return np.dtype(np.float64)
    return np.dtype(np.float32)


def _carried(x: ArrayLike | Fraction) -> NDArray[Any]:
    """Bring anything to a floating array without rounding, or with a rounding to odd that the next one cannot see."""
    values = np.asarray(x)
    if values.dtype in _CARRIERS:
        return values
    if values.dtype.kind in "iub" and values.dtype.itemsize <= 4:
        return values.astype(np.float64)
    if values.dtype.kind in "iu":
        return _odd_from_integers(values)
    if values.dtype.kind == "O":
        flat = [_odd_from_fraction(Fraction(value)) for value in values.reshape(-1)]
        return np.array(flat, np.float64).reshape(values.shape)
    narrow = values.dtype.name in _WIDENED or (values.dtype.itemsize == 1 and "float" in values.dtype.name)
    if narrow:
        return values
    raise TypeError(
        f"round_to takes float32, float64, integers, float16, ml_dtypes or Fraction, got {values.dtype}; convert "
        "exactly first, for example [Fraction(v) for v in x]"
    )


def _odd_from_integers(values: NDArray[Any]) -> NDArray[np.float64]:
    """64-bit integers to float64, to odd: 53 bits leave room for any rounding to 24 bits that follows."""
    magnitude = np.where(values < 0, ~values.astype(np.uint64) + np.uint64(1), values.astype(np.uint64))
    long = magnitude >= np.uint64(2**53)
    dropped = np.uint64(2**11 - 1)  # 64 - 53 low bits may be lost
    sticky = (magnitude & ~dropped) | np.where(magnitude & dropped, np.uint64(2**11), np.uint64(0))
    exact = np.where(long, sticky, magnitude).astype(np.float64)
    return np.where(values < 0, -exact, exact)


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
    carried = float(np.ldexp(float(min(odd, 2**53)), scale))
    return -carried if value < 0 else carried


def _random(
    random_bits: RandomBits | None, width: int | None, rounding: str
) -> tuple[NDArray[Any] | np.random.Generator | None, int]:
    """Check the random bits against the rounding that wants them, or does not."""
    if rounding != "stochastic":
        if random_bits is not None or width is not None:
            raise ValueError(f"random_bits are for rounding='stochastic', not {rounding!r}; leave them out")
        return None, 0
    if random_bits is None:
        raise ValueError(
            "rounding='stochastic' needs random_bits: unsigned integers of the shape of x, or a generator such as "
            "np.random.default_rng(seed)"
        )
    if isinstance(random_bits, np.random.Generator):
        bits: NDArray[Any] | np.random.Generator = random_bits
        full = 23  # what float32 compares exactly; drawn 32 at a time
    else:
        bits = np.asarray(random_bits)
        if bits.dtype.kind != "u":
            raise TypeError(f"random_bits must be unsigned integers, got {bits.dtype}; draw with dtype=np.uint32")
        full = 8 * bits.dtype.itemsize
    width = full if width is None else width
    if not 1 <= width <= full:
        raise ValueError(f"random_width={width} must lie in 1..{full}, the width of the random bits given")
    return bits, width


def _run(
    kernel: Kernel,
    x: NDArray[Any],
    out: NDArray[Any],
    bits: NDArray[Any] | np.random.Generator | None,
    width: int,
    chunk: int = CHUNK,
) -> None:
    """Walk over the array in chunks that stay in the cache, whatever the strides."""
    given = bits if isinstance(bits, np.ndarray) else x
    plain = (
        all(each.flags.c_contiguous and each.shape == out.shape for each in (x, out, given)) and x.dtype == out.dtype
    )
    if plain and x.size <= CHUNK and (x is out or not np.may_share_memory(x, out)):
        random = given.reshape(-1) if given is bits else _drawn(bits, x.size)
        with np.errstate(all="ignore"), borrowed(out.dtype) as work:
            kernel(x.reshape(-1), out.reshape(-1), work, random, width)
        return
    operands, dtypes = [x, out], [out.dtype, out.dtype]
    kinds: Any = [["readonly", "overlap_assume_elementwise"], ["writeonly", "overlap_assume_elementwise"]]
    if isinstance(bits, np.ndarray):
        operands.append(np.broadcast_to(bits, x.shape))
        kinds.append(["readonly"])
        dtypes.append(bits.dtype)
    flags: Any = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    walk = np.nditer(operands, flags, kinds, dtypes, order="K", casting="same_kind", buffersize=chunk)
    space = borrowed(out.dtype) if chunk == CHUNK else nullcontext(Workspace(chunk, out.dtype))
    with walk, np.errstate(all="ignore"), space as work:
        for chunks in walk:
            source, target, *drawn = chunks
            random = drawn[0] if drawn else _drawn(bits, source.size)
            kernel(source, target, work, random, width)


def _drawn(bits: NDArray[Any] | np.random.Generator | None, size: int) -> NDArray[np.uint32] | None:
    """Bits from a generator, if that is what there is."""
    return np.frombuffer(bits.bytes(4 * size), np.uint32) if isinstance(bits, np.random.Generator) else None
